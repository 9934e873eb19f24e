"""Reduced recordings of what agent programs send back: the shapes of their histories, with words of our own.

"$0.1" is the id of the second call of the first turn, and "$0" all of the first turn as a careful client sends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from runner import Sampling
from runner.testing import Fault, Reply, call

__all__ = ["RECORDINGS", "RUN", "SENT", "Recording", "Request", "filled_in"]

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
    """One request of a recording, and what it is to be found to be."""

    messages: list[Any]
    verdict: str
    again: str = ""
    tools: Sequence[Any] = (RUN,)
    label: str = ""
    tolerated: frozenset[str] = frozenset()
    sampling: Sampling | None = None
    tool_choice: str | None = None
    cut: bool = False
    """Whoever asks goes away before the turn is there."""
    parent: int | None = None
    """The turn that it goes on from, as a number."""


@dataclass(frozen=True)
class Recording:
    """The requests of one client, and what the model says."""

    who: str
    requests: list[Request]
    says: list[Any] = field(default_factory=lambda: [LOOKS, "Done.", "Really."])
    causes: tuple[str, ...] = ("start",)
    """Why the segments of the thread that answers the last request were begun."""


def filled_in(given: Any, turns: Sequence[Any]) -> Any:
    """A recorded value with what the turns were given in the place of its marks."""
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
SENT = 12
"""How many ids come of a turn that is cut."""
CUT = Reply("It was a long way to where the files are.", fault=Fault.stall(at=SENT), chunks=1)
TWO = [call("run", command="one"), call("run", command="two")]

SYSTEM: Any = {"role": "system", "content": "You mend programs."}
TASK: Any = {"role": "user", "content": "Mend it."}
BEGUN: list[Any] = [SYSTEM, TASK]


def said(**changed: Any) -> Any:
    """The first turn as a client of OpenAI's chat has it."""
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


def billed(cch: str) -> Any:
    return {"role": "system", "content": f"x-anthropic-billing-header: cch={cch};\nYou mend programs."}


def user(text: Any) -> Any:
    return {"role": "user", "content": text}


def assistant(text: str) -> Any:
    return {"role": "assistant", "content": text}


def first(**more: Any) -> Request:
    return Request(BEGUN, "new", **more)


def appended(*messages: Any, begun: list[Any] = BEGUN, **tolerated: Any) -> Recording:
    """A client that changes its first turn, or what it says, without meaning it."""
    names = frozenset(tolerated.pop("tolerated", ()))
    who = tolerated.pop("who")
    return Recording(who, [first(), Request([*begun, *messages], "append", tolerated=names, parent=0)], **tolerated)


RECORDINGS: dict[str, Recording] = {
    "1 reasoning left out": appended(
        said(reasoning_content=...), result(), who="langgraph", tolerated=["reasoning_left_out"]
    ),
    "2 reasoning with other white space at its ends": appended(
        said(reasoning_content="I look first.\n"), result(), who="Qwen Code", tolerated=["reasoning_stripped"]
    ),
    "3 arguments re-serialised": appended(
        said(arguments='{ "seconds": 2,  "command": "ls  -l" }'),
        result(),
        who="opencode",
        tolerated=["arguments_respelt"],
    ),
    "4 arguments as an object": appended(
        said(arguments={"command": "ls  -l", "seconds": 2}), result(), who="Claude Code"
    ),
    "5 content null beside calls": appended(
        {"role": "assistant", "content": None, "tool_calls": [made("$0.0", "one"), made("$0.1", "two")]},
        result("1"),
        result("2", "$0.1"),
        who="pi",
        says=[TWO, "Done."],
        tolerated=["content_null"],
    ),
    "6 a newline before the content": appended(
        said(content="\nI will look."), result(), who="inspect", tolerated=["white_space"]
    ),
    "7 contents as parts": appended(
        said(content=[{"type": "text", "text": "I will look."}]),
        result([{"type": "text", "text": "three files"}]),
        who="OpenHands",
        tolerated=["content_parts"],
    ),
    "8 cache_control that moves": appended(
        said(),
        result([{"type": "text", "text": "three files", "cache_control": {"type": "ephemeral"}}]),
        begun=[{**SYSTEM, "cache_control": {"type": "ephemeral"}}, TASK],
        who="Claude Code",
        tolerated=["content_parts", "cache_marks"],
    ),
    "9 further keys": appended(
        said(provider_specific_fields={"refusal": None, "x": 1}, annotations=[{}]),
        result(name="run"),
        who="mini-swe-agent",
        tolerated=["extra_keys"],
    ),
    "10 a volatile line in the system prompt": Recording(
        "Claude Code",
        [
            Request([billed("a1"), TASK], "new", tolerated=frozenset({"volatile_lines"})),
            Request([billed("b2"), TASK, "$0", result()], "append", tolerated=frozenset({"volatile_lines"}), parent=0),
        ],
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
    "14 the last turn dropped, a user message in its place": Recording(
        "mini-swe-agent",
        [
            first(),
            Request([*BEGUN, "$0", result()], "append", parent=0),
            Request([*BEGUN, "$0", result(), user("Call a tool.")], "rewound", parent=0),
            Request([*BEGUN, "$0", result(), user("Call a tool."), "$2", result("ok", "$2.0")], "append", parent=2),
        ],
        says=[LOOKS, "I forgot.", LOOKS, "Done."],
        causes=("start", "branch"),
    ),
    "14 the first turn dropped": Recording(
        "mini-swe-agent",
        [first(), Request([*BEGUN, user("Call a tool.")], "rewound")],
        says=["I forgot.", LOOKS],
        causes=("start", "environment"),
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
    "16 a retry without a mark": Recording(
        "Claude Code",
        [
            first(),
            Request([*BEGUN, "$0", result()], "append", cut=True, parent=0),
            Request(
                [*BEGUN, "$0", result([{"type": "text", "text": "three files"}])],
                "again",
                again="taken_back",
                tolerated=frozenset({"content_parts"}),
                parent=0,
            ),
        ],
        says=[LOOKS, CUT, "Done."],
        causes=("start", "retry"),
    ),
    "17 identical requests of two sub-agents that tell their names": Recording(
        "Claude Code",
        [
            first(label="one"),
            first(label="two"),
            Request([*BEGUN, "$1", result(id="$1.0")], "append", label="two", parent=0),
            Request([*BEGUN, "$0", result()], "append", label="one", parent=0),
        ],
        says=[LOOKS, LOOKS, "Done.", "Done."],
    ),
    "17 identical requests that tell no name": Recording(
        "Qwen Code",
        [
            first(),
            Request(BEGUN, "again", again="sibling"),
            Request([*BEGUN, "$0", result()], "append", parent=0),
            Request([*BEGUN, "$1", result(id="$1.0")], "append", parent=1),
        ],
        says=[LOOKS, LOOKS, "Done.", "Done."],
        causes=("start", "again"),
    ),
    "18 a side call of the same session": Recording(
        "opencode",
        [
            Request([user("A title for: Mend it.")], "new", tools=(), label="s"),
            first(label="s"),
            Request([*BEGUN, "$1", result(id="$1.0")], "append", label="s", parent=0),
        ],
        says=["Mending", LOOKS, "Done."],
    ),
    "19 compaction with the summary as a user message": Recording(
        "pi",
        [first(), Request([SYSTEM, user("Summary: it was looked at. Go on.")], "new")],
    ),
    "19 compaction with the summary as an assistant message": Recording(
        "opencode",
        [first(), Request([SYSTEM, user("What was done?"), assistant("It was looked at."), user("Go on.")], "new")],
    ),
    "20 tools removed for one request": Recording(
        "Codex",
        [
            first(),
            Request([*BEGUN, "$0", result()], "append", parent=0),
            Request([*BEGUN, "$0", result(), "$1", user("Sum up.")], "tools", tools=(), parent=1),
            Request([*BEGUN, "$0", result(), "$1", user("Go on.")], "rewound", parent=1),
        ],
        says=[LOOKS, "Done.", "A summary.", "Yes."],
        causes=("start", "tools"),
    ),
    "21 an assistant message that nobody said, at first": Recording(
        "Qwen Code",
        [
            Request([SYSTEM, user("Context."), assistant("Got it."), TASK], "new"),
            Request([SYSTEM, user("Context."), assistant("Got it."), TASK, "$0", result()], "append", parent=0),
        ],
    ),
    "21 an assistant message that nobody said, later": Recording(
        "aider",
        [
            first(),
            Request([*BEGUN, "$0", result(), user("A file."), assistant("Ok."), user("Go on.")], "foreign", parent=0),
            Request(
                [*BEGUN, "$0", result(), user("A file."), assistant("Ok."), user("Go on."), "$1", user("And?")],
                "append",
                parent=1,
            ),
        ],
        says=[LOOKS, "Done.", "Yes."],
        causes=("start", "foreign"),
    ),
    "22 calls told again as text": Recording(
        "smolagents",
        [
            first(),
            Request([*BEGUN, assistant("Calling: run(ls  -l)"), user("Observation: three files")], "retold", parent=0),
            Request(
                [
                    *BEGUN,
                    assistant("Calling: run(ls  -l)"),
                    user("Observation: three files"),
                    assistant("Calling: run(ls  -l)"),
                    user("Observation: two files"),
                ],
                "retold",
                parent=1,
            ),
        ],
        says=[LOOKS, LOOKS, "Done."],
        causes=("start", "retold", "retold"),
    ),
    "23 sampling that the client fixes": Recording(
        "aider",
        [first(sampling=Sampling(temperature=0, stop=("Observation:",)), tool_choice="none")],
        says=["Done."],
    ),
}
