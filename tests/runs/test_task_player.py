"""Player: a trainer's tasks on a run that stays open. Tasks may repeat, be cancelled, and come after the end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from runner import (
    BadOption,
    BadTask,
    Concurrency,
    Conversation,
    EngineDead,
    Group,
    Outcome,
    Player,
    Run,
    RunFile,
    RunStopped,
    Sampling,
    Task,
    Trajectory,
    group_reward,
    reward,
)
from runner.testing import Fault, ScriptedEngine, no_leaks
from tests.playing import Plain, assert_nothing_open, recording, tasks, until

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]

FIRST, SECOND = tasks(2)


async def test_player_plays_a_group_of_each_task() -> None:
    with no_leaks():
        async with Player(Plain, recording("Yes"), group_size=3) as player:
            (first,) = await player.play_group(FIRST)
            (second,) = await player.play_group(SECOND)
    assert (first.task.id, first.complete, [t.index for t in first.trajectories]) == ("t0", True, [0, 1, 2])
    assert [t.reward for t in second.trajectories] == [1.0, 1.0, 1.0]
    assert player.run.summary.episodes == 6


async def test_player_plays_one_episode_with_the_runs_seeds() -> None:
    async with Player(Plain, recording("Yes"), group_size=4) as player:
        (alone,) = await player.play(FIRST, index=2)
    async with Run(Plain, recording("Yes"), tasks=[FIRST], group_size=4) as run:
        of_run = {t.index: t.seed async for t in run}
    assert (alone.id, alone.seed) == ("t0#2", of_run[2])


async def test_the_same_task_again_is_another_visit() -> None:
    async with Player(Plain, recording("Yes"), group_size=2) as player:
        first, again = [(await player.play_group(FIRST))[0] for _ in range(2)]
    assert [t.id for t in first.trajectories] == ["t0#0", "t0#1"]
    assert [t.id for t in again.trajectories] == ["t0@1#0", "t0@1#1"]
    assert len({t.seed for group in (first, again) for t in group.trajectories}) == 4


async def test_visits_of_an_index_do_not_depend_on_other_calls() -> None:
    ids: set[str] = set()

    async def play(player: Player, index: int) -> None:
        ids.update(t.id for t in await player.play(FIRST, index=index))

    async with Player(Plain, recording("Yes"), group_size=4) as player, anyio.create_task_group() as group:
        for index in (3, 1, 0, 2):
            group.start_soon(play, player, index)
    assert ids == {"t0#0", "t0#1", "t0#2", "t0#3"}


async def test_player_is_started_and_closed_in_different_tasks() -> None:
    player = Player(Plain, recording("Yes"))
    await asyncio.create_task(player.start())
    played = await asyncio.create_task(player.play(FIRST))
    await asyncio.create_task(player.aclose())
    assert [t.outcome for t in played] == [Outcome.COMPLETED]
    assert_nothing_open(player.run.engine)


async def test_run_left_in_another_task_is_refused_by_name() -> None:
    run = Run(Plain, recording("Yes"), tasks=[FIRST])
    entered, leave = anyio.Event(), anyio.Event()

    async def enter() -> None:
        await run.__aenter__()
        entered.set()
        await leave.wait()
        await run.__aexit__(None, None, None)

    owner = asyncio.create_task(enter())
    await entered.wait()
    with pytest.raises(RuntimeError, match=r"entered in another task, .* use Player"):
        await run.__aexit__(None, None, None)
    leave.set()
    await owner


class Waits(Plain):
    """Environment that waits until it is cancelled, except for the tasks that disable this."""

    open = 0

    async def rollout(self, conversation: Conversation) -> None:
        if self.task.prompt == "wait":
            Waits.open += 1
            try:
                await anyio.sleep_forever()
            finally:
                Waits.open -= 1
        await conversation.generate()


async def test_cancelled_call_cancels_its_episodes_alone() -> None:
    Waits.open = 0
    async with Player(Waits, recording("Yes"), group_size=3) as player:
        call = asyncio.create_task(player.play_group(Task(id="long", prompt="wait")))
        await until(lambda: Waits.open >= 3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: not player.run.in_flight)
        assert Waits.open == 0
        (group,) = await player.play_group(FIRST)
    assert [t.outcome for t in group.trajectories] == [Outcome.COMPLETED] * 3
    assert player.run.summary.outcomes[Outcome.CANCELLED] == 3


async def test_cancelled_call_that_had_not_begun_is_not_played() -> None:
    Waits.open = 0
    async with Player(Waits, recording("Yes"), concurrency=Concurrency(episodes=1)) as player:
        first = asyncio.create_task(player.play(Task(id="long", prompt="wait")))
        await until(lambda: Waits.open >= 1)
        second = asyncio.create_task(player.play(Task(id="longer", prompt="wait")))
        third = asyncio.create_task(player.play(Task(id="longest", prompt="wait")))
        for _ in range(20):
            await checkpoint()
        for call in (second, third, first):
            call.cancel()
        await asyncio.wait([first, second, third])
        (played,) = await player.play(FIRST)
    assert played.outcome is Outcome.COMPLETED
    assert Waits.open == 0


async def test_failed_episode_has_no_reward_and_the_player_lives() -> None:
    class Fails(Plain):
        def setup(self) -> None:
            if self.task.id == "t0":
                raise OSError("no disk")

    async with Player(Fails, recording("Yes")) as player:
        for _ in range(40):  # more than the window of any breaker
            (failed,) = await player.play(FIRST)
        (fine,) = await player.play(SECOND)
    assert (failed.outcome, failed.reward) == (Outcome.ENV_ERROR, None)
    assert fine.reward == 1.0


async def test_reward_of_none_stays_none() -> None:
    class Unsure(Plain):
        @reward
        def correct(self) -> Any:
            return None

    async with Player(Unsure, recording("Yes")) as player:
        (played,) = await player.play(FIRST)
    assert (played.outcome, played.reward) == (Outcome.COMPLETED, None)


async def test_group_rewards_compare_a_played_group() -> None:
    class Ranked(Plain):
        @group_reward
        def rank(self, group: Group) -> list[float]:
            return [float(t.index) for t in group.trajectories]

    async with Player(Ranked, recording("Yes"), group_size=3) as player:
        (group,) = await player.play_group(FIRST)
        with pytest.raises(BadOption, match="use play_group"):
            await player.play(FIRST)
    assert [t.rewards["rank"] for t in group.trajectories] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("task", "said"),
    [("no task", "not a Task"), (Task(id="", prompt="?"), "no id"), (Task(id="double"), "system message")],
    ids=["no task", "no id", "two system prompts"],
)
async def test_bad_task_is_an_error_of_its_call_alone(task: Any, said: str) -> None:
    class Prompted(Plain):
        system_prompt = "Be brief."

    if isinstance(task, Task) and task.id:
        task = Task(id="double", prompt=[{"role": "system", "content": "x"}, {"role": "user", "content": "y"}])
    async with Player(Prompted, recording("Yes")) as player:
        with pytest.raises(BadTask, match=said):
            await player.play(task)
        assert (await player.play(FIRST))[0].reward == 1.0


class Cool(Plain):
    sampling = Sampling(max_tokens=30, top_p=0.5)


async def test_sampling_of_a_call_overrides_that_of_the_player() -> None:
    engine = recording("Yes")
    async with Player(Cool, engine, group_size=2, sampling=Sampling(temperature=0.5, top_k=4)) as player:
        await player.play(FIRST, sampling=Sampling(temperature=0, max_tokens=7))
        await player.play(FIRST)
        await player.play_group(SECOND, sampling=Sampling(top_p=0.9))
    used = [(c.sampling.temperature, c.sampling.max_tokens, c.sampling.top_k, c.sampling.top_p) for c in engine.calls]
    assert used == [(0, 7, 4, 0.5), (0.5, 30, 4, 0.5), (0.5, 30, 4, 0.9), (0.5, 30, 4, 0.9)]


@pytest.mark.parametrize(
    ("sampling", "fault"),
    [(Sampling(adapter="none"), "no adapter of that name"), ({"temperature": 0}, "sampling={'temperature': 0}: give")],
)
async def test_unusable_sampling_is_an_error_of_its_call(sampling: Any, fault: str) -> None:
    async with Player(Plain, recording("Yes")) as player:
        with pytest.raises(BadOption, match=fault):
            await player.play(FIRST, sampling=sampling)
        assert (await player.play(FIRST))[0].id == "t0#0"


async def test_processes_that_share_visits_have_other_seeds(tmp_path: Path) -> None:
    ids: list[str] = []
    seeds: set[int] = set()
    for number, skip in ((0, 0), (1, 0), (2, 0), (1, 5)):
        async with Player(Plain, recording("Yes"), group_size=2, file=tmp_path / f"{number}.db") as player:
            player.share_visits(number, 3, skip=skip)
            played = [t for _ in range(2) for group in await player.play_group(FIRST) for t in group.trajectories]
        ids += [t.id for t in played]
        seeds |= {t.seed for t in played}
    visits = ["", "@3", "@1", "@4", "@2", "@5", "@16", "@19"]
    assert ids == [f"t0{visit}#{index}" for visit in visits for index in range(2)]
    assert len(seeds) == len(ids)
    async with Player(Plain, recording("Yes"), group_size=2, file=tmp_path / "1.db") as player:
        player.share_visits(1, 3)  # continues after the visits in the file
        assert [t.id for group in await player.play_group(FIRST) for t in group.trajectories] == ["t0@7#0", "t0@7#1"]


@pytest.mark.parametrize(("number", "of", "skip"), [(2, 2, 0), (-1, 2, 0), (0, 0, 0), (0, 1, -1), ("a", 2, 0)])
async def test_invalid_shares_are_refused(number: Any, of: int, skip: int) -> None:
    async with Player(Plain, recording("Yes")) as player:
        with pytest.raises(BadOption, match=r"share_visits\(.*: give a whole number"):
            player.share_visits(number, of, skip=skip)


async def test_index_outside_the_group_is_refused() -> None:
    async with Player(Plain, recording("Yes"), group_size=2) as player:
        with pytest.raises(BadOption, match="index=2: a group has the episodes 0 to 1"):
            await player.play(FIRST, index=2)


@pytest.mark.parametrize("name", ["tasks", "indices"])
def test_options_that_a_player_lacks_are_refused(name: str) -> None:
    with pytest.raises(BadOption, match=f"{name}=: a player gets tasks with play"):
        Player(Plain, recording("Yes"), **{name: [0]})  # type: ignore[arg-type]  # wrong on purpose


async def test_call_after_the_end_is_refused_with_the_fix() -> None:
    player = Player(Plain, recording("Yes"))
    with pytest.raises(RuntimeError, match="has not begun"):
        await player.play(FIRST)
    async with player:
        pass
    with pytest.raises(RunStopped, match="the player was closed"):
        await player.play(FIRST)
    with pytest.raises(RuntimeError, match="only once"):
        await player.start()


async def play_on(player: Player) -> None:
    while True:
        await player.play(FIRST)


async def test_dead_engine_is_the_error_of_every_call() -> None:
    engine = ScriptedEngine("Yes", faults={0: Fault.death()})
    async with Player(Plain, engine) as player:
        # The death may be detected after the episode.
        with pytest.raises(EngineDead):
            await play_on(player)
        assert isinstance(player.error, EngineDead)
        with pytest.raises(EngineDead):
            await player.play(SECOND)


async def test_engine_that_does_not_start_is_the_error_of_start() -> None:
    class Broken(ScriptedEngine):
        async def __aenter__(self) -> Any:
            raise EngineDead("no memory")

    with pytest.raises(EngineDead, match="no memory"):
        await Player(Plain, Broken("Yes")).start()


async def test_closing_plays_what_was_requested() -> None:
    async with Player(Plain, recording("Yes")) as player:
        calls = [asyncio.create_task(player.play(task)) for task in tasks(20)]
        await checkpoint()
    assert [(await call)[0].reward for call in calls] == [1.0] * 20


async def test_error_in_the_block_cuts_the_episodes() -> None:
    Waits.open = 0
    calls = []

    async def train() -> None:
        async with Player(Waits, recording("Yes")) as player:
            calls.append(asyncio.create_task(player.play(Task(id="long", prompt="wait"))))
            await until(lambda: Waits.open > 0)
            raise ZeroDivisionError

    with no_leaks(), pytest.raises(ZeroDivisionError):
        await train()
    assert [t.outcome for t in await calls[0]] == [Outcome.CANCELLED]


async def test_resumed_file_continues_the_visits(tmp_path: Path) -> None:
    ids = []
    for _ in range(2):
        async with Player(Plain, recording("Yes"), file=tmp_path / "run.db", group_size=2) as player:
            for _ in range(2):
                ids += [t.id for group in await player.play_group(FIRST) for t in group.trajectories]
    assert ids == [f"t0{visit}#{index}" for visit in ("", "@1", "@2", "@3") for index in range(2)]
    with RunFile(tmp_path / "run.db") as stored:
        assert sorted(t.id for t in stored.trajectories()) == sorted(ids)


async def test_a_thousand_unread_results_block_nothing() -> None:
    async with Player(Plain, recording("Yes")) as player:
        calls = [asyncio.create_task(player.play(task)) for task in tasks(1000)]
        played: list[list[Trajectory]] = await asyncio.gather(*calls)
    assert len({t.id for each in played for t in each}) == 1000


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_player_on_trio_is_refused_by_name(anyio_backend: str) -> None:
    with pytest.raises(BadOption, match="a player works on asyncio alone, and this is trio: run on asyncio"):
        await Player(Plain, recording("Yes")).start()
