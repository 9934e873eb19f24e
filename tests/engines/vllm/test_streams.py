"""The real engine, stream by stream: however a stream ends, no request stays open and sampled ids are kept."""

import dataclasses
import itertools
import math
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import anyio
import pytest

from runner.engines.base import Delta, DeltaStream, Finish, FinishReason, GenerationRequest, Session
from runner.engines.vllm.engine import VllmEngine
from runner.errors import RequestRejected
from runner.options import Constraint, ConstraintKind, Sampling

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.sample_functions(2)]

WATCHDOG_SECONDS = 600.0
# A leaked request runs for half a minute, so the scheduler counts it. The cache has room for one in each place, also in
# float32.
LONG_TURN_TOKENS = 1000

_names = itertools.count()


def request(max_tokens: int = 12, *, temperature: float = 1.0, length: int = 40, **fields: Any) -> GenerationRequest:
    sampling = dataclasses.replace(Sampling.defaults(), max_tokens=max_tokens, temperature=temperature)
    prompt = list(range(1000, 1000 + length))
    return GenerationRequest(name=f"test {next(_names)}", prompt=prompt, sampling=sampling, **fields)


async def sample(engine: VllmEngine, wanted: GenerationRequest) -> tuple[list[int], list[float], Finish]:
    async with engine.stream(wanted) as stream:
        ids, logprobs = joined([delta async for delta in stream])
    assert stream.finish is not None
    return ids, logprobs, stream.finish


def joined(deltas: list[Delta]) -> tuple[list[int], list[float]]:
    ids = [token for delta in deltas for token in delta.token_ids]
    return ids, [logprob for delta in deltas for logprob in delta.logprobs or ()]


async def assert_nothing_open(engine: VllmEngine) -> None:
    """After one more step, neither the scheduler nor the gate counts a request."""
    with anyio.fail_after(WATCHDOG_SECONDS):
        await sample(engine, request(1))
        await engine.idle()
    assert engine.stats().open == 0
    assert (engine.vllm.gate.inside, engine.vllm.gate.waiting, engine.vllm.gate.kept) == (0, 0, 0)


async def test_normal_end_keeps_ids_logprobs_and_versions(engine: VllmEngine) -> None:
    ids, logprobs, finish = await sample(engine, request(20))
    assert len(ids) == len(logprobs) == 20
    assert all(math.isfinite(logprob) and logprob <= 0 for logprob in logprobs)
    assert (finish.reason, finish.stop) == (FinishReason.LENGTH, None)
    assert [(span.start, span.end) for span in finish.versions] == [(0, 20)]
    await assert_nothing_open(engine)


class Boom(Exception):
    """Exception of an author's code."""


async def leave_by_break(engine: VllmEngine, stream: DeltaStream, read: list[Delta]) -> None:
    async with stream as deltas:
        async for delta in deltas:
            read.append(delta)
            if len(read) == 3:
                break


async def leave_by_exception(engine: VllmEngine, stream: DeltaStream, read: list[Delta]) -> None:
    try:
        async with stream as deltas:
            async for delta in deltas:
                read.append(delta)
                if len(read) == 3:
                    raise Boom
    except Boom:
        return
    pytest.fail("the exception was lost")


async def leave_by_cancellation(engine: VllmEngine, stream: DeltaStream, read: list[Delta]) -> None:
    with anyio.CancelScope() as scope:
        async with stream as deltas:
            async for delta in deltas:
                read.append(delta)
                if len(read) == 3:
                    scope.cancel()
    assert scope.cancelled_caught


async def leave_by_timeout(engine: VllmEngine, stream: DeltaStream, read: list[Delta]) -> None:
    with anyio.CancelScope() as scope:
        async with stream as deltas:
            async for delta in deltas:
                read.append(delta)
                if len(read) == 3:
                    scope.deadline = anyio.current_time()
    assert scope.cancelled_caught


async def leave_without_reading(engine: VllmEngine, stream: DeltaStream, read: list[Delta]) -> None:
    sampled = engine.stats().open
    async with stream:
        with anyio.fail_after(WATCHDOG_SECONDS):
            while engine.stats().open == sampled:
                await sample(engine, request(1))


EXITS = [leave_by_break, leave_by_exception, leave_by_cancellation, leave_by_timeout, leave_without_reading]


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("acts_on_deltas", [True, False], ids=["id by id", "in groups"])
@pytest.mark.parametrize("leave", EXITS, ids=[leave.__name__ for leave in EXITS])
async def test_every_exit_leaves_nothing_open_and_keeps_what_was_sampled(
    engine: VllmEngine,
    leave: Callable[[VllmEngine, DeltaStream, list[Delta]], Awaitable[None]],
    acts_on_deltas: bool,
) -> None:
    read: list[Delta] = []
    stream = engine.stream(request(LONG_TURN_TOKENS, seed=7, acts_on_deltas=acts_on_deltas))
    await leave(engine, stream, read)
    await assert_nothing_open(engine)
    ids, logprobs = joined(read + stream.rest)
    assert 0 < len(ids) == len(logprobs) < LONG_TURN_TOKENS
    assert stream.finish is not None
    assert stream.finish.reason is FinishReason.ABORT
    assert [(span.start, span.end) for span in stream.finish.versions] == [(0, len(ids))]
    assert stream.rest[-1].finish is stream.finish


async def test_finish_that_was_not_read_keeps_its_reason_and_ids(engine: VllmEngine) -> None:
    stream = engine.stream(request(3))
    async with stream:
        with anyio.fail_after(WATCHDOG_SECONDS):
            await sample(engine, request(20))
    assert stream.finish is not None
    assert stream.finish.reason is FinishReason.LENGTH
    assert len(joined(stream.rest)[0]) == 3


@types.coroutine
def suspended(coroutine: Coroutine[Any, Any, None], at: int, cancel: Callable[[], None]) -> Generator[Any, Any, int]:
    """Run the coroutine, cancel it when it suspends for the `at`-th time, and return the number of suspensions."""
    count = 0
    error: BaseException | None = None
    while True:
        try:
            awaited = coroutine.send(None) if error is None else coroutine.throw(error)
        except StopIteration:
            return count
        error = None
        count += 1
        if count == at:
            cancel()
        try:
            yield awaited
        except BaseException as raised:
            error = raised


async def test_cancelling_at_every_suspension_point_leaves_nothing_open(engine: VllmEngine) -> None:
    async def play() -> None:
        async with engine.stream(request(LONG_TURN_TOKENS, acts_on_deltas=True)) as stream:
            for _ in range(3):
                await anext(stream)

    with anyio.fail_after(WATCHDOG_SECONDS):
        points = await suspended(play(), at=0, cancel=lambda: None)
        assert points >= 3
        for at in range(1, points + 2):
            with anyio.CancelScope() as scope:
                await suspended(play(), at, scope.cancel)
            await assert_nothing_open(engine)


async def test_cancelled_while_adding_leaves_nothing_open(engine: VllmEngine) -> None:
    stream = engine.stream(request(LONG_TURN_TOKENS))
    entered = anyio.Event()
    with anyio.CancelScope() as scope:
        scope.cancel()
        with anyio.CancelScope(shield=True):
            await stream.__aenter__()
            entered.set()
        await stream.__aexit__(None, None, None)
    assert entered.is_set()
    assert stream.finish is not None
    await assert_nothing_open(engine)


async def test_cancelled_at_the_gate_never_reaches_the_engine(engine: VllmEngine) -> None:
    async def hold() -> None:
        async with engine.stream(request(LONG_TURN_TOKENS)) as stream:
            async for _ in stream:
                pass

    async with anyio.create_task_group() as tasks:
        for _ in range(engine.places):
            tasks.start_soon(hold)
        with anyio.fail_after(WATCHDOG_SECONDS):
            while engine.vllm.gate.inside < engine.places:
                await anyio.lowlevel.checkpoint()
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as waiting:
                    waiting.start_soon(hold)
                    while not engine.stats().waiting:
                        await anyio.lowlevel.checkpoint()
                    scope.cancel()
        assert engine.stats().waiting == 0
        assert engine.vllm.gate.inside == engine.places
        tasks.cancel_scope.cancel()
    await assert_nothing_open(engine)


async def test_more_requests_than_places_all_end_and_never_more_are_inside(engine: VllmEngine) -> None:
    inside: set[int] = set()
    done: list[int] = []

    async def play() -> None:
        async with engine.stream(request(12)) as stream:
            async for _ in stream:
                inside.update((engine.stats().open, engine.vllm.gate.inside))
        done.append(1)

    with anyio.fail_after(WATCHDOG_SECONDS):
        async with anyio.create_task_group() as tasks:
            for _ in range(3 * engine.places):
                tasks.start_soon(play)
    assert len(done) == 3 * engine.places
    assert max(inside) == engine.places
    await assert_nothing_open(engine)


async def test_late_turns_enter_before_first_ones(engine: VllmEngine) -> None:
    order: list[str] = []

    async def play(name: str, session: Session) -> None:
        async with engine.stream(request(16, session=session)) as stream:
            order.append(name)
            async for _ in stream:
                pass
        engine.close_session(session)

    with anyio.fail_after(WATCHDOG_SECONDS):
        async with anyio.create_task_group() as tasks:
            for _ in range(engine.places):
                tasks.start_soon(play, "inside", engine.session())
            await anyio.wait_all_tasks_blocked()
            for _ in range(3):
                tasks.start_soon(play, "first", engine.session())
            await anyio.wait_all_tasks_blocked()
            for _ in range(3):
                tasks.start_soon(play, "late", engine.session(late=True))
    assert order == ["inside"] * engine.places + ["late"] * 3 + ["first"] * 3
    await assert_nothing_open(engine)


async def test_equal_seeds_sample_equal_ids(engine: VllmEngine) -> None:
    first, again, other = [(await sample(engine, request(16, seed=seed)))[0] for seed in (5, 5, 6)]
    assert first == again != other


async def test_ids_one_by_one_are_the_ids_in_groups(engine: VllmEngine) -> None:
    sizes: dict[bool, list[int]] = {}
    ids: dict[bool, list[int]] = {}
    for one_by_one in (True, False):
        async with engine.stream(request(20, seed=3, acts_on_deltas=one_by_one)) as stream:
            deltas = [delta async for delta in stream]
        sizes[one_by_one] = [len(delta.token_ids) for delta in deltas]
        ids[one_by_one] = joined(deltas)[0]
    assert ids[True] == ids[False]
    assert sizes[False][0] == 1, "the first id comes at once"
    assert len(sizes[False]) < len(sizes[True])


async def test_a_stop_id_ends_the_turn_and_is_its_last_id(engine: VllmEngine) -> None:
    ids, _, _ = await sample(engine, request(8, temperature=0))
    stop = next(token for token in ids if ids.index(token) > 1)
    cut, logprobs, finish = await sample(engine, request(8, temperature=0, stop_ids=(2, stop)))
    assert cut == ids[: ids.index(stop) + 1]
    assert len(logprobs) == len(cut)
    assert (finish.reason, finish.stop) == (FinishReason.STOP, stop)


async def test_the_engine_stops_at_no_id_that_was_not_given(engine: VllmEngine) -> None:
    constraint = Constraint(ConstraintKind.CHOICE, '["7"]')  # after it, the grammar allows only EOS
    ids, _, finish = await sample(engine, request(5, constraint=constraint, stop_ids=()))
    assert finish.reason is FinishReason.LENGTH
    assert len(ids) == 5


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (ConstraintKind.REGEX, "(ab){3}", "ababab"),
        (ConstraintKind.CHOICE, '["one and only"]', "one and only"),
        (ConstraintKind.GRAMMAR, 'root ::= "x" "y"', "xy"),
        (ConstraintKind.JSON, '{"const": 17}', "17"),
    ],
    ids=lambda value: value.value if isinstance(value, ConstraintKind) else "",
)
async def test_a_constraint_is_enforced_and_its_mask_is_in_the_logprobs(
    engine: VllmEngine, kind: ConstraintKind, value: str, expected: str
) -> None:
    wanted = request(20, constraint=Constraint(kind, value), stop_ids=engine.stop_ids)
    ids, logprobs, finish = await sample(engine, wanted)
    assert engine.tokenizer.decode(ids[:-1]) == expected
    assert finish.stop == ids[-1] == engine.tokenizer.eos_id
    assert logprobs[-1] == pytest.approx(0, abs=1e-4), "only the end was allowed"


async def test_the_prompt_is_copied(engine: VllmEngine) -> None:
    wanted = request(6)
    prompt = wanted.prompt
    before = list(prompt)
    await sample(engine, wanted)
    assert list(prompt) == before


async def test_cached_ids_prove_that_a_prompt_was_extended(engine: VllmEngine) -> None:
    wanted = request(40, length=100)
    ids, _, _ = await sample(engine, wanted)
    longer = dataclasses.replace(request(1), prompt=[*wanted.prompt, *ids, 1, 2, 3])
    _, _, finish = await sample(engine, longer)
    assert finish.cached_tokens == (len(wanted.prompt) + len(ids) - 1) // 32 * 32


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize(
    "wanted",
    [
        request(length=4096),
        request(length=0),
        dataclasses.replace(request(), prompt=[10**7]),
        request(constraint=Constraint(ConstraintKind.REGEX, "(")),
        request(stop_ids=(-5,)),
        dataclasses.replace(request(), sampling=dataclasses.replace(Sampling.defaults(), adapter="unknown")),
    ],
    ids=["too long", "empty", "unknown id", "bad regex", "bad stop id", "unknown adapter"],
)
async def test_a_rejected_request_hurts_only_itself(engine: VllmEngine, wanted: GenerationRequest) -> None:
    async with engine.stream(request(12)) as sibling:
        with pytest.raises(RequestRejected, match=wanted.name):
            async with engine.stream(wanted):
                pytest.fail("it was admitted")
        ids = [token async for delta in sibling for token in delta.token_ids]
    assert len(ids) == 12
    await assert_nothing_open(engine)


async def test_a_session_keeps_room_until_it_is_closed(engine: VllmEngine) -> None:
    session = engine.session()
    await sample(engine, request(10, length=50, session=session))
    assert session.tokens == 96, "50 + 10 sampled + 10 that may follow, in blocks of 32"
    assert engine.stats().live_sessions == 1
    engine.close_session(session)
    assert engine.stats().live_sessions == 0


async def test_engine_describes_itself(engine: VllmEngine) -> None:
    described = engine.describe()
    assert described["kind"] == "vllm"
    assert described["arguments"] == {"max_num_seqs": 16, "max_model_len": 4096}
    assert described["chosen"]["logprobs_mode"] == "processed_logprobs"
    assert described["versions_stamped_by"] == "vllm"
    assert {"torch", "transformers"} < set(described["versions"])
    assert (engine.context, engine.places, engine.stop_ids) == (4096, 16, (2,))
    assert engine.template.name == "pythonic"


async def test_entering_twice_is_refused(engine: VllmEngine) -> None:
    with pytest.raises(RuntimeError, match="already running"):
        await engine.__aenter__()
    assert engine.is_alive()
    await engine.health()
