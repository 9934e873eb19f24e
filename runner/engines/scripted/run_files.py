"""Run files, as far as a scripted engine knows them, and what opens one.

Run files stand above the engines. So `runner/__init__.py`, which puts the package together, opens them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

__all__ = ["RecordedRun", "open_run_file"]


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


def open_run_file(path: Path) -> RecordedRun:
    """The run file at a path."""
    package: Any = sys.modules["runner"]  # loaded, as this module is in it; an import would point up
    opened: RecordedRun = package._open_run_file(path)
    return opened
