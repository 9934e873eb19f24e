"""Harmony, the format of gpt-oss: a turn of messages, each with a channel, and for a call with a recipient.

It is read by hand, since templates show neither what a model writes beside a call nor the ways in which it spells the
headers of its messages. Source: OpenAI's "harmony response format".
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable
from typing import Final, NamedTuple

from runner.parsing.argument_reader import read_object
from runner.parsing.call_reader import ReadCall
from runner.parsing.end_detector import EndDetector, RereadBudget, partial_mark_length
from runner.parsing.events import Event, EventCollector, TurnReading
from runner.parsing.literals import Unreadable, behind_space
from runner.parsing.notations import Json, object_notations
from runner.parsing.turn_format import CallFormat, IdStyle, LiteralText, ReasoningFormat, Slot, WholeArguments
from runner.tokens.probe_messages import KEY, QUESTION, TOOL, TOOLS, VALUE, calling, result
from runner.tokens.template import Renderer, TemplateRaised

__all__ = ["CALLS", "MESSAGE", "NEXT_MESSAGE", "THOUGHT", "HarmonyStream", "learn_harmony", "read_harmony"]

START: Final = "<|start|>"
MESSAGE: Final = "<|message|>"
CALL: Final = "<|call|>"
ENDS: Final = ("<|end|>", CALL, "<|return|>", START)
"""What may end a message; behind the last one nothing has to."""

NEXT_MESSAGE: Final = f"<|end|>{START}assistant"
"""What stands between two messages of an assistant."""

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
"""How gpt-oss's own template writes a call: one in a turn, and no content beside it."""


THOUGHT: Final = ReasoningFormat(f"<|channel|>analysis{MESSAGE}", "<|end|>", opened_by_prompt=False)
"""How it writes a thought."""


def learn_harmony(renderer: Renderer) -> CallFormat | None:
    """How a template of this format writes a call, or None where it writes another format."""
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
                call = (Slot.NAME, LiteralText(written["behind"]), Slot.ARGUMENTS)
                begin, arguments = written["before"], WholeArguments(notation)
                return dataclasses.replace(CALLS, begin=begin, trigger=begin, call=call, arguments=arguments)
    return None


def read_harmony(text: str, *, calls: bool = True) -> TurnReading:
    """What a turn's text says, from behind the prompt's `<|start|>assistant` on; without `calls` no message is one.

    The thought is what stands in the channel "analysis", a call what has a recipient, the content all else. A message
    of another role than the assistant's is nothing that was said.
    """
    stream = HarmonyStream(calls=calls)
    stream.feed(text)
    stream.finish()
    return stream.reading


class _MessageKind(enum.Enum):
    """What a message is."""

    THOUGHT = enum.auto()
    CONTENT = enum.auto()
    CALL = enum.auto()
    FOREIGN = enum.auto()


class _MessageHeader(NamedTuple):
    """What a message says of itself."""

    kind: _MessageKind
    name: str
    """The tool that it calls."""


class HarmonyStream:
    """One turn, read while it is sampled.

    A call is told when what ends its message has come; one that cannot be read is told at the end of the turn, with
    what stands behind it. Thought and content are told piece by piece, each message without white space around it,
    and a line break between two messages; joined, the pieces are those of `reading`.
    """

    def __init__(self, *, calls: bool = True) -> None:
        """Begin a turn, in which with `calls` something may be called."""
        self._told = EventCollector(stripped=True, calls=calls)
        self._state: Callable[[str], str] = self._before
        self._held = ""
        self._role = False  # the next message says whose it is; of the first the prompt did
        self._header = _MessageHeader(_MessageKind.CONTENT, "")
        self._arguments: list[str] = []
        self._watch = EndDetector(ENDS, quoted=True)
        self._budget = RereadBudget()
        self._ended = False

    @property
    def reading(self) -> TurnReading:
        """What was said so far; behind `finish()` it is what `read_harmony` gives for the whole text."""
        return self._told.reading

    def feed(self, text: str) -> list[Event]:
        """What is sure now that `text` has come."""
        while text:
            text = self._state(text)
        return self._told.take()

    def finish(self) -> list[Event]:
        """What was held back, now that nothing comes any more."""
        self._ended = True
        text = self._state("")
        while text or self._state == self._called:
            text = self._state(text)
        return self._told.take()

    # --- states: each takes what has come and gives back what is another's

    def _before(self, text: str) -> str:
        """In front of a message, which some begin without a header."""
        text = self._taken(text)
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
        text = self._taken(text)
        mark = _MARK.search(text)
        if (len(text) - MOST_BEGUN if mark is None else mark.start()) > LONGEST_HEADER:
            self._begin(_MessageHeader(_MessageKind.CONTENT, ""))
            return text
        if mark is None and not self._ended:
            self._held = text
            return ""
        header = _read_header(text if mark is None else text[: mark.start()], foreign=self._role)
        if mark is not None and mark[0] == MESSAGE:
            self._begin(header)
            return text[mark.end() :]
        if header.kind is _MessageKind.CALL:
            self._told.call(ReadCall(header.name, error="its arguments are missing"))
        return self._behind(text, mark)

    def _begin(self, header: _MessageHeader) -> None:
        """A message comes."""
        self._header = header
        self._state = self._body
        if header.kind is _MessageKind.CALL:
            self._state = self._called
            self._arguments = []
            self._watch, self._budget = EndDetector(ENDS, quoted=True), RereadBudget()

    def _body(self, text: str) -> str:
        text = self._taken(text)
        mark = _END.search(text)
        begun = partial_mark_length(text, ENDS) if mark is None and not self._ended else 0
        end = mark.start() if mark is not None else len(text) - begun
        if self._header.kind is _MessageKind.THOUGHT:
            self._told.think(text[:end])
        elif self._header.kind is _MessageKind.CONTENT:
            self._told.say(text[:end])
        if mark is None:
            self._held = text[end:]
            return ""
        self._told.end_part()
        return self._behind(text, mark)

    def _called(self, text: str) -> str:
        """In the arguments of a call, which hold what ends them only in strings."""
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
        self._told.call(call)
        return self._behind(written + rest, _END.match(written, at))

    def _behind(self, text: str, mark: re.Match[str] | None) -> str:
        """What stands behind the mark that ended a message."""
        self._state = self._before
        self._role = mark is not None and mark[0] == START
        return "" if mark is None else text[mark.end() :]

    def _taken(self, text: str) -> str:
        text, self._held = self._held + text, ""
        return text


def _read_header(text: str, *, foreign: bool) -> _MessageHeader:
    """What the header of a message says, in whatever order; with `foreign` it begins with whose message it is."""
    if foreign:
        role, text = _ROLE.match(text)[0].strip(), text  # type: ignore[index]  # it matches the empty text
        if role and not role.startswith("assistant"):
            return _MessageHeader(_MessageKind.FOREIGN, "")
        text = text.lstrip().removeprefix("assistant")
    recipient, channel = _RECIPIENT.search(text), _CHANNEL.search(text)
    if recipient is not None:
        return _MessageHeader(_MessageKind.CALL, recipient["name"])
    thought = channel is not None and channel["name"] == "analysis"
    return _MessageHeader(_MessageKind.THOUGHT if thought else _MessageKind.CONTENT, "")


def _read_call(name: str, text: str) -> tuple[ReadCall, int]:
    """The call whose arguments begin `text`, and where they are ended."""
    start = behind_space(text, 0)
    try:
        # A turn that was cut here may have been about to say some.
        arguments, at = ({}, start) if _END.match(text, start) else read_object(text, start)
    except Unreadable as error:
        return ReadCall(name, error=str(error)), _next_end(text, start)
    at = behind_space(text, at)
    if at < len(text) and _END.match(text, at) is None:
        return ReadCall(name, error=f"{CALL!r} is missing behind its arguments"), _next_end(text, at)
    if not name:
        return ReadCall("", error="the name of a tool is missing"), at
    return ReadCall(name, arguments), at


def _next_end(text: str, at: int) -> int:
    found = _END.search(text, at)
    return len(text) if found is None else found.start()


LONGEST_HEADER: Final = 1000
"""What begins as a header and is longer is none."""
MOST_BEGUN: Final = max(map(len, (MESSAGE, *ENDS)))

_END: Final = re.compile("|".join(map(re.escape, ENDS)))
_MARK: Final = re.compile("|".join(map(re.escape, (MESSAGE, *ENDS))))
# What is between this and the message is read by what is in it.
_HEADER: Final = re.compile(r"<\||to\s*=")
_HEADER_BEGUN: Final = re.compile(r"<?|to?|to\s+")
_ROLE: Final = re.compile(r"\s*[^\s<]*")
# The name ends where a control token begins; what stands behind it may be the type of the arguments.
_RECIPIENT: Final = re.compile(r"(?<!\w)to\s*=\s*(?:functions\.)?(?P<name>[^\s<]*)")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(?P<name>\w+)")
_WRITTEN: Final = re.compile(
    rf"<\|start\|>assistant(?P<before>(?:(?!<\|start\|>)[^\n])*?\bto=(?:functions\.)?){TOOL}(?P<behind>[^\n{{]*<\|message\|>\s*)"
    rf"(?P<arguments>\{{[^\n]*?\}}|\"\{{[^\n]*?\}}\")\s*<\|call\|>"
)
