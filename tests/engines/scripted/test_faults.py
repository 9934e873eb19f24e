"""The scripted engine: every fault on demand, and the state after a fault."""

from collections.abc import AsyncIterator

import anyio
import pytest

from runner.engines.base import FinishReason, Session
from runner.errors import EngineDead, RequestRejected
from runner.options import Constraint, ConstraintKind
from runner.testing import Fault, Latency, ModelCall, Reply, ScriptedEngine, call, no_leaks
from tests.engines.engine_requests import END, STOP, request, say

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends]


# --- faults


@pytest.mark.parametrize("latency", [Latency(), Latency(first=2, between=1)], ids=["at once", "slowly"])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
async def test_an_error_ends_the_turn_after_so_many_ids(at: int, latency: Latency) -> None:
    async with ScriptedEngine(Reply("ab", fault=Fault.error(at, "it broke")), latency=latency) as engine:
        said = await say(engine)
        assert said.ids == [97, 98, STOP][:at]
        assert said.end == (FinishReason.ERROR, "it broke")
        assert engine.stats().open == 0
        await engine.health()


async def test_a_fault_past_the_end_of_the_turn_never_comes() -> None:
    async with ScriptedEngine(Reply("ab", fault=Fault.error(9))) as engine:
        assert (await say(engine)).end == (FinishReason.STOP, STOP)


@pytest.mark.parametrize("latency", [Latency(), Latency(between=1)], ids=["at once", "slowly"])
async def test_a_stall_sends_nothing_more_and_stays_open_until_it_is_left(latency: Latency) -> None:
    async with ScriptedEngine(Reply("abcdef", fault=Fault.stall(2)), latency=latency, chunks=1) as engine:
        read: list[int] = []
        with anyio.CancelScope() as scope:
            async with engine.stream(request()) as stream, anyio.create_task_group() as tasks:
                tasks.start_soon(_cancel_when_all_wait, scope)
                async for delta in stream:
                    read.extend(delta.token_ids)
        assert scope.cancelled_caught
        assert read == [97, 98]
        assert stream.finish is not None
        assert stream.finish.reason is FinishReason.ABORT
        assert [list(delta.token_ids) for delta in stream.rest] == [[]]
        assert engine.stats().open == 0


async def _cancel_when_all_wait(scope: anyio.CancelScope) -> None:
    await anyio.wait_all_tasks_blocked()
    scope.cancel()


async def test_reject_fault_refuses_one_request_and_spares_the_others() -> None:
    async with ScriptedEngine(["a", "b", "c"], faults={1: Fault.reject("not this one")}) as engine:
        session = engine.session()
        assert (await say(engine, request(session=session))).text == "a" + END
        with pytest.raises(RequestRejected, match="7/main/1: not this one"):
            await say(engine, request("7/main/1", session=session))
        assert (await say(engine, request(session=session))).text == "c" + END
        assert engine.stats().open == 0


async def test_faults_by_a_predicate() -> None:
    def faults(asked: ModelCall) -> Fault | None:
        return Fault.error(1) if asked.agent == "user" else None

    async with ScriptedEngine("ab", faults=faults) as engine:
        assert (await say(engine, request("7/main/0"))).ids == [97, 98, STOP]
        assert (await say(engine, request("7/user/0"))).ids == [97]


async def listen_to(engine: ScriptedEngine, into: list[list[int]], errors: list[EngineDead], session: Session) -> None:
    read: list[int] = []
    into.append(read)
    try:
        async with engine.stream(request(session=session)) as stream:
            async for delta in stream:
                read.extend(delta.token_ids)
    except EngineDead as error:
        errors.append(error)


async def test_death_fails_current_waiting_and_later_requests() -> None:
    received: list[list[int]] = []
    errors: list[EngineDead] = []
    long = Reply("x" * 50, chunks=1)
    async with ScriptedEngine(
        [long], latency=Latency(between=1), places=4, faults={2: Fault.death(3, "out of memory")}
    ) as engine:
        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(listen_to, engine, received, errors, engine.session())
        assert len(errors) == 10
        assert {str(error) for error in errors} == {"The engine died: out of memory"}
        assert len({id(error) for error in errors}) == 10
        assert len({id(error.__cause__) for error in errors}) == 1
        assert sorted(map(len, received))[:6] == [0] * 6  # these requests were at the gate
        assert all(len(read) >= 2 for read in received[:4])
        with pytest.raises(EngineDead, match="out of memory"):
            await say(engine)
        with pytest.raises(EngineDead, match="out of memory"):
            await engine.health()
        assert not engine.is_alive()
        assert (engine.stats().open, engine.stats().waiting) == (0, 0)


async def test_ids_received_before_the_death_are_kept() -> None:
    async with ScriptedEngine(Reply("abcdef", chunks=1), latency=Latency(between=1)) as engine:
        stream = engine.stream(request())
        async with stream:
            first = await anext(stream)
            engine.die("pulled the plug")
        assert list(first.token_ids) == [97]
        assert stream.finish is not None
        assert stream.finish.reason is FinishReason.ERROR
        assert stream.finish.stop == "The engine died: pulled the plug"


async def test_an_engine_that_died_can_be_entered_again() -> None:
    engine = ScriptedEngine(["a"])
    async with engine:
        engine.die()
    async with engine:
        assert (await say(engine)).text == "a" + END


# --- the engine itself


@pytest.fixture
async def recording() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(["one", "two"], record=True) as engine:
        yield engine


async def test_recorded_call_holds_its_request_and_sampled_ids(recording: ScriptedEngine) -> None:
    constraint = Constraint(ConstraintKind.CHOICE, '["one"]')
    prompt = [1, 2, 3]
    async with recording.stream(request("e/main/0", prompt=prompt, seed=5, constraint=constraint)) as stream:
        prompt.append(4)  # the engine has its own copy
        await anext(stream)
    (kept,) = recording.calls
    assert (kept.name, list(kept.prompt), kept.seed, kept.constraint) == ("e/main/0", [1, 2, 3], 5, constraint)
    assert list(kept.sampled) == [*b"one", STOP]
    assert kept.finish is stream.finish


async def test_nothing_is_kept_of_requests_that_ended() -> None:
    async with ScriptedEngine("one") as engine:
        for _ in range(3):
            await say(engine)
        assert engine.calls == []
        assert not engine.runtime.requests
        assert not engine.runtime.tick_clock._due
        assert engine.stats().sampled_tokens == 12


async def test_a_session_of_another_engine_is_refused() -> None:
    async with ScriptedEngine("one", places=1) as engine:
        for _ in range(2):
            with pytest.raises(TypeError, match=r"engine.session\(\)"):
                await say(engine, request(session=Session()))


async def test_entering_twice_is_refused() -> None:
    async with ScriptedEngine("one") as engine:
        with pytest.raises(RuntimeError, match="already running"):
            await engine.__aenter__()


async def test_exception_leaves_the_engine_block_unchanged() -> None:
    with no_leaks():
        try:
            async with ScriptedEngine("one") as engine:
                await say(engine)
                raise ZeroDivisionError
        except ZeroDivisionError:
            assert not engine.running
        else:
            pytest.fail("the exception was lost")


async def test_a_cancellation_passes_through_the_engine_and_nothing_stays() -> None:
    with no_leaks():
        with anyio.CancelScope() as scope:
            async with ScriptedEngine("one") as engine:
                await say(engine)
                scope.cancel()
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert not engine.running


async def test_closing_the_engine_fails_requests_in_flight() -> None:
    errors: list[EngineDead] = []
    async with anyio.create_task_group() as tasks, ScriptedEngine(Reply("abc", fault=Fault.stall(1))) as engine:
        tasks.start_soon(listen_to, engine, [], errors, engine.session())
        await anyio.wait_all_tasks_blocked()
        assert engine.stats().open == 1
    assert [str(error) for error in errors] == ["The engine was closed."]


async def test_late_turns_go_before_first_ones() -> None:
    order: list[str] = []

    async def talk(name: str, session: Session) -> None:
        async with engine.stream(request(name, session=session)) as stream:
            order.append(name)
            async for _ in stream:
                pass

    async with ScriptedEngine("x", places=1) as engine, anyio.create_task_group() as tasks:
        old = engine.session()
        await say(engine, request(session=old))
        async with engine.stream(request()):
            tasks.start_soon(talk, "first", engine.session())
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(talk, "late", old)
            await anyio.wait_all_tasks_blocked()
            assert (engine.stats().waiting, engine.stats().first_waiting) == (2, 1)
    assert order == ["late", "first"]


def test_the_header_is_json_and_names_what_decides_the_replies() -> None:
    def model(asked: ModelCall) -> str:
        return "x"

    described = ScriptedEngine({"main": ["a", call("add", a=1)], "user": model}, seed=3).describe()
    assert described["kind"] == "scripted"
    assert described["seed"] == 3
    assert described["model"]["agents"]["main"]["list"] == 2
    assert described["model"]["agents"]["user"]["function"].endswith("<locals>.model")
    other = ScriptedEngine({"main": ["a", call("add", a=2)], "user": model}).describe()
    assert other["model"]["agents"]["main"] != described["model"]["agents"]["main"]
