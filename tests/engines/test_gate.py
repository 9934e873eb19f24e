"""The admission gate: places, order and room, and no lost place after any cancellation."""

import asyncio
from collections.abc import Callable

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
from tests.engines.gate_hall import Hall


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_requests_inside_never_exceed_the_places() -> None:
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
async def test_closing_a_session_admits_requests_that_wait_for_room() -> None:
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
async def test_cancelled_large_request_no_longer_blocks_later_ones() -> None:
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
async def test_failure_raises_in_every_waiting_request_and_admits_none() -> None:
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


def test_cancellation_after_admission_frees_the_place() -> None:
    async def main() -> None:
        gate = AdmissionGate(1, room=100)
        holder, caught, third = Session(), Session(), Session()
        await gate.enter(holder, 10)
        cancelled = asyncio.ensure_future(gate.enter(caught, 20))
        waiting = asyncio.ensure_future(gate.enter(third, 30))
        await asyncio.sleep(0)
        gate.leave(holder, 10)
        assert caught.late, "the request is admitted, although its task has not run"
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await waiting
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
    """A plain copy of the gate's rules: the requests that must be inside, and the requests that wait."""

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
    busy: dict[int, int] = {}  # a session has one request at a time, like a conversation

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

    with anyio.fail_after(30):  # a lost wake-up would wait for ever
        async with anyio.create_task_group() as tasks:
            for number, steps in enumerate(moments):
                scope = anyio.CancelScope()
                tasks.start_soon(visit, number, scope)
                if number % 2:
                    tasks.start_soon(cancel_after, steps, scope.cancel)
    assert {0, 2, 4, 6} <= set(served)
    assert (gate.inside, gate.waiting, gate.kept, gate.live) == (0, 0, 0, 0)
