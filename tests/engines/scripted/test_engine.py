"""The scripted engine: its replies, its finish reasons, and the times of its deltas."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import pytest
import trio.testing
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

from runner.engines.base import FinishReason, GenerationRequest
from runner.engines.scripted.script import Chunks, cut_points
from runner.errors import BadOption, RequestRejected
from runner.testing import Latency, ModelCall, Reply, ScriptedEngine, call, play_many_async
from runner.tokens.template import ChatTemplate
from runner.tools.tool import tool
from tests.conformance.corpus import VARIABLES, corpus
from tests.engines.engine_requests import END, STOP, converse, request, say
from tests.playing import Plain

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends]


# --- replies


async def test_a_text_is_encoded_and_the_stop_id_appended() -> None:
    async with ScriptedEngine("42") as engine:
        said = await say(engine)
    assert said.ids == [52, 50, STOP]
    assert said.end == (FinishReason.STOP, STOP)


async def test_concurrent_conversations_read_the_list_from_its_start() -> None:
    replies = ["one", "two", "three"]
    answers: list[list[str]] = []

    async def talk(engine: ScriptedEngine, number: int) -> None:
        answers.append(await converse(engine, 3, f"{number}/main"))

    engine = ScriptedEngine(replies, latency=Latency(jitter=5), places=7)
    async with engine, anyio.create_task_group() as tasks:
        for number in range(64):
            tasks.start_soon(talk, engine, number)
    assert answers == [[reply + END for reply in replies]] * 64


async def test_exhausted_list_rejects_the_request_with_its_length() -> None:
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


async def test_reply_function_receives_episode_agent_turn_and_prompt() -> None:
    calls: list[tuple[str, str, int, int, str, Sequence[int]]] = []

    def model(asked: ModelCall) -> str:
        calls.append((asked.episode, asked.agent, asked.turn, asked.number, asked.prompt, asked.prompt_ids))
        return "yes"

    async with ScriptedEngine(model) as engine:
        await converse(engine, 2, "a/b/main")
        await say(engine, request("alone"))
    assert calls == [
        ("a/b", "main", 0, 0, "Hi", [72, 105]),
        ("a/b", "main", 1, 1, "Hi", [72, 105]),
        ("alone", "main", 0, 2, "Hi", [72, 105]),
    ]


async def test_async_function_is_awaited_and_cancellable() -> None:
    async def model(asked: ModelCall) -> str:
        await anyio.sleep_forever()
        return "never"

    async with ScriptedEngine(model, places=1) as engine:
        for _ in range(2):  # the first request has freed its place
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(say, engine)
                    while not engine.stats().open:
                        await checkpoint()
                    scope.cancel()
            assert engine.stats().open == 0


async def test_exception_of_a_function_reaches_the_author() -> None:
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


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("text", ["", "I look.", "Hm.\n</think>\n\nI look."])
async def test_calls_close_a_thought_that_the_prompt_opened(text: str) -> None:
    entry = next(each for each in corpus() if each.name == "Qwen3.5-4B")
    template = ChatTemplate(entry.text, name=entry.name, variables=VARIABLES)

    class Looks(Plain):
        @tool
        def look(self) -> str:
            """Look."""
            return "a heron"

    (played,) = await play_many_async(
        Looks, ScriptedEngine([Reply(text, calls=[call("look")]), "x"], template=template)
    )
    turn = played.turns[0]
    assert (turn.reasoning, turn.text) == ("Hm." if "Hm." in text else "", "I look." if text else "")
    assert [(each.name, each.failed) for each in turn.tool_calls] == [("look", False)]


@pytest.mark.parametrize("nothing", [[], {}, 7, [7], [["text in a list of calls"]]], ids=repr)
def test_value_that_is_not_a_reply_is_refused_at_construction(nothing: Any) -> None:
    with pytest.raises(BadOption, match="give"):
        ScriptedEngine(nothing)


@pytest.mark.parametrize(
    "settings",
    [{"context": 1}, {"places": 0}, {"room": 0}, {"tick": -1}, {"chunks": 0}, {"chunks": ()}, {"chunks": "words"}],
    ids=repr,
)
def test_invalid_setting_is_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(BadOption, match=next(iter(settings))):
        ScriptedEngine("x", **settings)


# --- finish reasons


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


async def test_forced_ids_override_the_script() -> None:
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


# --- times of deltas


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


async def test_ids_come_one_by_one_when_deltas_are_acted_on() -> None:
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
    """Time of each delta, in ticks of one second."""

    started: float

    async def read(self, engine: ScriptedEngine, asked: GenerationRequest) -> list[tuple[int, int]]:
        """Return (tick, ids) of each delta."""
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
            await anyio.sleep(1000)  # no time passes for an idle engine
            clock = Clock(anyio.current_time())
            assert await clock.read(engine, request()) == arrivals

    trio.run(main, clock=virtual_clock)


def test_many_streams_share_the_ticks(virtual_clock: trio.testing.MockClock) -> None:
    readings: list[list[tuple[int, int]]] = []

    async def main() -> None:
        async with ScriptedEngine("abc", latency=Latency(first=1, between=1), chunks=1, places=500, tick=1.0) as engine:
            clock = Clock(anyio.current_time())

            async def listen() -> None:
                readings.append(await clock.read(engine, request()))

            async with anyio.create_task_group() as tasks:
                for _ in range(500):
                    tasks.start_soon(listen)

    trio.run(main, clock=virtual_clock)
    assert readings == [[(2, 1), (3, 1), (4, 1), (5, 1)]] * 500
