"""The watchdog names the code that blocks the event loop, and ignores other waits; so does the fixture no_leaks."""

from __future__ import annotations

import time
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from runner import BadOption
from runner.testing import LoopWatchdog, leaks
from tests.testing.inner import run

pytestmark = [pytest.mark.timing, pytest.mark.slow]

pytest_plugins = ["pytester"]

BLOCKS = """
import time

class Blocks(Calculator):
    {colour} def step(self, turn):
        time.sleep(0.6)

def test_it(loop_watchdog):
    assert play(Blocks, "42").reward == 1
"""


def test_a_hook_that_blocks_the_loop_is_named(pytester: pytest.Pytester) -> None:
    result = run(pytester, BLOCKS.format(colour="async"))
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(
        ["the event loop was blocked for * s or more in Blocks.step (*test_it.py:*): it blocks*"]
    )


def test_a_hook_in_a_thread_may_wait(pytester: pytest.Pytester) -> None:
    run(pytester, BLOCKS.format(colour="")).assert_outcomes(passed=1)


def test_block_shorter_than_the_set_limit_is_allowed(pytester: pytest.Pytester) -> None:
    test = BLOCKS.format(colour="async").replace("    assert play", "    loop_watchdog.seconds = 60\n    assert play")
    run(pytester, test).assert_outcomes(passed=1)


@pytest.mark.anyio
async def test_any_block_can_be_watched() -> None:
    watchdog = LoopWatchdog()
    async with watchdog:
        async with watchdog:  # a watchdog inside itself counts as one
            await anyio.lowlevel.checkpoint()
        time.sleep(2.0)  # noqa: ASYNC251  # the watchdog must find it
    with pytest.raises(
        AssertionError, match=r"in test_any_block_can_be_watched \(.*test_watchdog\.py:\d+\): it blocks"
    ):
        watchdog.check()


@pytest.mark.anyio
async def test_limit_of_zero_seconds_is_refused() -> None:
    with pytest.raises(BadOption, match=r"loop_watchdog\.seconds = 0: give a number"):
        async with LoopWatchdog(0):
            pass


def test_thread_left_by_a_test_fails_that_test_by_name(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the leak would not end in five seconds either
    monkeypatch.setattr(leaks, "no_leaks", partial(leaks.no_leaks, settle=0.5))
    test = """
import threading

release = threading.Event()

def test_leaves_a_thread(no_leaks):
    threading.Thread(target=release.wait, name="the hung one").start()

def test_leaves_nothing(no_leaks, scripted_engine):
    release.set()
    scripted_engine.say("42")
    play(Calculator, scripted_engine)

def test_fails_anyhow(no_leaks):
    open("left open", "w").close()
    raise ZeroDivisionError
"""
    result = run(pytester, test)
    result.assert_outcomes(passed=2, failed=1, errors=1)
    result.stdout.fnmatch_lines(["leaked: thread 'the hung one' (*"])
