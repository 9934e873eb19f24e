"""What `deltarunner check` finds beside episodes: who held up the event loop, what was left, what nobody awaited."""

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

from runner.cli.findings import Finding
from runner.environment.environment import Environment
from runner.runs.event_loop import on_event_loop
from runner.testing.leaks import UNCLOSED, Leaked, no_leaks
from runner.testing.watchdog import LoopWatchdog

__all__ = ["TemporaryFiles", "unawaited", "watched"]

LISTED: Final = 3
"""The number of leftovers that are named; the rest are only counted."""

SETTLE: Final = 5.0
"""The seconds in which threads and processes may still end before they count as left."""

_BRIEF: Final = 0.005
"""The seconds from one look at the event loop to the next: a run looks less often and misses code that is so brief."""

_OFTEN: Final = 0.1
"""The seconds by which brief code must have held up the event loop, all its calls together, to be a finding."""


def watched(play: Callable[[], Awaitable[None]], environments: Sequence[Environment[Any]]) -> list[Finding]:
    """Play once more, when what is loaded and opened only once has been: what is left now is left by every episode."""
    at_length, again_and_again = LoopWatchdog(), LoopWatchdog(_OFTEN, tick=_BRIEF)
    tasks: set[str] = set()

    async def playing() -> None:
        before = set(anyio.get_running_tasks())
        async with at_length, again_and_again:
            await play()
        left = (task for task in anyio.get_running_tasks() if task not in before)
        tasks.update(str(getattr(task.coro, "__qualname__", task.name)) for task in left)

    leaks: tuple[str, ...] = ()
    on_event_loop(anyio.lowlevel.checkpoint)  # the first event loop of a process opens a pipe for all that follow
    try:
        with no_leaks(settle=SETTLE):
            on_event_loop(playing)
    except Leaked as leaked:
        leaks = leaked.leaks
    known = {blocker.where for blocker in at_length.blockers}
    again_and_again.blockers = [b for b in again_and_again.blockers if not b.thread and b.where not in known]
    return [
        *(Finding(complaint) for complaint in [*at_length.complaints(), *again_and_again.complaints()]),
        *_of_leaks(leaks, environments),
        *(_left(f"a task of {name}()") for name in tasks),
    ]


def _of_leaks(leaks: Sequence[str], environments: Sequence[Environment[Any]]) -> Iterator[Finding]:
    """Findings by the attribute that holds a leak. What each episode left is told once, of many the first few."""
    for leak in (leak for leak in leaks if leak.startswith(UNCLOSED)):
        yield Finding(f"{leak}. Close it, or open it with `with`.", fatal=False)
    named: dict[str, str] = {}
    for leak in (leak for leak in leaks if not leak.startswith(UNCLOSED)):
        held = next((name for one in environments for name, value in vars(one).items() if _holds(value, leak)), "")
        plain = _plain(leak)
        named.setdefault(held or plain, f"self.{held} ({plain})" if held else plain)
    for what in list(named.values())[:LISTED]:
        yield _left(what)
    if len(named) > LISTED:
        yield _left(f"{len(named) - LISTED} more of them")


def _plain(leak: str) -> str:
    """A leak without the numbers that differ from one episode to the next."""
    leak = re.sub(r"^(file|process) \d+ \((.*)\)$", r"\1 \2", leak)
    return re.sub(r"-\d+( \(.*\))?('?) \(\d+\)$", r"\1\2", leak)


def _holds(value: Any, leak: str) -> bool:
    """An attribute's value is the file, the process or the thread that was left, or a pool that has the thread."""
    kind, _, rest = leak.partition(" ")
    number = rest.partition(" ")[0]
    try:
        if kind == "file":
            return bool(value.fileno() == int(number))
        if kind == "process":
            return bool(value.pid == int(number))
    except Exception:  # no file, or a closed one; an author's object may do anything
        return False
    threads = getattr(value, "_threads", None) or (value,)
    return any(f"({getattr(thread, 'ident', None)})" in rest for thread in threads)


def _left(what: str) -> Finding:
    return Finding(
        f"still open after close(): {what}. Close it in close(), or open it in setup() with self.episode.exit_stack."
    )


class TemporaryFiles:
    """A folder of temporary files of its own, for this process and those that it starts, while it is entered."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="deltarunner-check-", ignore_cleanup_errors=True)
        self._before: set[str] = set()

    def __enter__(self) -> TemporaryFiles:
        # Both: this process reads the variable once, and those that it starts read it anew.
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
        """Remove the folder."""
        self._folder.cleanup()

    def findings(self) -> Iterator[Finding]:
        """What has been left since this was last asked."""
        now = {path.name for path in Path(self._folder.name).iterdir()}
        left, self._before = sorted(now - self._before), now
        if left:
            many = f"{len(left)} files or folders, such as {left[0]}," if len(left) > 1 else left[0]
            yield Finding(
                f"left among the temporary files: {many} after close(). Take tempfile.TemporaryDirectory(), in setup() "
                f"with self.episode.exit_stack.enter_context(...), or remove it in close()."
            )


@contextmanager
def unawaited() -> Iterator[list[Finding]]:
    """Fill a list with the coroutines that were made and not awaited; other warnings are passed on."""
    findings: list[Finding] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.filterwarnings("always", "coroutine .* was never awaited", RuntimeWarning)
        yield findings
    for one in told:
        text = str(one.message)
        if "was never awaited" in text:
            findings.append(Finding(f"{text.splitlines()[0]} ({one.filename}:{one.lineno}): write `await` before it."))
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno, source=one.source)
