"""The queue of episodes that wait for a slot; each task sleeps until it has one."""

from __future__ import annotations

import anyio

from runner.cluster.fleet import Assignment, Fleet, WorkerSlot

__all__ = ["SlotQueue"]


class SlotQueue:
    """The episodes that wait for a slot."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._assigned: dict[Assignment, anyio.Event] = {}

    async def slot(self, assignment: Assignment) -> WorkerSlot:
        """Wait until a worker can play this episode, and return its slot."""
        while True:
            self._fleet.ask(assignment)
            event = self._assigned[assignment] = anyio.Event()
            try:
                self.give_out()
                if assignment.slot is None:
                    await event.wait()
            finally:
                del self._assigned[assignment]
            if assignment.slot is not None:  # otherwise its worker was lost before anything was sent
                return assignment.slot

    def give_out(self) -> None:
        """Assign waiting episodes to free slots."""
        for assignment in self._fleet.give_out():
            self._assigned[assignment].set()

    def done(self, assignment: Assignment) -> None:
        """Release the slot of an episode that is over or no longer wanted."""
        self._fleet.done(assignment)
        self.give_out()
