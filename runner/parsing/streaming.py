"""Reader of a turn whose text arrives in pieces, with the same result as a reader of the complete text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from runner.parsing.call_reader import CallReader, ReadCall, Schemas
from runner.parsing.end_detector import EndDetector, RereadBudget, partial_mark_length
from runner.parsing.events import Event, EventCollector, StateReader
from runner.parsing.turn_format import TaggedArguments
from runner.parsing.turn_reader import TurnReader

__all__ = ["TurnStream"]


class TurnStream(StateReader):
    """Reader of one turn while the turn is sampled.

    A call is emitted once, as soon as no later text can change it. An unreadable call and the text after it are emitted
    at the end of the turn, since later text may repair the call.

    Reasoning and content are emitted at once. Only a possible beginning of a mark, and white space that may end a part,
    are held back. So the joined content pieces equal the content of `reading`, except for white space at the start of a
    turn with calls.

    If calls have no trigger, the text from the first possible beginning of a call is emitted at the end of the turn.
    If reasoning has no opening mark, no text is emitted before the close of the reasoning, or the end of the turn.
    """

    def __init__(self, reader: TurnReader, schemas: Schemas | None = None) -> None:
        """Begin a turn.

        Args:
            reader: reader of complete turns in the format of this turn.
            schemas: tools that may be called; None if they are unknown.
        """
        super().__init__(EventCollector(), self._start)
        self._reader = reader
        self._schemas = schemas
        self._thought_open, self._thought_close = reader.reasoning.open, reader.reasoning.close
        self._watch = EndDetector([self._thought_close], quoted=False)
        self._pending: list[str] = []  # text that is reasoning if a close follows
        self._section: _Section | None = None
        self._last = ""  # the last emitted character

    def finish(self) -> list[Event]:
        """Return the events that were held back until the end of the turn."""
        self._ended = True
        text = self._state("")
        while text:
            text = self._state(text)
        if self._state != self._thought:
            self._collector.finish()
        return self._collector.take()

    # --- states: each consumes text and returns the rest for the next state

    def _start(self, text: str) -> str:
        """Handle the start of the turn, which may be a mark of reasoning."""
        text = self._with_held(text)
        start = text.lstrip()
        opening, closing = self._thought_open, self._thought_close
        if not self._ended and any(len(start) < len(mark) and mark.startswith(start) for mark in (opening, closing)):
            self._held = text
            return ""
        if opening and start.startswith(opening):
            self._state = self._thought
            return start[len(opening) :]
        if start.startswith(closing):
            self._state = self._after_thought
            return start[len(closing) :]
        if self._reader.reasoning.opened_by_prompt:
            self._state = self._thought
        else:
            self._state = self._before_content if opening else self._unopened
        return text

    def _unopened(self, text: str) -> str:
        """Handle text that is reasoning only if a close follows."""
        end = None if self._ended else self._watch.feed(text)
        self._pending.append(text[:end])
        if end is None and not self._ended:
            return ""
        said = "".join(self._pending)
        if end is None:
            self._state = self._before_content
            return said
        self._collector.think(said[: -len(self._thought_close)])
        self._state = self._after_thought
        return text[end:]

    def _thought(self, text: str) -> str:
        text = self._with_held(text)
        at = text.find(self._thought_close)
        if at >= 0:
            self._collector.think(text[:at])
            self._state = self._after_thought
            return text[at + len(self._thought_close) :]
        self._hold(text, self._thought_close, self._collector.think)
        return ""

    def _after_thought(self, text: str) -> str:
        self._collector.end_part()
        text = text.lstrip()
        if text:
            self._state = self._before_content
        return text

    def _before_content(self, text: str) -> str:
        """Skip white space and the mark before the content, if the format has such a mark."""
        opening = self._reader.content_open
        if opening:
            text = self._with_held(text).lstrip()
            if not self._ended and len(text) < len(opening) and opening.startswith(text):
                self._held = text
                return ""
            text = text.removeprefix(opening)
        self._state = self._lines if self._reader.bare else self._content
        return text

    def _content(self, text: str) -> str:
        text = self._with_held(text)
        trigger = self._reader.trigger
        at = text.find(trigger) if trigger else -1
        if at < 0:
            self._hold(text, trigger, self._collector.say)
            return ""
        self._collector.say(text[:at])
        self._begin_calls()
        return text[at:]

    def _lines(self, text: str) -> str:
        """Handle content in a format whose calls have no trigger."""
        assert self._reader.calls is not None
        text = self._with_held(text)
        at, begun = self._reader.calls.may_begin(text, self._last, self._schemas, whole=self._ended)
        self._collector.say(text[:at])
        self._last = text[at - 1 : at] or self._last
        if not begun:
            self._held = text[at:]
            return ""
        self._begin_calls()
        return text[at:]

    def _begin_calls(self) -> None:
        assert self._reader.calls is not None
        in_line = self._reader.bare and self._last not in ("", "\n")
        self._section = _Section(self._reader.calls, self._schemas, in_line=in_line)
        self._state = self._calls

    def _calls(self, text: str) -> str:
        assert self._section is not None
        if self._ended:
            self._section.keep(text)
            self._section.finish(self._collector)
            self._state = self._content
            return ""
        rest = self._section.feed(text, self._collector)
        if rest is None:
            return ""
        self._state = self._content
        return rest

    def _hold(self, text: str, mark: str, add: Callable[[str], None]) -> None:
        """Emit `text`, except for a suffix that may be the beginning of the mark."""
        begun = 0 if self._ended or not mark else partial_mark_length(text, (mark,))
        self._held = text[len(text) - begun :]
        add(text[: len(text) - begun])


END_LENGTH: Final = 300
"""Number of characters that suffice to contain the end of a call and the white space in it."""
IN_LINE: Final = "."
"""Text that replaces the content before a call in the same line."""


class _Section:
    """The calls after one trigger. Their text is kept until they can be read."""

    def __init__(self, reader: CallReader, schemas: Schemas | None, *, in_line: bool) -> None:
        self._reader = reader
        self._before = IN_LINE if in_line else ""
        self._schemas = schemas
        self._parts: list[str] = []
        self._length = 0
        self._begun = False
        self._budget = RereadBudget()
        marks, quoted = reader.patterns.end_marks, reader.patterns.quoted
        closed = bool(reader.format.close) or not isinstance(reader.format.arguments, TaggedArguments)
        watched = bool(reader.format.trigger) and closed and (quoted or bool(marks))
        self._watch = EndDetector(marks, quoted=quoted) if watched else None

    def feed(self, text: str, collector: EventCollector) -> str | None:
        """Emit the calls that no later text can change.

        Return the text after the section, or None if the section is not closed yet.
        """
        while text:
            end = None if self._watch is None else self._watch.feed(text)
            self.keep(text[:end])
            if end is None:
                return None
            text = text[end:]
            after = self._read(collector)
            if after is not None:
                return after + text
        return None

    def finish(self, collector: EventCollector) -> None:
        text = self._before + "".join(self._parts)
        for part in self._reader.parts(text, self._schemas, begun=self._begun):
            if isinstance(part, ReadCall):
                collector.call(part)
            else:
                collector.say(part.removeprefix(self._before))
                self._before = ""

    def _last_signs(self) -> str:
        """Return the last characters of the kept text: enough to contain the end of a call."""
        signs = ""
        for part in reversed(self._parts):
            signs = part[-END_LENGTH:] + signs
            if len(signs) >= END_LENGTH:
                break
        return signs

    def keep(self, text: str) -> None:
        self._parts.append(text)
        self._length += len(text)

    def _read(self, collector: EventCollector) -> str | None:
        if not self._budget.allows(self._length, likely=self._reader.patterns.ends_arguments(self._last_signs())):
            return None
        text = "".join(self._parts)
        decided = self._reader.decided(text, self._schemas, begun=self._begun)
        for call in decided.calls:
            collector.call(call)
        if decided.closed:
            return text[decided.end :]
        if decided.calls:
            self._begun = True
            self._budget.renew()
        else:
            self._budget.spend(len(text))
        self._parts = [text[decided.end :]]
        self._length = len(self._parts[0])
        return None
