"""Common base of all streams of token ids: gate, adapter, and weight versions."""

from __future__ import annotations

from abc import abstractmethod
from itertools import pairwise
from typing import Any, Generic, Self, TypeVar

from runner.engines.adapters import AdapterVersion
from runner.engines.base import Delta, DeltaStream, Finish, GenerationRequest, Session
from runner.engines.runtime import EngineRuntime
from runner.errors import RequestRejected
from runner.tokens.log import VersionSpan

__all__ = ["GatedStream"]

RuntimeT = TypeVar("RuntimeT", bound=EngineRuntime[Any])
SessionT = TypeVar("SessionT", bound=Session)


class VersionStamps:
    """Weight versions of one request's ids. The weights can change during the request, its adapter cannot change."""

    __slots__ = ("_adapter", "_marks")

    def __init__(self, version: str, adapter: AdapterVersion | None = None) -> None:
        self._marks = [(version, 0)]
        self._adapter = "" if adapter is None else f"+{adapter.label}"

    def named(self, version: str) -> str:
        """Return a weight version with the adapter appended, such as "7+poet@2"."""
        return version + self._adapter

    def mark(self, version: str, sampled: int) -> None:
        """Record new weights after this number of sampled ids."""
        self._marks.append((version, sampled))

    def spans(self, length: int) -> tuple[VersionSpan, ...]:
        """Return the versions of the first `length` ids, in order. Versions that sampled no id are left out."""
        if len(self._marks) == 1:  # nearly all requests have only one version
            return (VersionSpan(self.named(self._marks[0][0]), 0, length),) if length else ()
        ends = [*((version, min(start, length)) for version, start in self._marks), ("", length)]
        return tuple(
            VersionSpan(self.named(version), start, end) for (version, start), (_, end) in pairwise(ends) if start < end
        )


class GatedStream(DeltaStream, Generic[RuntimeT, SessionT]):
    """Deltas of one request that waits at the gate, holds an adapter, and frees its place at the end."""

    def __init__(self, runtime: RuntimeT, request: GenerationRequest, session: SessionT) -> None:
        self.rest: list[Delta] = []
        self.finish: Finish | None = None
        self.request = request
        self.sent = 0
        """Number of sampled ids that left the engine."""
        self._runtime = runtime
        self._session = session
        self._stamps = VersionStamps(runtime.version)
        self._adapter: AdapterVersion | None = None
        self._inside = False

    async def __aenter__(self) -> Self:
        runtime, request = self._runtime, self.request
        self._check()
        await runtime.gate.enter(self._session, self._room(len(request.prompt)))
        runtime.requests[self] = None
        self._inside = True
        try:
            # Adapter and version are read only now, since both can change while the request waits at the gate.
            self._adapter = runtime.adapters.take(request.name, request.sampling.adapter)
            self._stamps = VersionStamps(runtime.version, self._adapter)
            await self._begin()
        except BaseException:
            self._leave()
            raise
        return self

    def _check(self) -> None:
        """Refuse, before the gate, a request that the engine would refuse after the gate.

        Raises:
            EngineDead: the engine cannot answer.
            RequestRejected: the prompt is empty or too long, or the engine does not have the adapter.
        """
        runtime, request = self._runtime, self.request
        runtime.require_alive()
        if not 0 < len(request.prompt) < runtime.context:
            raise RequestRejected(
                f"{request.name}: the prompt has {len(request.prompt)} ids; give 1 to {runtime.context - 1}"
            )
        runtime.adapters.check(request.name, request.sampling.adapter)

    def _room(self, length: int) -> int:
        """Return the number of ids in the KV cache that a sequence of `length` ids and its next turn need."""
        return min(length + self.request.sampling.max_tokens, self._runtime.context)

    @abstractmethod
    async def _begin(self) -> None:
        """Start the sampling, after the gate."""

    def _leave(self) -> None:
        """Free the place, the room and the adapter."""
        self._inside = False
        runtime, request = self._runtime, self.request
        runtime.close(self)
        runtime.adapters.leave(self._adapter)
        runtime.gate.leave(self._session, self._room(len(request.prompt) + self.sent))
        if request.session is None:
            runtime.gate.close(self._session)
