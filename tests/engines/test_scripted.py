"""The scripted engine: what it says, how it arrives, and every fault on demand."""

import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio
import pytest
import trio.testing
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from runner.engines.base import Delta, DeltaStream, FinishReason, GenerationRequest, Session
from runner.engines.script import Chunks, cut_points
from runner.errors import BadOption, EngineDead, RequestRejected
from runner.options import Constraint, ConstraintKind, Sampling
from runner.testing import Fault, Latency, ModelCall, Reply, ScriptedEngine, call, no_leaks
from runner.tokens.byte_tokenizer import ByteTokenizer

pytestmark = pytest.mark.anyio

END = "<|im_end|>"
STOP = ByteTokenizer().token_id(END)
assert STOP is not None


def request(name: str = "episode/main/0", *, max_tokens: int = 1000, **fields: Any) -> GenerationRequest:
    fields = {"prompt": [72, 105], "stop_ids": (STOP,), **fields}
    return GenerationRequest(name=name, sampling=replace(Sampling.defaults(), max_tokens=max_tokens), **fields)


@dataclass
class Said:
    """What one request was answered."""

    deltas: list[Delta]
    stream: DeltaStream

    @property
    def ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    @property
    def logprobs(self) -> list[float]:
        return [logprob for delta in self.deltas for logprob in delta.logprobs or ()]

    @property
    def sizes(self) -> list[int]:
        return [len(delta.token_ids) for delta in self.deltas]

    @property
    def text(self) -> str:
        return ByteTokenizer().decode(self.ids)

    @property
    def end(self) -> tuple[FinishReason, int | str | None]:
        assert self.stream.finish is not None
        return self.stream.finish.reason, self.stream.finish.stop


async def say(engine: ScriptedEngine, asked: GenerationRequest | None = None) -> Said:
    stream = engine.stream(asked or request())
    async with stream:
        deltas = [delta async for delta in stream]
    return Said(deltas, stream)


async def converse(engine: ScriptedEngine, turns: int, name: str = "episode/main") -> list[str]:
    session = engine.session()
    said = [await say(engine, request(f"{name}/{turn}", session=session)) for turn in range(turns)]
    engine.close_session(session)
    return [turn.text for turn in said]


# --- what it says


async def test_a_text_is_encoded_and_the_stop_id_appended() -> None:
    async with ScriptedEngine("42") as engine:
        said = await say(engine)
    assert said.ids == [52, 50, STOP]
    assert said.end == (FinishReason.STOP, STOP)


async def test_every_conversation_reads_the_list_from_its_beginning_however_many_talk_at_once() -> None:
    replies = ["one", "two", "three"]
    heard: list[list[str]] = []

    async def talk(engine: ScriptedEngine, number: int) -> None:
        heard.append(await converse(engine, 3, f"{number}/main"))

    engine = ScriptedEngine(replies, latency=Latency(jitter=5), places=7)
    async with engine, anyio.create_task_group() as tasks:
        for number in range(64):
            tasks.start_soon(talk, engine, number)
    assert heard == [[reply + END for reply in replies]] * 64


async def test_a_list_that_is_exhausted_rejects_and_says_so() -> None:
    async with ScriptedEngine(["one"]) as engine:
        with pytest.raises(RequestRejected, match=r"list of 1 replies is exhausted.* number 2"):
            await converse(engine, 2)


async def test_a_request_without_a_session_is_a_conversation_of_its_own() -> None:
    async with ScriptedEngine(["one", "two"]) as engine:
        assert [(await say(engine)).text for _ in range(2)] == ["one" + END] * 2
        assert engine.stats().live_sessions == 0


async def test_each_agent_has_replies_of_its_own() -> None:
    async with ScriptedEngine({"main": ["hello", "bye"], "user": "hm"}) as engine:
        assert await converse(engine, 2, "7/main") == ["hello" + END, "bye" + END]
        assert await converse(engine, 2, "7/user") == ["hm" + END] * 2
        with pytest.raises(RequestRejected, match="no replies for agent 'judge', only for main, user"):
            await converse(engine, 1, "7/judge")


async def test_a_function_is_told_of_the_turn() -> None:
    heard: list[tuple[str, str, int, int, str, Sequence[int]]] = []

    def model(asked: ModelCall) -> str:
        heard.append((asked.episode, asked.agent, asked.turn, asked.number, asked.prompt, asked.prompt_ids))
        return "yes"

    async with ScriptedEngine(model) as engine:
        await converse(engine, 2, "a/b/main")
        await say(engine, request("alone"))
    assert heard == [
        ("a/b", "main", 0, 0, "Hi", [72, 105]),
        ("a/b", "main", 1, 1, "Hi", [72, 105]),
        ("alone", "main", 0, 2, "Hi", [72, 105]),
    ]


async def test_an_async_function_is_awaited_and_can_be_cancelled_without_a_trace() -> None:
    async def model(asked: ModelCall) -> str:
        await anyio.sleep_forever()
        return "never"

    async with ScriptedEngine(model, places=1) as engine:
        for _ in range(2):  # the place was given back
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(say, engine)
                    while not engine.stats().open:
                        await checkpoint()
                    scope.cancel()
            assert engine.stats().open == 0


async def test_what_a_function_raises_reaches_the_author_and_leaves_nothing_open() -> None:
    def model(asked: ModelCall) -> str:
        raise ZeroDivisionError("in the script")

    async with ScriptedEngine(model, places=1) as engine:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="in the script"):
                await say(engine)
        assert engine.stats().open == engine.stats().waiting == 0


async def test_random_numbers_of_a_function_follow_from_the_seeds_alone() -> None:
    def model(asked: ModelCall) -> str:
        return str(asked.rng.random())

    async def draw(engine_seed: int, **fields: Any) -> str:
        async with ScriptedEngine(model, seed=engine_seed) as engine:
            return (await say(engine, request(**fields))).text

    first = await draw(1, seed=5)
    assert await draw(1, seed=5, prompt=[1]) == first
    assert await draw(1, seed=6) != first
    assert await draw(2, seed=5) != first
    assert await draw(1, prompt=[1]) != await draw(1, prompt=[2])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("pythonic", "Let me see.\n[add(a=17, b=25), name(of='x')]"),
        (
            "hermes",
            'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>\n'
            '<tool_call>\n{"name": "name", "arguments": {"of": "x"}}\n</tool_call>',
        ),
    ],
)
async def test_calls_are_written_in_the_form_of_the_template(template: str, text: str) -> None:
    calls = [call("add", a=17, b=25), call("name", of="x")]
    async with ScriptedEngine([Reply("Let me see.", calls=calls), calls, calls[0]], template=template) as engine:
        said = await converse(engine, 3)
    both = text.removeprefix("Let me see.\n")
    assert said[:2] == [text + END, both + END]
    assert said[2] in ("[add(a=17, b=25)]" + END, both.split("\n<tool_call>")[0] + END)


@pytest.mark.parametrize("nothing", [[], {}, 7, [7], [["text in a list of calls"]]], ids=repr)
def test_what_is_no_reply_is_refused_when_the_engine_is_made(nothing: Any) -> None:
    with pytest.raises(BadOption, match="give"):
        ScriptedEngine(nothing)


@pytest.mark.parametrize(
    "settings",
    [{"context": 1}, {"places": 0}, {"room": 0}, {"tick": -1}, {"chunks": 0}, {"chunks": ()}, {"chunks": "words"}],
    ids=repr,
)
def test_a_setting_that_cannot_be_is_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(BadOption, match=next(iter(settings))):
        ScriptedEngine("x", **settings)


# --- how it ends


@pytest.mark.parametrize(
    ("reply", "ids", "end"),
    [
        (Reply(ids=[1, 2, STOP]), [1, 2, STOP], (FinishReason.STOP, STOP)),
        (Reply(ids=[1, STOP, 2]), [1, STOP], (FinishReason.STOP, STOP)),
        (Reply(f"a{END}b"), [97, STOP], (FinishReason.STOP, STOP)),
        (Reply("ab", finish="length"), [97, 98], (FinishReason.LENGTH, None)),
        (Reply("ab", stop=7), [97, 98, 7], (FinishReason.STOP, 7)),
        (Reply("", finish="repetition"), [], (FinishReason.REPETITION, None)),
        (Reply("abcdef"), [97, 98, 99, 100], (FinishReason.LENGTH, None)),
        (Reply("abc"), [97, 98, 99, STOP], (FinishReason.STOP, STOP)),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_a_turn_ends_where_the_request_ends_it(
    reply: Reply, ids: list[int], end: tuple[FinishReason, int | None]
) -> None:
    async with ScriptedEngine(reply) as engine:
        said = await say(engine, request(max_tokens=4))
    assert (said.ids, said.end) == (ids, end)
    assert said.deltas[-1].finish is not None
    assert len(said.logprobs) == len(ids)


async def test_the_context_cuts_a_turn_as_length() -> None:
    async with ScriptedEngine("abcdef", context=5) as engine:
        said = await say(engine)
    assert (said.text, said.end) == ("abc", (FinishReason.LENGTH, None))


async def test_the_stop_id_is_one_that_the_request_names() -> None:
    async with ScriptedEngine("a") as engine:
        assert (await say(engine, request(stop_ids=(9, 8)))).ids == [97, 9]
        assert (await say(engine, request(stop_ids=(9, STOP)))).ids == [97, STOP]
        assert (await say(engine, request(stop_ids=()))).ids == [97, STOP]


async def test_forced_ids_are_sampled_whatever_the_script_says() -> None:
    async with ScriptedEngine(["never"]) as engine:
        said = await say(engine, request(extra={"force": [5, 6, STOP]}))
        assert (said.ids, said.end) == ([5, 6, STOP], (FinishReason.STOP, STOP))
        assert (await say(engine, request(extra={"force": [5, 6]}))).end == (FinishReason.LENGTH, None)


# --- log-probabilities


async def test_logprobs_follow_from_the_seeds_and_nothing_else() -> None:
    async def logprobs(engine_seed: int, chunks: Chunks = None, **fields: Any) -> list[float]:
        async with ScriptedEngine("some words", seed=engine_seed, chunks=chunks) as engine:
            await say(engine, request(prompt=[1]))
            return (await say(engine, request(**fields))).logprobs

    first = await logprobs(3, seed=1)
    assert len(first) == 11
    assert len(set(first)) == 11
    assert all(value < 0 for value in first)
    assert await logprobs(3, chunks=1, seed=1) == first
    assert await logprobs(3, seed=2) != first
    assert await logprobs(4, seed=1) != first
    assert await logprobs(3, prompt=[1, 2]) != await logprobs(3, prompt=[1, 3])


async def test_logprobs_can_be_given_and_left_out() -> None:
    async with ScriptedEngine([Reply(ids=[1, 2], logprobs=[-0.5, -0.25])]) as engine:
        said = await say(engine)
        assert said.logprobs[:2] == [-0.5, -0.25]
        assert len(said.logprobs) == len(said.ids) == 3
    async with ScriptedEngine("x", logprobs=False) as engine:
        assert [delta.logprobs for delta in (await say(engine)).deltas] == [None] * 2


async def test_a_turn_longer_than_the_noise_has_a_logprob_for_each_id() -> None:
    async with ScriptedEngine("x" * 20_000) as engine:
        assert len((await say(engine, request(max_tokens=30_000))).logprobs) == 20_001


# --- how it arrives


@pytest.mark.parametrize(
    ("chunks", "sizes"),
    [
        (None, [1, 8, 1]),
        (1, [1] * 10),
        (4, [4, 4, 2]),
        ("whole", [10]),
        ((1, 3), [1, 3, 1, 3, 1, 1]),
        ((10,), [10]),
        ((11,), [10]),
    ],
    ids=repr,
)
async def test_ids_come_in_the_chunks_that_were_asked_for(chunks: Chunks, sizes: list[int]) -> None:
    async with ScriptedEngine("123456789", chunks=chunks) as engine:
        assert (await say(engine)).sizes == sizes
    async with ScriptedEngine(Reply("123456789", chunks=chunks), chunks=2, lone_finish=True) as engine:
        said = await say(engine)
        assert said.sizes == ([2] * 5 if chunks is None else sizes) + [0]
        assert [delta.finish is None for delta in said.deltas] == [True] * (len(said.sizes) - 1) + [False]


async def test_ids_come_one_by_one_where_somebody_acts_on_deltas() -> None:
    async with ScriptedEngine("123") as engine:
        assert (await say(engine, request(acts_on_deltas=True))).sizes == [1] * 4


@given(
    length=st.integers(0, 200),
    chunks=st.none()
    | st.integers(1, 50)
    | st.sampled_from(["whole", "random"])
    | st.lists(st.integers(1, 9), min_size=1),
    singly=st.booleans(),
)
def test_cutting_loses_no_id_and_makes_no_empty_delta(length: int, chunks: Any, singly: bool) -> None:
    cuts = cut_points(length, chunks, singly=singly, rng=random.Random(length))
    assert cuts == sorted(set(cuts))
    assert cuts[-1:] == ([length] if length else [])
    assert all(cut > 0 for cut in cuts)


async def test_random_chunks_follow_from_the_seed_of_the_request() -> None:
    async with ScriptedEngine("x" * 100, chunks="random") as engine:
        first = (await say(engine, request(seed=1))).sizes
        assert (await say(engine, request(seed=1))).sizes == first
        assert (await say(engine, request(seed=2))).sizes != first
        assert sum(first) == 101


@dataclass
class Clock:
    """When each delta came, in ticks of one second."""

    started: float

    async def read(self, engine: ScriptedEngine, asked: GenerationRequest) -> list[tuple[int, int]]:
        """(tick, ids) of each delta."""
        async with engine.stream(asked) as stream:
            return [(round(anyio.current_time() - self.started), len(delta.token_ids)) async for delta in stream]


@pytest.fixture
def virtual_clock() -> trio.testing.MockClock:
    return trio.testing.MockClock(autojump_threshold=0)


@pytest.mark.parametrize(
    ("latency", "chunks", "arrivals"),
    [
        (Latency(), None, [(1, 1), (1, 3)]),
        (Latency(first=5), None, [(6, 1), (6, 3)]),
        (Latency(between=2), 1, [(1, 1), (3, 1), (5, 1), (7, 1)]),
        (Latency(first=3, between=2), (1, 3), [(4, 1), (10, 3)]),
        (Latency(first=3, between=2), "whole", [(10, 4)]),
    ],
    ids=repr,
)
def test_deltas_arrive_at_their_ticks(
    virtual_clock: trio.testing.MockClock, latency: Latency, chunks: Chunks, arrivals: list[tuple[int, int]]
) -> None:
    async def main() -> None:
        async with ScriptedEngine("abc", latency=latency, chunks=chunks, tick=1.0) as engine:
            await anyio.sleep(1000)  # no time passes for an engine that has nothing to do
            clock = Clock(anyio.current_time())
            assert await clock.read(engine, request()) == arrivals

    trio.run(main, clock=virtual_clock)


def test_many_streams_share_the_ticks(virtual_clock: trio.testing.MockClock) -> None:
    heard: list[list[tuple[int, int]]] = []

    async def main() -> None:
        async with ScriptedEngine("abc", latency=Latency(first=1, between=1), chunks=1, places=500, tick=1.0) as engine:
            clock = Clock(anyio.current_time())

            async def listen() -> None:
                heard.append(await clock.read(engine, request()))

            async with anyio.create_task_group() as tasks:
                for _ in range(500):
                    tasks.start_soon(listen)

    trio.run(main, clock=virtual_clock)
    assert heard == [[(2, 1), (3, 1), (4, 1), (5, 1)]] * 500


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


async def test_a_reject_refuses_one_request_and_hurts_nobody_else() -> None:
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


async def test_death_fails_everybody_in_flight_and_at_the_gate_and_later_with_one_cause() -> None:
    heard: list[list[int]] = []
    errors: list[EngineDead] = []
    long = Reply("x" * 50, chunks=1)
    async with ScriptedEngine(
        [long], latency=Latency(between=1), places=4, faults={2: Fault.death(3, "out of memory")}
    ) as engine:
        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(listen_to, engine, heard, errors, engine.session())
        assert len(errors) == 10
        assert {str(error) for error in errors} == {"The engine died: out of memory"}
        assert len({id(error) for error in errors}) == 10
        assert len({id(error.__cause__) for error in errors}) == 1
        assert sorted(map(len, heard))[:6] == [0] * 6  # they were at the gate
        assert all(len(read) >= 2 for read in heard[:4])
        with pytest.raises(EngineDead, match="out of memory"):
            await say(engine)
        with pytest.raises(EngineDead, match="out of memory"):
            await engine.health()
        assert not engine.is_alive()
        assert (engine.stats().open, engine.stats().waiting) == (0, 0)


async def test_what_had_come_before_the_death_is_kept() -> None:
    async with ScriptedEngine(Reply("abcdef", chunks=1), latency=Latency(between=1)) as engine:
        stream = engine.stream(request())
        async with stream:
            first = await anext(stream)
            engine.die("somebody pulled the plug")
        assert list(first.token_ids) == [97]
        assert stream.finish is not None
        assert stream.finish.reason is FinishReason.ERROR
        assert stream.finish.stop == "The engine died: somebody pulled the plug"


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


async def test_what_was_asked_and_got_is_recorded_where_it_is_wanted(recording: ScriptedEngine) -> None:
    constraint = Constraint(ConstraintKind.CHOICE, '["one"]')
    prompt = [1, 2, 3]
    async with recording.stream(request("e/main/0", prompt=prompt, seed=5, constraint=constraint)) as stream:
        prompt.append(4)  # the engine's copy is its own
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
        assert not engine._open
        assert not engine._ticker._due
        assert engine.stats().sampled_tokens == 12


async def test_a_session_of_another_engine_is_refused() -> None:
    async with ScriptedEngine("one", places=1) as engine:
        for _ in range(2):
            with pytest.raises(TypeError, match=r"engine.session\(\)"):
                await say(engine, request(session=Session()))


async def test_entering_twice_is_refused() -> None:
    async with ScriptedEngine("one") as engine:
        with pytest.raises(RuntimeError, match="running already"):
            await engine.__aenter__()


async def test_an_exception_leaves_the_engine_as_it_was_raised_and_nothing_stays() -> None:
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


async def test_closing_the_engine_fails_who_is_still_in_flight() -> None:
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
