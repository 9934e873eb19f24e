"""Interface of run files for scripted engines, and the function that opens one.

Run files are in a higher layer than engines. So `runner/__init__.py` sets the function that opens them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

if TYPE_CHECKING:  # `runner/__init__.py` imports this module, and has to stay light
    from runner.engines.base import FinishReason
    from runner.tokens.side_data import SamplingMasks
    from runner.tokens.top_logprobs import TopLogprobs

__all__ = ["RecordedRun", "RecordedTurn", "open_run_file", "set_opener"]


class RecordedTurn(Protocol):
    """Turn of a recorded run."""

    seed: int | None
    """Seed of the turn's random numbers; None without a seed."""
    finish: FinishReason
    stop: int | str | None
    """Stop id or stop string that ended the turn; None if the turn ended in another way."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def top(self) -> TopLogprobs | None: ...
    @property
    def sampling_masks(self) -> SamplingMasks | None: ...


class RecordedTrajectory(Protocol):
    """Trajectory of a recorded run."""

    @property
    def turns(self) -> Sequence[RecordedTurn]: ...


@runtime_checkable
class RecordedRun(Protocol):
    """Open run file."""

    path: Path

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...
    def rows(self, *, trained: bool | None = ...) -> Iterable[Any]: ...
    def trajectory(self, episode: Any, /) -> RecordedTrajectory: ...


class RunFileOpener(Protocol):
    """Function that opens the run file at a path."""

    def __call__(self, path: Path, /) -> RecordedRun: ...


_opener: RunFileOpener | None = None


def set_opener(opener: RunFileOpener) -> None:
    """Set the function that opens run files."""
    global _opener
    _opener = opener


def open_run_file(path: Path) -> RecordedRun:
    assert _opener is not None, "runner/__init__.py sets the function that opens run files"
    return _opener(path)
