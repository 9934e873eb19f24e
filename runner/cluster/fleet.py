"""Slots for workers, and the assignment of episodes to slots. `Fleet` uses neither a clock nor the event loop."""

from __future__ import annotations

import enum
import math
from collections import Counter, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Final

import anyio

__all__ = ["Assignment", "Fleet", "SlotQueue", "WorkerSlot", "WorkerSlotState"]

HOUR_SECONDS: Final = 3600.0

MAX_RESTARTS: Final = 3
"""Maximum number of times that the worker of a slot is replaced within an hour."""

BACK_OFF_SECONDS: Final = 1.0
"""Seconds that a slot stays empty after a death of its worker; doubled for each earlier death within an hour."""

UNPLACED_RETRY_SECONDS: Final = 2.0
"""Seconds after which the start of a worker is tried again if no machine had room for the worker."""

KEPT_WORKER_RATIO: Final = 4
"""While other episodes wait, last tries (`Assignment.last_chance`) get at most one worker in this many, but at least
one worker.
"""

MAX_AFFINITY_IMBALANCE: Final = 2
"""An episode goes to a worker that plays other episodes of its group, if that worker has at most this many episodes
more than the worker with the lowest load.
"""


class WorkerSlotState(enum.StrEnum):
    EMPTY = "empty"
    """No worker: none was started yet, or the previous worker died and its back-off is not over."""
    UNPLACED = "unplaced"
    """No machine had room for the slot's worker; the start is tried again."""
    STARTING = "starting"
    """The slot's worker was requested; it starts, or waits for a machine."""
    WAITING = "waiting"
    """The slot's worker lacks only the current weights, which cannot be read any more. It waits for the next update."""
    READY = "ready"
    """The slot's worker plays."""
    RESTING = "resting"
    """The slot's workers died too often. The next one may start an hour after the first of those deaths."""


@dataclass(eq=False, slots=True)
class Assignment:
    """An episode that is to be played."""

    group: Hashable = None
    """Episodes of one group begin with the same prompt, so one worker plays them faster."""
    again: bool = False
    """True if a worker died while it played the episode. Such episodes come before new ones."""
    last_chance: bool = False
    """True for a last try: the episode fails if one more worker dies. A last try is played alone on a worker, since an
    episode that kills workers must not fail others on the same worker.
    """
    slot: WorkerSlot | None = None
    """The slot where the episode is played; None while the episode waits."""


@dataclass(eq=False, slots=True)
class WorkerSlot:
    """The place of one worker, and of its successors."""

    number: int
    state: WorkerSlotState = WorkerSlotState.EMPTY
    width: int = 0
    """Maximum number of episodes that the slot's worker plays at once; 0 before the worker plays."""
    assignments: set[Assignment] = field(default_factory=set)
    groups: Counter[Hashable] = field(default_factory=Counter)
    kept: bool = False
    """True if the slot is kept for a last try. It gets no other episode, and it gets the last try once it is idle."""
    deaths: deque[float] = field(default_factory=deque)
    """Times when workers of the slot died, within the hour before the latest death."""
    free_at: float = 0.0
    """Time from which a new worker may start."""

    @property
    def is_empty(self) -> bool:
        """True if the slot has no worker, and none is starting."""
        return self.state in (WorkerSlotState.EMPTY, WorkerSlotState.UNPLACED, WorkerSlotState.RESTING)

    @property
    def load(self) -> float:
        """The number of the slot's episodes as a share of `width`; infinite if `width` is 0."""
        return len(self.assignments) / self.width if self.width else math.inf


class Fleet:
    """The slots of a fleet, and the episodes on them.

    Args:
        least: minimum number of workers; the fleet does not begin with fewer.
        most: number of slots.
    """

    def __init__(self, least: int, most: int) -> None:
        self.least = least
        self.slots = [WorkerSlot(number) for number in range(most)]
        self.ended_by = ""
        """The reason why no further worker is started; "" while the fleet plays."""
        self._waiting: tuple[deque[Assignment], ...] = (deque(), deque(), deque())
        self._turn = 0
        self._keeps = False
        """True if, at the last `give_out`, a last try was played or a slot was kept for one."""

    # --- state

    @property
    def ready(self) -> list[WorkerSlot]:
        return [slot for slot in self.slots if slot.state is WorkerSlotState.READY]

    @property
    def waiting_for_weights(self) -> list[WorkerSlot]:
        """The slots whose workers wait for the next weights."""
        return [slot for slot in self.slots if slot.state is WorkerSlotState.WAITING]

    @property
    def width(self) -> int:
        """Number of episodes that all workers play at once."""
        return sum(slot.width for slot in self.ready)

    @property
    def enough(self) -> bool:
        """True if at least `least` workers are ready or wait for weights, and at least one of them is ready."""
        return bool(self.ready) and len(self.ready) + len(self.waiting_for_weights) >= self.least

    @property
    def hopeless(self) -> bool:
        """True if there will not be enough workers soon: too many slots rest, or the fleet has ended."""
        return bool(self.ended_by) or sum(slot.state is not WorkerSlotState.RESTING for slot in self.slots) < self.least

    @property
    def waiting(self) -> int:
        """Number of episodes that wait for a worker."""
        return sum(map(len, self._waiting))

    # --- workers

    def to_start(self, now: float) -> list[WorkerSlot]:
        """Return the empty slots in which a worker is to be started now, and mark these slots as starting."""
        due = [slot for slot in self.slots if slot.is_empty and slot.free_at <= now and not self.ended_by]
        for slot in due:
            slot.state = WorkerSlotState.STARTING
        return due

    def next_start(self) -> float:
        """Return the time at which the next empty slot gets a worker; infinite if no slot is empty."""
        return min((slot.free_at for slot in self.slots if slot.is_empty), default=math.inf)

    def mark_ready(self, slot: WorkerSlot, width: int) -> None:
        """Mark the slot's worker as ready to play this many episodes at once."""
        slot.state, slot.width = WorkerSlotState.READY, width

    def mark_waiting(self, slot: WorkerSlot) -> None:
        """Mark the slot's worker as unable to play before the next update of the weights."""
        slot.state = WorkerSlotState.WAITING

    def mark_lost(self, slot: WorkerSlot, now: float) -> list[Assignment]:
        """Mark the slot's worker as gone, and return the episodes that it played. They may be added again."""
        lost = list(slot.assignments)
        for assignment in lost:
            self._release_slot(assignment)
        slot.width, slot.kept = 0, False
        while slot.deaths and slot.deaths[0] <= now - HOUR_SECONDS:
            slot.deaths.popleft()
        slot.deaths.append(now)
        if len(slot.deaths) > MAX_RESTARTS:
            slot.state, slot.free_at = WorkerSlotState.RESTING, slot.deaths[0] + HOUR_SECONDS
        else:
            slot.state = WorkerSlotState.EMPTY
            slot.free_at = now + BACK_OFF_SECONDS * 2 ** (len(slot.deaths) - 1)
        return lost

    def mark_unplaced(self, slot: WorkerSlot, now: float) -> None:
        """Mark the slot's worker as one for which no machine had room. The start is tried again later."""
        slot.state, slot.free_at = WorkerSlotState.UNPLACED, now + UNPLACED_RETRY_SECONDS

    # --- episodes

    def add(self, assignment: Assignment) -> None:
        """Add an episode that waits for a slot; `give_out` assigns it."""
        self._queue_of(assignment).append(assignment)

    def remove(self, assignment: Assignment) -> None:
        """Remove an episode that is over or no longer wanted. May be called twice."""
        if assignment.slot is not None:
            self._release_slot(assignment)
            return
        queue = self._queue_of(assignment)
        if assignment in queue:
            queue.remove(assignment)

    def give_out(self) -> list[Assignment]:
        """Assign waiting episodes to free slots, and return the episodes that were assigned.

        Last tries come first, each on a worker without other episodes. Then come episodes whose worker died, and then
        the others in the order in which they were added.
        """
        last_chances, *others = self._waiting
        assigned = (
            list(self._assign_alone(last_chances, others_wait=any(others))) if last_chances or self._keeps else []
        )
        for queue in others:
            while queue and (slot := self._slot_for(queue[0])) is not None:
                assigned.append(self._assign(queue.popleft(), slot))
        return assigned

    def _assign_alone(self, last_chances: deque[Assignment], *, others_wait: bool) -> Iterator[Assignment]:
        """Assign last tries to idle workers, and keep busy workers for further last tries.

        A kept worker gets no other episodes.
        """
        ready = self.ready
        taken = [slot for slot in ready if any(assignment.last_chance for assignment in slot.assignments)]
        limit = max(1, len(ready) // KEPT_WORKER_RATIO) if others_wait else len(ready)
        # Slots with the fewest episodes come first. Among equal slots, the ones that are kept already come first.
        rest = sorted(
            set(ready).difference(taken), key=lambda slot: (len(slot.assignments), not slot.kept, slot.number)
        )
        wanted = min(len(last_chances), max(0, limit - len(taken)))
        for place, slot in enumerate(rest):
            slot.kept = place < wanted
            if slot.kept and not slot.assignments:
                yield self._assign(last_chances.popleft(), slot)
        self._keeps = bool(taken) or wanted > 0

    def _assign(self, assignment: Assignment, slot: WorkerSlot) -> Assignment:
        assignment.slot = slot
        slot.assignments.add(assignment)
        slot.groups[assignment.group] += 1
        return assignment

    def _slot_for(self, assignment: Assignment) -> WorkerSlot | None:
        free = list(self._free())
        if not free:
            return None
        idlest = min(slot.load for slot in free)
        # Rotate among slots with equal load, so that a new fleet does not fill from its first slot.
        self._turn += 1
        of_its_group = [
            slot
            for slot in free
            if slot.groups[assignment.group] and len(slot.assignments) <= idlest * slot.width + MAX_AFFINITY_IMBALANCE
        ]
        alike = of_its_group or [slot for slot in free if slot.load == idlest]
        return alike[self._turn % len(alike)]

    def _free(self) -> Iterator[WorkerSlot]:
        for slot in self.slots:
            if slot.state is WorkerSlotState.READY and not slot.kept and len(slot.assignments) < slot.width:
                yield slot

    def _queue_of(self, assignment: Assignment) -> deque[Assignment]:
        return self._waiting[0 if assignment.last_chance else 1 if assignment.again else 2]

    def _release_slot(self, assignment: Assignment) -> None:
        slot = assignment.slot
        assert slot is not None
        slot.assignments.discard(assignment)
        slot.groups[assignment.group] -= 1
        if not slot.groups[assignment.group]:
            del slot.groups[assignment.group]
        assignment.slot = None


class SlotQueue:
    """The episodes that wait for a slot."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._assigned: dict[Assignment, anyio.Event] = {}

    async def slot(self, assignment: Assignment) -> WorkerSlot:
        """Wait until a worker can play this episode, and return its slot."""
        while True:
            self._fleet.add(assignment)
            event = self._assigned[assignment] = anyio.Event()
            try:
                self.give_out()
                if assignment.slot is None:
                    await event.wait()
            finally:
                del self._assigned[assignment]
            if assignment.slot is not None:  # without a slot, the worker was lost before anything was sent
                return assignment.slot

    def give_out(self) -> None:
        """Assign waiting episodes to free slots."""
        for assignment in self._fleet.give_out():
            self._assigned[assignment].set()

    def remove(self, assignment: Assignment) -> None:
        """Remove an episode that is over or no longer wanted, and assign its slot to a waiting one."""
        self._fleet.remove(assignment)
        self.give_out()
