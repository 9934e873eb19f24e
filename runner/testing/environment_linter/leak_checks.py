"""Checks of a play for a blocked event loop, for leaks, and for coroutines that are not awaited."""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.lowlevel

from runner.environment.environment import Environment
from runner.quantities import counted
from runner.runs.event_loop import on_event_loop
from runner.testing.environment_linter.findings import Finding
from runner.testing.leaks import UNCLOSED, Leaked, no_leaks
from runner.testing.watchdog import LoopWatchdog

__all__ = ["TemporaryFiles", "play_watched", "unawaited_coroutines"]

MAX_LISTED_LEAKS: Final = 3
"""Maximum number of leaks that are named; the others are counted."""

SETTLE_SECONDS: Final = 5.0
"""Time for threads and processes to end before they count as leaks."""

_TICK_SECONDS: Final = 0.005
"""Interval between two checks of the event loop; shorter than in a run, so that brief blocking code is found."""

_MIN_BLOCKED_SECONDS: Final = 0.1
"""Minimum total time of blocking for a finding about code that blocks the event loop only briefly in each call."""


def play_watched(play: Callable[[], Awaitable[None]], environments: Sequence[Environment[Any]]) -> list[Finding]:
    """Play, and return findings about blocking code and about leaks.

    This must not be the first play of the process, since things that a process loads or opens once are not leaks.

    Args:
        play: a function that plays.
        environments: the environment objects that play, including those that are appended during the play.
    """
    long_blocks, brief_blocks = LoopWatchdog(), LoopWatchdog(_MIN_BLOCKED_SECONDS, tick=_TICK_SECONDS)
    tasks: set[str] = set()

    async def playing() -> None:
        before = set(anyio.get_running_tasks())
        async with long_blocks, brief_blocks:
            await play()
        left = (task for task in anyio.get_running_tasks() if task not in before)
        tasks.update(str(getattr(task.coro, "__qualname__", task.name)) for task in left)

    leaks: tuple[str, ...] = ()
    # The first event loop of a process opens a pipe, which later event loops share. It must not count as a leak.
    on_event_loop(anyio.lowlevel.checkpoint)
    try:
        with no_leaks(settle=SETTLE_SECONDS):
            on_event_loop(playing)
    except Leaked as leaked:
        leaks = leaked.leaks
    known = {blocker.where for blocker in long_blocks.blockers}
    brief_blocks.blockers = [b for b in brief_blocks.blockers if not b.thread and b.where not in known]
    return [
        *(Finding(complaint) for complaint in [*long_blocks.complaints(), *brief_blocks.complaints()]),
        *_leak_findings(leaks, environments),
        *(_leak_finding(f"a task of {name}()") for name in tasks),
    ]


def _leak_findings(leaks: Sequence[str], environments: Sequence[Environment[Any]]) -> Iterator[Finding]:
    """Findings about leaks: one for each unclosed object, each attribute that holds leaks, each other kind of leak."""
    for leak in (leak for leak in leaks if leak.startswith(UNCLOSED)):
        yield Finding(f"{leak}. Close it, or open it with `with`.", fatal=False)
    named: dict[str, str] = {}
    for leak in (leak for leak in leaks if not leak.startswith(UNCLOSED)):
        held = next((name for one in environments for name, value in vars(one).items() if _holds(value, leak)), "")
        plain = _without_numbers(leak)
        named.setdefault(held or plain, f"self.{held} ({plain})" if held else plain)
    for what in list(named.values())[:MAX_LISTED_LEAKS]:
        yield _leak_finding(what)
    if len(named) > MAX_LISTED_LEAKS:
        yield _leak_finding(counted(len(named) - MAX_LISTED_LEAKS, "more leak"), "each")


def _without_numbers(leak: str) -> str:
    """The text of a leak without numbers that differ between episodes."""
    leak = re.sub(r"^(file|process) \d+ \((.*)\)$", r"\1 \2", leak)
    return re.sub(r"-\d+( \(.*\))?('?) \(\d+\)$", r"\1\2", leak)


def _holds(value: Any, leak: str) -> bool:
    """Return True if the value is the leaked file, process or thread, or a pool with that thread."""
    kind, _, rest = leak.partition(" ")
    number = rest.partition(" ")[0]
    try:
        if kind == "file":
            return bool(value.fileno() == int(number))
        if kind == "process":
            return bool(value.pid == int(number))
    except Exception:  # the value is not a file, or is closed; an object of the author may raise any exception
        return False
    threads = getattr(value, "_threads", None) or (value,)
    return any(f"({getattr(thread, 'ident', None)})" in rest for thread in threads)


def _leak_finding(what: str, each: str = "it") -> Finding:
    return Finding(
        f"still open after close(): {what}. Close {each} in close(), or open {each} in setup() with "
        "self.episode.exit_stack."
    )


class TemporaryFiles:
    """A separate folder for temporary files of this process and its child processes, used with `with`."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="deltarunner-check-", ignore_cleanup_errors=True)
        self._before: set[str] = set()

    def __enter__(self) -> TemporaryFiles:
        # Both are set, since this process has already read TMPDIR, and child processes will read it.
        self._was = tempfile.tempdir, os.environ.get("TMPDIR")
        tempfile.tempdir = os.environ["TMPDIR"] = self._folder.name
        return self

    def __exit__(self, *_: object) -> None:
        tempfile.tempdir, variable = self._was
        if variable is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = variable
        self.cleanup()

    def cleanup(self) -> None:
        self._folder.cleanup()

    def findings(self) -> Iterator[Finding]:
        """A finding if the temporary folder has files or folders that it did not have at the previous call."""
        now = {path.name for path in Path(self._folder.name).iterdir()}
        left, self._before = sorted(now - self._before), now
        if left:
            many = f"{len(left)} files or folders, such as {left[0]}," if len(left) > 1 else left[0]
            yield Finding(
                f"left among the temporary files: {many} after close(). Use tempfile.TemporaryDirectory(), in setup() "
                f"with self.episode.exit_stack.enter_context(...), or remove it in close()."
            )


@contextmanager
def unawaited_coroutines() -> Iterator[list[Finding]]:
    """Collect findings for coroutines that are never awaited. The list is filled when the block has ended."""
    findings: list[Finding] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", "coroutine .* was never awaited", RuntimeWarning)
        yield findings
    for one in caught:
        text = str(one.message)
        if "was never awaited" in text:
            findings.append(Finding(f"{text.splitlines()[0]} ({one.filename}:{one.lineno}): write `await` before it."))
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno, source=one.source)
