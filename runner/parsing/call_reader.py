"""Reader of the calls of a turn in its template's format, and of common deviations of models from this format."""

from __future__ import annotations

import itertools
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from runner.parsing.argument_reader import Undecided, as_object
from runner.parsing.call_patterns import CallPatterns
from runner.parsing.literals import Unreadable, after_space, read_literal
from runner.parsing.turn_format import CallFormat, LiteralText, TaggedArguments

__all__ = ["CallReader", "CallsReading", "DecidedCalls", "ReadCall", "Schemas"]

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the parameters of all known tools, by the name of the tool."""


@dataclass(frozen=True, slots=True)
class ReadCall:
    """One call in a turn's text."""

    name: str
    """Name of the tool; "" if it could not be read."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None
    """Id that the model wrote; None if it wrote none."""
    error: str | None = None
    """Reason why the call could not be read; None if it was read."""


@dataclass(frozen=True, slots=True)
class CallsReading:
    """The content and the calls of a turn."""

    content: str
    calls: list[ReadCall]


@dataclass(frozen=True, slots=True)
class DecidedCalls:
    """The calls at the start of an incomplete text, up to the first call that later text may change."""

    calls: list[ReadCall]
    end: int
    """Position after the last of `calls` and the separator or the close that follows it; 0 without calls."""
    closed: bool
    """True if `calls` end with their close, so that a later call begins with its own trigger."""


class _Malformed(Exception):
    """A call began but cannot be read."""

    def __init__(self, why: str, at: int, name: str = "") -> None:
        super().__init__(why)
        self.at = at
        self.name = name


@dataclass(frozen=True)  # no slots: cached properties need a dict
class CallReader:
    """Reader of calls of one `CallFormat`, without state except for cached patterns."""

    format: CallFormat

    @cached_property
    def patterns(self) -> CallPatterns:
        return CallPatterns(self.format)

    def read(self, text: str, schemas: Schemas | None = None) -> CallsReading:
        """Return the calls in `text` and the content beside them.

        Args:
            text: output of the model, without its reasoning.
            schemas: tools that may be called; None if they are unknown.
        """
        parts = list(self.parts(text, schemas))
        calls = [part for part in parts if isinstance(part, ReadCall)]
        if not calls:
            return CallsReading(text, [])
        content = [part.strip() for part in parts if isinstance(part, str)]
        return CallsReading("\n".join(filter(None, content)), calls)

    def parts(self, text: str, schemas: Schemas | None = None, *, begun: bool = False) -> Iterable[str | ReadCall]:
        """Return calls and content in the order of the text: each call, and the text before, between and after calls.

        Args:
            text: output of the model, without its reasoning.
            schemas: tools that may be called; None if they are unknown.
            begun: True if the text begins after a call and its separator.
        """
        return self._triggered(text, schemas, begun) if self.format.trigger else self._bare(text, schemas)

    def decided(self, text: str, schemas: Schemas | None = None, *, begun: bool = False) -> DecidedCalls:
        """Return the calls at the start of an incomplete text, up to the first call that later text may change.

        Args:
            text: output of the model so far, from the trigger on; if `begun` is true, from the end of the separator on.
            schemas: tools that may be called; None if they are unknown.
            begun: True if the text begins after a call and its separator.
        """
        calls: list[ReadCall] = []
        end = 0
        try:
            start = 0 if begun else self._last_of_several(text, 0)
            for call, after in self._calls(text, start, schemas, whole=False, begun=begun):
                calls.append(call)
                end = after
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
        """Return the position of the last of consecutive triggers, since models may repeat one."""
        again = start
        while text.startswith(self.format.trigger, again):
            start, again = again, after_space(text, again + len(self.format.trigger))
        return start

    def _section(
        self,
        text: str,
        start: int,
        schemas: Schemas | None,
        *,
        begun: bool = False,
    ) -> Generator[ReadCall, None, int]:
        """Yield the calls from `start` on; return the position after the last call."""
        at = start
        try:
            for call, after in self._calls(text, start, schemas, begun=begun):
                yield call
                at = after
        except _Malformed as error:
            yield ReadCall(error.name, error=str(error))
            return self._after_fault(text, error.at if begun else max(error.at, start + len(self.format.trigger)))
        return at

    def _after_fault(self, text: str, at: int) -> int:
        """Return the position after an unreadable call: after its close, at the next trigger, or at the end."""
        trigger = text.find(self.format.trigger, at)
        # The search ends at the next trigger, since a search of the whole text after each of many triggers would take
        # quadratic time.
        limit = trigger if trigger >= 0 else len(text)
        post = self.patterns.post.search(text, at, limit) if self.format.post.strip() else None
        if post is not None:
            closed = self.patterns.close.match(text, post.start())
            return (closed or post).end()
        return limit

    def _bare(self, text: str, schemas: Schemas | None) -> list[str | ReadCall]:
        """Return the parts of a text whose calls have no trigger: content, and then calls up to the end of the turn."""
        unreadable: list[str | ReadCall] = []
        for start in self._candidates(text, tuple(schemas or ())):
            calls = self._bare_calls(text, start, schemas)
            if calls and calls[-1].error is None:
                return [text[:start], *calls]
            if calls:
                unreadable = unreadable or [text[:start], *calls]
        return unreadable or [text]

    def _bare_calls(self, text: str, start: int, schemas: Schemas | None) -> list[ReadCall]:
        """Return the calls that fill the text from `start` to its end; an empty list if there is any other text.

        If `_by_name` is true, the list is also empty if a call names an unknown tool. An unreadable call is returned
        last, if it or a call before it names a known tool.
        """
        calls: list[ReadCall] = []
        end = start
        try:
            for call, after in self._calls(text, start, schemas):
                calls.append(call)
                end = after
        except _Malformed as error:
            names = {error.name, *(call.name for call in calls)}
            known = schemas is not None and not names.isdisjoint(schemas)
            return [*calls, ReadCall(error.name, error=str(error))] if known else []
        named = schemas is None or not self._by_name or all(call.name in schemas for call in calls)
        return calls if named and not text[end:].strip() else []

    def _candidates(self, text: str, names: tuple[str, ...]) -> list[int]:
        """Return the positions where calls may begin: at the start of a line, or anywhere before the name of a tool."""
        patterns = [self.patterns.line_start, *([self.patterns.named(names)] if names else [])]
        starts = {
            match.end("before")
            for pattern in patterns
            for match in itertools.islice(pattern.finditer(text), MAX_CANDIDATES)
        }
        return sorted(starts)

    @property
    def _by_name(self) -> bool:
        """True if only a tool's name distinguishes a call from other text, since an object may also be an answer."""
        return not isinstance(self.format.arguments, TaggedArguments)

    def may_begin(self, text: str, before: str, schemas: Schemas | None, *, whole: bool) -> tuple[int, bool]:
        """Return the first position where calls without a trigger may begin, and True if no later text can change it.

        Without such a position, the result is the length of `text`, and False.

        Args:
            text: new text; calls do not begin before it.
            before: character before `text`; "" at the start of the content.
            schemas: tools that may be called.
            whole: True if the text is complete.
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
        """Yield each call from `start` on, with the position after the separator or the close that follows it.

        With `begun`, the text begins after a call and its separator. If the text is not `whole`, only results that no
        later text can change are yielded.
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
        """Return the position of the call after the call that ends at `at`, or None."""
        patterns = self.patterns
        if patterns.between is None or (patterns.close_is_longer and patterns.close.match(text, at)):
            return None
        between = patterns.between.match(text, at)
        return between.end() if between is not None and patterns.head.match(text, between.end()) else None

    def _closed(self, text: str, at: int, call: ReadCall, whole: bool) -> int:
        """Return the position after the close of `call`, the last call; `at` is the position before the close."""
        if not whole and self.patterns.close_may_continue:
            raise Undecided
        closed = self.patterns.close.match(text, at)
        end = closed.end() if closed is not None else self._unclosed(text, at) if whole else None
        if end is None:
            raise _Malformed(f"{self.format.close.strip()!r} is missing after it", at, call.name)
        return end

    def _unclosed(self, text: str, at: int) -> int | None:
        """Return the position after the incomplete close of a last call; None if the call is unreadable.

        A call with an incomplete close is read only at the end of the text or directly before the next trigger.
        """
        # If no trigger precedes a truncated text, the text may be the beginning of something other than calls.
        if not self.format.trigger:
            return None
        patterns, start = self.patterns, after_space(text, at)
        post = patterns.post.match(text, start) if self.format.post.strip() else None
        end = post or (patterns.own_end.match(text, start) if patterns.own_end is not None else None)
        if end is None:
            return None
        after = after_space(text, end.end())
        if after == len(text) or text.startswith(self.format.trigger, after):
            return end.end()
        ended = self.format.post.strip() if post is not None else patterns.own_mark or ""
        missing = self.format.close.strip()[len(ended) :].lstrip()
        return len(text) if missing.startswith(text[after:].rstrip()) else None

    def _one(self, text: str, at: int, schemas: Schemas | None, whole: bool) -> tuple[ReadCall, int]:
        if self.format.container is not None:
            return self._object(text, at)
        head = self.patterns.head.match(text, at)
        if head is None:
            why, at, name = self.patterns.missing(self.patterns.before_arguments, text, at)
            # In a format without a trigger, a tool's name alone does not begin a call.
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
            raise _Malformed(f"{self.patterns.tail_text!r} is missing after its arguments", at, name)
        after = tail.groupdict()
        return ReadCall(name or after.get("name") or "", arguments, before.get("id") or after.get("id")), tail.end()

    def _object(self, text: str, at: int) -> tuple[ReadCall, int]:
        """Return a call that is one JSON object, and the position after it.

        Its members may be in any order. If the object has keys for name and arguments, further members are ignored.
        """
        container = self.format.container
        assert container is not None
        try:
            value, end = read_literal(text, at)
        except Unreadable as error:
            following = text.find(self.format.trigger, at, at + MAX_NAME_DISTANCE) if self.format.trigger else -1
            known = _NAME_MEMBER.search(text, at, following if following >= 0 else at + MAX_NAME_DISTANCE)
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


MAX_CANDIDATES: Final = 50
"""Maximum number of positions of each kind that are tried as the start of a call without a trigger. Calls are near the
start of turns.
"""

MAX_NAME_DISTANCE: Final = 400
"""Maximum distance of the name from the beginning of an unreadable call, in characters."""

_NAME_MEMBER: Final = re.compile(r"""["']name["']\s*:\s*["']([^"'\s]+)["']""")
_ARGUMENTS_KEYS: Final = ("arguments", "parameters")


def _at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        if not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
    return value
