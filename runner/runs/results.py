"""The results of a run, as its caller reads them: one by one, or by task."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from runner.errors import DeltarunnerError
from runner.runs.groups import Result, WaitingGroups, by_agent
from runner.store.writer import RunWriter
from runner.trajectory import Group, Trajectory

__all__ = ["Results"]


class _Run(Protocol):
    seed: int
    group_size: int
    failure: DeltarunnerError | None


class Results:
    """What the episodes of a run announce, and what an earlier run of the same file left of their groups."""

    def __init__(self, run: _Run, announced: MemoryObjectReceiveStream[Result], writer: RunWriter) -> None:
        self._run = run
        self._announced = announced
        self._writer = writer

    def close(self) -> None:
        """Nobody reads any more: an episode that announces itself must not wait for a reader."""
        self._announced.close()

    async def next(self) -> Result:
        """The next result.

        Raises:
            StopAsyncIteration: there is none any more.
            DeltarunnerError: why the run ended before its work did.
            RuntimeError: the run's block has been left.
        """
        try:
            return await self._announced.receive()
        except anyio.ClosedResourceError:
            raise RuntimeError("the run is over: iterate over it inside its `async with` block") from None
        except anyio.EndOfStream:
            if self._run.failure is not None:
                raise self._run.failure from None
            raise StopAsyncIteration from None

    async def groups(self) -> AsyncIterator[Group]:
        """The results by task, unfinished groups last."""
        waiting = WaitingGroups()
        try:
            while True:
                whole = waiting.add(await self.next())
                for group in await self.groups_of(whole) if whole else ():
                    yield group
        except (StopAsyncIteration, DeltarunnerError) as end:
            for unfinished in waiting.rest():
                for group in await self.groups_of(unfinished):
                    yield group
            if isinstance(end, DeltarunnerError):
                raise

    async def groups_of(self, trajectories: list[Trajectory]) -> list[Group]:
        """The groups of a task, one for each agent, with what an earlier run of the file left of them."""
        members = await self._with_stored(trajectories)
        return by_agent(members, seed=self._run.seed, group_size=self._run.group_size)

    async def _with_stored(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        if not self._writer.resumed:
            return trajectories
        first = trajectories[0]
        new = {(member.index, member.agent) for member in trajectories}
        stored = await self._writer.stored_group(first.task.id, first.visit)
        return [*trajectories, *(t for t in stored if (t.index, t.agent) not in new)]
