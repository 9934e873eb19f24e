"""Compiled patterns for reading the calls of one format, and the marks at which calls may end."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

from runner.parsing.argument_reader import AS_TEXT, WORD, TaggedArgumentReader, read_object
from runner.parsing.cut_points import CutPoints
from runner.parsing.lenient_patterns import FREE, compiled, lenient, merge_optional_space, search_pattern, without_space
from runner.parsing.turn_format import CallFormat, LiteralText, Piece, Slot, TaggedArguments

__all__ = ["CallPatterns", "MissingPart"]


class MissingPart(NamedTuple):
    """The part that a malformed call lacks."""

    why: str
    """Clause that describes the error."""
    at: int
    """Position at which the call begins."""
    name: str
    """Name of the called tool; "" if unknown."""


@dataclass(frozen=True)  # no slots: cached properties need a dict
class CallPatterns:
    """The patterns of a call format for `CallReader`, each compiled on first use."""

    format: CallFormat

    @cached_property
    def begin(self) -> re.Pattern[str]:
        return compiled(lenient(self.format.begin))

    @cached_property
    def between(self) -> re.Pattern[str] | None:
        """Pattern of the text between two calls.

        None if a turn can have only one call, or if each call has its own beginning and close.
        """
        between, own = self.format.between, without_space(self.format.close + self.format.begin)
        if between is None or (self.format.trigger and without_space(between) == own):
            return None
        return compiled(lenient(between))

    @cached_property
    def close(self) -> re.Pattern[str]:
        return compiled(lenient(self.format.close))

    @cached_property
    def post(self) -> re.Pattern[str]:
        return compiled(search_pattern(self.format.post))

    @cached_property
    def head(self) -> re.Pattern[str]:
        """Pattern of the text before the arguments of a call."""
        if self.format.container is not None:
            return re.compile(r"\s*\{")
        pieces = self.before_arguments
        following: list[str] = []
        if isinstance(self.format.arguments, TaggedArguments):
            following = self._after_name(self.format.arguments)
        elif not isinstance(pieces[-1], LiteralText) or not pieces[-1].text.strip():
            following = [r"\s*[{\"\']"]
        return compiled(self._pattern(pieces) + (f"(?={'|'.join(following)})" if following else ""))

    @property
    def before_arguments(self) -> Sequence[Piece]:
        """Pieces of a call before its arguments."""
        return self.format.call[: self.format.call.index(Slot.ARGUMENTS)]

    def missing(self, pieces: Sequence[Piece], text: str, at: int) -> MissingPart:
        """Return the first of `pieces` that is missing at `at`, or the arguments if no piece is missing."""
        previous, name = "", ""
        pieces = [each for piece in pieces for each in ((piece is Slot.ID and self.format.id_pieces) or (piece,))]
        first = "it has to begin with {}" if len(pieces) == 1 else "{} is missing in front of the name of a tool"
        for number, piece in enumerate(pieces):
            if not isinstance(piece, LiteralText):
                found = compiled(self._pattern(pieces[:number]) + _SLOTS[piece].replace("+?", "+")).match(text, at)
                if found is None:
                    return MissingPart(f"{_SAID[piece]} is missing", at, name)
                previous, name = _SAID[piece], found.groupdict().get("name") or name
                continue
            marks = CutPoints().split(piece.text)
            for count, mark in enumerate(marks):
                begun = "".join(marks[: count + 1])
                if not compiled(self._pattern([*pieces[:number], LiteralText(begun)])).match(text, at):
                    before = "".join(marks[:count]).strip()
                    place = repr(before) if before else previous
                    rest = repr("".join(marks[count:]).strip() or mark)
                    why = f"{rest} is missing after {place}" if place else first.format(rest)
                    return MissingPart(why, at, name)
            previous = repr(piece.text.strip()) if piece.text.strip() else previous
        return MissingPart(
            f"the text after {previous} is not arguments" if previous else "its arguments are missing", at, name
        )

    def _after_name(self, form: TaggedArguments) -> list[str]:
        """Return patterns of the text after a name: the start of arguments, or the end of a call without arguments."""
        ends = () if form.none is None else (self.format.close, self.format.between or "")
        return [lenient(each) for each in (form.head, *(f"{form.none}{end}" for end in ends)) if each]

    @cached_property
    def tail(self) -> re.Pattern[str]:
        return compiled(self._pattern(self._after_arguments))

    @property
    def _after_arguments(self) -> Sequence[Piece]:
        return self.format.call[self.format.call.index(Slot.ARGUMENTS) + 1 :]

    @cached_property
    def tail_text(self) -> str:
        return "".join(piece.text for piece in self._after_arguments if isinstance(piece, LiteralText)).strip()

    def _pattern(self, pieces: Sequence[Piece]) -> str:
        parts: list[str] = []
        for piece in pieces:
            if piece is Slot.ID and self.format.id_pieces:
                parts.append(f"\\s*(?P<id>{self._pattern(self.format.id_pieces).removeprefix(FREE)})")
            else:
                parts.append(lenient(piece.text) if isinstance(piece, LiteralText) else _SLOTS[piece])
        return "".join(parts)

    @cached_property
    def end_marks(self) -> tuple[str, ...]:
        """Tags that end calls; empty if calls end with characters that values may contain."""
        cut = CutPoints()
        last = [cut.split(end)[-1] for end in (self.format.post.rstrip(), self.format.close.rstrip()) if end]
        return tuple(dict.fromkeys(mark for mark in last if cut.is_tag(mark)))

    def ends_arguments(self, text: str) -> bool:
        """Return True if the end mark at the end of `text` follows the tail of tagged arguments, so it may end a call.

        The result is always True if arguments are one object.
        """
        form = self.format.arguments
        if not isinstance(form, TaggedArguments):
            return True
        ends = {without_space(form.tail + self.format.post), without_space(form.tail + self.format.close)}
        return "".join(text.split()).endswith(tuple(ends))

    @cached_property
    def own_end(self) -> re.Pattern[str] | None:
        """Pattern of `own_mark`; None if `own_mark` is None."""
        return None if self.own_mark is None else compiled(lenient(self.own_mark)) if self.own_mark else _NOTHING

    @cached_property
    def own_mark(self) -> str | None:
        """First part of the close, if this part ends a single call; None if only the complete close ends it.

        The mark is "" if the arguments are an object, since its last bracket ends the call.
        """
        if not isinstance(self.format.arguments, TaggedArguments):
            return ""
        cut = CutPoints()
        first, *others = cut.split(self.format.close.strip()) or [""]
        return first if others and (cut.is_tag(first) or first in _CLOSING) else None

    @cached_property
    def quoted(self) -> bool:
        """True if strings in arguments are quoted, and quotes inside them are escaped."""
        form = self.format.arguments
        return not isinstance(form, TaggedArguments) or not any(
            isinstance(style.notation, AS_TEXT) for style in form.styles.values()
        )

    @cached_property
    def arguments(self) -> Callable[[str, int, Mapping[str, Any], bool], tuple[Mapping[str, Any], int]]:
        form = self.format.arguments
        if not isinstance(form, TaggedArguments):
            return lambda text, at, schema, whole: read_object(text, at)
        ends = [lenient(self.format.close)] if self.format.close else [r"\s*\Z"]
        if self.format.between is not None:
            ends.append(f"{lenient(self.format.between)}{WORD}+(?:{'|'.join(self._after_name(form))})")
        tagged = TaggedArgumentReader(form, ends)
        return lambda text, at, schema, whole: tagged.for_schema(schema).read(text, at, schema, whole=whole)

    @cached_property
    def line_start(self) -> re.Pattern[str]:
        """Pattern of the white space at the start of a line, before calls without a trigger."""
        return re.compile(rf"^(?P<before>[ \t]*)(?={re.escape(self._bare_begin[:1])})", re.MULTILINE)

    def named(self, names: tuple[str, ...]) -> re.Pattern[str]:
        """Return the pattern of the beginning of a call without a trigger, up to and including one of these names.

        The call may begin anywhere in a line.
        """
        if names not in self._by_names:
            if len(self._by_names) == MAX_TOOL_SETS:
                self._by_names.clear()
            pieces = self.format.call[: self.format.call.index(Slot.NAME)]
            alternatives = "|".join(map(re.escape, names))
            literal = lenient(self.format.begin) + self._pattern(pieces)
            pattern = merge_optional_space(f"{literal}(?:{alternatives})(?!{WORD})").removeprefix(FREE)
            self._by_names[names] = re.compile(f"(?P<before>){pattern}")
        return self._by_names[names]

    def may_begin(self, text: str, names: tuple[str, ...], *, line_begun: bool) -> int:
        """Return the first position at which `line_start` or `named` may match after further text has arrived.

        Without such a position, the result is the length of `text`. `line_begun` is True if `text` begins a line.
        """
        line = text.rfind("\n") + 1
        blank = (line > 0 or line_begun) and not text[line:].strip(" \t")
        end = line if blank else len(text)
        for first in {self._before_name[0]} if self._before_name else {name[0] for name in names}:
            at = text.find(first, 0, end)
            while at >= 0:
                if self._may_name("".join(text[at : at + MAX_BEGIN_LENGTH].split()), names):
                    end = at
                    break
                at = text.find(first, at + 1, end)
        return end

    def _may_name(self, begun: str, names: tuple[str, ...]) -> bool:
        """Return True if a text without white space may still become the beginning of calls and one of these names."""
        before = self._before_name
        if len(begun) <= len(before):
            return before.startswith(begun)
        name = begun.removeprefix(before)
        return begun.startswith(before) and any(each.startswith(name) for each in names)

    @cached_property
    def _before_name(self) -> str:
        before = itertools.takewhile(lambda piece: isinstance(piece, LiteralText), self.format.call)
        return without_space(
            self.format.begin + "".join(piece.text for piece in before if isinstance(piece, LiteralText))
        )

    @cached_property
    def _by_names(self) -> dict[tuple[str, ...], re.Pattern[str]]:
        return {}

    @cached_property
    def _bare_begin(self) -> str:
        """Text before the first name if calls have no trigger."""
        piece = self.format.call[0]
        return self.format.begin.strip() or (piece.text.strip() if isinstance(piece, LiteralText) else "")

    @cached_property
    def close_is_longer(self) -> bool:
        """True if the close of the calls begins with the separator between two calls."""
        close, between = without_space(self.format.close), without_space(self.format.between or "")
        return close != between and close.startswith(between)

    @cached_property
    def close_may_continue(self) -> bool:
        """True if the separator between two calls begins with the close: only later text distinguishes them."""
        return self.between is not None and without_space(self.format.between or "").startswith(
            without_space(self.format.close)
        )


MAX_BEGIN_LENGTH: Final = 400
"""Maximum number of characters, with their white space, that are examined for the beginning of a call. If all of them
may still belong to a beginning, the position counts as the beginning of a call.
"""

MAX_TOOL_SETS: Final = 256
"""Maximum number of sets of tool names whose patterns are cached; a run has few such sets."""

_NOTHING: Final = re.compile("")
_CLOSING: Final = frozenset(")]}")

_SAID: Final = {Slot.NAME: "the name of a tool", Slot.ID: "the id of the call", Slot.INDEX: "the number of the call"}

_SLOTS: Final = {
    Slot.NAME: rf"\s*(?P<name>{WORD}+?)",
    Slot.ID: f"(?P<id>{WORD}+?)",
    Slot.INDEX: r"\d+",
}
