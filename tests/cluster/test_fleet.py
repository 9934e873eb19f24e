"""The books of a fleet, by rules that anything may happen in any order; no clock, no loop, no worker."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from runner.cluster.fleet import BACK_OFF_SECONDS, COMPANY, HOUR, KEPT_SHARE, RESTARTS, Fleet, Seat, SeatState, Ticket

MOST_BACK_OFF = BACK_OFF_SECONDS * 2**RESTARTS


class Books(RuleBasedStateMachine):
    """Workers start, join and die, episodes come and go, time passes."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(least=2, most=4)
        self.now = 0.0
        self.asked: dict[Ticket, None] = {}
        """Episodes that are not over."""
        self.starts: dict[Seat, list[float]] = {seat: [] for seat in self.fleet.seats}

    @rule(seconds=st.sampled_from([0.5, 3.0, 60.0, HOUR]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def workers_are_started(self) -> None:
        free_at = {seat: seat.free_at for seat in self.fleet.seats}
        for seat in self.fleet.to_start(self.now):
            assert free_at[seat] <= self.now
            self.starts[seat].append(self.now)
        assert self.fleet.next_start() > self.now

    @rule(number=st.integers(0, 3), width=st.integers(1, 3))
    def one_joins(self, number: int, width: int) -> None:
        seat = self.fleet.seats[number]
        if seat.state in (SeatState.STARTING, SeatState.WAITING):
            self.fleet.joined(seat, width)
            self.give_out()

    @rule(number=st.integers(0, 3))
    def one_waits_for_weights(self, number: int) -> None:
        seat = self.fleet.seats[number]
        if seat.state is SeatState.STARTING:
            self.fleet.waits(seat)
            self.give_out()

    @rule(number=st.integers(0, 3))
    def one_is_lost(self, number: int) -> None:
        seat = self.fleet.seats[number]
        if seat.state in (SeatState.STARTING, SeatState.WAITING, SeatState.READY):
            played = set(seat.tickets)
            lost = self.fleet.lost(seat, self.now)
            assert set(lost) == played
            for ticket in lost:
                assert ticket.seat is None
                ticket.again = True
                self.fleet.ask(ticket)
            self.give_out()

    @rule(number=st.integers(0, 3))
    def no_machine_takes_one(self, number: int) -> None:
        seat = self.fleet.seats[number]
        if seat.state is SeatState.STARTING:
            self.fleet.not_placed(seat, self.now)
            assert self.starts[seat].pop() <= self.now
            assert seat.free_at > self.now

    @rule(target=tickets, group=st.integers(0, 2), again=st.booleans(), last_chance=st.booleans())
    def one_is_asked_for(self, group: int, again: bool, last_chance: bool) -> Ticket:
        ticket = Ticket(group=group, again=again, last_chance=last_chance)
        self.asked[ticket] = None
        self.fleet.ask(ticket)
        self.give_out()
        return ticket

    @rule(ticket=consumes(tickets), twice=st.booleans())
    def one_is_over(self, ticket: Ticket, twice: bool) -> None:
        for _ in range(1 + twice):
            self.fleet.done(ticket)
        del self.asked[ticket]
        self.give_out()

    def give_out(self) -> None:
        before = {ticket for ticket in self.asked if ticket.seat is not None}
        seated = self.fleet.give_out()
        assert set(seated) == {ticket for ticket in self.asked if ticket.seat is not None} - before
        assert all(ticket.seat is not None and ticket.seat.state is SeatState.READY for ticket in seated)

    @invariant()
    def every_episode_waits_or_is_on_one_seat(self) -> None:
        seated = Counter(ticket for seat in self.fleet.seats for ticket in seat.tickets)
        assert all(count == 1 for count in seated.values())
        assert len(seated) + self.fleet.waiting == len(self.asked)
        for ticket in self.asked:
            assert (ticket.seat is not None) == (ticket in seated)

    @invariant()
    def a_seat_has_no_more_than_its_width_and_nothing_without_a_worker(self) -> None:
        for seat in self.fleet.seats:
            assert len(seat.tickets) <= seat.width
            assert seat.state is SeatState.READY or not seat.tickets
            assert seat.groups == Counter(ticket.group for ticket in seat.tickets)
        assert self.fleet.width == sum(seat.width for seat in self.fleet.seats)

    @invariant()
    def a_last_try_has_a_worker_to_itself(self) -> None:
        for seat in self.fleet.seats:
            assert len(seat.tickets) == 1 or not any(ticket.last_chance for ticket in seat.tickets)

    @invariant()
    def nobody_waits_while_there_is_room(self) -> None:
        waiting = [ticket for ticket in self.asked if ticket.seat is None]
        last_tries = sum(ticket.last_chance for ticket in waiting)
        kept = [seat for seat in self.fleet.ready if seat.kept]
        for_those = [seat for seat in kept if not any(ticket.last_chance for ticket in seat.tickets)]
        assert len(for_those) <= last_tries, "no more are kept than are waited for"
        assert all(seat.tickets for seat in for_those), "who waits for an empty worker has it"
        room = [seat for seat in self.fleet.ready if not seat.kept and len(seat.tickets) < seat.width]
        if len(waiting) > last_tries:
            assert not room
        assert kept or not last_tries or not self.fleet.ready

    @invariant()
    def within_an_hour_a_seat_gets_no_more_workers_than_promised(self) -> None:
        for starts in self.starts.values():
            for first, later in pairwise(starts[:: RESTARTS + 1]):
                assert later >= first + HOUR - MOST_BACK_OFF


test_the_books_hold_whatever_happens = Books.TestCase


def ready(*widths: int, least: int = 1) -> Fleet:
    fleet = Fleet(least, len(widths))
    for seat, width in zip(fleet.to_start(0.0), widths, strict=True):
        fleet.joined(seat, width)
    return fleet


def seated(fleet: Fleet, *tickets: Ticket) -> list[int]:
    for ticket in tickets:
        fleet.ask(ticket)
    fleet.give_out()
    return [ticket.seat.number for ticket in tickets if ticket.seat is not None]


def test_an_episode_goes_to_the_worker_with_the_smallest_share_of_its_places_taken() -> None:
    fleet = ready(8, 2)
    where = [number for n in range(10) for number in seated(fleet, Ticket(group=n))]
    assert Counter(where) == {0: 8, 1: 2}
    assert where[:5].count(1) == 1, "a worker of a fourth of the places gets a fifth of the first five"


def test_workers_alike_take_turns() -> None:
    fleet = ready(4, 4, 4, 4)
    assert len(set(seated(fleet, *(Ticket(group=n) for n in range(4))))) == 4


def test_the_episodes_of_a_task_keep_company_until_that_is_unfair() -> None:
    fleet = ready(16, 16)
    where = seated(fleet, *(Ticket(group="same") for _ in range(12)))
    assert where[: COMPANY + 1] == [where[0]] * (COMPANY + 1), "the first ones share a worker, and its prompt"
    assert max(Counter(where).values()) - min(Counter(where).values()) <= COMPANY + 1


def test_who_was_on_a_worker_that_died_goes_first_and_who_has_no_other_chance_before_that() -> None:
    fleet = ready(1)
    first = Ticket()
    waiting = [Ticket(), Ticket(again=True), Ticket(again=True, last_chance=True)]
    seated(fleet, first)
    seated(fleet, *waiting)
    order = []
    for _ in waiting:
        (now,) = fleet.seats[0].tickets
        fleet.done(now)
        (given,) = fleet.give_out()
        order.append(waiting.index(given))
    assert order == [2, 1, 0]


def test_a_last_try_waits_for_a_worker_that_plays_nothing_else() -> None:
    fleet = ready(4, 4)
    first = [Ticket(group=n) for n in range(4)]
    seated(fleet, *first)
    last = [Ticket(again=True, last_chance=True) for _ in range(2)]
    fresh = [Ticket(group=f"fresh {n}") for n in range(9)]
    assert seated(fleet, *last, *fresh) == [1 - kept_seat(fleet).number] * 2, "the other one is kept"
    for ticket in [each for each in first if each.seat is kept_seat(fleet)]:
        assert ticket.seat is not None
        fleet.done(ticket)
    assert fleet.give_out() == [last[0]]
    assert len(kept_seat(fleet).tickets) == 1
    fleet.done(last[0])
    assert fleet.give_out() == [last[1]], "the others wait until no last try does"
    fleet.done(last[1])
    assert len(fleet.give_out()) == 4
    assert not any(seat.kept for seat in fleet.seats)


def kept_seat(fleet: Fleet) -> Seat:
    (seat,) = (seat for seat in fleet.seats if seat.kept)
    return seat


def test_last_tries_take_every_worker_where_nobody_else_waits() -> None:
    fleet = ready(4, 4, 4)
    assert sorted(seated(fleet, *(Ticket(again=True, last_chance=True) for _ in range(4)))) == [0, 1, 2]


def test_a_fourth_of_the_workers_is_kept_for_last_tries_while_others_wait() -> None:
    fleet = ready(*(2 for _ in range(8)))
    last = [Ticket(again=True, last_chance=True) for _ in range(5)]
    seated(fleet, *last, *(Ticket(group=n) for n in range(20)))
    assert sum(seat.kept for seat in fleet.seats) == 8 // KEPT_SHARE
    assert sum(ticket.seat is not None for ticket in last) == 8 // KEPT_SHARE
    assert sum(len(seat.tickets) for seat in fleet.seats if not seat.kept) == 2 * 6


def test_a_worker_is_no_longer_kept_once_its_last_try_is_given_up() -> None:
    fleet = ready(2)
    seated(fleet, Ticket())
    last = Ticket(again=True, last_chance=True)
    assert seated(fleet, last, fresh := Ticket()) == []
    fleet.done(last)
    assert fleet.give_out() == [fresh]


def test_a_seat_waits_longer_after_each_death_and_rests_after_too_many_until_the_hour_is_over() -> None:
    fleet = Fleet(1, 1)
    (seat,) = fleet.seats
    now, waits = 0.0, []
    for _ in range(RESTARTS):
        assert fleet.to_start(now) == [seat]
        fleet.lost(seat, now)
        waits.append(fleet.next_start() - now)
        assert not fleet.hopeless
        now = fleet.next_start()
    assert waits == [BACK_OFF_SECONDS * 2**n for n in range(RESTARTS)]
    fleet.to_start(now)
    fleet.lost(seat, now)
    assert seat.state is SeatState.RESTING
    assert fleet.hopeless
    assert fleet.to_start(HOUR - 1) == []
    assert fleet.to_start(HOUR) == [seat]


def test_deaths_of_more_than_an_hour_ago_do_not_count() -> None:
    fleet = Fleet(1, 1)
    (seat,) = fleet.seats
    for hour in range(2 * RESTARTS + 2):
        assert fleet.to_start(2 * hour * HOUR) == [seat]
        fleet.lost(seat, 2 * hour * HOUR)
        assert fleet.next_start() == 2 * hour * HOUR + BACK_OFF_SECONDS


def test_there_are_enough_workers_when_the_least_are_ready() -> None:
    fleet = Fleet(2, 3)
    seats = fleet.to_start(0.0)
    assert (fleet.enough, fleet.width) == (False, 0)
    fleet.joined(seats[0], 4)
    assert not fleet.enough
    fleet.joined(seats[2], 4)
    assert (fleet.enough, fleet.width) == (True, 8)
    fleet.lost(seats[0], 0.0)
    assert (fleet.enough, fleet.hopeless) == (False, False)


def test_workers_that_wait_for_weights_count_among_the_least_while_one_plays() -> None:
    fleet = Fleet(2, 3)
    seats = fleet.to_start(0.0)
    fleet.waits(seats[0])
    fleet.waits(seats[1])
    assert (fleet.enough, fleet.width, len(fleet.behind)) == (False, 0, 2), "nobody would ever play"
    fleet.joined(seats[2], 4)
    assert (fleet.enough, fleet.width, len(fleet.ready)) == (True, 4, 1)
    fleet.lost(seats[0], 0.0)
    assert fleet.enough
    fleet.lost(seats[1], 0.0)
    assert not fleet.enough
