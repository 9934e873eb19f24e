"""Reads the calls of a turn in the format that its template writes, and what models make of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Final

from runner.parsing.lenient import FREE, lenient
from runner.parsing.literals import Unreadable, read_literal
from runner.parsing.turn_format import CallFormat, Piece, Slot, TaggedArguments, Text
from runner.parsing.values import WORD, TaggedReader, as_object, read_object

__all__ = ["CallReader", "ReadCall", "Reading", "Schemas"]

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of every known tool's parameters."""


@dataclass(frozen=True, slots=True)
class ReadCall:
    """One call as a turn's text has it."""

    name: str
    """The tool's name; "" where it could not be read."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None
    """The id that the model wrote, where the format has one."""
    error: str | None = None
    """What is wrong with it; None where it was read."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A turn's text taken apart."""

    content: str
    calls: list[ReadCall]


class _Malformed(Exception):
    """A call that was begun cannot be read."""

    def __init__(self, why: str, at: int, name: str = "") -> None:
        super().__init__(why)
        self.at = at
        self.name = name


@dataclass(frozen=True)  # without slots, since its patterns are kept in it
class CallReader:
    """Reads what one `CallFormat` describes. It has no state beside its patterns."""

    format: CallFormat

    def read(self, text: str, schemas: Schemas | None = None, *, triggers: Collection[int] | None = None) -> Reading:
        """The calls in `text` and the content beside them; without a trigger nothing is a call.

        Args:
            text: what the model said, without its thought.
            schemas: the tools that may be called; None where they are not known.
            triggers: where the trigger counts as one, for vocabularies that have it as one token; None for everywhere.
        """
        return self._triggered(text, schemas, triggers) if self.format.trigger else self._bare(text, schemas)

    # --- where calls begin

    def _triggered(self, text: str, schemas: Schemas | None, triggers: Collection[int] | None) -> Reading:
        content: list[str] = []
        calls: list[ReadCall] = []
        at = 0
        while (start := self._next_trigger(text, at, triggers)) >= 0:
            content.append(text[at:start])
            at = self._section(text, self._last_of_several(text, start), schemas, calls)
        if not calls:
            return Reading(text, [])
        content.append(text[at:])
        return Reading("\n".join(stripped for part in content if (stripped := part.strip())), calls)

    def _next_trigger(self, text: str, at: int, triggers: Collection[int] | None) -> int:
        """Where calls are announced next, or -1."""
        start = text.find(self.format.trigger, at)
        while triggers is not None and start >= 0 and start not in triggers:
            start = text.find(self.format.trigger, start + 1)
        return start

    def _last_of_several(self, text: str, start: int) -> int:
        """The last of triggers that follow each other: models say one twice."""
        again = start
        while text.startswith(self.format.trigger, again):
            start, again = again, _behind_space(text, again + len(self.format.trigger))
        return start

    def _section(self, text: str, start: int, schemas: Schemas | None, calls: list[ReadCall]) -> int:
        """Read the calls that begin at `start` into `calls`, and where the text goes on behind them."""
        at = start
        try:
            for call, at in self._calls(text, start, schemas):  # noqa: B007  # the last is needed
                calls.append(call)
        except _Malformed as error:
            calls.append(ReadCall(error.name, error=str(error)))
            return self._behind_fault(text, max(error.at, start + len(self.format.trigger)))
        return at

    def _behind_fault(self, text: str, at: int) -> int:
        """Behind the close of a call that could not be read, at the next trigger, or at the end."""
        trigger = text.find(self.format.trigger, at)
        # No further than the next trigger, or many of them would be many looks through the rest.
        post = self._post.search(text, at, trigger if trigger >= 0 else len(text)) if self.format.post.strip() else None
        if post is not None:
            closed = self._close.match(text, post.start())
            return (closed or post).end()
        return trigger if trigger >= 0 else len(text)

    def _bare(self, text: str, schemas: Schemas | None) -> Reading:
        """Calls that nothing announces: all the rest of the turn from some place on."""
        begun: Reading | None = None
        for start in self._candidates(text, tuple(schemas or ())):
            calls: list[ReadCall] = []
            end = start
            try:
                for call, end in self._calls(text, start, schemas):  # noqa: B007  # the last is needed
                    calls.append(call)
            except _Malformed as error:
                names = {error.name, *(call.name for call in calls)}
                if begun is None and schemas is not None and not names.isdisjoint(schemas):
                    begun = Reading(text[:start].strip(), [*calls, ReadCall(error.name, error=str(error))])
                continue
            named = schemas is None or not self._by_name or all(call.name in schemas for call in calls)
            if named and not text[end:].strip():
                return Reading(text[:start].strip(), calls)
        return begun or Reading(text, [])

    @property
    def _by_name(self) -> bool:
        """Whether only the tools' names tell a call from other text: an object may be an answer."""
        return not isinstance(self.format.arguments, TaggedArguments)

    def _candidates(self, text: str, names: tuple[str, ...]) -> Iterator[int]:
        """Where calls may begin: at the start of a line, or anywhere with the name of a tool."""
        patterns = [self._line_start, *([self._named(names)] if names else [])]
        starts = {
            match.end("before") for pattern in patterns for match in islice(pattern.finditer(text), MOST_CANDIDATES)
        }
        yield from sorted(starts)

    @cached_property
    def _line_start(self) -> re.Pattern[str]:
        first = self.format.begin.strip()
        if not first:
            piece = self.format.call[0]
            first = piece.text.strip() if isinstance(piece, Text) else ""
        return re.compile(rf"^(?P<before>[ \t]*)(?={re.escape(first[:1])})", re.MULTILINE)

    def _named(self, names: tuple[str, ...]) -> re.Pattern[str]:
        if names not in self._by_names:
            if len(self._by_names) == MOST_TOOL_SETS:
                self._by_names.clear()
            pieces = self.format.call[: self.format.call.index(Slot.NAME)]
            alternatives = "|".join(map(re.escape, names))
            literal = lenient(self.format.begin) + self._pattern(pieces)
            self._by_names[names] = re.compile(f"(?P<before>){literal.removeprefix(FREE)}(?:{alternatives})(?!{WORD})")
        return self._by_names[names]

    # --- calls

    def _calls(self, text: str, start: int, schemas: Schemas | None) -> Iterator[tuple[ReadCall, int]]:
        """Each call from `start` on, with where the text goes on behind it."""
        begun = self._begin.match(text, start)
        if begun is None:
            expected = self.format.begin.strip()[:60]
            raise _Malformed(f"it has to begin with {expected!r}", start)
        at, count = begun.end(), 0
        while True:
            call, at = self._one(text, at, schemas, count)
            count += 1
            between = self._between.match(text, at) if self._between is not None else None
            if between is not None and self._one_begins(text, between.end()):
                yield call, between.end()
                at = between.end()
                continue
            closed = self._close.match(text, at) or self._unclosed(text, at)
            if closed is None:
                missing = self.format.close.strip()
                raise _Malformed(f"{missing!r} is missing behind it", at, call.name)
            yield call, closed.end()
            return

    def _unclosed(self, text: str, at: int) -> re.Match[str] | None:
        """The end of the last call of a section that was left open, where the turn ends or a new section begins."""
        # Without a mark of its own, what is cut short is no call that is whole.
        post = self._post.match(text, at) if self.format.trigger and self.format.post.strip() else None
        if post is None:
            return None
        behind = _behind_space(text, post.end())
        return post if behind == len(text) or text.startswith(self.format.trigger, behind) else None

    def _one_begins(self, text: str, at: int) -> bool:
        return self._head.match(text, at) is not None

    def _one(self, text: str, at: int, schemas: Schemas | None, number: int) -> tuple[ReadCall, int]:
        if self.format.container is not None:
            return self._object(text, at)
        head = self._head.match(text, at)
        if head is None:
            raise _Malformed("the name of a tool is missing", at)
        name = head.groupdict().get("name") or ""
        call_id = head.groupdict().get("id")
        schema = (schemas or {}).get(name, {})
        try:
            arguments, at = self._arguments(text, head.end(), schema)
        except Unreadable as error:
            raise _Malformed(str(error), head.end(), name) from None
        tail = self._tail.match(text, at)
        if tail is None:
            raise _Malformed(f"{self._tail_text!r} is missing behind its arguments", at, name)
        found = {**tail.groupdict(), **{key: value for key, value in head.groupdict().items() if value}}
        return ReadCall(found.get("name") or name, arguments, found.get("id") or call_id), tail.end()

    def _object(self, text: str, at: int) -> tuple[ReadCall, int]:
        """A call that is one JSON object, its members in any order, others beside them."""
        container = self.format.container
        assert container is not None
        try:
            value, end = read_literal(text, at)
        except Unreadable as error:
            following = text.find(self.format.trigger, at, at + NEAR) if self.format.trigger else -1
            known = _NAME_MEMBER.search(text, at, following if following >= 0 else at + NEAR)
            raise _Malformed(str(error), at, known[1] if known else "") from None
        if not isinstance(value, dict):
            raise _Malformed("it must be a JSON object", at)
        if not container.arguments:
            if len(value) != 1:
                raise _Malformed("it must be an object with one key, the name of the tool", end)
            ((name, arguments),) = value.items()
        else:
            name, arguments = _at(value, container.name), _at(value, container.arguments)
            if arguments is None and container.arguments[-1] not in value:
                arguments = next((value[key] for key in _ARGUMENTS_KEYS if key in value), None)
        if not isinstance(name, str):
            keys = f'"{".".join(container.name)}" and "{".".join(container.arguments)}"'
            raise _Malformed(f"it must be a JSON object with {keys}", end)
        call_id = _at(value, container.id) if container.id else None
        try:
            arguments = as_object(arguments)
        except Unreadable as error:
            raise _Malformed(str(error), end, name) from None
        return ReadCall(name, arguments, call_id if isinstance(call_id, str) else None), end

    # --- patterns

    @cached_property
    def _by_names(self) -> dict[tuple[str, ...], re.Pattern[str]]:
        return {}

    @cached_property
    def _begin(self) -> re.Pattern[str]:
        return re.compile(lenient(self.format.begin))

    @cached_property
    def _between(self) -> re.Pattern[str] | None:
        return None if self.format.between is None else re.compile(lenient(self.format.between))

    @cached_property
    def _close(self) -> re.Pattern[str]:
        return re.compile(lenient(self.format.close))

    @cached_property
    def _post(self) -> re.Pattern[str]:
        return re.compile(lenient(self.format.post))

    @cached_property
    def _head(self) -> re.Pattern[str]:
        """What stands in front of a call's arguments."""
        if self.format.container is not None:
            return re.compile(r"\s*\{")
        pieces = self.format.call[: self.format.call.index(Slot.ARGUMENTS)]
        form = self.format.arguments
        following: list[str] = []
        if isinstance(form, TaggedArguments):
            without = (
                [] if form.none is None else [form.none + self.format.close, form.none + (self.format.between or "")]
            )
            following = [lenient(each) for each in (form.head, *without) if each]
        elif not isinstance(pieces[-1], Text) or not pieces[-1].text.strip():
            following = [r"\s*[{\"\']"]
        return re.compile(self._pattern(pieces) + (f"(?={'|'.join(following)})" if following else ""))

    @cached_property
    def _tail(self) -> re.Pattern[str]:
        return re.compile(self._pattern(self._behind_arguments))

    @property
    def _behind_arguments(self) -> Sequence[Piece]:
        return self.format.call[self.format.call.index(Slot.ARGUMENTS) + 1 :]

    @cached_property
    def _tail_text(self) -> str:
        return "".join(piece.text for piece in self._behind_arguments if isinstance(piece, Text)).strip()

    def _pattern(self, pieces: Sequence[Piece]) -> str:
        parts: list[str] = []
        for piece in pieces:
            if piece is Slot.ID and self.format.id_pieces:
                parts.append(f"\\s*(?P<id>{self._pattern(self.format.id_pieces).removeprefix(FREE)})")
            else:
                parts.append(lenient(piece.text) if isinstance(piece, Text) else _SLOTS[piece])
        return "".join(parts)

    @cached_property
    def _arguments(self) -> Callable[[str, int, Mapping[str, Any]], tuple[Mapping[str, Any], int]]:
        form = self.format.arguments
        if not isinstance(form, TaggedArguments):
            return lambda text, at, schema: read_object(text, at)
        ends = [lenient(self.format.close)] if self.format.close else [r"\s*\Z"]
        if self.format.between is not None:
            ends.append(f"{lenient(self.format.between)}{WORD}+{lenient(form.head)}")
        return TaggedReader(form, ends).read


MOST_TOOL_SETS: Final = 256
"""Sets of tools whose patterns are kept; a run has a few."""

MOST_CANDIDATES: Final = 50
"""Places of each kind at which a call that nothing announces is looked for; a turn has it near its start."""

_SLOTS: Final = {
    Slot.NAME: f"(?P<name>{WORD}+?)",
    Slot.ID: f"(?P<id>{WORD}+?)",
    Slot.INDEX: r"\d+",
}
NEAR: Final = 400
"""How far behind the beginning of a call that cannot be read its name is looked for."""

_NAME_MEMBER: Final = re.compile(r"""["']name["']\s*:\s*["']([^"'\s]+)["']""")
_SPACE: Final = re.compile(r"\s*")
_ARGUMENTS_KEYS: Final = ("arguments", "parameters")


def _behind_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches the empty text


def _at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        if not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
    return value
