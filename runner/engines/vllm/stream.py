"""Deltas of one request to vLLM. The request ends at the latest when the `async with` block of its stream ends."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from typing import Any

import anyio

from runner.engines.base import Delta, Finish, FinishReason, GenerationRequest, Session
from runner.engines.stream import GatedStream
from runner.engines.vllm.runtime import ABORT_SECONDS, VllmRuntime
from runner.errors import EngineDead
from runner.tokens.log import VersionSpan
from runner.tokens.side_data import RoutedExperts, SamplingMasks, SideData
from runner.tokens.top_logprobs import TopLogprobs

__all__ = ["VllmStream"]


_NOTHING_LEFT = "no id could be sampled: bad_words or min_tokens exclude all ids of its constraint"


class VllmStream(GatedStream[VllmRuntime, Session]):
    """Deltas of one request from vLLM's collector."""

    def __init__(self, runtime: VllmRuntime, request: GenerationRequest) -> None:
        super().__init__(runtime, request, request.session or Session())
        self._collector: Any = None
        self._cut_by_death = False

    @property
    def sent_all(self) -> bool:
        """True if vLLM has sent the request's last id, even if this id is still unread, or if vLLM has died."""
        if self.finish is not None:
            return True
        unread = self._collector.output if self._collector is not None else None
        return isinstance(unread, Exception) or (unread is not None and unread.finished)

    def stamp(self, version: str) -> None:
        """Record this weight version for the ids after those that vLLM has sent so far."""
        unread = self._collector.output if self._collector is not None else None
        waiting = 0 if unread is None or isinstance(unread, Exception) else len(unread.outputs[0].token_ids)
        self._stamps.mark(version, self.sent + waiting)

    async def _begin(self) -> None:
        self._collector = await self._runtime.send(self.request, self._adapter, rank=self._session.affinity.rank)

    async def __aexit__(self, *_: object) -> None:
        if not self._inside:
            return
        try:
            if self.finish is None:
                await self._drain()
        finally:
            self._collector.close()
            self._leave()

    def _leave(self) -> None:
        super()._leave()
        self._runtime.process.stats.notify()

    async def __anext__(self) -> Delta:
        if self.finish is not None:
            raise StopAsyncIteration
        try:
            return await self._read()
        except Exception as error:  # the collector raises the error that ended vLLM's output loop
            raise self._died(error) from error

    async def _read(self) -> Delta:
        if self._cut_by_death:
            raise RuntimeError("vLLM cut the request, since another data-parallel rank died")
        collector = self._collector
        # Available output is read without a task switch, as in vLLM's own `generate()`.
        output = collector.get_nowait() or await collector.get()
        if self.request.scores_prompt and self.prompt_logprobs is None:
            self.prompt_logprobs = list(output.prompt_logprobs.logprobs)  # a flat list, without the prompt's first id
        completion = output.outputs[0]
        ids = completion.token_ids
        self.sent += len(ids)
        self._runtime.sampled += len(ids)
        if output.finished:
            self.finish = self._finished(output, completion)
            if self.finish.reason is FinishReason.ABORT and self._runtime.process.has_lost_a_core:
                self.finish, self._cut_by_death = None, True
                if not ids:
                    return await self._read()
        flat, count = completion.logprobs, self.request.sampling.logprobs or 0
        top = _top(flat, count, len(ids)) if count else None
        delta = Delta(ids, _logprobs(flat, count, len(ids)), self.finish, top, _side(completion))
        failed = self.finish is not None and self.finish.reason is FinishReason.ERROR
        return self._without_the_impossible(delta) if failed else delta

    def _finished(self, output: Any, completion: Any) -> Finish:
        reason = FinishReason(completion.finish_reason)
        stop = completion.stop_reason
        if reason is FinishReason.STOP and stop is None:  # vLLM has no stop reason for the tokenizer's EOS
            stop = completion.token_ids[-1]
        spans = getattr(completion, "weight_versions", None)
        versions = (
            self._unstamped()
            if spans is None
            else tuple(VersionSpan(self._stamps.named(span.version), span.start, span.end) for span in spans)
        )
        return Finish(reason, stop, versions, output.num_cached_tokens)

    def _without_the_impossible(self, delta: Delta) -> Delta:
        """Drop the first id whose log-probability is NaN, and all later ids, from the last delta of a failed request.

        If no id can be sampled, vLLM returns id 0 with the log-probability NaN, and ends the request with an error.
        """
        logprobs, finish = delta.logprobs or (), delta.finish
        end = next((index for index, logprob in enumerate(logprobs) if math.isnan(logprob)), None)
        if end is None or finish is None:
            return delta
        self.finish = finish = replace(finish, stop=finish.stop or _NOTHING_LEFT)
        top = delta.top.part(0, end) if delta.top is not None else None
        side = delta.side.part(0, end) if delta.side is not None else None
        return Delta(delta.token_ids[:end], logprobs[:end], finish, top, side)

    async def _drain(self) -> None:
        with anyio.move_on_after(ABORT_SECONDS, shield=True):
            try:
                await self._runtime.drop(self._collector)
                while self.finish is None:
                    self.rest.append(await self._read())
            except Exception as error:  # this must not replace the exception in flight
                self._died(error)
        if self.finish is None:
            self.finish = Finish(FinishReason.ABORT, versions=self._unstamped())

    def _died(self, error: Exception) -> EngineDead:
        death = self._runtime.death_error(error)
        self.finish = Finish(FinishReason.ERROR, stop=str(death), versions=self._unstamped())
        return death

    def _unstamped(self) -> tuple[VersionSpan, ...]:
        """Return the weight versions that this stream recorded. They are used if vLLM has returned no versions."""
        return self._stamps.spans(self.sent)


def _side(completion: Any) -> SideData | None:
    """Return the sampling masks and the routed experts of a completion.

    vLLM returns them with its options `return_sampling_mask` and `enable_return_routed_experts`, since 0.28. The
    result is None if vLLM returned neither.
    """
    masks, experts = getattr(completion, "sampling_mask", None), getattr(completion, "routed_experts", None)
    if masks is None and experts is None:
        return None
    return SideData(
        None if masks is None else SamplingMasks.of(masks.token_ids),
        None if experts is None else RoutedExperts.of(experts),
    )


# For each position, vLLM's flat lists have the sampled id, and then the requested number of most likely ids. Before
# 0.32 the lists of a merged output may begin with older positions.


def _logprobs(flat: Any, count: int, positions: int) -> list[float] | None:
    if not positions:
        return []
    values: list[float] = flat.logprobs
    if count:
        values = values[:: count + 1]
    return values if len(values) == positions else values[-positions:]


def _top(flat: Any, count: int, positions: int) -> TopLogprobs:
    if not positions:
        return TopLogprobs(count)
    size = positions * (count + 1)
    ids, logprobs = flat.token_ids[-size:], flat.logprobs[-size:]
    del ids[:: count + 1], logprobs[:: count + 1]
    return TopLogprobs(count, array("i", ids), array("f", logprobs))
