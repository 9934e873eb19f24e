"""Tasks: one problem each, and the protocol of a source that decides what comes next."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from runner.messages import Prompt

if TYPE_CHECKING:
    from runner.trajectory import Trajectory

__all__ = ["Task", "TaskSource"]


@dataclass(frozen=True)
class Task:
    """One problem; subclass it for typed fields.

    Attributes:
        id: unique within a run.
        prompt: the first messages; a string is a user message.
        answer: reference data for scoring.
        info: anything else, JSON.
    """

    id: str
    prompt: Prompt = ()
    answer: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class TaskSource(Protocol):
    """Tasks that are decided while the run plays: an iterable, sync or async, that also hears of every result.

    It may repeat a task: the runner counts the visits. A file that is resumed tells it the stored trajectories
    first, in the order they were committed.
    """

    def __iter__(self) -> Iterator[Task]: ...

    def finished(self, trajectory: Trajectory) -> None:
        """Called for every trajectory after its commit."""
        ...


@runtime_checkable
class AsyncTaskSource(Protocol):
    """The same, giving its tasks asynchronously."""

    def __aiter__(self) -> AsyncIterator[Task]: ...

    def finished(self, trajectory: Trajectory) -> None:
        """Called for every trajectory after its commit."""
        ...
