"""A check for leaks of a block of code: threads, processes, tasks, open files and requests, by name."""

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

# Pytest leaves out the frames of this module and shows the line of the test, where the fix belongs.
__tracebackhide__ = True

T = TypeVar("T")

_PASS_COUNT: Final = 5
"""Passes of the event loop in which a cancelled task may end."""

# Idle threads that anyio and trio keep for the next call; they have these names only while idle.
_IDLE_THREAD: Final = re.compile(r"Trio thread \d+")

# Processes that multiprocessing and anyio start once and keep.
_KEPT_PROCESS: Final = re.compile(r"\bmultiprocessing\.(resource_tracker|forkserver)\b|-m anyio\.to_process\b")

UNCLOSED: Final = "closed by the garbage collector alone: "
"""First words of the report of an object that only the garbage collector closed."""

UNFINISHED_TASKS: Final[deque[str]] = deque(maxlen=64)
"""Tasks of the current test that were unfinished at the end of their event loops; for the fixture `no_leaks`."""


class Leaked(AssertionError):
    """The error of `no_leaks`; the message lists what the block left open."""

    def __init__(self, leaks: Sequence[str]) -> None:
        self.leaks = tuple(leaks)
        """The leaks, one text each, such as "thread 'worker' (1234)"."""
        super().__init__("leaked: " + "; ".join(leaks))


@contextmanager
def no_leaks(*engines: Engine, settle: float = 5.0) -> Iterator[None]:
    """Fail if the block leaves a thread, a process, a task, an open file or an open request.

    A file that only the garbage collector closes counts as open. The check works inside and outside of an event
    loop. An exception of the block is raised with notes about the leaks.

    Args:
        engines: engines whose open and waiting requests and live sessions are checked.
        settle: seconds within which threads and processes that are ending must end.

    Raises:
        BadOption: an argument is not an engine.
        Leaked: there are leaks.
    """
    for engine in engines:
        if not isinstance(engine, Engine):
            raise BadOption(f"no_leaks({engine!r:.60}): give engines, whose requests are checked, or nothing.")
    gc.collect()  # earlier garbage does not belong to this block
    before = _inventory(engines)
    try:
        with _collect_unclosed() as unclosed:
            try:
                yield
            finally:
                gc.collect()  # unclosed objects cause their warnings here, while warnings are recorded
    except BaseException as error:
        for leak in [*_leaks(engines, before, settle=0), *unclosed]:
            error.add_note(f"leaked: {leak}")
        raise
    leaks = [*_leaks(engines, before, settle), *unclosed]
    if leaks:
        raise Leaked(leaks)


@contextmanager
def _collect_unclosed() -> Iterator[list[str]]:
    """Collect reports of objects that the garbage collector closes; other warnings are issued again at the end."""
    unclosed: list[str] = []
    filters: Iterable[Any] = warnings.filters
    named = [(message, category) for action, message, category, *_ in filters if action == "ignore" and message]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ResourceWarning)
            for message, category in named:  # warnings that the user ignores by message stay ignored
                warnings.filterwarnings("ignore", getattr(message, "pattern", message), category)
            yield unclosed
    finally:
        for one in caught:
            if issubclass(one.category, ResourceWarning):
                unclosed.append(f"{UNCLOSED}{str(one.message).removeprefix('unclosed ')}")
            else:
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno, source=one.source)


async def recording_unfinished_tasks(function: Callable[[], Awaitable[T]]) -> T:
    """Call the last function of an event loop, and add the tasks that it leaves to `UNFINISHED_TASKS`."""
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
        if time.monotonic() >= deadline or not all(leak.startswith(_passing_kinds()) for leak in leaks):
            break
        time.sleep(0.01)
    return sorted(leaks)


def _passing_kinds() -> tuple[str, ...]:
    """Kinds of leaks that may end by themselves.

    Files are among them if other threads run: a thread may have opened a file only to print a traceback.
    """
    return ("thread ", "process ", "file ") if threading.active_count() > 1 else ("thread ", "process ")


def _inventory(engines: tuple[Engine, ...]) -> set[str]:
    return {*_threads(), *_processes(), *_tasks(), *_files(), *_requests(engines)}


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        if not _is_pooled(thread):
            yield f"thread {thread.name!r} ({thread.ident})"


def _is_pooled(thread: threading.Thread) -> bool:
    idle = getattr(thread, "idle_workers", None)  # attributes of anyio's worker threads on asyncio
    return thread in idle if idle is not None else _IDLE_THREAD.fullmatch(thread.name) is not None


def _processes() -> Iterator[str]:
    """Running child processes. A process without a command line has ended, or is just starting."""
    for children in Path("/proc/self/task").glob("*/children"):
        for process in _read(children).split():
            command = _read(Path("/proc") / process / "cmdline").replace("\0", " ").strip() or _starting(process)
            if command and not _KEPT_PROCESS.search(command):
                yield f"process {process} ({command:.60})"


def _starting(process: str) -> str:
    """Return the name of a process without a command line; empty if it has ended."""
    name, _, state = _read(Path("/proc") / process / "stat").partition("(")[2].rpartition(") ")
    return name if state[:1] not in ("", "Z", "X") else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # the process has ended
        return ""


def _tasks() -> Iterator[str]:
    try:
        tasks = anyio.get_running_tasks()
    except anyio.NoEventLoopError:
        return
    for task in tasks:
        yield f"{_task_name(task)} ({task.id})"


def _task_name(task: anyio.TaskInfo) -> str:
    """The name of a task with its function, since most names are like Task-140."""
    function = str(getattr(task.coro, "__qualname__", "")).rpartition("<locals>.")[2]
    return f"task {task.name!r}" + (f" of {function}()" if function and function not in str(task.name) else "")


def _files() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # this is the descriptor of the listing itself
            continue
        yield f"file {descriptor} ({target})"


def _kept_by_event_loop(before: set[str]) -> set[str]:
    """The descriptor that uvloop opens with the first stream of a loop and keeps; an empty set on other loops."""
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
