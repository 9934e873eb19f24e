"""Random conversations on many families: properties of every bridge, for any content, sampled ids and cuts."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.messages import Message, ToolCall
from runner.parsing.call_reader import CallReader
from runner.parsing.format_cache import cached_format
from runner.parsing.parser import TurnParser
from runner.parsing.turn_reader import split_thought
from runner.tokens.bridging.bridge import Bridger
from runner.tokens.bridging.refusal import Property, Unbridgeable
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.junction import Junction, Result
from runner.tokens.template import ChatTemplate, Renderer
from runner.tokens.tokenizer import Tokenizer
from tests import sweeps
from tests.conformance.corpus import CLOCK, control_tokens
from tests.tokens.families import ADD, FAMILIES, called, model, result, says
from tests.tokens.vocabularies import smollm2

pytestmark = pytest.mark.sample_cases(3)

BUNDLED = ("pythonic", "hermes", "pythonic on bytes", "hermes on bytes")
REAL = (
    *("qwen2.5", "qwen3", "qwen3-coder", "qwen3.6", "glm-4.5", "glm-4.6", "llama-3.1", "llama-3.2", "gpt-oss"),
    *("gemma-4", "kimi", "minimax", "devstral", "ministral-3", "deepseek-v3.1"),
)
TALK_ONLY = ("mistral-small", "deepseek-v3", "smollm2", "smollm3")
"""Families whose templates show no calls, or none without conditions."""
ONE_CALL = ("llama-3.1", "llama-3.2", "gpt-oss")
FORMATS = ("pythonic", "hermes", "qwen2.5", "qwen3", "pythonic on bytes", "hermes on bytes")
"""Formats whose calls the runner reads."""

CALL_STOPS = {"glm-4.5": "<|observation|>", "glm-4.6": "<|observation|>", "gpt-oss": "<|call|>"}
CALL_STOPS |= {"gemma-4": "<|tool_response>"}
TALK_STOPS = {"glm-4.5": "<|user|>", "glm-4.6": "<|user|>"}
WRITTEN = {"<|return|>": "<|end|>"}
"""The text that a history has for a stop."""
LAST_WORD = "Willowqkz"
"""The last word of the model's content or call, which occurs nowhere else."""

Ids = list[int]
Outcome = tuple[Ids, Junction] | Property


class Speaker:
    """A family with the functions that the invariants need."""

    def __init__(self, name: str) -> None:
        self.name = name
        bundled, _, spelled = name.partition(" on ")
        if name in FAMILIES:
            made = model(name)
            self.tokenizer: Tokenizer = made.tokenizer
            self.renderer: Renderer = made.renderer
            self.stop_ids: Sequence[int] = made.stop_ids
            names = [*control_tokens(made.template.text), *FAMILIES[name].stops, *FAMILIES[name].further]
        else:
            self.tokenizer = ByteTokenizer() if spelled else smollm2()
            self.renderer = ChatTemplate.load(bundled).renderer(now=CLOCK)
            self.stop_ids = self.tokenizer.encode("<|im_end|>")
            names = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_response>"]
        self.controls = list(dict.fromkeys(names))
        self.seasoned = self.bridger()
        """A bridger that processes every conversation of the session."""
        self.parser = TurnParser(cached_format(self.renderer).format)

    def bridger(self) -> Bridger:
        return Bridger(self.tokenizer, self.renderer, self.stop_ids)

    def stop(self, turn: Message) -> str:
        """Return the end that the template writes after this turn."""
        own = CALL_STOPS if turn.get("tool_calls") else TALK_STOPS
        return own.get(self.name) or self.tokenizer.decode([self.stop_ids[0]])

    def stop_id(self, turn: Message) -> int:
        (stop,) = self.tokenizer.encode(self.stop(turn))
        return stop

    def render(self, messages: Sequence[Message], *, asking: bool = True) -> str:
        return self.renderer.render(messages, tools=[ADD], generation_prompt=asking)

    def same(self, one: str, other: str) -> bool:
        return self.tokenizer.normalize(one) == self.tokenizer.normalize(other)

    def control_in(self, ids: Sequence[int]) -> Ids:
        return [token_id for token_id in ids if token_id in self.tokenizer.control_ids]

    def spelled(self, text: str, at: Sequence[int]) -> Ids:
        """Return ids of `text`, encoded separately between the places of `at`, mostly other ids than its encoding."""
        borders = [0, *sorted({min(place, len(text)) for place in at}), len(text)]
        pieces = (text[begin:end] for begin, end in itertools.pairwise(borders))
        return [token_id for piece in pieces for token_id in self.tokenizer.encode(piece)]


@functools.cache
def speaker(name: str) -> Speaker:
    return Speaker(name)


# --- contents

ANY = st.text(st.characters(exclude_categories=[]), max_size=12)
ORDINARY = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
PIECES = (
    "\n",
    " ",
    "  ",
    "\t",
    '"',
    "\\",
    "{}",
    '{"a": 1}',
    "null",
    "</",
    "<|",
    "|>",
    "[",
    "/think",
    "/nothink",
    "m",
    "é",
)


def contents(controls: Sequence[str]) -> st.SearchStrategy[str]:
    """Generate contents of users and tools: any text, control tokens, and parts of control tokens."""
    whole = st.sampled_from([*controls, *PIECES])
    fragment = st.builds(
        lambda token, begin, end: token[begin : len(token) - end],
        st.sampled_from(list(controls)),
        st.integers(0, 3),
        st.integers(0, 3),
    )
    pieces = st.lists(st.one_of(ANY, whole, fragment), min_size=1, max_size=5).map("".join)
    return pieces.filter(lambda text: LAST_WORD not in text)


SPOKEN = ORDINARY.filter(lambda text: "<" not in text and "[" not in text and "]" not in text)


@st.composite
def turns(draw: st.DrawFn, name: str) -> Message:
    """Generate turns of the model. Its last word is the last word of its content, or of its last call."""
    thought = draw(st.sampled_from(["", "", "Carry the one."]))
    most = 0 if name in TALK_ONLY else 1 if name in ONE_CALL else 3
    numbers = draw(st.lists(st.integers(-9, 99), max_size=most))
    if not numbers:
        return says(f"{draw(SPOKEN)} {LAST_WORD}", reasoning=thought)
    calls = [called({"a": number, "b": LAST_WORD}, call_id=f"call{index:05}") for index, number in enumerate(numbers)]
    text = draw(SPOKEN) if name in FORMATS else ""
    return says(text.strip(), *calls, reasoning=thought)


def answers(turn: Message, draw: st.DrawFn, words: st.SearchStrategy[str]) -> list[Message]:
    """Generate a result for each call, or a user message."""
    results = [result(draw(words), call["id"]) for call in turn.get("tool_calls", ())]
    return results or [{"role": "user", "content": draw(words)}]


@st.composite
def conversations(draw: st.DrawFn, name: str) -> tuple[list[Message], list[Message]]:
    """Generate a history that ends with a turn of the model, and the messages after it."""
    words = contents(speaker(name).controls)
    history: list[Message] = [{"role": "user", "content": draw(words)}]
    if draw(st.booleans()):
        history.insert(0, {"role": "system", "content": draw(ORDINARY)})
    for _ in range(draw(st.integers(0, 2))):
        turn = draw(turns(name))
        history += [turn, *answers(turn, draw, words)]
        if history[-1]["role"] == "tool":
            history += [says("So it is."), {"role": "user", "content": draw(words)}]
    # The last word occurs only at the end of the last turn.
    history = [_without_last_word(message) for message in history]
    turn = draw(turns(name))
    return [*history, turn], answers(turn, draw, words)


def _without_last_word(message: Message) -> Message:
    changed: Any = copy.deepcopy(message)
    changed["content"] = changed["content"].replace(LAST_WORD, "words")
    for call in changed.get("tool_calls", ()):
        call["function"]["arguments"]["b"] = "words"
    return changed  # type: ignore[no-any-return]  # the type of the argument


# --- bridges


def outcome(
    bridger: Bridger, history: list[Message], new: list[Message], sampled: Ids, stop: int | None, *, thinking: bool
) -> Outcome:
    kept = copy.deepcopy((history, new, sampled))
    try:
        bridge = bridger.bridge(history, new, [ADD], sampled=sampled, stop=stop, thinking=thinking)
    except Unbridgeable as refusal:
        return Property(refusal.property)
    finally:
        assert (history, new, sampled) == kept, "earlier ids were changed"
    assert bridge.junction.result is Result.APPENDED
    assert bridge.junction.inserted == len(bridge.ids) > 0
    return bridge.ids, bridge.junction


def bridged(
    own: Speaker, history: list[Message], new: list[Message], sampled: Ids, stop: int | None, *, thinking: bool = False
) -> Outcome:
    """Return the outcome, which is equal for a new bridger, in a repetition, and for a long-used bridger."""
    fresh = own.bridger()
    made = outcome(fresh, history, new, sampled, stop, thinking=thinking)
    assert outcome(fresh, history, new, sampled, stop, thinking=thinking) == made
    assert outcome(own.seasoned, history, new, sampled, stop, thinking=thinking) == made
    return made


def rest_of(own: Speaker, history: list[Message], new: list[Message]) -> str:
    """Return the template's text after the last word of the last turn."""
    return own.render([*history, *new]).rpartition(LAST_WORD)[2]


def harmless(new: Sequence[Message]) -> list[Message]:
    """Return the same messages with other contents, without control text."""
    return [{**message, "content": "words"} for message in new]


MAY_REFUSE = {Property.TEXT_KEPT}
"""SmolLM2's vocabulary has no ids for some bytes. These families support everything else, so nothing else may be
refused.
"""

AS_OFTEN = settings(
    max_examples=sweeps.times(12, 4), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BUNDLED, *REAL, *TALK_ONLY])
@AS_OFTEN
@given(data=st.data())
def test_bridge_is_the_templates_tail_without_control_ids_of_content(name: str, data: st.DataObject) -> None:
    own = speaker(name)
    history, new = data.draw(conversations(name))
    said = data.draw(ORDINARY)
    ids = own.spelled(said, data.draw(st.lists(st.integers(0, 12), max_size=3)))
    cut = not history[-1].get("tool_calls") and data.draw(st.booleans())
    stop = None if cut else own.stop_id(history[-1])
    sampled = [*ids, *([] if stop is None else [stop])]
    made = bridged(own, history, new, sampled, stop)
    if isinstance(made, Property):
        assert made in MAY_REFUSE
        return
    bridge, _ = made
    rest, text = rest_of(own, history, new), own.tokenizer.decode(bridge)
    if stop is not None:
        name = own.stop(history[-1])
        rest = rest.partition(WRITTEN.get(name, name))[2]
    assert own.same(text, rest)
    plain = bridged(own, history, harmless(new), sampled, stop)
    assert not isinstance(plain, Property)
    assert own.control_in(bridge) == own.control_in(plain[0])
    assert own.control_in(plain[0]) == own.control_in(own.tokenizer.encode(own.tokenizer.decode(plain[0])))


@pytest.mark.parametrize("name", [*BUNDLED, *REAL, *TALK_ONLY])
@AS_OFTEN
@given(data=st.data())
def test_a_first_prompt_is_the_render_with_no_control_id_of_a_content(name: str, data: st.DataObject) -> None:
    own = speaker(name)
    words = contents(own.controls)
    messages: list[Message] = [{"role": "user", "content": data.draw(words)}]
    made = own.bridger().first_prompt(messages, [ADD])
    assert list(made) == list(own.seasoned.first_prompt(messages, [ADD]))
    kept = own.tokenizer.decode(own.tokenizer.encode(messages[0]["content"]))
    if own.same(kept, messages[0]["content"]):  # SmolLM2's vocabulary loses some bytes
        assert own.same(own.tokenizer.decode(made), own.render(messages))
    plain = own.bridger().first_prompt(harmless(messages), [ADD])
    assert own.control_in(made) == own.control_in(plain)


@pytest.mark.parametrize("name", FORMATS)
@AS_OFTEN
@given(data=st.data())
def test_turn_cut_at_any_id_reads_as_the_template_would_close_it(name: str, data: st.DataObject) -> None:
    own = speaker(name)
    history, new = data.draw(conversations(name))
    turn = history[-1]
    before = own.render(history[:-1])
    whole = own.render(history, asking=False)
    if not whole.startswith(before):  # the template writes the history differently once the turn is in it
        history = [{"role": "user", "content": "What is 17 + 25?"}, turn]
        before, whole = own.render(history[:-1]), own.render(history, asking=False)
    said = whole[len(before) :].partition("<|im_end|>")[0]
    ids = own.spelled(said, data.draw(st.lists(st.integers(0, 40), max_size=3)))
    for length in {0, len(ids), *data.draw(st.sets(st.integers(0, len(ids)), max_size=6))}:
        _check_cut(own, history[:-1], ids[:length], new)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_cut_at_every_id_get_the_rest_of_their_end(name: str, count: int) -> None:
    own = speaker(name)
    calls = [called({"a": number, "b": LAST_WORD}, call_id=f"call{number:05}") for number in range(count)]
    past: list[Message] = [{"role": "user", "content": "What is 17 + 25?"}]
    said = own.render([*past, says("", *calls)], asking=False)[len(own.render(past)) :].partition("<|im_end|>")[0]
    ids = own.tokenizer.encode(said)
    results = [result("42", call["id"]) for call in calls]
    for length in range(len(ids) + 1):
        _check_cut(own, past, ids[:length], results)


def _check_cut(own: Speaker, past: list[Message], ids: Ids, new: list[Message]) -> None:
    text = own.tokenizer.decode(ids)
    turn, thinking = _read(own, text)
    calls = turn.get("tool_calls", ())
    following = [message for message in new if message["role"] == "tool"][: len(calls)] if calls else []
    following = following or [{"role": "user", "content": "Continue."}]
    made = bridged(own, [*past, turn], following, ids, None, thinking=thinking)
    if thinking:
        assert made is Property.REASONING_CLOSED
        return
    if isinstance(made, Property):
        assert made in MAY_REFUSE
        return
    shown = own.tokenizer.decode(made[0])
    if not calls:
        assert own.same(shown, rest_of(own, [*past, says(LAST_WORD)], following))
        return
    last: Any = copy.deepcopy(turn)
    last["tool_calls"][-1]["function"]["arguments"] = {"b": LAST_WORD}
    rest = rest_of(own, [*past, last], following)
    assert own.tokenizer.normalize(rest).endswith(own.tokenizer.normalize(shown))
    # The bridge does not repeat the part of the last call's end that the model wrote, and writes the missing part.
    missing, end = shown.partition("<|im_end|>")[0], rest.partition("<|im_end|>")[0]
    written = text.split(LAST_WORD, len(calls))[-1]
    if LAST_WORD in written:  # half of a call after the last whole call ends like the whole one
        assert end.endswith(missing)
    else:
        assert missing == (end.removeprefix(written) if end.startswith(written) else "")


def _read(own: Speaker, text: str) -> tuple[Message, bool]:
    """Read the turn from the sampled text, as a conversation does."""
    assert own.parser.format.calls is not None
    reasoning, content = split_thought(text, own.parser.reasoning)
    parsed = CallReader(own.parser.format.calls).read(content)
    read = (call for call in parsed.calls if call.error is None)
    calls: list[Any] = [ToolCall(f"call_{n}", call.name, call.arguments).as_message() for n, call in enumerate(read)]
    return says(parsed.content, *calls, reasoning=reasoning), own.parser.ends_in_thought(text)


@pytest.mark.parametrize(
    "name", ["pythonic", "hermes", "qwen3", "glm-4.5", "llama-3.1", "gpt-oss", "devstral", "deepseek-v3.1"]
)
@AS_OFTEN
@given(data=st.data())
def test_next_prompt_begins_with_all_samples_or_is_refused_by_name(name: str, data: st.DataObject) -> None:
    # Ids of any kind, including control ids, ended by any stop or by none.
    own = speaker(name)
    history, new = data.draw(conversations(name))
    anything = st.integers(0, own.tokenizer.size + 5)
    ids = data.draw(st.lists(st.one_of(anything, st.sampled_from(sorted(own.tokenizer.control_ids))), max_size=8))
    stop = data.draw(st.one_of(st.none(), st.sampled_from(sorted(own.stop_ids))))
    sampled = [*ids, *([] if stop is None else [stop])]
    made = bridged(own, history, new, sampled, stop, thinking=stop is None and data.draw(st.booleans()))
    if isinstance(made, Property):
        return
    whole, text = own.render([*history, *new]), own.tokenizer.decode(made[0])
    assert own.tokenizer.normalize(whole).endswith(own.tokenizer.normalize(text))
    assert LAST_WORD not in text
