"""What a turn says, piece by piece: a bit of its thought, a bit of its content, a finished call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from runner.parsing.call_reader import ReadCall

__all__ = ["ContentPiece", "Event", "EventCollector", "FinishedCall", "ReasoningPiece", "TurnReading"]


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """The thought goes on."""

    text: str
    """What comes next of it."""


@dataclass(frozen=True, slots=True)
class ContentPiece:
    """The content goes on."""

    text: str
    """What comes next of it."""


@dataclass(frozen=True, slots=True)
class FinishedCall:
    """A call was read to its end, or cannot be read, as its error says."""

    call: ReadCall


Event: TypeAlias = ReasoningPiece | ContentPiece | FinishedCall


@dataclass(frozen=True, slots=True)
class TurnReading:
    """A turn's text taken apart."""

    reasoning: str
    content: str
    calls: list[ReadCall]


class EventCollector:
    """Collects events as a reader meets them, and holds white space back until something stands behind it.

    The thought's pieces, joined, are the thought. The content's are the content, whose parts beside calls are stripped
    and stand in lines of their own; only white space that begins the turn has been told when a call tells that it does
    not count.
    """

    def __init__(self, *, stripped: bool = False, calls: bool = True) -> None:
        """Nothing was said yet; content is `stripped` also where it stands alone, and without `calls` none counts."""
        self._stripped = stripped
        self._counts_calls = calls
        self._events: list[Event] = []
        self._thought: list[str] = []
        self._content: list[str] = []
        self._calls: list[ReadCall] = []
        self._blank = ""  # white space that may end what it stands in
        self._inside = False  # a part of the content has begun

    @property
    def reading(self) -> TurnReading:
        """All that was said so far, as reading the whole of it gives it."""
        content = "".join(self._content)
        return TurnReading("".join(self._thought), content.strip() if self._calls else content, list(self._calls))

    def take(self) -> list[Event]:
        """The events since the last time."""
        events, self._events = self._events, []
        return events

    def think(self, text: str) -> None:
        """The thought goes on."""
        if not self._inside:
            text = text.lstrip()
            self._blank = "\n" if self._thought else ""
        text = self._trimmed(text)
        if text:
            self._inside = True
            self._thought.append(text)
            self._events.append(ReasoningPiece(text))

    def end_part(self) -> None:
        """The thought, or a part of it or of the content, has ended."""
        self._blank, self._inside = "", False

    def say(self, text: str) -> None:
        """The content goes on."""
        if not self._inside and (self._calls or self._stripped):
            text = text.lstrip()
            self._blank = "\n" if self._content else ""
        text = self._trimmed(text)
        if text:
            self._inside = True
            self._content.append(text)
            self._events.append(ContentPiece(text))

    def call(self, call: ReadCall) -> None:
        """A call was read."""
        self.end_part()
        if self._counts_calls:
            self._calls.append(call)
            self._events.append(FinishedCall(call))

    def finish(self) -> None:
        """The turn has ended; where it has no call, the white space behind its content is part of that."""
        if self._blank and not (self._calls or self._stripped):
            self._content.append(self._blank)
            self._events.append(ContentPiece(self._blank))
        self._blank = ""

    def _trimmed(self, text: str) -> str:
        """`text` with the white space that stood in front of it, and without that which ends it."""
        body = text.rstrip()
        if not body:
            self._blank += text
            return ""
        blank, self._blank = self._blank, text[len(body) :]
        return blank + body
