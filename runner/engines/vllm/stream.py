"""The deltas of one request to vLLM, out of its collector, and nothing left behind."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import anyio

from runner.engines.adapters import AdapterVersion
from runner.engines.base import Delta, DeltaStream, Finish, FinishReason, GenerationRequest, Session
from runner.engines.stamps import Stamps
from runner.engines.vllm.core import DRAIN_SECONDS, VllmCore
from runner.errors import EngineDead
from runner.tokens.log import VersionSpan

__all__ = ["VllmStream"]


class VllmStream(DeltaStream):
    """The deltas of one request, out of vLLM's collector."""

    def __init__(self, core: VllmCore, request: GenerationRequest) -> None:
        self.rest: list[Delta] = []
        self.finish: Finish | None = None
        self._core = core
        self._request = request
        self._session = request.session or Session()
        self._collector: Any = None
        self._sampled = 0
        self._stamps = Stamps(core.version)
        self._adapter: AdapterVersion | None = None

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
        self._stamps.mark(version, self._sampled + waiting)

    async def __aenter__(self) -> Self:
        core, request = self._core, self._request
        core.check(request)
        await core.gate.enter(self._session, core.room(len(request.prompt), request))
        core.requests[self] = None
        try:
            self._adapter = core.adapters.take(request.name, request.sampling.adapter)
            self._stamps = Stamps(core.version, self._adapter)
            self._collector = await core.send(request, self._adapter)
        except BaseException:
            self._leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self.finish is None:
                await self._drain()
        finally:
            self._collector.close()
            self._leave()

    def _leave(self) -> None:
        core, request = self._core, self._request
        core.requests.pop(self, None)
        core.adapters.leave(self._adapter)
        core.gate.leave(self._session, core.room(len(request.prompt) + self._sampled, request))
        if request.session is None:
            core.gate.close(self._session)
        core.process.count.tell()

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
        self._sampled += len(ids)
        self._core.sampled += len(ids)
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
                await self._core.drop(self._collector)
                while self.finish is None:
                    self.rest.append(await self._read())
            except Exception as error:  # as above; the exception that is passing keeps its place
                self._died(error)
        if self.finish is None:
            self.finish = Finish(FinishReason.ABORT, versions=self._unstamped())

    def _died(self, error: Exception) -> EngineDead:
        death = self._core.died(error)
        self.finish = Finish(FinishReason.ERROR, stop=str(death), versions=self._unstamped())
        return death

    def _unstamped(self) -> tuple[VersionSpan, ...]:
        """The versions by our own account, where vLLM gave none."""
        return self._stamps.spans(self._sampled)


def _logprobs(flat: Any, count: int) -> list[float] | None:
    if not count:
        return []
    # One entry a position, since only the sampled id's was asked for; before 0.32 a merged output may hold older ones.
    values: list[float] = flat.logprobs
    return values if len(values) == count else values[-count:]
