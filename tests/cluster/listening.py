"""A server on loopback that answers every connection in one way."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["HTTP2", "listening"]

HTTP2 = b"\0\0\0\4\0\0\0\0\0"
"""The first frame of an HTTP/2 server, such as the head of a Ray cluster."""


@contextmanager
def listening(answer: bytes | None) -> Iterator[str]:
    """Yield the address of a server that sends this answer to every connection, or never answers."""

    class Answering(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(100)
            if answer is None:
                ended.wait(10)
            else:
                self.request.sendall(answer)

    ended = threading.Event()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        ended.set()
        server.shutdown()
