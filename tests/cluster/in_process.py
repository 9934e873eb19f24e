"""Workers as tasks of the test's event loop: a complete fleet without Ray, in which tests can kill workers."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import cloudpickle  # type: ignore[import-untyped]  # it has no types
from anyio.abc import TaskGroup

from runner.cluster.engine_client import HostedEngine
from runner.cluster.engine_host import EngineHost
from runner.cluster.limiters import SharedLimiters
from runner.cluster.protocol import StoredObject, WorkerLost
from runner.cluster.ray.launcher import pickled
from runner.cluster.worker import Worker
from runner.engines.base import BaseEngine
from runner.errors import DeltarunnerError, unwrapped


class InProcess:
    """Launcher whose workers are objects in this process. Arguments and results are pickled, as for a process."""

    def __init__(self, group: TaskGroup) -> None:
        self.group = group
        self.workers: dict[int, InProcessWorker] = {}
        """Every worker that was started, by number."""
        self.limiter_service = SharedLimiters()
        self.on_start: Callable[[InProcessWorker], None] = lambda _: None
        """Called with every new worker."""
        self.most_in_use = 0

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def start(self, engine: BaseEngine, number: int) -> InProcessWorker:
        packed = self.pack(engine, "an engine cannot", "give another one")
        worker = self.workers[number] = InProcessWorker(
            self, Worker(pickle.loads(packed), number, InProcessLimiterService(self))
        )
        self.on_start(worker)
        return worker

    def pack(self, value: Any, what: str, fix: str) -> Any:
        return pickled(value, what, fix, cloudpickle.dumps)

    async def put(self, value: Any) -> Any:
        return StoredHere(value)

    def forget(self, worker: int) -> None:
        self.group.start_soon(self.limiter_service.forget, worker)

    def forget_run(self, run: int) -> None:
        self.group.start_soon(self.limiter_service.close_run, run)

    @property
    def alive(self) -> list[InProcessWorker]:
        return [worker for worker in self.workers.values() if not worker.killed]


class StoredHere(StoredObject):
    def __init__(self, value: Any) -> None:
        self.value = value

    def read(self) -> Any:
        return self.value


class InProcessLimiterService:
    def __init__(self, launcher: InProcess) -> None:
        self._launcher = launcher

    def acquire(self, run: int, name: str, limit: int, worker: int, lease: int) -> Answer:
        # the limiter service is in another process: its call continues if the caller stops waiting for the answer
        answer = Answer()
        self._launcher.group.start_soon(self._acquire, answer, run, name, limit, worker, lease)
        return answer

    async def _acquire(self, answer: Answer, *asked: Any) -> None:
        try:
            answer.succeed(await self._launcher.limiter_service.acquire(*asked))
        except DeltarunnerError as error:
            answer.fail(error)

    def release(self, worker: int, lease: int) -> None:
        self._launcher.group.start_soon(self._launcher.limiter_service.release, worker, lease)


class InProcessWorker:
    """A worker whose calls are tasks. `kill` cancels all of them at once."""

    def __init__(self, launcher: InProcess, worker: Any) -> None:
        self.worker = worker
        self.killed = False
        self.why = ""
        self.silent = False
        """True if the worker no longer answers calls, like an unplugged machine."""
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        """The worker's calls, in order of arrival."""
        self.fail_in: dict[str, Exception] = {}
        """Error that a call raises, by the name of the call."""
        self.held_in: dict[str, anyio.Event] = {}
        """Event that a call waits for, by the name of the call."""
        self.killed_in = ""
        """Name of the call in which the worker dies."""
        self._launcher = launcher
        self._open: dict[Answer, anyio.CancelScope] = {}

    def send(self, call: str, *arguments: Any) -> Awaitable[Any]:
        self.calls.append((call, arguments))
        answer = Answer()
        if self.killed:
            answer.fail(WorkerLost(self.why))
        else:
            scope = self._open[answer] = anyio.CancelScope()
            self._launcher.group.start_soon(self._call, answer, scope, call, pickle.dumps(arguments))
        return answer

    async def _call(self, answer: Answer, scope: anyio.CancelScope, call: str, packed: bytes) -> None:
        with scope:
            try:
                if self.silent:
                    await anyio.sleep_forever()
                if call in self.fail_in:
                    raise self.fail_in[call]
                if call == self.killed_in:
                    self.kill()
                if call in self.held_in:
                    await self.held_in[call].wait()
                result = await getattr(self.worker, call)(*pickle.loads(packed))
                if self.silent:
                    await anyio.sleep_forever()
                answer.succeed(pickle.loads(pickle.dumps(result)))
            except (DeltarunnerError, WorkerLost) as error:
                answer.fail(error)
        self._open.pop(answer, None)

    def kill(self, why: str = "its process died") -> None:
        if self.killed:
            return
        self.killed, self.why = True, why
        for answer, scope in self._open.items():
            answer.fail(WorkerLost(why))
            scope.cancel()
        if (relay := getattr(self.worker, "_relay", None)) is not None:
            relay.close()  # a cancelled call does not end the reception of weights, but the end of a process does


class Answer:
    def __init__(self) -> None:
        self._done = anyio.Event()
        self._result: Any = None
        self._error: Exception | None = None

    def succeed(self, result: Any) -> None:
        if not self._done.is_set():
            self._result = result
            self._done.set()

    def fail(self, error: Exception) -> None:
        if not self._done.is_set():
            self._error = error
            self._done.set()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._read().__await__()

    async def _read(self) -> Any:
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class HostedHere(HostedEngine):
    """Engine that a host on the same event loop owns. Messages between the two are pickled."""

    def __init__(self, engine: BaseEngine) -> None:
        super().__init__()
        self.host = EngineHost(engine)
        self.process: InProcessWorker

    async def _reach(self, exit_stack: AsyncExitStack) -> InProcessWorker:
        launcher = await exit_stack.enter_async_context(in_process())
        self.process = InProcessWorker(launcher, self.host)
        self.process.send("live")
        exit_stack.push_async_callback(self._end)
        return self.process

    async def _end(self) -> None:
        await self.process.send("end")
        await anyio.wait_all_tasks_blocked()


@asynccontextmanager
async def in_process() -> AsyncIterator[InProcess]:
    """Yield a launcher, and end its workers after the block."""
    try:
        async with anyio.create_task_group() as group:
            yield InProcess(group)
            group.cancel_scope.cancel()
    except BaseExceptionGroup as error:
        raise unwrapped(error) from None
