"""The driver's record of a worker, and functions that wait for the worker's process."""

from __future__ import annotations

import math
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import anyio

from runner.cluster.fleet import WorkerSlot, WorkerSlotState
from runner.cluster.protocol import Heartbeat, PlayingNow, WorkerInfo, WorkerLost, WorkerProcess
from runner.errors import BadInput
from runner.logs import logger_for
from runner.runs.player import IdleReason

__all__ = ["HeartbeatListener", "WorkerHandle", "answer_within", "idle_reason", "live"]

log = logger_for("cluster")

SILENCE_STEP_SECONDS: Final = 3.0
"""Seconds of one step of the wait in `answer_within`. A step counts as this time, even if it took longer."""

_IDLE_REASONS: Final = {
    WorkerSlotState.UNPLACED: IdleReason.UNPLACED,
    WorkerSlotState.WAITING: IdleReason.WAITING,
    WorkerSlotState.RESTING: IdleReason.RESTING,
}


class HeartbeatListener(Protocol):
    """An attempt on a worker, updated with each heartbeat."""

    def note_heartbeat(self, playing: PlayingNow | None, since: float) -> None:
        """Record the attempt's state from a heartbeat.

        Args:
            playing: the attempt's state; None if the heartbeat has only attempts whose activity began earlier.
            since: start of its activity, in the event loop's time; if `playing` is None, the earliest possible start.
        """


@dataclass(eq=False, slots=True)
class WorkerHandle:
    """A worker of the fleet, as an object of the driver's process."""

    number: int
    """The number of the worker, which no other worker of the fleet gets."""
    slot: WorkerSlot
    process: WorkerProcess
    info: WorkerInfo | None = None
    """The worker's description of itself; None while the worker starts."""
    heartbeat: Heartbeat | None = None
    """The latest heartbeat."""
    heartbeat_at: float = 0.0
    """Time of the latest heartbeat, in the event loop's time."""
    ahead: float = 0.0
    """This event loop's time minus the worker's. It is measured once, so that a suspended worker is shown as waiting.
    """
    attempts: dict[int, HeartbeatListener] = field(default_factory=dict)
    version: str = ""
    placed: bool = False
    """True if the worker has a machine, and its process runs."""
    why: str = ""
    """The reason why the worker is gone or was dismissed; "" before that."""
    gone: anyio.Event = field(default_factory=anyio.Event)
    """Set once the worker is removed from the fleet: its episodes may be assigned again."""

    @property
    def name(self) -> str:
        """The worker's number and, once known, its machine, for messages: "worker 3 on NODE"."""
        return f"worker {self.number}" + (f" on {self.info.node}" if self.info is not None else "")

    @property
    def is_starting(self) -> bool:
        """True if the worker's process runs, and its engine starts or loads the fleet's state."""
        return self.placed and not self.why and self.slot.state is WorkerSlotState.STARTING

    def note_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Store a heartbeat, and pass it to the attempts."""
        self.heartbeat_at = anyio.current_time()
        if self.heartbeat is None:
            self.ahead = self.heartbeat_at - heartbeat.now
        self.heartbeat = heartbeat
        listed = {playing.number: playing for playing in heartbeat.oldest}
        youngest = max((playing.since for playing in heartbeat.oldest), default=-math.inf)
        for number, attempt in self.attempts.items():
            playing = listed.get(number)
            attempt.note_heartbeat(playing, self.ahead + (youngest if playing is None else playing.since))

    def naming(self, error: BadInput) -> BadInput:
        """Return an error of this worker with the worker's name added."""
        return type(error)(f"{error} ({self.name})")

    def dismiss(self, why: str) -> None:
        """Kill the worker, and record the reason `why`. Other workers play its episodes again."""
        log.warning("%s is dismissed: %s", self.name, why)
        self.why = self.why or why
        self.process.kill()


def idle_reason(slot: WorkerSlot, handle: WorkerHandle | None) -> IdleReason | None:
    """Return why the worker of a slot does not play; None if it plays.

    Args:
        slot: a slot of the fleet.
        handle: the slot's worker, which may still be starting; None for an empty slot.
    """
    if slot.state is WorkerSlotState.STARTING:
        return IdleReason.STARTING if handle is not None and handle.placed else IdleReason.UNPLACED
    if slot.state is WorkerSlotState.EMPTY:
        return (
            IdleReason.LOST if slot.deaths else IdleReason.UNPLACED
        )  # without a death, the slot never had a worker, since machines are still being connected
    if handle is not None and handle.why:  # the slot counts as playing until the end of its worker is confirmed
        return IdleReason.LOST
    return _IDLE_REASONS.get(slot.state)


async def live(handle: WorkerHandle) -> None:
    """Wait until a worker's process ends.

    Raises:
        WorkerLost: the process ended.
        DeltarunnerError: the engine does not start, or died.
    """
    await handle.process.send("live")
    raise WorkerLost("it ended")


async def answer_within(limit: float, answer: Awaitable[Any], when: str = "") -> Any:
    """Return the answer of a worker.

    Time in which this process or its event loop was suspended does not count, since the answer may have arrived by
    then. For example, a trainer may have computed on the loop for minutes.

    Raises:
        WorkerLost: the worker did not answer within `limit` seconds; the message contains `when`.
    """
    for _ in range(math.ceil(limit / SILENCE_STEP_SECONDS)):
        with anyio.move_on_after(SILENCE_STEP_SECONDS):
            return await answer
    raise WorkerLost(f"it has not answered for {limit:g} s{when}")
