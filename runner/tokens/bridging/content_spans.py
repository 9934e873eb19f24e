"""The positions of message contents in a render, found by rendering with other contents."""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias, cast

from runner.messages import Message
from runner.tokens.bridging.refusal import Property, Unbridgeable
from runner.tokens.probe_messages import AGAIN_ASKED, ANSWER, QUESTION
from runner.tokens.token_diff import first_mismatch

__all__ = ["FIELDS", "Field", "Rendering", "Span", "absent", "find", "words"]

Span: TypeAlias = tuple[int, int]
"""Start and end (exclusive) of a range of text."""

Field: TypeAlias = tuple[int, str]
"""A message's index and the name of one of its `FIELDS`."""

FIELDS = ("content", "name", "tool_call_id")
"""Fields with text of users, tools and models, not of the template."""

ControlNames: TypeAlias = Callable[[str], Iterable[str]]
"""Function that returns the names of the control tokens in a text."""

_SWITCHES = ("/no_think", "/think", "detailed thinking on", "detailed thinking off")
"""Words in contents that turn reasoning on or off. Some templates remove them."""


def absent(messages: Iterable[Message]) -> str:
    """Return a word of a fixed length that occurs in no content and no reasoning of `messages`.

    The word depends only on the messages, so that all processes use the same word. Its length is fixed, since some
    templates count letters.
    """
    said = "\n".join([message["content"] + "\n" + message.get("reasoning_content", "") for message in messages])
    stems = (f"zq7f3a9c1e5bn{number:06}z" for number in itertools.count())
    return next(stem for stem in stems if stem not in said)


def words(count: int) -> list[str]:
    """Return `count` words that no template contains. No word is part of another word, or of a result of `absent`."""
    return [f"zqword{number:03}z" for number in range(count)]


def find(text: str, content: str, start: int = 0) -> Span | None:
    """Return the position of a content in `text` from `start` on; None if no form of the content occurs.

    If several forms occur, the first one in the order of `_forms` counts.
    """
    for form in _forms(content):
        begin = text.find(form, start)
        if begin >= 0:
            return begin, begin + len(form)
    return None


@dataclass(frozen=True, slots=True)
class Rendering:
    """A render, and a function for similar renders, to distinguish contents from the template's text."""

    text: str
    """The render, or the searched part of it."""
    messages: Sequence[Message]
    """The messages to find in the render."""
    render: Callable[[Sequence[Message]], str]
    """Function that renders the same part for other messages."""

    def check_shown(self, index: int) -> Span:
        """Return the approximate position of a content that `find` does not find, since it has a switch like "/think".

        Raises:
            Unbridgeable: the content has no switch, the message is hidden, or the template raises.
        """
        role, content = self.messages[index]["role"], self.messages[index]["content"]
        found = self._shown(index) if _without_switches(content) is not None else None
        if found is None:
            raise Unbridgeable(
                Property.CONTENT_SHOWN, f"the template hides message {index} (role {role}): {content!r:.80}"
            )
        return found

    def check_visible(self, index: int, source: str) -> None:
        """Check that the render shows a message whose content may also occur in the template's own text.

        Such a content is white space, or a part of a role or of `source`, the template's source. Other contents are not
        checked. If a template left out an empty message now and showed it later, a bridge would lack this message.

        Raises:
            Unbridgeable: the message is hidden, either always or until more messages follow.
        """
        message = self.messages[index]
        said = message["content"].strip()
        if said not in source and said not in _ROLES:
            return
        more = [*self.messages, ANSWER, QUESTION, ANSWER, AGAIN_ASKED]
        hidden = later = False
        # A template that inspects all messages may raise on a marker, or if one message is missing.
        with suppress(Unbridgeable):
            hidden = self._shown(index) is None
            if not hidden and not message["content"].strip() and self._left_out(self.messages, index, self.text):
                later = not self._left_out(more, index, self.render(more))
        if hidden or later:
            which = f"message {index} (role {message['role']})"
            until = "" if hidden else " until more messages follow"
            raise Unbridgeable(Property.CONTENT_SHOWN, f"the template hides {which}{until}: {message['content']!r:.80}")

    def _left_out(self, messages: Sequence[Message], index: int, text: str) -> bool:
        """Return True if `text`, the render of `messages`, does not change without the message at `index`."""
        return self.render([*messages[:index], *messages[index + 1 :]]) == text

    def _shown(self, index: int) -> Span | None:
        """Return the approximate position of a content that is not shown verbatim; None if the message is hidden."""
        other = self.render(_with(self.messages, {(index, "content"): _SHOWN}))
        before, found, after = other.partition(_SHOWN)
        if not found:
            return None
        begin = min(first_mismatch(self.text, other), len(before))
        ending = min(first_mismatch(self.text[::-1], other[::-1]), len(after))
        return begin, max(begin, len(self.text) - ending)

    def end_of_last(self) -> int:
        """Return the end of the last message's content, at the last occurrence of one of its forms.

        Raises:
            Unbridgeable: the last content is not shown.
        """
        ends = (self.text.rfind(form) + len(form) for form in _forms(self.messages[-1]["content"]) if form in self.text)
        end = next(ends, None)
        return self.check_shown(len(self.messages) - 1)[1] if end is None else end

    def locate(self, wanted: Sequence[Field], stem: str, names: ControlNames) -> list[Span] | None:
        """Return the positions of fields with control text; None if the positions cannot be found.

        First, markers replace the fields, so that the render shows the text around the fields. Templates that inspect,
        compare or edit contents may write other text then. For such a template, only the control text is replaced.

        Args:
            wanted: non-empty fields; a field that the template does not print has no span.
            stem: the beginning of the markers, as `absent` returns it.
            names: function that returns the names of the control tokens in a text.
        """
        with suppress(Unbridgeable):
            spans = self._located_by_markers(wanted, stem)
            if spans is not None:
                return spans
        with suppress(Unbridgeable):
            return self._located_by_disguise(wanted, names)
        return None

    def _located_by_markers(self, wanted: Sequence[Field], stem: str) -> list[Span] | None:
        """Return the positions of the fields if the real contents fit between the texts around markers.

        If markers change the texts around them, the fields are inserted one by one, and are found by the unchanged text
        on both sides.
        """
        markers = {field: f"{stem}content{number}z" for number, field in enumerate(wanted)}
        copy = _with(self.messages, markers)
        values = {marker: _value(self.messages, field) for field, marker in markers.items()}
        spans = _fitted(self.text, re.split(rf"({stem}content\d+z)", self.render(copy)), values)
        return spans if spans is not None else self._located_one_by_one(copy, markers)

    def _located_one_by_one(self, marked: Sequence[Message], markers: Mapping[Field, str]) -> list[Span] | None:
        current, before = list(marked), self.render(marked)
        spans: list[Span] = []
        for field, marker in markers.items():
            current = _with(current, {field: _value(self.messages, field)})
            after = self.render(current)
            at = before.find(marker)
            if at < 0 or marker in after or before.count(marker) > 1:
                return None
            begin = min(first_mismatch(before, after), at)
            ending = min(first_mismatch(before[::-1], after[::-1]), len(before) - at - len(marker))
            spans.append((begin, len(after) - ending))
            before = after
        apart = all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
        return spans if before == self.text and apart and all(begin <= end for begin, end in spans) else None

    def _located_by_disguise(self, wanted: Sequence[Field], names: ControlNames) -> list[Span] | None:
        """Return the positions of the fields' control text, found in a render with other words of the same length."""
        found = {name for field in wanted for name in names(_value(self.messages, field))}
        # The longest names come first, so that a name inside another name is not replaced there.
        disguises: dict[str, str] = {}
        for name in sorted(found, key=len, reverse=True):
            disguise = _disguise(len(name), self.text)
            if disguise is None:
                return None
            disguises[name] = disguise
        values = {field: _value(self.messages, field) for field in wanted}
        for name, disguise in disguises.items():
            values = {field: value.replace(name, disguise) for field, value in values.items()}
        copy = _with(self.messages, values)
        if not disguises or any(list(names(_value(copy, field))) for field in wanted):
            return None
        other = self.render(copy)
        spans = sorted(
            (match.start(), match.end()) for disguise in disguises.values() for match in re.finditer(disguise, other)
        )
        for name, disguise in disguises.items():
            other = other.replace(disguise, name)
        # Each span is a piece of the control text only if nothing else differs.
        return spans if other == self.text else None


_SHOWN = "zqshownz"

_ROLES = "system user assistant tool developer"
"""Words that templates write although their source does not contain them."""


def _without_switches(content: str) -> str | None:
    """Return a content without its switches; None if it has none."""
    left = content
    for switch in _SWITCHES:
        left = left.replace(switch, "")
    return None if left == content else left


def _forms(content: str) -> Iterator[str]:
    """Yield the forms in which templates write a content: verbatim, trimmed, inside JSON, or as a Python string.

    If the content has switches, the same forms of the content without its switches follow.
    """
    yield from _written(content)
    left = _without_switches(content)
    if left is not None and left.strip():
        yield from _written(left)


def _written(content: str) -> Iterator[str]:
    yield content  # this form comes first, since most templates write contents verbatim
    for text in dict.fromkeys((content, content.strip(), content.lstrip(), content.rstrip())):
        yield text
        yield json.dumps(text, ensure_ascii=False)[1:-1]
        yield json.dumps(text)[1:-1]
        yield repr(text)[1:-1]


def _fitted(text: str, pieces: Sequence[str], contents: Mapping[str, str]) -> list[Span] | None:
    """Return the spans of the contents if `text` equals the pieces with contents in place of markers; otherwise None.

    The pieces at odd indices are markers. Any of the `_forms` of a marker's content may take the place of the marker.
    """
    # A position that did not fit is not tried again. Otherwise repeated contents could need exponential time.
    dead: set[tuple[int, int]] = set()

    def ends(number: int, begin: int) -> Iterator[int]:
        piece = pieces[number]
        forms = (piece,) if number % 2 == 0 else dict.fromkeys(_forms(contents[piece]))
        return (begin + len(form) for form in forms if text.startswith(form, begin))

    # The search is not recursive, since a long history has more pieces than the stack has frames.
    begins, ways = [0], [ends(0, 0)]
    while ways:
        end = next(ways[-1], None)
        if end is None:
            ways.pop()
            dead.add((len(ways), begins.pop()))
        elif len(ways) == len(pieces) and end == len(text):
            return list(itertools.pairwise([*begins, end]))[1::2]
        elif len(ways) < len(pieces) and (len(ways), end) not in dead:
            ways.append(ends(len(ways), end))
            begins.append(end)
    return None


def _disguise(length: int, text: str) -> str | None:
    """Return a random word of `length` letters that does not occur in `text`; None if none was found.

    A word of one letter may not exist, since only letters that are rare in texts are used.
    """
    guesses = ("".join(secrets.choice("qzxjvkw") for _ in range(length)) for _ in range(1000))
    return next((word for word in guesses if word not in text), None)


def _value(messages: Sequence[Message], field: Field) -> str:
    return str(messages[field[0]][field[1]])  # type: ignore[literal-required]  # one of FIELDS


def _with(messages: Sequence[Message], values: Mapping[Field, str]) -> list[Message]:
    copy = list(messages)
    for (index, name), value in values.items():
        copy[index] = cast("Message", {**copy[index], name: value})
    return copy
