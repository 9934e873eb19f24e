"""An engine while it runs, of whatever kind: the requests that are inside, and how one gets in and out."""

from __future__ import annotations

from abc import abstractmethod
from itertools import pairwise
from typing import Any, Generic, Self, TypeVar

from runner.engines.adapters import Adapters, AdapterVersion
from runner.engines.base import Delta, DeltaStream, Finish, GenerationRequest, Session
from runner.engines.gate import AdmissionGate
from runner.errors import RequestRejected
from runner.tokens.log import VersionSpan

__all__ = ["CoreStream", "EngineCore"]

RequestT = TypeVar("RequestT")
CoreT = TypeVar("CoreT", bound="EngineCore[Any]")
SessionT = TypeVar("SessionT", bound=Session)


class Stamps:
    """The weight versions of one request's ids: the weights change while it is sampled, its adapter does not."""

    __slots__ = ("_adapter", "_marks")

    def __init__(self, version: str, adapter: AdapterVersion | None = None) -> None:
        self._marks = [(version, 0)]
        self._adapter = "" if adapter is None else f"+{adapter.label}"

    def named(self, version: str) -> str:
        """A version of the weights with the adapter on them, as "7+poet@2"."""
        return version + self._adapter

    def mark(self, version: str, sampled: int) -> None:
        """The weights were exchanged when so many ids had been sampled."""
        self._marks.append((version, sampled))

    def spans(self, length: int) -> tuple[VersionSpan, ...]:
        """The versions of the first `length` ids, in order; a version that sampled nothing is not among them."""
        if len(self._marks) == 1:  # as nearly always
            return (VersionSpan(self.named(self._marks[0][0]), 0, length),) if length else ()
        ends = [*((version, min(start, length)) for version, start in self._marks), ("", length)]
        return tuple(
            VersionSpan(self.named(version), start, end) for (version, start), (_, end) in pairwise(ends) if start < end
        )


class EngineCore(Generic[RequestT]):
    """What an engine, its streams and its driver share. An engine that is entered again has another one."""

    def __init__(self, gate: AdmissionGate, adapters: Adapters, *, context: int, versions: list[str]) -> None:
        self.gate = gate
        self.adapters = adapters
        self.context = context
        """The most ids a prompt and what is sampled on it may have together."""
        self.versions = versions
        """Every weight version so far, the newest last. The engine's control, which has this same list, adds to it."""
        self.requests: dict[RequestT, None] = {}
        """The requests inside; ordered, so that what befalls all of them comes in one order."""
        self.sampled = 0
        """Ids that left the engine."""

    @property
    def version(self) -> str:
        """The version of the weights that sample now."""
        return self.versions[-1]

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request at once that the engine would refuse after it waited at the gate."""
        if not 0 < len(request.prompt) < self.context:
            raise RequestRejected(
                f"{request.name}: the prompt has {len(request.prompt)} ids; "
                f"the context is {self.context}, and at least one id must be given and one sampled"
            )
        self.adapters.check(request.name, request.sampling.adapter)

    def room(self, length: int, request: GenerationRequest) -> int:
        """Ids of the KV cache that a sequence of `length` ids needs together with its next turn."""
        return min(length + request.sampling.max_tokens, self.context)

    def close(self, request: RequestT) -> None:
        """Take note that a request is not inside any more; twice is allowed."""
        self.requests.pop(request, None)


class CoreStream(DeltaStream, Generic[CoreT, SessionT]):
    """The deltas of one request: it waits at the gate, has its adapter, and gives its place back."""

    def __init__(self, core: CoreT, request: GenerationRequest, session: SessionT) -> None:
        self.rest: list[Delta] = []
        self.finish: Finish | None = None
        self.request = request
        self.sent = 0
        """Ids that left the engine."""
        self._core = core
        self._session = session
        self._stamps = Stamps(core.version)
        self._adapter: AdapterVersion | None = None

    async def __aenter__(self) -> Self:
        core, request = self._core, self.request
        core.check(request)
        await core.gate.enter(self._session, core.room(len(request.prompt), request))
        core.requests[self] = None
        try:
            self._adapter = core.adapters.take(request.name, request.sampling.adapter)
            self._stamps = Stamps(core.version, self._adapter)
            await self._begin()
        except BaseException:
            self._leave()
            raise
        return self

    @abstractmethod
    async def _begin(self) -> None:
        """Have the request sampled, once it has its place."""

    def _leave(self) -> None:
        core, request = self._core, self.request
        core.close(self)
        core.adapters.leave(self._adapter)
        core.gate.leave(self._session, core.room(len(request.prompt) + self.sent, request))
        if request.session is None:
            core.gate.close(self._session)
