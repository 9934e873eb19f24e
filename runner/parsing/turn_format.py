"""Turn formats: plain values that describe how a template writes an assistant's turn."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import orjson

from runner.parsing.notations import Notation, ValueType

__all__ = [
    "ArgumentsFormat",
    "CallFormat",
    "Container",
    "ContentFormat",
    "IdStyle",
    "LiteralText",
    "Piece",
    "ReasoningFormat",
    "ResponseFormat",
    "Slot",
    "TaggedArguments",
    "TurnFormat",
    "ValueStyle",
    "WholeArguments",
]


class Slot(enum.StrEnum):
    """Part of a call that differs between calls."""

    NAME = "name"
    ARGUMENTS = "arguments"
    ID = "id"  # id of the call, as in its message
    INDEX = "index"  # number of the call in its turn


@dataclass(frozen=True, slots=True)
class LiteralText:
    """A constant piece of a call."""

    text: str


Piece: TypeAlias = LiteralText | Slot


@dataclass(frozen=True, slots=True)
class WholeArguments:
    """Arguments written as one object."""

    notation: Notation
    kind: Literal["whole"] = "whole"


@dataclass(frozen=True, slots=True)
class ValueStyle:
    """Form of values of one type, from their key to the text after them."""

    open: str
    """Text between the key and the value."""
    notation: Notation
    close: str
    """Text that ends the value and belongs to it, such as a closing quotation mark."""


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """Arguments written as keys and values between literals."""

    head: str
    """Text before the first key."""
    separator: str
    """Text between a value and the next key."""
    tail: str
    """Text after the last value."""
    none: str | None
    """Text that replaces the arguments of a call without arguments; None if such calls cannot be written."""
    styles: Mapping[ValueType, ValueStyle]
    """Form of the values of each type. Values of a missing type cannot be written."""
    sorted_keys: bool = False
    """True if arguments are sorted by name."""
    kind: Literal["tagged"] = "tagged"


ArgumentsFormat: TypeAlias = WholeArguments | TaggedArguments


@dataclass(frozen=True, slots=True)
class Container:
    """JSON object around name and arguments of one call. Its members may be read in any order."""

    name: tuple[str, ...]
    """Keys that lead to the name; () if the name is the key of the arguments."""
    arguments: tuple[str, ...]
    """Keys that lead to the arguments; () if the name is their key."""
    id: tuple[str, ...] | None
    """Keys that lead to the call's id; None if the object has no id."""


class IdStyle(enum.StrEnum):
    """Form of call ids that a template accepts, as a format string for generated ids."""

    ANY = "call_{number}"
    NINE = "call{number:05}"  # nine letters and digits, required by Mistral's templates

    def pattern(self, longest: int = 64) -> str:
        """Return a regular expression for ids that a model writes. It is also a valid EBNF expression.

        `longest` is the maximum length of ids whose length is not fixed.
        """
        return "[0-9A-Za-z]{9}" if self is IdStyle.NINE else f"[0-9A-Za-z_.:/$\\-]{{1,{longest}}}"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Form of the calls of a turn: `begin`, a call, `between`, a call, `close`."""

    begin: str
    """Text before the first call."""
    call: tuple[Piece, ...]
    between: str | None
    """Text between two calls; None if a turn can have only one call."""
    close: str
    """Text that the model samples after the last call, without the text that ends every turn."""
    arguments: ArgumentsFormat
    container: Container | None
    """JSON object that is the call; None if the call has another form."""
    trigger: str
    """Text that begins calls; "" if calls begin without such a text."""
    after_content: str | None
    """Text between content and the calls after it; None if content cannot precede calls."""
    before_content: str | None
    """Text between calls and content that follows them; None if content precedes calls or is dropped."""
    id_pieces: tuple[Piece, ...] | None
    """Form of an id for templates that show the tool's name only in the id; None for other templates."""
    ids: IdStyle
    """Form of generated ids."""
    stop: str
    """Control token that ends only turns with calls; "" if these end like other turns."""

    @property
    def post(self) -> str:
        """Text that certainly ends one call, even if another call follows."""
        if self.between is None:
            return self.close
        length = next(
            (n for n, (a, b) in enumerate(zip(self.between, self.close, strict=False)) if a != b),
            min(len(self.between), len(self.close)),
        )
        return _HALF_TAG.sub("", self.close[:length])


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Form of the reasoning in a turn."""

    open: str
    """Mark before the reasoning; "" if the template writes none."""
    close: str
    """Mark after the reasoning."""
    opened_by_prompt: bool
    """True if the prompt ends inside the reasoning, so that the model does not write `open`."""


@dataclass(frozen=True, slots=True)
class ContentFormat:
    """Texts around the content of a turn; "" for most templates."""

    open: str
    close: str


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """Response parsing of a checkpoint, which defines how answers are read, not how they are written."""

    template: Mapping[str, Any]
    """The checkpoint's `response_template` for transformers."""
    prompt: str
    """End of the prompt after the user's text. The answer may begin in it."""
    closed: bool = True
    """True if a complete call needs its close. In some templates the end of the turn is the close."""


@dataclass(frozen=True, slots=True)
class TurnFormat:
    """Form in which a template writes an assistant's turn."""

    calls: CallFormat | None
    """Form of calls; None if it could not be learnt."""
    reasoning: ReasoningFormat | None
    """Form of the reasoning; None if the template does not show it."""
    content: ContentFormat
    """Texts around the content."""
    harmony: bool = False
    """True if turns consist of messages on channels, as for gpt-oss; the module `harmony` reads such turns."""
    response: ResponseFormat | None = None
    """Response parsing of the checkpoint; None if calls were learnt, or if no response template can be used."""
    ids: IdStyle = IdStyle.ANY
    """Form of generated ids; used only if `calls` is None."""

    def texts(self) -> frozenset[str]:
        return frozenset(_strings(orjson.loads(orjson.dumps(self))))


_HALF_TAG: Final = re.compile(r"<[^<>\s]*\Z")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def merged(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Return the pieces with adjacent texts joined and empty ones removed."""
    result: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, LiteralText) and result and isinstance(result[-1], LiteralText):
            result[-1] = LiteralText(result[-1].text + piece.text)
        elif not isinstance(piece, LiteralText) or piece.text:
            result.append(piece)
    return tuple(result)
