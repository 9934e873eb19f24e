"""For `deltarunner check`: where an author's code hangs, and the end of a process that nothing else can end."""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, Final, Self

import anyio

from runner.concurrency.loop_lag import author_frame
from runner.concurrency.threads import busy_threads
from runner.concurrency.user_code import is_foreign

__all__ = ["HangWatch", "where_threads_are"]

TELL_SECONDS: Final = 30.0
"""Seconds without any progress after which it is said where it hangs, and again each time as many have passed."""

END_SECONDS: Final = 300.0
"""Seconds without any progress after which the process is ended; what `lifespan()` and `tasks()` may take."""

PLAYED_SECONDS: Final = 60.0
"""The same while episodes are played, whose own limits are shorter: only who swallows a cancellation goes on."""

BLOCKED_SECONDS: Final = 30.0
"""Seconds for which the event loop stands still before the process is ended: nothing else can end that."""

_LOOK: Final = 0.25


class HangWatch:
    """Watches a check from a thread of its own while it is entered.

    Args:
        tell: says to people where it hangs.
        end: ends the process, with what is wrong.
    """

    def __init__(self, tell: Callable[[str], None], end: Callable[[str], None]) -> None:
        self.progress: Callable[[], object] = _none
        """Gives another value once something has happened; may be set at any time."""
        self.plays: Callable[[], bool] = bool
        """Whether episodes are played now; may be set at any time."""
        self.places: dict[str, str] = {}
        """Where each task on the event loop was last seen to wait in an author's code, by the task's name."""
        self._tell, self._end = tell, end
        self._mark: float | None = None
        self._loop_thread = threading.main_thread().ident
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._look, name="deltarunner check", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    async def mark(self) -> None:
        """Show that the event loop runs, until this is cancelled."""
        self._loop_thread = threading.get_ident()
        try:
            while True:
                self._mark = time.monotonic()
                for task in asyncio.all_tasks():
                    if place := _place_of(task):
                        self.places[task.get_name()] = place
                await anyio.sleep(_LOOK)
        finally:
            self._mark = None

    def _look(self) -> None:
        last, since, told = self.progress(), time.monotonic(), 1
        while not self._over.wait(_LOOK):
            now, mark = time.monotonic(), self._mark
            if mark is not None and now - mark > BLOCKED_SECONDS:
                self._end(
                    f"the event loop has stood still for {BLOCKED_SECONDS:g} s{self._at_work()}: nothing can end that "
                    "but the end of this process. Await what it waits for, or put it into a synchronous method, which "
                    "gets a thread."
                )
                return
            if (current := self.progress()) != last:
                last, since, told = current, now, 1
            elif now - since > (limit := PLAYED_SECONDS if self.plays() else END_SECONDS):
                self._end(
                    f"nothing has happened for {limit:g} s{self._at_work()}. It has to come to an end, and to let "
                    "cancellations through."
                )
                return
            elif now - since > told * TELL_SECONDS:
                told += 1
                self._tell(f"nothing has happened for {now - since:.0f} s{self._at_work()}")

    def _at_work(self) -> str:
        frame = author_frame(sys._current_frames().get(self._loop_thread or 0))
        places = [_described(frame.f_code, frame.f_lineno)] if frame is not None else []
        places = places or where_threads_are() or list(dict.fromkeys(self.places.values()))[-1:]
        return f", in {', '.join(places)}" if places else ""


def _none() -> None:
    return None


def where_threads_are() -> list[str]:
    """Where the code of the author's is that worker threads of any run are at work with."""
    frames = sys._current_frames()
    found = (author_frame(frames.get(thread.ident or 0)) for thread in busy_threads())
    return list(dict.fromkeys(_described(frame.f_code, frame.f_lineno) for frame in found if frame is not None))


def _place_of(task: asyncio.Task[Any]) -> str:
    """The innermost line of an author's at which a task waits; "" where there is none."""
    place = ""
    for code, line in _awaited(task.get_coro()):
        if not is_foreign(code.co_filename):
            place = _described(code, line)
    return place


def _awaited(waits: Any) -> Iterator[tuple[CodeType, int]]:
    """The coroutines and generators from the outermost to the innermost, each with the line at which it waits."""
    while waits is not None:
        frame: FrameType | None = next(
            (getattr(waits, name) for name in ("cr_frame", "gi_frame", "ag_frame") if getattr(waits, name, None)), None
        )
        if frame is not None:
            yield frame.f_code, frame.f_lineno
        inner = [getattr(waits, name, None) for name in ("cr_await", "gi_yieldfrom", "ag_await")]
        if frame is None:  # what awaits the next item of an asynchronous generator, such as `lifespan()`
            inner += filter(inspect.isasyncgen, gc.get_referents(waits))
        waits = next((each for each in inner if each is not None), None)


def _described(code: CodeType, line: int) -> str:
    return f"{code.co_qualname} ({code.co_filename}:{line})"
