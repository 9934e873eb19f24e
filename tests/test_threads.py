"""Worker threads: jobs that nobody waits for any more, and who of them computes."""

from __future__ import annotations

import threading
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from runner.threads import Job, Workers

pytestmark = pytest.mark.anyio

WATCHDOG = 30.0


def hang(began: threading.Event, release: threading.Event) -> None:
    began.set()
    release.wait(WATCHDOG)


def test_a_job_that_was_called_off_before_it_began_never_runs() -> None:
    called: list[int] = []
    job = Job(lambda: called.append(1), "late")
    job.call_off()
    job.run()
    assert (called, job.abandoned, job.done) == ([], False, False)


async def test_a_job_whose_caller_was_cancelled_is_left_behind_and_its_place_is_free() -> None:
    began, release = threading.Event(), threading.Event()
    workers = Workers(1)
    job = Job(partial(hang, began, release), "hanging")
    try:
        with anyio.fail_after(WATCHDOG):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(workers.call, job)
                while not began.is_set():  # noqa: ASYNC110  # set by a thread
                    await anyio.sleep(0.001)
                tasks.cancel_scope.cancel()
            assert job.abandoned
            assert workers.abandoned == ["hanging"]
            assert await workers.call(Job(lambda: "next", "next")) == "next"
        assert not workers.running
    finally:
        release.set()


async def test_what_a_thread_computed_for_others_before_is_not_held_against_a_job_that_waits() -> None:
    began, release = threading.Event(), threading.Event()
    workers = Workers(1)

    def computes() -> int:
        return sum(range(1_000_000))

    waiting = Job(partial(hang, began, release), "waiting")
    with anyio.fail_after(WATCHDOG):
        await workers.call(Job(computes, "computing"))  # the next job gets the same thread, which is idle
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(workers.call, waiting)
            while not began.is_set():  # noqa: ASYNC110  # set by a thread
                await anyio.sleep(0.001)
            assert not waiting.computed()
            release.set()


async def test_an_exit_travels_as_a_value_and_is_raised_where_it_is_waited_for() -> None:
    def exits() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit, match="3"):
        await Workers(1).call(Job(exits, "exiting"))
