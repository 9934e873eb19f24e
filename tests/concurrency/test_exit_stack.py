"""The exit stack of an episode: place and order in which the contexts of `setup()` end, and contexts that hang."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest
import trio.testing

from runner import Concurrency, Environment, Outcome, Run, Trajectory
from tests.playing import Plain, recording, tasks

pytestmark = pytest.mark.anyio

WATCHDOG_SECONDS = 600.0


@pytest.fixture
def anyio_backend(clock: trio.testing.MockClock) -> tuple[str, dict[str, object]]:
    return "trio", {"clock": clock}


class Opens(Plain):
    """Environment that records the contexts that end, and their threads."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    @contextmanager
    def thing(self, name: str, *, swallow: bool = False, raises: str = "") -> Iterator[str]:
        try:
            yield name
        except ValueError as error:
            self.note(f"{name} saw {error}")
            if not swallow:
                raise
        else:
            self.note(name)
        if raises:
            raise ValueError(raises)

    @asynccontextmanager
    async def service(self, name: str) -> AsyncIterator[None]:
        yield
        await anyio.lowlevel.checkpoint()
        self.note(name)

    def note(self, what: str) -> None:
        self.seen.append((what, "loop" if threading.current_thread() is threading.main_thread() else "thread"))


async def finished(environment: Environment[Any], **options: Any) -> tuple[list[Trajectory], list[str]]:
    """Return the outcome of a run, and its faults."""
    async with Run(environment, recording("Yes"), **options) as run:
        return [trajectory async for trajectory in run], list(run.summary.faults)


async def test_contexts_of_a_sync_setup_are_exited_in_a_thread_in_order() -> None:
    class Synchronous(Opens):
        def setup(self) -> None:
            stack = self.episode.exit_stack
            stack.callback(self.note, "called back")
            assert stack.enter_context(self.thing("first")) == "first"
            anyio.from_thread.run(stack.enter_async_context, self.service("service"))
            stack.push(lambda *_: self.note("pushed"))
            stack.enter_context(self.thing("last"))

    seen: list[Any] = []
    (trajectory,), faults = await finished(Synchronous(seen))
    assert (trajectory.outcome, faults) == (Outcome.COMPLETED, [])
    assert seen == [
        ("last", "thread"), ("pushed", "thread"), ("service", "loop"), ("first", "thread"), ("called back", "thread"),
    ]  # fmt: skip


async def test_contexts_of_an_async_setup_are_exited_on_the_loop() -> None:
    class Asynchronous(Opens):
        async def setup(self) -> None:
            stack = self.episode.exit_stack
            stack.enter_context(anyio.CancelScope())  # a scope belongs to its task
            stack.enter_context(self.thing("on the loop"))
            await anyio.to_thread.run_sync(stack.enter_context, self.thing("in a thread"))

    seen: list[Any] = []
    (trajectory,), faults = await finished(Asynchronous(seen))
    assert (trajectory.outcome, faults) == (Outcome.COMPLETED, [])
    assert seen == [("in a thread", "thread"), ("on the loop", "loop")]


@pytest.mark.parametrize("swallow", [True, False])
async def test_an_error_goes_through_the_things_as_in_with_statements(swallow: bool) -> None:
    class Fails(Opens):
        def setup(self) -> None:
            stack = self.episode.exit_stack
            stack.enter_context(self.thing("outer"))
            stack.enter_context(self.thing("middle", swallow=swallow))
            stack.enter_context(self.thing("inner", raises="bang"))

    seen: list[Any] = []
    (trajectory,), faults = await finished(Fails(seen))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 1.0)
    assert [what for what, _ in seen] == ["inner", "middle saw bang", "outer" if swallow else "outer saw bang"]
    assert len(faults) == (not swallow)
    assert all("exit_stack: ValueError: bang (in thing" in fault for fault in faults)


async def test_things_taken_over_by_another_stack_are_left_in_a_thread_too() -> None:
    class TakesOver(Opens):
        def setup(self) -> None:
            self.episode.exit_stack.enter_context(self.thing("taken over"))
            self.taken = self.episode.exit_stack.pop_all()

        async def close(self) -> None:
            await self.taken.aclose()

    seen: list[Any] = []
    _, faults = await finished(TakesOver(seen))
    assert (seen, faults) == ([("taken over", "thread")], [])


class Hangs(Opens):
    """Environment with an episode whose contexts never end."""

    def __init__(self, seen: list[Any], clock: trio.testing.MockClock, release: threading.Event) -> None:
        super().__init__(seen)
        self.clock = clock
        self.release = release

    def setup(self) -> None:
        stack = self.episode.exit_stack
        stack.callback(self.note, f"{self.task.id} is left")
        if self.task.id == "t1":
            stack.callback(self.hang)

    def hang(self) -> None:
        anyio.from_thread.run_sync(self.clock.jump, 31)
        self.release.wait()


async def test_hanging_exit_is_named_and_abandoned_and_others_run(
    clock: trio.testing.MockClock, release: threading.Event
) -> None:
    seen: list[Any] = []
    played, faults = await finished(Hangs(seen, clock, release), tasks=tasks(3), concurrency=Concurrency(episodes=1))
    assert [(t.outcome, t.reward) for t in played] == [(Outcome.COMPLETED, 1.0)] * 3
    assert faults == ["t1#0: exit_stack: Hangs.hang() took longer than 30 s; its thread still runs"]
    assert [what for what, _ in seen] == ["t0 is left", "t1 is left", "t2 is left"]


async def test_cut_episode_is_kept_as_cut_though_its_exit_hangs(
    clock: trio.testing.MockClock, release: threading.Event
) -> None:
    class Cut(Hangs):
        async def step(self, turn: object) -> None:
            run.cancel()
            await anyio.sleep_forever()

    async with Run(Cut([], clock, release), recording("Yes"), tasks=tasks(2)[1:]) as run:
        (trajectory,) = [t async for t in run]
    assert trajectory.outcome is Outcome.CANCELLED
    assert [fault.partition(" took ")[0] for fault in run.summary.faults] == ["t1#0: exit_stack: Hangs.hang()"]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_exit_that_blocks_the_loop_is_named_with_its_episode(anyio_backend: str) -> None:
    class Blocks(Plain):
        async def setup(self) -> None:
            self.episode.exit_stack.callback(time.sleep, 0.4)

    async with Run(Blocks, recording("Yes")) as run:
        assert [t.outcome async for t in run] == [Outcome.COMPLETED]
        (blocker,) = run.lag.blockers()
    assert "the exit_stack of episode t0#0 of Blocks" in blocker.where
    assert "enter it in a synchronous setup()" in blocker.advice


@pytest.mark.slow
def test_a_database_whose_query_never_ends_costs_its_own_episode_only() -> None:
    script = """
    import sqlite3
    from contextlib import closing
    from runner import Environment, Limits, ScriptedEngine, Task, reward, run, tool
    from runner.testing import call

    class Database(Environment):
        limits = Limits(tool_seconds=0.3, close_seconds=0.3)

        def tasks(self):
            return [Task(id=str(n), prompt="Ask.") for n in range(3)]

        def setup(self):
            connection = sqlite3.connect(":memory:", check_same_thread=False)
            self.database = self.episode.exit_stack.enter_context(closing(connection))

        @tool
        def query(self, sql: str) -> str:
            "Ask the database."
            return str(self.database.execute(sql).fetchall())

        @reward
        def asked(self) -> bool:
            return True

    ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"

    def speak(turn):
        if turn.turn:
            return "Done"
        return call("query", sql=ENDLESS if turn.episode == "1#0" else "SELECT 1")

    summary = run(Database, ScriptedEngine(speak), quiet=True)
    print(sorted((outcome.value, count) for outcome, count in summary.outcomes.items()))
    print(*summary.faults)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes, faults = done.stdout.splitlines()
    assert outcomes == "[('completed', 2), ('env_error', 1)]"
    assert faults == "1#0: exit_stack: closing.__exit__() took longer than 0.3 s; its thread still runs"
