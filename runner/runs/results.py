"""Results of a run on their way from the episodes to the reader."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import anyio

from runner.environment.task_feed import TaskFeed
from runner.episode.key import MAIN
from runner.errors import DeltarunnerError
from runner.runs.groups import OpenGroup
from runner.runs.state import RunState
from runner.trajectory import Group, Trajectory

__all__ = ["Results"]


@dataclass(frozen=True, slots=True)
class QueuedResult:
    """A trajectory on its way to the reader."""

    trajectory: Trajectory
    """The trajectory, committed and with its final rewards."""

    last: bool
    """True if no other agent of the same episode follows."""

    missing: int
    """The number of episodes of its group that this run plays."""


class Results:
    """A queue of trajectories, read one by one or by task.

    An episode waits while `width` results are unread.
    """

    def __init__(
        self,
        state: RunState,
        feed: TaskFeed,
        groups_of: Callable[[list[Trajectory]], Awaitable[list[Group]]],
        *,
        width: int,
    ) -> None:
        self._state = state
        self._feed = feed
        self._groups_of = groups_of
        # If an iteration ends early, the next iteration continues with these groups.
        self._waiting: dict[tuple[str, int], OpenGroup] = {}
        self._announce_to, self._announced = anyio.create_memory_object_stream[QueuedResult](width)

    # --- from the episodes

    async def announce(self, trajectories: list[Trajectory], missing: int) -> None:
        """Send the trajectories of `main` and of the trained agents to the task source and the reader."""
        shown = [t for t in trajectories if t.trained or t.agent == MAIN]
        if self._feed.requests is not None:
            self._feed.requests.deliver(shown)
        # Without a reader, the results are only in the run file.
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            for trajectory in shown:
                # The task source comes first, since it chooses the next task by these results, and the reader may be
                # slow.
                await self._feed.finished(trajectory)
                await self._announce_to.send(QueuedResult(trajectory, trajectory is shown[-1], missing))

    def end(self) -> None:
        """End the queue. The reader still receives announced results."""
        self._announce_to.close()

    # --- to the reader

    def close(self) -> None:
        """Stop reading, so that no episode waits for the reader."""
        self._announced.close()

    async def next(self) -> QueuedResult:
        """Return the next result.

        After the last result, raise StopAsyncIteration, or the error that ended the run early.
        """
        result = await self._receive()
        if self._note(result) is not None:
            self._state.quota.end(full=False)
        return result

    async def _receive(self) -> QueuedResult:
        try:
            return await self._announced.receive()
        except anyio.ClosedResourceError:
            raise RuntimeError("the run is over: iterate over it inside its `async with` block") from None
        except anyio.EndOfStream:
            if self._state.failure is not None:
                raise self._state.failure from None
            raise StopAsyncIteration from None

    def _note(self, result: QueuedResult) -> OpenGroup | None:
        """Count a result of a group, and return the group if all of its results were read, else None."""
        key = result.trajectory.task.id, result.trajectory.visit
        task = self._waiting.setdefault(key, OpenGroup(result.missing))
        task.played += result.last
        return self._waiting.pop(key) if task.played == task.missing else None

    async def groups(self, full: int | None = None) -> AsyncIterator[Group]:
        """The results by task. Without `full`, unfinished groups come last.

        Args:
            full: the number of tasks with spread (rewards that differ) whose groups are returned; None for all groups.
        """
        try:
            while full is None or self._state.quota.needed:
                result = await self._receive()
                key = result.trajectory.task.id, result.trajectory.visit
                self._waiting.setdefault(key, OpenGroup(result.missing)).trajectories.append(result.trajectory)
                task = self._note(result)
                if task is not None:
                    groups = await self._groups_of(task.trajectories)
                    wanted = [group for group in groups if full is None or group.has_spread]
                    self._state.summary.flat += len(groups) - len(wanted)
                    # The task is counted only now, since this may begin another task, which is not needed if these
                    # groups suffice.
                    self._state.quota.end(full=bool(wanted))
                    for group in wanted:
                        yield group
        except (StopAsyncIteration, DeltarunnerError) as end:
            for task in self._waiting.values() if full is None else ():
                for group in await self._groups_of(task.trajectories):
                    yield group
            if isinstance(end, DeltarunnerError):
                raise
