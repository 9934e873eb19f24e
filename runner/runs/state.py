"""The shared state of a run: episodes in flight, summary, and the cause of its end."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio

from runner.concurrency.clocks import loop_time
from runner.episode.key import EpisodeKey
from runner.episode.limits import Ending
from runner.errors import DeltarunnerError, EngineDead
from runner.logs import logger_for
from runner.runs.player import Attempt
from runner.runs.summary import Summary
from runner.trajectory import Outcome

__all__ = ["RunState", "TaskQuota"]

log = logger_for("runs")


SHOWN_SECONDS: Final = 2.0
"""Time after which the display shows that a run waits for the author's code outside of episodes."""


class TaskQuota:
    """A limit on the tasks in flight or unread, for a reader that needs a number of tasks with spread.

    A task has spread if the rewards of one of its groups differ.
    """

    def __init__(self) -> None:
        self._needed: int | None = None
        self._open = 0
        self._changed = anyio.Event()

    def need(self, groups: int | None) -> None:
        """Set the number of tasks with spread that the reader needs. It limits the tasks that begin; None: no limit."""
        self._needed = groups
        self._changed.set()

    @property
    def needed(self) -> int | None:
        """The number of tasks with spread that the reader still needs; None for no limit."""
        return self._needed

    async def wait(self) -> None:
        """Wait until another task may be needed; called by one task only."""
        while self._needed is not None and self._open >= self._needed:
            self._changed = anyio.Event()
            await self._changed.wait()

    def begin(self) -> None:
        """Count a task that began."""
        self._open += 1

    def end(self, *, full: bool) -> None:
        """Count a task whose groups the reader has received. `full` is True if one of the groups was needed."""
        self._open -= 1
        if full and self._needed:
            self._needed -= 1
        self._changed.set()


@dataclass(slots=True, eq=False)
class RunState:
    """The state that the parts of a run share, and the ways to end the run."""

    summary: Summary

    file: Path | None = None
    """The path of the run file; None without a file, or before it is named."""

    in_flight: set[Attempt] = field(default_factory=set)
    """The episodes in flight."""

    failure: DeltarunnerError | None = None
    """The first error that ended the run early."""

    draining: bool = False
    """True once no further episode begins."""

    cancelled_with: Ending | None = None
    """The ending that attempts get once the run is cancelled; None before that."""

    cancelled_episodes: set[tuple[str, int, int]] = field(default_factory=set)
    """The task id, visit and index of episodes whose callers no longer wait."""

    over: bool = False
    """True once every episode has ended and the last result was sent to the reader."""

    feeding: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """The scope in which episodes are begun. Cancelling it does not cancel episodes in flight."""

    quota: TaskQuota = field(default_factory=TaskQuota)
    """The number of tasks that the reader needs."""

    _awaited: tuple[str, float] | None = field(default=None, init=False)

    @contextmanager
    def waiting_for(self, hook: str) -> Iterator[None]:
        """Record, while the block runs, that the run waits for `hook`, the author's code outside of episodes."""
        self._awaited = hook, loop_time()
        try:
            yield
        finally:
            self._awaited = None

    @property
    def waits_for(self) -> str:
        """Name of the author's code that the run waits for, such as "tasks()", after a while; else ""."""
        hook, since = self._awaited or ("", 0.0)
        return hook if hook and loop_time() - since > SHOWN_SECONDS else ""

    def add_fault(self, fault: str) -> None:
        """Record a problem that did not change an outcome."""
        log.warning("%s", fault)
        self.summary.faults.append(fault)

    def add_faults(self, faults: Iterable[str]) -> None:
        """Record several problems that did not change an outcome."""
        for fault in faults:
            self.add_fault(fault)

    def drain(self) -> None:
        """Begin no further episode. Episodes in flight are played to their end."""
        if not self.draining:
            log.info("no further episode begins; %d are in flight", len(self.in_flight))
        self.draining = True
        self.feeding.cancel()

    def cancel(self, ending: Ending | None = None) -> None:
        """Cancel every episode in flight, with this ending; by default the episodes are kept as partial."""
        self.drain()
        if self.cancelled_with is None and self.in_flight:
            log.warning("%d episodes in flight are cancelled", len(self.in_flight))
        self.cancelled_with = self.cancelled_with or ending or Ending(Outcome.CANCELLED)
        for attempt in self.in_flight:
            attempt.cancel(ending)

    def begin(self, attempt: Attempt) -> None:
        """Register an attempt. It is cancelled at once if the run or its episode was cancelled before."""
        self.in_flight.add(attempt)
        if self.cancelled_with is not None:
            attempt.cancel(self.cancelled_with)
        elif _episode_of(attempt.key) in self.cancelled_episodes:
            attempt.cancel()

    def cancel_episodes(self, keys: Collection[EpisodeKey]) -> None:
        """Cancel these episodes, now or when they begin. The run continues."""
        episodes = {_episode_of(key) for key in keys}
        self.cancelled_episodes |= episodes
        for attempt in self.in_flight:
            if _episode_of(attempt.key) in episodes:
                attempt.cancel()

    def forget(self, key: EpisodeKey) -> None:
        """Remove an episode from `cancelled_episodes`, after its last attempt."""
        self.cancelled_episodes.discard(_episode_of(key))

    def fail(self, failure: DeltarunnerError, *, cancel: bool = False) -> None:
        """End the run with this error. With `cancel`, episodes in flight are cancelled; otherwise they finish."""
        if self.failure is None:
            log.error("the run ends early: %s: %s", type(failure).__name__, failure)
            self.failure = failure
        if cancel:
            self.cancel()
        else:
            self.drain()

    def engine_died(self, error: EngineDead) -> None:
        """End the run after an engine died; episodes in flight end as engine errors."""
        self.fail(error)
        # The ending is not partial, since the file records the failure of the engine.
        self.cancel(Ending(Outcome.ENGINE_ERROR, error=str(error)))


def _episode_of(key: EpisodeKey) -> tuple[str, int, int]:
    return key.task.id, key.visit, key.index
