"""`groups(full=n)`: n tasks whose rewards differ. Flat ones are counted, none is begun in vain, and none is lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner import BackgroundPlayer, BadOption, Concurrency, Environment, Group, Run, RunFile, Task, reward
from tests.playing import recording
from tests.training.making import group as group_of
from tests.training.making import made, prompt, said

pytestmark = pytest.mark.anyio

BEGUN: list[str] = []


class Uneven(Environment):
    """Environment in which the rewards of a group differ if the task's answer is "spread", for any reply."""

    @reward
    def right(self) -> float:
        BEGUN.append(self.task.id)
        return float(self.episode.index) if self.task.answer == "spread" else 0.5


def tasks(spread: str) -> Iterator[Task]:
    """Return a task for each letter: a task with different rewards for "s", and a flat one for "f"."""
    for number, letter in enumerate(spread):
        yield Task(id=f"t{number}", prompt="?", answer="spread" if letter == "s" else "")


@pytest.fixture(autouse=True)
def begun() -> list[str]:
    BEGUN.clear()
    return BEGUN


def run_of(spread: str, **options: Any) -> Run:
    given: dict[str, Any] = {"group_size": 2, "concurrency": Concurrency(episodes=64), **options}
    return Run(Uneven, recording("Yes"), tasks=tasks(spread), **given)


async def taken(run: Run, full: int | None) -> list[str]:
    return [group.task.id async for group in run.groups(full=full)]


async def test_only_groups_with_spread_are_given_and_flat_ones_counted() -> None:
    async with run_of("fsffsfsss") as run:
        assert sorted(await taken(run, 3)) == ["t1", "t4", "t6"]
        assert run.summary.flat == 4


async def test_no_task_begins_that_cannot_be_needed(begun: list[str]) -> None:
    async with run_of("s" * 50) as run:
        await taken(run, 4)
        assert set(begun) == {"t0", "t1", "t2", "t3"}
        assert run.in_flight == set()


async def test_next_call_continues_with_the_next_task() -> None:
    async with run_of("sfsfssfsss" * 3) as run:
        calls = [await taken(run, 3) for _ in range(4)]
    ids = [each for call in calls for each in call]
    assert [len(call) for call in calls] == [3] * 4
    assert len(set(ids)) == 12
    assert run.summary.episodes == 2 * (12 + run.summary.flat)


@pytest.mark.parametrize("seed", range(8))
async def test_every_episode_is_given_or_flat_in_any_order_of_spread(seed: int, begun: list[str]) -> None:
    source = random.Random(seed)
    spread = "".join(source.choice("sff") for _ in range(200))
    wanted = [source.randint(1, 5) for _ in range(5)]
    async with run_of(spread, concurrency=Concurrency(episodes=source.choice([2, 6, 64]))) as run:
        calls = [await taken(run, number) for number in wanted]
        assert [len(call) for call in calls] == wanted
        assert run.in_flight == set()
        counted = 2 * (sum(wanted) + run.summary.flat)
    assert run.summary.episodes == counted == len(begun)
    # In the order of the tasks: none was skipped.
    assert set(begun) == {f"t{number}" for number in range(counted // 2)}


async def test_source_that_ends_early_yields_fewer_groups() -> None:
    async with run_of("sffs") as run:
        assert sorted(await taken(run, 3)) == ["t0", "t3"]
        assert run.summary.flat == 2


@pytest.mark.asyncio_alone  # trio warns of iterations that do not end
async def test_tasks_that_began_before_the_call_stay_for_the_reader() -> None:
    async with run_of("s" * 20, concurrency=Concurrency(episodes=8)) as run:
        first = await anext(run.groups())
        rest = await taken(run, 3)
        assert first.task.id not in rest
        everything = [first.task.id, *rest, *await taken(run, None)]
    assert sorted(everything) == sorted(f"t{number}" for number in range(20))


@pytest.mark.asyncio_alone  # trio warns of iterations that do not end
async def test_iteration_that_ends_early_loses_no_group() -> None:
    async with run_of("s" * 6, concurrency=Concurrency(episodes=4)) as run:
        ids = []
        for _ in range(6):
            async for group in run.groups(full=1):
                ids.append(group.task.id)
                break
        assert sorted(ids) == [f"t{number}" for number in range(6)]


async def test_trajectories_and_groups_may_be_read_in_turns() -> None:
    async with run_of("s" * 6) as run:
        single = [await anext(run), await anext(run)]
        rest = await taken(run, None)
    assert len({each.task.id for each in single} | set(rest)) == 6


async def test_stored_tasks_of_a_resumed_file_are_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    async with run_of("sf", file=path) as run:
        await taken(run, None)
    with RunFile(path) as stored:
        assert stored.summary()["flat"] == 0
    async with run_of("sfss", file=path) as run:
        assert sorted(await taken(run, 2)) == ["t2", "t3"]


def test_background_player_begins_no_task_past_the_full_groups(begun: list[str]) -> None:
    given = tasks("sffs" + "s" * 30)
    with BackgroundPlayer(Uneven, recording("Yes"), group_size=2) as player:
        first = [group.task.id for group in player.groups(given, full=2)]
        assert sorted(first) == ["t0", "t3"]
        assert player.player.run.summary.flat == 2
        assert set(begun) == {"t0", "t1", "t2", "t3"}
        assert [group.task.id for group in player.groups(given, full=1)] == ["t4"]
        with pytest.raises(BadOption, match="full=0"):
            player.groups(given, full=0)


async def test_numbers_that_give_no_group_are_refused() -> None:
    async with run_of("s") as run:
        with pytest.raises(BadOption, match=r"groups\(full=0\)"):
            run.groups(full=0)
    async with run_of("s", group_size=1) as run:
        with pytest.raises(BadOption, match="a group of one episode has no spread"):
            run.groups(full=1)


@given(st.lists(st.none() | st.sampled_from([0.0, 0.1 + 0.2, 0.3, 1.0, -1.0]), min_size=1, max_size=5))
def test_spread_is_what_batches_call_not_flat(rewards: list[float | None]) -> None:
    from runner.training import TrainingBatch

    members = [made([prompt(1), said(2)], id=f"t0#{n}", reward=each) for n, each in enumerate(rewards)]
    group: Group = group_of(*members)
    batch = TrainingBatch.padded([group], pad_id=0, drop_flat=True)
    assert group.has_spread == bool(batch)
