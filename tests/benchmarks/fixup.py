"""Cost of a turn's token fix-up by length of the history, compared with a full render and a hand-written renderer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from threading import Thread
from typing import Any, cast

import renderers.qwen3
from transformers import PreTrainedTokenizerFast

from runner import Concurrency, Environment, Message, Run, Task, reward, tool
from runner.runs.event_loop import collector_settings, on_event_loop
from runner.testing import ScriptedEngine
from runner.tokens.bridging.bridge import Bridger
from runner.tokens.template import ChatTemplate
from runner.tokens.tokenizer import VocabularyTokenizer
from runner.tokens.turn_shape import AnsweredTurn
from tests.benchmarks.environments import REPLIES
from tests.benchmarks.figures import Figure, main, on_one_core
from tests.conformance.corpus import corpus
from tests.tokens.vocabularies import vocabulary

LENGTHS = {"1k": 1_000, "10k": 10_000, "125k": 125_000}
WORDS = "The quick brown fox jumps over the lazy dog. " * 18
REPEAT_COUNT = 100
ROUND_COUNT = 7
EPISODE_COUNT = 200


def measure() -> Iterator[Figure]:
    """Cost of a turn's token fix-up by length of the history, and of whole turns on a history of 10,000 tokens."""
    on_one_core()
    tokenizer = vocabulary("qwen")
    cases = {name: _case(length, tokenizer) for name, length in LENGTHS.items()}
    bridges = _in_turns({name: case.bridge for name, case in cases.items()})
    tail = _in_turns({"tail": cases["1k"].encode_tail})["tail"]
    for name, values in bridges.items():
        yield Figure(f"bridge on {name} tokens of history", "us", values, under=median(tail) + 300)
    ratios = tuple(long / short for long, short in zip(bridges["125k"], bridges["1k"], strict=True))
    yield Figure("  125k against 1k", "x", ratios, under=1.5)
    yield Figure("  of that encoding its ids", "us", tail)
    for name, case in cases.items():
        yield Figure(f"everything rendered and encoded again, {name}", "us", _timed(case.render_anew, 1))
    for name, case in cases.items():
        yield Figure(f"renderers 0.1.12, Qwen3's bridge, {name}", "us", _timed(case.peer, 20))
    by_clock, by_processor = zip(*(on_event_loop(_turns) for _ in range(ROUND_COUNT)), strict=True)
    yield Figure("turns on 10,000 tokens of history", "turns/s", by_clock, at_least=1500)
    yield Figure("  by processor time", "turns/s", by_processor)


@dataclass(frozen=True)
class _Case:
    """One history, and the cost of a turn on top of it in several ways."""

    bridge: Callable[[], object]
    encode_tail: Callable[[], object]
    render_anew: Callable[[], object]
    peer: Callable[[], object]


def _case(length: int, tokenizer: VocabularyTokenizer) -> _Case:
    text = next(entry.text for entry in corpus() if entry.name == "Qwen-Qwen3-0.6B")
    renderer = ChatTemplate(text, name="Qwen3").renderer()
    eos = tokenizer.token_id("<|im_end|>")
    assert eos is not None
    bridger = Bridger(tokenizer, renderer, [eos])
    history, turn = _history(length, tokenizer)
    new: list[Message] = [{"role": "tool", "content": "42", "tool_call_id": f"call{turn:05}", "name": "add"}]
    sampled = [*tokenizer.encode('<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>'), eos]

    def bridge() -> list[int]:
        """Bridge as a conversation does. The comparison with a full render runs in another thread."""
        answered = AnsweredTurn(history, new, [ADD], turn, plain=True)
        tail = bridger.locality.tail_at_once(answered)
        if tail is None:
            made: list[Any] = []
            thread = Thread(target=lambda: made.append(bridger.tail(answered)))
            thread.start()
            thread.join()
            (tail,) = made
        return bridger.join(tail, sampled=sampled, stop=eos).ids

    tail = tokenizer.decode(bridge())
    prompt = list(bridger.first_prompt(history[:-1], [ADD]))
    # the compared renderer uses the library's own tokenizer
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer)
    peer = renderers.qwen3.Qwen3Renderer(fast)
    assert peer.bridge_to_next_turn(prompt, sampled, new, tools=[ADD["function"]]) is not None
    return _Case(
        bridge=bridge,
        encode_tail=lambda: tokenizer.encode(tail),
        render_anew=lambda: tokenizer.encode(renderer.render([*history, *new], tools=[ADD])),
        peer=lambda: peer.bridge_to_next_turn(prompt, sampled, new, tools=[ADD["function"]]),
    )


ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def _history(length: int, tokenizer: VocabularyTokenizer) -> tuple[list[Message], int]:
    """Tool rounds of some 200 ids, up to `length`, and the turn that is answered next."""
    each = len(tokenizer.encode(WORDS)) + 40
    rounds = length // each
    messages: list[Message] = [{"role": "user", "content": "What is 17 + 25?"}]
    for number in range(rounds):
        messages += [
            _calls(number),
            {"role": "tool", "content": WORDS, "tool_call_id": f"call{number:05}", "name": "add"},
        ]
    return [*messages, _calls(rounds)], rounds


def _calls(number: int) -> Message:
    function = {"name": "add", "arguments": {"a": 17, "b": 25}}
    call = {"id": f"call{number:05}", "type": "function", "function": function}
    return cast("Message", {"role": "assistant", "content": "", "tool_calls": [call]})


def _in_turns(ways: dict[str, Callable[[], object]]) -> dict[str, tuple[float, ...]]:
    """Microseconds of each way. The ways take turns, so that other load on the machine affects all of them alike."""
    values: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUND_COUNT):
        for name, way in ways.items():
            values[name].append(_microseconds(way, REPEAT_COUNT))
    return {name: tuple(each) for name, each in values.items()}


def _timed(way: Callable[[], object], times: int) -> tuple[float, ...]:
    return tuple(_microseconds(way, times) for _ in range(3))


def _microseconds(way: Callable[[], object], times: int) -> float:
    began = time.thread_time()
    for _ in range(times):
        way()
    return (time.thread_time() - began) / times * 1e6


class LongSums(Environment):
    """Environment with three sums on top of 10,000 tokens that precede the question."""

    def tasks(self) -> Iterator[Task]:
        before: list[Message] = [{"role": "user", "content": WORDS}, {"role": "assistant", "content": "Noted."}]
        many = 10_000 // len(WORDS + "Noted.")
        for number in range(EPISODE_COUNT):
            question: Message = {"role": "user", "content": f"What is {number} + 25?"}
            yield Task(id=str(number), prompt=[*before * (many + 1), question], answer="42")

    @tool
    async def add(self, a: int, b: int) -> int:
        """Add two integers."""
        return a + b

    @reward
    async def correct(self) -> bool:
        return self.task.answer in self.episode.text


async def _turns() -> tuple[float, float]:
    engine = ScriptedEngine(REPLIES)
    async with Run(LongSums, engine, concurrency=Concurrency(episodes=128)) as run:
        with collector_settings():
            began, worked = time.perf_counter(), time.process_time()
            turns = 0
            async for trajectory in run:
                assert trajectory.turns[0].start > 10_000
                turns += len(trajectory.turns)
            return turns / (time.perf_counter() - began), turns / (time.process_time() - worked)


if __name__ == "__main__":
    main(measure)
