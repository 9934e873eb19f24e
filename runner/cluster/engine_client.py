"""The client of an engine in another process.

Requests are sent one by one; deltas of all streams come back in batches.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Self, cast
from uuid import uuid4

import anyio
import numpy as np
from anyio.abc import TaskGroup
from anyio.lowlevel import current_token

from runner.cluster.engine_host import STATS_SECONDS, Ended, SentRequest, StreamEvent, each_of
from runner.cluster.protocol import EngineKnown, WorkerInfo, WorkerLost, WorkerProcess
from runner.concurrency.clocks import FIRST_STEP_FACTOR, Progress
from runner.engines.base import Delta, DeltaStream, Engine, EngineStats, Finish, FinishReason, GenerationRequest
from runner.engines.gate import Session, affinity_beside
from runner.engines.state import NOT_RUNNING
from runner.errors import DeltarunnerError, EngineDead, EngineError
from runner.options import Constraint, Sampling

__all__ = ["HostedEngine"]

DRAIN_SECONDS: Final = 10.0
"""Maximum time, in seconds, that a stream waits for its last deltas when it is left."""


@dataclass(slots=True)
class HostedSession(Session):
    """A conversation, which the host identifies by its number."""

    number: int = 0
    beside: int | None = None
    """The number of the session that was given as `beside`; None if none was given."""


class HostedEngine(Engine):
    """The client of an engine in another process, which other clients may share. It does not support a trainer's calls.

    A subclass implements the connection to the process.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._name = uuid4().hex
        self._streams: dict[int, HostedStream] = {}
        self._process: WorkerProcess | None = None
        self._info: WorkerInfo | None = None
        self.sampled = 0
        """Number of sampled ids that this process received."""
        self._stats = EngineStats(open=0)
        self._death: EngineDead | None = None
        self._progress = Progress(first=FIRST_STEP_FACTOR)
        self._exit = AsyncExitStack()

    @abstractmethod
    async def _reach(self, exit_stack: AsyncExitStack) -> WorkerProcess:
        """Connect to the host, or start it. Closing the exit stack disconnects, or ends a host that this call started.

        Raises:
            BadInput, EngineError: the host cannot be reached or does not start.
            WorkerLost: the host has ended already.
        """

    async def __aenter__(self) -> Self:
        self._require_not_entered()
        async with AsyncExitStack() as exit_stack:
            try:
                process = await self._reach(exit_stack)
                info: WorkerInfo = await process.send("join")
                known: EngineKnown = await process.send("engine_known")
                await process.send("greet", self._name)
            except WorkerLost as lost:
                raise EngineDead(f"the engine's process did not start: {lost}") from lost
            self._info, self._process, self._death = info, process, None
            self.tokenizer, self.template, self.stop_ids = known.tokenizer, known.template, known.stop_ids
            self.vocabulary, self.context, self.places = known.vocabulary, info.context, info.places
            self.notes = info.notes
            group = await exit_stack.enter_async_context(anyio.create_task_group())
            exit_stack.callback(group.cancel_scope.cancel)
            self._start_reading(group, process)
            self._exit = exit_stack.pop_all()
        self.running, self.loop = True, current_token()
        return self

    def _start_reading(self, group: TaskGroup, process: WorkerProcess) -> None:
        group.start_soon(self._read_events, process, name="deltarunner engine client")
        group.start_soon(self._poll_stats, name="deltarunner engine client stats")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.running = False
        self._die(EngineDead("the engine was closed: enter it again to send requests"))
        if self._process is not None:
            self._process.send("leave", self._name)
        # The task group receives no exception, since it would wrap an exception that leaves the block.
        await self._exit.__aexit__(None, None, None)

    async def _read_events(self, process: WorkerProcess) -> None:
        try:
            while True:
                for number, event in each_of(await process.send("event", self._name)):
                    if (stream := self._streams.get(number)) is not None:
                        stream.take_event(event)
        except (WorkerLost, DeltarunnerError) as error:
            self._die(error)

    async def _poll_stats(self) -> None:
        try:
            while True:
                await self.refresh_stats()
                await anyio.sleep(STATS_SECONDS)
        except (WorkerLost, DeltarunnerError) as error:
            self._die(error)

    async def refresh_stats(self) -> None:
        """Request the engine's statistics, for `stats`."""
        assert self._process is not None, "the engine was entered"
        before, self._stats = self._stats.steps, await self._process.send("stats", self._name)
        if self._stats.steps != before:
            self._progress.note()

    def _die(self, error: Exception) -> None:
        """Fail the requests in flight and all later requests with this error. Only the first call has an effect."""
        if self._death is None:
            gone = "the engine's process is gone: " if isinstance(error, WorkerLost) else ""
            self._death = EngineDead(f"{gone}{error}")
            for stream in list(self._streams.values()):
                stream.take_event(self._death)

    @property
    def pid(self) -> int:
        """The process id of the engine, on its machine. Raises EngineDead if the engine was not entered."""
        if self._info is None:
            raise EngineDead(NOT_RUNNING)
        return self._info.pid

    # --- calls of a run

    def stream(self, request: GenerationRequest) -> DeltaStream:
        """Return the deltas of one request. The request is sent when the stream is entered."""
        return HostedStream(self, request)

    def session(self, *, late: bool = False, beside: Session | None = None) -> Session:
        other = beside.number if isinstance(beside, HostedSession) else None
        return HostedSession(late=late, affinity=affinity_beside(beside), number=next(self._numbers), beside=other)

    def close_session(self, session: Session) -> None:
        """Release the session's memory. May be called twice."""
        if isinstance(session, HostedSession) and not session.closed and self._process is not None:
            self._process.send("close_session", self._name, session.number)
        session.closed = True

    @property
    def progress(self) -> Progress:
        """The progress of the engine, as its statistics show it. Progress restarts the clocks of waiting turns."""
        return self._progress

    def stats(self) -> EngineStats:
        """The latest statistics of the engine.

        `open`, `waiting` and `sampled_tokens` are only for the requests of this process.
        """
        waiting = sum(not stream.admitted for stream in self._streams.values())
        return replace(self._stats, open=len(self._streams) - waiting, waiting=waiting, sampled_tokens=self.sampled)

    def is_alive(self) -> bool:
        """Return True if the engine can answer, as far as is known."""
        return self.running and self._death is None

    async def health(self) -> None:
        """Return when the engine can answer.

        Raises:
            EngineDead: the engine cannot answer; the message has the cause.
        """
        self.require_alive()
        assert self._process is not None, "it is alive"
        try:
            await self._process.send("call", "health")
        except WorkerLost as lost:
            self._die(lost)
            self.require_alive()

    async def score(
        self,
        ids: Sequence[int],
        *,
        start: int = 1,
        sampling: Sampling | None = None,
        constraint: Constraint | None = None,
    ) -> list[float]:
        self.require_alive()
        assert self._process is not None, "it is alive"
        named = {"start": start, "sampling": sampling, "constraint": constraint}
        try:
            scores: list[float] = await self._process.send("score", list(ids), named)
        except WorkerLost as lost:
            self._die(lost)
            self.require_alive()
            raise
        return scores

    def describe(self) -> dict[str, Any]:
        """Return the engine's description of itself, for the header of a run file.

        Raises:
            EngineDead: the engine was not entered.
        """
        if self._info is None:
            raise EngineDead(NOT_RUNNING)
        return dict(self._info.description)

    def require_alive(self) -> None:
        """Return if requests can be answered, as far as is known.

        Raises:
            EngineDead: requests cannot be answered.
        """
        if self._death is not None:
            raise EngineDead(str(self._death)) from self._death
        if self._process is None:
            raise EngineDead(NOT_RUNNING)

    # --- streams

    def begin(self, stream: HostedStream, request: GenerationRequest) -> int:
        """Send a request, and return its number, which identifies the stream on the host.

        Raises:
            EngineDead: the engine cannot answer.
        """
        self.require_alive()
        assert self._process is not None, "it is alive"
        number = next(self._numbers)
        self._streams[number] = stream
        session = request.session if isinstance(request.session, HostedSession) else None
        sent = SentRequest(
            # An array is pickled as it is in memory; a list of ids takes ten times as long.
            replace(request, session=None, prompt=cast("Sequence[int]", np.array(request.prompt, dtype=np.int32))),
            session=None if session is None else session.number,
            late=session is not None and session.late,
            beside=None if session is None else session.beside,
        )
        self._process.send("stream", self._name, number, sent)
        return number

    def cut(self, number: int) -> None:
        """Make the host end the stream of this number."""
        if self._process is not None and self._death is None:
            self._process.send("cut", self._name, number)

    def forget(self, number: int) -> None:
        """Remove the stream of this number. Later events of the stream are ignored."""
        self._streams.pop(number, None)


class HostedStream(DeltaStream):
    """The deltas of one request to a host."""

    def __init__(self, engine: HostedEngine, request: GenerationRequest) -> None:
        self.rest: list[Delta] = []
        self.finish: Finish | None = None
        self._engine = engine
        self._request = request
        self._number = -1
        self._deltas: deque[Delta] = deque()
        self.admitted = False
        """True if the engine has admitted the request."""
        self._inside = False
        self._ended: Ended | None = None
        self._failure: DeltarunnerError | None = None
        self._event: anyio.Event | None = None  # an event exists only while a reader waits

    def take_event(self, event: StreamEvent) -> None:
        if isinstance(event, Delta):
            self._deltas.append(event)
            self._engine.sampled += len(event.token_ids)
        elif isinstance(event, Ended):
            self._ended = event
            self._engine.sampled += sum(len(delta.token_ids) for delta in event.rest)
        elif event is None:
            self.admitted = True
        else:
            self._failure = self._failure or event
        if self._event is not None:
            self._event.set()
            self._event = None

    async def _next_event(self) -> None:
        self._event = anyio.Event()
        await self._event.wait()

    async def __aenter__(self) -> Self:
        self._number = self._engine.begin(self, self._request)
        try:
            while not self.admitted:
                if self._failure is not None:
                    raise self._failure
                await self._next_event()
        except BaseException:
            await self._cut()
            raise
        if self._request.session is not None:
            self._request.session.late = True
        self._inside = True
        return self

    @property
    def _is_over(self) -> bool:
        return self._ended is not None or self._failure is not None

    async def _cut(self) -> None:
        """If the stream is not over, make the host end it, and wait for the last event. Then forget the stream."""
        try:
            if not self._is_over:
                self._engine.cut(self._number)
                with anyio.move_on_after(DRAIN_SECONDS, shield=True):
                    while not self._is_over:
                        await self._next_event()
        finally:
            self._engine.forget(self._number)

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self.finish is not None:
                raise StopAsyncIteration
            if self._failure is not None:
                self.finish = Finish(FinishReason.ERROR, stop=str(self._failure))
                raise self._failure
            if self._ended is not None:
                raise EngineError(f"{self._request.name}: the engine ended the turn without a finish reason")
            await self._next_event()
        delta = self._deltas.popleft()
        if delta.finish is not None:
            self.finish = delta.finish
        return delta

    async def __aexit__(self, *_: object) -> None:
        if not self._inside:
            return
        self._inside = False
        try:
            # If the end of the stream has arrived, this sends nothing, since the host has left the stream by then.
            await self._cut()
        finally:
            self.rest.extend(self._deltas)
            self._deltas.clear()
            ended = self._ended
            self.rest.extend(ended.rest if ended is not None else ())
            self.finish = self.finish or (ended and ended.finish) or Finish(FinishReason.ABORT)
