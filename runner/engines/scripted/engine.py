"""The scripted engine: says what it is told, delivered as a real engine would, for development and tests."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.abc
from anyio.lowlevel import checkpoint_if_cancelled, current_token

from runner.engines.adapters import Adapters, AdapterVersion
from runner.engines.base import (
    Delta,
    DeltaStream,
    Engine,
    EngineStats,
    Finish,
    FinishReason,
    GenerationRequest,
    Session,
)
from runner.engines.control import EngineControl
from runner.engines.gate import AdmissionGate
from runner.engines.scripted.delivery import Delivery, Planner, forced
from runner.engines.scripted.driver import ScriptedDriver
from runner.engines.scripted.replies import EncodedReply, Replies, ReplyEncoder, reply_source
from runner.engines.scripted.script import Chunks, Fault, FaultKind, Faults, Latency, ModelCall, check_chunks
from runner.engines.scripted.ticker import Ticker
from runner.engines.stamps import Stamps
from runner.errors import BadOption, EngineDead, RequestRejected
from runner.options import Constraint, Sampling
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.template import ChatTemplate
from runner.tokens.tokenizer import Tokenizer

_WEIGHT_VERSION = "scripted"

__all__ = ["RecordedCall", "ScriptedEngine", "ScriptedStream"]


@dataclass(slots=True)
class RecordedCall:
    """What one request asked and got; kept only by an engine with `record=True`.

    Attributes:
        name: episode, agent and turn.
        prompt: the exact ids that were sent, shape [prompt], int32.
        sampling: as it was asked for.
        stop_ids: as they were asked for.
        seed: as it was asked for.
        constraint: what could be sampled; a scripted engine does not enforce it.
        sampled: the ids that were sampled, read or not, shape [sampled]; filled in when the request ends.
        logprobs: one for each of them; None where the engine gives none.
        finish: how it ended; None while it runs, and where it was refused.
    """

    name: str
    prompt: array[int]
    sampling: Sampling
    stop_ids: tuple[int, ...]
    seed: int | None
    constraint: Constraint | None
    sampled: Sequence[int] = ()
    logprobs: Sequence[float] | None = None
    finish: Finish | None = None


@dataclass(slots=True)
class _Conversation(Session):
    requests: int = 0


class ScriptedEngine(Engine):
    """An engine without a model.

    What it sends follows from its arguments and the requests, never from how many run at once.

    Args:
        replies: what the model says. A list is read from its beginning by every conversation; see `Replies`.
        tokenizer: by default the 256 bytes and ChatML's control tokens.
        template: a chat template, its bundled name or its file.
        stop_ids: ids that end a turn; by default the tokenizer's EOS.
        context: the most ids a prompt and what is sampled on it may have together.
        places: requests that run at once; further ones wait at the gate, late before first.
        room: ids of the KV cache it pretends to have; by default there is always room.
        seed: of log-probabilities and of what is drawn.
        chunks: how ids are cut into deltas.
        lone_finish: the finish comes on a delta of its own, without ids.
        latency: when ids arrive, in ticks.
        tick: seconds of a tick; at 0 nothing sleeps and a tick is one yield to the loop.
        faults: what goes wrong, by the number of the request or by a predicate.
        logprobs: give log-probabilities; False gives None.
        record: keep every request and what it got in `calls`; memory then grows with the run.
        adapters: names that `Sampling(adapter=)` can have from the beginning; `add_adapter` adds others.

    Attributes:
        calls: what was recorded.

    Raises:
        BadOption: replies, chunks or a setting that cannot be.
        BadTemplate: there is no such template.
    """

    def __init__(
        self,
        replies: Replies,
        *,
        tokenizer: Tokenizer | None = None,
        template: ChatTemplate | str | Path = "pythonic",
        stop_ids: tuple[int, ...] | None = None,
        context: int = 32_768,
        places: int = 256,
        room: int | None = None,
        seed: int = 0,
        chunks: Chunks = None,
        lone_finish: bool = False,
        latency: Latency = Latency(),  # noqa: B008  # frozen
        tick: float = 0.0,
        faults: Faults | None = None,
        logprobs: bool = True,
        record: bool = False,
        adapters: Sequence[str] = (),
    ) -> None:
        for name, value, least in (
            ("context", context, 2),
            ("places", places, 1),
            ("room", room, 1),
            ("tick", tick, 0),
        ):
            if value is not None and not (isinstance(value, int | float) and value >= least):
                raise BadOption(f"ScriptedEngine({name}={value!r}): give a number of at least {least}.")
        check_chunks(chunks)
        self.tokenizer = tokenizer or ByteTokenizer()
        self.template = template if isinstance(template, ChatTemplate) else ChatTemplate.load(template)
        self.stop_ids = stop_ids or _end_of_turn(self.tokenizer)
        self.context = context
        self.places = places
        self.calls: list[RecordedCall] = []
        self._source = reply_source(replies, ReplyEncoder(self.tokenizer, self.template))
        self._planner = Planner(
            stop_ids=self.stop_ids,
            context=context,
            seed=seed,
            chunks=chunks,
            lone_finish=lone_finish,
            latency=latency,
            logprobs=logprobs,
        )
        self._room = room or sys.maxsize
        self._seed = seed
        self._logprobs = logprobs
        self._tick = tick
        self._faults = faults
        self._record = record
        self._adapters = Adapters(adapters)
        self._tasks: anyio.abc.TaskGroup | None = None
        self._reset()

    def _reset(self) -> None:
        self._gate = AdmissionGate(self.places, self._room)
        self._ticker = Ticker(self._deliver, seconds=self._tick)
        self.control = EngineControl(ScriptedDriver(self), self._gate, [_WEIGHT_VERSION], self._adapters)
        self._open: dict[ScriptedStream, None] = {}  # ordered, so that faults come to all in one order
        self._closing: anyio.Event | None = None
        self._admitted = self._sampled = 0
        self._death = ""
        self._cause: Exception | None = None

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise RuntimeError("this engine is running already: enter it once, and share it")
        await self._source.open()
        self._reset()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._ticker.run, name="scripted engine")
        self.running, self.loop = True, current_token()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._tasks is not None
        tasks, self._tasks = self._tasks, None
        self.running = False
        self._fail("The engine was closed.", None)
        tasks.cancel_scope.cancel()
        # Nothing is passed on: an exception that leaves the block is not the task group's to wrap.
        await tasks.__aexit__(None, None, None)

    def stream(self, request: GenerationRequest) -> ScriptedStream:
        """The deltas of one request; nothing happens before the block is entered."""
        return ScriptedStream(self, request)

    def session(self, *, late: bool = False) -> Session:
        """A handle for one conversation, which reads a list of replies from its beginning."""
        return _Conversation(late=late)

    def close_session(self, session: Session) -> None:
        """Give the session's room back; twice is allowed."""
        self._gate.close(session)

    def stats(self) -> EngineStats:
        """What the engine is doing now; a stalled request is open, one whose last id was sent is not."""
        gate = self._gate
        return EngineStats(
            open=len(self._open),
            running=len(self._open),
            waiting=gate.waiting,
            first_waiting=gate.first_waiting,
            live_sessions=gate.live,
            kv_usage=gate.kept / self._room,
            sampled_tokens=self._sampled,
            weight_version=self.weight_version,
            state=self.state,
        )

    def is_alive(self) -> bool:
        """It was entered and did not die."""
        return self.running and not self._death

    async def health(self) -> None:
        """Return while the engine can answer.

        Raises:
            EngineDead: it was not entered, or it died.
        """
        if not self.is_alive():
            raise self._dead()

    def die(self, message: str = "a scripted death") -> None:
        """Fail every request in flight and at the gate, and every later one, with one cause."""
        self._fail(f"The engine died: {message}", RuntimeError(message))

    def describe(self) -> dict[str, Any]:
        """What a run's header keeps of the engine, as JSON."""
        return {
            "kind": "scripted",
            "model": self._source.describe(),
            "tokenizer": self.tokenizer.fingerprint,
            "template": self.template.name,
            "stop_ids": list(self.stop_ids),
            "context": self.context,
            "places": self.places,
            "seed": self._seed,
            "logprobs": "drawn" if self._logprobs else None,
            "weight_version": _WEIGHT_VERSION,
        }

    @property
    def ticker(self) -> Ticker[ScriptedStream]:
        """Its virtual time."""
        return self._ticker

    @property
    def open_streams(self) -> tuple[ScriptedStream, ...]:
        """Requests that were not sent their last id."""
        return tuple(self._open)

    async def until_sent(self) -> None:
        """Return when every open request was sent its last id."""
        while self._open:
            self._closing = self._closing or anyio.Event()
            await self._closing.wait()

    def _close(self, stream: ScriptedStream) -> None:
        self._open.pop(stream, None)
        if not self._open and self._closing is not None:
            self._closing.set()
            self._closing = None

    def _fail(self, death: str, cause: Exception | None) -> None:
        if self._death:
            return
        self._death, self._cause = death, cause
        self._gate.fail(self._dead)
        for stream in self.open_streams:
            stream._fail(self._dead())
            self._close(stream)

    def _dead(self) -> EngineDead:
        error = EngineDead(self._death or "The engine is not running: use it as `async with engine`.")
        error.__cause__ = self._cause
        return error

    async def _admit(self, stream: ScriptedStream) -> None:
        request = stream.request
        if not self.is_alive():
            raise self._dead()
        if not 0 < len(request.prompt) < self.context:
            raise RequestRejected(
                f"{request.name}: the prompt has {len(request.prompt)} ids; "
                f"the context is {self.context}, and at least one id must be given and one sampled"
            )
        self._adapters.check(request.name, request.sampling.adapter)
        await self._gate.enter(stream.session, self._keeps(stream))
        self._open[stream] = None
        try:
            stream.adapter = self._adapters.take(request.name, request.sampling.adapter)
            stream.stamps = Stamps(self.weight_version, stream.adapter)
            stream.delivery = await self._plan(stream)
            self._ticker.schedule(stream, stream.delivery.first - self._ticker.now)
        except BaseException:
            self._release(stream)
            raise

    async def _plan(self, stream: ScriptedStream) -> Delivery:
        request = stream.request
        if self._record:
            self.calls.append(stream._keep_record())
        call = ModelCall(request, _turn_of(stream.session), self._admitted, self.tokenizer, self._seed)
        self._admitted += 1
        fault = self._faults(call) if callable(self._faults) else (self._faults or {}).get(call.number)
        encoded = forced(request) or self._source.reply(call)
        if not isinstance(encoded, EncodedReply):
            encoded = await encoded
            if self._death:
                raise self._dead()
        fault = fault or encoded.reply.fault
        if fault is not None and fault.kind is FaultKind.REJECT:
            raise RequestRejected(f"{request.name}: {fault.message}")
        return self._planner.plan(call, encoded, fault, self._ticker.now)

    def _deliver(self, stream: ScriptedStream) -> int | None:
        return stream._advance() if stream in self._open else None

    def _sent_all(self, stream: ScriptedStream, fault: Fault | None) -> None:
        if fault is not None and fault.kind is FaultKind.DEATH:
            self.die(fault.message)
        if fault is None or fault.kind is not FaultKind.STALL:
            self._close(stream)

    def _release(self, stream: ScriptedStream) -> None:
        self._close(stream)
        self._adapters.leave(stream.adapter)
        self._gate.leave(stream.session, self._keeps(stream))
        if stream.request.session is None:
            self._gate.close(stream.session)

    def _keeps(self, stream: ScriptedStream) -> int:
        request = stream.request
        return min(len(request.prompt) + stream.sent + request.sampling.max_tokens, self.context)


class ScriptedStream(DeltaStream):
    """The deltas of one request to a scripted engine.

    Attributes:
        request: what was asked.
        session: the conversation it belongs to, or one of its own.
        delivery: what it will be sent; None before it was admitted.
        sent: ids that left the engine, read or not.
        stamps: which weights sampled them.
        adapter: on the weights; None without one.
    """

    def __init__(self, engine: ScriptedEngine, request: GenerationRequest) -> None:
        self.rest: list[Delta] = []
        self.finish: Finish | None = None
        self.request = request
        self.session = request.session or _Conversation()
        self.delivery: Delivery | None = None
        self.sent = 0
        self.stamps = Stamps(engine.weight_version)
        self.adapter: AdapterVersion | None = None
        self._engine = engine
        self._is_cut = False
        self._arrived = 0  # deltas
        self._read = 0  # of those
        self._failure: EngineDead | None = None
        self._news: anyio.Event | None = None  # made only by a reader that has to wait
        self._record: RecordedCall | None = None
        self._inside = False

    async def __aenter__(self) -> Self:
        await self._engine._admit(self)
        self._inside = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Nothing here waits, so there is nothing to shield.
        if not self._inside:
            return
        self._inside = False
        self._drain()
        self._engine._release(self)
        if self._record is not None and self.delivery is not None:
            self._record.sampled, self._record.finish = self.delivery.ids[: self.sent], self.finish
            if self.delivery.logprobs is not None:
                self._record.logprobs = self.delivery.logprobs[: self.sent]

    async def __anext__(self) -> Delta:
        while self._read == self._arrived:
            if self.finish is not None or not self._inside:
                raise StopAsyncIteration
            if self._failure is not None:
                raise self._failure
            if self._is_cut and self.delivery is not None:
                return self._abort(self.delivery)
            # Without it a reader that is woken at every tick would never hear of its cancellation on asyncio.
            await checkpoint_if_cancelled()
            self._news = anyio.Event()
            await self._news.wait()
        return self._next()

    def _advance(self) -> int | None:
        """The next delta arrives, or all of them where nothing lies between; gives the ticks to the one after."""
        delivery = self.delivery
        assert delivery is not None
        last = len(delivery.cuts)
        self._arrived = min(self._arrived + 1, last) if delivery.between else last
        if self._arrived:
            self._count(delivery.cuts[self._arrived - 1])
        self._wake()
        if self._arrived < last:
            return delivery.pause(self._arrived)
        self._engine._sent_all(self, delivery.fault)
        return None

    def _fail(self, error: EngineDead) -> None:
        """The engine is gone: what has arrived can be read, then `error` is raised."""
        self._failure = error
        self._wake()

    def cut(self) -> None:
        """The engine ends the request for its trainer; what was sampled can be read."""
        self._is_cut = True
        self._engine._close(self)
        self._wake()

    def stamp(self, version: str) -> None:
        """What is sampled from now on is of these weights."""
        sampled = 0 if self.delivery is None else self.delivery.sampled(self._engine._ticker.now)
        self.stamps.mark(version, max(sampled, self.sent))

    def _next(self) -> Delta:
        assert self.delivery is not None
        delta = self.delivery.delta(self._read)
        self._read += 1
        told = delta.finish
        if told is None:
            return delta
        self.finish = Finish(told.reason, told.stop, self.stamps.spans(self.sent), told.cached_tokens)
        return Delta(delta.token_ids, delta.logprobs, self.finish)

    def _drain(self) -> None:
        while self._read < self._arrived:
            self.rest.append(self._next())
        if self.finish is not None:
            return
        if self._failure is not None:
            self.finish = Finish(FinishReason.ERROR, str(self._failure), self.stamps.spans(self.sent))
        elif self.delivery is not None:
            self.rest.append(self._abort(self.delivery))

    def _abort(self, delivery: Delivery) -> Delta:
        """End the request; ids that were sampled and wait for others to make a delta come at once."""
        start = self.sent
        self._count(delivery.sampled(self._engine._ticker.now))
        whole = delivery.finish is not None and self.sent == len(delivery.ids)
        finish = delivery.finish if whole and delivery.finish is not None else Finish(FinishReason.ABORT)
        self.finish = replace(finish, versions=self.stamps.spans(self.sent))
        return delivery.piece(start, self.sent, self.finish)

    def _count(self, sent: int) -> None:
        self._engine._sampled += sent - self.sent
        self.sent = sent

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None

    def _keep_record(self) -> RecordedCall:
        asked = self.request
        prompt = array("i", asked.prompt)
        self._record = RecordedCall(asked.name, prompt, asked.sampling, asked.stop_ids, asked.seed, asked.constraint)
        return self._record


def _turn_of(session: Session) -> int:
    if not isinstance(session, _Conversation):
        raise TypeError(f"{session!r} is no session of a scripted engine: make it with engine.session()")
    session.requests += 1
    return session.requests - 1


def _end_of_turn(tokenizer: Tokenizer) -> tuple[int, ...]:
    if tokenizer.eos_id is None:
        raise BadOption("ScriptedEngine(tokenizer=): it has no EOS; say which ids end a turn with stop_ids=.")
    return (tokenizer.eos_id,)
