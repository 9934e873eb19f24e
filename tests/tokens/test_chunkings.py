"""The division of ids into deltas does not change the trajectory: every split of short turns, many of longer ones."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from runner import Conversation, FinishReason, Sampling, ScriptedEngine, Task, Trajectory, Turn, tool
from runner.testing import ModelCall, Reply
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.template import ChatTemplate
from runner.tokens.tokenizer import Tokenizer
from tests import sweeps
from tests.playing import Plain, play_all
from tests.tokens.families import model

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

EVERY_SPLIT_UP_TO = sweeps.times(10, 7)
SPLITS_OF_LONGER = sweeps.times(500, 30)
NEXT = "Continue."


@dataclass(frozen=True, slots=True)
class Case:
    """A turn, and its expected reading."""

    said: str
    """The turn's text, including control tokens, each of which is one id."""
    speaks: str = ""
    """The family whose vocabulary and template are used; "" for bytes and `pythonic`."""
    stop: tuple[str, ...] = ()
    """The stop strings of the sampling."""
    finish: FinishReason = FinishReason.STOP
    """The finish of the reply."""
    kept: int | None = None
    """Number of the ids that the trajectory keeps; None for all."""
    text: str = ""
    """The turn's text after reading."""
    reasoning: str = ""
    """The turn's reasoning."""
    calls: tuple[dict[str, Any], ...] = ()
    """The turn's calls."""
    reason: FinishReason = FinishReason.STOP
    """The finish reason of the turn."""
    cause: str | int | None = None
    """The stop of the turn."""
    broken: bool = False
    """True if the turn opens a call that does not parse."""


ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>'
TWO = ONE + '\n<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1}}\n</tool_call>'
STOP, CUT = FinishReason.STOP, FinishReason.LENGTH
SUM: dict[str, Any] = {"a": 17, "b": 25}
ADDED: dict[str, Any] = {"a": 1, "b": 2}

CASES = {
    "plain text": Case("It is 42.<|im_end|>", text="It is 42."),
    "plain text, real ids": Case("It is forty-two.<|im_end|>", "qwen3", text="It is forty-two."),
    "split UTF-8": Case("é🙂é<|im_end|>", text="é🙂é"),
    "split UTF-8, real ids": Case("👩‍👩‍👧 ꙮ<|im_end|>", "qwen3", text="👩‍👩‍👧 ꙮ"),
    "cut inside a character": Case("é🙂", finish=CUT, kept=5, text="é\ufffd", reason=CUT),
    "a call": Case("[add(a=17, b=25)]<|im_end|>", calls=(SUM,)),
    "a call, real ids": Case(ONE + "<|im_end|>", "qwen3", calls=(SUM,)),
    "parallel calls": Case("[add(a=17, b=25), add(b=2, a=1)]<|im_end|>", calls=(SUM, ADDED)),
    "parallel calls, real ids": Case(TWO + "<|im_end|>", "qwen3", calls=(SUM, ADDED)),
    "text beside a call": Case(f"I add.\n{ONE}<|im_end|>", "qwen3", text="I add.", calls=(SUM,)),
    "reasoning and text": Case("<think>\nCarry.\n</think>\n\n42<|im_end|>", "qwen3", text="42", reasoning="Carry."),
    "reasoning that the prompt opened": Case(
        "Carry.\n</think>\n\n42<|im_end|>", "qwen3-thinking", text="42", reasoning="Carry."
    ),
    "reasoning and a call": Case(
        f"<think>\nCarry.\n</think>\n\n{ONE}<|im_end|>", "qwen3", reasoning="Carry.", calls=(SUM,)
    ),
    "a stop string": Case("a END. b<|im_end|>", stop=("END", "ND."), kept=5, text="a ", cause="END"),
    "two stop strings in one": Case("one STOP!!<|im_end|>", stop=("OP!", "STOP"), kept=8, text="one ", cause="STOP"),
    "a stop string, real ids": Case(
        "<answer>42</answer> and so on<|im_end|>", "qwen3", stop=("</answer>",), text="<answer>42", cause="</answer>"
    ),
    "a stop string that is never complete": Case("EN EN END<|im_end|>", stop=("ENDS",), text="EN EN END"),
    "a stop string across a character": Case("aé🙂b<|im_end|>", stop=("🙂",), kept=7, text="aé", cause="🙂"),
    "a stop id with ids after it": Case("It is<|im_end|>\n<|im_start|>", kept=6, text="It is"),
    "a stop id with a stop string after it": Case("It<|im_end|>END", stop=("END",), kept=3, text="It"),
    "a stop string before a stop id": Case("a END<|im_end|>b", stop=("END",), kept=5, text="a ", cause="END"),
    "an unterminated call, cut": Case("[add(a=17, ", finish=CUT, broken=True, reason=CUT),
    "an unterminated call, stopped": Case("[add(a=17, <|im_end|>", broken=True),
    "cut by length": Case("It is 42", finish=CUT, text="It is 42", reason=CUT),
    "cut after a call": Case(f"{ONE}\nI", "qwen3", finish=CUT, text="I", calls=(SUM,), reason=CUT),
    "cut inside the reasoning": Case("<think>\nCarry the", "qwen3", finish=CUT, reasoning="Carry the", reason=CUT),
    "ids that encoding never makes": Case("f|o|r|t|y|-|t|w|o<|im_end|>", "qwen3", text="forty-two"),
}


class Adds(Plain):
    """Environment with one turn, its tool results, and another turn."""

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.stop = stop

    @tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async def rollout(self, conversation: Conversation) -> None:
        stop: tuple[str, ...] = self.task.info["stop"]
        turn = await conversation.generate(sampling=Sampling(stop=stop))
        answers = await conversation.call_tools(turn) if turn.tool_calls else []
        conversation.add(*answers or (NEXT,))
        await conversation.generate()


def ids_of(case: Case, tokenizer: Tokenizer) -> list[int]:
    pieces = case.said.split("|") if "f|o|r" in case.said else [case.said]
    if len(pieces) > 1:  # one id for each letter, followed by the stop
        return [token_id for piece in "forty-two" for token_id in tokenizer.encode(piece)] + tokenizer.encode(
            "<|im_end|>"
        )
    ids = tokenizer.encode(case.said)
    return ids[: case.kept] if case.finish is not STOP else ids


def splits(length: int, name: str) -> list[tuple[int, ...]]:
    """Return every way to split this number of ids; if there are too many, seeded ones with whole and one by one."""
    if length <= EVERY_SPLIT_UP_TO:
        return [_sizes(cuts) for cuts in itertools.product((False, True), repeat=length - 1)]
    rng = sweeps.random_of(name)
    ways = dict.fromkeys([(length,), (1,) * length])
    while len(ways) < SPLITS_OF_LONGER:
        share = rng.choice((0.1, 0.3, 0.5, 0.9))
        ways[_sizes([rng.random() < share for _ in range(length - 1)])] = None
    return list(ways)


def _sizes(cuts: Sequence[bool]) -> tuple[int, ...]:
    ends = [0, *(index + 1 for index, cut in enumerate(cuts) if cut), len(cuts) + 1]
    return tuple(after - before for before, after in itertools.pairwise(ends))


def engine_of(case: Case, ways: Sequence[tuple[int, ...]], *, lone_finish: bool) -> ScriptedEngine:
    made = model(case.speaks) if case.speaks else None
    tokenizer: Tokenizer = made.tokenizer if made else ByteTokenizer()
    ids = ids_of(case, tokenizer)

    def speak(asked: ModelCall) -> Reply:
        chunks = ways[int(asked.episode.partition("#")[0])]
        if asked.turn:
            return Reply("</think>Good.", chunks=chunks)
        return Reply(ids=ids, finish=case.finish, chunks=chunks)

    return ScriptedEngine(
        speak,
        tokenizer=tokenizer,
        template=made.template if made else ChatTemplate.load("pythonic"),
        stop_ids=made.stop_ids if made else None,
        lone_finish=lone_finish,
        record=True,
    )


def seen(turn: Turn) -> tuple[Any, ...]:
    """Return all fields of a turn except its timings and the log-probabilities, which follow from the seed."""
    calls = [(call.id, call.name, call.arguments, call.error) for call in turn.tool_calls]
    ids = tuple(turn.prompt_ids), tuple(turn.token_ids)
    what = turn.text, turn.reasoning, repr(calls), turn.finish, turn.stop
    return *ids, *what, turn.dropped, turn.thinking, turn.junction, len(turn.logprobs)


def shown(trajectory: Trajectory) -> tuple[Any, ...]:
    segments = [(tuple(segment.log.ids), tuple(segment.log.mask()), segment.cause) for segment in trajectory.segments]
    turns = tuple(map(seen, trajectory.turns))
    return turns, tuple(segments), repr(trajectory.messages), trajectory.outcome, trajectory.limit


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("name", CASES)
async def test_any_cut_of_a_turn_into_deltas_has_the_same_trajectory(name: str) -> None:
    case = CASES[name]
    tokenizer: Tokenizer = model(case.speaks).tokenizer if case.speaks else ByteTokenizer()
    ids = ids_of(case, tokenizer)
    ways = splits(len(ids), name)
    assert len(set(ways)) == len(ways)
    tasks = [Task(id=str(number), prompt="What is 17 + 25?", info={"stop": case.stop}) for number in range(len(ways))]
    engine = engine_of(case, ways, lone_finish=len(name) % 2 == 0)
    trajectories = await play_all(Adds, engine, tasks=tasks)
    assert len(trajectories) == len(ways)
    kinds = Counter(map(shown, trajectories))
    assert len(kinds) == 1, _difference(trajectories, ways)
    _check(case, ids, trajectories[0], tokenizer)


def _check(case: Case, ids: Sequence[int], trajectory: Trajectory, tokenizer: Tokenizer) -> None:
    turn = trajectory.turns[0]
    kept = list(turn.token_ids)
    assert kept == list(ids[: len(kept)])
    if case.stop and case.cause in case.stop and case.kept is None:
        assert isinstance(case.cause, str)
        assert case.cause in tokenizer.decode(kept)
        assert case.cause not in tokenizer.decode(kept[:-1])
    else:
        assert len(kept) == (len(ids) if case.kept is None else case.kept)
    assert (turn.text, turn.reasoning) == (case.text, case.reasoning)
    assert [call.arguments for call in turn.tool_calls if call.error is None] == list(case.calls)
    assert any(call.error is not None for call in turn.tool_calls) is case.broken
    ends = kept[-1] if case.reason is STOP else "max_tokens"
    assert (turn.finish, turn.stop) == (case.reason, ends if case.cause is None else case.cause)
    # The engine ends a turn at its stop id, so only ids before a stop can be dropped.
    (stop,) = tokenizer.encode("<|im_end|>")
    sampled = list(ids).index(stop) + 1 if stop in ids else len(ids)
    assert turn.dropped == sampled - len(kept)
    if len(trajectory.turns) > 1:
        following = trajectory.turns[1].prompt_ids
        assert list(following[: turn.end]) == [*turn.prompt_ids, *kept]


def _difference(trajectories: Sequence[Trajectory], ways: Sequence[tuple[int, ...]]) -> str:
    """Return the first way whose result differs from that of the first way, with the difference."""
    first = shown(trajectories[0])
    at = next(index for index, trajectory in enumerate(trajectories) if shown(trajectory) != first)
    return f"cut into {ways[0]}: {first}\ncut into {ways[at]}: {shown(trajectories[at])}"
