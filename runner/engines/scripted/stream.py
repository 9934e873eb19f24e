"""Deltas of one request to a scripted engine, by its delivery plan."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from runner.engines.base import Delta, Finish, FinishReason, GenerationRequest, Session
from runner.engines.scripted.delivery_plan import DeliveryPlan
from runner.engines.scripted.model import EncodedReply
from runner.engines.scripted.runtime import ScriptedRuntime
from runner.engines.scripted.script import Fault, FaultKind
from runner.engines.stream import GatedStream
from runner.errors import EngineDead
from runner.options import Constraint, Sampling

__all__ = ["RecordedCall", "ScriptedSession", "ScriptedStream"]


@dataclass(slots=True)
class RecordedCall:
    """Request and its output; kept only by an engine with `record=True`."""

    name: str
    """Name of the request: episode, agent and turn."""
    prompt: array[int]
    """Exact ids of the prompt, shape [prompt], int32."""
    sampling: Sampling
    """Sampling parameters."""
    stop_ids: tuple[int, ...]
    """Ids that end the turn."""
    seed: int | None
    """Seed of the turn's random numbers; None without a seed."""
    constraint: Constraint | None
    """Grammar, which a scripted engine does not enforce; None without a grammar."""
    sampled: Sequence[int] = ()
    """Sampled ids, read or not, shape [sampled]; set when the request ends."""
    logprobs: Sequence[float] | None = None
    """Log-probability of each id; None if the engine is configured without log-probabilities."""
    finish: Finish | None = None
    """Finish of the request; None while the request runs, and for a refused request."""

    @classmethod
    def of(cls, request: GenerationRequest) -> Self:
        """Record a request."""
        prompt = array("i", request.prompt)  # a copy: the caller's list grows with the conversation
        return cls(request.name, prompt, request.sampling, request.stop_ids, request.seed, request.constraint)


@dataclass(slots=True)
class ScriptedSession(Session):
    """Conversation that reads a list of replies from its beginning."""

    requests: int = 0


class ScriptedStream(GatedStream[ScriptedRuntime, ScriptedSession]):
    """Deltas of one request to a scripted engine."""

    def __init__(self, runtime: ScriptedRuntime, request: GenerationRequest, calls: list[RecordedCall] | None) -> None:
        super().__init__(runtime, request, _session_of(request))
        self._calls = calls
        self._record: RecordedCall | None = None
        self._delivery: DeliveryPlan | None = None  # None until the request is admitted
        self._is_cut = False
        self._arrived = 0  # number of deltas that arrived
        self._read = 0  # number of these deltas that were read
        self._failure: EngineDead | None = None
        self._changed: anyio.Event | None = None  # created only if the reader has to wait

    async def _begin(self) -> None:
        self._delivery = await self._plan()
        self._runtime.tick_clock.schedule(self, self._delivery.first - self._runtime.tick_clock.now)

    async def _plan(self) -> DeliveryPlan:
        runtime, request = self._runtime, self.request
        if self._calls is not None:
            self._record = RecordedCall.of(request)
            self._calls.append(self._record)
        session = self._session
        session.requests += 1
        runtime.admitted += 1
        if request.scores_prompt:
            self.prompt_logprobs = runtime.planner.scored(request.prompt)
        call, fault, said = runtime.planner.ask(request, session.requests - 1, runtime.admitted - 1)
        if not isinstance(said, EncodedReply):
            said = await said
            if self._failure is not None:  # the engine died during the wait
                raise self._failure
        return runtime.planner.plan(call, said, fault, runtime.tick_clock.now)

    async def __aexit__(self, *_: object) -> None:
        # Nothing here waits, so a shield is not needed.
        if not self._inside:
            return
        self._drain()
        self._leave()
        if self._record is not None and self._delivery is not None:
            self._record.sampled, self._record.finish = self._delivery.ids[: self.sent], self.finish
            if self._delivery.logprobs is not None:
                self._record.logprobs = self._delivery.logprobs[: self.sent]

    async def __anext__(self) -> Delta:
        while self._read == self._arrived:
            if self.finish is not None or not self._inside:
                raise StopAsyncIteration
            if self._failure is not None:
                raise self._failure
            if self._is_cut and self._delivery is not None:
                return self._abort(self._delivery)
            if self._arrived:
                # Without this checkpoint, asyncio would not cancel a reader that is woken at every tick.
                await checkpoint_if_cancelled()
            self._changed = anyio.Event()
            await self._changed.wait()
        return self._next()

    def advance(self) -> int | None:
        """Deliver the next delta, or all deltas if no ticks are between ids.

        Returns:
            The ticks to the next delta; None after the last delta.
        """
        delivery = self._delivery
        assert delivery is not None
        last = len(delivery.cuts)
        self._arrived = min(self._arrived + 1, last) if delivery.between else last
        if self._arrived:
            self._count(delivery.cuts[self._arrived - 1])
        self._wake()
        if self._arrived < last:
            return delivery.pause(self._arrived)
        self._end(delivery.fault)
        return None

    def _end(self, fault: Fault | None) -> None:
        """Apply the fault after the last id, and close the request."""
        if fault is not None and fault.kind is FaultKind.DEATH:
            self._runtime.die(fault.message)
        if fault is None or fault.kind is not FaultKind.STALL:  # a stalled request stays open
            self._runtime.close(self)

    def fail(self, error: EngineDead) -> None:
        """Fail the request: arrived deltas can be read, then `error` is raised."""
        self._failure = error
        self._wake()

    def cut(self) -> None:
        """Cut the request for the trainer; sampled ids can be read."""
        self._is_cut = True
        self._runtime.close(self)
        self._wake()

    def stamp(self, version: str) -> None:
        """Record new weights for ids that are sampled from now on."""
        sampled = 0 if self._delivery is None else self._delivery.sampled(self._runtime.tick_clock.now)
        self._stamps.mark(version, max(sampled, self.sent))

    def _next(self) -> Delta:
        delivery = self._delivery
        assert delivery is not None
        start, end = delivery.cuts[self._read - 1] if self._read else 0, delivery.cuts[self._read]
        self._read += 1
        finish = delivery.finish if self._read == len(delivery.cuts) else None
        if finish is not None:
            self.finish = Finish(finish.reason, finish.stop, self._stamps.spans(self.sent), finish.cached_tokens)
        return delivery.piece(start, end, self.finish)

    def _drain(self) -> None:
        while self._read < self._arrived:
            self.rest.append(self._next())
        if self.finish is not None:
            return
        if self._failure is not None:
            self.finish = Finish(FinishReason.ERROR, str(self._failure), self._stamps.spans(self.sent))
        elif self._delivery is not None:
            self.rest.append(self._abort(self._delivery))

    def _abort(self, delivery: DeliveryPlan) -> Delta:
        """Cut the request. Return its last delta, with the ids that were sampled and not sent."""
        start = self.sent
        self._count(delivery.sampled(self._runtime.tick_clock.now))
        whole = delivery.finish is not None and self.sent == len(delivery.ids)
        finish = delivery.finish if whole and delivery.finish is not None else Finish(FinishReason.ABORT)
        self.finish = replace(finish, versions=self._stamps.spans(self.sent))
        return delivery.piece(start, self.sent, self.finish)

    def _count(self, sent: int) -> None:
        self._runtime.sampled += sent - self.sent
        self.sent = sent

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None


def _session_of(request: GenerationRequest) -> ScriptedSession:
    session = request.session
    if session is None:
        return ScriptedSession()
    if not isinstance(session, ScriptedSession):
        raise TypeError(f"{session!r} is not a session of a scripted engine: make it with engine.session()")
    return session
