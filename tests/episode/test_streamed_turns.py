"""A streamed turn: its parts add up to the finished turn, and a reader that leaves cuts the turn there."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner import (
    ContentPiece,
    Conversation,
    EpisodeOver,
    Limits,
    Outcome,
    ReasoningPiece,
    Sampling,
    ToolCalled,
    Turn,
    TurnEvent,
    TurnRestarted,
    tool,
)
from runner.engines.base import FinishReason
from runner.messages import ToolCall
from runner.parsing.parser import TurnParser
from runner.testing import Fault, Latency, Reply, ScriptedEngine
from runner.tokens.byte_tokenizer import ByteTokenizer
from tests import sweeps
from tests.parsing.families import FAMILIES, family
from tests.playing import Plain, play, recording, talked

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends, pytest.mark.sample_cases(3)]

WORDS = ["a ", "\n", "é", "<", "so", '"', "{", "}", "  "]
CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'


class Adds(Plain):
    """Environment with a tool to call."""

    @tool
    def add(self, a: int, b: int) -> int:
        """Add two integers."""
        return a + b


def joined(events: list[TurnEvent], kind: type[ContentPiece] | type[ReasoningPiece]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def called(events: list[TurnEvent]) -> list[ToolCall]:
    return [event.call for event in events if isinstance(event, ToolCalled)]


def assert_events_equal_turn(events: list[TurnEvent], turn: Turn) -> None:
    """Assert that the events equal the turn. White space before a call counts as no content."""
    assert joined(events, ReasoningPiece) == turn.reasoning
    content = joined(events, ContentPiece)
    assert (content.lstrip() if turn.tool_calls else content) == (turn.text.lstrip() if turn.tool_calls else turn.text)
    assert called(events) == turn.tool_calls


async def events_and_turn(
    engine: ScriptedEngine, *stop: str, cut_before: int = 0, **options: Any
) -> tuple[list[TurnEvent], Turn]:
    """Return the events of one turn, received during sampling, and the turn. The message may have been cut before."""
    events, turns = list[TurnEvent](), list[Turn]()

    class Streaming(Adds):
        async def rollout(self, conversation: Conversation) -> None:
            if cut_before:
                await conversation.generate(sampling=Sampling(max_tokens=cut_before))
            async with conversation.stream(sampling=Sampling(stop=stop)) as stream:
                async for event in stream:
                    events.append(event)
            turns.append(stream.turn)

    trajectory = await play(Streaming, engine, **options)
    assert trajectory.outcome is not Outcome.ENV_ERROR, trajectory.error
    return events, turns[0]


# --- any turn


MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
said = st.lists(
    st.tuples(st.sampled_from([*MARKS, "<tool_call>", CALL, "END", *WORDS]), st.booleans()), min_size=1, max_size=10
)


@given(
    parts=said, chunks=st.sampled_from([1, 3, "whole", "random"]), stop=st.sampled_from([(), ("END",), ("so", "o E")])
)
@settings(max_examples=sweeps.times(300, 60))
def test_streamed_pieces_equal_the_turn_however_it_is_cut(
    parts: list[tuple[str, bool]], chunks: Any, stop: tuple[str, ...]
) -> None:
    tokenizer = ByteTokenizer(added_tokens=MARKS)
    ids: list[int] = []
    for text, letter_by_letter in parts:
        ids += list(text.encode()) if letter_by_letter else tokenizer.encode(text)
    engine = recording(Reply(ids=ids), template="hermes", tokenizer=tokenizer, chunks=chunks)
    events, turn = anyio.run(events_and_turn, engine, *stop)
    assert_events_equal_turn(events, turn)


def family_turn(parser: TurnParser, cut: int) -> str:
    """Return a thought, a content and a call as a family's template writes them, without the last characters."""
    call = parser.render([ToolCall("", "add", {"a": 1, "b": -2})])
    thought, channels = parser.reasoning, parser.format.harmony
    opening = "" if thought.opened_by_prompt else thought.open
    content = "<|start|>assistant<|channel|>final<|message|>So:<|end|><|start|>assistant" if channels else "So:\n"
    text = f"{opening}Three.{thought.close}{content}{call}"
    return text[: len(text) - cut]


@pytest.mark.sample_cases(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", sweeps.part(list(FAMILIES), 3))
@pytest.mark.parametrize("cut", [0, 9], ids=["whole", "cut"])
async def test_streamed_pieces_equal_the_turn_in_every_family(name: str, cut: int) -> None:
    of = family(name)
    text = family_turn(TurnParser(of.form), cut)
    engine = recording(text, template=of.template, tokenizer=of.tokenizer, stop_ids=of.stop_ids)
    events, turn = await events_and_turn(engine)
    assert_events_equal_turn(events, turn)
    assert joined(events, ReasoningPiece) == "Three."
    assert cut or [call.name for call in called(events)] == ["add"]


async def test_closing_token_before_the_stop_id_is_not_streamed() -> None:
    tokenizer = ByteTokenizer()
    end = tokenizer.encode("<|im_end|>")[0]
    engine = recording(Reply(ids=[*b"so", end], finish="length"), template="hermes", tokenizer=tokenizer, stop_ids=(7,))
    events, turn = await events_and_turn(engine)
    assert turn.text == "so"
    assert_events_equal_turn(events, turn)


async def test_possible_stop_string_is_withheld_until_it_differs() -> None:
    events, turn = await events_and_turn(recording("an ENd, the END of it", chunks=1), "END")
    assert turn.text == joined(events, ContentPiece) == "an ENd, the "


# --- during sampling


async def test_ids_sampled_before_a_pause_are_streamed() -> None:
    engine, texts = recording("one two", chunks=1, latency=Latency(between=1)), list[str]()

    async def talk(conversation: Conversation) -> None:
        async with conversation.stream() as stream:
            async for event in stream:
                assert isinstance(event, ContentPiece)
                texts.append(event.text)
                if len(texts) == 2:
                    await engine.pause("keep")
                    sampled = engine.stats().sampled_tokens
                    assert sampled < len("one two")
                    await engine.resume()

    await talked(talk, engine)
    assert texts == ["o", "n", "e", " t", "w", "o"]


async def test_call_is_streamed_when_complete_with_its_final_id() -> None:
    text = f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"
    events, turn = await events_and_turn(recording(text, template="hermes", chunks=1))
    assert [call.id for call in called(events)] == [call.id for call in turn.tool_calls] == ["call_0", "call_1"]


async def test_the_turn_is_not_there_before_it_is_over() -> None:
    async def talk(conversation: Conversation) -> None:
        async with conversation.stream() as stream:
            with pytest.raises(RuntimeError, match="the turn is not over: iterate to its end"):
                _ = stream.turn
            async for _ in stream:
                pass
            assert stream.turn.text == "yes"

    await talked(talk, recording("yes"))


# --- a reader that leaves, faults, continuations, and cuts by a trainer


async def test_turn_left_early_is_cut_and_continued_exactly() -> None:
    engine = recording(["one two three", "four"], chunks=1, latency=Latency(between=1))

    async def talk(conversation: Conversation) -> None:
        async with conversation.stream() as stream:
            async for event in stream:
                if event == ContentPiece("e"):
                    break
        assert (stream.turn.finish, stream.turn.text[:3]) == (FinishReason.ABORT, "one")
        assert len(stream.turn.text) < len("one two three")
        conversation.add("Continue.")
        await conversation.generate()

    first, second = (await talked(talk, engine)).turns
    assert second.prompt_ids[: first.end] == first.log.ids[: first.end]
    assert second.text == "four"


async def listen(conversation: Conversation) -> None:
    async with conversation.stream() as stream:
        async for _ in stream:
            raise ZeroDivisionError


async def test_exception_inside_a_stream_block_leaves_it_unchanged() -> None:
    async def talk(conversation: Conversation) -> None:
        with pytest.raises(ZeroDivisionError):
            await listen(conversation)
        conversation.add("And?")
        assert (await conversation.generate()).text == "two"

    await talked(talk, recording(["one", "two"], chunks=1))


@pytest.mark.parametrize("listens", [True, False], ids=["to the end", "not at all"])
async def test_stream_of_an_ended_episode_raises_episode_over(listens: bool) -> None:
    ended: list[bool] = []

    async def talk(conversation: Conversation) -> None:
        try:
            async with conversation.stream() as stream:
                if listens:
                    async for _ in stream:
                        pass
                else:
                    while not conversation.turns:
                        await anyio.lowlevel.checkpoint()
        except EpisodeOver:
            ended.append(True)
            raise

    trajectory = await talked(talk, recording(Reply("a longer answer", fault=Fault.error(at=5))), retries=0, breaker=1)
    assert (trajectory.outcome, ended) == (Outcome.ENGINE_ERROR, [True])


async def test_two_turns_of_one_agent_are_not_sampled_at_once() -> None:
    async def talk(conversation: Conversation) -> None:
        async with conversation.stream() as stream:
            await anyio.lowlevel.checkpoint()
            with pytest.raises(RuntimeError, match="already generating"):
                await conversation.generate()
            async for _ in stream:
                pass

    await talked(talk, recording("yes", latency=Latency(between=1)))


async def test_continued_turn_streams_only_its_new_part() -> None:
    cut = f"so\n<tool_call>\n{CALL[:20]}"
    engine = recording([Reply(cut, finish="length"), f"{CALL[20:]}\n</tool_call>"], template="hermes", chunks=3)

    events, turn = await events_and_turn(engine, cut_before=len(cut), limits=Limits(turns=5))
    assert (turn.text, joined(events, ContentPiece)) == ("so", "")
    assert called(events) == turn.tool_calls != []


async def test_restarted_turn_is_streamed_from_its_beginning() -> None:
    engine, events = recording("a longer answer", chunks=1, latency=Latency(between=1)), list[TurnEvent]()

    async def talk(conversation: Conversation) -> None:
        async def cut() -> None:
            while not events:
                await anyio.lowlevel.checkpoint()
            await engine.pause("abort")
            await engine.resume()

        async with anyio.create_task_group() as group:
            group.start_soon(cut)
            async with conversation.stream() as stream:
                async for event in stream:
                    events.append(event)  # the other task reads the events so far

    (turn,) = (await talked(talk, engine)).turns
    restarts = [at for at, event in enumerate(events) if event == TurnRestarted()]
    assert len(restarts) == 1
    assert "a longer answer".startswith(joined(events[: restarts[0]], ContentPiece))
    assert_events_equal_turn(events[restarts[0] + 1 :], turn)
