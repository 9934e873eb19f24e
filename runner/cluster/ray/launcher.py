"""Workers as actors of Ray, on a running cluster or on one that this process starts."""

from __future__ import annotations

import importlib
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import anyio
import anyio.to_thread

from runner.cluster.limiters import SharedLimiters
from runner.cluster.protocol import StoredObject, WorkerProcess
from runner.cluster.ray.actors import EngineActor, HostActor, Surroundings, WorkerActor, ray_module
from runner.cluster.ray.calls import RayWorker
from runner.cluster.ray.connection import CONNECTION, RaySession, uploaded
from runner.concurrency.clocks import require_asyncio
from runner.engines.base import BaseEngine
from runner.engines.tensor_bytes import Bytes, bytes_of, tensor_of
from runner.errors import BadOption, DeltarunnerError, EngineDead

__all__ = ["RayLauncher", "as_arrays", "as_tensors", "host_called", "pickled"]

MAX_CONCURRENT_CALLS: Final = 100_000
"""Maximum number of calls that an actor runs at once. By default Ray would silently queue calls beyond a thousand."""

_ONCE: Final = {"max_task_retries": 0}
"""Options for messages to the limiter service that may be lost. By default Ray would print retries on stdout."""

HEAD_SECONDS: Final = 5.0
"""Seconds between two checks of the cluster's head, and the time limit of a check."""

SESSION_SECONDS: Final = 0.1
"""Seconds between two checks that this process still has the same session. A check takes about 10 us."""

HEADLESS_SECONDS: Final = 40.0
"""Seconds without an answer after which the head counts as dead. Ray ends this process after a minute, silently."""


class RayLauncher:
    """The launcher of workers on a Ray cluster.

    Args:
        who: the name of the user in errors.
        address: address of a running cluster; None for RAY_ADDRESS, or else a new cluster on this machine.
        cpus: number of CPUs that each worker takes from Ray's count.
        gpus: number of GPUs of each worker; None for the GPUs that its engines need, or 0 if the cluster has no GPU.
        engine_gpus: number of GPUs that the engine of a worker needs in a cluster with GPUs.
        runtime_env: passed to Ray, for workers on machines that do not see this one's files.
    """

    worker_kind: type[EngineActor] = WorkerActor

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
        self._cpus = cpus
        self._given_gpus = gpus
        self._engine_gpus = engine_gpus
        self._other_gpus = 0
        self._gpus = gpus or 0.0
        self._who = who
        self._given_runtime_env = dict(runtime_env or {})
        self._runtime_env: dict[str, Any] = {}
        self._limiter_service: Any = None
        self._session: RaySession | None = None
        self._session_seen = -math.inf
        self._head = ""
        self._looked = self._seen = 0.0

    def take_more_gpus(self, number: int) -> None:
        """Add GPUs to each worker for other engines that it enters, unless `gpus=` sets the number of GPUs.

        Raises:
            BadOption: the workers were started with fewer GPUs.
        """
        if self._given_gpus is not None:
            return
        if self._limiter_service is None:
            self._other_gpus = number
        elif 0 < self._gpus < self._engine_gpus + number:
            raise BadOption(
                f"{self._who}: a worker would need {self._engine_gpus + number:g} GPU with the engines of engines=, "
                f"and was started with {self._gpus:g}. Let the run enter {self._who}, or give {self._who}(gpus=)."
            )

    async def open(self) -> None:
        """Connect to the cluster, or start one.

        Raises:
            BadOption: the cluster cannot be reached, or is too small.
        """
        require_asyncio(f"{self._who}: Ray")
        try:
            await anyio.to_thread.run_sync(self._connect)
            self._looked = self._seen = anyio.current_time()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.close()
            raise

    def _connect(self) -> None:
        CONNECTION.enter(self, who=self._who, address=self._address)
        ray, self._session, self._session_seen = ray_module(), RaySession.current(), -math.inf
        # The runtime environment is only for this launcher's actors, since other code of the process may use another.
        self._runtime_env = uploaded(self._who, self._given_runtime_env)
        self._head = ray.get_runtime_context().gcs_address
        there = ray.cluster_resources()
        if self._given_gpus is None:
            self._gpus = self._engine_gpus + self._other_gpus if there.get("GPU", 0) else 0
        self._require_resources(there)
        self._require_a_machine(ray.nodes())
        # The service runs on the driver's machine, since another machine may be lost. If it is killed nevertheless,
        # for example for its memory, Ray starts an empty service, and the requests are sent again.
        self._limiter_service = (
            ray.remote(SharedLimiters)
            .options(
                num_cpus=0,
                runtime_env=self._runtime_env,
                max_concurrency=MAX_CONCURRENT_CALLS,
                max_restarts=-1,
                max_task_retries=-1,
                scheduling_strategy=_on_this_node(),
            )
            .remote()
        )

    def _require_resources(self, there: Mapping[str, float]) -> None:
        for name, each in (("GPU", self._gpus), ("CPU", self._cpus)):
            if each * self.least > there.get(name, 0):
                cluster = f"the cluster has {there.get(name, 0):g}"
                if self.least == 1:
                    raise BadOption(
                        f"{self._who}: each worker needs {each:g} {name}, and {cluster}. Give smaller cpus= or gpus=, "
                        "or add machines."
                    )
                raise BadOption(
                    f"{self._who}: {self.least} workers of {each:g} {name} each need {each * self.least:g}, and "
                    f"{cluster}. Give fewer workers or smaller cpus= or gpus=, or add machines."
                )

    def _require_a_machine(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        """Raise BadOption if no machine is large enough: Ray would wait for one without a message."""

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
        """The resources that a worker needs on one machine, as a text for people; known once connected."""
        return _counted(self._gpus, self._cpus)

    async def require_head(self) -> None:
        """Return if the cluster's head answers, or has answered in the last `HEADLESS_SECONDS`.

        Raises:
            EngineDead: the head is gone, or other code has closed this process's connection to the cluster.
        """
        self._require_session()
        now = anyio.current_time()
        if now - self._looked < HEAD_SECONDS:
            return
        self._looked = now
        host, _, port = self._head.rpartition(":")
        try:
            with anyio.fail_after(HEAD_SECONDS):
                await (await anyio.connect_tcp(host.strip("[]"), int(port))).aclose()
            self._seen = now
        except (OSError, TimeoutError):
            if now - self._seen > HEADLESS_SECONDS:
                raise EngineDead(
                    f"{self._who}: the head of Ray's cluster, at {self._head}, has not answered for "
                    f"{HEADLESS_SECONDS:g} s. Results in the run file are kept: start a cluster, and run the same "
                    "command again to continue."
                ) from None

    def _is_connected(self) -> bool:
        # This is called at each tick of each worker, so a result is reused for `SESSION_SECONDS`. A new connection
        # within this time is not possible, since `ray.init` takes longer.
        if not ray_module().is_initialized():
            return False
        now = time.monotonic()
        if now - self._session_seen > SESSION_SECONDS:
            if RaySession.current() != self._session:
                return False
            self._session_seen = now
        return True

    def _require_session(self) -> None:
        if not self._is_connected():
            raise EngineDead(
                f"{self._who}: other code of this process called ray.shutdown(), which ended its workers. Call that "
                "function after the run. Results in the run file are kept: run the same command again to continue."
            )

    async def close(self) -> None:
        """Disconnect, and end the cluster if this process started it."""
        await anyio.to_thread.run_sync(self._disconnect)

    def _disconnect(self) -> None:
        ray = ray_module()
        if self._limiter_service is not None and self._is_connected():
            ray.kill(self._limiter_service)
        self._limiter_service = None
        CONNECTION.leave(self)

    def start(self, engine: BaseEngine, number: int) -> WorkerProcess:
        """Start a worker, which may wait for a machine."""
        actor = self._actor(self.worker_kind).remote(
            self._packed(engine), self._surroundings(), number, self._limiter_service
        )
        return RayWorker(actor, tick=self.worker_kind.tick, connected=self._is_connected)

    def start_host(self, engine: BaseEngine, name: str) -> WorkerProcess:
        """Start a process with an engine for all clients that use this name."""
        actor = self._actor(HostActor, name=name).remote(self._packed(engine), self._surroundings())
        return RayWorker(actor, tick=HostActor.tick, connected=self._is_connected)

    def _actor(self, kind: type[Any], **options: Any) -> Any:
        self._require_session()
        return (
            ray_module()
            .remote(kind)
            .options(
                num_cpus=self._cpus,
                num_gpus=self._gpus,
                runtime_env=self._runtime_env,
                max_restarts=0,  # a restarted actor would have lost its engine and its weights
                max_task_retries=0,
                max_concurrency=MAX_CONCURRENT_CALLS,
                scheduling_strategy="SPREAD",
                **options,
            )
        )

    def _surroundings(self) -> Surroundings:
        given = ray_module().get_runtime_context().runtime_env.get("working_dir") or self._runtime_env.get(
            "working_dir"
        )
        return Surroundings(tuple(map(os.path.abspath, sys.path)), "" if given else os.getcwd())

    def _packed(self, engine: BaseEngine) -> bytes:
        fix = "give it values that can be sent, such as functions of a module"
        packed: bytes = self.pack(engine, f"{self._who}: {type(engine).__name__} cannot", fix)
        return packed

    def pack(self, value: Any, what: str, fix: str) -> Any:
        """Pickle a value with Ray's pickler, which also pickles classes of a script; see `Launcher.pack`."""
        return pickled(value, what, fix, ray_module().cloudpickle.dumps)

    async def put(self, value: Any) -> Any:
        """Put a large value into Ray's store, and return a reference. For the path of a folder, return the full path.

        The folder must exist on every machine.
        """
        if isinstance(value, str | os.PathLike):
            return str(await (await anyio.Path(value).expanduser()).absolute())
        self._require_session()
        return await anyio.to_thread.run_sync(_in_store, value)

    def forget(self, worker: int) -> None:
        """Release the leases of a worker that is gone."""
        if self._is_connected():
            self._limiter_service.forget.options(**_ONCE).remote(worker)

    def forget_run(self, run: int) -> None:
        """Remove the limiters of a run."""
        if self._is_connected():
            self._limiter_service.close_run.options(**_ONCE).remote(run)


def host_called(name: str) -> RayWorker:
    """Return a connection to the host of this name, which another process of the same program has started.

    Raises:
        EngineDead: the host has ended.
    """
    try:
        return RayWorker(ray_module().get_actor(name), tick=HostActor.tick)
    except ValueError as error:
        raise EngineDead("the engine's process is gone: keep the RayEngine entered until its users end") from error


def pickled(value: Any, what: str, fix: str, dumps: Callable[[Any], bytes]) -> bytes:
    """Pickle a value.

    Raises:
        BadOption: the value cannot be pickled; the message begins with `what` and ends with `fix`.
    """
    try:
        return dumps(value)
    except DeltarunnerError:
        raise
    except Exception as error:
        raise BadOption(f"{what} be pickled ({error}): {fix}.") from None


def _counted(gpus: float, cpus: float) -> str:
    return f"{gpus:g} GPU and {cpus:g} CPU"


def _on_this_node() -> Any:
    """Return a strategy that prefers this machine and allows others."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    here = ray_module().get_runtime_context().get_node_id()
    return strategies.NodeAffinitySchedulingStrategy(here, soft=True)


class ObjectInRay(StoredObject):
    """A value in Ray's store."""

    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def read(self) -> Any:
        """Return the value. Its tensors are views of the store and take no memory of the worker."""
        ray = ray_module()
        return as_tensors(ray.get(self._reference))


def _in_store(value: Any) -> ObjectInRay:
    return ObjectInRay(ray_module().put(as_arrays(value)))


@dataclass(frozen=True, slots=True)
class _TensorBytes:
    """The bytes of a tensor, and its type by name: numpy has no bfloat16 and no float8."""

    bytes_: Bytes
    dtype: str
    shape: tuple[int, ...]


def as_arrays(value: Any) -> Any:
    """Replace the tensors of a mapping by arrays of bytes, shape [bytes]. Any other value is returned as it is."""
    torch = sys.modules.get("torch")  # without torch, no value is a tensor
    if torch is None or not isinstance(value, Mapping):
        return value
    return {name: _as_bytes(item) if isinstance(item, torch.Tensor) else item for name, item in value.items()}


def as_tensors(value: Any) -> Any:
    """Undo `as_arrays`. The tensors are views of the arrays and must not be written to."""
    if not isinstance(value, dict):
        return value
    return {name: _as_tensor(item) if isinstance(item, _TensorBytes) else item for name, item in value.items()}


def _as_bytes(tensor: Any) -> _TensorBytes:
    return _TensorBytes(bytes_of(tensor), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _as_tensor(item: _TensorBytes) -> Any:
    with warnings.catch_warnings():
        # A view of the store is read-only, and the engine only reads new weights.
        warnings.simplefilter("ignore", UserWarning)
        return tensor_of(item.bytes_, item.dtype, item.shape)
