"""The contract of `DeltaStream`, promise by promise, for every engine that plays it.

An engine joins by an entry in `ENGINES`: something that can be entered, and how to ask it for a turn that runs for
long enough to be left in the middle.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

import anyio
import pytest
from anyio.lowlevel import checkpoint

from runner.engines.base import Delta, DeltaStream, Engine, FinishReason, GenerationRequest, Session
from runner.errors import EngineDead, RequestRejected
from runner.options import Sampling
from runner.testing import Latency, Reply, ScriptedEngine, cancel_everywhere

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends]

WATCHDOG = 60.0
LONG = 40  # ids
PROMPT = (72, 101, 108, 108, 111)


class Boom(Exception):
    """What an author's code raises."""


@dataclass
class UnderTest:
    """An engine, and what the suite must know to ask it for turns."""

    engine: Engine
    asked: int = 0

    def request(
        self, max_tokens: int = 1000, *, prompt: tuple[int, ...] = PROMPT, session: Session | None = None
    ) -> GenerationRequest:
        """A turn of `LONG` ids that come one at a time and end by a stop id, unless `max_tokens` cuts it."""
        self.asked += 1
        return GenerationRequest(
            name=f"episode/main/{self.asked}",
            prompt=list(prompt),
            sampling=replace(Sampling.defaults(), max_tokens=max_tokens),
            stop_ids=self.engine.stop_ids,
            session=session,
            acts_on_deltas=True,
            extra={"force": (*range(48, 48 + LONG - 1), self.engine.stop_ids[0])},
        )

    def assert_nothing_open(self) -> None:
        stats = self.engine.stats()
        assert (stats.open, stats.waiting, stats.live_sessions) == (0, 0, 0)


def forced() -> list[int]:
    return list(range(48, 48 + LONG - 1))


ENGINES: dict[str, Callable[[], AbstractAsyncContextManager[Engine]]] = {
    "scripted": lambda: ScriptedEngine("unused", latency=Latency(between=1), places=2),
    "scripted, finish alone": lambda: ScriptedEngine("unused", latency=Latency(between=1), places=2, lone_finish=True),
    "scripted, slow start": lambda: ScriptedEngine("unused", latency=Latency(first=5, between=3), places=2),
}


@pytest.fixture(params=ENGINES)
async def engine_under_test(request: pytest.FixtureRequest) -> AsyncIterator[UnderTest]:
    async with ENGINES[request.param]() as engine:
        yield UnderTest(engine)


async def drain(stream: DeltaStream, read: list[Delta], at: int = 10**9) -> None:
    """Read until `at` ids have come."""
    async for delta in stream:
        read.append(delta)
        if len(ids_of(read)) >= at:
            return


def ids_of(deltas: list[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def logprobs_of(deltas: list[Delta]) -> list[float]:
    return [logprob for delta in deltas for logprob in delta.logprobs or ()]


async def test_a_turn_that_is_read_to_its_end_has_its_finish_on_the_last_delta(engine_under_test: UnderTest) -> None:
    read: list[Delta] = []
    async with engine_under_test.engine.stream(engine_under_test.request()) as stream:
        await drain(stream, read)
    stop = engine_under_test.engine.stop_ids[0]
    assert ids_of(read) == [*forced(), stop]
    assert len(logprobs_of(read)) == LONG
    assert all(logprob <= 0 for logprob in logprobs_of(read))
    assert [delta.finish for delta in read[:-1]] == [None] * (len(read) - 1)
    assert all(delta.token_ids for delta in read[:-1])
    finish = read[-1].finish
    assert finish is not None
    assert (finish.reason, finish.stop) == (FinishReason.STOP, stop)
    assert stream.finish == finish
    assert stream.rest == []
    engine_under_test.assert_nothing_open()


async def test_a_turn_that_is_cut_by_max_tokens_ends_with_length_and_no_stop(engine_under_test: UnderTest) -> None:
    read: list[Delta] = []
    async with engine_under_test.engine.stream(engine_under_test.request(7)) as stream:
        await drain(stream, read)
    assert ids_of(read) == forced()[:7]
    assert stream.finish is not None
    assert (stream.finish.reason, stream.finish.stop) == (FinishReason.LENGTH, None)
    engine_under_test.assert_nothing_open()


async def leave_by_break(stream: DeltaStream, read: list[Delta]) -> None:
    async with stream as deltas:
        async for delta in deltas:
            read.append(delta)
            if len(ids_of(read)) >= 3:
                break


async def leave_by_exception(stream: DeltaStream, read: list[Delta]) -> None:
    try:
        async with stream:
            await drain(stream, read, 3)
            raise Boom
    except Boom:
        return
    pytest.fail("the exception was lost")


async def leave_by_cancellation(stream: DeltaStream, read: list[Delta]) -> None:
    with anyio.CancelScope() as scope:
        async with stream:
            await drain(stream, read, 3)
            scope.cancel()
            await drain(stream, read)
    assert scope.cancelled_caught


async def leave_by_timeout(stream: DeltaStream, read: list[Delta]) -> None:
    with anyio.CancelScope() as scope:
        async with stream:
            await drain(stream, read, 3)
            scope.deadline = anyio.current_time()
            await drain(stream, read)
    assert scope.cancelled_caught


EXITS = [leave_by_break, leave_by_exception, leave_by_cancellation, leave_by_timeout]


@pytest.mark.parametrize("leave", EXITS, ids=[leave.__name__ for leave in EXITS])
async def test_every_exit_leaves_nothing_open_and_keeps_exactly_what_was_sampled(
    engine_under_test: UnderTest, leave: Callable[[DeltaStream, list[Delta]], Awaitable[None]]
) -> None:
    read: list[Delta] = []
    before = engine_under_test.engine.stats().sampled_tokens
    stream = engine_under_test.engine.stream(engine_under_test.request())
    await leave(stream, read)
    engine_under_test.assert_nothing_open()
    kept = ids_of(read) + ids_of(stream.rest)
    assert kept == forced()[: len(kept)]
    assert 3 <= len(kept) < LONG
    assert len(logprobs_of(read) + logprobs_of(stream.rest)) == len(kept)
    assert engine_under_test.engine.stats().sampled_tokens - before == len(kept)
    assert stream.finish is not None
    assert stream.finish.reason is FinishReason.ABORT
    assert [(span.start, span.end) for span in stream.finish.versions] == [(0, len(kept))]
    assert stream.rest[-1].finish is stream.finish


@pytest.mark.parametrize("leave", EXITS, ids=[leave.__name__ for leave in EXITS])
async def test_every_delta_has_the_likeliest_ids_of_its_positions_whatever_the_exit(
    engine_under_test: UnderTest, leave: Callable[[DeltaStream, list[Delta]], Awaitable[None]]
) -> None:
    read: list[Delta] = []
    wanted = engine_under_test.request()
    wanted = replace(wanted, sampling=replace(wanted.sampling, logprobs=3))
    stream = engine_under_test.engine.stream(wanted)
    await leave(stream, read)
    for delta in [*read, *stream.rest]:
        assert delta.top is not None
        assert (len(delta.top), delta.top.count) == (len(delta.token_ids), 3)


async def test_nobody_is_given_likeliest_ids_who_asked_for_none(engine_under_test: UnderTest) -> None:
    read: list[Delta] = []
    async with engine_under_test.engine.stream(engine_under_test.request(5)) as stream:
        await drain(stream, read)
    assert [delta.top for delta in read] == [None] * len(read)


async def test_an_end_that_nobody_read_is_kept_as_it_was(engine_under_test: UnderTest) -> None:
    read: list[Delta] = []
    unread = engine_under_test.engine.stream(engine_under_test.request(2))
    async with unread, engine_under_test.engine.stream(engine_under_test.request()) as other:
        await drain(other, read)
    assert ids_of(unread.rest) == forced()[:2]
    assert unread.finish is not None
    assert unread.finish.reason is FinishReason.LENGTH
    engine_under_test.assert_nothing_open()


async def test_leaving_at_once_ends_the_request(engine_under_test: UnderTest) -> None:
    stream = engine_under_test.engine.stream(engine_under_test.request())
    async with stream:
        assert engine_under_test.engine.stats().open == 1
    assert stream.finish is not None
    assert stream.finish.reason is FinishReason.ABORT
    engine_under_test.assert_nothing_open()


async def test_leaving_twice_changes_nothing(engine_under_test: UnderTest) -> None:
    stream = engine_under_test.engine.stream(engine_under_test.request())
    read: list[Delta] = []
    async with stream:
        await drain(stream, read, 3)
    rest, finish = list(stream.rest), stream.finish
    await stream.__aexit__(None, None, None)
    assert (stream.rest, stream.finish) == (rest, finish)
    engine_under_test.assert_nothing_open()


async def test_a_stream_that_was_left_gives_nothing_more(engine_under_test: UnderTest) -> None:
    stream = engine_under_test.engine.stream(engine_under_test.request())
    async with stream:
        pass
    assert [delta async for delta in stream] == []


async def test_further_requests_wait_for_a_place(engine_under_test: UnderTest) -> None:
    engine = engine_under_test.engine
    done: list[int] = []

    async def play(number: int) -> None:
        async with engine.stream(engine_under_test.request()) as stream:
            assert engine.stats().open <= engine.places
            await drain(stream, [])
        done.append(number)

    with anyio.fail_after(WATCHDOG):
        async with anyio.create_task_group() as tasks:
            for number in range(3 * engine.places):
                tasks.start_soon(play, number)
    assert sorted(done) == list(range(3 * engine.places))
    engine_under_test.assert_nothing_open()


async def test_cancelling_while_it_waits_for_a_place_leaves_nothing_open(engine_under_test: UnderTest) -> None:
    engine = engine_under_test.engine
    stream = engine.stream(engine_under_test.request())

    async def wait_for_a_place() -> None:
        with scope:
            await stream.__aenter__()
            pytest.fail("there was no place")

    scope = anyio.CancelScope()
    async with engine.stream(engine_under_test.request()), engine.stream(engine_under_test.request()):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_for_a_place)
            while not engine.stats().waiting:
                await checkpoint()
            scope.cancel()
        assert scope.cancelled_caught
        assert engine.stats().waiting == 0
        assert engine.stats().open <= 2
    assert (stream.rest, stream.finish) == ([], None)
    engine_under_test.assert_nothing_open()


async def test_cancelling_at_every_suspension_point_leaves_nothing_open(engine_under_test: UnderTest) -> None:
    engine = engine_under_test.engine
    streams: list[tuple[DeltaStream, list[Delta]]] = []

    async def play() -> None:
        stream, read = engine.stream(engine_under_test.request()), list[Delta]()
        streams.append((stream, read))
        async with stream:
            await drain(stream, read)

    cancelled = await cancel_everywhere(play, check=engine_under_test.assert_nothing_open)
    assert cancelled > 5
    for stream, read in streams:
        kept = ids_of(read) + ids_of(stream.rest)
        assert kept == [*forced(), engine.stop_ids[0]][: len(kept)]
        assert (stream.finish is None) <= (kept == [])


async def test_a_prompt_that_leaves_no_room_is_rejected_and_hurts_nobody_else(engine_under_test: UnderTest) -> None:
    engine = engine_under_test.engine
    read: list[Delta] = []
    async with engine.stream(engine_under_test.request()) as other:
        rejected = engine.stream(engine_under_test.request(prompt=(1,) * engine.context))
        with pytest.raises(RequestRejected, match=f"{engine.context} ids"):
            await rejected.__aenter__()
        await drain(other, read)
    assert ids_of(read)[:-1] == forced()
    engine_under_test.assert_nothing_open()


async def test_a_session_keeps_room_until_it_is_closed(engine_under_test: UnderTest) -> None:
    engine = engine_under_test.engine
    session = engine.session()
    assert not engine.session().late
    async with engine.stream(engine_under_test.request(session=session)) as stream:
        await drain(stream, [])
    assert session.late
    assert engine.stats().live_sessions == 1
    engine.close_session(session)
    engine.close_session(session)
    engine_under_test.assert_nothing_open()


async def test_an_engine_that_is_not_running_answers_nothing() -> None:
    engine = ScriptedEngine("unused")
    asked = UnderTest(engine)
    with pytest.raises(EngineDead, match="not running"):
        await engine.health()
    with pytest.raises(EngineDead, match="not running"):
        await engine.stream(asked.request()).__aenter__()


async def test_ids_that_wait_for_others_to_make_a_delta_are_in_the_rest() -> None:
    """As vLLM does it at a stream interval above 1: its last output holds what was sampled and not sent."""
    reply = Reply(ids=range(48, 60), chunks=(1, 8))
    async with ScriptedEngine(reply, latency=Latency(between=1)) as engine:
        asked = UnderTest(engine)
        stream = engine.stream(replace(asked.request(), extra={}))
        async with stream:
            first = await anext(stream)
            for _ in range(4):
                await checkpoint()
        assert list(first.token_ids) == [48]
        assert 1 <= len(ids_of(stream.rest)) < 8
        assert ids_of(stream.rest) == list(range(49, 49 + len(ids_of(stream.rest))))
        assert stream.finish is not None
        assert stream.finish.reason is FinishReason.ABORT
        asked.assert_nothing_open()
