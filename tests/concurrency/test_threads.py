"""Worker threads: jobs whose caller no longer waits, and the threads that compute."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import threading
import time
from contextvars import ContextVar
from functools import partial
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest

from runner.concurrency.threads import Job, Workers, busy_threads

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends]

WATCHDOG_SECONDS = 600.0


def hang(began: threading.Event, release: threading.Event) -> None:
    began.set()
    release.wait(WATCHDOG_SECONDS)


def test_a_job_that_was_called_off_before_it_began_never_runs() -> None:
    called: list[int] = []
    job = Job(lambda: called.append(1), "late")
    job.call_off()
    job.run()
    assert (called, job.abandoned, job.done) == ([], False, False)


async def test_job_of_a_cancelled_caller_is_abandoned_and_frees_its_place() -> None:
    began, release = threading.Event(), threading.Event()
    workers = Workers(1)
    job = Job(partial(hang, began, release), "hanging")
    try:
        with anyio.fail_after(WATCHDOG_SECONDS):
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


async def test_earlier_processor_time_of_a_thread_does_not_count() -> None:
    began, release = threading.Event(), threading.Event()
    workers = Workers(1)

    def computes() -> int:
        return sum(range(1_000_000))

    waiting = Job(partial(hang, began, release), "waiting")
    with anyio.fail_after(WATCHDOG_SECONDS):
        await workers.call(Job(computes, "computing"))  # the next job gets the same thread, which is idle
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(workers.call, waiting)
            while not began.is_set():  # noqa: ASYNC110  # set by a thread
                await anyio.sleep(0.001)
            assert not waiting.computed()
            release.set()


async def test_exit_is_passed_as_a_value_and_raised_at_the_wait() -> None:
    def exits() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit, match="3"):
        await Workers(1).call(Job(exits, "exiting"))


variable: ContextVar[str] = ContextVar("variable", default="unset")


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_thread_calls_its_loop_with_the_variables_of_its_task(anyio_backend: str) -> None:
    async def on_the_loop(word: str) -> tuple[str, str, int]:
        await anyio.lowlevel.checkpoint()
        return word, variable.get(), threading.get_ident()

    def in_the_thread() -> tuple[Any, int]:
        anyio.from_thread.check_cancelled()
        loop = anyio.from_thread.run_sync(threading.get_ident)
        return anyio.from_thread.run(on_the_loop, "asked"), loop

    def another_loop() -> str:
        return anyio.run(partial(anyio.sleep, 0)) or "run"

    variable.set("of the task")
    workers = Workers(2)
    here = threading.get_ident()
    assert await workers.call(Job(in_the_thread, "back")) == (("asked", "of the task", here), here)
    assert await workers.call(Job(another_loop, "another loop")) == "run"
    workers.close()


async def test_code_in_a_thread_is_cancelled_with_its_caller() -> None:
    began, cancelled = threading.Event(), threading.Event()

    def asks() -> None:
        began.set()
        try:
            while True:
                anyio.from_thread.check_cancelled()
        except BaseException:
            cancelled.set()
            raise

    workers = Workers(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(workers.call, Job(asks, "asking"))
        while not began.is_set():  # noqa: ASYNC110  # set by a thread
            await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    assert cancelled.wait(WATCHDOG_SECONDS)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_threads_end_with_their_workers_and_abandoned_ones_later(anyio_backend: str) -> None:
    began, release = threading.Event(), threading.Event()
    workers = Workers(2)
    before = set(threading.enumerate())
    await workers.call(Job(int, "quick"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(workers.call, Job(partial(hang, began, release), "hanging"))
        tasks.start_soon(workers.call, Job(int, "beside"))
        while not began.is_set():  # noqa: ASYNC110  # set by a thread
            await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    made = set(threading.enumerate()) - before
    with anyio.fail_after(WATCHDOG_SECONDS):  # the thread that was not abandoned is free once it has the lock
        while len(made.intersection(busy_threads())) != 1:  # noqa: ASYNC110  # set by a thread
            await anyio.sleep(0.001)
    assert all(thread.daemon for thread in made)
    workers.close()
    release.set()
    with anyio.fail_after(WATCHDOG_SECONDS):
        while any(thread.is_alive() for thread in made):  # noqa: ASYNC110  # threads set no event
            await anyio.sleep(0.001)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("closed", ["before the job ends", "before its end is reported"])
async def test_working_threads_end_while_the_event_loop_is_blocked(anyio_backend: str, closed: str) -> None:
    began, release = threading.Event(), threading.Event()
    workers = Workers(1)
    before = set(threading.enumerate())
    job = Job(partial(hang, began, release), "working")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(workers.call, job)
        while not began.is_set():  # noqa: ASYNC110  # set by a thread
            await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    made = set(threading.enumerate()) - before
    # From here on nothing awaits, so no report of the thread is received.
    if closed == "before the job ends":
        workers.close()
    release.set()
    while not job.done:
        time.sleep(0.001)  # noqa: ASYNC251  # blocks the event loop on purpose
    workers.close()
    for thread in made:
        thread.join(WATCHDOG_SECONDS)
    assert len(made) == 1
    assert not any(thread.is_alive() for thread in made)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_thread_of_closed_workers_ends_after_its_call(anyio_backend: str) -> None:
    workers = Workers(1)
    workers.close()
    before = set(threading.enumerate())
    await workers.call(Job(int, "late"))
    made = set(threading.enumerate()) - before
    assert await workers.call(Job(lambda: "again", "later")) == "again"
    for thread in made:
        thread.join(WATCHDOG_SECONDS)
    assert not any(thread.is_alive() for thread in made)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_process_bound_to_its_thread_lives_until_the_close(anyio_backend: str) -> None:
    workers = Workers(1)
    process = await workers.call(Job(start_bound_to_this_thread, "setup"))
    with process:
        await anyio.sleep(0.3)
        assert process.poll() is None
        assert await workers.call(Job(process.poll, "a tool")) is None
        workers.close()
        assert await anyio.to_thread.run_sync(process.wait, WATCHDOG_SECONDS) == -signal.SIGKILL


def start_bound_to_this_thread() -> subprocess.Popen[bytes]:
    """Start a process as `bwrap --die-with-parent` does: it ends with the thread that started it."""
    set_death_signal = 1
    prctl = ctypes.CDLL(None).prctl
    code = "import time; time.sleep(600)"
    return subprocess.Popen([sys.executable, "-c", code], preexec_fn=lambda: prctl(set_death_signal, signal.SIGKILL))
