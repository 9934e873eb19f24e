"""Incoming histories: each difference from the stored history, and differences that do not count."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from runner.tokens.bridging.history import Alignment, AlignmentKind, normalize, same_tools
from tests.tokens.client_messages import (
    ANSWER,
    CALLS,
    QUESTION,
    RESULTS,
    STORED,
    SYSTEM,
    THANKS,
    Dict,
    call,
    compare,
    is_same,
    messages,
    result,
    with_changed,
)

# --- classes of differences


def test_the_stored_history_again_is_the_same() -> None:
    alignment = compare(STORED, copy.deepcopy(STORED))
    assert alignment == Alignment(AlignmentKind.SAME, 6, ())


def test_new_messages_after_everything_are_an_append() -> None:
    alignment = compare(STORED, [*STORED, THANKS])
    assert (alignment.kind, alignment.index, alignment.appended) == (AlignmentKind.APPEND, 6, (THANKS,))


def test_a_first_history_is_an_append() -> None:
    alignment = compare([], [SYSTEM, QUESTION])
    assert alignment.kind is AlignmentKind.APPEND
    assert (alignment.index, alignment.appended) == (0, (SYSTEM, QUESTION))


def test_the_history_before_the_last_assistant_turn_is_a_retry() -> None:
    alignment = compare(STORED, STORED[:5])
    assert alignment == Alignment(AlignmentKind.RETRY, 5, ())


def test_a_retry_drops_what_followed_the_assistant_turn() -> None:
    alignment = compare(STORED[:5], STORED[:2])
    assert (alignment.kind, alignment.index) == (AlignmentKind.RETRY, 2)


def test_a_retry_with_another_message_in_its_place_is_an_edit() -> None:
    alignment = compare(STORED, [*STORED[:5], THANKS])
    assert (alignment.kind, alignment.index, alignment.appended) == (AlignmentKind.EDITED, 5, (THANKS,))


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4])
def test_anything_but_one_step_back_is_shrunk(length: int) -> None:
    alignment = compare(STORED, STORED[:length])
    assert (alignment.kind, alignment.index, alignment.appended) == (AlignmentKind.SHRUNK, length, ())


def test_omitted_unanswered_question_is_shrunk() -> None:
    assert compare([*STORED, THANKS], STORED).kind is AlignmentKind.SHRUNK


def test_an_empty_history_is_never_a_retry() -> None:
    assert compare([ANSWER], []).kind is AlignmentKind.SHRUNK


def test_an_assistant_turn_among_the_new_messages_is_inserted() -> None:
    alignment = compare(STORED, [*STORED, THANKS, ANSWER])
    assert (alignment.kind, alignment.index, alignment.appended) == (AlignmentKind.INSERTED, 6, (THANKS, ANSWER))


def test_an_assistant_turn_in_the_middle_is_an_edit() -> None:
    alignment = compare(STORED, [*STORED[:2], ANSWER, *STORED[2:]])
    assert (alignment.kind, alignment.index) == (AlignmentKind.EDITED, 2)


EDITS = {
    "a tool result": (3, {"content": "4"}),
    "the model's words": (5, {"content": "3 and 8."}),
    "the system message": (0, {"content": "You sub."}),
    "the role": (1, {"role": "system"}),
    "the reasoning": (2, {"reasoning_content": "Two sums!"}),
    "reasoning that was not there": (5, {"reasoning_content": "Hm."}),
    "an argument": (
        2,
        {"tool_calls": [call("call00000", {"a": 1, "b": 2}), call("call00001", {"a": 3, "b": 5})]},
    ),
    "a tool's name": (
        2,
        {"tool_calls": [call("call00000", {"a": 1, "b": 2}), call("call00001", {"a": 3, "b": 4}, name="sub")]},
    ),
    "a call left out": (2, {"tool_calls": CALLS["tool_calls"][:1]}),
    "the name of the tool that answers": (4, {"name": "sub"}),
    "the name of a user": (1, {"name": "Ann"}),
    "the call that is answered": (3, {"tool_call_id": "call00001"}),
}


@pytest.mark.parametrize(("index", "changes"), EDITS.values(), ids=EDITS)
def test_an_edit_is_found_where_it_stands(index: int, changes: Dict) -> None:
    alignment = compare(STORED, with_changed(index, **changes))
    assert (alignment.kind, alignment.index) == (AlignmentKind.EDITED, index)
    assert len(alignment.appended) == len(STORED) - index


def test_unnamed_result_of_another_call_is_an_edit_of_its_call() -> None:
    alignment = compare(STORED, [*STORED[:3], result("call00001", "3"), *STORED[4:]])
    assert (alignment.kind, alignment.index) == (AlignmentKind.EDITED, 3)


# --- differences that do not count


def test_no_content_is_empty_content() -> None:
    assert is_same(with_changed(2, content=None))
    assert is_same([{key: value for key, value in m.items() if m is not CALLS or key != "content"} for m in STORED])


def test_arguments_as_json_text_are_the_object() -> None:
    assert is_same(
        with_changed(2, tool_calls=[call("call00000", '{"a":1,"b":2}'), call("call00001", '{ "b": 4,\n "a": 3 }')])
    )


def test_the_order_of_keys_does_not_matter() -> None:
    assert is_same([dict(reversed(message.items())) for message in STORED])
    assert is_same(
        with_changed(2, tool_calls=[call("call00000", {"b": 2, "a": 1}), call("call00001", {"b": 4, "a": 3})])
    )


def test_white_space_at_the_ends_does_not_matter() -> None:
    assert is_same(with_changed(5, content="\n\n3 and 7. \n"))
    assert is_same(with_changed(2, reasoning_content="\nTwo sums.\n"))
    assert not is_same(with_changed(5, content="3  and 7."))


def test_unknown_keys_do_not_matter() -> None:
    assert is_same([{**message, "refusal": None, "annotations": [], "cache_control": {}} for message in STORED])
    assert is_same(with_changed(1, tool_calls=[call("x", {})], tool_call_id="x", reasoning_content="none of a user's"))


def test_missing_reasoning_does_not_matter() -> None:
    assert is_same(with_changed(2, reasoning_content=None))
    assert is_same([{key: value for key, value in m.items() if key != "reasoning_content"} for m in STORED])


def test_reasoning_has_two_names() -> None:
    stored = [QUESTION, {**ANSWER, "reasoning_content": "Easy."}]
    assert is_same([QUESTION, {**ANSWER, "reasoning": "Easy."}], stored)
    assert not is_same([QUESTION, {**ANSWER, "reasoning": "Hard."}], stored)


def renamed(messages: Sequence[Dict], ids: Mapping[str, str]) -> list[Dict]:
    """Return the same history with other call ids."""
    text = json.dumps(messages)
    for old, new in ids.items():
        text = text.replace(f'"{old}"', f'"{new}"')
    return cast("list[Dict]", json.loads(text))


def test_regenerated_call_ids_do_not_matter() -> None:
    assert is_same(renamed(STORED, {"call00000": "toolu_x", "call00001": "toolu_y"}))


def test_the_same_id_in_every_turn_means_the_latest_call() -> None:
    rounds = [QUESTION]
    for number in range(3):
        asked = {"role": "assistant", "content": "", "tool_calls": [call(f"call0000{number}", {"a": number})]}
        rounds += [asked, result(f"call0000{number}", str(number))]
    assert is_same(renamed(rounds, {f"call0000{number}": "call_0" for number in range(3)}), rounds)


def test_a_result_may_answer_the_call_of_an_earlier_turn() -> None:
    other = {"role": "assistant", "content": "", "tool_calls": [call("call00002", {"a": 5})]}
    stored = [*STORED[:4], other, result("call00002", "5"), result("call00001", "7")]
    incoming = renamed(stored, {f"call0000{number}": f"toolu_{number}" for number in range(3)})
    assert is_same(incoming, stored)
    assert compare(stored[:6], incoming).appended[0]["tool_call_id"] == "call00001"


def test_ids_that_two_calls_of_a_turn_share_are_answered_in_order() -> None:
    assert is_same(renamed(STORED, {"call00001": "call00000"}))


def test_results_without_an_id_answer_the_calls_in_order() -> None:
    assert is_same([*STORED[:3], result(None, "3"), result(None, "7"), ANSWER])


def test_a_result_need_not_repeat_the_tools_name() -> None:
    assert is_same([*STORED[:3], result("call00000", "3"), result("call00001", "7"), ANSWER])


def test_an_empty_list_of_calls_is_none() -> None:
    assert is_same(with_changed(5, tool_calls=[]))
    assert is_same(with_changed(5, tool_calls=None))
    assert [normalize(each) for each in messages([{**ANSWER, "tool_calls": []}])] == [ANSWER]


@pytest.mark.parametrize("arguments", ["", None, "{}", {}], ids=["empty", "None", "text", "object"])
def test_a_call_without_arguments_has_an_empty_object(arguments: Any) -> None:
    (message,) = map(normalize, messages([{"role": "assistant", "tool_calls": [call("x", arguments)]}]))
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_a_whole_number_is_an_integer_and_true_is_none() -> None:
    stored = [{"role": "assistant", "content": "", "tool_calls": [call("x", {"a": 1.0, "b": [2.5, 1e-7]})]}]
    assert is_same(renamed(stored, {}), stored)
    for arguments, same in [
        ('{"a": 1, "b": [2.5, 0.0000001]}', True),
        ('{"a": true, "b": [2.5, 1e-7]}', False),
        ('{"a": "1", "b": [2.5, 1e-7]}', False),
    ]:
        assert is_same([{"role": "assistant", "tool_calls": [call("x", arguments)]}], stored) is same


# --- appended messages


def test_an_appended_result_answers_the_stored_call_at_the_same_place() -> None:
    incoming = renamed(STORED[:5], {"call00000": "toolu_x", "call00001": "toolu_y"})
    alignment = compare(STORED[:3], incoming)
    assert alignment.kind is AlignmentKind.APPEND
    assert [message["tool_call_id"] for message in alignment.appended] == ["call00000", "call00001"]


def test_appended_results_in_another_order_keep_their_calls() -> None:
    incoming = renamed([*STORED[:3], *RESULTS[::-1]], {"call00000": "toolu_x", "call00001": "toolu_y"})
    appended = compare(STORED[:3], incoming).appended
    assert [(message["tool_call_id"], message["content"]) for message in appended] == [
        ("call00001", "7"),
        ("call00000", "3"),
    ]


def test_an_appended_result_without_an_id_gets_the_stored_one() -> None:
    appended = compare(STORED[:3], [*STORED[:3], result(None, "3")]).appended
    assert appended == ({"role": "tool", "content": "3", "tool_call_id": "call00000"},)


def test_a_result_of_a_new_call_keeps_its_own_id() -> None:
    new = {"role": "assistant", "content": "", "tool_calls": [call("toolu_z", {"a": 5})]}
    appended = compare(STORED, [*STORED, new, result("toolu_z", "5")]).appended
    assert appended[1]["tool_call_id"] == "toolu_z"


def test_a_result_of_an_edited_call_keeps_its_own_id() -> None:
    edited = {**CALLS, "tool_calls": [call("toolu_x", {"a": 0})]}
    alignment = compare(STORED, [*STORED[:2], edited, result("toolu_x", "3")])
    assert alignment.kind is AlignmentKind.EDITED
    assert alignment.appended[1]["tool_call_id"] == "toolu_x"


def test_a_result_that_answers_nothing_is_left_as_it_is() -> None:
    orphan = result("unknown", "3")
    assert compare(STORED, [*STORED, orphan]).appended == (orphan,)
    assert is_same([QUESTION, orphan], [QUESTION, orphan])


def test_appended_content_keeps_its_white_space() -> None:
    assert compare(STORED, [*STORED, {"role": "user", "content": " a \n"}]).appended[0]["content"] == " a \n"


# --- tools

ADD: Dict = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
SUB: Dict = {"type": "function", "function": {"name": "sub", "description": "Sub.", "parameters": {}}}


def test_empty_and_missing_tool_lists_are_the_same() -> None:
    assert same_tools([], None)
    assert same_tools(None, [])
    assert not same_tools(None, [ADD])


def test_tools_are_the_same_in_any_order_and_with_any_order_of_keys() -> None:
    turned = {"function": dict(reversed(ADD["function"].items())), "type": "function"}
    assert same_tools([ADD, SUB], [SUB, turned])


def test_tool_field_that_the_model_does_not_read_is_ignored() -> None:
    assert same_tools([SUB], [{"type": "function", "function": {"name": "sub", "description": "Sub.", "strict": True}}])


@pytest.mark.parametrize("key", ["name", "description", "parameters"])
def test_a_changed_tool_is_another(key: str) -> None:
    assert not same_tools([ADD], [{"type": "function", "function": {**ADD["function"], key: {"a": "b"}}}])


def test_a_tool_twice_is_not_a_tool_once() -> None:
    assert not same_tools([ADD], [ADD, ADD])
