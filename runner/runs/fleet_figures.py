"""The figures of a fleet's workers while a run plays: who of them is in trouble, and what the others are doing."""

from __future__ import annotations

import enum
import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from runner.concurrency.loop_lag import LATE_SECONDS
from runner.runs.player import Absence, FleetWorker
from runner.transcript import shown_line

__all__ = [
    "NAMED",
    "SILENT_SECONDS",
    "WAITED_SECONDS",
    "FleetFigures",
    "Trouble",
    "absent_in_words",
    "behind_in_words",
    "fleet_in_words",
    "versions_in_words",
    "worker_in_words",
]

SILENT_SECONDS: Final = 15.0
"""A worker that was not heard for so long is told of: it should be every five seconds at least."""

WAITED_SECONDS: Final = 60.0
"""A worker is told of where an episode of its has waited so long for one thing."""

NAMED: Final = 5
"""So many workers in trouble are named where a place is short."""

EXTREMES: Final = 4
"""So many workers without trouble are worth a look where not all have room: those that play least, and most."""

VERSIONS: Final = 3
"""So many versions of weights are told apart."""


class Trouble(enum.StrEnum):
    """Why a worker that plays is worth a look; the worst comes first."""

    SILENT = "silent"
    """Nothing was heard of it for long."""
    STUCK = "stuck"
    """An episode of its does not get on."""
    BEHIND = "behind"
    """Its weights are not the newest ones."""
    LATE = "late"
    """Its event loop is late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFigures:
    """What is to be seen of a fleet at one moment."""

    workers: tuple[FleetWorker, ...] = ()
    """Those that play, in the order of their numbers."""

    most: int
    """How many there are to be at most."""

    few: bool = False
    """Whether fewer play than have to."""

    version: str = ""
    """The newest version of the weights."""

    absent: Mapping[Absence, int] = field(default_factory=dict)
    """Why the others do not play, and of how many that is so."""

    def troubles(self, worker: FleetWorker) -> list[Trouble]:
        """Why a worker is worth a look, the worst first; empty where nothing is wrong with it."""
        found = (
            (Trouble.SILENT, worker.silent > SILENT_SECONDS),
            (Trouble.STUCK, worker.waited > WAITED_SECONDS),
            (Trouble.BEHIND, worker.version != self.version),
            (Trouble.LATE, worker.lag > LATE_SECONDS),
        )
        return [trouble for trouble, is_so in found if is_so]

    def troubled(self, most: int = NAMED) -> list[FleetWorker]:
        """Those in trouble, the worst first, and no more of them than so many."""
        troubled = (worker for worker in self.workers if self.troubles(worker))
        return heapq.nlargest(most, troubled, key=self._badness)

    def worth_a_look(self, most: int) -> list[FleetWorker]:
        """So many at most: those in trouble, then those that play least or most; all of them where they are so few."""
        if len(self.workers) <= most:
            return list(self.workers)
        # In the order of their numbers, so that a row stays where it is while others get better or worse.
        troubled = sorted(self.troubled(most), key=_number)
        room = min(most - len(troubled), EXTREMES)
        if not room:
            return troubled
        calm = sorted((each for each in self.workers if not self.troubles(each)), key=lambda each: each.playing)
        return troubled + sorted(calm[: room - room // 2] + calm[len(calm) - room // 2 :], key=_number)

    def _badness(self, worker: FleetWorker) -> tuple[float, ...]:
        # By what is wrong alone: which of two that are well was heard a moment before the other means nothing.
        troubles = self.troubles(worker)
        return (
            worker.silent if Trouble.SILENT in troubles else 0,
            worker.waited if Trouble.STUCK in troubles else 0,
            Trouble.BEHIND in troubles,
            worker.lag if Trouble.LATE in troubles else 0,
        )


def _number(worker: FleetWorker) -> int:
    return worker.number


def fleet_in_words(fleet: FleetFigures) -> str:
    """How many workers play, and what is otherwise where it is not all that there are to be with the newest weights."""
    count = f"{len(fleet.workers)} of {fleet.most} workers"
    otherwise = [*behind_in_words(fleet), *absent_in_words(fleet.absent)]
    return f"{count} ({'; '.join(otherwise)})" if otherwise else count


def behind_in_words(fleet: FleetFigures) -> list[str]:
    """How many workers have other weights than the newest ones, and which; empty where none has."""
    behind = [worker for worker in fleet.workers if worker.version != fleet.version]
    if not behind:
        return []
    return [f"{len(behind)} on weights {versions_in_words(behind)}, behind {shown_line(fleet.version)}"]


def absent_in_words(absent: Mapping[Absence, int]) -> list[str]:
    """What those do that do not play."""
    return [f"{count} {why.value}" for why, count in absent.items()]


def versions_in_words(workers: Iterable[FleetWorker]) -> str:
    """The versions of the weights of some workers, with how many have which where there are several."""
    counts = Counter(worker.version for worker in workers)
    if len(counts) == 1:
        return shown_line(next(iter(counts)))
    told = [f"{shown_line(version)} x{count}" for version, count in counts.most_common(VERSIONS)]
    return ", ".join(told) + (f" and {len(counts) - VERSIONS} others" if len(counts) > VERSIONS else "")


def worker_in_words(worker: FleetWorker) -> str:
    """A worker in words."""
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
