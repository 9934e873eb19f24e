"""Run files, as far as a scripted engine knows them, and what opens one.

Run files stand above the engines. So `runner/__init__.py`, which puts the package together, says what opens one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

__all__ = ["RecordedRun", "RunFiles"]


@runtime_checkable
class RecordedRun(Protocol):
    """A run file that is open."""

    path: Path

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...
    def rows(self, *, trained: bool | None = ...) -> Iterable[Any]: ...
    def trajectory(self, episode: Any, /) -> Any: ...


class RunFiles:
    """How run files are opened."""

    open: Callable[[Path], RecordedRun]
    """Opens the one at a path."""
