"""Scripted engine: scripted replies, delivered as by a real engine, for development and tests."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.abc
from anyio.lowlevel import current_token

from runner import checked
from runner.engines.adapters import Adapters
from runner.engines.base import EngineStats, GenerationRequest, ModelEngine, Session
from runner.engines.gate import AdmissionGate, affinity_beside
from runner.engines.scripted.delivery_plan import DeliveryPlanner
from runner.engines.scripted.replies import Replies, ReplyEncoder, scripted_model
from runner.engines.scripted.runtime import ScriptedRuntime
from runner.engines.scripted.script import Chunks, Faults, Latency, Scores, check_chunks
from runner.engines.scripted.side_data import SyntheticSideData
from runner.engines.scripted.stream import RecordedCall, ScriptedSession, ScriptedStream
from runner.errors import BadOption
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.control_text import special_tokens
from runner.tokens.template import ChatTemplate
from runner.tokens.tokenizer import Tokenizer

__all__ = ["ScriptedEngine"]

_WEIGHT_VERSION = "scripted"


class ScriptedEngine(ModelEngine[ScriptedRuntime]):
    """Engine without a model.

    Its output depends only on its arguments and the requests, never on concurrency.

    Args:
        replies: replies of the model. Every conversation reads a list from its beginning; see `Replies`.
        tokenizer: the tokenizer; by default one with the 256 bytes, ChatML's control tokens, and the control tokens in
            the template's text.
        template: a chat template, its bundled name or its file.
        stop_ids: ids that end a turn; by default the tokenizer's EOS.
        context: maximum number of ids of prompt and turn together.
        places: maximum number of concurrent requests; further ones wait at the gate, later turns before first ones.
        room: size of the simulated KV cache in ids; unlimited by default.
        seed: seed of log-probabilities and random choices.
        chunks: sizes of deltas.
        lone_finish: True to send the finish in a delta without ids.
        latency: times of ids, in ticks.
        tick: seconds of a tick; at 0 a tick is one yield to the event loop, without sleep.
        faults: faults by request number or predicate.
        logprobs: False for deltas without log-probabilities.
        record: True to keep all requests and their output in `calls`; memory then grows with the run.
        scores: log-probabilities for `score`: a function of the ids that returns one for each id but the first; by
            default they are drawn for each pair of neighbouring ids.
        sampling_masks: True to return the ids that could be sampled in the place of each id, for turns whose sampling
            excludes ids, and for replies with masks.
        routed_experts: number of layers with experts, and number of experts per id and layer, to return synthetic
            experts; None to return no experts.
        adapters: initial names for `Sampling(adapter=)`; `add_adapter` adds others.

    Raises:
        BadOption: replies, chunks or a setting are invalid.
        BadTemplate: the template cannot be loaded.
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
        sampling_masks: bool = False,
        routed_experts: tuple[int, int] | None = None,
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
        """A `RecordedCall` for each request; empty without `record=True`."""
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
            side=SyntheticSideData(sampling_masks, routed_experts),
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
        self._require_not_entered()
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
        # The task group does not receive the exception, since the group would wrap it in an exception group.
        await tasks.__aexit__(None, None, None)

    def stream(self, request: GenerationRequest) -> ScriptedStream:
        return ScriptedStream(self.runtime, request, self.calls if self._record else None)

    def session(self, *, late: bool = False, beside: Session | None = None) -> Session:
        """Create a handle for one conversation, which reads a list of replies from its beginning."""
        return ScriptedSession(late=late, affinity=affinity_beside(beside))

    def check_scoring(self, *, as_sampled: bool) -> None:
        """Accept every call of `score`."""

    def stats(self) -> EngineStats:
        """Return the current counts. A stalled request is open; a request whose last id was sent is not open."""
        return replace(super().stats(), kv_usage=self.runtime.gate.kept / self._room)

    def die(self, message: str = "a scripted death") -> None:
        """Fail every request in flight and at the gate, and every later one, with one cause."""
        self.runtime.die(message)

    def describe(self) -> dict[str, Any]:
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
        raise BadOption("ScriptedEngine(tokenizer=): the tokenizer has no EOS; give the ids that end a turn: stop_ids.")
    return (tokenizer.eos_id,)
