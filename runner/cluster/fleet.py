"""The fleet's books: which workers there are, who plays what, who is started again. Pure: no clock, no Ray, no loop."""

from __future__ import annotations

import enum
import math
from collections import Counter, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Fleet", "Seat", "SeatState", "Ticket"]

HOUR: Final = 3600.0

RESTARTS: Final = 3
"""So often within an hour a worker is started again in one seat."""

BACK_OFF_SECONDS: Final = 1.0
"""How long a seat stays empty after its worker's first death; twice as long after each further one."""

ROOM_SECONDS: Final = 2.0
"""How long a seat stays empty whose worker no machine took."""

KEPT_SHARE: Final = 4
"""While other episodes wait, one worker of so many, and at least one, is kept for last tries."""

COMPANY: Final = 2
"""An episode goes where others of its task are played while that worker has at most so many more than the idlest."""


class SeatState(enum.StrEnum):
    """What a seat for a worker is doing."""

    EMPTY = "empty"
    """No worker is there: none was started yet, or the last one died and the next one waits for its time."""
    UNPLACED = "unplaced"
    """No machine took its worker; the next one waits for its time."""
    STARTING = "starting"
    """A worker was asked for; it starts, or waits for a machine."""
    WAITING = "waiting"
    """Its worker has all but the weights of the others, which are nowhere to be read: it waits for the next ones."""
    READY = "ready"
    """Its worker plays."""
    RESTING = "resting"
    """Its workers died too often; the next one may be started when the first of those deaths is an hour ago."""


@dataclass(eq=False, slots=True)
class Ticket:
    """An episode that wants to be played."""

    group: Hashable = None
    """Episodes of one group begin with the same prompt, and are better played by one worker."""
    again: bool = False
    """Whether it was on a worker that died; it goes before those that never began."""
    last_chance: bool = False
    """Whether it fails for good if a worker dies under it once more. It has a worker to itself: what kills workers must
    not take those along that were only with it, and an episode that never began may be of that kind too."""
    seat: Seat | None = None
    """Where it is played; None while it waits."""


@dataclass(eq=False, slots=True)
class Seat:
    """Where one worker is, and after it the next."""

    number: int
    state: SeatState = SeatState.EMPTY
    width: int = 0
    """How many episodes it plays at once."""
    tickets: set[Ticket] = field(default_factory=set)
    """What it plays."""
    groups: Counter[Hashable] = field(default_factory=Counter)
    """How many of each group it plays."""
    kept: bool = False
    """Whether it is kept for a last try: it is given nothing else, and such a try as soon as it plays nothing."""
    deaths: deque[float] = field(default_factory=deque)
    """When its workers died, within the last hour."""
    free_at: float = 0.0
    """When the next worker may be started in it."""

    @property
    def is_empty(self) -> bool:
        """Whether no worker is there, and none starts."""
        return self.state in (SeatState.EMPTY, SeatState.UNPLACED, SeatState.RESTING)

    @property
    def load(self) -> float:
        """The share of its width that is taken."""
        return len(self.tickets) / self.width if self.width else math.inf


class Fleet:
    """The seats of a fleet, and the episodes on them.

    Args:
        least: with fewer workers the fleet does not begin.
        most: how many seats there are.
    """

    def __init__(self, least: int, most: int) -> None:
        self.least = least
        self.seats = [Seat(number) for number in range(most)]
        self._waiting: tuple[deque[Ticket], ...] = (deque(), deque(), deque())
        self._turn = 0
        self._keeps = False
        """Whether any seat was kept for a last try when seats were given out last."""

    # --- what there is

    @property
    def ready(self) -> list[Seat]:
        """The seats whose workers play."""
        return [seat for seat in self.seats if seat.state is SeatState.READY]

    @property
    def behind(self) -> list[Seat]:
        """The seats whose workers wait for the next weights."""
        return [seat for seat in self.seats if seat.state is SeatState.WAITING]

    @property
    def width(self) -> int:
        """How many episodes all workers play at once."""
        return sum(seat.width for seat in self.ready)

    @property
    def enough(self) -> bool:
        """Whether there are as many workers as there have to be; those that wait for weights count while one plays."""
        return bool(self.ready) and len(self.ready) + len(self.behind) >= self.least

    @property
    def hopeless(self) -> bool:
        """Whether there cannot be enough workers for a long time."""
        return sum(seat.state is not SeatState.RESTING for seat in self.seats) < self.least

    @property
    def waiting(self) -> int:
        """How many episodes wait for a worker."""
        return sum(map(len, self._waiting))

    # --- workers

    def to_start(self, now: float) -> list[Seat]:
        """Empty seats whose time has come; a worker is to be started in each."""
        due = [seat for seat in self.seats if seat.is_empty and seat.free_at <= now]
        for seat in due:
            seat.state = SeatState.STARTING
        return due

    def next_start(self) -> float:
        """When the next empty seat's time comes; infinite where there is none."""
        return min((seat.free_at for seat in self.seats if seat.is_empty), default=math.inf)

    def joined(self, seat: Seat, width: int) -> None:
        """The seat's worker is ready to play so many episodes at once."""
        seat.state, seat.width = SeatState.READY, width

    def waits(self, seat: Seat) -> None:
        """The seat's worker plays nothing before it has got the next weights."""
        seat.state = SeatState.WAITING

    def lost(self, seat: Seat, now: float) -> list[Ticket]:
        """The seat's worker is gone; gives what it played. Each of these may be asked for again."""
        lost = list(seat.tickets)
        for ticket in lost:
            self._unseat(ticket)
        seat.width, seat.kept = 0, False
        while seat.deaths and seat.deaths[0] <= now - HOUR:
            seat.deaths.popleft()
        seat.deaths.append(now)
        if len(seat.deaths) > RESTARTS:
            seat.state, seat.free_at = SeatState.RESTING, seat.deaths[0] + HOUR
        else:
            seat.state = SeatState.EMPTY
            seat.free_at = now + BACK_OFF_SECONDS * 2 ** (len(seat.deaths) - 1)
        return lost

    def not_placed(self, seat: Seat, now: float) -> None:
        """No machine took the seat's worker: it never was, and is asked for again in a while."""
        seat.state, seat.free_at = SeatState.UNPLACED, now + ROOM_SECONDS

    # --- episodes

    def ask(self, ticket: Ticket) -> None:
        """An episode wants to be played; `give_out` says where."""
        self._queue_of(ticket).append(ticket)

    def done(self, ticket: Ticket) -> None:
        """An episode is over, or is not to be played any more; twice is allowed."""
        if ticket.seat is not None:
            self._unseat(ticket)
            return
        queue = self._queue_of(ticket)
        if ticket in queue:
            queue.remove(ticket)

    def give_out(self) -> list[Ticket]:
        """Seat those that wait, as far as there is room; gives them, each with its seat.

        Those without another chance come first, each on a worker that plays nothing else; then those whose worker died;
        then the others, in the order in which they asked.
        """
        last_chances, *others = self._waiting
        seated = list(self._seat_alone(last_chances, others_wait=any(others))) if last_chances or self._keeps else []
        for queue in others:
            while queue and (seat := self._seat_for(queue[0])) is not None:
                seated.append(self._take_seat(queue.popleft(), seat))
        return seated

    def _seat_alone(self, last_chances: deque[Ticket], *, others_wait: bool) -> Iterator[Ticket]:
        """Seat those without another chance, and keep workers for them, which are given nothing else meanwhile."""
        ready = self.ready
        taken = [seat for seat in ready if any(ticket.last_chance for ticket in seat.tickets)]
        limit = max(1, len(ready) // KEPT_SHARE) if others_wait else len(ready)
        # The emptiest ones, and among those alike the ones that are kept already.
        rest = sorted(set(ready).difference(taken), key=lambda seat: (len(seat.tickets), not seat.kept, seat.number))
        wanted = min(len(last_chances), max(0, limit - len(taken)))
        for place, seat in enumerate(rest):
            seat.kept = place < wanted
            if seat.kept and not seat.tickets:
                yield self._take_seat(last_chances.popleft(), seat)
        self._keeps = bool(taken) or wanted > 0

    def _take_seat(self, ticket: Ticket, seat: Seat) -> Ticket:
        ticket.seat = seat
        seat.tickets.add(ticket)
        seat.groups[ticket.group] += 1
        return ticket

    def _seat_for(self, ticket: Ticket) -> Seat | None:
        free = list(self._free())
        if not free:
            return None
        idlest = min(seat.load for seat in free)
        # Who was asked longest ago among those alike, so that a fleet that just began does not fill up from its front.
        self._turn += 1
        of_its_group = [
            seat for seat in free if seat.groups[ticket.group] and len(seat.tickets) <= idlest * seat.width + COMPANY
        ]
        alike = of_its_group or [seat for seat in free if seat.load == idlest]
        return alike[self._turn % len(alike)]

    def _free(self) -> Iterator[Seat]:
        for seat in self.seats:
            if seat.state is SeatState.READY and not seat.kept and len(seat.tickets) < seat.width:
                yield seat

    def _queue_of(self, ticket: Ticket) -> deque[Ticket]:
        return self._waiting[0 if ticket.last_chance else 1 if ticket.again else 2]

    def _unseat(self, ticket: Ticket) -> None:
        seat = ticket.seat
        assert seat is not None
        seat.tickets.discard(ticket)
        seat.groups[ticket.group] -= 1
        if not seat.groups[ticket.group]:
            del seat.groups[ticket.group]
        ticket.seat = None
