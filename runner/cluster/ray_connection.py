"""This process's connection to a cluster of Ray, which all who use it share, and who leaves last ends."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import re
import socket
import threading
from collections.abc import Mapping
from tempfile import TemporaryDirectory
from typing import Any, Final

from runner.cluster.ray_actors import ray_module
from runner.errors import BadOption

__all__ = ["CONNECTION", "uploaded"]

STORE_BYTES: Final = 512 * 1024**2
"""The object store of a cluster of our own: weights that are put into it; what does not fit goes to a disk."""

OWN_CPUS: Final = 10_000
"""What a cluster of our own counts: all that is started by this process later finds room, as processes would."""

RIGHT_ADDRESS: Final = (
    "Give the address that `ray start --head` told (host:port), 'auto' on a machine of a cluster that stands, or none "
    "for one of this machine's own."
)

CONNECT_SECONDS: Final = 10.0
"""How long a cluster that stands may take to answer at all."""

_AUTH_MODE: Final = "RAY_AUTH_MODE"

_LOOPBACK: Final = (
    "Ray takes a loopback address for this machine's address in its network, so a head that was started on loopback "
    "alone cannot be reached."
)

_MISMATCH: Final = re.compile(
    r"The cluster was started with:\s+Ray: (\S+)\s+Python: (\S+)\s+This process .*:\s+Ray: (\S+)\s+Python: (\S+)"
)
"""Ray's words where it is of another version here than there."""


class Connection:
    """The connection. Ray has one of it a process, so that who leaves last ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: set[object] = set()
        self._ours = False
        """Whether it was made here; else it was there before, and stays."""
        self._own = False
        """Whether the cluster was started with it."""
        self._auth_mode: str | None = None
        """How this process was to show who it is to clusters before it was made."""

    def enter(self, user: object, *, who: str, address: str | None) -> None:
        """Reach the cluster, or start one, unless this process is connected already.

        Args:
            user: who uses it until it leaves.
            who: what errors call that.
            address: of a cluster that stands; None takes RAY_ADDRESS, or else starts one on this machine.

        Raises:
            BadOption: there is none, or this process is connected to another one.
        """
        with self._lock:
            if ray_module().is_initialized():
                self._require_this_one(who, address)
            else:
                self._make(who, address)
            self._users.add(user)

    def leave(self, user: object) -> None:
        """End the connection where it was made here and nobody else uses it, and the cluster where that is our own."""
        with self._lock:
            self._users.discard(user)
            if self._ours and not self._users:
                self._ours = self._own = False
                ray_module().shutdown()
                _set_auth_mode(self._auth_mode)

    def _require_this_one(self, who: str, address: str | None) -> None:
        # Where somebody else connected this process, what the environment says is their affair.
        wanted = address or (os.environ.get("RAY_ADDRESS") if self._ours else None)
        if wanted is None:
            return
        there: str = ray_module().get_runtime_context().gcs_address
        if not self._own and (wanted == "auto" or _meet(wanted, there)):
            return
        which = f"one of this machine's own ({there})" if self._own else f"the one at {there!r}"
        raise BadOption(
            f"{_given(who, address, wanted)}: this process is connected to another cluster of Ray already, "
            f"{which}, and a process has one connection. Give all that are used together the same address."
        )

    def _make(self, who: str, address: str | None) -> None:
        given, address = address, address or os.environ.get("RAY_ADDRESS")
        own = address is None
        if address is not None:
            _require_listener(who, given, address)
        auth_mode = os.environ.get(_AUTH_MODE)
        settings: dict[str, Any] = {
            "include_dashboard": False,
            "num_cpus": OWN_CPUS,
            "object_store_memory": STORE_BYTES,
        }
        try:
            ray_module().init(
                address="local" if own else address, logging_level=logging.ERROR, **(settings if own else {})
            )
        except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
            if address is None:
                _set_auth_mode(auth_mode)
                raise BadOption(f"{who}: no cluster of Ray could be started on this machine: {error}") from error
            if (versions := _MISMATCH.search(str(error))) is not None:
                raise BadOption(f"{_given(who, given, address)}: {_told(address, *versions.groups())}") from error
            # Our own connection found somebody there, and Ray looked elsewhere.
            loopback = f" {_LOOPBACK}" if _is_loopback(address) else ""
            told = str(error).rstrip(".")
            raise BadOption(f"{_nowhere(who, given, address)}: {told}. {RIGHT_ADDRESS}{loopback}") from error
        self._ours, self._own = True, own
        self._auth_mode = auth_mode


CONNECTION: Final = Connection()


def uploaded(who: str, runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """A `runtime_env` as an actor takes it: local folders are brought to the cluster, as Ray does for a whole process.

    Raises:
        BadOption: Ray does not take it.
    """
    if not runtime_env:
        return {}
    made = dict(runtime_env)
    try:
        with TemporaryDirectory() as scratch:
            for kind in ("py_modules", "working_dir"):
                module = importlib.import_module(f"ray._private.runtime_env.{kind}")
                upload = getattr(module, f"upload_{kind}_if_needed")
                # Some releases of Ray do that without being asked.
                asked = {"include_gitignore"} & inspect.signature(upload).parameters.keys()
                made = upload(made, scratch_dir=scratch, **dict.fromkeys(asked, True))
        made.pop("excludes", None)
        return dict(importlib.import_module("ray.runtime_env").RuntimeEnv(**made))
    except Exception as error:  # whatever Ray finds wrong with it
        raise BadOption(f"{who}(runtime_env=...): Ray does not take it: {error}") from error


def _require_listener(who: str, given: str | None, address: str) -> None:
    """Ask by ourselves first: Ray would go on asking for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():  # "auto" finds one on this machine, or says at once that there is none
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise BadOption(f"{_nowhere(who, given, address)}: nothing answers there ({error}). {RIGHT_ADDRESS}") from None


def _given(who: str, given: str | None, address: str) -> str:
    return f"{who}(address={given!r})" if given is not None else f"{who}(RAY_ADDRESS={address!r})"


def _nowhere(who: str, given: str | None, address: str | None) -> str:
    named = f"address={given!r}" if given is not None else "RAY_ADDRESS"
    return f"{who}({named}): no cluster of Ray at {address!r}"


def _told(address: str, ray_there: str, python_there: str, ray_here: str, python_here: str) -> str:
    fix = [f"pip install 'ray=={ray_there}' on this machine"] if ray_there != ray_here else []
    fix += [f"start the script with Python {python_there}"] if python_there != python_here else []
    return (
        f"the cluster of Ray at {address!r} has Ray {ray_there} and Python {python_there}, and this process, on "
        f"{socket.gethostname()}, has Ray {ray_here} and Python {python_here}: they have to be the same on every "
        f"machine. Either {' and '.join(fix)}, or start the cluster with what is here."
    )


def _meet(one: str, other: str) -> bool:
    """Whether two addresses are of one place; names have several numbers, of both kinds."""
    return not _places(one).isdisjoint(_places(other))


def _places(address: str) -> set[tuple[str, str]]:
    host, _, port = address.rpartition(":")
    # Ray tells the number by which other machines know this one.
    host = ray_module().util.get_node_ip_address() if _is_loopback(address) else host.strip("[]")
    try:
        return {(str(found[-1][0]), port) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return {(host, port)}


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return host == "localhost" or host.startswith("127.") or host == "::1"


def _set_auth_mode(mode: str | None) -> None:
    """Have the next cluster treated as if this process had reached none before.

    Who starts a cluster of its own asks for tokens from then on, as Ray has it; one that stands and knows no tokens
    would end every actor as soon as it is made.
    """
    if os.environ.get(_AUTH_MODE) == mode:
        return
    # Ray keeps what it has read where a variable is gone, so that the default is to be said once.
    os.environ[_AUTH_MODE] = mode or "disabled"
    raylet = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
    if mode is None:
        del os.environ[_AUTH_MODE]
