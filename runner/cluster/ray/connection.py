"""This process's connection to a Ray cluster, shared by all its users. The last user closes it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import re
import socket
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self

from runner.cluster.ray.actors import ray_module
from runner.errors import BadOption

__all__ = ["CONNECTION", "VARIABLES", "RaySession", "admit", "give_own_token", "restore_variables", "uploaded"]

_MODE: Final = "RAY_AUTH_MODE"
_TOKEN: Final = "RAY_AUTH_TOKEN"
_PATH: Final = "RAY_AUTH_TOKEN_PATH"

VARIABLES: Final = (_MODE, _PATH)
"""The environment variables that a connection may set. They are restored when it is closed."""

_FIX: Final = (
    "Copy the file ~/.ray/auth_token of the machine of `ray start --head` to the same place on this machine, or name a "
    "copy in RAY_AUTH_TOKEN_PATH; or set RAY_AUTH_MODE=disabled on every machine before `ray start`, which then "
    "accepts everybody who can reach the head. Ray requires tokens if that file exists, and creates it for a program "
    "that starts its own cluster."
)


def give_own_token(until_left: ExitStack) -> None:
    """Create a token for a cluster of this process, in a file that other clusters do not read.

    Ray would write a token to ~/.ray/auth_token, and the next `ray start` on this machine would require it from all
    machines. Nothing is done if the user has a token or has set another mode, or if this Ray has no tokens.

    Args:
        until_left: removes the token when it is closed, before `restore_variables` is called.
    """
    default = Path.home() / ".ray" / "auth_token"
    if os.environ.get(_MODE, "token") != "token" or {_TOKEN, _PATH} & os.environ.keys() or default.exists():
        return
    name = "ray._private.authentication.authentication_token_generator"
    try:
        make = importlib.import_module(name).generate_new_authentication_token
    except (ImportError, AttributeError):  # an older Ray has no tokens
        return
    folder = until_left.enter_context(TemporaryDirectory(prefix="deltarunner-ray-", ignore_cleanup_errors=True))
    path = Path(folder) / "auth_token"
    path.write_text(make())
    os.environ[_PATH] = str(path)
    _read_again()


def admit(address: str) -> str | None:
    """Set Ray's authentication mode for a running cluster: "token" only if it refuses connections without a token.

    By default, Ray sends a token only if the address is "auto", but then to any cluster. A cluster without tokens ends
    every actor of a process that sends one. If the user has set a mode, only this mode is tried.

    Returns:
        The reason and the fix if the cluster refuses every mode that this process can use; None if the cluster accepts
        one, or does not answer.
    """
    raylet = importlib.import_module("ray._raylet")
    loader = getattr(raylet, "AuthenticationTokenLoader", None)
    if loader is None:  # an older Ray has no tokens
        return None
    try:
        services: Any = importlib.import_module("ray._private.services")
        place: str = services.canonicalize_bootstrap_address_or_die(address, None)
    except Exception:  # there is no cluster, which `ray.init` reports too
        return None
    has_token: bool = loader.instance().has_token(ignore_auth_mode=True)
    given = os.environ.get(_MODE)
    modes = ("disabled", "token") if given is None else (given,)
    for mode in modes:
        if mode == "token" and not has_token:  # without a token, Ray would end this process
            continue
        _set_mode(mode)
        try:
            raylet.GcsClient(address=place)
        except importlib.import_module("ray.exceptions").AuthenticationError:
            continue
        except Exception:  # any other error is reported by `ray.init`
            pass
        if given is None and mode == "disabled" and not (address == "auto" and has_token):
            _set_mode(None)
        return None
    has = "this machine has none" if not has_token else "this machine has another one"
    asked = "this process has RAY_AUTH_MODE=disabled" if given == "disabled" else has
    return f"the cluster requires a token, and {asked}. {_FIX}"


def restore_variables(before: Mapping[str, str | None]) -> None:
    """Set the variables to their values in `before`, so that the next connection begins without settings of this one.

    Otherwise, a process that has started its own cluster would require tokens from then on, and a running cluster
    without tokens would end every actor of this process as soon as the actor is made.
    """
    mode = before[_MODE]
    path = before[_PATH]
    if path is None:
        os.environ.pop(_PATH, None)
    else:
        os.environ[_PATH] = path
    if os.environ.get(_MODE) != mode:
        _set_mode(mode)


def _set_mode(mode: str | None) -> None:
    # Ray keeps the value of a variable that was deleted, so the default must be set once.
    os.environ[_MODE] = mode or "disabled"
    _read_again()
    if mode is None:
        del os.environ[_MODE]


def _read_again() -> None:
    raylet = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


STORE_BYTES: Final = 512 * 1024**2
"""Size of the object store of a cluster that this process starts: room for weights. Further objects are on disk."""

OWN_CPU_COUNT: Final = 10_000
"""CPU count of a cluster that this process starts: large, so that there is room for all that the process starts."""

RIGHT_ADDRESS: Final = (
    "Give the address that `ray start --head` printed (host:port), 'auto' on a machine of a running cluster, or none "
    "to start a cluster on this machine."
)

CONNECT_SECONDS: Final = 10.0
"""Seconds in which a running cluster must answer."""

HTTP2_BEGIN: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The first bytes of a client of HTTP/2: the preface, and a SETTINGS frame without settings."""

HTTP2_SETTINGS: Final = b"\4"
"""The type of the frame that a server of HTTP/2 sends first."""

HTTP2_FRAME_HEADER_BYTES: Final = 9
"""Length of a frame's header; the type is its fourth byte."""

_LOOPBACK: Final = (
    "Ray replaces a loopback address by this machine's address in its network, so a head that listens only on loopback "
    "cannot be reached: start it with this machine's address (`ray start --head --node-ip-address=...`)."
)

_MISMATCH: Final = re.compile(
    r"The cluster was started with:\s+Ray: (\S+)\s+Python: (\S+)\s+This process .*:\s+Ray: (\S+)\s+Python: (\S+)"
)
"""Pattern of Ray's error about different versions. Groups: Ray and Python of the cluster, then of this process."""


@dataclass(frozen=True, slots=True)
class RaySession:
    """This process's connection from one `ray.init` to the next `ray.shutdown`; other code may call both.

    Ray starts another cluster by itself when it is called without a connection, and refuses handles of an earlier
    cluster. So nothing may be called for a session that is over.
    """

    address: str
    job: str

    @classmethod
    def current(cls) -> Self | None:
        """Return the session that is open; None without one."""
        if not ray_module().is_initialized():
            return None
        context = ray_module().get_runtime_context()
        return cls(context.gcs_address, context.get_job_id())


class _RayThread(threading.Thread):
    """The thread that calls `ray.init`, and `ray.shutdown` at the end.

    Ray makes the kernel kill a cluster's processes when the thread that started them ends, even if its process
    continues. So this thread runs until the connection is closed. A thread of a pool would end after some idle
    seconds.

    Args:
        settings: the arguments of `ray.init`.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(name="deltarunner ray", daemon=True)
        self._settings = settings
        self._connected = threading.Event()
        self._left = threading.Event()
        self._still_open = True
        self._error: BaseException | None = None

    def connect(self) -> None:
        """Start the thread, and return once `ray.init` has returned. Raises the errors of `ray.init`."""
        self.start()
        self._connected.wait()
        self._raise_error()

    def disconnect(self, *, still_open: bool) -> None:
        """Call `ray.shutdown` if the session is still open, and end the thread. Raises the errors of `ray.shutdown`."""
        self._still_open = still_open
        self._left.set()
        self.join()
        self._raise_error()

    def run(self) -> None:
        try:
            ray_module().init(**self._settings)
            self._connected.set()
            self._left.wait()
            if self._still_open:
                ray_module().shutdown()
        except BaseException as error:
            self._error = error
        finally:
            self._connected.set()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


class Connection:
    """The connection of this process to Ray. Ray allows one per process, so its last user closes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: set[object] = set()
        self._thread: _RayThread | None = None
        """The thread that connected; None if the process was connected before. Such a connection stays open."""
        self._session: RaySession | None = None
        self._own = False
        """True if the cluster was started with the connection."""
        self._until_left = ExitStack()
        """A stack that restores the authentication settings that this process had before the connection."""
        self._kept: list[ExitStack] = []
        """Stacks that are not closed, so that their settings stay until the process ends."""

    def enter(self, user: object, *, who: str, address: str | None) -> None:
        """Connect to a cluster, or start one, unless this process is connected already.

        Args:
            user: an object that uses the connection until it is passed to `leave`.
            who: the name of the user in errors.
            address: address of a running cluster; None for RAY_ADDRESS, or else a new cluster on this machine.

        Raises:
            BadOption: the cluster cannot be reached or used, or this process is connected to another one.
        """
        with self._lock:
            session = RaySession.current()
            if session != self._session:  # other code has ended our connection, or has connected the process
                self._end()
                self._users.clear()
            if session is not None:
                self._require_this_one(who, address)
                _require_head(who, session.address)
            else:
                self._make(who, address)
            self._session = RaySession.current()
            self._users.add(user)

    def leave(self, user: object) -> None:
        """Remove a user. If no user is left, close the connection if `enter` made it.

        A cluster that was started with the connection then ends.
        """
        with self._lock:
            self._users.discard(user)
            if not self._users:
                self._end()

    def _end(self) -> None:
        thread, self._thread, self._own = self._thread, None, False
        session, self._session = self._session, None
        if thread is None:
            return
        there = RaySession.current()
        if there is not None and there != session:
            # Other code has started a cluster with our token, so the token stays set.
            self._kept.append(self._until_left.pop_all())
        try:
            thread.disconnect(still_open=there == session)
        finally:
            self._until_left.close()

    def _require_this_one(self, who: str, address: str | None) -> None:
        # RAY_ADDRESS is not checked if other code connected this process.
        wanted = address or (os.environ.get("RAY_ADDRESS") if self._thread is not None else None)
        if wanted is None:
            return
        there: str = ray_module().get_runtime_context().gcs_address
        if not self._own and (wanted == "auto" or _meet(wanted, there)):
            return
        which = f"one that was started on this machine ({there})" if self._own else f"the one at {there!r}"
        raise BadOption(
            f"{_given(who, address, wanted)}: this process is connected to another cluster of Ray already, "
            f"{which}, and a process has only one connection. Give all objects of this process the same address."
        )

    def _make(self, who: str, address: str | None) -> None:
        given, address = address, address or os.environ.get("RAY_ADDRESS")
        own = address is None
        settings: dict[str, Any] = {"address": "local" if own else address, "logging_level": logging.ERROR}
        with ExitStack() as until_left:
            until_left.callback(restore_variables, {name: os.environ.get(name) for name in VARIABLES})
            if address is None:
                settings |= {"include_dashboard": False, "num_cpus": OWN_CPU_COUNT, "object_store_memory": STORE_BYTES}
                give_own_token(until_left)
            else:
                _require_listener(who, given, address)
                if (refused := admit(address)) is not None:
                    raise BadOption(f"{_nowhere(who, given, address)} accepts this process: {refused}")
            thread = _RayThread(settings)
            try:
                thread.connect()
            except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
                if address is None:
                    raise BadOption(f"{who}: no cluster of Ray could be started on this machine: {error}") from error
                if (versions := _MISMATCH.search(str(error))) is not None:
                    raise BadOption(
                        f"{_given(who, given, address)}: {_other_versions(address, *versions.groups())}"
                    ) from error
                # `_require_listener` found a listener, but Ray may have tried another address of this machine.
                loopback = f" {_LOOPBACK}" if _is_loopback(address) else ""
                reason = str(error).rstrip(".")
                raise BadOption(f"{_nowhere(who, given, address)}: {reason}. {RIGHT_ADDRESS}{loopback}") from error
            self._thread, self._own, self._until_left = thread, own, until_left.pop_all()


CONNECTION: Final = Connection()


def uploaded(who: str, runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """Upload the local folders of a `runtime_env` to the cluster, as `ray.init` does.

    Returns:
        The `runtime_env` with the addresses of the uploaded folders.

    Raises:
        BadOption: Ray does not accept the `runtime_env`.
    """
    if not runtime_env:
        return {}
    made = dict(runtime_env)
    try:
        with TemporaryDirectory() as scratch:
            for kind in ("py_modules", "working_dir"):
                module = importlib.import_module(f"ray._private.runtime_env.{kind}")
                upload = getattr(module, f"upload_{kind}_if_needed")
                # Releases of Ray without this parameter always respect .gitignore files.
                asked = {"include_gitignore"} & inspect.signature(upload).parameters.keys()
                made = upload(made, scratch_dir=scratch, **dict.fromkeys(asked, True))
        made.pop("excludes", None)
        return dict(importlib.import_module("ray.runtime_env").RuntimeEnv(**made))
    except Exception as error:  # any error of Ray
        raise BadOption(f"{who}(runtime_env=...): Ray refuses this value: {error}. Correct it.") from error


def _require_listener(who: str, given: str | None, address: str) -> None:
    """Raise BadOption if no server of HTTP/2 listens at the address: Ray would try to connect for most of a minute."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():  # "auto" finds a cluster on this machine, or fails at once
        return
    try:
        peer = socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS)
    except OSError as error:
        raise BadOption(f"{_nowhere(who, given, address)}: nothing answers there ({error}). {RIGHT_ADDRESS}") from None
    with peer:
        # With TLS only Ray itself can check the listener.
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("0", "false") and not _speaks_http2(peer):
            raise BadOption(f"{_nowhere(who, given, address)}: the server there is not Ray. {RIGHT_ADDRESS}")


def _require_head(who: str, address: str) -> None:
    """Raise BadOption if the cluster is gone: Ray would try to connect for a minute, and then end this process."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise BadOption(
            f"{who}: this process is connected to a cluster of Ray that is gone, the one at {address} ({error}). A "
            "cluster ends with the thread that called ray.init(). Start this process again, and call ray.init() in the "
            f"main thread, or let {who} connect."
        ) from None


def _speaks_http2(peer: socket.socket) -> bool:
    """Return True if a server answers the first bytes of HTTP/2. The head of a cluster answers, as a gRPC server."""
    answer = b""
    try:
        peer.sendall(HTTP2_BEGIN)
        while len(answer) < HTTP2_FRAME_HEADER_BYTES and (more := peer.recv(HTTP2_FRAME_HEADER_BYTES)):
            answer += more
    except OSError:  # a time-out is an OSError too
        return False
    return answer[3:4] == HTTP2_SETTINGS


def _given(who: str, given: str | None, address: str) -> str:
    return f"{who}(address={given!r})" if given is not None else f"{who}(RAY_ADDRESS={address!r})"


def _nowhere(who: str, given: str | None, address: str | None) -> str:
    named = f"address={given!r}" if given is not None else "RAY_ADDRESS"
    return f"{who}({named}): no cluster of Ray at {address!r}"


def _other_versions(address: str, ray_there: str, python_there: str, ray_here: str, python_here: str) -> str:
    fix = [f"pip install 'ray=={ray_there}' on this machine"] if ray_there != ray_here else []
    fix += [f"start the script with Python {python_there}"] if python_there != python_here else []
    return (
        f"the cluster of Ray at {address!r} has Ray {ray_there} and Python {python_there}, and this process, on "
        f"{socket.gethostname()}, has Ray {ray_here} and Python {python_here}: they have to be the same on every "
        f"machine. Either {' and '.join(fix)}, or start the cluster with the versions of this process."
    )


def _meet(one: str, other: str) -> bool:
    """Return True if two addresses have the same host and port. A host name may have several IP addresses."""
    return not _places(one).isdisjoint(_places(other))


def _places(address: str) -> set[tuple[str, str]]:
    host, _, port = address.rpartition(":")
    # Ray has the address by which other machines reach this one.
    host = ray_module().util.get_node_ip_address() if _is_loopback(address) else host.strip("[]")
    try:
        return {(str(found[-1][0]), port) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return {(host, port)}


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return host == "localhost" or host.startswith("127.") or host == "::1"
