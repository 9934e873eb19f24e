"""Description of a learnt format of turns: one call with named slots, the marks of reasoning, and limitations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runner.parsing.call_grammar import enforceable
from runner.parsing.learning.learnt_format import FormatSource, LearntFormat
from runner.parsing.limitations import DESCRIPTIONS
from runner.parsing.turn_format import CallFormat, LiteralText, Piece, TaggedArguments

__all__ = ["turn_document", "turn_lines"]


def turn_lines(learnt: LearntFormat) -> Iterator[tuple[str, str, str]]:
    """(label, text, meaning) of each line about the format of turns."""
    form = learnt.format
    if not learnt.reads_calls:
        yield "calls", f"refused ({learnt.missing})", f"{learnt.why}."
    else:
        yield "calls", learnt.verdict.value, _VERDICTS[learnt.verdict.value]
        yield "  source", learnt.source.value, _SOURCES[learnt.source]
        yield from _call_lines(form.calls) if form.calls is not None else [_READ_ONLY]
        for limit in learnt.limitations:
            yield f"  {limit}", "", DESCRIPTIONS[limit]
    if form.reasoning is None:
        yield "reasoning", "none", "The template writes none; a turn that begins with <think> still has reasoning."
    else:
        opened = "The prompt begins it." if form.reasoning.opened_by_prompt else "The model begins it."
        yield "reasoning", f"{form.reasoning.open} ... {form.reasoning.close}", opened


_VERDICTS = {
    "exact": "Calls are parsed exactly, whatever their values; checked with sixty calls against the template.",
    "limited": "Calls are parsed exactly, apart from the limits below.",
}


_SOURCES = {
    FormatSource.HARMONY: (
        "A built-in parser for channels, since the template does not write everything that they contain."
    ),
    FormatSource.LEARNT: "Learnt from the template's output.",
    FormatSource.RESPONSE_TEMPLATE: (
        "The format could not be learnt. The response template in tokenizer_config.json parses the template's output."
    ),
}
_READ_ONLY = ("  tool_choice", "auto, none", "Not enforced: the written format of calls is unknown.")


def _call_lines(form: CallFormat) -> Iterator[tuple[str, str, str]]:
    call = "".join(map(_named, form.call))
    yield (
        "  one call",
        f"{form.begin}{call}{form.close}",
        "As the template writes it; parts in «» differ from call to call.",
    )
    if isinstance(form.arguments, TaggedArguments):
        yield "  «arguments»", _arguments(form.arguments), "One by one; the format of a «value» depends on its type."
    else:
        yield "  «arguments»", form.arguments.notation.encode({"key": ["text", 1, True, None]}), "One object."
    if form.id_pieces is not None:
        yield "  «id»", "".join(map(_named, form.id_pieces)), "The id is the only place with the call's name."
    if form.between is not None:
        yield "  between two", form.between, "Separates two calls of a turn."
    choices = ["auto", "none"]
    why = enforceable(form)
    if why is None:
        choices += ["required", "a tool's name", *(["strict"] if form.trigger else [])]
    yield "  tool_choice", ", ".join(choices), "Supported values." if why is None else f"Not enforced: {why}."


def _named(piece: Piece) -> str:
    return piece.text if isinstance(piece, LiteralText) else f"«{piece.value}»"


def _arguments(form: TaggedArguments) -> str:
    string = form.styles["string"]
    one = f"«key»{string.open}«value»{string.close}"
    return f"{form.head}{one}{form.separator}{one}{form.tail}"


def turn_document(learnt: LearntFormat) -> dict[str, Any]:
    calls = learnt.format.calls
    return {
        **learnt.as_json(),
        "limitations": {limit: DESCRIPTIONS[limit] for limit in learnt.limitations},
        "enforceable": calls is not None and enforceable(calls) is None,
    }
