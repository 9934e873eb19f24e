"""The admission gate: places, order, room, and nothing lost when anybody is cancelled anywhere."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import anyio.abc
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.engines.base import Session
from runner.engines.gate import AdmissionGate
from runner.errors import EngineDead
from tests import sweeps


@dataclass
class Hall:
    """Requests at a gate, each a task that stays inside until it is let go."""

    gate: AdmissionGate
    tasks: anyio.abc.TaskGroup
    entered: list[int] = field(default_factory=list)
    inside: list[int] = field(default_factory=list)
    scopes: dict[int, anyio.CancelScope] = field(default_factory=dict)
    releases: dict[int, anyio.Event] = field(default_factory=dict)

    async def arrive(self, number: int, session: Session, tokens: int = 1) -> None:
        self.tasks.start_soon(self._visit, number, session, tokens)
        await anyio.wait_all_tasks_blocked()

    async def _visit(self, number: int, session: Session, tokens: int) -> None:
        self.releases[number] = anyio.Event()
        with anyio.CancelScope() as self.scopes[number]:
            await self.gate.enter(session, tokens)
            self.entered.append(number)
            self.inside.append(number)
            assert len(self.inside) <= self.gate.places
            try:
                await self.releases[number].wait()
            finally:
                self.inside.remove(number)
                self.gate.leave(session, tokens)

    async def release(self, number: int) -> None:
        self.releases[number].set()
        await anyio.wait_all_tasks_blocked()

    async def cancel(self, number: int) -> None:
        self.scopes[number].cancel()
        await anyio.wait_all_tasks_blocked()


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_never_more_than_its_places_are_inside() -> None:
    async with anyio.create_task_group() as tasks:
        hall = Hall(AdmissionGate(2, room=100), tasks)
        for number in range(5):
            await hall.arrive(number, Session())
        assert hall.inside == [0, 1]
        assert (hall.gate.inside, hall.gate.waiting, hall.gate.first_waiting) == (2, 3, 3)
        for number in range(5):
            await hall.release(number)
        assert hall.entered == [0, 1, 2, 3, 4]
    assert (hall.gate.inside, hall.gate.waiting) == (0, 0)


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_late_requests_go_before_first_ones_and_each_in_order() -> None:
    async with anyio.create_task_group() as tasks:
        hall = Hall(AdmissionGate(1, room=100), tasks)
        await hall.arrive(0, Session())
        await hall.arrive(1, Session())
        await hall.arrive(2, Session(late=True))
        await hall.arrive(3, Session())
        await hall.arrive(4, Session(late=True))
        for number in (0, 2, 4, 1, 3):
            await hall.release(number)
        assert hall.entered == [0, 2, 4, 1, 3]


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_a_session_is_late_once_it_was_admitted() -> None:
    gate = AdmissionGate(1, room=100)
    session = Session()
    await gate.enter(session, 10)
    assert session.late
    gate.leave(session, 20)
    assert (gate.kept, gate.live, session.tokens) == (20, 1, 20)


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_room_holds_back_first_requests_only() -> None:
    async with anyio.create_task_group() as tasks:
        hall = Hall(AdmissionGate(4, room=100), tasks)
        early = Session()
        await hall.arrive(0, early, tokens=70)
        await hall.arrive(1, Session(), tokens=40)
        assert hall.inside == [0]
        await hall.arrive(2, Session(late=True), tokens=500)
        assert hall.inside == [0, 2]
        await hall.release(0)
        assert hall.inside == [2], "a session keeps its room between its turns"
        await hall.release(2)
        hall.gate.close(early)
        await anyio.wait_all_tasks_blocked()
        assert hall.inside == [], "the judge's session is live and too large"
        await hall.cancel(1)
    assert hall.gate.inside == 0


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_a_first_request_gets_in_when_no_session_is_live() -> None:
    gate = AdmissionGate(1, room=100)
    await gate.enter(Session(), 10_000)
    assert gate.inside == 1


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_closing_a_session_wakes_who_waits_for_room() -> None:
    async with anyio.create_task_group() as tasks:
        hall = Hall(AdmissionGate(4, room=100), tasks)
        session = Session()
        await hall.arrive(0, session, tokens=100)
        await hall.release(0)
        await hall.arrive(1, Session(), tokens=100)
        assert hall.inside == []
        hall.gate.close(session)
        hall.gate.close(session)
        await anyio.wait_all_tasks_blocked()
        assert hall.inside == [1]
        await hall.release(1)
    assert hall.gate.kept == 100


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_room_is_counted_in_whole_blocks() -> None:
    gate = AdmissionGate(1, room=100, block=32)
    await gate.enter(Session(), 33)
    assert gate.kept == 64


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_a_closed_session_cannot_enter() -> None:
    gate = AdmissionGate(1, room=100)
    session = Session()
    gate.close(session)
    with pytest.raises(RuntimeError, match="closed"):
        await gate.enter(session, 1)
    assert gate.inside == 0


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_a_cancelled_giant_no_longer_blocks_those_behind_it() -> None:
    async with anyio.create_task_group() as tasks:
        hall = Hall(AdmissionGate(4, room=100), tasks)
        await hall.arrive(0, Session(), tokens=50)
        await hall.arrive(1, Session(), tokens=80)
        await hall.arrive(2, Session(), tokens=20)
        assert hall.inside == [0]
        await hall.cancel(1)
        assert hall.inside == [0, 2]
        await hall.release(0)
        await hall.release(2)


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_failure_wakes_everybody_and_lets_nobody_in() -> None:
    gate = AdmissionGate(1, room=100)
    failed: list[str] = []

    async def visit() -> None:
        try:
            await gate.enter(Session(), 1)
        except EngineDead as error:
            failed.append(str(error))

    await gate.enter(Session(), 1)
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(visit)
        await anyio.wait_all_tasks_blocked()
        gate.fail(lambda: EngineDead("it died"))
    await visit()
    assert failed == ["it died"] * 4
    assert (gate.inside, gate.waiting) == (1, 0)


def test_cancellation_between_admission_and_wake_up_gives_the_place_back() -> None:
    async def main() -> None:
        gate = AdmissionGate(1, room=100)
        holder, caught, third = Session(), Session(), Session()
        await gate.enter(holder, 10)
        cancelled = asyncio.ensure_future(gate.enter(caught, 20))
        behind = asyncio.ensure_future(gate.enter(third, 30))
        await asyncio.sleep(0)
        gate.leave(holder, 10)
        assert caught.late, "admitted, though its task has not run yet"
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await behind
        assert (caught.late, third.late) == (False, True)
        assert (gate.inside, gate.kept, gate.live) == (1, 40, 2)

    asyncio.run(main())


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_a_cancelled_caller_does_not_enter() -> None:
    gate = AdmissionGate(1, room=100)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await gate.enter(Session(), 1)
    assert scope.cancelled_caught
    assert (gate.inside, gate.waiting) == (0, 0)


class Rules:
    """The gate's rules written down naively: what must be inside, and who waits."""

    def __init__(self, places: int, room: int) -> None:
        self.places, self.room = places, room
        self.kept: dict[int, int] = {}
        self.late: set[int] = set()
        self.queue: list[tuple[int, int, int]] = []
        self.inside: dict[int, tuple[int, int]] = {}
        self.entered: list[int] = []

    def arrive(self, number: int, session: int, tokens: int) -> None:
        self.queue.append((number, session, tokens))
        self.settle()

    def settle(self) -> None:
        while len(self.inside) < self.places and (visitor := self.next()) is not None:
            number, session, tokens = visitor
            self.queue.remove(visitor)
            self.inside[number] = (session, tokens)
            self.late.add(session)
            self.kept[session] = tokens
            self.entered.append(number)

    def next(self) -> tuple[int, int, int] | None:
        for visitor in self.queue:
            if visitor[1] in self.late:
                return visitor
        for visitor in self.queue:
            return visitor if not self.kept or sum(self.kept.values()) + visitor[2] <= self.room else None
        return None

    def drop(self, number: int) -> None:
        self.inside.pop(number, None)
        self.queue = [visitor for visitor in self.queue if visitor[0] != number]
        self.settle()

    def close(self, session: int) -> None:
        self.kept.pop(session, None)
        self.settle()


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "release", "cancel", "close"]), st.integers(0, 5), st.integers(1, 60)
    ),
    max_size=40,
)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@settings(max_examples=sweeps.times(60, 20))
@given(places=st.integers(1, 3), operations=OPERATIONS)
def test_any_history_obeys_the_rules(backend: str, places: int, operations: list[tuple[str, int, int]]) -> None:
    anyio.run(_play, places, operations, backend=backend)


async def _play(places: int, operations: list[tuple[str, int, int]]) -> None:
    rules = Rules(places, room=100)
    sessions: list[Session] = []
    busy: dict[int, int] = {}  # a session has one request at a time, as a conversation has

    async with anyio.create_task_group() as tasks:
        hall = Hall(AdmissionGate(places, room=100), tasks)
        for number, (operation, choice, tokens) in enumerate(operations):
            if operation == "arrive":
                free = [index for index, session in enumerate(sessions) if index not in busy and not session.closed]
                index = free[choice] if choice < len(free) else len(sessions)
                if index == len(sessions):
                    sessions.append(Session())
                busy[index] = number
                rules.arrive(number, index, tokens)
                await hall.arrive(number, sessions[index], tokens)
            elif operation == "close":
                idle = [index for index in range(len(sessions)) if index not in busy]
                if idle:
                    index = idle[choice % len(idle)]
                    rules.close(index)
                    hall.gate.close(sessions[index])
                    await anyio.wait_all_tasks_blocked()
            else:
                chosen = list(rules.inside) if operation == "release" else list(busy.values())
                if chosen:
                    visitor = chosen[choice % len(chosen)]
                    busy = {index: other for index, other in busy.items() if other != visitor}
                    rules.drop(visitor)
                    await (hall.release if operation == "release" else hall.cancel)(visitor)
            assert hall.entered == rules.entered
            assert set(hall.inside) == set(rules.inside)
            assert (hall.gate.inside, hall.gate.waiting) == (len(rules.inside), len(rules.queue))
            assert (hall.gate.kept, hall.gate.live) == (sum(rules.kept.values()), len(rules.kept))
        tasks.cancel_scope.cancel()
    assert (hall.gate.inside, hall.gate.waiting) == (0, 0)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@settings(max_examples=sweeps.times(40, 15))
@given(moments=st.lists(st.integers(0, 8), min_size=8, max_size=8), places=st.integers(1, 3))
def test_cancelling_at_any_moment_loses_no_place_and_no_wake_up(backend: str, moments: list[int], places: int) -> None:
    anyio.run(_cancel_at, moments, places, backend=backend)


async def _cancel_at(moments: list[int], places: int) -> None:
    gate = AdmissionGate(places, room=1000)
    served: list[int] = []

    async def visit(number: int, scope: anyio.CancelScope) -> None:
        session = Session()
        with scope:
            for _ in range(3):
                await gate.enter(session, 1)
                try:
                    assert gate.inside <= places
                    await checkpoint()
                finally:
                    gate.leave(session, 1)
            served.append(number)
        gate.close(session)

    async def cancel_after(steps: int, cancel: Callable[[], None]) -> None:
        for _ in range(steps):
            await checkpoint()
        cancel()

    with anyio.fail_after(30):  # a watchdog: a lost wake-up would wait for ever
        async with anyio.create_task_group() as tasks:
            for number, steps in enumerate(moments):
                scope = anyio.CancelScope()
                tasks.start_soon(visit, number, scope)
                if number % 2:
                    tasks.start_soon(cancel_after, steps, scope.cancel)
    assert {0, 2, 4, 6} <= set(served)
    assert (gate.inside, gate.waiting, gate.kept, gate.live) == (0, 0, 0, 0)


# --- data-parallel ranks


def ranks_of(sessions: list[Session]) -> list[int | None]:
    return [session.affinity.rank for session in sessions]


@pytest.mark.anyio
async def test_a_first_request_goes_to_the_rank_that_keeps_least_and_its_session_stays_there() -> None:
    gate = AdmissionGate(8, room=800, ranks=2)
    large, small, third, fourth = sessions = [Session() for _ in range(4)]
    for session, tokens in ((large, 90), (small, 20), (third, 30), (fourth, 30)):
        await gate.enter(session, tokens)
    assert ranks_of(sessions) == [0, 1, 1, 1], "90 are kept on one, and 80 on the other"
    assert (gate.ranks, gate.inside, gate.kept, gate.live) == ((1, 3), 4, 170, 4)

    gate.leave(small, 20)
    gate.close(large)
    await gate.enter(small, 200)
    assert ranks_of([small]) == [1], "though nothing is kept on the other one"


@pytest.mark.anyio
async def test_a_late_request_waits_for_its_own_rank_and_a_first_one_takes_the_place_that_is_free() -> None:
    async with anyio.create_task_group() as tasks:
        hall = Hall(AdmissionGate(2, room=100, ranks=2), tasks)
        bound, other, new = Session(), Session(), Session()
        await hall.arrive(0, bound)
        await hall.release(0)
        hall.gate.close(bound)
        beside = Session(late=True, affinity=bound.affinity)
        await hall.arrive(1, other, tokens=50)
        assert ranks_of([bound, other]) == [0, 0]
        await hall.arrive(2, beside)
        assert hall.inside == [1], "the other rank has a place, and nothing of it in its cache"
        await hall.arrive(3, new)
        assert hall.inside == [1, 3]
        await hall.release(1)
        assert hall.inside == [3, 2]
        for number in (2, 3):
            await hall.release(number)


@pytest.mark.anyio
async def test_sessions_of_one_episode_are_on_one_rank_whichever_of_them_is_let_in_first() -> None:
    async with anyio.create_task_group() as tasks:
        hall = Hall(AdmissionGate(2, room=100, ranks=2), tasks)
        holders = [Session(), Session()]
        for number, holder in enumerate(holders):
            await hall.arrive(number, holder, tokens=10 + number)
        agent = Session()
        judges = [Session(late=True, affinity=agent.affinity) for _ in range(3)]
        for number, judge in enumerate(judges, start=2):
            await hall.arrive(number, judge)
        await hall.arrive(5, agent)
        await hall.release(1)
        assert hall.inside == [0, 2]
        await hall.release(0)
        assert hall.inside == [2], "the rank that is free has nothing of the episode"
        for number in (2, 3, 4, 5):
            await hall.release(number)
        assert hall.entered == [0, 1, 2, 3, 4, 5]
        assert set(ranks_of([agent, *judges])) == {1}


@pytest.mark.anyio
async def test_a_late_request_without_a_rank_is_not_overtaken_by_those_that_came_after_it() -> None:
    async with anyio.create_task_group() as tasks:
        hall = Hall(AdmissionGate(2, room=100, ranks=2), tasks)
        first, second = Session(), Session()
        await hall.arrive(0, first)
        await hall.arrive(1, second)
        await hall.arrive(2, Session(late=True))
        await hall.arrive(3, Session(late=True, affinity=first.affinity))
        await hall.arrive(4, Session())
        await hall.release(0)
        assert hall.inside == [1, 2]
        await hall.release(2)
        assert hall.inside == [1, 3]
        for number in (1, 3, 4):
            await hall.release(number)


@pytest.mark.anyio
async def test_room_is_each_ranks_own() -> None:
    async with anyio.create_task_group() as tasks:
        hall = Hall(AdmissionGate(8, room=200, ranks=2), tasks)
        for number, tokens in enumerate((70, 60)):
            await hall.arrive(number, Session(), tokens=tokens)
        await hall.arrive(2, Session(), tokens=50)
        assert hall.inside == [0, 1], "there are 70 left in all, and nowhere 50"
        await hall.cancel(2)
        await hall.arrive(3, Session(), tokens=40)
        assert hall.inside == [0, 1, 3]
        for number in (0, 1, 3):
            await hall.release(number)


OF_EPISODES = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "arrive", "release", "cancel", "close"]),
        st.integers(0, 5),
        st.integers(1, 60),
    ),
    max_size=50,
)


@settings(max_examples=sweeps.times(80, 25))
@given(ranks=st.integers(2, 3), each=st.integers(1, 2), operations=OF_EPISODES)
def test_with_ranks_no_episode_moves_no_rank_is_overfull_and_nobody_waits_for_nothing(
    ranks: int, each: int, operations: list[tuple[str, int, int]]
) -> None:
    anyio.run(_play_on_ranks, ranks, each, operations)


async def _play_on_ranks(ranks: int, each: int, operations: list[tuple[str, int, int]]) -> None:
    gate = AdmissionGate(ranks * each, room=100 * ranks, ranks=ranks)
    sessions: list[Session] = []
    visits: dict[int, tuple[Session, int]] = {}
    found: dict[int, int] = {}  # the rank of an episode, by what its sessions share

    async with anyio.create_task_group() as tasks:
        hall = Hall(gate, tasks)
        for number, (operation, choice, tokens) in enumerate(operations):
            busy = {id(session) for session, _ in visits.values()}
            idle = [session for session in sessions if id(session) not in busy and not session.closed]
            if operation == "arrive":
                # One that was here, another one of its episode, or the first of a new one.
                if choice < len(idle):
                    session = idle[choice]
                else:
                    again = sessions and choice % 2
                    session = Session(late=True, affinity=sessions[-1].affinity) if again else Session()
                    sessions.append(session)
                visits[number] = (session, tokens)
                await hall.arrive(number, session, tokens)
            elif operation == "close" and idle:
                gate.close(idle[choice % len(idle)])
                await anyio.wait_all_tasks_blocked()
            elif operation in ("release", "cancel"):
                chosen = list(hall.inside) if operation == "release" else list(visits)
                if chosen:
                    visitor = chosen[choice % len(chosen)]
                    del visits[visitor]
                    await (hall.release if operation == "release" else hall.cancel)(visitor)
            _assert_sound(gate, hall, visits, sessions, found, each)
        tasks.cancel_scope.cancel()
    assert (gate.inside, gate.waiting) == (0, 0)


def _assert_sound(
    gate: AdmissionGate,
    hall: Hall,
    visits: dict[int, tuple[Session, int]],
    sessions: list[Session],
    found: dict[int, int],
    each: int,
) -> None:
    for session in sessions:
        rank = session.affinity.rank
        if rank is not None:
            assert found.setdefault(id(session.affinity), rank) == rank
    inside = [visits[number][0].affinity.rank for number in hall.inside]
    assert gate.ranks == tuple(inside.count(rank) for rank in range(len(gate.ranks)))
    assert max(gate.ranks) <= each
    assert gate.kept == sum(session.tokens for session in sessions if not session.closed)
    assert gate.live == sum(1 for session in sessions if session.tokens and not session.closed)
    free = {rank for rank, inside_it in enumerate(gate.ranks) if inside_it < each}
    waiting = {number: visits[number] for number in sorted(visits.keys() - set(hall.inside))}
    late = [session.affinity.rank for session, _ in waiting.values() if session.late]
    assert not (set(late) & free), "a rank has a place, and somebody waits for that rank"
    assert not (late and late[0] is None and free), "any rank would do, and one has a place"
    first = next((visit for visit in waiting.values() if not visit[0].late), None)
    if first is not None:
        session, tokens = first
        for rank in free if session.affinity.rank is None else free & {session.affinity.rank}:
            there = [other.tokens for other in sessions if other.affinity.rank == rank and not other.closed]
            assert any(there), "nothing is kept there"
            assert sum(there) + tokens > 100, "there is room for it"
