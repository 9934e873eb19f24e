"""A worker of a fleet, as its driver knows it."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import anyio

from runner.cluster.fleet import Seat, SeatState
from runner.cluster.words import Joined, PlayingNow, Pulse, WorkerLost, WorkerProcess
from runner.errors import BadInput, DeltarunnerError
from runner.runs.player import IdleReason

__all__ = ["Hand", "Heard", "absence", "answer_within", "at_once"]

SLICE_SECONDS: Final = 3.0
"""Seconds of one part of a silence. Each part counts at most once, however long this process itself stands still."""

_ABSENCES: Final = {
    SeatState.UNPLACED: IdleReason.UNPLACED,
    SeatState.WAITING: IdleReason.WAITING,
    SeatState.RESTING: IdleReason.RESTING,
}


class Heard(Protocol):
    """An attempt on a worker, which is told what the worker says of it."""

    def hear(self, playing: PlayingNow | None, since: float) -> None:
        """Take note of a pulse.

        Args:
            playing: what its worker said of it; None where others have waited longer.
            since: when it began to wait for what it waits for, in the event loop's time; or where nothing was said of
                it, when at the earliest.
        """


@dataclass(eq=False, slots=True)
class Hand:
    """A worker of the fleet, as its driver knows it."""

    number: int
    """No other worker of the fleet was or will be called so."""
    seat: Seat
    process: WorkerProcess
    joined: Joined | None = None
    """What it said of itself; None while it starts."""
    pulse: Pulse | None = None
    """What it said last."""
    heard: float = 0.0
    """When it said anything last, in the event loop's time."""
    ahead: float = 0.0
    """How far this event loop's time is ahead of its. Measured once, so that what stands still there does here."""
    attempts: dict[int, Heard] = field(default_factory=dict)
    """What it plays, by the numbers of the attempts."""
    version: str = ""
    """The version of its weights."""
    placed: bool = False
    """Whether it has a machine, and its process runs."""
    why: str = ""
    """Why it is gone, or its driver has ended it; "" while it is there."""
    gone: anyio.Event = field(default_factory=anyio.Event)
    """Set once it is struck off the books: what it played may be asked for again."""

    @property
    def name(self) -> str:
        """What it is called, for people."""
        return f"worker {self.number}" + (f" on {self.joined.node}" if self.joined is not None else "")

    @property
    def is_starting(self) -> bool:
        """Whether its process runs and its engine starts, or is brought to where the others are."""
        return self.placed and not self.why and self.seat.state is SeatState.STARTING

    def hear(self, pulse: Pulse) -> None:
        """Take note of a pulse, and let what is played know."""
        self.heard = anyio.current_time()
        if self.pulse is None:
            self.ahead = self.heard - pulse.now
        self.pulse = pulse
        told = {playing.number: playing for playing in pulse.oldest}
        youngest = max((playing.since for playing in pulse.oldest), default=-math.inf)
        for number, attempt in self.attempts.items():
            playing = told.get(number)
            attempt.hear(playing, self.ahead + (youngest if playing is None else playing.since))

    def naming(self, error: BadInput) -> BadInput:
        """What this worker refuses, and that it is this one."""
        return type(error)(f"{error} ({self.name})")

    def dismiss(self, why: str) -> None:
        """End it; what it plays is played again by others."""
        self.why = self.why or why
        self.process.kill()


def absence(seat: Seat, hand: Hand | None) -> IdleReason | None:
    """Why the worker of a seat does not play; None where it does.

    Args:
        seat: one of the fleet.
        hand: the worker that is there, or starts; None where there is none.
    """
    if seat.state is SeatState.STARTING:
        return IdleReason.STARTING if hand is not None and hand.placed else IdleReason.UNPLACED
    if seat.state is SeatState.EMPTY:
        return (
            IdleReason.LOST if seat.deaths else IdleReason.UNPLACED
        )  # it never had one while the machines are reached
    if hand is not None and hand.why:  # its seat plays as long as its end is waited for
        return IdleReason.LOST
    return _ABSENCES.get(seat.state)


async def at_once(hands: Iterable[Hand], step: Callable[[Hand], Awaitable[None]]) -> None:
    """Take a step with several workers at once.

    Raises:
        DeltarunnerError: the first one of their errors, once all have taken it.
    """
    errors: list[DeltarunnerError] = []

    async def take(hand: Hand) -> None:
        try:
            await step(hand)
        except DeltarunnerError as error:  # as a value: a task group would wrap it
            errors.append(error)

    async with anyio.create_task_group() as group:
        for hand in hands:
            group.start_soon(take, hand)
    if errors:
        raise errors[0]


async def answer_within(limit: float, answer: Awaitable[Any], when: str = "") -> Any:
    """The answer of a worker.

    Time in which this process or its event loop stood still does not count: a trainer that computes on the loop for
    minutes, or a process that was stopped, finds the answers once it goes on.

    Raises:
        WorkerLost: there was none within so many seconds; says so, and when that was.
    """
    for _ in range(math.ceil(limit / SLICE_SECONDS)):
        with anyio.move_on_after(SLICE_SECONDS):
            return await answer
    raise WorkerLost(f"it has said nothing for {limit:g} s{when}")
