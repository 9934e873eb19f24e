"""The contract of `Engine`, promise by promise, for every engine: its streams, and what its trainer has it do.

An engine joins by an entry in `ENGINES`. A promise asks for nothing that only one kind of engine could do: greedy turns
say the same each time they are asked, and that is what they are compared with. What an engine's end does to streams is
promised only of those that may be ended here; that of the vLLM engine, which many tests share, is tested beside it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from runner.engines.base import Delta, DeltaStream, Engine, FinishReason, GenerationRequest, Session
from runner.engines.state import EngineState
from runner.engines.vllm.engine import VllmEngine
from runner.engines.weights import read_folder
from runner.errors import BadControl, BadInput, EngineDead, RequestRejected
from runner.options import Sampling
from runner.testing import Latency, Reply, ScriptedEngine, cancel_everywhere
from runner.testing.engine_pool import EngineAtHome
from tests.engines import controlling
from tests.engines.lora import adapter_tensors, save_adapter

WATCHDOG = 120.0
SHORT = 12  # ids
LONG = 32  # ids: what is asked of the engine meanwhile comes before the last of them
ENDLESS = 900  # ids: nobody waits for the last of them
PROMPT = range(60, 100)  # ids of every vocabulary
TEXT = "".join(chr(33 + 7 * number % 90) for number in range(ENDLESS + 1))


class Boom(Exception):
    """What an author's code raises."""


# --- the engines


async def nothing_to_wait_for() -> None:
    """The engine's statistics are those of this moment."""


@dataclass
class UnderTest:
    """An engine, and what the promises must know of it."""

    engine: Engine
    weights: Any = None
    """New weights that fit; the engine says the same with them."""
    adapter: Any = None
    """A LoRA adapter that fits."""
    settled: Callable[[], Awaitable[None]] = nothing_to_wait_for
    """Returns when the engine's statistics know of all that was left."""
    asked: int = 0

    def request(
        self, max_tokens: int = ENDLESS, *, prompt: Any = PROMPT, adapter: str | None = None, **fields: Any
    ) -> GenerationRequest:
        """A turn of so many ids that come one at a time, unless a stop id ends it."""
        self.asked += 1
        return GenerationRequest(
            name=f"episode/main/{self.asked}",
            prompt=list(prompt),
            sampling=replace(Sampling.defaults(), max_tokens=max_tokens, temperature=0.0, adapter=adapter),
            acts_on_deltas=True,
            **fields,
        )

    async def said(self, max_tokens: int) -> list[int]:
        """What a turn that nobody disturbs says."""
        return (await controlling.ask(self.engine, self.request(max_tokens)))[0]

    async def quiet(self) -> None:
        """Return when what had left the engine was read, and it could have sampled more."""
        for _ in range(20):
            await self.engine.devices()
            await checkpoint()

    async def assert_nothing_open(self) -> None:
        with anyio.fail_after(WATCHDOG):
            await self.settled()
        stats = self.engine.stats()
        assert (stats.open, stats.waiting, stats.live_sessions) == (0, 0, 0)


Promise = Callable[[UnderTest], Awaitable[None]]
Keep = Callable[[Promise], None]
"""Plays a promise on an engine, on the event loop that it belongs to."""


def scripted(backend: str, **settings: Any) -> Callable[[pytest.FixtureRequest], Keep]:
    async def main(promise: Promise) -> None:
        async with ScriptedEngine(TEXT, **{"places": 2, "latency": Latency(between=1), **settings}) as engine:
            await promise(UnderTest(engine, "any folder", "any folder"))

    return lambda _: lambda promise: anyio.run(main, promise, backend=backend)


def vllm(request: pytest.FixtureRequest) -> Keep:
    """The engine in float32, where greedy ids are the same however requests are batched."""
    at_home: EngineAtHome = request.getfixturevalue("float32_engine")
    weights: Path = request.getfixturevalue("small_model_folder")
    adapter: Path = request.getfixturevalue("tmp_path") / "adapter"
    shapes = {name: form.shape for name, form in read_folder(weights).forms.items()}
    save_adapter(adapter, adapter_tensors(shapes, seed=1))
    engine: Any = at_home.inner
    assert isinstance(engine, VllmEngine)
    under_test = UnderTest(engine, weights, adapter)

    async def settled() -> None:
        # Its scheduler counts as it steps, and where nothing is asked it does not.
        await under_test.said(1)
        await engine.idle()

    async def main(promise: Promise) -> None:
        under_test.settled = settled
        await promise(under_test)

    return lambda promise: at_home.home.call(main, promise)


ENGINES: dict[str, Any] = {
    "scripted": scripted("asyncio"),
    "scripted on trio": scripted("trio"),
    "scripted, finish alone": scripted("asyncio", lone_finish=True),
    "scripted, slow start": scripted("trio", latency=Latency(first=5, between=3)),
    "vllm": pytest.param(vllm, marks=pytest.mark.engine("float32_engine")),
}


@pytest.fixture(params=list(ENGINES.values()), ids=list(ENGINES))
def keep(request: pytest.FixtureRequest) -> Keep:
    keep: Keep = request.param(request)
    return keep


def promised(promise: Promise) -> Callable[[Keep], None]:
    """A test that every engine keeps a promise, and has nothing open afterwards."""

    async def main(under_test: UnderTest) -> None:
        with anyio.fail_after(WATCHDOG):
            await promise(under_test)
        await under_test.assert_nothing_open()

    def test(keep: Keep) -> None:
        keep(main)

    test.__name__, test.__qualname__, test.__doc__ = promise.__name__, promise.__qualname__, promise.__doc__
    return test


# --- reading


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


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await checkpoint()


# --- streams


@promised
async def test_a_turn_that_is_read_to_its_end_has_its_finish_on_the_last_delta(under_test: UnderTest) -> None:
    said = await under_test.said(SHORT)
    stop = max(said, key=said.index)  # the id that comes first as late as any
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


@promised
async def test_a_turn_that_is_cut_by_max_tokens_ends_with_length_and_no_stop(under_test: UnderTest) -> None:
    read: list[Delta] = []
    async with under_test.engine.stream(under_test.request(7)) as stream:
        await drain(stream, read)
    assert ids_of(read) == (await under_test.said(SHORT))[:7]
    assert stream.finish is not None
    assert (stream.finish.reason, stream.finish.stop) == (FinishReason.LENGTH, None)


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


@promised
async def test_every_exit_leaves_nothing_open_and_keeps_exactly_what_was_sampled(under_test: UnderTest) -> None:
    engine, said = under_test.engine, await under_test.said(LONG)
    for leave in (leave_by_break, leave_by_exception, leave_by_cancellation, leave_by_timeout):
        read: list[Delta] = []
        before = engine.stats().sampled_tokens
        stream = engine.stream(under_test.request())
        await leave(stream, read)
        kept = ids_of(read) + ids_of(stream.rest)
        assert engine.stats().sampled_tokens - before == len(kept)
        await under_test.assert_nothing_open()
        assert kept[:LONG] == said[: len(kept)]
        assert 3 <= len(kept) < ENDLESS
        assert len(logprobs_of(read) + logprobs_of(stream.rest)) == len(kept)
        assert stream.finish is not None
        assert stream.finish.reason is FinishReason.ABORT
        assert [(span.start, span.end) for span in stream.finish.versions] == [(0, len(kept))]
        assert stream.rest[-1].finish is stream.finish


@promised
async def test_every_delta_has_the_likeliest_ids_of_its_positions_whatever_the_exit(under_test: UnderTest) -> None:
    wanted = under_test.request()
    wanted = replace(wanted, sampling=replace(wanted.sampling, logprobs=3))
    for leave in (leave_by_break, leave_by_exception, leave_by_cancellation, leave_by_timeout):
        read: list[Delta] = []
        stream = under_test.engine.stream(wanted)
        await leave(stream, read)
        for delta in [*read, *stream.rest]:
            assert delta.top is not None
            assert (len(delta.top), delta.top.count) == (len(delta.token_ids), 3)


@promised
async def test_nobody_is_given_likeliest_ids_who_asked_for_none(under_test: UnderTest) -> None:
    read: list[Delta] = []
    async with under_test.engine.stream(under_test.request(5)) as stream:
        await drain(stream, read)
    assert [delta.top for delta in read] == [None] * len(read)


@promised
async def test_an_end_that_nobody_read_is_kept_as_it_was(under_test: UnderTest) -> None:
    read: list[Delta] = []
    unread = under_test.engine.stream(under_test.request(2))
    async with unread, under_test.engine.stream(under_test.request(LONG)) as other:
        await drain(other, read)
    assert ids_of(unread.rest) == ids_of(read)[:2]
    assert unread.finish is not None
    assert unread.finish.reason is FinishReason.LENGTH


@promised
async def test_leaving_at_once_ends_the_request(under_test: UnderTest) -> None:
    stream = under_test.engine.stream(under_test.request())
    async with stream:
        await until(lambda: under_test.engine.stats().open == 1)
    assert stream.finish is not None
    assert stream.finish.reason is FinishReason.ABORT


@promised
async def test_leaving_twice_changes_nothing(under_test: UnderTest) -> None:
    stream = under_test.engine.stream(under_test.request())
    read: list[Delta] = []
    async with stream:
        await drain(stream, read, 3)
    rest, finish = list(stream.rest), stream.finish
    await stream.__aexit__(None, None, None)
    assert (stream.rest, stream.finish) == (rest, finish)


@promised
async def test_a_stream_that_was_left_gives_nothing_more(under_test: UnderTest) -> None:
    stream = under_test.engine.stream(under_test.request())
    async with stream:
        pass
    assert [delta async for delta in stream] == []


@promised
async def test_further_requests_wait_for_a_place(under_test: UnderTest) -> None:
    engine = under_test.engine
    done: list[int] = []

    async def play(number: int) -> None:
        async with engine.stream(under_test.request(SHORT)) as stream:
            assert engine.stats().open <= engine.places
            await drain(stream, [])
        done.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(3 * engine.places):
            tasks.start_soon(play, number)
    assert sorted(done) == list(range(3 * engine.places))


@promised
async def test_cancelling_while_it_waits_for_a_place_leaves_nothing_open(under_test: UnderTest) -> None:
    engine = under_test.engine
    stream = engine.stream(under_test.request())

    async def wait_for_a_place() -> None:
        with scope:
            await stream.__aenter__()
            raise AssertionError("there was no place")  # pytest.fail would end the engine's event loop

    scope = anyio.CancelScope()
    async with AsyncExitStack() as full:
        for _ in range(engine.places):
            await full.enter_async_context(engine.stream(under_test.request()))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_for_a_place)
            await until(lambda: engine.stats().waiting == 1)
            scope.cancel()
        assert scope.cancelled_caught
        assert engine.stats().waiting == 0
        assert engine.stats().open <= engine.places
    assert (stream.rest, stream.finish) == ([], None)


@promised
async def test_cancelling_at_every_suspension_point_leaves_nothing_open(under_test: UnderTest) -> None:
    engine, said = under_test.engine, await under_test.said(SHORT)
    streams: list[tuple[DeltaStream, list[Delta]]] = []

    async def play() -> None:
        stream, read = engine.stream(under_test.request(SHORT)), list[Delta]()
        streams.append((stream, read))
        async with stream:
            await drain(stream, read)

    assert await cancel_everywhere(play, check=under_test.assert_nothing_open) > 2
    for stream, read in streams:
        kept = ids_of(read) + ids_of(stream.rest)
        assert kept == said[: len(kept)]
        assert (stream.finish is None) <= (kept == [])


@promised
async def test_a_prompt_that_leaves_no_room_is_rejected_and_hurts_nobody_else(under_test: UnderTest) -> None:
    engine = under_test.engine
    read: list[Delta] = []
    async with engine.stream(under_test.request(SHORT)) as other:
        rejected = engine.stream(under_test.request(prompt=(1,) * engine.context))
        with pytest.raises(RequestRejected, match=f"{engine.context} ids"):
            await rejected.__aenter__()
        await drain(other, read)
    assert ids_of(read) == await under_test.said(SHORT)


@promised
async def test_a_session_keeps_room_until_it_is_closed(under_test: UnderTest) -> None:
    engine = under_test.engine
    session: Session = engine.session()
    assert not engine.session().late
    async with engine.stream(under_test.request(SHORT, session=session)) as stream:
        await drain(stream, [])
    assert session.late
    assert engine.stats().live_sessions == 1
    engine.close_session(session)
    engine.close_session(session)


# --- what its trainer has it do


@promised
async def test_keep_stands_still_and_goes_on_from_where_it_was(under_test: UnderTest) -> None:
    engine, undisturbed = under_test.engine, await under_test.said(LONG)
    async with controlling.saying(engine, under_test.request(LONG)) as said:
        await engine.pause("keep")
        await under_test.quiet()
        before = list(said.ids)
        await under_test.quiet()
        assert said.ids == before
        assert len(before) < LONG
        assert engine.stats().state is EngineState.PAUSED
        assert engine.is_alive()
        await engine.health()
        await engine.resume()
    assert said.ids == undisturbed
    assert said.finish is not None
    assert said.finish.reason is FinishReason.LENGTH


@promised
async def test_wait_lets_turns_end_first_and_nobody_else_begin(under_test: UnderTest) -> None:
    engine, undisturbed = under_test.engine, await under_test.said(LONG)
    async with anyio.create_task_group() as group:
        async with controlling.saying(engine, under_test.request(LONG)) as said:
            await engine.pause("wait")
            assert engine.stats().open == 0
        assert said.ids == undisturbed
        group.start_soon(under_test.said, SHORT)
        await under_test.quiet()
        assert (engine.stats().open, engine.stats().waiting) == (0, 1)
        await engine.resume()


@promised
async def test_abort_cuts_turns_with_what_they_had(under_test: UnderTest) -> None:
    engine, undisturbed = under_test.engine, await under_test.said(SHORT)
    async with controlling.saying(engine, under_test.request()) as said:
        await engine.pause("abort")
        assert engine.stats().open == 0
    assert said.finish is not None
    assert said.finish.reason is FinishReason.ABORT
    assert said.ids[:SHORT] == undisturbed[: len(said.ids)]
    assert len(said.ids) < ENDLESS
    await engine.resume()
    assert await under_test.said(SHORT) == undisturbed


@promised
async def test_a_pause_cancelled_at_any_point_leaves_the_engine_going(under_test: UnderTest) -> None:
    engine = under_test.engine
    paused = False

    async def pause() -> None:
        nonlocal paused
        paused = False
        await engine.pause("keep")
        paused = True

    async def goes_on() -> None:
        if paused:  # the cancellation came too late for it
            await engine.resume()
        assert (engine.state, engine.standstill.on) == (EngineState.RUNNING, False)

    async with engine.stream(under_test.request()):
        await cancel_everywhere(pause, check=goes_on)
    assert len(await under_test.said(SHORT)) == SHORT


@promised
async def test_a_sleep_cuts_turns_and_the_engine_goes_on_with_the_last_part_that_wakes(under_test: UnderTest) -> None:
    engine, undisturbed = under_test.engine, await under_test.said(SHORT)
    async with controlling.saying(engine, under_test.request()) as said:
        await engine.sleep()
        assert (engine.stats().state, engine.stats().open) == (EngineState.ASLEEP, 0)
    assert said.finish is not None
    assert said.finish.reason is FinishReason.ABORT
    assert engine.is_alive()
    await engine.health()
    await engine.wake(["kv_cache"])
    assert engine.stats().state is EngineState.ASLEEP
    await engine.wake(["weights"])
    assert engine.stats().state is EngineState.RUNNING
    assert await under_test.said(SHORT) == undisturbed


@promised
async def test_what_cannot_be_now_is_refused_and_changes_nothing(under_test: UnderTest) -> None:
    engine = under_test.engine

    async def refuses(*calls: Callable[[], Awaitable[Any]]) -> None:
        state, version = engine.state, engine.weight_version
        for call in calls:
            with pytest.raises(BadInput):
                await call()
            assert (engine.state, engine.weight_version) == (state, version)

    await refuses(engine.resume, engine.wake, lambda: engine.pause("hard"), lambda: engine.sleep(3))
    await engine.pause()
    await refuses(engine.pause, engine.wake)
    await engine.sleep()
    await refuses(engine.sleep, engine.pause, engine.resume, engine.reset_prefix_cache, lambda: engine.wake("weights"))
    with pytest.raises(BadControl, match="memory of the weights is asleep"):
        await engine.update_weights(under_test.weights)
    await engine.wake()
    assert engine.state is EngineState.PAUSED, "as it was before it slept"
    await engine.resume()


@promised
async def test_an_update_under_a_turn_says_which_weights_sampled_which_ids(under_test: UnderTest) -> None:
    engine, undisturbed = under_test.engine, await under_test.said(LONG)
    first = engine.weight_version
    async with controlling.saying(engine, under_test.request(LONG)) as said:
        update = await engine.update_weights(under_test.weights)
    assert said.ids == undisturbed
    assert said.finish is not None
    spans = said.finish.versions
    assert [span.version for span in spans] == [first, update.version]
    assert (spans[0].start, spans[-1].end) == (0, LONG)
    assert all(before.end == after.start for before, after in pairwise(spans))
    assert engine.weight_version == engine.stats().weight_version == update.version != first
    with pytest.raises(BadInput, match="these weights were there before"):
        await engine.update_weights(under_test.weights, version=first)


@promised
async def test_an_update_leaves_a_paused_engine_paused(under_test: UnderTest) -> None:
    engine = under_test.engine
    await engine.pause()
    update = await engine.update_weights(under_test.weights)
    assert (engine.state, engine.weight_version) == (EngineState.PAUSED, update.version)
    await engine.resume()
    _, finish = await controlling.ask(engine, under_test.request(SHORT))
    assert [span.version for span in finish.versions] == [update.version]


@promised
async def test_an_adapter_samples_the_turns_that_ask_for_it_while_it_is_there(under_test: UnderTest) -> None:
    engine = under_test.engine

    async def refused() -> None:
        with pytest.raises(RequestRejected, match="no adapter 'poet'"):
            await engine.stream(under_test.request(SHORT, adapter="poet")).__aenter__()

    undisturbed = await under_test.said(SHORT)
    await refused()
    label = await engine.add_adapter("poet", under_test.adapter)
    assert list(engine.adapters) == ["poet"]
    async with controlling.saying(engine, under_test.request(LONG, adapter="poet")) as said:
        await engine.remove_adapter("poet")
        await refused()
    assert said.finish is not None
    assert said.finish.reason is FinishReason.LENGTH, "a turn in flight goes on"
    assert [span.version for span in said.finish.versions] == [f"{engine.weight_version}+{label}"]
    assert await under_test.said(SHORT) == undisturbed
    assert not engine.adapters


# --- before it is entered, and its end


@pytest.mark.anyio
@pytest.mark.parametrize(
    "make", [lambda: ScriptedEngine(TEXT), lambda: VllmEngine("never loaded")], ids=["scripted", "vllm"]
)
async def test_an_engine_that_is_not_running_answers_nothing(make: Callable[[], Engine]) -> None:
    engine = make()
    asked = UnderTest(engine)
    assert not engine.is_alive()
    with pytest.raises(EngineDead, match="not running"):
        await engine.health()
    with pytest.raises(EngineDead, match="not running"):
        await engine.stream(asked.request()).__aenter__()


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_closing_an_engine_ends_who_is_inside_and_sends_away_who_waits() -> None:
    asked = UnderTest(ScriptedEngine(TEXT, latency=Latency(between=1), places=1))
    told: list[str] = []

    async def read() -> None:
        try:
            async with asked.engine.stream(asked.request()) as stream:
                await drain(stream, [])
        except EngineDead as error:
            told.append(str(error))

    async with anyio.create_task_group() as tasks, asked.engine as engine:
        tasks.start_soon(read)
        tasks.start_soon(read)
        await until(lambda: (engine.stats().open, engine.stats().waiting) == (1, 1))
    assert len(told) == 2
    assert not engine.is_alive()
    await asked.assert_nothing_open()


# --- what only a scripted engine can be told to do


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_ids_that_wait_for_others_to_make_a_delta_are_in_the_rest() -> None:
    """As vLLM does it at a stream interval above 1: its last output holds what was sampled and not sent."""
    reply = Reply(ids=range(48, 60), chunks=(1, 8))
    async with ScriptedEngine(reply, latency=Latency(between=1)) as engine:
        asked = UnderTest(engine)
        stream = engine.stream(asked.request())
        async with stream:
            first = await anext(stream)
            for _ in range(4):
                await checkpoint()
        assert list(first.token_ids) == [48]
        assert 1 <= len(ids_of(stream.rest)) < 8
        assert ids_of(stream.rest) == list(range(49, 49 + len(ids_of(stream.rest))))
        assert stream.finish is not None
        assert stream.finish.reason is FinishReason.ABORT
        await asked.assert_nothing_open()
