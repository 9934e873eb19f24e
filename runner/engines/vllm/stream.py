"""The deltas of one request to vLLM, out of its collector, and nothing left behind."""

from __future__ import annotations

from typing import Any

import anyio

from runner.engines.base import Delta, Finish, FinishReason, GenerationRequest, Session
from runner.engines.stream import GatedStream
from runner.engines.vllm.runtime import DRAIN_SECONDS, VllmRuntime
from runner.errors import EngineDead
from runner.tokens.log import VersionSpan

__all__ = ["VllmStream"]


class VllmStream(GatedStream[VllmRuntime, Session]):
    """The deltas of one request, out of vLLM's collector."""

    def __init__(self, runtime: VllmRuntime, request: GenerationRequest) -> None:
        super().__init__(runtime, request, request.session or Session())
        self._collector: Any = None

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
        self._collector = await self._runtime.send(self.request, self._adapter)

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
        self._runtime.process.count.tell()

    async def __anext__(self) -> Delta:
        if self.finish is not None:
            raise StopAsyncIteration
        try:
            return await self._read()
        except Exception as error:  # whatever stands in the collector: vLLM's output loop has ended with it
            raise self._died(error) from error

    async def _read(self) -> Delta:
        collector = self._collector
        # As vLLM's own `generate()` does: what lies there already costs no switch of tasks.
        output = collector.get_nowait() or await collector.get()
        completion = output.outputs[0]
        ids = completion.token_ids
        self.sent += len(ids)
        self._runtime.sampled += len(ids)
        if output.finished:
            self.finish = self._finished(output, completion)
        return Delta(ids, _logprobs(completion.logprobs, len(ids)), self.finish)

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

    async def _drain(self) -> None:
        with anyio.move_on_after(DRAIN_SECONDS, shield=True):
            try:
                await self._runtime.drop(self._collector)
                while self.finish is None:
                    self.rest.append(await self._read())
            except Exception as error:  # as above; the exception that is passing keeps its place
                self._died(error)
        if self.finish is None:
            self.finish = Finish(FinishReason.ABORT, versions=self._unstamped())

    def _died(self, error: Exception) -> EngineDead:
        death = self._runtime.died(error)
        self.finish = Finish(FinishReason.ERROR, stop=str(death), versions=self._unstamped())
        return death

    def _unstamped(self) -> tuple[VersionSpan, ...]:
        """The versions by our own account, where vLLM gave none."""
        return self._stamps.spans(self.sent)


def _logprobs(flat: Any, count: int) -> list[float] | None:
    if not count:
        return []
    # One entry a position, since only the sampled id's was asked for; before 0.32 a merged output may hold older ones.
    values: list[float] = flat.logprobs
    return values if len(values) == count else values[-count:]
