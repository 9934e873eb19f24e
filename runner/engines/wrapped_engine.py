"""An engine around another one: it answers for what is its own and passes the rest on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from runner.concurrency.clocks import Progress
from runner.engines.base import DeltaStream, Engine, EngineStats, GenerationRequest, Session
from runner.engines.runtime import EngineRuntime
from runner.options import Constraint, Sampling

__all__ = ["WrappedEngine"]


class WrappedEngine(Engine):
    """Passes everything on; a subclass says otherwise where it is different."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        """The engine inside."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "inner":  # what a wrapper has not set yet is not the engine's
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.inner, name)

    @property
    def loop(self) -> object:  # type: ignore[override]  # as is what it runs on
        return self.inner.loop

    @property
    def runtime(self) -> EngineRuntime[Any] | None:  # type: ignore[override]  # as is what is asked of it
        return self.inner.runtime

    @property
    def progress(self) -> Progress | None:
        """The clocks that the inner engine's steps restart."""
        return self.inner.progress

    @property
    def running(self) -> bool:  # type: ignore[override]  # it runs while the inner engine does
        return self.inner.running

    @property
    def notes(self) -> Sequence[str]:  # type: ignore[override]  # as is what it says
        return self.inner.notes

    @property
    def start_phase(self) -> str:
        """The present phase of the inner engine's start."""
        return self.inner.start_phase

    def go_on_with(self, described: Mapping[str, Any]) -> None:
        """Have the inner engine choose as in the run that is resumed."""
        self.inner.go_on_with(described)

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.inner.__aexit__(kind, error, traceback)

    def stream(self, request: GenerationRequest) -> DeltaStream:
        """The inner engine's deltas."""
        return self.inner.stream(request)

    def session(self, *, late: bool = False, beside: Session | None = None) -> Session:
        """The inner engine's handle."""
        return self.inner.session(late=late, beside=beside)

    def close_session(self, session: Session) -> None:
        """Give the session's room back; twice is allowed."""
        self.inner.close_session(session)

    def check_sampling(self, sampling: Sampling) -> None:
        """Refuse what the inner engine could not be asked for."""
        self.inner.check_sampling(sampling)

    def check_constraint(self, constraint: Constraint) -> None:
        """Refuse what the inner engine could not enforce."""
        self.inner.check_constraint(constraint)

    async def score(
        self,
        ids: Sequence[int],
        *,
        start: int = 1,
        sampling: Sampling | None = None,
        constraint: Constraint | None = None,
    ) -> list[float]:
        """The inner engine's log-probabilities of given ids."""
        return await self.inner.score(ids, start=start, sampling=sampling, constraint=constraint)

    def check_scoring(self, *, as_sampled: bool) -> None:
        """Refuse what the inner engine cannot score."""
        self.inner.check_scoring(as_sampled=as_sampled)

    def stats(self) -> EngineStats:
        """What the inner engine is doing now."""
        return self.inner.stats()

    def is_alive(self) -> bool:
        """Whether the inner engine is."""
        return self.inner.is_alive()

    async def health(self) -> None:
        """Return when the inner engine can answer."""
        await self.inner.health()

    def describe(self) -> dict[str, Any]:
        """What a run's header keeps of the inner engine."""
        return self.inner.describe()
