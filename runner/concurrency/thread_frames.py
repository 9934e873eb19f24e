"""Frames of other threads, and the innermost of them that is in an author's code."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from runner.concurrency.user_code import is_foreign

__all__ = ["author_frame", "frames_by_thread", "outwards"]

_one_at_a_time = threading.Lock()

_LOOPS = frozenset({"run", "run_forever", "run_until_complete", "unrolled_run"})
_LOOP_FILES = ("asyncio/runners.py", "asyncio/base_events.py", "trio/_core/_run.py")


@contextmanager
def frames_by_thread() -> Iterator[Mapping[int, FrameType]]:
    """Provide the innermost frame of each thread, by thread id. Read the frames only inside the block.

    The garbage collector is off inside the block. In Python 3.11, the call that reads a frame of a running thread may
    run the collector, and with it a finaliser that lets the other thread continue. If that thread then ends the frame,
    the process crashes or hangs (CPython issues 106883 and 111363).
    """
    with _one_at_a_time:
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield sys._current_frames()
        finally:
            if enabled:
                gc.enable()


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def author_frame(innermost: FrameType | None) -> FrameType | None:
    """Return the innermost frame of an author's code, or None.

    The search ends at the frames of the event loop, since the code that started the loop is not to blame.
    """
    for frame in outwards(innermost):
        name = frame.f_code.co_filename
        if frame.f_code.co_name in _LOOPS and name.endswith(_LOOP_FILES):
            return None
        if not is_foreign(name):
            return frame
    return None
