"""The deltas of one request to vLLM, out of its collector, and nothing left behind."""

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
from runner.tokens.top_logprobs import TopLogprobs

__all__ = ["VllmStream"]


_NOTHING_LEFT = "nothing was left to sample: its constraint allows only what bad_words or min_tokens keep out"


class VllmStream(GatedStream[VllmRuntime, Session]):
    """The deltas of one request, out of vLLM's collector."""

    def __init__(self, runtime: VllmRuntime, request: GenerationRequest) -> None:
        super().__init__(runtime, request, request.session or Session())
        self._collector: Any = None
        self._cut_by_death = False

    @property
    def sent_all(self) -> bool:
        """VLLM has sent its last id, or died; whether anybody read it or not."""
        if self.finish is not None:
            return True
        unread = self._collector.output if self._collector is not None else None
        return isinstance(unread, Exception) or (unread is not None and unread.finished)

    def stamp(self, version: str) -> None:
        """The weights were exchanged, between what vLLM has sampled and what it will."""
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
        self._runtime.process.stats.tell()

    async def __anext__(self) -> Delta:
        if self.finish is not None:
            raise StopAsyncIteration
        try:
            return await self._read()
        except Exception as error:  # whatever stands in the collector: vLLM's output loop has ended with it
            raise self._died(error) from error

    async def _read(self) -> Delta:
        if self._cut_by_death:
            raise RuntimeError("vLLM cut it, since another data-parallel rank is dead")
        collector = self._collector
        # As vLLM's own `generate()` does: what lies there already costs no switch of tasks.
        output = collector.get_nowait() or await collector.get()
        if self.request.scores_prompt and self.prompt_logprobs is None:
            self.prompt_logprobs = list(output.prompt_logprobs.logprobs)  # flat, and none of the prompt's first id
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
        delta = Delta(ids, _logprobs(flat, count, len(ids)), self.finish, top)
        failed = self.finish is not None and self.finish.reason is FinishReason.ERROR
        return self._without_the_impossible(delta) if failed else delta

    def _finished(self, output: Any, completion: Any) -> Finish:
        reason = FinishReason(completion.finish_reason)
        stop = completion.stop_reason
        if reason is FinishReason.STOP and stop is None:  # vLLM names every stop id but the tokenizer's own EOS
            stop = completion.token_ids[-1]
        spans = getattr(completion, "weight_versions", None)
        versions = (
            self._unstamped()
            if spans is None
            else tuple(VersionSpan(self._stamps.named(span.version), span.start, span.end) for span in spans)
        )
        return Finish(reason, stop, versions, output.num_cached_tokens)

    def _without_the_impossible(self, delta: Delta) -> Delta:
        """What was sampled: where nothing is left to sample vLLM gives the id 0, of no probability, and fails of it."""
        logprobs, finish = delta.logprobs or (), delta.finish
        end = next((index for index, logprob in enumerate(logprobs) if math.isnan(logprob)), None)
        if end is None or finish is None:
            return delta
        self.finish = finish = replace(finish, stop=finish.stop or _NOTHING_LEFT)
        top = delta.top.part(0, end) if delta.top is not None else None
        return Delta(delta.token_ids[:end], logprobs[:end], finish, top)

    async def _drain(self) -> None:
        with anyio.move_on_after(ABORT_SECONDS, shield=True):
            try:
                await self._runtime.drop(self._collector)
                while self.finish is None:
                    self.rest.append(await self._read())
            except Exception as error:  # as above; the exception that is passing keeps its place
                self._died(error)
        if self.finish is None:
            self.finish = Finish(FinishReason.ABORT, versions=self._unstamped())

    def _died(self, error: Exception) -> EngineDead:
        death = self._runtime.death_error(error)
        self.finish = Finish(FinishReason.ERROR, stop=str(death), versions=self._unstamped())
        return death

    def _unstamped(self) -> tuple[VersionSpan, ...]:
        """The versions by our own account, where vLLM gave none."""
        return self._stamps.spans(self.sent)


# vLLM's flat lists have for each position the sampled id, and behind it as many of the likeliest as were asked for.
# Before 0.32 those of a merged output may begin with older positions.


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
