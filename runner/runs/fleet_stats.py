"""Live statistics of a fleet: workers with problems, and the state of the other workers."""

from __future__ import annotations

import enum
import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from runner.concurrency.loop_lag import LATE_SECONDS
from runner.runs.player import FleetWorker, IdleReason
from runner.transcript import shown_line

__all__ = [
    "MAX_NAMED_WORKERS",
    "SILENT_SECONDS",
    "WAITED_SECONDS",
    "FleetStats",
    "Trouble",
    "fleet_in_words",
    "idle_in_words",
    "outdated_in_words",
    "versions_in_words",
    "worker_in_words",
]

SILENT_SECONDS: Final = 15.0
"""A worker without a heartbeat for longer than this is shown as silent. Heartbeats come at least every five seconds."""

WAITED_SECONDS: Final = 60.0
"""A worker is shown as stuck if one of its episodes has waited longer than this for the same thing."""

MAX_NAMED_WORKERS: Final = 5
"""Maximum number of workers with problems that are named in a short display."""

MAX_EXTREME_WORKERS: Final = 4
"""Maximum number of workers without problems that are shown: the ones with the fewest and the most episodes."""

MAX_NAMED_VERSIONS: Final = 3
"""Maximum number of weight versions that are named in a short display."""


class Trouble(enum.StrEnum):
    """Problems of a playing worker, the worst first."""

    SILENT = "silent"
    """Its last heartbeat was more than `SILENT_SECONDS` ago."""
    STUCK = "stuck"
    """One of its episodes has waited longer than `WAITED_SECONDS` for the same thing."""
    OUTDATED = "outdated"
    """Its weights are not the newest."""
    LATE = "late"
    """The lag of its event loop is above `LATE_SECONDS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStats:
    """The workers of a run at one moment."""

    workers: tuple[FleetWorker, ...] = ()
    """The playing workers, ordered by number."""

    most: int
    """Maximum number of workers."""

    few: bool = False
    """True if fewer workers play than the run needs."""

    version: str = ""

    absent: Mapping[IdleReason, int] = field(default_factory=dict)
    """The number of workers that do not play, by the reason."""

    def troubles(self, worker: FleetWorker) -> list[Trouble]:
        """The problems of a worker, the worst first."""
        found = (
            (Trouble.SILENT, worker.silent > SILENT_SECONDS),
            (Trouble.STUCK, worker.waited > WAITED_SECONDS),
            (Trouble.OUTDATED, worker.version != self.version),
            (Trouble.LATE, worker.lag > LATE_SECONDS),
        )
        return [trouble for trouble, is_so in found if is_so]

    def troubled(self, most: int = MAX_NAMED_WORKERS) -> list[FleetWorker]:
        """The workers with problems, the worst first; `most` workers at most."""
        troubled = (worker for worker in self.workers if self.troubles(worker))
        return heapq.nlargest(most, troubled, key=self._badness)

    def worth_a_look(self, most: int) -> list[FleetWorker]:
        """Up to `most` workers: workers with problems, then the workers with the fewest and the most episodes."""
        if len(self.workers) <= most:
            return list(self.workers)
        # Workers are ordered by number, so that a row keeps its position while others change.
        troubled = sorted(self.troubled(most), key=_number)
        room = min(most - len(troubled), MAX_EXTREME_WORKERS)
        if not room:
            return troubled
        calm = sorted((each for each in self.workers if not self.troubles(each)), key=lambda each: each.playing)
        return troubled + sorted(calm[: room - room // 2] + calm[len(calm) - room // 2 :], key=_number)

    def _badness(self, worker: FleetWorker) -> tuple[float, ...]:
        # Heartbeats of healthy workers are ignored, since they differ by chance.
        troubles = self.troubles(worker)
        return (
            worker.silent if Trouble.SILENT in troubles else 0,
            worker.waited if Trouble.STUCK in troubles else 0,
            Trouble.OUTDATED in troubles,
            worker.lag if Trouble.LATE in troubles else 0,
        )


def _number(worker: FleetWorker) -> int:
    return worker.number


def fleet_in_words(fleet: FleetStats) -> str:
    """The number of playing workers, and of workers that have old weights or do not play, in words."""
    count = f"{len(fleet.workers)} of {fleet.most} workers"
    exceptions = [*outdated_in_words(fleet), *idle_in_words(fleet.absent)]
    return f"{count} ({'; '.join(exceptions)})" if exceptions else count


def outdated_in_words(fleet: FleetStats) -> list[str]:
    """A phrase about the workers with old weights; an empty list if there are no such workers."""
    outdated = [worker for worker in fleet.workers if worker.version != fleet.version]
    if not outdated:
        return []
    return [f"{len(outdated)} on weights {versions_in_words(outdated)} instead of {shown_line(fleet.version)}"]


def idle_in_words(absent: Mapping[IdleReason, int]) -> list[str]:
    """Phrases about the workers that do not play, one for each reason."""
    return [f"{count} {why.value}" for why, count in absent.items()]


def versions_in_words(workers: Iterable[FleetWorker]) -> str:
    """The weight versions of some workers, counted if they differ."""
    counts = Counter(worker.version for worker in workers)
    if len(counts) == 1:
        return shown_line(next(iter(counts)))
    counted = [f"{shown_line(version)} x{count}" for version, count in counts.most_common(MAX_NAMED_VERSIONS)]
    return ", ".join(counted) + (
        f" and {len(counts) - MAX_NAMED_VERSIONS} others" if len(counts) > MAX_NAMED_VERSIONS else ""
    )


def worker_in_words(worker: FleetWorker) -> str:
    """A description of a worker on one line."""
    parts = [
        f"worker {worker.number} on {shown_line(worker.node)}",
        f"{worker.playing} of {worker.width} playing",
        f"weights {shown_line(worker.version)}",
        f"loop lag {1000 * worker.lag:.0f} ms",
    ]
    if worker.silent > SILENT_SECONDS:
        parts.append(f"silent for {worker.silent:.0f} s")
    if worker.oldest:
        parts.append(f"{shown_line(worker.oldest)} for {worker.waited:.0f} s")
    return ", ".join(parts)
