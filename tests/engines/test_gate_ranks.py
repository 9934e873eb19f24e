"""The admission gate of an engine with several data-parallel ranks: each rank has its own places and its own room."""

import anyio
import anyio.abc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.engines.base import Session
from runner.engines.gate import AdmissionGate
from tests import sweeps
from tests.engines.gate_hall import Hall


def ranks_of(sessions: list[Session]) -> list[int | None]:
    return [session.affinity.rank for session in sessions]


@pytest.mark.anyio
async def test_first_request_and_its_session_use_the_emptiest_rank() -> None:
    gate = AdmissionGate(8, room=800, ranks=2)
    large, small, third, fourth = sessions = [Session() for _ in range(4)]
    for session, tokens in ((large, 90), (small, 20), (third, 30), (fourth, 30)):
        await gate.enter(session, tokens)
    assert ranks_of(sessions) == [0, 1, 1, 1], "90 ids are kept on one rank, and 80 on the other"
    assert (gate.ranks, gate.inside, gate.kept, gate.live) == ((1, 3), 4, 170, 4)

    gate.leave(small, 20)
    gate.close(large)
    await gate.enter(small, 200)
    assert ranks_of([small]) == [1], "although nothing is kept on the other rank"


@pytest.mark.anyio
async def test_late_request_waits_for_its_own_rank() -> None:
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
        assert hall.inside == [1], "the other rank has a place, but its cache has nothing of the session"
        await hall.arrive(3, new)
        assert hall.inside == [1, 3]
        await hall.release(1)
        assert hall.inside == [3, 2]
        for number in (2, 3):
            await hall.release(number)


@pytest.mark.anyio
async def test_sessions_of_one_episode_share_a_rank() -> None:
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
        assert hall.inside == [2], "the free rank has nothing of the episode in its cache"
        for number in (2, 3, 4, 5):
            await hall.release(number)
        assert hall.entered == [0, 1, 2, 3, 4, 5]
        assert set(ranks_of([agent, *judges])) == {1}


@pytest.mark.anyio
async def test_late_request_without_a_rank_is_not_overtaken() -> None:
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
        assert hall.inside == [0, 1], "70 ids of room are left in all, but no rank has 50"
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
def test_ranks_are_stable_within_limits_and_never_starve(
    ranks: int, each: int, operations: list[tuple[str, int, int]]
) -> None:
    anyio.run(_play_on_ranks, ranks, each, operations)


async def _play_on_ranks(ranks: int, each: int, operations: list[tuple[str, int, int]]) -> None:
    gate = AdmissionGate(ranks * each, room=100 * ranks, ranks=ranks)
    sessions: list[Session] = []
    visits: dict[int, tuple[Session, int]] = {}
    found: dict[int, int] = {}  # the rank of each episode, by its sessions' shared affinity

    async with anyio.create_task_group() as tasks:
        hall = Hall(gate, tasks)
        for number, (operation, choice, tokens) in enumerate(operations):
            busy = {id(session) for session, _ in visits.values()}
            idle = [session for session in sessions if id(session) not in busy and not session.closed]
            if operation == "arrive":
                # An earlier session, another session of its episode, or the first session of a new episode.
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
    assert not (set(late) & free), "a rank has a free place, but a session waits for that rank"
    assert not (late and late[0] is None and free), "a session that may use any rank waits, but one has a free place"
    first = next((visit for visit in waiting.values() if not visit[0].late), None)
    if first is not None:
        session, tokens = first
        for rank in free if session.affinity.rank is None else free & {session.affinity.rank}:
            there = [other.tokens for other in sessions if other.affinity.rank == rank and not other.closed]
            assert any(there), "nothing is kept on the rank"
            assert sum(there) + tokens > 100, "the rank has room for the request"
