"""Delivery plan of a scripted request: all ids and their times, known when the request begins."""

from __future__ import annotations

import functools
import math
import random
from array import array
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from runner.engines.base import Delta, Finish, FinishReason, GenerationRequest
from runner.engines.scripted.model import EncodedReply, ScriptedModel
from runner.engines.scripted.script import (
    Chunks,
    Fault,
    FaultKind,
    Faults,
    Latency,
    ModelCall,
    Reply,
    Scores,
    cut_points,
)
from runner.engines.scripted.side_data import SyntheticSideData
from runner.errors import RequestRejected
from runner.tokens.side_data import SideData
from runner.tokens.tokenizer import Tokenizer
from runner.tokens.top_logprobs import TopLogprobs

__all__ = ["DeliveryPlan", "DeliveryPlanner"]


_NOISE_COUNT: Final = 1 << 13  # number of drawn log-probabilities per seed


@dataclass(slots=True)
class DeliveryPlan:
    """Deltas of one request and their times, which are fixed when the request begins."""

    ids: list[int]
    """Sampled ids, up to the fault if there is one."""
    logprobs: Sequence[float] | None
    """Log-probability of each id; None if the engine is configured without log-probabilities."""
    top: TopLogprobs | None
    """Most likely ids at each position; None if none were requested, or `logprobs` is None."""
    side: SideData | None
    """Sampling masks and routed experts; None if the engine is configured without such data."""
    cuts: list[int]
    """End of each delta, as an index into `ids`."""
    between: int
    """Ticks from one id to the next."""
    finish: Finish | None
    """Finish of the last delta, without weight versions; None if the stream does not end."""
    fault: Fault | None
    """Fault after the last id; None without a fault."""
    begins: int
    """Tick of the first id."""

    @property
    def first(self) -> int:
        """Tick of the first delta; a delta arrives with the last of its ids."""
        return self.begins + max(0, self.cuts[0] - 1 if self.cuts else 0) * self.between

    def piece(self, start: int, end: int, finish: Finish | None) -> Delta:
        logprobs = self.logprobs[start:end] if self.logprobs is not None else None
        top = self.top.part(start, end) if self.top is not None else None
        side = self.side.part(start, end) if self.side is not None else None
        if side is not None and finish is None:
            side = SideData(side.masks)  # as in vLLM, experts come at the end
        return Delta(self.ids[start:end], logprobs, finish, top, side)

    def pause(self, index: int) -> int:
        """Return the ticks from the previous delta to the one at `index`, at least 1."""
        return max(1, (self.cuts[index] - self.cuts[index - 1]) * self.between)

    def sampled(self, now: int) -> int:
        """Return the number of ids that are sampled by the tick `now`, sent or not."""
        if now < self.begins:
            return 0
        return min(len(self.ids), 1 + (now - self.begins) // self.between) if self.between else len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryPlanner:
    """Planner of deliveries, with the settings of one `ScriptedEngine`."""

    model: ScriptedModel
    faults: Faults | None
    """Configured faults, by request number or predicate."""
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    """Ids that end a turn if the request has none."""
    context: int
    """Maximum number of ids of prompt and turn together."""
    seed: int
    chunks: Chunks
    """Sizes of deltas, for replies without their own."""
    lone_finish: bool
    """True if the finish has a delta of its own."""
    latency: Latency
    """Times of ids, for replies without their own."""
    logprobs: bool
    """True if deltas have log-probabilities."""
    side: SyntheticSideData
    """Side data that the engine returns."""
    scores: Scores
    """Function for the log-probabilities of given ids; None to draw them."""

    def ask(
        self, request: GenerationRequest, turn: int, number: int
    ) -> tuple[ModelCall, Fault | None, EncodedReply | Awaitable[EncodedReply]]:
        """Return the model call of a request, its fault (None without a fault) and its reply.

        The reply may be awaitable, and may have a fault of its own.
        """
        call = ModelCall(request, turn, number, self.tokenizer, self.seed)
        # The fault comes before the reply, since both may use the turn's random numbers.
        fault = self.faults(call) if callable(self.faults) else (self.faults or {}).get(number)
        extra = request.extra
        ids = extra.get("force", extra.get("score")) if extra else None
        if request.scores_prompt:  # the model is not called, so that no reply is used up
            ids = self.stop_ids[:1]
        if ids is not None:  # ids that a test forces, or ids to score
            return call, fault, EncodedReply(Reply(ids=ids, finish=FinishReason.LENGTH), list(ids))
        return call, fault, self.model.reply(call)

    def plan(self, call: ModelCall, encoded: EncodedReply, fault: Fault | None, now: int) -> DeliveryPlan:
        """Plan the delivery of a request. The first id comes in the tick after `now` at the earliest.

        Raises:
            RequestRejected: the fault is a rejection, or the reply does not fit the request.
        """
        reply = encoded.reply
        fault = fault or reply.fault
        if fault is not None and fault.kind is FaultKind.REJECT:
            raise RequestRejected(f"{call.request.name}: {fault.message}")
        ids, finish = self._ended(call.request, encoded)
        if fault is not None and fault.at <= len(ids):
            ids = ids[: fault.at]
            error = Finish(FinishReason.ERROR, fault.message)
            ending = error if fault.kind is FaultKind.ERROR else None
        else:
            fault, ending = None, finish
        logprobs = self._logprobs(call, reply, len(ids))
        latency = self.latency if reply.latency is None else reply.latency
        wait = latency.first + (_rng(call).randint(0, latency.jitter) if latency.jitter else 0)
        return DeliveryPlan(
            ids=ids,
            logprobs=logprobs,
            top=None if logprobs is None else self._top(call.request, reply, ids, logprobs),
            side=self.side.of(call.request, ids, reply.sampling_masks, self.tokenizer.size),
            cuts=self._cuts(call, reply, len(ids), ends=ending is not None),
            between=latency.between,
            finish=ending,
            fault=fault,
            begins=now + 1 + wait,
        )

    def scored(self, prompt: Sequence[int]) -> list[float]:
        """Return the log-probability of each prompt id but the first, from the script, or drawn for each pair of ids.

        Raises:
            RequestRejected: the script returns a wrong number of values.
        """
        if self.scores is None:
            drawn = _noise(self.seed)
            return [drawn[(before * 7919 + token_id * 104_729) % _NOISE_COUNT] for before, token_id in pairwise(prompt)]
        values = [float(value) for value in self.scores(prompt)]
        if len(values) != len(prompt) - 1:
            raise RequestRejected(
                f"ScriptedEngine(scores=) returned {len(values)} values for {len(prompt)} ids; give one for each id "
                "but the first."
            )
        return values

    def _ended(self, request: GenerationRequest, encoded: EncodedReply) -> tuple[list[int], Finish]:
        """Return the ids up to the end of the turn, and the finish."""
        ids, reply = encoded.ids, encoded.reply
        room = min(request.sampling.max_tokens, self.context - len(request.prompt))
        stops = self._stops(request, reply)
        reason, stop = FinishReason(reply.finish), None
        if not stops.isdisjoint(ids):
            end = next(index for index, token_id in enumerate(ids) if token_id in stops)
            ids, reason, stop = ids[:end], FinishReason.STOP, ids[end]
        elif reason is FinishReason.STOP:
            stop = self._stop_id(request, reply)
        if stop is not None and stop not in stops:  # this stop id does not end the turn, so the reply is repeated
            ids, reason, stop = _repeated([*ids, stop], room), FinishReason.LENGTH, None
        elif stop is not None:
            ids = [*self._long_enough(request, ids), stop]
        if len(ids) > room:
            ids, reason, stop = ids[:room], FinishReason.LENGTH, None
        return ids, Finish(reason, stop)

    def _stops(self, request: GenerationRequest, reply: Reply) -> set[int]:
        """Return the ids that end the turn."""
        ignored = self.stop_ids if request.sampling.ignore_eos else ()
        stops = set(request.stop_ids or (() if ignored else self.stop_ids))
        if reply.stop is not None and reply.stop not in ignored:
            stops.add(reply.stop)
        return stops

    def _long_enough(self, request: GenerationRequest, ids: list[int]) -> list[int]:
        """Return the ids before the stop id, repeated up to the request's `min_tokens`.

        Raises:
            RequestRejected: the reply has no ids, and `min_tokens` is above 0.
        """
        least = request.sampling.min_tokens
        if len(ids) >= least:
            return ids
        if not ids:
            raise RequestRejected(
                f"{request.name}: Sampling(min_tokens={least}), and the reply has no ids to repeat. Give it text."
            )
        return _repeated(ids, least)

    def _stop_id(self, request: GenerationRequest, reply: Reply) -> int:
        if reply.stop is not None:
            return reply.stop
        if request.sampling.ignore_eos:
            return self.stop_ids[0]
        own = self.stop_ids[0]
        return own if own in request.stop_ids or not request.stop_ids else request.stop_ids[0]

    def _cuts(self, call: ModelCall, reply: Reply, length: int, *, ends: bool) -> list[int]:
        chunks = self.chunks if reply.chunks is None else reply.chunks
        rng = _rng(call) if chunks == "random" else None
        cuts = cut_points(length, chunks, singly=call.request.acts_on_deltas, rng=rng)
        if ends and (self.lone_finish or not cuts):
            cuts.append(length)
        return cuts

    def _logprobs(self, call: ModelCall, reply: Reply, length: int) -> Sequence[float] | None:
        if not self.logprobs:
            return None
        drawn = _noise(self.seed)
        # The factor is odd, so 8,192 consecutive keys begin at different draws. Two consecutive keys begin 273 draws
        # apart.
        start = (call.key * 7919 + self.seed) % _NOISE_COUNT
        noise = drawn[start : start + length]
        while len(noise) < length:
            noise += drawn[: length - len(noise)]
        if reply.logprobs is None:
            return noise
        # An appended stop id has no value of its own.
        return [*reply.logprobs[:length], *noise[len(reply.logprobs) :]]

    def _top(
        self, request: GenerationRequest, reply: Reply, ids: Sequence[int], logprobs: Sequence[float]
    ) -> TopLogprobs | None:
        count = request.sampling.logprobs
        if not count:
            return None
        top = synthetic_top(ids, logprobs, count, self.tokenizer.size)
        if reply.top_logprobs is None:
            return top
        said = given(request.name, reply.top_logprobs, count).part(0, len(ids))
        # As with log-probabilities, an appended stop id has no values of its own.
        said.extend(top.part(len(said), len(ids)))
        return said


def _repeated(ids: list[int], length: int) -> list[int]:
    return (ids * (length // len(ids) + 1))[:length]


def _rng(call: ModelCall) -> random.Random:
    """Return a generator of random numbers for the delivery; a function that plays the model uses `ModelCall.rng`."""
    return random.Random(call.key)


@functools.lru_cache(16)
def _noise(seed: int) -> list[float]:
    """Draw log-probabilities once per seed.

    Each turn reads this list from another position, since new draws would take longer than the turn.
    """
    rng = random.Random(seed)
    return array("f", (-rng.expovariate(1.0) - 1e-6 for _ in range(_NOISE_COUNT))).tolist()


def given(name: str, top: TopLogprobs | Sequence[Mapping[int, float]], count: int) -> TopLogprobs:
    """Return the `count` most likely ids of each position from a reply.

    Raises:
        RequestRejected: the reply has fewer ids per position; the message begins with `name`, the request's name.
    """
    fewest = top.count if isinstance(top, TopLogprobs) else min(map(len, top), default=count)
    if fewest < count:
        raise RequestRejected(
            f"{name}: Sampling(logprobs={count}) asks for {count} most likely ids, and the reply's top_logprobs have "
            f"{fewest}. Ask for fewer, or add some."
        )
    return top.narrowed(count) if isinstance(top, TopLogprobs) else TopLogprobs.of(top, count)


def synthetic_top(ids: Sequence[int], logprobs: Sequence[float], count: int, vocabulary: int) -> TopLogprobs:
    """Return synthetic most likely ids, a row for each sampled id.

    The next id of the vocabulary has half of the probability that the sampled id leaves, the id after it a quarter, and
    so on.
    """
    rows = []
    for token_id, logprob in zip(ids, logprobs, strict=True):
        left = -math.expm1(logprob)
        rest = math.log(left) if left > 0 else -math.inf
        row = {(token_id + n) % vocabulary: rest - n * math.log(2) for n in range(1, min(count + 1, vocabulary))}
        rows.append({**row, token_id: logprob})
    return TopLogprobs.of(rows, count)
