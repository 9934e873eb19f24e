"""Bookkeeping of a fleet, with events in any order, without clock, event loop and workers."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from runner.cluster.fleet import (
    BACK_OFF_SECONDS,
    HOUR_SECONDS,
    KEPT_WORKER_RATIO,
    MAX_AFFINITY_IMBALANCE,
    MAX_RESTARTS,
    Assignment,
    Fleet,
    WorkerSlot,
    WorkerSlotState,
)

MOST_BACK_OFF = BACK_OFF_SECONDS * 2**MAX_RESTARTS


class Books(RuleBasedStateMachine):
    """State machine: workers start, join and die, episodes begin and end, and time passes."""

    assignments = Bundle("assignments")

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(least=2, most=4)
        self.now = 0.0
        self.asked: dict[Assignment, None] = {}
        """Episodes that have not ended."""
        self.starts: dict[WorkerSlot, list[float]] = {slot: [] for slot in self.fleet.slots}

    @rule(seconds=st.sampled_from([0.5, 3.0, 60.0, HOUR_SECONDS]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def workers_are_started(self) -> None:
        free_at = {slot: slot.free_at for slot in self.fleet.slots}
        for slot in self.fleet.to_start(self.now):
            assert free_at[slot] <= self.now
            self.starts[slot].append(self.now)
        assert self.fleet.next_start() > self.now

    @rule(number=st.integers(0, 3), width=st.integers(1, 3))
    def one_joins(self, number: int, width: int) -> None:
        slot = self.fleet.slots[number]
        if slot.state in (WorkerSlotState.STARTING, WorkerSlotState.WAITING):
            self.fleet.mark_ready(slot, width)
            self.give_out()

    @rule(number=st.integers(0, 3))
    def one_waits_for_weights(self, number: int) -> None:
        slot = self.fleet.slots[number]
        if slot.state is WorkerSlotState.STARTING:
            self.fleet.mark_waiting(slot)
            self.give_out()

    @rule(number=st.integers(0, 3))
    def one_is_lost(self, number: int) -> None:
        slot = self.fleet.slots[number]
        if slot.state in (WorkerSlotState.STARTING, WorkerSlotState.WAITING, WorkerSlotState.READY):
            played = set(slot.assignments)
            lost = self.fleet.mark_lost(slot, self.now)
            assert set(lost) == played
            for assignment in lost:
                assert assignment.slot is None
                assignment.again = True
                self.fleet.add(assignment)
            self.give_out()

    @rule(number=st.integers(0, 3))
    def no_machine_takes_one(self, number: int) -> None:
        slot = self.fleet.slots[number]
        if slot.state is WorkerSlotState.STARTING:
            self.fleet.mark_unplaced(slot, self.now)
            assert self.starts[slot].pop() <= self.now
            assert slot.free_at > self.now

    @rule(target=assignments, group=st.integers(0, 2), again=st.booleans(), last_chance=st.booleans())
    def one_is_asked_for(self, group: int, again: bool, last_chance: bool) -> Assignment:
        assignment = Assignment(group=group, again=again, last_chance=last_chance)
        self.asked[assignment] = None
        self.fleet.add(assignment)
        self.give_out()
        return assignment

    @rule(assignment=consumes(assignments), twice=st.booleans())
    def one_is_over(self, assignment: Assignment, twice: bool) -> None:
        for _ in range(1 + twice):
            self.fleet.remove(assignment)
        del self.asked[assignment]
        self.give_out()

    def give_out(self) -> None:
        before = {assignment for assignment in self.asked if assignment.slot is not None}
        assigned = self.fleet.give_out()
        assert set(assigned) == {assignment for assignment in self.asked if assignment.slot is not None} - before
        assert all(
            assignment.slot is not None and assignment.slot.state is WorkerSlotState.READY for assignment in assigned
        )

    @invariant()
    def every_episode_waits_or_is_on_one_seat(self) -> None:
        assigned = Counter(assignment for slot in self.fleet.slots for assignment in slot.assignments)
        assert all(count == 1 for count in assigned.values())
        assert len(assigned) + self.fleet.waiting == len(self.asked)
        for assignment in self.asked:
            assert (assignment.slot is not None) == (assignment in assigned)

    @invariant()
    def a_seat_has_no_more_than_its_width_and_nothing_without_a_worker(self) -> None:
        for slot in self.fleet.slots:
            assert len(slot.assignments) <= slot.width
            assert slot.state is WorkerSlotState.READY or not slot.assignments
            assert slot.groups == Counter(assignment.group for assignment in slot.assignments)
        assert self.fleet.width == sum(slot.width for slot in self.fleet.slots)

    @invariant()
    def a_last_try_has_a_worker_to_itself(self) -> None:
        for slot in self.fleet.slots:
            assert len(slot.assignments) == 1 or not any(assignment.last_chance for assignment in slot.assignments)

    @invariant()
    def nobody_waits_while_there_is_room(self) -> None:
        waiting = [assignment for assignment in self.asked if assignment.slot is None]
        last_tries = sum(assignment.last_chance for assignment in waiting)
        kept = [slot for slot in self.fleet.ready if slot.kept]
        for_those = [slot for slot in kept if not any(assignment.last_chance for assignment in slot.assignments)]
        assert len(for_those) <= last_tries, "more workers are kept free than last tries wait"
        assert all(slot.assignments for slot in for_those), "an empty worker is kept free, and no last try plays on it"
        room = [slot for slot in self.fleet.ready if not slot.kept and len(slot.assignments) < slot.width]
        if len(waiting) > last_tries:
            assert not room
        assert kept or not last_tries or not self.fleet.ready

    @invariant()
    def within_an_hour_a_seat_gets_no_more_workers_than_promised(self) -> None:
        for starts in self.starts.values():
            for first, later in pairwise(starts[:: MAX_RESTARTS + 1]):
                assert later >= first + HOUR_SECONDS - MOST_BACK_OFF


test_the_books_hold_whatever_happens = Books.TestCase


def ready(*widths: int, least: int = 1) -> Fleet:
    fleet = Fleet(least, len(widths))
    for slot, width in zip(fleet.to_start(0.0), widths, strict=True):
        fleet.mark_ready(slot, width)
    return fleet


def assigned(fleet: Fleet, *assignments: Assignment) -> list[int]:
    for assignment in assignments:
        fleet.add(assignment)
    fleet.give_out()
    return [assignment.slot.number for assignment in assignments if assignment.slot is not None]


def test_episode_goes_to_the_least_loaded_worker() -> None:
    fleet = ready(8, 2)
    where = [number for n in range(10) for number in assigned(fleet, Assignment(group=n))]
    assert Counter(where) == {0: 8, 1: 2}
    assert where[:5].count(1) == 1, "a worker with 2 of 10 places gets one of five episodes"


def test_equal_workers_get_one_episode_each() -> None:
    fleet = ready(4, 4, 4, 4)
    assert len(set(assigned(fleet, *(Assignment(group=n) for n in range(4))))) == 4


def test_the_episodes_of_a_task_keep_company_until_that_is_unfair() -> None:
    fleet = ready(16, 16)
    where = assigned(fleet, *(Assignment(group="same") for _ in range(12)))
    assert where[: MAX_AFFINITY_IMBALANCE + 1] == [where[0]] * (MAX_AFFINITY_IMBALANCE + 1), (
        "the first episodes of a task share a worker and its cached prompt"
    )
    assert max(Counter(where).values()) - min(Counter(where).values()) <= MAX_AFFINITY_IMBALANCE + 1


def test_episodes_of_dead_workers_go_first_after_last_chances() -> None:
    fleet = ready(1)
    first = Assignment()
    waiting = [Assignment(), Assignment(again=True), Assignment(again=True, last_chance=True)]
    assigned(fleet, first)
    assigned(fleet, *waiting)
    order = []
    for _ in waiting:
        (now,) = fleet.slots[0].assignments
        fleet.remove(now)
        (given,) = fleet.give_out()
        order.append(waiting.index(given))
    assert order == [2, 1, 0]


def test_a_last_try_waits_for_a_worker_that_plays_nothing_else() -> None:
    fleet = ready(4, 4)
    first = [Assignment(group=n) for n in range(4)]
    assigned(fleet, *first)
    last = [Assignment(again=True, last_chance=True) for _ in range(2)]
    fresh = [Assignment(group=f"fresh {n}") for n in range(9)]
    assert assigned(fleet, *last, *fresh) == [1 - kept_seat(fleet).number] * 2, (
        "new episodes use the worker that is not kept free"
    )
    for assignment in [each for each in first if each.slot is kept_seat(fleet)]:
        assert assignment.slot is not None
        fleet.remove(assignment)
    assert fleet.give_out() == [last[0]]
    assert len(kept_seat(fleet).assignments) == 1
    fleet.remove(last[0])
    assert fleet.give_out() == [last[1]], "other episodes wait until no last try waits"
    fleet.remove(last[1])
    assert len(fleet.give_out()) == 4
    assert not any(slot.kept for slot in fleet.slots)


def kept_seat(fleet: Fleet) -> WorkerSlot:
    (slot,) = (slot for slot in fleet.slots if slot.kept)
    return slot


def test_last_tries_take_every_worker_if_nothing_else_waits() -> None:
    fleet = ready(4, 4, 4)
    assert sorted(assigned(fleet, *(Assignment(again=True, last_chance=True) for _ in range(4)))) == [0, 1, 2]


def test_quarter_of_the_workers_is_kept_for_last_tries() -> None:
    fleet = ready(*(2 for _ in range(8)))
    last = [Assignment(again=True, last_chance=True) for _ in range(5)]
    assigned(fleet, *last, *(Assignment(group=n) for n in range(20)))
    assert sum(slot.kept for slot in fleet.slots) == 8 // KEPT_WORKER_RATIO
    assert sum(assignment.slot is not None for assignment in last) == 8 // KEPT_WORKER_RATIO
    assert sum(len(slot.assignments) for slot in fleet.slots if not slot.kept) == 2 * 6


def test_a_worker_is_no_longer_kept_once_its_last_try_is_given_up() -> None:
    fleet = ready(2)
    assigned(fleet, Assignment())
    last = Assignment(again=True, last_chance=True)
    assert assigned(fleet, last, fresh := Assignment()) == []
    fleet.remove(last)
    assert fleet.give_out() == [fresh]


def test_slot_waits_longer_after_each_death_and_rests_for_an_hour() -> None:
    fleet = Fleet(1, 1)
    (slot,) = fleet.slots
    now, waits = 0.0, []
    for _ in range(MAX_RESTARTS):
        assert fleet.to_start(now) == [slot]
        fleet.mark_lost(slot, now)
        waits.append(fleet.next_start() - now)
        assert not fleet.hopeless
        now = fleet.next_start()
    assert waits == [BACK_OFF_SECONDS * 2**n for n in range(MAX_RESTARTS)]
    fleet.to_start(now)
    fleet.mark_lost(slot, now)
    assert slot.state is WorkerSlotState.RESTING
    assert fleet.hopeless
    assert fleet.to_start(HOUR_SECONDS - 1) == []
    assert fleet.to_start(HOUR_SECONDS) == [slot]


def test_deaths_of_more_than_an_hour_ago_do_not_count() -> None:
    fleet = Fleet(1, 1)
    (slot,) = fleet.slots
    for hour in range(2 * MAX_RESTARTS + 2):
        assert fleet.to_start(2 * hour * HOUR_SECONDS) == [slot]
        fleet.mark_lost(slot, 2 * hour * HOUR_SECONDS)
        assert fleet.next_start() == 2 * hour * HOUR_SECONDS + BACK_OFF_SECONDS


def test_fleet_has_enough_workers_once_the_least_are_ready() -> None:
    fleet = Fleet(2, 3)
    slots = fleet.to_start(0.0)
    assert (fleet.enough, fleet.width) == (False, 0)
    fleet.mark_ready(slots[0], 4)
    assert not fleet.enough
    fleet.mark_ready(slots[2], 4)
    assert (fleet.enough, fleet.width) == (True, 8)
    fleet.mark_lost(slots[0], 0.0)
    assert (fleet.enough, fleet.hopeless) == (False, False)


def test_workers_that_wait_for_weights_count_while_one_plays() -> None:
    fleet = Fleet(2, 3)
    slots = fleet.to_start(0.0)
    fleet.mark_waiting(slots[0])
    fleet.mark_waiting(slots[1])
    assert (fleet.enough, fleet.width, len(fleet.waiting_for_weights)) == (False, 0, 2), "no worker would ever play"
    fleet.mark_ready(slots[2], 4)
    assert (fleet.enough, fleet.width, len(fleet.ready)) == (True, 4, 1)
    fleet.mark_lost(slots[0], 0.0)
    assert fleet.enough
    fleet.mark_lost(slots[1], 0.0)
    assert not fleet.enough
