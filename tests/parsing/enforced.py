"""Tools and formats of every class, and acceptance of text by the real xgrammar."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, TypeAlias

import pytest
import xgrammar
from pydantic import BaseModel, Field

from runner.options import Constraint, ConstraintKind
from runner.parsing.call_grammar import constraint
from runner.parsing.call_writer import WrittenCall, id_for, write_calls
from runner.parsing.notations import Html, Json, JsonText
from runner.parsing.turn_format import CallFormat, ReasoningFormat, TaggedArguments, WholeArguments
from runner.tools.tool import Tool
from tests.parsing.learnt_formats import CLASSES, learnt

__all__ = [
    "ADD",
    "BYTES",
    "BY_ITSELF",
    "END",
    "OPENED",
    "TOOLS",
    "Call",
    "accepts",
    "add",
    "compiled",
    "every_class",
    "form_of",
    "required",
    "stop",
    "written",
]


class Tree(BaseModel):
    label: str
    children: list[Tree] = []


@dataclass
class Point:
    x: float
    y: float = 0.0


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


def paint(
    colour: Literal["red", 'pale "blue"', "it's"],
    mode: Literal["fast", 2, True, None] = "fast",
    at: Point | None = None,
    alpha: Annotated[float, Field(ge=0)] = 1.0,
) -> None:
    """Paint something."""


def plant(tree: Tree, times: Annotated[int, Field(ge=1, le=12)] = 1) -> None:
    """Plant a tree."""


def note(
    text: str = "",
    tags: list[str] | None = None,
    scores: dict[str, int] | None = None,
    pair: tuple[int, str] = (0, ""),
    done: bool = False,
    anything: Any = None,
    few: Annotated[list[int], Field(min_length=1, max_length=2)] = [1],  # noqa: B006
) -> None:
    """Note something."""


def stop() -> None:
    """Stop."""


TOOLS = [Tool(function) for function in (add, paint, plant, note, stop)]
ADD = TOOLS[:1]


def json_text() -> CallFormat:
    """Arguments as JSON text, as in OpenAI's messages; no template of the corpus writes them this way."""
    return replace(form_of("JSON object"), arguments=WholeArguments(JsonText(Json(ascii=True))))


def indented_json_text() -> CallFormat:
    return replace(json_text(), arguments=WholeArguments(JsonText(Json(item=",", indent=2))))


def html() -> CallFormat:
    """Strings with entities; no template of the corpus writes them this way."""
    form = form_of("raw strings")
    assert isinstance(form.arguments, TaggedArguments)
    styles = {**form.arguments.styles, "string": replace(form.arguments.styles["string"], notation=Html())}
    return replace(form, arguments=replace(form.arguments, styles=styles))


MADE: Final = {"JSON in a string": json_text, "indented JSON in a string": indented_json_text, "HTML": html}
every_class = pytest.mark.parametrize("name", [*CLASSES, *MADE])


@functools.cache
def form_of(name: str) -> CallFormat:
    form = MADE[name]() if name in MADE else learnt(CLASSES[name])
    assert form is not None
    return form


OPENED = ReasoningFormat("<think>", "</think>", opened_by_prompt=True)
BY_ITSELF = ReasoningFormat("<think>\n", "\n</think>\n\n", opened_by_prompt=False)

BYTES = [bytes([byte]) for byte in range(256)]
END = len(BYTES)


@functools.cache
def compiler() -> xgrammar.GrammarCompiler:
    return xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo([*BYTES, b""], vocab_size=END + 1, stop_token_ids=[END]), max_threads=1
    )


@functools.cache
def compiled(enforced: Constraint) -> xgrammar.CompiledGrammar:
    if enforced.kind is ConstraintKind.STRUCTURAL_TAG:
        return compiler().compile_structural_tag(enforced.value)
    return compiler().compile_grammar(enforced.value)


def required(form: CallFormat, tools: Sequence[Tool], choice: str = "required", **given: Any) -> Constraint:
    enforced = constraint(form, tools, choice, **given)
    assert enforced is not None
    return enforced


def accepts(enforced: Constraint, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(compiled(enforced), terminate_without_stop_token=True)
    return bool(matcher.accept_string(text)) and bool(matcher.is_terminated())


Call: TypeAlias = tuple[str, Mapping[str, Any]]
"""Name and arguments of a call."""


def written(form: CallFormat, *calls: Call) -> str:
    """Return the text of a turn with these calls."""
    said = [
        WrittenCall(name, arguments, id_for(form, name, n) or f"callabc{n:02}")
        for n, (name, arguments) in enumerate(calls)
    ]
    return write_calls(form, said)
