"""The patterns by which calls of one format are read, and what of a text tells that calls may have ended."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

from runner.parsing.argument_reader import AS_TEXT, WORD, TaggedArgumentReader, read_object
from runner.parsing.cut_points import CutPoints
from runner.parsing.lenient_patterns import FREE, compiled, free_once, lenient, searched, squeezed
from runner.parsing.turn_format import CallFormat, LiteralText, Piece, Slot, TaggedArguments

__all__ = ["CallPatterns", "MissingPart"]


class MissingPart(NamedTuple):
    """What a call lacks that cannot be read."""

    why: str
    """A clause that says it."""
    at: int
    """Where the call begins."""
    name: str
    """The tool that it names, "" where that cannot be told."""


@dataclass(frozen=True)  # without slots, since they are kept in it
class CallPatterns:
    """What `CallReader` looks for, each compiled when it is first asked for."""

    format: CallFormat

    @cached_property
    def begin(self) -> re.Pattern[str]:
        return compiled(lenient(self.format.begin))

    @cached_property
    def between(self) -> re.Pattern[str] | None:
        """What stands between two calls; None where each is announced, with a begin and a close of its own."""
        between, own = self.format.between, squeezed(self.format.close + self.format.begin)
        if between is None or (self.format.trigger and squeezed(between) == own):
            return None
        return compiled(lenient(between))

    @cached_property
    def close(self) -> re.Pattern[str]:
        return compiled(lenient(self.format.close))

    @cached_property
    def post(self) -> re.Pattern[str]:
        return compiled(searched(self.format.post))

    @cached_property
    def head(self) -> re.Pattern[str]:
        """What stands in front of a call's arguments."""
        if self.format.container is not None:
            return re.compile(r"\s*\{")
        pieces = self.before_arguments
        following: list[str] = []
        if isinstance(self.format.arguments, TaggedArguments):
            following = self._behind_name(self.format.arguments)
        elif not isinstance(pieces[-1], LiteralText) or not pieces[-1].text.strip():
            following = [r"\s*[{\"\']"]
        return compiled(self._pattern(pieces) + (f"(?={'|'.join(following)})" if following else ""))

    @property
    def before_arguments(self) -> Sequence[Piece]:
        """The pieces of a call in front of its arguments."""
        return self.format.call[: self.format.call.index(Slot.ARGUMENTS)]

    def missing(self, pieces: Sequence[Piece], text: str, at: int) -> MissingPart:
        """What of `pieces` does not stand at `at`: for what a reader says that found something else there."""
        behind, name = "", ""
        pieces = [each for piece in pieces for each in ((piece is Slot.ID and self.format.id_pieces) or (piece,))]
        first = "it has to begin with {}" if len(pieces) == 1 else "{} is missing in front of the name of a tool"
        for number, piece in enumerate(pieces):
            if not isinstance(piece, LiteralText):
                found = compiled(self._pattern(pieces[:number]) + _SLOTS[piece].replace("+?", "+")).match(text, at)
                if found is None:
                    return MissingPart(f"{_SAID[piece]} is missing", at, name)
                behind, name = _SAID[piece], found.groupdict().get("name") or name
                continue
            marks = CutPoints().split(piece.text)
            for count, mark in enumerate(marks):
                begun = "".join(marks[: count + 1])
                if not compiled(self._pattern([*pieces[:number], LiteralText(begun)])).match(text, at):
                    before = "".join(marks[:count]).strip()
                    after = repr(before) if before else behind
                    rest = repr("".join(marks[count:]).strip() or mark)
                    why = f"{rest} is missing behind {after}" if after else first.format(rest)
                    return MissingPart(why, at, name)
            behind = repr(piece.text.strip()) if piece.text.strip() else behind
        return MissingPart(
            f"what stands behind {behind} are no arguments" if behind else "its arguments are missing", at, name
        )

    def _behind_name(self, form: TaggedArguments) -> list[str]:
        """Patterns of what stands behind a name: arguments, or that there are none and what follows a call."""
        ends = () if form.none is None else (self.format.close, self.format.between or "")
        return [lenient(each) for each in (form.head, *(f"{form.none}{end}" for end in ends)) if each]

    @cached_property
    def tail(self) -> re.Pattern[str]:
        return compiled(self._pattern(self._behind_arguments))

    @property
    def _behind_arguments(self) -> Sequence[Piece]:
        return self.format.call[self.format.call.index(Slot.ARGUMENTS) + 1 :]

    @cached_property
    def tail_text(self) -> str:
        return "".join(piece.text for piece in self._behind_arguments if isinstance(piece, LiteralText)).strip()

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
        """The tags that calls end with; none where they end with signs that stand in values too."""
        cut = CutPoints()
        last = [cut.split(end)[-1] for end in (self.format.post.rstrip(), self.format.close.rstrip()) if end]
        return tuple(dict.fromkeys(mark for mark in last if cut.is_tag(mark)))

    def ends_arguments(self, text: str) -> bool:
        """The end mark that `text` ends with stands behind the end of an argument, if it is one that ends a call."""
        form = self.format.arguments
        if not isinstance(form, TaggedArguments):
            return True
        ends = {squeezed(form.tail + self.format.post), squeezed(form.tail + self.format.close)}
        return "".join(text.split()).endswith(tuple(ends))

    @cached_property
    def own_end(self) -> re.Pattern[str] | None:
        """What ends one call by itself, in front of all else that closes it; None where only the whole close does."""
        return None if self.own_mark is None else compiled(lenient(self.own_mark)) if self.own_mark else _NOTHING

    @cached_property
    def own_mark(self) -> str | None:
        """The part of the close that ends one call by itself; "" where the bracket of its object does, else None."""
        if not isinstance(self.format.arguments, TaggedArguments):
            return ""
        cut = CutPoints()
        first, *others = cut.split(self.format.close.strip()) or [""]
        return first if others and (cut.is_tag(first) or first in _CLOSING) else None

    @cached_property
    def quoted(self) -> bool:
        """Strings in arguments stand in quotation marks, in which those of the string itself are escaped."""
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
            ends.append(f"{lenient(self.format.between)}{WORD}+(?:{'|'.join(self._behind_name(form))})")
        tagged = TaggedArgumentReader(form, ends)
        return lambda text, at, schema, whole: tagged.read(text, at, schema, whole=whole)

    @cached_property
    def line_start(self) -> re.Pattern[str]:
        """The white space in front of calls that nothing announces, at the start of a line."""
        return re.compile(rf"^(?P<before>[ \t]*)(?={re.escape(self._bare_begin[:1])})", re.MULTILINE)

    def named(self, names: tuple[str, ...]) -> re.Pattern[str]:
        """What begins calls that nothing announces, anywhere in a line, with the name of one of these tools."""
        if names not in self._by_names:
            if len(self._by_names) == MOST_TOOL_SETS:
                self._by_names.clear()
            pieces = self.format.call[: self.format.call.index(Slot.NAME)]
            alternatives = "|".join(map(re.escape, names))
            literal = lenient(self.format.begin) + self._pattern(pieces)
            pattern = free_once(f"{literal}(?:{alternatives})(?!{WORD})").removeprefix(FREE)
            self._by_names[names] = re.compile(f"(?P<before>){pattern}")
        return self._by_names[names]

    def may_begin(self, text: str, names: tuple[str, ...], *, line_begun: bool) -> int:
        """From where on `text` may be what `line_start` or `named` looks for, once it goes on; else its end."""
        line = text.rfind("\n") + 1
        blank = (line > 0 or line_begun) and not text[line:].strip(" \t")
        end = line if blank else len(text)
        for first in {self._before_name[0]} if self._before_name else {name[0] for name in names}:
            at = text.find(first, 0, end)
            while at >= 0:
                if self._may_name("".join(text[at : at + NEAR].split()), names):
                    end = at
                    break
                at = text.find(first, at + 1, end)
        return end

    def _may_name(self, begun: str, names: tuple[str, ...]) -> bool:
        """A text without white space may become what begins calls and one of these names."""
        before = self._before_name
        if len(begun) <= len(before):
            return before.startswith(begun)
        name = begun.removeprefix(before)
        return begun.startswith(before) and any(each.startswith(name) for each in names)

    @cached_property
    def _before_name(self) -> str:
        before = itertools.takewhile(lambda piece: isinstance(piece, LiteralText), self.format.call)
        return squeezed(self.format.begin + "".join(piece.text for piece in before if isinstance(piece, LiteralText)))

    @cached_property
    def _by_names(self) -> dict[tuple[str, ...], re.Pattern[str]]:
        return {}

    @cached_property
    def _bare_begin(self) -> str:
        """What stands in front of the first name, where nothing announces calls."""
        piece = self.format.call[0]
        return self.format.begin.strip() or (piece.text.strip() if isinstance(piece, LiteralText) else "")

    @cached_property
    def close_is_longer(self) -> bool:
        """What stands between two calls also begins what closes them."""
        close, between = squeezed(self.format.close), squeezed(self.format.between or "")
        return close != between and close.startswith(between)

    @cached_property
    def close_may_go_on(self) -> bool:
        """What closes the calls also begins what stands between two, so that only what follows tells which it is."""
        return self.between is not None and squeezed(self.format.between or "").startswith(squeezed(self.format.close))


NEAR: Final = 400
"""As long a text as tells whether it begins a call; one with more white space is taken for one."""

MOST_TOOL_SETS: Final = 256
"""Sets of tools whose patterns are kept; a run has a few."""

_NOTHING: Final = re.compile("")
_CLOSING: Final = frozenset(")]}")

_SAID: Final = {Slot.NAME: "the name of a tool", Slot.ID: "the id of the call", Slot.INDEX: "the number of the call"}

_SLOTS: Final = {
    Slot.NAME: rf"\s*(?P<name>{WORD}+?)",
    Slot.ID: f"(?P<id>{WORD}+?)",
    Slot.INDEX: r"\d+",
}
