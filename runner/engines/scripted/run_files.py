"""Run files, as far as a scripted engine knows them, and what opens one.

Run files stand above the engines. So whoever puts the package together says what opens them: `runner/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

if TYPE_CHECKING:  # the package itself imports this module, and importing the package is to load nothing heavy
    from runner.engines.base import FinishReason
    from runner.tokens.top_logprobs import TopLogprobs

__all__ = ["RecordedRun", "RecordedTurn", "open_run_file", "set_opener"]


class RecordedTurn(Protocol):
    """One turn of a recorded run."""

    seed: int | None
    """The seed of the turn's random numbers; None where it had none."""
    finish: FinishReason
    """The reason for which the turn ended."""
    stop: int | str | None
    """The stop id or the stop string behind that."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def top(self) -> TopLogprobs | None: ...


class RecordedTrajectory(Protocol):
    """One trajectory of a recorded run."""

    @property
    def turns(self) -> Sequence[RecordedTurn]: ...


@runtime_checkable
class RecordedRun(Protocol):
    """A run file that is open."""

    path: Path
    """The path of the file."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...
    def rows(self, *, trained: bool | None = ...) -> Iterable[Any]: ...
    def trajectory(self, episode: Any, /) -> RecordedTrajectory: ...


class RunFileOpener(Protocol):
    """Opens the run file at a path."""

    def __call__(self, path: Path, /) -> RecordedRun: ...


_opener: RunFileOpener | None = None


def set_opener(opener: RunFileOpener) -> None:
    """Have run files opened by this from now on."""
    global _opener
    _opener = opener


def open_run_file(path: Path) -> RecordedRun:
    """The run file at a path."""
    assert _opener is not None, "the package sets it when it is imported"
    return _opener(path)
