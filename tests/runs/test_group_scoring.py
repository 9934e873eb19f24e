"""Groups are scored when they are complete, also after failed members were repeated from a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner import Group, Outcome, Run, RunFile, ScriptedEngine, group_reward
from runner.testing import Fault
from tests.playing import Plain, tasks

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends]


class Compared(Plain):
    """Environment in which every member's reward is the size of the group."""

    @group_reward
    def size(self, group: Group) -> list[int]:
        return [len(group.trajectories)] * len(group.trajectories)


async def test_group_is_scored_after_its_failed_member_is_repeated(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    options: dict[str, Any] = {"tasks": tasks(2), "group_size": 3, "retries": 0, "breaker": 1, "file": file}
    failing = ScriptedEngine("Yes", faults=lambda ask: Fault.error(at=1) if ask.episode == "t0#1" else None)
    async with Run(Compared(), failing, **options) as run:
        first = {trajectory.id: trajectory.reward async for trajectory in run}
    assert first == {"t0#0": None, "t0#1": None, "t0#2": None, "t1#0": 4, "t1#1": 4, "t1#2": 4}
    assert run.summary.reward.count == 3

    async with Run(Compared(), ScriptedEngine("Yes"), **options) as run:
        assert [trajectory.id async for trajectory in run] == ["t0#1"]
    with RunFile(file) as stored:
        rewards = [row.reward for row in stored if row.outcome is Outcome.COMPLETED]
    assert rewards == [4] * 6
    assert run.summary.reward.as_dict() == {"mean": 4, "standard_error": 0, "count": 6, "tasks": 2}


async def test_without_a_file_a_group_is_scored_as_it_is() -> None:
    failing = ScriptedEngine("Yes", faults=lambda ask: Fault.error(at=1) if ask.episode == "t0#1" else None)
    async with Run(Compared(), failing, group_size=3, retries=0, breaker=1) as run:
        rewards = {trajectory.id: trajectory.reward async for trajectory in run}
    assert rewards == {"t0#0": 3, "t0#1": None, "t0#2": 3}


@pytest.mark.parametrize(
    "use",
    [
        lambda group: [each.reward for each in group],
        lambda group: None in group,
        lambda group: group[0],
        lambda group: dict(zip(group, [], strict=False)),
    ],
    ids=["loop", "in", "index", "zip"],
)
async def test_group_that_is_used_as_a_list_names_the_fix(use: Callable[[Group], Any]) -> None:
    class Lists(Plain):
        @group_reward
        def size(self, group: Group) -> list[int]:
            use(group)
            return [0] * len(group.trajectories)

    async with Run(Lists(), ScriptedEngine("Yes"), group_size=2) as run:
        (group,) = [group async for group in run.groups()]
    assert group, "a group is true although it has no len()"
    fix = "a Group is not a list: use group.trajectories"
    with pytest.raises(TypeError, match=fix):
        use(group)
    assert re.search(f"size\\(\\) .*{fix}", str(run.summary.faults)), run.summary.faults
