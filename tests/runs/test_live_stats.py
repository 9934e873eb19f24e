"""Live statistics of a run, and their text."""

from __future__ import annotations

import anyio
import pytest

from runner import Outcome, Run, ScriptedEngine, Task
from runner.runs.live_stats import StatsReader, in_words
from tests.playing import Plain, tasks


@pytest.mark.anyio
async def test_cancelled_episodes_are_not_counted_as_done() -> None:
    class Stops(Plain):
        def tasks(self) -> list[Task]:
            return tasks(5)

        async def setup(self) -> None:
            if self.task.id != "t0":
                await anyio.sleep_forever()

    async with Run(Stops, ScriptedEngine("Yes")) as run:
        assert (await anext(run)).outcome is Outcome.COMPLETED
        run.cancel()
        async for _ in run:
            pass
        stats = StatsReader().read(run, total=5)
    assert (stats.done, stats.cancelled) == (1, 4)
    assert list(in_words(stats))[:4] == ["1 of 5 episodes", "0 running", "0 failed", "4 cancelled"]
