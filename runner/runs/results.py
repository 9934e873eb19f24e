"""The results of a run, from the episodes that announce them to whoever reads the run."""

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
class Result:
    """A trajectory on its way to the reader."""

    trajectory: Trajectory
    """The trajectory is committed, and scored as far as it ever is."""

    last: bool
    """Whether no further agent of the same episode follows."""

    missing: int
    """The number of episodes of its group that this run plays."""


class Results:
    """Trajectories on their way to the reader, who takes them one by one, or by task.

    So many as `width` wait for the reader before an episode does.
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
        self._announce_to, self._announced = anyio.create_memory_object_stream[Result](width)

    # --- from the episodes

    async def announce(self, trajectories: list[Trajectory], missing: int) -> None:
        """Tell the tasks' source and the reader of an episode: of its trained agents, or where none is, of `main`."""
        told = [t for t in trajectories if t.trained or t.agent == MAIN]
        # Where nobody reads any more, the run file has it.
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            for trajectory in told:
                # The source first: the reader may be slow, and what is played next follows from what was heard.
                await self._feed.finished(trajectory)
                await self._announce_to.send(Result(trajectory, trajectory is told[-1], missing))

    def end(self) -> None:
        """Let the reader see the end, once it has taken what was announced."""
        self._announce_to.close()

    # --- to the reader

    def close(self) -> None:
        """Read no further: an episode that announces itself must not wait for a reader."""
        self._announced.close()

    async def next(self) -> Result:
        """The next result; behind the last one it raises StopAsyncIteration, or why the run ended too early."""
        try:
            return await self._announced.receive()
        except anyio.ClosedResourceError:
            raise RuntimeError("the run is over: iterate over it inside its `async with` block") from None
        except anyio.EndOfStream:
            if self._state.failure is not None:
                raise self._state.failure from None
            raise StopAsyncIteration from None

    async def groups(self) -> AsyncIterator[Group]:
        """The results by task, unfinished groups last."""
        waiting: dict[tuple[str, int], OpenGroup] = {}
        try:
            while True:
                result = await self.next()
                key = result.trajectory.task.id, result.trajectory.visit
                task = waiting.setdefault(key, OpenGroup(result.missing))
                task.trajectories.append(result.trajectory)
                task.played += result.last
                if task.played == task.missing:
                    for group in await self._groups_of(waiting.pop(key).trajectories):
                        yield group
        except (StopAsyncIteration, DeltarunnerError) as end:
            for task in waiting.values():
                for group in await self._groups_of(task.trajectories):
                    yield group
            if isinstance(end, DeltarunnerError):
                raise
