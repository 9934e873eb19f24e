"""Finds what a block of code left behind: threads, tasks, open files and requests, by name."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import anyio

from runner.engines.base import Engine

__all__ = ["Leaked", "no_leaks"]

# Idle threads that anyio and trio keep for the next call; they carry these names only while they have no work.
_POOLED: Final = re.compile(r"Trio thread \d+")


class Leaked(AssertionError):
    """Something outlived its block; the message lists what."""


@contextmanager
def no_leaks(*engines: Engine, settle: float = 1.0) -> Iterator[None]:
    """Fail if the block leaves a thread, a task, an open file or an open request behind.

    Works inside and outside an event loop. An exception that leaves the block passes, with a note of what leaked.

    Args:
        engines: whose open and waiting requests and live sessions are counted.
        settle: seconds that threads which are about to end get to do so.

    Raises:
        Leaked: lists what was left behind, each by name.
    """
    before = _inventory(engines)
    try:
        yield
    except BaseException as error:
        for leak in _leaks(engines, before, settle=0):
            error.add_note(f"leaked: {leak}")
        raise
    leaks = _leaks(engines, before, settle)
    if leaks:
        raise Leaked("left behind: " + "; ".join(leaks))


def _leaks(engines: tuple[Engine, ...], before: set[str], settle: float) -> list[str]:
    gc.collect()
    deadline = time.monotonic() + settle
    while leaks := _inventory(engines) - before:
        if time.monotonic() >= deadline or not all(leak.startswith("thread ") for leak in leaks):
            break
        time.sleep(0.01)
    return sorted(leaks)


def _inventory(engines: tuple[Engine, ...]) -> set[str]:
    counters: tuple[Callable[[], Iterator[str]], ...] = (_threads, _tasks, _files, lambda: _requests(engines))
    return {item for counter in counters for item in counter()}


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        if not _is_pooled(thread):
            yield f"thread {thread.name!r} ({thread.ident})"


def _is_pooled(thread: threading.Thread) -> bool:
    idle = getattr(thread, "idle_workers", None)  # of anyio's worker threads on asyncio
    return thread in idle if idle is not None else _POOLED.fullmatch(thread.name) is not None


def _tasks() -> Iterator[str]:
    try:
        tasks = anyio.get_running_tasks()
    except anyio.NoEventLoopError:
        return
    for task in tasks:
        yield f"task {task.name!r} ({task.id})"


def _files() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # the descriptor of this very listing
            continue
        yield f"file {descriptor} ({target})"


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
