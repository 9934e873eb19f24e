"""The scripted engine: says what it is told, delivered as a real engine would, for development and tests."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.abc
from anyio.lowlevel import current_token

from runner import checked
from runner.engines.adapters import Adapters
from runner.engines.base import Engine, EngineStats, GenerationRequest, Session
from runner.engines.gate import AdmissionGate, affinity_beside
from runner.engines.scripted.delivery_plan import DeliveryPlanner
from runner.engines.scripted.replies import Replies, ReplyEncoder, scripted_model
from runner.engines.scripted.runtime import ScriptedRuntime
from runner.engines.scripted.script import Chunks, Faults, Latency, Scores, check_chunks
from runner.engines.scripted.stream import RecordedCall, ScriptedSession, ScriptedStream
from runner.errors import BadOption
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.control_text import special_tokens
from runner.tokens.template import ChatTemplate
from runner.tokens.tokenizer import Tokenizer

__all__ = ["ScriptedEngine"]

_WEIGHT_VERSION = "scripted"


class ScriptedEngine(Engine):
    """An engine without a model.

    What it sends follows from its arguments and the requests, never from how many run at once.

    Args:
        replies: what the model says. A list is read from its beginning by every conversation; see `Replies`.
        tokenizer: by default the 256 bytes, ChatML's control tokens, and those that the template's text has.
        template: a chat template, its bundled name or its file.
        stop_ids: ids that end a turn; by default the tokenizer's EOS.
        context: the most ids a prompt and what is sampled on it may have together.
        places: requests that run at once; further ones wait at the gate, late before first.
        room: ids of the KV cache it pretends to have; by default there is always room.
        seed: what log-probabilities and random choices follow from.
        chunks: how ids are cut into deltas.
        lone_finish: the finish comes on a delta of its own, without ids.
        latency: when ids arrive, in ticks.
        tick: seconds of a tick; at 0 nothing sleeps and a tick is one yield to the loop.
        faults: what goes wrong, by the number of the request or by a predicate.
        logprobs: give log-probabilities; False gives None.
        record: keep every request and what it got in `calls`; memory then grows with the run.
        scores: the log-probabilities that `score` gives: a function of the ids that returns one for each id but the
            first; by default they are drawn for each pair of neighbouring ids.
        adapters: names that `Sampling(adapter=)` can have from the beginning; `add_adapter` adds others.

    Raises:
        BadOption: replies, chunks or a setting that cannot be.
        BadTemplate: there is no such template.
    """

    runtime: ScriptedRuntime

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
        scores: Scores = None,
    ) -> None:
        for name, value, least in (("context", context, 2), ("places", places, 1), ("room", room, 1)):
            if value is not None:
                given = f"ScriptedEngine({name}={value!r})"
                checked.whole(given, checked.number(given, value, least=least), least=least)
        checked.number(f"ScriptedEngine(tick={tick!r})", tick, least=0)
        check_chunks(chunks)
        self.template = template if isinstance(template, ChatTemplate) else ChatTemplate.load(template)
        self.tokenizer = tokenizer or ByteTokenizer(special_tokens(self.template.text))
        self.stop_ids = stop_ids or _end_of_turn(self.tokenizer)
        self.context = context
        self.places = places
        self.calls: list[RecordedCall] = []
        """What was recorded, a `RecordedCall` for each request; empty without `record=True`."""
        self._model = scripted_model(replies, ReplyEncoder(self.tokenizer, self.template))
        self._planner = DeliveryPlanner(
            model=self._model,
            faults=faults,
            tokenizer=self.tokenizer,
            stop_ids=self.stop_ids,
            context=context,
            seed=seed,
            chunks=chunks,
            lone_finish=lone_finish,
            latency=latency,
            logprobs=logprobs,
            scores=scores,
        )
        self._room = room or sys.maxsize
        self._seed = seed
        self._logprobs = logprobs
        self._tick = tick
        self._record = record
        self._adapters = Adapters(adapters)
        self._tasks: anyio.abc.TaskGroup | None = None
        self._reset()

    def _reset(self) -> None:
        self.runtime = ScriptedRuntime(
            AdmissionGate(self.places, self._room),
            self._planner,
            self._adapters,
            context=self.context,
            tick=self._tick,
            version=_WEIGHT_VERSION,
        )

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise RuntimeError("this engine is running already: enter it once, and share it")
        await self._model.open()
        self._reset()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self.runtime.tick_clock.run, name="scripted engine")
        self.runtime.start()
        self.running, self.loop = True, current_token()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._tasks is not None
        tasks, self._tasks = self._tasks, None
        self.running = False
        self.runtime.stop()
        tasks.cancel_scope.cancel()
        # Nothing is passed on: an exception that leaves the block is not the task group's to wrap.
        await tasks.__aexit__(None, None, None)

    def stream(self, request: GenerationRequest) -> ScriptedStream:
        """The deltas of one request; nothing happens before the block is entered."""
        return ScriptedStream(self.runtime, request, self.calls if self._record else None)

    def session(self, *, late: bool = False, beside: Session | None = None) -> Session:
        """A handle for one conversation, which reads a list of replies from its beginning."""
        return ScriptedSession(late=late, affinity=affinity_beside(beside))

    def check_scoring(self, *, as_sampled: bool) -> None:
        """A scripted engine scores in either way."""

    def stats(self) -> EngineStats:
        """What the engine is doing now; a stalled request is open, one whose last id was sent is not."""
        runtime = self.runtime
        gate = runtime.gate
        return EngineStats(
            open=len(runtime.requests),
            running=len(runtime.requests),
            waiting=gate.waiting,
            first_waiting=gate.first_waiting,
            live_sessions=gate.live,
            kv_usage=gate.kept / self._room,
            sampled_tokens=runtime.sampled,
            weight_version=self.weight_version,
            state=self.state,
        )

    def is_alive(self) -> bool:
        """It was entered and did not die."""
        return self.runtime.is_alive()

    async def health(self) -> None:
        """Return while the engine can answer."""
        self.runtime.require_alive()

    def die(self, message: str = "a scripted death") -> None:
        """Fail every request in flight and at the gate, and every later one, with one cause."""
        self.runtime.die(message)

    def describe(self) -> dict[str, Any]:
        """What a run's header keeps of the engine, as JSON."""
        return {
            "kind": "scripted",
            "model": self._model.describe(),
            "tokenizer": self.tokenizer.fingerprint,
            "template": self.template.name,
            "stop_ids": list(self.stop_ids),
            "context": self.context,
            "places": self.places,
            "seed": self._seed,
            "logprobs": "drawn" if self._logprobs else None,
            "weight_version": _WEIGHT_VERSION,
        }


def _end_of_turn(tokenizer: Tokenizer) -> tuple[int, ...]:
    if tokenizer.eos_id is None:
        raise BadOption("ScriptedEngine(tokenizer=): it has no EOS; say which ids end a turn with stop_ids=.")
    return (tokenizer.eos_id,)
