"""Frames of other threads are read without a crash of the process."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from runner.concurrency.thread_frames import author_frame, frames_by_thread, outwards

WATCHDOG_SECONDS = 120.0

READS_FRAMES = """
import gc, threading
from runner.concurrency.thread_frames import frames_by_thread, outwards

def locked():
    lock = threading.Lock()
    lock.acquire()
    return lock

is_inside, may_return, has_returned, may_end = locked(), locked(), locked(), locked()

def inner():
    is_inside.release()
    may_return.acquire()

def middle():
    inner()

def reuse_memory(depth):
    if depth:
        reuse_memory(depth - 1)
    else:
        has_returned.release()
        may_end.acquire()

def play():
    middle()
    reuse_memory(5)

class Finalized:
    def __init__(self):
        self.cycle = self

    def __del__(self):
        may_return.release()
        has_returned.acquire()

thread = threading.Thread(target=play, daemon=True)
thread.start()
is_inside.acquire()
gc.collect()
with frames_by_thread() as frames:
    frame = frames[thread.ident]
    Finalized()
    gc.set_threshold(1)
    caller = frame.f_back  # allocates memory, at which the collector would run the finalizer
    print(*(each.f_code.co_name for each in outwards(caller)), flush=True)
"""
"""A script that reads the caller of a frame. A finalizer would let the thread end this frame and reuse its memory."""


def test_no_finalizer_runs_while_frames_are_read() -> None:
    done = subprocess.run(
        [sys.executable, "-c", READS_FRAMES], capture_output=True, text=True, timeout=WATCHDOG_SECONDS, check=False
    )
    assert (done.returncode, done.stdout) == (0, "middle play run _bootstrap_inner _bootstrap\n"), done.stderr


@pytest.mark.parametrize(("set_before", "enabled"), [(gc.enable, True), (gc.disable, False)])
def test_collector_is_off_only_while_frames_are_read(set_before: Callable[[], None], enabled: bool) -> None:
    was_enabled = gc.isenabled()
    set_before()
    try:
        with frames_by_thread() as frames:
            assert not gc.isenabled()
            assert frames[threading.get_ident()].f_code.co_name == "frames_by_thread"
        assert gc.isenabled() is enabled
        with pytest.raises(ZeroDivisionError), frames_by_thread():
            raise ZeroDivisionError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_frame_of_the_author_is_found_below_those_of_a_library() -> None:
    inside, over = threading.Event(), threading.Event()

    def wait_in_a_library() -> None:
        inside.set()
        over.wait(WATCHDOG_SECONDS)

    thread = threading.Thread(target=wait_in_a_library)
    thread.start()
    inside.wait(WATCHDOG_SECONDS)
    try:
        with frames_by_thread() as frames:
            frame = frames[thread.ident or 0]
            names = [each.f_code.co_name for each in outwards(frame)]
            own = author_frame(frame)
            assert own is not None
            name = own.f_code.co_name
    finally:
        over.set()
        thread.join()
    assert name == "wait_in_a_library"
    assert names[-1] == "_bootstrap"
