"""Those who wait for a seat of the fleet: each sleeps until it has one."""

from __future__ import annotations

import anyio

from runner.cluster.fleet import Fleet, Seat, Ticket

__all__ = ["Seating"]


class Seating:
    """Who waits to be seated by the fleet's books."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._seated: dict[Ticket, anyio.Event] = {}

    async def seat(self, ticket: Ticket) -> Seat:
        """Wait until a worker can play this, and give its seat."""
        while True:
            self._fleet.ask(ticket)
            event = self._seated[ticket] = anyio.Event()
            try:
                self.give_out()
                if ticket.seat is None:
                    await event.wait()
            finally:
                del self._seated[ticket]
            if ticket.seat is not None:  # else its worker was lost before anything was sent there
                return ticket.seat

    def give_out(self) -> None:
        """Seat who waits, as far as there is room."""
        for ticket in self._fleet.give_out():
            self._seated[ticket].set()

    def done(self, ticket: Ticket) -> None:
        """An episode is over, or is not to be played any more."""
        self._fleet.done(ticket)
        self.give_out()
