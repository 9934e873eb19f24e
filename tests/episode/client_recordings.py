"""Histories that agent programs once sent back and that no installed program sends today, written by hand.

Number 2 is from Qwen Code, which sends it if reasoning ends with white space, as our reasoning never does. 11 is from
Claude Code: it has a system message after a result, and today only after the first message. 12 is from openai-agents
for JavaScript, in the format of chat. 13 is from OpenHands and 21 from aider, which are not installed. 15 is from
Codex, with a part of a text, but the recorded one keeps only reasoning. All other histories are recorded: `mutations`
names the recordings.

"$0.1" is the id of the second call of the first turn, and "$0" is the whole first turn as a careful client sends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.testing import Fault, Reply, call

__all__ = ["RECORDINGS", "RUN", "SENT_TOKENS", "Recording", "Request", "filled_in"]

RUN: Any = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "seconds": {"type": "number"}},
            "required": ["command"],
        },
    },
}


@dataclass(frozen=True)
class Request:
    """One request of a recording, and its expected verdict."""

    messages: list[Any]
    verdict: str
    again: str = ""
    tools: Sequence[Any] = (RUN,)
    tolerated: frozenset[str] = frozenset()
    cut: bool = False
    """True if the client leaves before the turn ends."""
    parent: int | None = None
    """The number of the turn that it continues."""


@dataclass(frozen=True)
class Recording:
    """The requests of one client, and the model's replies."""

    who: str
    requests: list[Request]
    says: list[Any] = field(default_factory=lambda: [LOOKS, "Done.", "Really."])
    causes: tuple[str, ...] = ("start",)
    """The causes of the segments of the thread that answers the last request."""


def filled_in(given: Any, turns: Sequence[Any]) -> Any:
    """Return a recorded value with the turns' ids and texts in place of its marks."""
    if isinstance(given, dict):
        return {key: filled_in(value, turns) for key, value in given.items()}
    if isinstance(given, list):
        return [filled_in(each, turns) for each in given]
    if isinstance(given, str) and given.startswith("$"):
        turn, _, number = given[1:].partition(".")
        message = turns[int(turn)].as_message()
        return message["tool_calls"][int(number)]["id"] if number else message
    return given


LOOKS: Any = Reply(
    "<think>\nI look first.\n</think>\n\n\n\nI will look.  \n", calls=[call("run", command="ls  -l", seconds=2.0)]
)
SENT_TOKENS = 12
"""Tokens of the truncated turn that were sent."""
CUT = Reply("It was a long way to where the files are.", fault=Fault.stall(at=SENT_TOKENS), chunks=1)
TWO = [call("run", command="one"), call("run", command="two")]

SYSTEM: Any = {"role": "system", "content": "You mend programs."}
TASK: Any = {"role": "user", "content": "Mend it."}
BEGUN: list[Any] = [SYSTEM, TASK]


def said(**changed: Any) -> Any:
    """Return the first turn in the form of OpenAI's chat."""
    arguments = changed.pop("arguments", '{"command":"ls  -l","seconds":2.0}')
    made = {"id": "$0.0", "type": "function", "function": {"name": "run", "arguments": arguments}}
    message = {
        "role": "assistant",
        "content": "I will look.",
        "reasoning_content": "I look first.",
        "tool_calls": [made],
        **changed,
    }
    return {key: value for key, value in message.items() if value is not ...}


def made(id: str, command: str) -> Any:
    return {"id": id, "type": "function", "function": {"name": "run", "arguments": {"command": command}}}


def result(text: Any = "three files", id: str = "$0.0", **more: Any) -> Any:
    return {"role": "tool", "tool_call_id": id, "content": text, **more}


def user(text: Any) -> Any:
    return {"role": "user", "content": text}


def assistant(text: str) -> Any:
    return {"role": "assistant", "content": text}


def first(**more: Any) -> Request:
    return Request(BEGUN, "new", **more)


def appended(*messages: Any, begun: list[Any] = BEGUN, **tolerated: Any) -> Recording:
    """Return a recording of a client that changes its first turn, or the reply to it, unintentionally."""
    names = frozenset(tolerated.pop("tolerated", ()))
    who = tolerated.pop("who")
    return Recording(who, [first(), Request([*begun, *messages], "append", tolerated=names, parent=0)], **tolerated)


RECORDINGS: dict[str, Recording] = {
    "2 reasoning with other white space at its ends": appended(
        said(reasoning_content="I look first.\n"), result(), who="Qwen Code", tolerated=["reasoning_stripped"]
    ),
    "11 a system message in mid-conversation": appended(
        said(), result(), {"role": "system", "content": "Five tools are left."}, who="Claude Code"
    ),
    "12 one turn as several messages": appended(
        {"role": "assistant", "content": "", "reasoning_content": "I look first."},
        assistant("I will look."),
        said(content=None, reasoning_content=...),
        result(),
        who="Codex",
        tolerated=["content_null", "joined"],
    ),
    "13 parallel calls apart, with results between": appended(
        {"role": "assistant", "content": "", "tool_calls": [made("$0.0", "one")]},
        result("1"),
        {"role": "assistant", "content": "", "tool_calls": [made("$0.1", "two")]},
        result("2", "$0.1"),
        who="OpenHands",
        says=[TWO, "Done."],
        tolerated=["joined", "reordered"],
    ),
    "15 finished parts of a turn that was cut stay": Recording(
        "Codex",
        [
            first(),
            Request([*BEGUN, "$0", result()], "append", cut=True, parent=0),
            Request(
                [*BEGUN, "$0", result(), assistant("It was a")],
                "again",
                again="taken_back",
                tolerated=frozenset({"cut_items"}),
                parent=0,
            ),
            Request(
                [*BEGUN, "$0", result(), assistant("It was a"), "$2", user("And?")],
                "append",
                tolerated=frozenset({"cut_items"}),
                parent=2,
            ),
        ],
        says=[LOOKS, CUT, "Done.", "Yes."],
        causes=("start", "retry"),
    ),
    "21 an assistant message that was not sampled, later": Recording(
        "aider",
        [
            first(),
            Request(
                [*BEGUN, "$0", result(), user("A file."), assistant("Ok."), user("Continue.")], "foreign", parent=0
            ),
            Request(
                [*BEGUN, "$0", result(), user("A file."), assistant("Ok."), user("Continue."), "$1", user("And?")],
                "append",
                parent=1,
            ),
        ],
        says=[LOOKS, "Done.", "Yes."],
        causes=("start", "foreign"),
    ),
}
"""Changes of agent programs to the histories that they send back, each with its verdict, written by hand."""
