"""Finds what a block of code left behind: threads, processes, tasks, open files and requests, by name."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import threading
import time
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
import anyio.lowlevel

from runner.engines.base import Engine
from runner.errors import BadOption

__all__ = ["UNCLOSED", "UNFINISHED_TASKS", "Leaked", "no_leaks", "recording_unfinished_tasks"]

# Pytest shows the line of the test, where the fix belongs.
__tracebackhide__ = True

T = TypeVar("T")

_PASS_COUNT: Final = 5
"""Passes of the event loop that a task gets which was cancelled and not awaited."""

# Idle threads that anyio and trio keep for the next call; they carry these names only while they have no work.
_IDLE_THREAD: Final = re.compile(r"Trio thread \d+")

# Processes that Python's multiprocessing and anyio start once and keep.
_KEPT_PROCESS: Final = re.compile(r"\bmultiprocessing\.(resource_tracker|forkserver)\b|-m anyio\.to_process\b")

UNCLOSED: Final = "closed by the garbage collector alone: "
"""How a leak begins that is gone by now, but only since nobody held it any more."""

UNFINISHED_TASKS: Final[deque[str]] = deque(maxlen=64)
"""Tasks that the event loops of what the test that runs now has played ended with, and cut; for `no_leaks`."""


class Leaked(AssertionError):
    """Something outlived its block; the message lists what."""

    def __init__(self, leaks: Sequence[str]) -> None:
        self.leaks = tuple(leaks)
        """What was left behind, each by name."""
        super().__init__("left behind: " + "; ".join(leaks))


@contextmanager
def no_leaks(*engines: Engine, settle: float = 5.0) -> Iterator[None]:
    """Fail if the block leaves a thread, a process, a task, an open file or an open request behind.

    What is closed only because the garbage collector came by counts as left open. Works inside and outside an event
    loop. An exception that leaves the block passes, with a note of what leaked.

    Args:
        engines: the engines whose open and waiting requests and live sessions are counted.
        settle: seconds that threads and processes which are about to end get to do so.

    Raises:
        BadOption: what is given is no engine.
        Leaked: lists what was left behind, each by name.
    """
    for engine in engines:
        if not isinstance(engine, Engine):
            raise BadOption(f"no_leaks({engine!r:.60}): give engines, whose requests are counted, or nothing.")
    gc.collect()  # what others left to it is not this block's
    before = _inventory(engines)
    try:
        with _collect_unclosed() as unclosed:
            try:
                yield
            finally:
                gc.collect()  # what nobody holds any more complains now, where it is listened to
    except BaseException as error:
        for leak in [*_leaks(engines, before, settle=0), *unclosed]:
            error.add_note(f"leaked: {leak}")
        raise
    leaks = [*_leaks(engines, before, settle), *unclosed]
    if leaks:
        raise Leaked(leaks)


@contextmanager
def _collect_unclosed() -> Iterator[list[str]]:
    """Fill a list with what was closed by the garbage collector; other warnings are passed on."""
    unclosed: list[str] = []
    filters: Iterable[Any] = warnings.filters
    named = [(message, category) for action, message, category, *_ in filters if action == "ignore" and message]
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", ResourceWarning)
            for message, category in named:  # who ignores one by its words knows of it
                warnings.filterwarnings("ignore", getattr(message, "pattern", message), category)
            yield unclosed
    finally:
        for one in told:
            if issubclass(one.category, ResourceWarning):
                unclosed.append(f"{UNCLOSED}{str(one.message).removeprefix('unclosed ')}")
            else:
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno, source=one.source)


async def recording_unfinished_tasks(function: Callable[[], Awaitable[T]]) -> T:
    """Call it on an event loop that ends with it; tasks that it leaves are put down in `UNFINISHED_TASKS`."""
    try:
        return await function()
    finally:
        for _ in range(_PASS_COUNT):
            if not (left := _other_tasks()):
                break
            await anyio.lowlevel.cancel_shielded_checkpoint()
        UNFINISHED_TASKS.extend(map(_task_name, left))


def _other_tasks() -> list[anyio.TaskInfo]:
    this = anyio.get_current_task().id
    return [task for task in anyio.get_running_tasks() if task.id != this]


def _leaks(engines: tuple[Engine, ...], before: set[str], settle: float) -> list[str]:
    deadline = time.monotonic() + settle
    while leaks := _inventory(engines) - before - _kept_by_event_loop(before):
        if time.monotonic() >= deadline or not all(leak.startswith(("thread ", "process ")) for leak in leaks):
            break
        time.sleep(0.01)
    return sorted(leaks)


def _inventory(engines: tuple[Engine, ...]) -> set[str]:
    return {*_threads(), *_processes(), *_tasks(), *_files(), *_requests(engines)}


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        if not _is_pooled(thread):
            yield f"thread {thread.name!r} ({thread.ident})"


def _is_pooled(thread: threading.Thread) -> bool:
    idle = getattr(thread, "idle_workers", None)  # of anyio's worker threads on asyncio
    return thread in idle if idle is not None else _IDLE_THREAD.fullmatch(thread.name) is not None


def _processes() -> Iterator[str]:
    """Those that run and were started here; of one that has ended only the number is left."""
    for children in Path("/proc/self/task").glob("*/children"):
        for process in _read(children).split():
            command = _read(Path("/proc") / process / "cmdline").replace("\0", " ").strip()
            if command and not _KEPT_PROCESS.search(command):
                yield f"process {process} ({command:.60})"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has ended meanwhile
        return ""


def _tasks() -> Iterator[str]:
    try:
        tasks = anyio.get_running_tasks()
    except anyio.NoEventLoopError:
        return
    for task in tasks:
        yield f"{_task_name(task)} ({task.id})"


def _task_name(task: anyio.TaskInfo) -> str:
    """A task's name with the function it runs, since most names are such as Task-140."""
    function = str(getattr(task.coro, "__qualname__", "")).rpartition("<locals>.")[2]
    return f"task {task.name!r}" + (f" of {function}()" if function and function not in str(task.name) else "")


def _files() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # the descriptor of this very listing
            continue
        yield f"file {descriptor} ({target})"


def _kept_by_event_loop(before: set[str]) -> set[str]:
    """The descriptor that libuv opens beside a loop's first stream, to a socket or a process, and keeps in reserve."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return set()
    if not type(loop).__module__.startswith("uvloop"):
        return set()
    return set(sorted(file for file in _files() if file not in before and file.endswith(f"({os.devnull})"))[:1])


def _requests(engines: tuple[Engine, ...]) -> Iterator[str]:
    for number, engine in enumerate(engines):
        stats = engine.stats()
        name = f"{type(engine).__name__} {number}"
        for kind, count in (
            ("open request", stats.open),
            ("waiting request", stats.waiting),
            ("live session", stats.live_sessions),
        ):
            yield from (f"{kind} {index} of {name}" for index in range(1, count + 1))
