"""The life of an episode: the order of its hooks, their tasks, and resources that they leave open."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from runner import Environment, Group, Outcome, Run, Task, Trajectory, Turn, group_reward, metric, reward, tool
from runner.options import Concurrency
from runner.store.writer import RunWriter
from runner.testing import ScriptedEngine, call
from tests.playing import Plain, play, play_all, recording, tasks

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends]


async def test_life_comes_in_the_order_that_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Diary(Environment):
        def __init__(self) -> None:
            seen.append("made")

        def tasks(self) -> Iterator[Task]:
            seen.append("task")
            yield Task(id="a", prompt="Hello?")

        def setup(self) -> None:
            assert (self.task.id, self.shared) == ("a", "shared")
            self.episode.exit_stack.callback(seen.append, "exit_stack")
            seen.append("setup")

        @contextmanager
        def lifespan(self) -> Iterator[str]:
            seen.append("lifespan begins")
            yield "shared"
            seen.append("lifespan ends")

        def prompt(self) -> str:
            seen.append("prompt")
            return "Hello?"

        def step(self, turn: Turn) -> None:
            seen.append("step")

        @reward
        def second_in_the_alphabet_first_in_the_class(self) -> bool:
            seen.append("reward")
            return True

        @metric
        def a_metric(self) -> float:
            seen.append("metric")
            return 2

        @reward(weight=0)
        def another(self) -> bool:
            seen.append("another reward")
            return True

        @group_reward
        def compared(self, group: Group) -> list[float]:
            seen.append("group reward")
            return [0.0 for _ in group.trajectories]

        async def close(self) -> None:
            seen.append("close")

    commit_episode, commit_rewards = RunWriter.commit_episode, RunWriter.commit_group_rewards

    async def committed(self: RunWriter, trajectories: list[Trajectory], *, retry: bool = False) -> None:
        await commit_episode(self, trajectories, retry=retry)
        seen.append("commit")

    async def committed_again(self: RunWriter, trajectories: list[Trajectory]) -> None:
        await commit_rewards(self, trajectories)
        seen.append("second commit")

    monkeypatch.setattr(RunWriter, "commit_episode", committed)
    monkeypatch.setattr(RunWriter, "commit_group_rewards", committed_again)
    async with Run(Diary, ScriptedEngine("Hi")) as run:
        async for trajectory in run:
            assert (trajectory.reward, trajectory.metrics) == (1.0, {"a_metric": 2.0})
            seen.append("announced")
    assert seen == [
        "made", "lifespan begins", "task", "made", "setup", "prompt", "step", "reward", "metric", "another reward",
        "close", "exit_stack", "commit", "group reward", "second commit", "announced", "lifespan ends",
    ]  # fmt: skip


async def test_a_task_is_pulled_only_when_a_place_is_free() -> None:
    pulled = 0
    in_flight: list[int] = []

    class Counted(Plain):
        def tasks(self) -> Iterator[Task]:  # type: ignore[override]
            nonlocal pulled
            for task in tasks(6):
                pulled += 1
                yield task

        def close(self) -> None:
            in_flight.append(pulled)

    await play_all(Counted, "Yes", concurrency=Concurrency(episodes=1))
    assert in_flight == [1, 2, 3, 4, 5, 6]


async def test_every_episode_has_its_own_environment() -> None:
    class Stateful(Plain):
        def __init__(self, start: list[int], *, step: int = 1) -> None:
            self.items = [*start]
            self.step_size = step

        def setup(self) -> None:
            self.items.append(self.step_size)

        def tasks(self) -> list[Task]:
            return tasks(5)

        @metric
        def length(self) -> float:
            return len(self.items) + self.step_size

    constructed = Stateful([1, 2], step=7)
    played = await play_all(constructed, "Yes")
    assert [t.metrics["length"] for t in played] == [10.0] * 5
    assert constructed.items == [1, 2]


async def test_a_task_group_opened_in_setup_lives_until_after_close() -> None:
    alive: list[str] = []

    @asynccontextmanager
    async def service() -> AsyncIterator[anyio.Event]:
        asked = anyio.Event()

        async def serve() -> None:
            await asked.wait()
            alive.append("served")
            await anyio.sleep_forever()

        async with anyio.create_task_group() as group:
            group.start_soon(serve)
            yield asked
            group.cancel_scope.cancel()
        alive.append("stopped")

    class WithService(Plain):
        async def setup(self) -> None:
            self.asked = await self.episode.exit_stack.enter_async_context(service())

        @reward
        async def correct(self) -> bool:
            self.asked.set()
            await anyio.wait_all_tasks_blocked()
            return alive == ["served"]

        def close(self) -> None:
            alive.append("closed")

    trajectory = await play(WithService, "Yes")
    assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.COMPLETED, 1.0, "")
    assert alive == ["served", "closed", "stopped"]


async def test_hooks_run_in_one_task_and_a_tool_in_a_child() -> None:
    where: dict[str, Any] = {}

    class Where(Plain):
        async def setup(self) -> None:
            where["setup"] = anyio.get_current_task().id

        async def prompt(self) -> str:
            where["prompt"] = anyio.get_current_task().id
            return "Go"

        async def step(self, turn: Turn) -> None:
            where["step"] = anyio.get_current_task().id

        @tool
        async def one(self) -> None:
            """One."""
            where["one"] = anyio.get_current_task().id

        @tool
        async def two(self) -> None:
            """Two."""
            where["two"] = anyio.get_current_task().id

        @reward
        async def correct(self) -> bool:
            where["reward"] = anyio.get_current_task().id
            return True

        async def close(self) -> None:
            where["close"] = anyio.get_current_task().id

    await play(Where, [[call("one"), call("two")], "Done"])
    same = {where[name] for name in ("setup", "prompt", "step", "reward", "close")}
    assert len(same) == 1
    assert not same & {where["one"], where["two"]}


async def test_the_exit_stack_is_refused_in_a_tool_with_what_to_do() -> None:
    class Late(Plain):
        @tool
        def opens(self) -> None:
            """Open something."""
            self.episode.exit_stack.callback(print)

    trajectory = await play(Late, [call("opens"), "Done"])
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "setup() only" in trajectory.error
    assert "async with" in trajectory.error


async def test_close_is_called_if_and_only_if_setup_returned() -> None:
    seen: list[str] = []

    class Failing(Plain):
        def tasks(self) -> list[Task]:
            return tasks(2)

        def setup(self) -> None:
            self.episode.exit_stack.callback(seen.append, f"unwound {self.task.id}")
            if self.task.id == "t0":
                raise ValueError("no database")

        def close(self) -> None:
            seen.append(f"closed {self.task.id}")

    played = await play_all(Failing, "Yes", concurrency=Concurrency(episodes=1), breaker=1)
    assert [t.outcome for t in played] == [Outcome.ENV_ERROR, Outcome.COMPLETED]
    assert "ValueError: no database (in setup" in played[0].error
    assert (played[0].reward, played[0].turns) == (None, [])
    assert seen == ["unwound t0", "closed t1", "unwound t1"]


async def test_close_runs_to_its_end_although_the_run_is_cancelled() -> None:
    seen: list[str] = []

    class Slow(Plain):
        async def step(self, turn: Turn) -> None:
            scope.cancel()
            await anyio.sleep_forever()

        async def close(self) -> None:
            seen.append("closing")
            await checkpoint()
            seen.append("closed")

    with anyio.CancelScope() as scope:
        await play(Slow, "Yes")
    assert scope.cancelled_caught
    assert seen == ["closing", "closed"]


async def test_close_and_the_exit_stack_may_raise_and_the_outcome_stays() -> None:
    class Careless(Plain):
        def setup(self) -> None:
            self.episode.exit_stack.push(self.slam)

        def slam(self, *_: object) -> None:
            raise OSError("stuck")

        def close(self) -> None:
            raise ValueError("already closed")

    async with Run(Careless, recording("Yes")) as run:
        (trajectory,) = [t async for t in run]
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 1.0)
    first, second = run.summary.faults
    assert first.startswith("t0#0: close(): ValueError: already closed")
    assert second.startswith("t0#0: exit_stack: OSError: stuck")


async def test_a_constructor_that_raises_fails_its_episodes_only() -> None:
    made = 0

    class Fragile(Plain):
        def __init__(self) -> None:
            nonlocal made
            made += 1
            if made == 2:
                raise ValueError("the second one breaks")

    played = await play_all(Fragile, "Yes", tasks=tasks(3), concurrency=Concurrency(episodes=1), breaker=1)
    assert [t.outcome for t in played] == [Outcome.ENV_ERROR, Outcome.COMPLETED, Outcome.COMPLETED]


async def test_hook_that_is_not_overridden_takes_no_thread() -> None:
    class Quiet(Environment):
        def tasks(self) -> list[Task]:
            return tasks(1)

        @reward
        async def correct(self) -> bool:
            return True

    class Overrides(Quiet):
        def setup(self) -> None: ...

    async def jobs_of(environment: type[Quiet]) -> set[str]:
        jobs: list[str] = []
        async with Run(environment, recording("Yes")) as run:
            called = run.workers.call

            async def counted(job: Any) -> Any:
                jobs.append(job.name)
                return await called(job)

            run.workers.call = counted  # type: ignore[method-assign]  # counts the calls, and forwards them
            assert [t.outcome async for t in run] == [Outcome.COMPLETED]
        return set(jobs) - {"tasks()", "run file"}

    assert await jobs_of(Quiet) == set()
    assert await jobs_of(Overrides) == {"setup()"}


async def test_sync_and_async_lifespan_run_in_the_runs_task() -> None:
    where: list[int] = []

    class Synchronous(Plain):
        shared: dict[str, int]

        @contextmanager
        def lifespan(self) -> Iterator[dict[str, int]]:
            yield {"answer": 42}

        @reward
        def correct(self) -> bool:
            return self.shared["answer"] == 42

    class Asynchronous(Synchronous):
        @asynccontextmanager
        async def lifespan(self) -> AsyncIterator[dict[str, int]]:  # type: ignore[override]
            where.append(anyio.get_current_task().id)
            async with anyio.create_task_group():
                yield {"answer": 42}
            where.append(anyio.get_current_task().id)

    assert (await play(Synchronous, "Yes")).reward == 1.0
    assert (await play(Asynchronous, "Yes")).reward == 1.0
    assert where == [anyio.get_current_task().id] * 2


async def test_two_runs_on_one_loop_do_not_touch_each_other() -> None:
    inside: dict[str, int] = {"first": 0, "second": 0}
    most: dict[str, int] = {"first": 0, "second": 0}

    class Limited(Plain):
        def __init__(self, name: str, limit: int) -> None:
            self.name = name
            self.limit = limit

        async def step(self, turn: Turn) -> None:
            async with self.episode.limiter("shared name", self.limit):
                inside[self.name] += 1
                most[self.name] = max(most[self.name], inside[self.name])
                await anyio.wait_all_tasks_blocked()
                inside[self.name] -= 1

    async with ScriptedEngine("Yes") as engine:

        async def one(name: str, limit: int, seed: int) -> None:
            played = await play_all(Limited(name, limit), engine, tasks=tasks(6), seed=seed)
            assert [t.outcome for t in played] == [Outcome.COMPLETED] * 6

        async with anyio.create_task_group() as group:
            group.start_soon(one, "first", 1, 0)
            group.start_soon(one, "second", 3, 1)
    assert most == {"first": 1, "second": 3}
