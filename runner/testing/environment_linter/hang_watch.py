"""A watch that finds the line where an author's code hangs, and ends the process if nothing else ends the code."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, Final, Self

import anyio

from runner.concurrency.thread_frames import author_frame, frames_by_thread
from runner.concurrency.threads import busy_threads
from runner.concurrency.user_code import is_foreign

__all__ = ["HangWatch", "busy_thread_places"]

REPORT_SECONDS: Final = 30.0
"""Time without progress after which the place of the hanging code is reported, and time until the next report."""

END_SECONDS: Final = 300.0
"""Time without progress after which the process ends if no episode is in flight, as in `lifespan()` or `tasks()`."""

PLAYING_SECONDS: Final = 60.0
"""Time without progress after which the process ends while episodes are in flight.

The time limits of episodes and hooks are shorter, so only code that does not end when it is cancelled takes this long.
"""

BLOCKED_SECONDS: Final = 30.0
"""Time for which the event loop may be blocked before the process ends."""

_POLL_SECONDS: Final = 0.25


class HangWatch:
    """A watch over a check of an environment, in a separate thread; used with `with`.

    It reports code that hangs, and ends the process after a limit.

    Args:
        report: a function that prints a message with the place where the code hangs.
        end: a function that prints the reason and ends the process.
    """

    def __init__(self, report: Callable[[str], None], end: Callable[[str], None]) -> None:
        self.progress: Callable[[], object] = _none
        """A function whose result changes with each progress of the check; may be set at any time."""
        self.is_playing: Callable[[], bool] = bool
        """A function that returns True while episodes are in flight; may be set at any time."""
        self.places: dict[str, str] = {}
        """The last recorded place in an author's code where a task waits, by the task's name."""
        self._since: dict[str, float] = {}
        self._report, self._end = report, end
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
        """Record at short intervals, until cancelled, that the event loop runs, and the places where its tasks wait."""
        self._loop_thread, last = threading.get_ident(), self.progress()
        try:
            while True:
                self._mark = time.monotonic()
                if (current := self.progress()) != last:
                    last, self._since = current, dict.fromkeys(self._since, self._mark)
                for task in asyncio.all_tasks():
                    if place := _place_of(task):
                        name = task.get_name()
                        if self.places.get(name) != place:
                            self.places[name], self._since[name] = place, self._mark
                await anyio.sleep(_POLL_SECONDS)
        finally:
            self._mark = None

    def waited(self, name: str) -> float:
        """Return the seconds for which a task has been at its last recorded place without progress; 0 if unknown."""
        since = self._since.get(name)
        return 0.0 if since is None or self._mark is None else self._mark - since

    def _look(self) -> None:
        last, since, reports = self.progress(), time.monotonic(), 1
        while not self._over.wait(_POLL_SECONDS):
            now, mark = time.monotonic(), self._mark
            if mark is not None and now - mark > BLOCKED_SECONDS:
                self._end(
                    f"the event loop has been blocked for {BLOCKED_SECONDS:g} s{self._place()}. The code can be "
                    "stopped only by ending this process. Use `await`, or move the code into a synchronous method, "
                    "which runs in a thread."
                )
                return
            if (current := self.progress()) != last:
                last, since, reports = current, now, 1
            elif now - since > (limit := PLAYING_SECONDS if self.is_playing() else END_SECONDS):
                self._end(
                    f"nothing has happened for {limit:g} s{self._place()}. The code must end, and must not swallow "
                    "cancellations."
                )
                return
            elif now - since > reports * REPORT_SECONDS:
                reports += 1
                self._report(f"nothing has happened for {now - since:.0f} s{self._place()}")

    def _place(self) -> str:
        with frames_by_thread() as frames:
            frame = author_frame(frames.get(self._loop_thread or 0))
            places = [_described(frame.f_code, frame.f_lineno)] if frame is not None else []
        places = places or busy_thread_places() or list(dict.fromkeys(self.places.values()))[-1:]
        return f", in {', '.join(places)}" if places else ""


def _none() -> None:
    return None


def busy_thread_places() -> list[str]:
    """Places in an author's code where worker threads of any run are busy."""
    with frames_by_thread() as frames:
        found = (author_frame(frames.get(thread.ident or 0)) for thread in busy_threads())
        return list(dict.fromkeys(_described(frame.f_code, frame.f_lineno) for frame in found if frame is not None))


def _place_of(task: asyncio.Task[Any]) -> str:
    """The innermost line of an author's code at which a task waits, or ""."""
    place = ""
    for code, line in _awaited(task.get_coro()):
        if not is_foreign(code.co_filename):
            place = _described(code, line)
    return place


def _awaited(waits: Any) -> Iterator[tuple[CodeType, int]]:
    """Yield the code and the current line of a suspended coroutine, then of what it awaits, and so on inwards."""
    while waits is not None:
        frame: FrameType | None = next(
            (getattr(waits, name) for name in ("cr_frame", "gi_frame", "ag_frame") if getattr(waits, name, None)), None
        )
        if frame is not None:
            yield frame.f_code, frame.f_lineno
        inner = [getattr(waits, name, None) for name in ("cr_await", "gi_yieldfrom", "ag_await")]
        if frame is None:  # the coroutine awaits the next item of an asynchronous generator, such as `lifespan()`
            inner += filter(inspect.isasyncgen, gc.get_referents(waits))
        waits = next((each for each in inner if each is not None), None)


def _described(code: CodeType, line: int) -> str:
    return f"{code.co_qualname} ({code.co_filename}:{line})"
