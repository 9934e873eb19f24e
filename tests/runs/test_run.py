"""Runs: task sources, results, and resumed files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from runner import (
    BadOption,
    BadTask,
    ConfigurationChanged,
    Conversation,
    EngineDead,
    Environment,
    Group,
    Outcome,
    Run,
    RunFile,
    Sampling,
    StorageFailed,
    Task,
    TooManyFailures,
    Trajectory,
    Turn,
    group_reward,
    reward,
)
from runner.options import Concurrency
from runner.store.writer import RunWriter
from runner.testing import Fault, Latency, ScriptedEngine, assert_exact, no_leaks
from tests.playing import Plain, play, play_all, recording, talking, tasks, until_end

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends]

ONE = Concurrency(episodes=1)


async def test_a_run_takes_the_class_and_constructs_it() -> None:
    class Needs(Plain):
        def __init__(self, size: int) -> None:
            self.size = size

    assert (await play(Plain, "Yes")).reward == 1.0
    assert (await play(Needs(3), "Yes")).reward == 1.0
    with pytest.raises(Exception, match=r"give Needs\(...\)"):
        Run(Needs, recording("Yes"))


async def test_tasks_given_to_the_run_go_over_those_of_the_class() -> None:
    assert (await play(Plain, "Yes", tasks=[Task(id="mine", prompt="?")])).task.id == "mine"


@dataclass(frozen=True)
class Case(Task):
    value: int = 0


class Typed(Environment[Case]):
    @reward
    def correct(self) -> bool:
        return int(self.episode.text) == self.task.value


async def test_jsonl_tasks_get_the_task_class_of_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"id": "a", "prompt": "4?", "value": 4}\n\n{"id": "b", "prompt": "5?", "value": 5}\n')
    played = await play_all(Typed, "4", tasks=file)
    assert {t.task.id: t.reward for t in played} == {"a": 1.0, "b": 0.0}
    assert all(isinstance(t.task, Case) for t in played)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"id": "a", "valu": 4}', "unknown field 'valu': put it under 'info', or give Case a field"),
        ('{"prompt": "?"}', "id"),
        ("[1]", "a task is a JSON object"),
        ("{", "not JSON"),
    ],
    ids=["unknown key", "no id", "list", "broken"],
)
async def test_invalid_task_line_is_refused_with_file_and_line(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(f'{{"id": "first", "prompt": "4?", "value": 4}}\n{line}\n')
    with pytest.raises(BadTask, match=said) as error:
        await play_all(Typed, "4", tasks=str(file))
    assert f"{file}:2" in str(error.value)


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (Task(id="t0", prompt="?"), "task 2 has the same id 't0' as task 1"),
        (Task(id="", prompt="?"), "a task has no id"),
        (Task(id=3, prompt="?"), r"a task has the id 3, of type int: .* such as Task\(id='3'\)"),  # type: ignore[arg-type]  # refused
        ("not a task", "which is not a Task"),
    ],
    ids=["twice", "no id", "a number", "no task"],
)
async def test_invalid_task_ends_the_run_and_keeps_played_episodes(second: Any, said: str) -> None:
    got: list[Trajectory] = []
    with pytest.raises(BadTask, match=said):
        await until_end(Run(Plain, recording("Yes"), tasks=iter([*tasks(1), second]), concurrency=ONE), got)
    assert [(t.task.id, t.outcome) for t in got] == [("t0", Outcome.COMPLETED)]


async def test_second_system_message_is_refused_with_the_task_id() -> None:
    class Prompted(Plain):
        system_prompt = "Be brief."

    system: Any = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "Hi"}]
    given = [Task(id="fine", prompt="Hi"), Task(id="double", prompt=system)]
    with pytest.raises(BadTask, match="task 'double' begins with a system message"):
        await play_all(Prompted, "Yes", tasks=given)
    assert (await play(Plain, "Yes", tasks=given[1:])).messages[0]["content"] == "Be long."


async def test_error_of_tasks_names_its_place() -> None:
    class Raises(Plain):
        def tasks(self) -> Iterator[Task]:  # type: ignore[override]
            yield from tasks(1)
            raise OSError("disk on fire")

    with pytest.raises(BadTask, match=r"tasks\(\) raised OSError: disk on fire \(in tasks"):
        await play_all(Raises, "Yes")


async def test_sync_and_async_task_generators_are_closed_at_the_end() -> None:
    closed: list[str] = []

    def synchronous() -> Iterator[Task]:
        try:
            yield from tasks(100)
        finally:
            closed.append("sync")

    async def asynchronous() -> AsyncIterator[Task]:
        try:
            for task in tasks(100):
                yield task
        finally:
            closed.append("async")

    for source in (synchronous(), asynchronous()):
        async with Run(Plain, recording("Yes"), tasks=source, concurrency=ONE) as run:
            async for _ in run:
                break
    assert closed == ["sync", "async"]


class Curriculum:
    """Environment that yields a task until it is solved, and then the next task."""

    def __init__(self, levels: int) -> None:
        self.levels = levels
        self.level = 0
        self.received: list[str] = []

    def __aiter__(self) -> AsyncIterator[Task]:
        return self._tasks()

    async def _tasks(self) -> AsyncIterator[Task]:
        while self.level < self.levels:
            yield Task(id=f"level-{self.level}", prompt="?")

    def finished(self, trajectory: Trajectory) -> None:
        self.received.append(f"{trajectory.task.id}@{trajectory.visit}")
        self.level += trajectory.reward == 1.0


class SecondTime(Plain):
    """Environment in which a task is solved at its second visit."""

    @reward
    def correct(self) -> bool:
        return "@1" in self.episode.id


async def test_task_source_receives_results_and_may_repeat_a_task() -> None:
    source = Curriculum(2)
    played = await play_all(SecondTime, "Yes", tasks=source, concurrency=ONE)
    assert [t.id for t in played][:4] == ["level-0#0", "level-0@1#0", "level-1#0", "level-1@1#0"]
    assert source.received[:4] == ["level-0@0", "level-0@1", "level-1@0", "level-1@1"]


async def test_resumed_source_receives_stored_results_in_commit_order(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    first = Curriculum(1)
    await play_all(SecondTime, "Yes", tasks=first, concurrency=ONE, file=file)
    again = Curriculum(2)
    played = await play_all(SecondTime, "Yes", tasks=again, concurrency=ONE, file=file)
    assert again.received[: len(first.received)] == first.received
    assert {t.task.id for t in played} == {"level-1"}


async def test_error_of_finished_ends_the_run_by_name() -> None:
    class Deaf(Curriculum):
        def finished(self, trajectory: Trajectory) -> None:
            raise ValueError("what?")

    with pytest.raises(BadTask, match=r"finished\(\) of the task source raised ValueError: what\?"):
        await play_all(Plain, "Yes", tasks=Deaf(1), concurrency=ONE)


async def test_groups_come_whole_once_their_last_episode_is_in() -> None:
    async with Run(Plain, recording("Yes"), tasks=tasks(3), group_size=4) as run:
        groups = [group async for group in run.groups()]
    assert sorted(group.task.id for group in groups) == ["t0", "t1", "t2"]
    for group in groups:
        assert [t.index for t in group.trajectories] == [0, 1, 2, 3]
        assert group.complete
        assert group.agent == "main"


async def test_breaker_ends_a_mostly_failing_run_with_the_cause() -> None:
    class Fails(Plain):
        def step(self, turn: Turn) -> None:
            raise ConnectionError("database is down")

    got: list[Trajectory] = []
    run = Run(Fails, recording("Yes"), tasks=tasks(1000), concurrency=Concurrency(episodes=4))
    with pytest.raises(TooManyFailures, match=r"database is down") as error:
        await until_end(run, got)
    assert 16 <= len(got) < 40
    assert error.value.exit_code == 10
    assert len(await play_all(Fails, "Yes", tasks=tasks(40), breaker=1)) == 40


async def test_only_engine_failures_are_retried_and_attempts_kept(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    engine = recording("Yes", faults={0: Fault.error(1, "flaky"), 1: Fault.error(1, "flaky")})
    async with Run(Plain, engine, file=file) as run:
        (trajectory,) = [t async for t in run]
    assert (trajectory.outcome, trajectory.attempt, trajectory.reward) == (Outcome.COMPLETED, 2, 1.0)
    with RunFile(file) as stored:
        rows = list(stored.rows(superseded=None))
        attempts = [(row.attempt, row.outcome.value, row.superseded) for row in rows]
    assert attempts == [(0, "engine_error", True), (1, "engine_error", True), (2, "completed", False)]


async def test_engine_death_ends_the_run_and_keeps_finished_episodes() -> None:
    got: list[Trajectory] = []
    engine = recording("Yes", faults={3: Fault.death(1)})
    with pytest.raises(EngineDead, match="a scripted death"):
        await until_end(Run(Plain, engine, tasks=tasks(20), concurrency=Concurrency(episodes=2)), got)
    outcomes = {t.outcome for t in got}
    assert outcomes == {Outcome.COMPLETED, Outcome.ENGINE_ERROR}
    assert 3 <= len(got) <= 5


async def test_episode_is_announced_after_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit_episode = RunWriter.commit_episode

    async def late(self: RunWriter, trajectories: list[Trajectory], *, retry: bool = False) -> None:
        await anyio.wait_all_tasks_blocked()  # a reader that was notified too early would read the file here
        await commit_episode(self, trajectories, retry=retry)

    monkeypatch.setattr(RunWriter, "commit_episode", late)
    async with Run(Plain, recording("Yes"), tasks=tasks(3), file=tmp_path / "run.db") as run:
        async for trajectory in run:
            with RunFile(tmp_path / "run.db") as stored:
                assert trajectory.id in [row.id for row in stored]


async def test_same_run_again_plays_only_unfinished_episodes(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    first = await play_all(Plain, "Yes", tasks=tasks(3), file=file)
    second = await play_all(Plain, "Yes", tasks=tasks(5), file=file)
    assert sorted(t.task.id for t in first) == ["t0", "t1", "t2"]
    assert sorted(t.task.id for t in second) == ["t3", "t4"]
    async with Run(Plain, recording("Yes"), tasks=tasks(5), file=file) as run:
        stored = list(run.stored())
        assert [t async for t in run] == []
    assert sorted(t.task.id for t in stored) == [f"t{n}" for n in range(5)]
    for trajectory in stored:
        assert_exact(trajectory)


async def test_engine_errors_and_cancelled_ones_are_played_again(tmp_path: Path) -> None:
    file = tmp_path / "run.db"

    def speaker(turn: Any) -> str:
        return "Yes"

    faulty = recording(speaker, faults={0: Fault.error(0, "flaky")})
    (failed,) = await play_all(Plain, faulty, file=file, retries=0, breaker=1)
    assert failed.outcome is Outcome.ENGINE_ERROR
    (again,) = await play_all(Plain, recording(speaker), file=file, retries=0, breaker=1)
    assert (again.outcome, again.attempt) == (Outcome.COMPLETED, 1)


async def test_episode_repeated_by_a_later_run_has_all_its_retries(tmp_path: Path) -> None:
    flaky = Fault.error(0, "flaky")
    first = recording("Yes", faults=dict.fromkeys(range(3), flaky))
    (failed,) = await play_all(Plain, first, file=tmp_path / "run.db", retries=2, breaker=1)
    assert (failed.outcome, failed.attempt) == (Outcome.ENGINE_ERROR, 2)
    second = recording("Yes", faults=dict.fromkeys(range(2), flaky))
    (again,) = await play_all(Plain, second, file=tmp_path / "run.db", retries=2, breaker=1)
    assert (again.outcome, again.attempt) == (Outcome.COMPLETED, 5)


async def test_leaving_the_block_early_keeps_partial_episodes(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    closed: list[str] = []

    class Waits(Plain):
        wait = True

        async def step(self, turn: Turn) -> None:
            if self.task.id != "t0" and self.wait:
                await anyio.sleep_forever()

        def close(self) -> None:
            closed.append(self.task.id)

    engine = recording("Yes")
    with no_leaks():
        async with Run(Waits, engine, tasks=tasks(3), file=file) as run:
            async for _ in run:
                break
            await anyio.wait_all_tasks_blocked()
    with RunFile(file) as stored:
        rows = {row.task_id: (row.outcome.value, row.turns) for row in stored.rows()}
    assert rows["t0"] == ("completed", 1)
    assert {rows[name] for name in ("t1", "t2") if name in rows} == {("cancelled", 1)}
    assert sorted(closed) == sorted(rows)
    Waits.wait = False
    played = await play_all(Waits, "Yes", tasks=tasks(3), file=file)
    assert sorted((t.task.id, t.outcome.value) for t in played) == [("t1", "completed"), ("t2", "completed")]


async def test_changed_configuration_is_refused_with_the_changes(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    await play_all(Plain, "Yes", file=file, sampling=Sampling(temperature=0.5))
    with pytest.raises(ConfigurationChanged, match=r"sampling.temperature: 0.5 -> 0.7"):
        await play_all(Plain, "Yes", file=file, sampling=Sampling(temperature=0.7))
    with pytest.raises(ConfigurationChanged, match=r"seed: 0 -> 1"):
        await play_all(Plain, "Yes", file=file, sampling=Sampling(temperature=0.5), seed=1)
    free = await play_all(Plain, "Yes", file=file, sampling=Sampling(temperature=0.5), concurrency=ONE)
    assert free == []


async def test_missing_group_rewards_are_computed_on_resume(tmp_path: Path) -> None:
    class Compared(Plain):
        @group_reward
        def compared(self, group: Group) -> list[float]:
            return [float(t.index) for t in group.trajectories]

    file = tmp_path / "run.db"
    # The first run ends with half of the group.
    async with Run(Compared, recording("Yes"), group_size=2, indices=[0], file=file) as run:
        assert [t.reward async for t in run] == [1.0]
    async with Run(Compared, recording("Yes"), group_size=2, file=file) as run:
        groups = [group async for group in run.groups()]
    assert [[t.reward for t in group.trajectories] for group in groups] == [[1.0, 2.0]]
    with RunFile(file) as stored:
        assert [(row.index, row.reward) for row in stored.rows()] == [(0, 1.0), (1, 2.0)]


async def test_resumed_run_counts_each_reward_of_the_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Compared(Plain):
        @group_reward
        def compared(self, group: Group) -> list[float]:
            return [float(t.index) for t in group.trajectories]

    async def full(*_: object) -> None:
        raise StorageFailed("the disk is full")

    file = tmp_path / "run.db"
    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "commit_group_rewards", full)
        with pytest.raises(StorageFailed):
            await play_all(Compared, "Yes", group_size=2, file=file, tasks=tasks(3), concurrency=ONE)
    for _ in range(2):  # in the second run, everything is in the file
        async with Run(Compared, recording("Yes"), group_size=2, file=file, tasks=tasks(3)) as run:
            async for _trajectory in run:
                pass
        assert run.summary.episodes == run.summary.reward.count == run.summary.rewards["compared"].count == 6
        assert run.summary.rewards["compared"].mean == pytest.approx(0.5)
        with RunFile(file) as stored:
            assert stored.summary()["episodes"] == 6


async def test_iterating_before_the_start_names_the_fix() -> None:
    with pytest.raises(RuntimeError, match="async with Run"):
        await anext(Run(Plain, recording("Yes")))


async def test_weights_of_the_run_are_in_the_header(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    await play_all(Plain, "Yes", file=file, weights={"correct": 0.5})
    with RunFile(file) as stored:
        assert stored.header.weights == {"correct": 0.5}


async def test_run_enters_and_leaves_only_engines_not_running() -> None:
    engine = ScriptedEngine("Yes")
    await play_all(Plain, engine)
    assert not engine.running
    async with engine:
        await play_all(Plain, engine)
        assert engine.running


@pytest.mark.parametrize(
    ("option", "said"),
    [({"group_size": 0}, "group_size=0"), ({"retries": -1}, "retries=-1"), ({"breaker": 0}, "breaker=0")],
)
def test_invalid_options_are_refused_by_name(option: dict[str, Any], said: str) -> None:
    with pytest.raises(BadOption, match=said):
        Run(Plain, ScriptedEngine("Yes"), **option)


async def test_summary_is_json() -> None:
    async with Run(Plain, recording("Yes"), tasks=tasks(4), group_size=2) as run:
        [t async for t in run]
    summary = json.loads(json.dumps(run.summary.as_dict()))
    assert (summary["episodes"], summary["outcomes"]) == (8, {"completed": 8})
    assert summary["reward"] == {"mean": 1.0, "standard_error": 0.0, "count": 8, "tasks": 4}
    assert summary["pass_at"] == {"1": 1.0, "2": 1.0}
    assert summary["tokens"]["sampled"] == 8 * 4


async def test_runs_sharing_an_unentered_engine_all_finish() -> None:
    engine = ScriptedEngine("Yes", latency=Latency(between=2), tick=0.001)
    outcomes: dict[int, list[Outcome]] = {}

    async def one(number: int) -> None:
        async with Run(Plain(), engine, tasks=tasks(number)) as run:
            outcomes[number] = [trajectory.outcome async for trajectory in run]

    for _ in range(2):  # it can be entered again
        async with anyio.create_task_group() as runs:
            for number in (1, 20, 5):
                runs.start_soon(one, number)
        assert {number: len(played) for number, played in outcomes.items()} == {1: 1, 5: 5, 20: 20}
        assert {outcome for played in outcomes.values() for outcome in played} == {Outcome.COMPLETED}
        assert not engine.running


async def test_run_does_not_close_an_engine_entered_by_the_caller() -> None:
    async with ScriptedEngine("Yes") as engine:
        await play_all(Plain(), engine)
        assert engine.running


async def test_a_request_that_the_engine_refuses_is_not_played_again() -> None:
    async with Run(Plain(), ScriptedEngine({"judge": ["never"]}), retries=5, breaker=1) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    assert trajectory.outcome is Outcome.ENGINE_ERROR
    assert "no replies for agent 'main'" in trajectory.error
    assert trajectory.attempt == run.summary.retried == 0


async def test_iterating_over_a_left_run_is_refused() -> None:
    async with Run(Plain(), ScriptedEngine("Yes")) as run:
        pass
    with pytest.raises(RuntimeError, match="the run is over"):
        await anext(run)


async def test_a_run_is_entered_once() -> None:
    async with Run(Plain(), ScriptedEngine("Yes")) as run:
        with pytest.raises(RuntimeError, match="entered only once"):
            await run.__aenter__()
        assert [trajectory.outcome async for trajectory in run] == [Outcome.COMPLETED]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # trio has no such order
async def test_cancel_reaches_episodes_before_their_first_step() -> None:
    async def for_ever(conversation: Conversation) -> None:
        await anyio.sleep_forever()

    async def one() -> AsyncIterator[Task]:
        # The cancellation takes effect after this task's episode was created, and before it runs.
        asyncio.get_running_loop().call_soon(run.cancel)
        yield Task("t0", "Go.")

    with anyio.fail_after(300):
        async with Run(talking(for_ever), ScriptedEngine("hi"), tasks=one()) as run:
            assert [trajectory.outcome async for trajectory in run] == [Outcome.CANCELLED]
