"""Messages: accepted forms, and errors with the index of a refused one."""

from __future__ import annotations

from typing import Any

import pytest

from runner import BadMessage, Conversation, Outcome, Turn
from runner.messages import Message, as_messages, check_answers
from tests.playing import Plain, play, recording

QUESTION: Message = {"role": "user", "content": "What is 17 + 25?"}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 17}}}],
}
TEXT = {"type": "text", "text": "What is "}
RESULT: Message = {"role": "tool", "content": "42", "tool_call_id": "call00000", "name": "add"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            [QUESTION, {"role": "robot", "content": "x"}],
            "message 1: .*role is system, user, assistant or tool.*'robot'",
        ),
        ([QUESTION, {"content": "x"}], "message 1: .*got None"),
        ([QUESTION, "words"], "message 1: a message is a dict with role and content, got str"),
        ([{"role": "user", "content": 5}], r"message 0 \(user\): a message's content is a string, got int"),
        (
            [QUESTION, {"role": "user", "content": [TEXT, {"type": "image_url", "image_url": {"url": "x"}}]}],
            r"message 1 \(user\): part 1 of its content is of type 'image_url': only text .*; give \{'type': 'text'",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], r"part 0 of its content is \{'type'"),
        ([{"role": "user", "content": [TEXT, 3]}], "part 1 of its content is 3"),
        (42, "expected a string, a message or a list of messages, got int"),
    ],
)
def test_message_of_a_wrong_form_is_refused_with_its_index(given: Any, says: str) -> None:
    with pytest.raises(BadMessage, match=says):
        as_messages(given)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([TEXT], "What is "),
        ([TEXT, {"type": "text", "text": "17?"}], "What is 17?"),
        ([TEXT, "it?"], "What is it?"),
        ([], ""),
    ],
    ids=["one", "two", "a string among them", "none"],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_parts_are_joined_like_in_templates(role: str, content: Any, text: str) -> None:
    given: Any = {"role": role, "content": content}
    assert as_messages(given) == [{"role": role, "content": text}]
    assert given["content"] is content


@pytest.mark.anyio
async def test_conversation_stores_parts_as_text() -> None:
    parts: Any = [{"role": "user", "content": [TEXT, {"type": "text", "text": "17?"}]}]

    class Parts(Plain):
        def prompt(self) -> Any:
            return parts

        def step(self, turn: Turn) -> Any:
            return None if turn.number else parts

    trajectory = await play(Parts, recording(["21", "42"]))
    assert [message["content"] for message in trajectory.messages] == ["What is 17?", "21", "What is 17?", "42"]


def test_missing_content_is_empty() -> None:
    given: Any = {"role": "assistant", "content": None}
    assert as_messages(given) == [{"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    "new",
    [
        [RESULT],
        [QUESTION, RESULT],
        [QUESTION, CALL, {**RESULT, "tool_call_id": "another"}],
        [QUESTION, CALL, RESULT, {"role": "assistant", "content": "42"}, {"role": "tool", "content": "43"}],
    ],
    ids=["nothing before it", "no call before it", "another call", "an answer before it"],
)
def test_result_without_a_call_is_refused_with_its_index(new: list[Message]) -> None:
    with pytest.raises(BadMessage, match=rf"message {len(new) - 1} \(tool\) answers no call"):
        check_answers(new)


@pytest.mark.parametrize(
    ("before", "new"),
    [
        ([], [QUESTION, CALL, RESULT]),
        ([QUESTION, CALL], [RESULT]),
        ([QUESTION, CALL], [{"role": "tool", "content": "42"}]),
        ([QUESTION, CALL, {"role": "assistant", "content": "Wait."}], [RESULT]),
    ],
    ids=["in one", "a call of the past", "without an id", "a late result"],
)
def test_result_of_a_call_may_be_added(before: list[Message], new: list[Message]) -> None:
    check_answers(new, before)


@pytest.mark.anyio
async def test_adding_a_result_without_a_call_raises_at_once() -> None:
    class Answers(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate()
            with pytest.raises(BadMessage, match=r"message 1 \(tool\) answers no call"):
                conversation.add([QUESTION, RESULT])
            conversation.add("Continue.")
            await conversation.generate()

    trajectory = await play(Answers, recording(["21", "42"]))
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant", "user", "assistant"]


@pytest.mark.anyio
async def test_prompt_with_a_result_without_a_call_is_env_error() -> None:
    class Asks(Plain):
        def prompt(self) -> list[Message]:
            return [QUESTION, RESULT]

    trajectory = await play(Asks, recording(["21"]))
    assert (trajectory.outcome, trajectory.turns) == (Outcome.ENV_ERROR, [])
    assert "message 1 (tool) answers no call" in trajectory.error


def test_arguments_in_json_text_become_an_object() -> None:
    given: Any = {
        **CALL,
        "tool_calls": [{**CALL["tool_calls"][0], "function": {"name": "add", "arguments": '{"a": 17}'}}],
    }
    assert as_messages(given) == [CALL]


@pytest.mark.parametrize("arguments", ["{", "[1]", "17", ["a"]])
def test_arguments_other_than_objects_are_refused(arguments: Any) -> None:
    given: Any = {**CALL, "tool_calls": [{"id": "x", "function": {"name": "add", "arguments": arguments}}]}
    with pytest.raises(BadMessage, match=r"message 1 \(assistant\): the arguments of a call are a JSON object"):
        as_messages([QUESTION, given])


@pytest.mark.parametrize(
    "call", ["x", {"id": "x"}, {"id": "x", "function": {}}, {"function": {"name": "add", "arguments": {}}}]
)
def test_call_without_an_id_or_a_function_is_refused_with_its_index(call: Any) -> None:
    given: Any = {**CALL, "tool_calls": [call]}
    with pytest.raises(BadMessage, match=r"message 0 \(assistant\): a tool call is .*: give it an id and a function"):
        as_messages(given)
