"""One vLLM that runs: what its engine, the streams of its requests and its driver share."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import anyio

from runner.engines.adapters import AdapterVersion
from runner.engines.base import GenerationRequest
from runner.engines.core import EngineCore
from runner.engines.gate import AdmissionGate
from runner.engines.vllm.adapters import VllmAdapters
from runner.engines.vllm.start import VllmProcess
from runner.errors import BadInput, EngineDead, EngineError, RequestRejected

__all__ = ["DRAIN_SECONDS", "VllmCore", "first_version"]

DRAIN_SECONDS = 2.0
"""How long the end of a request may take that is shielded from cancellation."""

_FIRST_VERSION = "0"  # where vLLM has none of its own
_LISTEN_SECONDS = 0.2  # how soon a death is heard by who waits for an answer

_Answer = TypeVar("_Answer")


class OpenRequest(Protocol):
    """What the core asks of the stream of a request."""

    @property
    def sent_all(self) -> bool: ...
    def stamp(self, version: str) -> None: ...


class VllmCore(EngineCore[OpenRequest]):
    """A vLLM from its start to its end; a request is inside until its stream is left."""

    adapters: VllmAdapters

    def __init__(
        self,
        process: VllmProcess,
        llm: Any,
        *,
        gate: AdmissionGate,
        context: int,
        as_vllm: Callable[[GenerationRequest], tuple[Any, Any]],
        versions: list[str],
    ) -> None:
        super().__init__(gate, VllmAdapters(llm, process.source, self.answered), context=context, versions=versions)
        self.process = process
        self.llm = llm
        """The `AsyncLLM`; None once the engine was left."""
        self.stamps_itself = _stamps(llm)
        """Whether vLLM says which weights sampled which ids; before 0.32 it does not, and we do."""
        self._as_vllm = as_vllm
        self._numbers = itertools.count()
        self._stopped = False
        self._death: EngineDead | None = None

    # --- one request

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request at once where the engine is not alive, or would refuse it."""
        if self._stopped:
            raise EngineDead("the engine is not running")
        if not self.is_alive():
            raise self.died(None)
        super().check(request)

    async def send(self, request: GenerationRequest, adapter: AdapterVersion | None = None) -> Any:
        """Send a request to vLLM; gives the collector that its deltas are read from.

        Raises:
            RequestRejected: vLLM refuses the request.
            EngineDead: the engine is gone.
        """
        # vLLM does not make names unique, and one abort would end both.
        name = f"{request.name}#{next(self._numbers)}"
        llm = self.llm
        sent = False
        try:
            prompt, parameters = self._as_vllm(request)
            # Shielded, since a request half sent could not be taken back.
            with anyio.CancelScope(shield=True):
                collector = await llm.add_request(name, prompt, parameters, lora_request=self.adapters.request(adapter))
            sent = True
        except Exception as error:  # the border to vLLM, which refuses with errors of many kinds
            if llm.errored:
                raise self.died(error) from error
            raise RequestRejected(f"{request.name}: {error}") from error
        finally:
            if not sent:
                with anyio.move_on_after(DRAIN_SECONDS, shield=True):
                    await llm.abort(name)
        return collector

    async def drop(self, collector: Any) -> None:
        """End a request, finished or not; what it sampled and nobody read is left in the collector."""
        await self.llm.abort(collector.request_id, internal=True)

    # --- all requests

    @property
    def sent_all(self) -> bool:
        """Whether every request inside was sent its last id."""
        return all(request.sent_all for request in self.requests)

    async def until_sent(self) -> None:
        """Return when every request inside was sent its last id, read or not."""
        while not self.sent_all:
            await self.process.count.news()

    def nothing_open(self) -> None:
        """Take note that every request was ended; a scheduler that does not step would go on to count them."""
        self.process.count.clear()

    # --- its life

    def is_alive(self) -> bool:
        """Whether requests can be answered, as far as is known without asking."""
        return not self._stopped and self._death is None and not self.llm.errored

    async def answered(self, what: str, call: Awaitable[_Answer]) -> _Answer:
        """What vLLM answers to a call; a dead one would let us wait for ever.

        Raises:
            EngineDead: it died before it answered.
            EngineError: it answered with an error.
        """
        answers: list[_Answer] = []
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._until_death, tasks.cancel_scope)
            try:
                answers.append(await call)
            except Exception as error:  # the border to vLLM, whose errors have no kind
                failure = error
            tasks.cancel_scope.cancel()
        if answers:
            return answers[0]
        if isinstance(failure, BadInput | EngineDead):
            raise failure
        if failure is None or self.llm.errored:
            raise self.died(failure) from failure
        if isinstance(failure, EngineError):
            raise failure
        raise EngineError(f"{what}: {' '.join(str(failure).split())[:500]}") from failure

    async def _until_death(self, scope: anyio.CancelScope) -> None:
        while not self.llm.errored:  # noqa: ASYNC110  # vLLM tells nobody
            await anyio.sleep(_LISTEN_SECONDS)
        scope.cancel()

    def die(self, why: str, cause: Exception) -> EngineDead:
        """End an engine that could only go on with something broken; every request gets this one error."""
        if self._death is None:
            self.process.kill()
        return self.died(cause, why)

    def died(self, error: Exception | None, why: str = "") -> EngineDead:
        """The error for one request of an engine that is dead: the same words and cause for all of them."""
        if self._death is None and self._stopped:
            return EngineDead("the engine was stopped")
        if self._death is None:
            self._death = EngineDead(f"The engine died: {why or self.process.cause_of_death()}")
            self._death.__cause__ = error
            self.gate.fail(lambda: self.died(None))
            self.nothing_open()
        # A copy for each who is told: one object raised in many tasks would gather the tracebacks of all of them.
        copy = EngineDead(*self._death.args)
        copy.__cause__ = self._death.__cause__
        return copy

    async def stop(self) -> None:
        """End vLLM and its processes; whoever waits at the gate is sent away."""
        self._stopped = True
        self.gate.fail(lambda: EngineDead("the engine was stopped"))
        await self.process.stop()
        self.adapters.close()
        self.llm = None


async def first_version(llm: Any) -> str:
    """The version of the weights that a vLLM began with."""
    version: str = await llm.get_weight_version() if _stamps(llm) else _FIRST_VERSION
    return version


def _stamps(llm: Any) -> bool:
    return hasattr(llm, "update_weight_version")
