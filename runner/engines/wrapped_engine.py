"""Wrapper around an engine, which forwards everything that a subclass does not override."""

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
    """Engine that forwards every call to an inner engine; a subclass overrides some of these calls."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "inner":  # attributes that the wrapper has not set yet
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.inner, name)

    @property
    def loop(self) -> object:  # type: ignore[override]  # forwarded
        return self.inner.loop

    @property
    def runtime(self) -> EngineRuntime[Any] | None:  # type: ignore[override]  # forwarded
        return self.inner.runtime

    @property
    def progress(self) -> Progress | None:
        return self.inner.progress

    @property
    def running(self) -> bool:  # type: ignore[override]  # forwarded
        return self.inner.running

    @property
    def notes(self) -> Sequence[str]:  # type: ignore[override]  # forwarded
        return self.inner.notes

    @property
    def start_phase(self) -> str:
        return self.inner.start_phase

    def restore_choices(self, described: Mapping[str, Any]) -> None:
        self.inner.restore_choices(described)

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.inner.__aexit__(kind, error, traceback)

    def stream(self, request: GenerationRequest) -> DeltaStream:
        return self.inner.stream(request)

    def session(self, *, late: bool = False, beside: Session | None = None) -> Session:
        return self.inner.session(late=late, beside=beside)

    def close_session(self, session: Session) -> None:
        self.inner.close_session(session)

    def check_sampling(self, sampling: Sampling) -> None:
        self.inner.check_sampling(sampling)

    def check_constraint(self, constraint: Constraint) -> None:
        self.inner.check_constraint(constraint)

    async def score(
        self,
        ids: Sequence[int],
        *,
        start: int = 1,
        sampling: Sampling | None = None,
        constraint: Constraint | None = None,
    ) -> list[float]:
        return await self.inner.score(ids, start=start, sampling=sampling, constraint=constraint)

    def check_scoring(self, *, as_sampled: bool) -> None:
        self.inner.check_scoring(as_sampled=as_sampled)

    def stats(self) -> EngineStats:
        return self.inner.stats()

    def is_alive(self) -> bool:
        return self.inner.is_alive()

    @property
    def health_interval(self) -> float:  # type: ignore[override]  # forwarded
        """Seconds between two health checks of the inner engine."""
        return self.inner.health_interval

    async def health(self) -> None:
        await self.inner.health()

    def describe(self) -> dict[str, Any]:
        return self.inner.describe()
