"""Markers: words that no message holds, put into copies of messages to see where a template writes what."""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

from runner.messages import Message
from runner.tokens.template import ToolSchema

__all__ = [
    "FIELDS",
    "Field",
    "Span",
    "absent",
    "common_length",
    "forms",
    "locate",
    "locate_disguised",
    "marked",
    "sentinel",
    "shown",
    "without_switches",
    "without_words",
    "words",
]

Span: TypeAlias = tuple[int, int]
"""Begin and end of a stretch of text."""

Field: TypeAlias = tuple[int, str]
"""A message's index and the name of one of its `FIELDS`."""

FIELDS = ("content", "name", "tool_call_id")
"""What is said, and by whom: text that comes from users, tools and models, and is none of the template's."""

Render: TypeAlias = Callable[[Sequence[Message]], str]


def absent(messages: Iterable[Message]) -> str:
    """The first of a row of words, all of one length, that none of `messages` holds.

    The same messages get the same word, in every process: some templates count letters.
    """
    said = [text for message in messages for text in (message["content"], message.get("reasoning_content", ""))]
    stems = (f"zq7f3a9c1e5bn{number:06}z" for number in itertools.count())
    return next(stem for stem in stems if not any(stem in text for text in said))


def words(count: int) -> list[str]:
    """So many words that no template holds, none of which is in another or begins like a stem."""
    return [f"zqword{number:03}z" for number in range(count)]


def sentinel(stem: str) -> str:
    """Stands where the words of the last turn end."""
    return stem + "end"


def marked(message: Message, stem: str, tools: Sequence[ToolSchema], *, with_words: bool = True) -> Message:
    """A copy of an assistant message with the sentinel where its words end, and markers behind what else it says.

    Args:
        message: the turn.
        stem: begins sentinel and markers.
        tools: that could be called.
        with_words: the words themselves stay, since templates look into them; else only sentinel and markers are there.
    """
    copy: dict[str, Any] = dict(message)
    if message.get("reasoning_content"):
        copy["reasoning_content"] = message["reasoning_content"] * with_words + stem + "reasoning"
    calls = message.get("tool_calls")
    if not calls:
        copy["content"] = message["content"] * with_words + sentinel(stem)
        return cast("Message", copy)
    if message["content"]:
        copy["content"] = message["content"] * with_words + stem + "text"
    function = calls[-1]["function"]
    arguments = {_parameter(function, tools): sentinel(stem)}
    # Name and id stay, since templates write them after the call too.
    copy["tool_calls"] = [*calls[:-1], {**calls[-1], "function": {**function, "arguments": arguments}}]
    return cast("Message", copy)


def without_words(message: Message, stem: str) -> Message:
    """A copy of an assistant message that says only a marker where it said anything; others as they are."""
    if message["role"] != "assistant":
        return message
    copy: dict[str, Any] = {**message, "content": stem + "text" if message["content"] else ""}
    if message.get("reasoning_content"):
        copy["reasoning_content"] = stem + "reasoning"
    return cast("Message", copy)


def _parameter(function: Mapping[str, Any], tools: Sequence[ToolSchema]) -> str:
    """A parameter that the called tool has, else any name."""
    arguments = function["arguments"]
    if arguments and isinstance(arguments, Mapping):
        return str(next(iter(arguments)))
    for tool in tools:
        if tool["function"]["name"] == function["name"]:
            parameters = tool["function"].get("parameters") or {}
            return str(next(iter(parameters.get("properties") or ()), "value"))
    return "value"


SWITCHES = ("/no_think", "/think", "detailed thinking on", "detailed thinking off")
"""Words that templates look for in what is said, and some take out of it."""


def without_switches(content: str) -> str | None:
    """What is left of a content once the switches are out of it; None where there are none."""
    left = content
    for switch in SWITCHES:
        left = left.replace(switch, "")
    return None if left == content else left


def forms(content: str) -> Iterator[str]:
    """How templates write a content: as it is, trimmed, inside JSON, or as Python writes a string."""
    yield from _written(content)
    left = without_switches(content)
    if left is not None and left.strip():
        yield from _written(left)


def _written(content: str) -> Iterator[str]:
    for text in dict.fromkeys((content, content.strip(), content.lstrip(), content.rstrip())):
        yield text
        yield json.dumps(text, ensure_ascii=False)[1:-1]
        yield json.dumps(text)[1:-1]
        yield repr(text)[1:-1]


def common_length(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    differences = (index for index, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return next(differences, min(len(one), len(other)))


def locate(
    text: str, render: Render, messages: Sequence[Message], wanted: Sequence[Field], stem: str
) -> list[Span] | None:
    """Where some fields of the messages stand in `text`, which is `render(messages)`.

    The real messages are rendered; a second render with markers in their place only shows what stands around them.
    Where markers change that too, one field after the other is put in and found by what stays on both sides of it.

    Args:
        text: the render.
        render: the text of messages.
        messages: as they were rendered.
        wanted: fields that are not empty; those that the template does not print have no span.
        stem: stands in none of the messages.

    Returns:
        Spans in order, or None where a field cannot be told from what the template writes.
    """
    markers = {field: f"{stem}content{number}z" for number, field in enumerate(wanted)}
    copy = list(messages)
    for field, marker in markers.items():
        copy = _with(copy, field, marker)
    values = {marker: _value(messages, field) for field, marker in markers.items()}
    spans = _fitted(text, re.split(f"({'|'.join(values)})", render(copy)), values)
    return spans if spans is not None else _one_by_one(text, render, copy, messages, markers)


def locate_disguised(
    text: str,
    render: Render,
    messages: Sequence[Message],
    wanted: Sequence[Field],
    names: Callable[[str], Iterable[str]],
) -> list[Span] | None:
    """Where the control text of some fields stands in `text`: all of a content but that is left as it is.

    Templates that look into contents, compare them or take words out of them see no difference, unlike with markers.

    Args:
        text: the render.
        render: the text of messages.
        messages: as they were rendered.
        wanted: fields that hold control text.
        names: the control tokens that stand in a text.

    Returns:
        Spans in order, or None where the template writes the fields otherwise then.
    """
    found = {name for field in wanted for name in names(_value(messages, field))}
    disguises = {name: _disguise(len(name), text) for name in sorted(found, key=len, reverse=True)}
    copy = list(messages)
    for field in wanted:
        value = _value(messages, field)
        for name, disguise in disguises.items():
            value = value.replace(name, disguise)
        copy = _with(copy, field, value)
    if not disguises or any(list(names(_value(copy, field))) for field in wanted):
        return None
    other = render(copy)
    spans = sorted(
        (match.start(), match.end()) for disguise in disguises.values() for match in re.finditer(disguise, other)
    )
    for name, disguise in disguises.items():
        other = other.replace(disguise, name)
    return spans if other == text else None


def _disguise(length: int, text: str) -> str:
    """A word of that length which is not in the text."""
    words = ("".join(secrets.choice("qzxjvkw") for _ in range(length)) for _ in range(1000))
    return next(word for word in words if word not in text)


def shown(text: str, render: Render, messages: Sequence[Message], index: int, word: str) -> Span | None:
    """About where a template shows a content that it does not write as it is; None where it hides the message.

    Args:
        text: the render.
        render: the text of messages.
        messages: as they were rendered.
        index: of the message.
        word: stands in none of them.
    """
    other = render(_with(messages, (index, "content"), word))
    before, found, after = other.partition(word)
    if not found:
        return None
    begin = min(common_length(text, other), len(before))
    ending = min(common_length(text[::-1], other[::-1]), len(after))
    return begin, max(begin, len(text) - ending)


def _fitted(text: str, pieces: Sequence[str], contents: Mapping[str, str]) -> list[Span] | None:
    """The spans of the contents if `text` is exactly the scaffold pieces with some form of each content between."""
    dead: set[tuple[int, int]] = set()

    def fit(number: int, begin: int) -> list[Span] | None:
        if number == len(pieces):
            return [] if begin == len(text) else None
        if (number, begin) in dead:
            return None
        if number % 2 == 0:
            rest = fit(number + 1, begin + len(pieces[number])) if text.startswith(pieces[number], begin) else None
            if rest is not None:
                return rest
        else:
            for form in dict.fromkeys(forms(contents[pieces[number]])):
                end = begin + len(form)
                if text.startswith(form, begin) and (rest := fit(number + 1, end)) is not None:
                    return [(begin, end), *rest]
        dead.add((number, begin))
        return None

    return fit(0, 0)


def _one_by_one(
    text: str,
    render: Render,
    copy: Sequence[Message],
    messages: Sequence[Message],
    markers: Mapping[Field, str],
) -> list[Span] | None:
    current, before = list(copy), render(copy)
    spans: list[Span] = []
    for field, marker in markers.items():
        current = _with(current, field, _value(messages, field))
        after = render(current)
        at = before.find(marker)
        if at < 0 or marker in after or before.count(marker) > 1:
            return None
        begin = min(common_length(before, after), at)
        ending = min(common_length(before[::-1], after[::-1]), len(before) - at - len(marker))
        spans.append((begin, len(after) - ending))
        before = after
    apart = all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    return spans if before == text and apart and all(begin <= end for begin, end in spans) else None


def _value(messages: Sequence[Message], field: Field) -> str:
    return str(messages[field[0]][field[1]])  # type: ignore[literal-required]  # one of FIELDS


def _with(messages: Sequence[Message], field: Field, value: str) -> list[Message]:
    index, name = field
    return [cast("Message", {**m, name: value}) if i == index else m for i, m in enumerate(messages)]
