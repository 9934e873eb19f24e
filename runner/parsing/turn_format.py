"""Turn formats: how a template writes an assistant's turn, as literals, slots and notations. All of it plain values."""

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
    """What differs from call to call."""

    NAME = "name"
    ARGUMENTS = "arguments"
    ID = "id"  # of the call, as its message has it
    INDEX = "index"  # the number of the call in its turn


@dataclass(frozen=True, slots=True)
class LiteralText:
    """A piece of a call that is always the same."""

    text: str
    """The piece itself."""


Piece: TypeAlias = LiteralText | Slot


@dataclass(frozen=True, slots=True)
class WholeArguments:
    """Arguments written as one object."""

    notation: Notation
    """How the object is written."""
    kind: Literal["whole"] = "whole"


@dataclass(frozen=True, slots=True)
class ValueStyle:
    """How values of one type stand between their key and what follows."""

    open: str
    """What stands between the key and the value."""
    notation: Notation
    """How the value is written."""
    close: str
    """What stands behind the value, still part of it, such as a closing quotation mark."""


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """Arguments written one by one, each key and value between literals."""

    head: str
    """What stands in front of the first key."""
    separator: str
    """What stands between a value and the next key."""
    tail: str
    """What stands behind the last value."""
    none: str | None
    """What a call without arguments has instead; None where that cannot be written."""
    styles: Mapping[ValueType, ValueStyle]
    """How the values of each type are written; a type that is not there cannot be."""
    sorted_keys: bool = False
    """Whether arguments stand in the order of their names, whatever the order in which they were given."""
    kind: Literal["tagged"] = "tagged"


ArgumentsFormat: TypeAlias = WholeArguments | TaggedArguments


@dataclass(frozen=True, slots=True)
class Container:
    """The JSON object around one call's name and arguments, so that its members may be read in any order."""

    name: tuple[str, ...]
    """The keys that lead to the name; () where the name is itself the key of the arguments."""
    arguments: tuple[str, ...]
    """The keys that lead to the arguments; () where the name is the key."""
    id: tuple[str, ...] | None
    """The keys that lead to the call's id, where it has one."""


class IdStyle(enum.StrEnum):
    """What a template takes as the id of a call, as the id that we make up for a call of some number."""

    ANY = "call_{number}"
    NINE = "call{number:05}"  # nine letters and digits, as Mistral's templates want them

    def pattern(self, longest: int = 64) -> str:
        """What a model's own ids have to match, as a regular expression that is an EBNF expression too."""
        return "[0-9A-Za-z]{9}" if self is IdStyle.NINE else f"[0-9A-Za-z_.:/$\\-]{{1,{longest}}}"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How the calls of a turn are written: `begin`, a call, `between`, a call, `close`."""

    begin: str
    """What stands in front of the first call."""
    call: tuple[Piece, ...]
    """The pieces of one call."""
    between: str | None
    """What stands between two calls; None where a turn can have only one."""
    close: str
    """What stands behind the last call and is sampled, without what ends any turn."""
    arguments: ArgumentsFormat
    """How arguments are written."""
    container: Container | None
    """The JSON object that a call is, or None where it is more than one."""
    trigger: str
    """What tells that calls begin; "" where nothing does but the call itself."""
    after_content: str | None
    """What stands between a content and the calls behind it; None where no content can stand before calls."""
    before_content: str | None
    """What stands between calls and the content behind them; None where it stands before them, or nowhere."""
    id_pieces: tuple[Piece, ...] | None
    """What the id of a call has to look like for the template to show its name; None where any will do."""
    ids: IdStyle
    """How the ids of calls look."""
    stop: str
    """The control token that ends a turn with calls, where that is not what ends any turn."""

    @property
    def post(self) -> str:
        """What surely ends one call, whether another follows or not."""
        if self.between is None:
            return self.close
        length = next(
            (n for n, (a, b) in enumerate(zip(self.between, self.close, strict=False)) if a != b),
            min(len(self.between), len(self.close)),
        )
        return _HALF_TAG.sub("", self.close[:length])


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a thought stands in a turn."""

    open: str
    """What opens a thought; "" where nothing does."""
    close: str
    """What ends it."""
    opened_by_prompt: bool
    """Whether the prompt ends inside a thought, so that the model does not write `open` itself."""


@dataclass(frozen=True, slots=True)
class ContentFormat:
    """What stands around the content of a turn; "" and "" for most."""

    open: str
    close: str


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """How a checkpoint has its own answers taken apart: it tells how they are read, and not how they are written."""

    template: Mapping[str, Any]
    """The checkpoint's `response_template`, which transformers reads answers by."""
    prompt: str
    """What a prompt ends with, behind the words of the user; the answer may begin in it."""
    closed: bool = True
    """Whether a call is whole only with its close behind it; in some templates what ends the turn is the close."""


@dataclass(frozen=True, slots=True)
class TurnFormat:
    """How a template writes what an assistant says."""

    calls: CallFormat | None
    """How it writes calls; None where it does so in no way that can be read."""
    reasoning: ReasoningFormat | None
    """How it writes a thought; None where it shows none."""
    content: ContentFormat
    """What it puts around a content."""
    harmony: bool = False
    """Whether a turn is a sequence of messages on channels, as gpt-oss writes it, which is read in a way of its own."""
    response: ResponseFormat | None = None
    """How the checkpoint has its turns read; None where it does not say, or the calls were learnt."""
    ids: IdStyle = IdStyle.ANY
    """How the ids of calls look that were not learnt."""

    def texts(self) -> frozenset[str]:
        """All texts that the format is made of."""
        return frozenset(_strings(orjson.loads(orjson.dumps(self))))


_HALF_TAG: Final = re.compile(r"<[^<>\s]*\Z")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def merged(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """The same pieces with neighbouring texts as one, and none empty."""
    result: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, LiteralText) and result and isinstance(result[-1], LiteralText):
            result[-1] = LiteralText(result[-1].text + piece.text)
        elif not isinstance(piece, LiteralText) or piece.text:
            result.append(piece)
    return tuple(result)
