"""A socket that listens on the loopback interface inside a container, and is served from outside."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from typing import Final

from runner.errors import SandboxFailed

__all__ = ["listen_inside"]

NETWORK_NAMESPACE_BITS: Final = 0x40000000
"""The flag CLONE_NEWNET of the kernel."""

MAX_BACKLOG: Final = 128
"""Maximum number of connections that wait to be accepted."""


def listen_inside(pid: int, port: int) -> socket.socket:
    """Return a socket that listens at 127.0.0.1:`port` in the network namespace of a process.

    The call blocks for a short time.

    Raises:
        SandboxFailed: the namespace cannot be entered, or the port is in use in the namespace.
    """
    found: list[socket.socket | OSError] = []

    def enter_and_listen() -> None:
        try:
            _enter_namespace(f"/proc/{pid}/ns/net")
            listener = socket.create_server(("127.0.0.1", port), backlog=MAX_BACKLOG, reuse_port=True)
            listener.setblocking(False)
            found.append(listener)
        except OSError as error:
            found.append(error)

    # A separate thread does this: only this thread enters the namespace, and it ends afterwards.
    thread = threading.Thread(target=enter_and_listen, daemon=True)
    thread.start()
    thread.join()
    result = found[0]
    if isinstance(result, OSError):
        raise SandboxFailed(
            f"the endpoint cannot be reached from the sandbox ({result.strerror or result}): this needs root and a "
            "container engine on the same machine."
        ) from result
    return result


def _enter_namespace(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # `setns` is called in libc, since `os.setns` exists only from Python 3.12 on.
        library = ctypes.CDLL(None, use_errno=True)
        if library.setns(descriptor, NETWORK_NAMESPACE_BITS) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(descriptor)
