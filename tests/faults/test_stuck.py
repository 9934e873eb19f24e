"""Nothing happens for ten minutes: the run ends, and its error names what each episode waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from runner import Environment, Limits, Outcome, Run, RunFile, RunStuck, ScriptedEngine, Task, Turn, reward, tool
from runner.engines.scripted.script import Answer, Fault, ModelCall, Reply, call
from runner.runs.watchdogs import RUN_STUCK_SECONDS
from tests.faults.clocks import ASYNCIO, TRIO, put_forward

pytestmark = pytest.mark.anyio

NO_LIMITS = Limits.defaults().lifted()


@pytest.fixture(params=[ASYNCIO, TRIO], ids=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


class Waiting(Environment):
    """Environment whose episodes wait for ever, each for something else, except for one."""

    def tasks(self) -> list[Task]:
        return [Task(id=name, prompt="hello") for name in ("step", "tool", "limiter", "engine", "nothing")]

    @tool
    async def ponder(self) -> None:
        """Never comes back."""
        await anyio.sleep_forever()

    async def step(self, turn: Turn) -> str | None:
        match self.task.id:
            case "step":
                await anyio.sleep_forever()
            case "limiter":
                async with self.episode.limiter("door", 1), self.episode.limiter("door", 1):
                    raise AssertionError("one cannot go through a door twice at once")
        return None

    @reward
    def passed(self) -> bool:
        return True


def speak(turn: ModelCall) -> Answer:
    match turn.episode:
        case "tool#0":
            return call("ponder")
        case "engine#0":
            return Reply("never", fault=Fault.stall(at=1))
        case _:
            return "hi"


def doing(run: Run) -> set[str]:
    return {attempt.activity for attempt in run.in_flight}


async def test_ten_minutes_without_an_event_end_the_run_and_name_waits(
    tmp_path: Path,
) -> None:
    file = tmp_path / "run.db"
    run = Run(Waiting(), ScriptedEngine(speak), file=file, limits=NO_LIMITS)
    errors: list[str] = []

    async def play() -> None:
        try:
            async with run:
                async for _ in run:
                    pass
        except RunStuck as stuck:
            errors.append(str(stuck))

    with anyio.fail_after(100 * RUN_STUCK_SECONDS):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(play)
            while run.summary.episodes < 1 or len(run.in_flight) < 4 or not all_wait(run):
                await checkpoint()
            put_forward(2)  # the run checks every second
            for _ in range(100):
                await checkpoint()
            put_forward(RUN_STUCK_SECONDS / 2)
            for _ in range(100):
                await checkpoint()
            assert not errors, "the run must not end after half of the time"
            put_forward(RUN_STUCK_SECONDS)
    (message,) = errors
    assert "nothing happened for 600 s; 4 episodes in flight" in message
    for line in (
        "step#0 has been waiting for step",
        "tool#0 has been waiting for ponder()",
        "limiter#0 has been waiting for limiter 'door'",
    ):
        assert line in message
    assert "engine#0 has been waiting for main: engine" in message
    with RunFile(file) as run_file:
        assert run_file.outcomes() == {Outcome.COMPLETED: 1, Outcome.CANCELLED: 4}
        assert not run_file.complete


def all_wait(run: Run) -> bool:
    return {"step", "ponder()", "limiter 'door'", "main: engine"} <= doing(run)


async def test_a_run_in_which_something_happens_is_never_stuck() -> None:
    class Slow(Waiting):
        def tasks(self) -> list[Task]:
            return [Task(id="slow", prompt="hello")]

        async def step(self, turn: Turn) -> str | None:
            if len(self.episode.turns) == 5:
                return None
            put_forward(RUN_STUCK_SECONDS - 1)
            await checkpoint()
            return "continue"

    with anyio.fail_after(100 * RUN_STUCK_SECONDS):
        async with Run(Slow(), ScriptedEngine(speak), limits=NO_LIMITS) as run:
            (trajectory,) = [trajectory async for trajectory in run]
    assert trajectory.outcome is Outcome.COMPLETED
