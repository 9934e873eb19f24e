"""Tests of the contract of `Engine`: streams of deltas."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

import anyio
import pytest

from runner.engines.base import Delta, DeltaStream, FinishReason, Session
from runner.errors import RequestRejected
from runner.testing.cancellation_points import cancel_everywhere
from runner.testing.engine_under_test import (
    ENDLESS_TOKENS,
    LONG_TOKENS,
    SHORT_TOKENS,
    EngineUnderTest,
    contract_test,
    drain,
    ids_of,
    logprobs_of,
    wait_until,
)

__all__ = ["StreamContract"]


class Boom(Exception):
    """An error in an author's code."""


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
    raise AssertionError("the exception was lost")


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


class StreamContract:
    """Tests of the streams of an engine."""

    @contract_test
    async def test_last_delta_has_the_finish(self, under_test: EngineUnderTest) -> None:
        said = await under_test.sample(SHORT_TOKENS)
        stop = max(said, key=said.index)  # of all ids of the turn, the one whose first occurrence is last
        read: list[Delta] = []
        async with under_test.engine.stream(under_test.request(stop_ids=(stop,))) as stream:
            await drain(stream, read)
        assert ids_of(read) == said[: said.index(stop) + 1]
        assert len(logprobs_of(read)) == len(ids_of(read))
        assert all(logprob <= 0 for logprob in logprobs_of(read))
        assert [delta.finish for delta in read[:-1]] == [None] * (len(read) - 1)
        assert all(delta.token_ids for delta in read[:-1])
        finish = read[-1].finish
        assert finish is not None
        assert (finish.reason, finish.stop) == (FinishReason.STOP, stop)
        assert stream.finish == finish
        assert stream.rest == []

    @contract_test
    async def test_turn_at_max_tokens_finishes_with_length(self, under_test: EngineUnderTest) -> None:
        read: list[Delta] = []
        async with under_test.engine.stream(under_test.request(7)) as stream:
            await drain(stream, read)
        assert ids_of(read) == (await under_test.sample(SHORT_TOKENS))[:7]
        assert stream.finish is not None
        assert (stream.finish.reason, stream.finish.stop) == (FinishReason.LENGTH, None)

    @contract_test
    async def test_every_exit_closes_the_request_and_keeps_all_ids(self, under_test: EngineUnderTest) -> None:
        engine, said = under_test.engine, await under_test.sample(LONG_TOKENS)
        for leave in (leave_by_break, leave_by_exception, leave_by_cancellation, leave_by_timeout):
            read: list[Delta] = []
            before = engine.stats().sampled_tokens
            stream = engine.stream(under_test.request())
            await leave(stream, read)
            kept = ids_of(read) + ids_of(stream.rest)
            assert engine.stats().sampled_tokens - before == len(kept)
            await under_test.assert_nothing_open()
            assert kept[:LONG_TOKENS] == said[: len(kept)]
            assert 3 <= len(kept) < ENDLESS_TOKENS
            assert len(logprobs_of(read) + logprobs_of(stream.rest)) == len(kept)
            assert stream.finish is not None
            assert stream.finish.reason is FinishReason.ABORT
            assert [(span.start, span.end) for span in stream.finish.versions] == [(0, len(kept))]
            assert [delta.finish for delta in stream.rest[-1:]] == [stream.finish]

    @contract_test
    async def test_every_delta_has_the_top_logprobs_of_its_ids(self, under_test: EngineUnderTest) -> None:
        wanted = under_test.request()
        wanted = replace(wanted, sampling=replace(wanted.sampling, logprobs=3))
        for leave in (leave_by_break, leave_by_exception, leave_by_cancellation, leave_by_timeout):
            read: list[Delta] = []
            stream = under_test.engine.stream(wanted)
            await leave(stream, read)
            for delta in [*read, *stream.rest]:
                assert delta.top is not None
                assert (len(delta.top), delta.top.count) == (len(delta.token_ids), 3)

    @contract_test
    async def test_top_logprobs_are_none_by_default(self, under_test: EngineUnderTest) -> None:
        read: list[Delta] = []
        async with under_test.engine.stream(under_test.request(5)) as stream:
            await drain(stream, read)
        assert [delta.top for delta in read] == [None] * len(read)

    @contract_test
    async def test_unread_finish_is_kept(self, under_test: EngineUnderTest) -> None:
        read: list[Delta] = []
        unread = under_test.engine.stream(under_test.request(2))
        async with unread, under_test.engine.stream(under_test.request(LONG_TOKENS)) as other:
            await drain(other, read)
        assert ids_of(unread.rest) == ids_of(read)[:2]
        assert unread.finish is not None
        assert unread.finish.reason is FinishReason.LENGTH

    @contract_test
    async def test_exit_before_reading_ends_the_request(self, under_test: EngineUnderTest) -> None:
        stream = under_test.engine.stream(under_test.request())
        async with stream:
            await wait_until(lambda: under_test.engine.stats().open == 1)
        assert stream.finish is not None
        assert stream.finish.reason is FinishReason.ABORT

    @contract_test
    async def test_second_exit_changes_nothing(self, under_test: EngineUnderTest) -> None:
        stream = under_test.engine.stream(under_test.request())
        read: list[Delta] = []
        async with stream:
            await drain(stream, read, 3)
        rest, finish = list(stream.rest), stream.finish
        await stream.__aexit__(None, None, None)
        assert (stream.rest, stream.finish) == (rest, finish)

    @contract_test
    async def test_closed_stream_has_no_more_deltas(self, under_test: EngineUnderTest) -> None:
        stream = under_test.engine.stream(under_test.request())
        async with stream:
            pass
        assert [delta async for delta in stream] == []

    @contract_test
    async def test_requests_wait_for_a_free_place(self, under_test: EngineUnderTest) -> None:
        engine = under_test.engine
        done: list[int] = []

        async def play(number: int) -> None:
            async with engine.stream(under_test.request(SHORT_TOKENS)) as stream:
                assert engine.stats().open <= engine.places
                await drain(stream, [])
            done.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(3 * engine.places):
                tasks.start_soon(play, number)
        assert sorted(done) == list(range(3 * engine.places))

    @contract_test
    async def test_cancelled_wait_for_a_place_leaves_nothing_open(self, under_test: EngineUnderTest) -> None:
        engine = under_test.engine
        stream = engine.stream(under_test.request())

        async def wait_for_a_place() -> None:
            with scope:
                await stream.__aenter__()
                raise AssertionError("all places were taken")  # pytest.fail would end the engine's event loop

        scope = anyio.CancelScope()
        async with AsyncExitStack() as full:
            for _ in range(engine.places):
                await full.enter_async_context(engine.stream(under_test.request()))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait_for_a_place)
                await wait_until(lambda: engine.stats().waiting == 1)
                scope.cancel()
            assert scope.cancelled_caught
            assert engine.stats().waiting == 0
            assert engine.stats().open <= engine.places
        assert (stream.rest, stream.finish) == ([], None)

    @contract_test
    async def test_cancellation_at_any_point_leaves_nothing_open(self, under_test: EngineUnderTest) -> None:
        engine, said = under_test.engine, await under_test.sample(SHORT_TOKENS)
        streams: list[tuple[DeltaStream, list[Delta]]] = []

        async def play() -> None:
            stream, read = engine.stream(under_test.request(SHORT_TOKENS)), list[Delta]()
            streams.append((stream, read))
            async with stream:
                await drain(stream, read)

        assert await cancel_everywhere(play, check=under_test.assert_nothing_open) > 2
        for stream, read in streams:
            kept = ids_of(read) + ids_of(stream.rest)
            assert kept == said[: len(kept)]
            assert (stream.finish is None) <= (kept == [])

    @contract_test
    async def test_too_long_prompt_is_rejected_alone(self, under_test: EngineUnderTest) -> None:
        engine = under_test.engine
        read: list[Delta] = []
        async with engine.stream(under_test.request(SHORT_TOKENS)) as other:
            rejected = engine.stream(under_test.request(prompt=(1,) * engine.context))
            with pytest.raises(RequestRejected, match=f"{engine.context} ids"):
                await rejected.__aenter__()
            await drain(other, read)
        assert ids_of(read) == await under_test.sample(SHORT_TOKENS)

    @contract_test
    async def test_session_keeps_its_place_until_it_is_closed(self, under_test: EngineUnderTest) -> None:
        engine = under_test.engine
        session: Session = engine.session()
        assert not engine.session().late
        async with engine.stream(under_test.request(SHORT_TOKENS, session=session)) as stream:
            await drain(stream, [])
        assert session.late
        assert engine.stats().live_sessions == 1
        engine.close_session(session)
        engine.close_session(session)
