"""Workers as actors of Ray, on a cluster that stands or one that is started here."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

import anyio.to_thread

from runner.cluster.arrays import as_arrays, as_tensors
from runner.cluster.limiters import LimiterDesk
from runner.cluster.ray_actors import EngineActor, HostActor, WorkerActor, node_here, ray_module
from runner.cluster.ray_calls import RayWorker
from runner.cluster.words import Joined, Stored, WorkerProcess
from runner.engines.base import BaseEngine
from runner.engines.vllm.worker.shared_memory import release
from runner.errors import BadOption, EngineDead

__all__ = ["RayLauncher", "host_called"]

CALLS: Final = 100_000
"""How many calls an actor works on at once; Ray would queue the rest in silence behind a thousand."""

STORE_BYTES: Final = 512 * 1024**2
"""The object store of a cluster of our own: weights that are put into it; what does not fit goes to a disk."""


RIGHT_ADDRESS: Final = (
    "Give the address that `ray start --head` told (host:port), 'auto' on a machine of a cluster that stands, or none "
    "for one of this machine's own."
)

CONNECT_SECONDS: Final = 10.0
"""How long a cluster that stands may take to answer at all."""


_ONCE: Final = {"max_task_retries": 0}
"""For words to the limiters that need not arrive: Ray would print on stdout that it tries again."""

_AUTH_MODE: Final = "RAY_AUTH_MODE"

_LOOPBACK: Final = (
    "Ray takes a loopback address for this machine's address in its network, so a head that was started on loopback "
    "alone cannot be reached."
)


class Connection:
    """This process's connection to a cluster: Ray has one of it, so that who leaves last ends it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.launchers: set[RayLauncher] = set()
        """Who uses it."""
        self.ours = False
        """Whether a launcher made it; else it was there before, and stays."""
        self.auth_mode: str | None = None
        """How this process was to show who it is to clusters before it was made."""


_CONNECTION: Final = Connection()


class RayLauncher:
    """Starts workers on a cluster of Ray.

    Args:
        who: what errors call whoever wants a cluster.
        address: of a cluster that stands; None takes RAY_ADDRESS, or else starts one on this machine.
        cpus: what each of them takes of Ray's count.
        gpus: the same; None takes `engine_gpus` where the cluster has any, since this machine may be one without.
        engine_gpus: how many the engine of each takes where it finds some.
        runtime_env: passed to Ray, for workers on machines that do not see this one's files.
    """

    worker_kind: type[EngineActor] = WorkerActor
    """What runs inside the actor of a worker."""

    def __init__(
        self,
        who: str,
        *,
        address: str | None,
        cpus: float,
        gpus: float | None,
        engine_gpus: int = 0,
        runtime_env: Mapping[str, Any] | None,
    ) -> None:
        self._address = address
        self.least = 1
        """How many workers there have to be."""
        self.most = 1
        """How many there are to be at most."""
        self._cpus = cpus
        self._given_gpus = gpus
        self._engine_gpus = engine_gpus
        self._other_gpus = 0
        self._gpus = gpus or 0.0
        self._who = who
        self._runtime_env = dict(runtime_env or {})
        self._desk: Any = None

    def take_more_gpus(self, number: int) -> None:
        """Have each take so many GPUs besides, for other engines that it enters; not where gpus= says how many.

        Raises:
            BadOption: they have been started with fewer.
        """
        if self._given_gpus is not None:
            return
        if self._desk is None:
            self._other_gpus = number
        elif 0 < self._gpus < self._engine_gpus + number:
            raise BadOption(
                f"{self._who}: a worker would need {self._engine_gpus + number:g} GPU with the engines of engines=, "
                f"and was started with {self._gpus:g}. Let the run enter it, or give {self._who}(gpus=)."
            )

    async def open(self) -> None:
        """Reach the cluster, or start one."""
        try:
            await anyio.to_thread.run_sync(self._connect)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.close()
            raise

    def _connect(self) -> None:
        with _CONNECTION.lock:
            self._reach()
            _CONNECTION.launchers.add(self)
        ray = ray_module()
        there = ray.cluster_resources()
        if self._given_gpus is None:
            self._gpus = self._engine_gpus + self._other_gpus if there.get("GPU", 0) else 0
        self._require_resources(there)
        self._require_a_machine(ray.nodes())
        # With the driver, since another machine may die, and where it is killed all the same, as Ray does with whatever
        # is on a machine without memory, an empty one takes its place and is asked again.
        self._desk = (
            ray.remote(LimiterDesk)
            .options(
                num_cpus=0,
                max_concurrency=CALLS,
                max_restarts=-1,
                max_task_retries=-1,
                scheduling_strategy=_on_node(node_here(), soft=True),
            )
            .remote()
        )

    def _reach(self) -> None:
        ray = ray_module()
        if ray.is_initialized() and self._runtime_env:
            raise BadOption(
                f"{self._who}(runtime_env=...): Ray is initialised in this process already; give it to ray.init(...)."
            )
        if not ray.is_initialized():
            address = self._address or os.environ.get("RAY_ADDRESS")
            own = address is None
            if address is not None:
                self._require_listener(address)
            auth_mode = os.environ.get(_AUTH_MODE)
            settings: dict[str, Any] = {
                "include_dashboard": False,
                "num_cpus": max(os.cpu_count() or 1, round(self.most * self._cpus)),
                "object_store_memory": STORE_BYTES,
            }
            try:
                ray.init(
                    address="local" if own else address,
                    runtime_env=self._runtime_env or None,
                    logging_level=logging.ERROR,
                    **(settings if own else {}),
                )
            except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
                if own:
                    _set_auth_mode(auth_mode)
                    raise BadOption(
                        f"{self._who}: no cluster of Ray could be started on this machine: {error}"
                    ) from error
                # Our own connection found somebody there, and Ray looked elsewhere.
                loopback = f" {_LOOPBACK}" if _is_loopback(address or "") else ""
                told = str(error).rstrip(".")
                raise BadOption(f"{self._nowhere(address)}: {told}. {RIGHT_ADDRESS}{loopback}") from error
            _CONNECTION.ours = True
            _CONNECTION.auth_mode = auth_mode

    def _require_listener(self, address: str) -> None:
        """Ask by ourselves first: Ray would go on asking for minutes."""
        host, _, port = address.rpartition(":")
        if not port.isdigit():  # "auto" finds one on this machine, or says at once that there is none
            return
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
        except OSError as error:
            raise BadOption(f"{self._nowhere(address)}: nothing answers there ({error}). {RIGHT_ADDRESS}") from None

    def _nowhere(self, address: str | None) -> str:
        given = f"address={self._address!r}" if self._address is not None else "RAY_ADDRESS"
        return f"{self._who}({given}): no cluster of Ray at {address!r}"

    def _require_resources(self, there: Mapping[str, float]) -> None:
        for name, each in (("GPU", self._gpus), ("CPU", self._cpus)):
            if each * self.least > there.get(name, 0):
                raise BadOption(
                    f"{self._who}: {self.least} workers of {each:g} {name} each need {each * self.least:g}, and the "
                    f"cluster has {there.get(name, 0):g}. Give fewer workers, or more machines."
                )

    def _require_a_machine(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        """Ray would say nothing, and wait for a machine that is large enough."""

        def has(node: Mapping[str, Any]) -> tuple[float, float]:
            there = node["Resources"]
            return there.get("GPU", 0), there.get("CPU", 0)

        def room(node: Mapping[str, Any]) -> tuple[bool, float, float]:
            gpus, cpus = has(node)
            return gpus >= self._gpus and cpus >= self._cpus, gpus if self._gpus else 0, cpus

        largest = max((node for node in nodes if node["Alive"]), key=room)
        if not room(largest)[0]:
            raise BadOption(
                f"{self._who}: a worker needs {self.needs} on one machine, and the largest one, "
                f"{largest['NodeManagerHostname']}, has {_counted(*has(largest))}. Give smaller sizes (the engine's "
                "tensor_parallel_size and the like, or cpus= and gpus=), or a larger machine."
            )

    @property
    def needs(self) -> str:
        """What each of them takes of one machine, for people; known once the cluster is reached."""
        return _counted(self._gpus, self._cpus)

    async def close(self) -> None:
        """Leave the cluster, and end it where it is ours."""
        await anyio.to_thread.run_sync(self._disconnect)

    def _disconnect(self) -> None:
        ray = ray_module()
        if self._desk is not None:
            ray.kill(self._desk)
            self._desk = None
        with _CONNECTION.lock:
            _CONNECTION.launchers.discard(self)
            if _CONNECTION.ours and not _CONNECTION.launchers:
                _CONNECTION.ours = False
                ray.shutdown()
                _set_auth_mode(_CONNECTION.auth_mode)

    def start(self, engine: BaseEngine, number: int) -> WorkerProcess:
        """A new worker, which may wait for a machine."""
        actor = self._actor(self.worker_kind).remote(self._packed(engine), _search(), number, self._desk)
        return RayWorker(actor, tick=self.worker_kind.tick)

    def start_host(self, engine: BaseEngine, name: str) -> WorkerProcess:
        """A process that has an engine for all who know its name."""
        actor = self._actor(HostActor, name=name).remote(self._packed(engine), _search())
        return RayWorker(actor, tick=HostActor.tick)

    def _actor(self, kind: type[Any], **options: Any) -> Any:
        return (
            ray_module()
            .remote(kind)
            .options(
                num_cpus=self._cpus,
                num_gpus=self._gpus,
                max_restarts=0,  # a restarted actor would have lost its engine and its weights
                max_task_retries=0,
                max_concurrency=CALLS,
                scheduling_strategy="SPREAD",
                **options,
            )
        )

    def _packed(self, engine: BaseEngine) -> bytes:
        packed: bytes = self.pack(engine, f"{self._who}: {type(engine).__name__} cannot")
        return packed

    def pack(self, value: Any, what: str) -> Any:
        """A value pickled as Ray does, which takes classes of a script along."""
        cloudpickle = ray_module().cloudpickle
        try:
            return cloudpickle.dumps(value)
        except Exception as error:
            raise BadOption(f"{what} be pickled ({error}): make it in lifespan() or setup(), on the worker.") from None

    async def put(self, value: Any) -> Any:
        """A large value in Ray's store; a folder is told by its path, and has to be there on every machine."""
        if isinstance(value, str | os.PathLike):
            return str(await (await anyio.Path(value).expanduser()).absolute())
        return await anyio.to_thread.run_sync(_in_store, value)

    def forget(self, worker: int, joined: Joined | None) -> None:
        """Give back the leases of a worker that is gone, and shared memory whose names it left on its machine."""
        self._desk.forget.options(**_ONCE).remote(worker)
        if joined is not None and (joined.shared_memory or joined.folder):
            # Ray kills all that a worker has started together with it, Python's own tracker of shared memory included.
            there = _on_node(joined.place, soft=False)
            clean = ray_module().remote(_clean_up).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
            clean.remote(joined.shared_memory, joined.folder)

    def forget_run(self, run: int) -> None:
        """Forget the limiters of a run."""
        self._desk.close_run.options(**_ONCE).remote(run)


def host_called(name: str) -> WorkerProcess:
    """The host of this name, which another process of the same program has started.

    Raises:
        EngineDead: there is none any more.
    """
    try:
        return RayWorker(ray_module().get_actor(name), tick=HostActor.tick)
    except ValueError as error:
        raise EngineDead("the engine's process is gone") from error


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


def _clean_up(shared_memory: Sequence[str], folder: str) -> None:
    release(shared_memory)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _counted(gpus: float, cpus: float) -> str:
    return f"{gpus:g} GPU and {cpus:g} CPU"


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return host == "localhost" or host.startswith("127.") or host == "::1"


def _on_node(place: str, *, soft: bool) -> Any:
    """Where something is to run; `soft` is for elsewhere, if need be."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    return strategies.NodeAffinitySchedulingStrategy(place, soft=soft)


def _search() -> tuple[str, ...]:
    """Where modules are looked for here, for processes that see the same files."""
    return tuple(map(os.path.abspath, sys.path))


class StoredInRay(Stored):
    """A value in Ray's store."""

    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def read(self) -> Any:
        """The value; its tensors are views of the store and take no memory of the worker's own."""
        ray = ray_module()
        return as_tensors(ray.get(self._reference))


def _in_store(value: Any) -> StoredInRay:
    return StoredInRay(ray_module().put(as_arrays(value)))
