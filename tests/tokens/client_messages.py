"""Messages as a client sends them, and a stored history to compare them with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from runner.messages import Message, as_messages
from runner.tokens.bridging import history
from runner.tokens.bridging.history import Alignment, AlignmentKind

Dict = dict[str, Any]

SYSTEM: Dict = {"role": "system", "content": "You add."}
QUESTION: Dict = {"role": "user", "content": "What is 1 + 2, and 3 + 4?"}
ANSWER: Dict = {"role": "assistant", "content": "3 and 7."}
THANKS: Dict = {"role": "user", "content": "Thanks!"}


def call(call_id: str, arguments: Any, name: str = "add") -> Dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: str | None, content: str, **more: Any) -> Dict:
    message = {"role": "tool", "content": content, **more}
    return message if call_id is None else {**message, "tool_call_id": call_id}


CALLS: Dict = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "Two sums.",
    "tool_calls": [call("call00000", {"a": 1, "b": 2}), call("call00001", {"a": 3, "b": 4})],
}
RESULTS = [result("call00000", "3", name="add"), result("call00001", "7", name="add")]
STORED = [SYSTEM, QUESTION, CALLS, *RESULTS, ANSWER]


def with_changed(index: int, **changes: Any) -> list[Dict]:
    return [*STORED[:index], {**STORED[index], **changes}, *STORED[index + 1 :]]


def messages(sent: Sequence[Mapping[str, Any]]) -> list[Message]:
    return as_messages(cast("Sequence[Message]", sent))


def compare(stored: Sequence[Mapping[str, Any]], incoming: Sequence[Mapping[str, Any]]) -> Alignment:
    """Compare messages as `Conversation.replace` does."""
    return history.compare(messages(stored), messages(incoming))


def is_same(incoming: Sequence[Mapping[str, Any]], stored: Sequence[Mapping[str, Any]] = STORED) -> bool:
    alignment = compare(stored, incoming)
    return alignment.kind is AlignmentKind.SAME and alignment.index == len(stored) and not alignment.appended
