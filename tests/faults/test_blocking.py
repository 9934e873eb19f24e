"""Synchronous code that waits delays no episode. Code that computes or blocks the loop is named, with advice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import anyio
import pytest

from runner import Concurrency, Environment, Outcome, Run, ScriptedEngine, Task, Trajectory, Turn, reward, tool
from runner.concurrency.loop_lag import Blocker
from runner.engines.scripted.script import Answer, Latency, ModelCall, call

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends, pytest.mark.timing, pytest.mark.slow]

SLEEPER_COUNT = 50
SIBLING_COUNT = 14
WATCHDOG_SECONDS = 600.0


class Bedroom:
    """The number of sleepers, and the event that wakes them."""

    def __init__(self) -> None:
        self.asleep = threading.Semaphore(0)
        self.morning = threading.Event()


class Sleepers(Environment):
    """Environment of fifty episodes whose synchronous tool waits, and fourteen episodes without tools."""

    def __init__(self, bedroom: Bedroom) -> None:
        self.bedroom = bedroom

    def tasks(self) -> list[Task]:
        sleepers = [Task(id=f"sleeper {number}", prompt="sleep") for number in range(SLEEPER_COUNT)]
        return sleepers + [Task(id=f"sibling {number}", prompt="talk") for number in range(SIBLING_COUNT)]

    @tool
    def sleep(self) -> str:
        """Wait for the morning."""
        self.bedroom.asleep.release()
        assert self.bedroom.morning.wait(WATCHDOG_SECONDS)
        return "good morning"

    @reward
    def done(self) -> bool:
        return True


def sleep_or_talk(turn: ModelCall) -> Answer:
    if turn.episode.startswith("sleeper") and turn.turn == 0:
        return call("sleep")
    return "la " * 300


async def test_50_blocking_synchronous_tools_delay_no_other_episodes_tokens() -> None:
    bedroom = Bedroom()
    played: list[Trajectory] = []
    # A delta every millisecond: the siblings sample for a third of a second.
    engine = ScriptedEngine(sleep_or_talk, tick=0.001, latency=Latency(between=1), chunks=1)
    with anyio.fail_after(WATCHDOG_SECONDS):
        async with Run(
            Sleepers(bedroom), engine, concurrency=Concurrency(episodes=SLEEPER_COUNT + SIBLING_COUNT)
        ) as run:
            async for trajectory in run:
                played.append(trajectory)
                if len(played) == SIBLING_COUNT:
                    assert all(bedroom.asleep.acquire(blocking=False) for _ in range(SLEEPER_COUNT)), (
                        "all 50 sleep by now"
                    )
                    assert not any("Sleepers" in blocker.where for blocker in run.lag.blockers()), (
                        "code that only waits is not a blocker"
                    )
                    bedroom.morning.set()
    assert all(trajectory.task.id.startswith("sibling") for trajectory in played[:SIBLING_COUNT])
    assert {trajectory.outcome for trajectory in played} == {Outcome.COMPLETED}


# --- named code


class Computing(Environment):
    """Environment whose tool computes in its threads until it is named as a blocker."""

    def __init__(self, named: threading.Event) -> None:
        self.named = named

    def tasks(self) -> list[Task]:
        return [Task(id=str(number), prompt="compute") for number in range(16)]

    @tool
    def compute(self) -> int:
        """Count."""
        number = 0
        while not self.named.is_set():
            number += 1
        return 0

    @reward
    def done(self) -> bool:
        return True


class BlockingTheLoop(Computing):
    """Environment whose step sleeps on the event loop until it is named as a blocker."""

    async def step(self, turn: Turn) -> None:
        if not self.named.is_set():
            time.sleep(0.3)  # noqa: ASYNC251  # the mistake that is tested


async def blockers_until_named(
    make: Callable[[threading.Event], Environment], name: str, engine: ScriptedEngine
) -> list[Blocker]:
    """Wait until a blocker has this name, and return all named blockers."""
    named = threading.Event()
    run = Run(make(named), engine)

    async def play() -> None:
        async with run:
            async for _ in run:
                pass

    try:
        with anyio.fail_after(WATCHDOG_SECONDS):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(play)
                # a thread sets it
                while not any(name in blocker.where for blocker in run.lag.blockers()):  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                named.set()
    finally:
        named.set()
    return [blocker for blocker in run.lag.blockers() if name in blocker.where]


async def test_sync_tool_that_computes_is_named_by_the_lag_report() -> None:
    engine = ScriptedEngine([call("compute"), "done"])
    (blocker, *_) = await blockers_until_named(Computing, "Computing.compute", engine)
    assert blocker.thread
    assert __file__ in blocker.where
    assert "anyio.to_process" in blocker.advice


async def test_async_hook_that_blocks_the_loop_is_named_with_the_fix() -> None:
    (blocker, *_) = await blockers_until_named(BlockingTheLoop, "BlockingTheLoop.step", ScriptedEngine("hi"))
    assert not blocker.thread
    assert "make the method synchronous" in blocker.advice
