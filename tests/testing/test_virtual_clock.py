"""Virtual time: it is paused while anything runs, jumps when everything waits, and can be moved forward."""

from __future__ import annotations

import threading
import time

import anyio
import pytest
from anyio import from_thread, to_thread

from runner import BadOption, Conversation, Environment, Limits, Task, reward, tool
from runner.testing import VirtualClock, call, play
from runner.testing import virtual_clock as clocks
from tests.testing.inner import run

pytest_plugins = ["pytester"]

WATCHDOG_SECONDS = 600.0
LONG_SECONDS = 590.0  # after 600 s without an event, a run ends as stuck


class Waits(Environment):
    def __init__(self, seconds: float = LONG_SECONDS) -> None:
        self.seconds = seconds

    def tasks(self) -> list[Task]:
        return [Task(id="t", prompt="?")]

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()
        await anyio.sleep(self.seconds)

    @reward
    def waited(self) -> bool:
        return True


def test_minutes_pass_at_once_and_exactly(virtual_clock: VirtualClock) -> None:
    trajectory = play(Waits, "go", clock=virtual_clock, limits=Limits(seconds=2 * LONG_SECONDS))
    assert trajectory.outcome == "completed"
    assert trajectory.seconds == pytest.approx(LONG_SECONDS, abs=0.1)


def test_limits_fire_to_the_second(virtual_clock: VirtualClock) -> None:
    trajectory = play(Waits, "go", clock=virtual_clock, limits=Limits(seconds=500))
    assert (trajectory.outcome, trajectory.limit) == ("time_limit", "seconds")
    assert trajectory.seconds == pytest.approx(500, abs=0.1)


def test_virtual_time_does_not_advance_while_a_thread_works(virtual_clock: VirtualClock) -> None:
    done = threading.Event()

    async def waits_for_a_thread() -> float:
        with anyio.move_on_after(LONG_SECONDS):
            await to_thread.run_sync(done.wait, 0.1)
        return anyio.current_time()

    assert virtual_clock.run(waits_for_a_thread) == 0


def test_a_thread_that_hangs_does_not_stop_time(virtual_clock: VirtualClock) -> None:
    release = threading.Event()

    class Hangs(Waits):
        async def rollout(self, conversation: Conversation) -> None:
            await Environment.rollout(self, conversation)

        @tool
        def hang(self) -> None:
            """Hang."""
            release.wait()

    try:
        trajectory = play(Hangs, [call("hang")], clock=virtual_clock, limits=Limits(tool_seconds=30))
    finally:
        release.set()
    assert (trajectory.outcome, trajectory.limit) == ("env_error", "tool_seconds")


def test_thread_waiting_for_the_loop_is_not_busy(virtual_clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "_BUSY_SECONDS", WATCHDOG_SECONDS)  # the real time that a busy thread would get

    def asks() -> None:
        for _ in range(3):
            from_thread.run(anyio.sleep, 100)
            time.sleep(0.05)

    async def waits() -> tuple[float, bool]:
        with anyio.move_on_after(301) as limit:
            await to_thread.run_sync(asks)
        return anyio.current_time(), limit.cancelled_caught

    assert virtual_clock.run(waits) == (300, False)


def test_thread_has_full_second_after_a_loop_call(virtual_clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "_BUSY_SECONDS", 0.5)
    other = threading.Event()

    async def waits() -> tuple[float, bool]:
        def asks() -> None:
            from_thread.run(sleep_long)
            time.sleep(0.1)
            other.set()

        async with anyio.create_task_group() as group:
            group.start_soon(hang)
            with anyio.move_on_after(101) as limit:
                await to_thread.run_sync(asks)
            other.set()
        return anyio.current_time(), limit.cancelled_caught

    async def hang() -> None:
        await to_thread.run_sync(other.wait)

    async def sleep_long() -> None:
        for _ in range(100):
            await anyio.sleep(1)

    assert virtual_clock.run(waits) == (100, False)


def test_thread_is_busy_while_its_task_on_the_loop_runs(
    virtual_clock: VirtualClock,
) -> None:
    async def waits() -> tuple[float, bool]:
        async with anyio.create_task_group() as group:

            def starts() -> None:
                from_thread.run_sync(group.start_soon, anyio.sleep, LONG_SECONDS)
                time.sleep(0.1)

            with anyio.move_on_after(50) as limit:
                await to_thread.run_sync(starts)
            now = anyio.current_time()
            group.cancel_scope.cancel()
        return now, limit.cancelled_caught

    assert virtual_clock.run(waits) == (0, False)


def test_without_autojump_time_passes_by_hand() -> None:
    clock = VirtualClock(autojump=False)

    async def waits() -> float:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep, LONG_SECONDS)
            await anyio.wait_all_tasks_blocked()
            clock.jump(LONG_SECONDS)
        return anyio.current_time()

    assert clock.run(waits) == clock.now == LONG_SECONDS


def test_virtual_clock_can_be_advanced_from_another_thread() -> None:
    clock = VirtualClock(autojump=False)

    async def waits() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(to_thread.run_sync, clock.jump, LONG_SECONDS)
            await anyio.sleep(LONG_SECONDS)

    before = time.monotonic()
    clock.run(waits)
    assert clock.now == LONG_SECONDS
    assert time.monotonic() - before < 60


def test_time_does_not_run_backwards() -> None:
    with pytest.raises(BadOption, match=r"jump\(-1\): give a number of seconds"):
        VirtualClock().jump(-1)


@pytest.fixture(params=["asyncio", "trio"])
def backends(request: pytest.FixtureRequest) -> tuple[VirtualClock, object]:
    clock = VirtualClock()
    return clock, getattr(clock, f"{request.param}_backend")


def test_async_tests_run_by_a_virtual_clock_on_either_loop(
    backends: tuple[VirtualClock, tuple[str, dict[str, object]]],
) -> None:
    clock, (backend, options) = backends

    async def waits() -> float:
        began = anyio.current_time()
        await anyio.sleep(LONG_SECONDS)
        clock.jump(1)
        return anyio.current_time() - began

    assert anyio.run(waits, backend=backend, backend_options=options) == LONG_SECONDS + 1
    assert clock.now == LONG_SECONDS + 1


def test_the_fixture_serves_as_the_loop_of_async_tests(pytester: pytest.Pytester) -> None:
    test = """
import anyio

@pytest.fixture(params=["asyncio_backend", "trio_backend"])
def anyio_backend(request, virtual_clock):
    return getattr(virtual_clock, request.param)

@pytest.mark.anyio
async def test_it(virtual_clock):
    await anyio.sleep(5000)
    assert virtual_clock.now == 5000
"""
    run(pytester, test).assert_outcomes(passed=2)
