"""Whole conversations on the bundled templates: earlier ids stay, and the text equals the template's own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.messages import Message
from runner.tokens.bridging.bridge import Bridger
from runner.tokens.junction import Result, Seam
from runner.tokens.template import Renderer
from tests import sweeps

INTEGER = {"type": "integer"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["a", "b"]},
    },
}

# The demo vocabulary has no ids for the other bytes.
TEXT = st.text(st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d"))
SPOKEN = TEXT.filter(lambda text: "<|" not in text)
CONTROL = [
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "<|endoftext|>",
    "</tool_response>",
    "<tool_call>",
    "\n",
    "m",
    "null",
]
CONTENT = st.one_of(TEXT, st.sampled_from(CONTROL), st.lists(st.one_of(TEXT, st.sampled_from(CONTROL))).map("".join))
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), SPOKEN)
VALUES = st.recursive(
    SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(SPOKEN, inner, max_size=3))
)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "b", "items", "text"]), VALUES, max_size=3)


def call(index: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": f"call{index:05}", "type": "function", "function": {"name": "add", "arguments": arguments}}


@st.composite
def assistant_turns(draw: st.DrawFn) -> Message:
    calls = [call(index, arguments) for index, arguments in enumerate(draw(st.lists(ARGUMENTS, max_size=3)))]
    message: dict[str, Any] = {"role": "assistant", "content": draw(SPOKEN)}
    if calls:
        message["tool_calls"] = calls
    return message  # type: ignore[return-value]  # a message, built key by key


@st.composite
def answers(draw: st.DrawFn, turn: Message) -> list[Message]:
    """Generate a result for each call, and perhaps a user message; without calls, generate a user message."""
    results: list[Message] = [
        {"role": "tool", "content": draw(CONTENT), "tool_call_id": made["id"], "name": "add"}
        for made in turn.get("tool_calls", ())
    ]
    if not results or draw(st.booleans()):
        results.append({"role": "user", "content": draw(CONTENT)})
    return results


@dataclass(frozen=True)
class Conversation:
    first: list[Message]
    rounds: list[tuple[Message, list[Message]]]
    tools: list[dict[str, Any]]


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    first: list[Message] = [{"role": "user", "content": draw(CONTENT)}]
    if draw(st.booleans()):
        first.insert(0, {"role": "system", "content": draw(CONTENT)})
    turns = draw(st.lists(assistant_turns(), min_size=1, max_size=4))
    return Conversation(first, [(turn, draw(answers(turn))) for turn in turns], draw(st.sampled_from([[], [ADD]])))


def spoken(renderer: Renderer, history: Sequence[Message], turn: Message, tools: Sequence[dict[str, Any]]) -> str:
    """Return the reply for which the template would write `turn`, without the stop."""
    asked = renderer.render(history, tools=tools)
    whole = renderer.render([*history, turn], tools=tools, generation_prompt=False)
    assert whole.startswith(asked)
    return whole.removeprefix(asked).removesuffix("<|im_end|>\n")


@pytest.mark.sample_cases(2)
@pytest.mark.slow
@pytest.mark.parametrize("ids", ["canonical", "split"])
@settings(max_examples=sweeps.times(60, 20), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_prompts_extend_samples_and_equal_the_templates_text(made: Bridger, ids: str, data: st.DataObject) -> None:
    conversation = data.draw(conversations())
    messages, tools, tokenizer, stop = conversation.first, conversation.tools, made.tokenizer, made.tokenizer.eos_id
    assert stop is not None
    log = list(made.first_prompt(messages, tools))
    for turn, new in conversation.rounds:
        said = spoken(made.renderer, messages, turn, tools)
        sampled = tokenizer.encode(said) if ids == "canonical" else [i for c in said for i in tokenizer.encode(c)]
        before = [*log, *sampled, stop]
        bridge = made.bridge([*messages, turn], new, tools, sampled=[*sampled, stop], stop=stop)
        assert bridge.junction.result is Result.APPENDED
        assert bridge.junction.seam is Seam.SPECIAL
        log, messages = [*before, *bridge.ids], [*messages, turn, *new]
        assert tokenizer.decode(log) == made.renderer.render(messages, tools=tools)


@settings(max_examples=sweeps.times(60, 20), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_turn_cut_anywhere_reads_as_if_the_template_had_closed_it(made: Bridger, data: st.DataObject) -> None:
    first, new = data.draw(CONTENT), data.draw(CONTENT)
    sampled = made.tokenizer.encode(data.draw(SPOKEN))
    sampled = sampled[: data.draw(st.integers(0, len(sampled)))]
    history: list[Message] = [{"role": "user", "content": first}]
    turn: Message = {"role": "assistant", "content": made.tokenizer.decode(sampled)}
    added: Message = {"role": "user", "content": new}
    prompt = made.first_prompt(history)
    bridge = made.bridge([*history, turn], [added], sampled=sampled, stop=None)
    assert made.tokenizer.decode([*prompt, *sampled, *bridge.ids]) == made.renderer.render([*history, turn, added])
