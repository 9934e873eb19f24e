"""Reads the calls of a turn in the format that its template writes, and what models make of it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from runner.parsing.argument_reader import Undecided, as_object
from runner.parsing.call_patterns import CallPatterns
from runner.parsing.literals import Unreadable, behind_space, read_literal
from runner.parsing.turn_format import CallFormat, LiteralText, TaggedArguments

__all__ = ["CallReader", "CallsReading", "DecidedCalls", "ReadCall", "Schemas"]

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
class CallsReading:
    """A turn's text taken apart."""

    content: str
    calls: list[ReadCall]


@dataclass(frozen=True, slots=True)
class DecidedCalls:
    """The calls at the start of a text that are the same however it goes on."""

    calls: list[ReadCall]
    end: int
    """Where the text goes on behind them, and behind what stands between them and another; 0 where there is none."""
    closed: bool
    """No other call can follow without its own trigger."""


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

    @cached_property
    def patterns(self) -> CallPatterns:
        """What it looks for."""
        return CallPatterns(self.format)

    def read(self, text: str, schemas: Schemas | None = None) -> CallsReading:
        """The calls in `text` and the content beside them; without a trigger nothing is a call.

        Args:
            text: what the model said, without its thought.
            schemas: the tools that may be called; None where they are not known.
        """
        parts = list(self.parts(text, schemas))
        calls = [part for part in parts if isinstance(part, ReadCall)]
        if not calls:
            return CallsReading(text, [])
        content = [part.strip() for part in parts if isinstance(part, str)]
        return CallsReading("\n".join(filter(None, content)), calls)

    def parts(self, text: str, schemas: Schemas | None = None, *, begun: bool = False) -> Iterable[str | ReadCall]:
        """The same in the order of the text: each call, and what stands in front of, between and behind them.

        Args:
            text: what the model said, without its thought.
            schemas: the tools that may be called; None where they are not known.
            begun: the text goes on behind a call and what stands between it and the next.
        """
        return self._triggered(text, schemas, begun) if self.format.trigger else self._bare(text, schemas)

    def decided(self, text: str, schemas: Schemas | None = None, *, begun: bool = False) -> DecidedCalls:
        """What is sure of the calls at the start of a text that may go on: they are the same however it does.

        Args:
            text: what the model said so far, from the trigger on.
            schemas: the tools that may be called; None where they are not known.
            begun: the text goes on behind a call and what stands between it and the next.
        """
        calls: list[ReadCall] = []
        end = 0
        try:
            start = 0 if begun else self._last_of_several(text, 0)
            for call, behind in self._calls(text, start, schemas, whole=False, begun=begun):
                calls.append(call)
                end = behind
        except (Undecided, _Malformed):
            return DecidedCalls(calls, end, closed=False)
        return DecidedCalls(calls, end, closed=True)

    # --- where calls begin

    def _triggered(self, text: str, schemas: Schemas | None, begun: bool) -> Iterator[str | ReadCall]:
        at = 0
        if begun:
            at = yield from self._section(text, 0, schemas, begun=True)
        while (start := text.find(self.format.trigger, at)) >= 0:
            yield text[at:start]
            at = yield from self._section(text, self._last_of_several(text, start), schemas)
        yield text[at:]

    def _last_of_several(self, text: str, start: int) -> int:
        """The last of triggers that follow each other: models say one twice."""
        again = start
        while text.startswith(self.format.trigger, again):
            start, again = again, behind_space(text, again + len(self.format.trigger))
        return start

    def _section(
        self,
        text: str,
        start: int,
        schemas: Schemas | None,
        *,
        begun: bool = False,
    ) -> Generator[ReadCall, None, int]:
        """The calls that begin at `start`; returns where the text goes on behind them."""
        at = start
        try:
            for call, behind in self._calls(text, start, schemas, begun=begun):
                yield call
                at = behind
        except _Malformed as error:
            yield ReadCall(error.name, error=str(error))
            return self._behind_fault(text, error.at if begun else max(error.at, start + len(self.format.trigger)))
        return at

    def _behind_fault(self, text: str, at: int) -> int:
        """Behind the close of a call that could not be read, at the next trigger, or at the end."""
        trigger = text.find(self.format.trigger, at)
        # No further than the next trigger, or many of them would be many looks through the rest.
        limit = trigger if trigger >= 0 else len(text)
        post = self.patterns.post.search(text, at, limit) if self.format.post.strip() else None
        if post is not None:
            closed = self.patterns.close.match(text, post.start())
            return (closed or post).end()
        return limit

    def _bare(self, text: str, schemas: Schemas | None) -> list[str | ReadCall]:
        """Calls that nothing announces: all the rest of the turn from some position on."""
        unreadable: list[str | ReadCall] = []
        for start in self._candidates(text, tuple(schemas or ())):
            calls = self._bare_calls(text, start, schemas)
            if calls and calls[-1].error is None:
                return [text[:start], *calls]
            if calls:
                unreadable = unreadable or [text[:start], *calls]
        return unreadable or [text]

    def _bare_calls(self, text: str, start: int, schemas: Schemas | None) -> list[ReadCall]:
        """The calls that all the text from `start` on is; none where it is something else."""
        calls: list[ReadCall] = []
        end = start
        try:
            for call, behind in self._calls(text, start, schemas):
                calls.append(call)
                end = behind
        except _Malformed as error:
            names = {error.name, *(call.name for call in calls)}
            known = schemas is not None and not names.isdisjoint(schemas)
            return [*calls, ReadCall(error.name, error=str(error))] if known else []
        named = schemas is None or not self._by_name or all(call.name in schemas for call in calls)
        return calls if named and not text[end:].strip() else []

    def _candidates(self, text: str, names: tuple[str, ...]) -> list[int]:
        """Where calls may begin: at the start of a line, or anywhere with the name of a tool."""
        patterns = [self.patterns.line_start, *([self.patterns.named(names)] if names else [])]
        starts = {
            match.end("before")
            for pattern in patterns
            for match in itertools.islice(pattern.finditer(text), MOST_CANDIDATES)
        }
        return sorted(starts)

    @property
    def _by_name(self) -> bool:
        """Whether only the tools' names tell a call from other text: an object may be an answer."""
        return not isinstance(self.format.arguments, TaggedArguments)

    def may_begin(self, text: str, before: str, schemas: Schemas | None, *, whole: bool) -> tuple[int, bool]:
        """Where in a text calls may begin that nothing announces, and whether that position is one where they are read.

        Args:
            text: what came; in front of it they do not begin.
            before: the sign in front of it, "" where it begins the content.
            schemas: the tools that may be called.
            whole: the text will not go on.
        """
        patterns, names = self.patterns, tuple(schemas or ())
        line = patterns.line_start.search(before + text, len(before))
        positions = [line.start() - len(before)] if line is not None else []
        named = patterns.named(names).search(text) if names else None
        if named is not None and (whole or named.end() < len(text)):
            positions.append(named.start())
        at = len(text) if whole else patterns.may_begin(text, names, line_begun=before in ("", "\n"))
        return (at, False) if all(at < position for position in positions) else (min(positions), True)

    # --- calls

    def _calls(
        self,
        text: str,
        start: int,
        schemas: Schemas | None,
        *,
        whole: bool = True,
        begun: bool = False,
    ) -> Iterator[tuple[ReadCall, int]]:
        """Each call from `start` on, with where the text goes on behind it.

        With `begun`, a call stands in front of it and what stands between them. What is read of a text that is not
        `whole` is read in the same way however it goes on.
        """
        at = start if begun else self._begun(text, start)
        while True:
            call, at = self._one(text, at, schemas, whole)
            following = self._following(text, at)
            if following is None:
                yield call, self._closed(text, at, call, whole)
                return
            yield call, following
            at = following

    def _begun(self, text: str, start: int) -> int:
        begun = self.patterns.begin.match(text, start)
        if begun is None:
            raise _Malformed(*self.patterns.missing([LiteralText(self.format.begin)], text, start))
        return begun.end()

    def _following(self, text: str, at: int) -> int | None:
        """Where another call begins behind the one that ends at `at`."""
        patterns = self.patterns
        if patterns.between is None or (patterns.close_is_longer and patterns.close.match(text, at)):
            return None
        between = patterns.between.match(text, at)
        return between.end() if between is not None and patterns.head.match(text, between.end()) else None

    def _closed(self, text: str, at: int, call: ReadCall, whole: bool) -> int:
        """Where the text goes on behind the last call, which ends at `at`."""
        if not whole and self.patterns.close_may_go_on:
            raise Undecided
        closed = self.patterns.close.match(text, at)
        end = closed.end() if closed is not None else self._unclosed(text, at) if whole else None
        if end is None:
            raise _Malformed(f"{self.format.close.strip()!r} is missing behind it", at, call.name)
        return end

    def _unclosed(self, text: str, at: int) -> int | None:
        """Where the last call ends that was not closed: at the end, in the midst of its close, or at a new section."""
        # Without a mark in front of it, what is cut short may be the begin of something else.
        if not self.format.trigger:
            return None
        patterns, start = self.patterns, behind_space(text, at)
        post = patterns.post.match(text, start) if self.format.post.strip() else None
        end = post or (patterns.own_end.match(text, start) if patterns.own_end is not None else None)
        if end is None:
            return None
        behind = behind_space(text, end.end())
        if behind == len(text) or text.startswith(self.format.trigger, behind):
            return end.end()
        ended = self.format.post.strip() if post is not None else patterns.own_mark or ""
        missing = self.format.close.strip()[len(ended) :].lstrip()
        return len(text) if missing.startswith(text[behind:].rstrip()) else None

    def _one(self, text: str, at: int, schemas: Schemas | None, whole: bool) -> tuple[ReadCall, int]:
        if self.format.container is not None:
            return self._object(text, at)
        head = self.patterns.head.match(text, at)
        if head is None:
            why, at, name = self.patterns.missing(self.patterns.before_arguments, text, at)
            # Where nothing announces calls, a tool's name alone begins none.
            raise _Malformed(why, at, name if self.format.trigger else "")
        before = head.groupdict()
        name = before.get("name") or ""
        schema = (schemas or {}).get(name, {})
        try:
            arguments, at = self.patterns.arguments(text, head.end(), schema, whole)
        except Unreadable as error:
            raise _Malformed(str(error), head.end(), name) from None
        tail = self.patterns.tail.match(text, at)
        if tail is None:
            raise _Malformed(f"{self.patterns.tail_text!r} is missing behind its arguments", at, name)
        behind = tail.groupdict()
        return ReadCall(name or behind.get("name") or "", arguments, before.get("id") or behind.get("id")), tail.end()

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


MOST_CANDIDATES: Final = 50
"""Places of each kind at which a call that nothing announces is looked for; a turn has it near its start."""

NEAR: Final = 400
"""How far behind the beginning of a call that cannot be read its name is looked for."""

_NAME_MEMBER: Final = re.compile(r"""["']name["']\s*:\s*["']([^"'\s]+)["']""")
_ARGUMENTS_KEYS: Final = ("arguments", "parameters")


def _at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        if not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
    return value
