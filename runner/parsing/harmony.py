"""Reader of turns in Harmony, the format of gpt-oss: messages on channels. A call is a message with a recipient.

Only the form of a call is learnt. The rest is fixed, since templates show neither the content that models write beside
a call nor the variants of message headers. Source: OpenAI's "harmony response format".
"""

from __future__ import annotations

import dataclasses
import enum
import re
from typing import Final, NamedTuple

from runner.parsing.argument_reader import read_object
from runner.parsing.call_reader import ReadCall
from runner.parsing.end_detector import EndDetector, RereadBudget, partial_mark_length
from runner.parsing.events import Event, EventCollector, StateReader, TurnReading
from runner.parsing.literals import Unreadable, after_space
from runner.parsing.notations import Json, object_notations
from runner.parsing.turn_format import CallFormat, IdStyle, LiteralText, ReasoningFormat, Slot, WholeArguments
from runner.tokens.probe_messages import KEY, QUESTION, TOOL, TOOLS, VALUE, calling, result
from runner.tokens.template import Renderer, TemplateRaised

__all__ = ["CALLS", "MESSAGE", "NEXT_MESSAGE", "THOUGHT", "HarmonyStream", "learn_harmony", "read_harmony"]

START: Final = "<|start|>"
MESSAGE: Final = "<|message|>"
CALL: Final = "<|call|>"
ENDS: Final = ("<|end|>", CALL, "<|return|>", START)
"""Tokens that end a message; the last message may end without one."""

NEXT_MESSAGE: Final = f"<|end|>{START}assistant"
"""Text between two messages of an assistant."""

CALLS: Final = CallFormat(
    begin=" to=functions.",
    call=(Slot.NAME, LiteralText(f"<|channel|>commentary json{MESSAGE}"), Slot.ARGUMENTS),
    between=None,
    close="",
    arguments=WholeArguments(Json()),
    container=None,
    trigger=" to=functions.",
    after_content=None,
    before_content=None,
    id_pieces=None,
    ids=IdStyle.ANY,
    stop=CALL,
)
"""Call format of gpt-oss's own template: one call per turn, without content in the same turn."""


THOUGHT: Final = ReasoningFormat(f"<|channel|>analysis{MESSAGE}", "<|end|>", opened_by_prompt=False)
"""Reasoning format of gpt-oss's own template."""


def learn_harmony(renderer: Renderer) -> CallFormat | None:
    """Return the call format of a Harmony template, or None if the template has another format."""
    for messages in ((QUESTION, calling({KEY: VALUE})), (QUESTION, calling({KEY: VALUE}), result())):
        try:
            text = renderer.render(messages, tools=TOOLS, generation_prompt=False)
        except TemplateRaised:
            continue
        written = _WRITTEN.search(text)
        if written is None:
            continue
        for notation in object_notations(""):
            if notation.encode({KEY: VALUE}) == written["arguments"]:
                call = (Slot.NAME, LiteralText(written["after"]), Slot.ARGUMENTS)
                begin, arguments = written["before"], WholeArguments(notation)
                return dataclasses.replace(CALLS, begin=begin, trigger=begin, call=call, arguments=arguments)
    return None


def read_harmony(text: str, *, calls: bool = True) -> TurnReading:
    """Return the parts of a turn from its text after the prompt's `<|start|>assistant`. `calls`: False to ignore calls.

    The channel "analysis" is reasoning, a message with a recipient is a call, everything else is content. Messages of
    other roles than the assistant's are ignored.
    """
    stream = HarmonyStream(calls=calls)
    stream.feed(text)
    stream.finish()
    return stream.reading


class _MessageKind(enum.Enum):
    THOUGHT = enum.auto()
    CONTENT = enum.auto()
    CALL = enum.auto()
    OTHER_ROLE = enum.auto()


class _MessageHeader(NamedTuple):
    """Information from the header of a message."""

    kind: _MessageKind
    name: str
    """Name of the called tool; "" if the message is not a call, or names no tool."""


class HarmonyStream(StateReader):
    """Reader of one turn while the turn is sampled.

    A call is emitted when its message ends. If its arguments are unreadable, the call and the text after it are emitted
    at the end of the turn.

    Reasoning and content are emitted in pieces: each message stripped, with a line break between two messages. The
    joined pieces equal the reasoning and the content of `reading`.
    """

    def __init__(self, *, calls: bool = True) -> None:
        """Begin a turn; `calls` False ignores calls."""
        super().__init__(EventCollector(stripped=True, calls=calls), self._before)
        self._role = False  # True if the next header begins with a role; the first role is in the prompt
        self._header = _MessageHeader(_MessageKind.CONTENT, "")
        self._arguments: list[str] = []
        self._watch = EndDetector(ENDS, quoted=True)
        self._budget = RereadBudget()

    def finish(self) -> list[Event]:
        """Return the events that were held back until the end of the turn."""
        self._ended = True
        text = self._state("")
        while text or self._state == self._called:
            text = self._state(text)
        return self._collector.take()

    # --- states: each consumes text and returns the rest for the next state

    def _before(self, text: str) -> str:
        """Decide whether the next message begins with a header. A message without a header is content."""
        text = self._with_held(text)
        start = text.lstrip()
        if not self._role and not _HEADER.match(start):
            if not self._ended and _HEADER_BEGUN.fullmatch(start):
                self._held = text
                return ""
            self._header = _MessageHeader(_MessageKind.CONTENT, "")
            self._state = self._body
        else:
            self._state = self._heading
        return text

    def _heading(self, text: str) -> str:
        text = self._with_held(text)
        mark = _MARK.search(text)
        if (len(text) - MAX_MARK_LENGTH if mark is None else mark.start()) > MAX_HEADER_LENGTH:
            self._begin(_MessageHeader(_MessageKind.CONTENT, ""))
            return text
        if mark is None and not self._ended:
            self._held = text
            return ""
        header = _read_header(text if mark is None else text[: mark.start()], has_role=self._role)
        if mark is not None and mark[0] == MESSAGE:
            self._begin(header)
            return text[mark.end() :]
        if header.kind is _MessageKind.CALL:
            self._collector.call(ReadCall(header.name, error="its arguments are missing"))
        return self._after(text, mark)

    def _begin(self, header: _MessageHeader) -> None:
        self._header = header
        self._state = self._body
        if header.kind is _MessageKind.CALL:
            self._state = self._called
            self._arguments = []
            self._watch, self._budget = EndDetector(ENDS, quoted=True), RereadBudget()

    def _body(self, text: str) -> str:
        text = self._with_held(text)
        mark = _END.search(text)
        begun = partial_mark_length(text, ENDS) if mark is None and not self._ended else 0
        end = mark.start() if mark is not None else len(text) - begun
        if self._header.kind is _MessageKind.THOUGHT:
            self._collector.think(text[:end])
        elif self._header.kind is _MessageKind.CONTENT:
            self._collector.say(text[:end])
        if mark is None:
            self._held = text[end:]
            return ""
        self._collector.end_part()
        return self._after(text, mark)

    def _called(self, text: str) -> str:
        """Handle text inside the arguments of a call. An end token counts only outside of strings."""
        end = None if self._ended else self._watch.feed(text)
        self._arguments.append(text[:end])
        if end is None and not self._ended:
            return ""
        rest = text[end:] if end is not None else ""
        written = "".join(self._arguments)
        self._arguments = [written]
        if not self._ended and not self._budget.allows(len(written)):
            return rest
        call, at = _read_call(self._header.name, written)
        if call.error is not None and not self._ended:
            self._budget.spend(len(written))
            return rest
        self._collector.call(call)
        return self._after(written + rest, _END.match(written, at))

    def _after(self, text: str, mark: re.Match[str] | None) -> str:
        """Begin the next message, and return the text after `mark`, or "" if `mark` is None.

        `mark` is the token that ended the previous message.
        """
        self._state = self._before
        self._role = mark is not None and mark[0] == START
        return "" if mark is None else text[mark.end() :]


def _read_header(text: str, *, has_role: bool) -> _MessageHeader:
    """Parse the header of a message. Its parts may be in any order, except that with `has_role` the role is first."""
    if has_role:
        role, text = _ROLE.match(text)[0].strip(), text  # type: ignore[index]  # it matches the empty text
        if role and not role.startswith("assistant"):
            return _MessageHeader(_MessageKind.OTHER_ROLE, "")
        text = text.lstrip().removeprefix("assistant")
    recipient, channel = _RECIPIENT.search(text), _CHANNEL.search(text)
    if recipient is not None:
        return _MessageHeader(_MessageKind.CALL, recipient["name"])
    thought = channel is not None and channel["name"] == "analysis"
    return _MessageHeader(_MessageKind.THOUGHT if thought else _MessageKind.CONTENT, "")


def _read_call(name: str, text: str) -> tuple[ReadCall, int]:
    """Return the call whose arguments begin `text`, and the position after them."""
    start = after_space(text, 0)
    try:
        # A turn that was truncated after the call's name has no arguments yet.
        arguments, at = ({}, start) if _END.match(text, start) else read_object(text, start)
    except Unreadable as error:
        return ReadCall(name, error=str(error)), _next_end(text, start)
    at = after_space(text, at)
    if at < len(text) and _END.match(text, at) is None:
        return ReadCall(name, error=f"{CALL!r} is missing after its arguments"), _next_end(text, at)
    if not name:
        return ReadCall("", error="the name of a tool is missing"), at
    return ReadCall(name, arguments), at


def _next_end(text: str, at: int) -> int:
    found = _END.search(text, at)
    return len(text) if found is None else found.start()


MAX_HEADER_LENGTH: Final = 1000
"""Maximum number of characters of a header. Longer text is content."""
MAX_MARK_LENGTH: Final = max(map(len, (MESSAGE, *ENDS)))

_END: Final = re.compile("|".join(map(re.escape, ENDS)))
_MARK: Final = re.compile("|".join(map(re.escape, (MESSAGE, *ENDS))))
# This pattern only detects that a header begins. The patterns below read its parts.
_HEADER: Final = re.compile(r"<\||to\s*=")
_HEADER_BEGUN: Final = re.compile(r"<?|to?|to\s+")
_ROLE: Final = re.compile(r"\s*[^\s<]*")
# The name ends at white space or at a control token. The text after the token may be the type of the arguments.
_RECIPIENT: Final = re.compile(r"(?<!\w)to\s*=\s*(?:functions\.)?(?P<name>[^\s<]*)")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(?P<name>\w+)")
_WRITTEN: Final = re.compile(
    rf"<\|start\|>assistant(?P<before>(?:(?!<\|start\|>)[^\n])*?\bto=(?:functions\.)?){TOOL}(?P<after>[^\n{{]*<\|message\|>\s*)"
    rf"(?P<arguments>\{{[^\n]*?\}}|\"\{{[^\n]*?\}}\")\s*<\|call\|>"
)
