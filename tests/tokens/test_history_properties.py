"""Any history that is appended to, edited or cut: the alignment agrees with the change."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from runner.tokens.bridging.history import AlignmentKind, normalize
from tests.tokens import client_messages
from tests.tokens.client_messages import ANSWER, Dict, call, compare, is_same, result

TEXT = st.text(max_size=6)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(TEXT, inner, max_size=2)),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "b", "text"]), VALUES, max_size=3)


@st.composite
def histories(draw: st.DrawFn) -> list[Dict]:
    """Generate turns of a user and a model, some with reasoning and some with tool rounds."""
    messages: list[Dict] = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(TEXT)})
        asked = draw(st.lists(ARGUMENTS, max_size=2))
        if asked:
            calls = [call(f"call{len(messages):03}{number:02}", given) for number, given in enumerate(asked)]
            messages.append({"role": "assistant", "content": draw(TEXT), "tool_calls": calls})
            messages += [result(made["id"], draw(TEXT)) for made in calls]
        messages.append({"role": "assistant", "content": draw(TEXT), "reasoning_content": draw(TEXT)})
    return messages


def as_a_client_writes(message: Mapping[str, Any]) -> Dict:
    """Return the message as an OpenAI client sends it back: arguments as text, other ids, no reasoning."""
    written = {key: value for key, value in reversed(list(message.items())) if key != "reasoning_content"}
    if "tool_calls" in message:
        written["tool_calls"] = [
            call("x" + made["id"], json.dumps(made["function"]["arguments"], sort_keys=True, indent=1))
            for made in message["tool_calls"]
        ]
    if "tool_call_id" in message:
        written["tool_call_id"] = "x" + message["tool_call_id"]
    return {**written, "content": message["content"] or None, "refusal": None}


@given(histories(), st.data())
def test_any_appends_are_the_same_or_an_append_at_the_right_index(messages: list[Dict], data: st.DataObject) -> None:
    stored = 0
    while stored < len(messages):
        until = data.draw(st.integers(stored, len(messages)))
        alignment = compare(messages[:stored], [as_a_client_writes(message) for message in messages[:until]])
        new = messages[stored:until]
        spoken = any(message["role"] == "assistant" for message in new)
        extended = AlignmentKind.INSERTED if spoken else AlignmentKind.APPEND
        assert alignment.kind is (extended if new else AlignmentKind.SAME)
        assert alignment.index == stored
        assert [message["content"] for message in alignment.appended] == [message["content"] for message in new]
        stored = until + 1


@given(histories(), st.data())
def test_a_single_character_edited_anywhere_is_an_edit(messages: list[Dict], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(messages) - 1))
    key = data.draw(st.sampled_from([key for key in messages[index] if key in ("content", "reasoning_content")]))
    text = messages[index][key]
    at = data.draw(st.integers(0, len(text)))
    edited = text[:at] + data.draw(st.characters()) + text[at + data.draw(st.integers(0, 1)) :]
    assume(edited.strip() != text.strip())
    assume(key == "content" or edited.strip())  # reasoning may be left out
    incoming = [*messages[:index], {**messages[index], key: edited}, *messages[index + 1 :]]
    alignment = compare(messages, incoming)
    assert (alignment.kind, alignment.index) == (AlignmentKind.EDITED, index)


@given(histories(), ARGUMENTS, ARGUMENTS)
def test_changed_arguments_are_an_edit(messages: list[Dict], before: Dict, after: Dict) -> None:
    assume(json.dumps(before, sort_keys=True) != json.dumps(after, sort_keys=True) and before != after)
    stored = {"role": "assistant", "content": "", "tool_calls": [call("x", {}), call("y", before)]}
    changed = {"role": "assistant", "content": "", "tool_calls": [call("x", {}), call("y", json.dumps(after))]}
    alignment = compare([*messages, stored, ANSWER], [*messages, changed, ANSWER])
    assert (alignment.kind, alignment.index) == (AlignmentKind.EDITED, len(messages))


@given(histories(), st.data())
def test_a_suffix_left_out_is_a_retry_or_shrunk(messages: list[Dict], data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(messages) - 1))
    alignment = compare(messages, [as_a_client_writes(message) for message in messages[:length]])
    one_step_back = length == len(messages) - 1  # such a history ends with an assistant message
    assert alignment.kind is (AlignmentKind.RETRY if one_step_back else AlignmentKind.SHRUNK)
    assert (alignment.index, alignment.appended) == (length, ())


@given(histories(), histories())
def test_stored_part_and_appended_part_are_the_incoming_history(one: list[Dict], other: list[Dict]) -> None:
    for stored, incoming in [(one, other), (one, [*one, *other]), (one[:-1], one), (one, one[:-2])]:
        alignment = compare(stored, incoming)
        spliced = [*stored[: alignment.index], *alignment.appended]
        assert compare(spliced, incoming).kind is AlignmentKind.SAME


def turned(value: Any) -> Any:
    """Return `value` with the keys of every object in reverse order."""
    if isinstance(value, dict):
        return {key: turned(inner) for key, inner in reversed(value.items())}
    return [turned(inner) for inner in value] if isinstance(value, list) else value


@given(histories())
def test_the_order_of_keys_never_matters(messages: list[Dict]) -> None:
    assert is_same(turned(messages), messages)
    assert is_same(messages, turned(messages))


@given(histories(), histories())
def test_nothing_given_is_changed(stored: list[Dict], incoming: list[Dict]) -> None:
    before = copy.deepcopy((stored, incoming))
    compare(stored, incoming)
    compare(stored, [*stored, *incoming])
    assert (stored, incoming) == before


@given(histories())
def test_normalizing_twice_is_normalizing_once(messages: list[Dict]) -> None:
    for message in client_messages.messages([as_a_client_writes(message) for message in messages]):
        once = normalize(message)
        assert normalize(once) == once
