"""Events of a turn that is being parsed: reasoning, content and calls; and the base of readers that emit them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from runner.parsing.call_reader import ReadCall

__all__ = ["ContentPiece", "Event", "EventCollector", "FinishedCall", "ReasoningPiece", "StateReader", "TurnReading"]


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """The next piece of the reasoning."""

    text: str
    """Text that follows the previous pieces."""


@dataclass(frozen=True, slots=True)
class ContentPiece:
    """The next piece of the content."""

    text: str
    """Text that follows the previous pieces."""


@dataclass(frozen=True, slots=True)
class FinishedCall:
    """A call that was read completely, or that could not be read: then `call.error` has the reason."""

    call: ReadCall


Event: TypeAlias = ReasoningPiece | ContentPiece | FinishedCall


@dataclass(frozen=True, slots=True)
class TurnReading:
    """The parts of a turn's text."""

    reasoning: str
    content: str
    calls: list[ReadCall]


class EventCollector:
    """Collector of the events of a reader. It holds back white space until more text follows.

    The joined reasoning pieces equal the reasoning, and the joined content pieces equal the content. In a turn with
    calls, each part of the content is stripped, and line breaks join the parts. White space at the start of a turn may
    already be emitted when a later call shows that it is not part of the content.
    """

    def __init__(self, *, stripped: bool = False, calls: bool = True) -> None:
        """Create a collector. `stripped`: strip the content also without calls. `calls`: False to ignore calls."""
        self._stripped = stripped
        self._counts_calls = calls
        self._events: list[Event] = []
        self._thought: list[str] = []
        self._content: list[str] = []
        self._calls: list[ReadCall] = []
        self._blank = ""  # white space that may end the current part
        self._inside = False  # True if a part of the content has begun

    @property
    def reading(self) -> TurnReading:
        """The parts of the text so far, as if the text had been read in one piece."""
        content = "".join(self._content)
        return TurnReading("".join(self._thought), content.strip() if self._calls else content, list(self._calls))

    def take(self) -> list[Event]:
        """Return the events since the last call of this method."""
        events, self._events = self._events, []
        return events

    def think(self, text: str) -> None:
        if not self._inside:
            text = text.lstrip()
            self._blank = "\n" if self._thought else ""
        text = self._trimmed(text)
        if text:
            self._inside = True
            self._thought.append(text)
            self._events.append(ReasoningPiece(text))

    def end_part(self) -> None:
        self._blank, self._inside = "", False

    def say(self, text: str) -> None:
        if not self._inside and (self._calls or self._stripped):
            text = text.lstrip()
            self._blank = "\n" if self._content else ""
        text = self._trimmed(text)
        if text:
            self._inside = True
            self._content.append(text)
            self._events.append(ContentPiece(text))

    def call(self, call: ReadCall) -> None:
        """End the current part, and emit the call. If calls are ignored, only the part ends."""
        self.end_part()
        if self._counts_calls:
            self._calls.append(call)
            self._events.append(FinishedCall(call))

    def finish(self) -> None:
        """End the turn; without calls, white space at the end belongs to the content."""
        if self._blank and not (self._calls or self._stripped):
            self._content.append(self._blank)
            self._events.append(ContentPiece(self._blank))
        self._blank = ""

    def _trimmed(self, text: str) -> str:
        """Return the white space that was held back, and `text`. White space at the end is held back instead."""
        body = text.rstrip()
        if not body:
            self._blank += text
            return ""
        blank, self._blank = self._blank, text[len(body) :]
        return blank + body


class StateReader:
    """Reader of the text of a turn that arrives piece by piece.

    The current state consumes text, and returns the rest for the next state.
    """

    def __init__(self, collector: EventCollector, state: Callable[[str], str]) -> None:
        """Begin a turn in `state`. `collector` receives the parts of the turn."""
        self._collector = collector
        self._state = state
        self._held = ""  # text that the current state can read only with more text
        self._ended = False

    @property
    def reading(self) -> TurnReading:
        """The parts of the text so far. At the end of the turn they equal the parts of the complete text."""
        return self._collector.reading

    def feed(self, text: str) -> list[Event]:
        """Return the events that `text` completes."""
        while text:
            text = self._state(text)
        return self._collector.take()

    def _with_held(self, text: str) -> str:
        """Return the text that was held back, followed by `text`; nothing is held back afterwards."""
        text, self._held = self._held + text, ""
        return text
