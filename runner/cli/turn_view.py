"""Shows people a learnt format of turns: one call with its slots named, the marks of thoughts, what it can do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runner.parsing.enforcing import enforceable
from runner.parsing.learning.turn import FormatSource, LearntTurn
from runner.parsing.traits import SENTENCES
from runner.parsing.turn_format import CallFormat, LiteralText, Piece, TaggedArguments

__all__ = ["turn_document", "turn_lines"]


def turn_lines(learnt: LearntTurn) -> Iterator[tuple[str, str, str]]:
    """(label, text, what it means) of each line that tells how a template writes a turn."""
    form = learnt.format
    if not learnt.reads_calls:
        yield "calls", f"refused ({learnt.missing})", f"{learnt.why}."
    else:
        yield "calls", learnt.verdict.value, _VERDICTS[learnt.verdict.value]
        yield "  source", learnt.source.value, _SOURCES[learnt.source]
        yield from _call_lines(form.calls) if form.calls is not None else [_READ_ONLY]
        for trait in learnt.traits:
            yield f"  {trait}", "", SENTENCES[trait]
    if form.reasoning is None:
        yield "thoughts", "none", "The template shows none; a turn that begins with <think> has one all the same."
    else:
        opened = "The prompt opens it." if form.reasoning.opened_by_prompt else "The model opens it."
        yield "thoughts", f"{form.reasoning.open} ... {form.reasoning.close}", opened


_VERDICTS = {
    "exact": "What is read is what was meant, whatever its values: tried with sixty calls against the template.",
    "limited": "What is read is what was meant, but for what is named below.",
}


_SOURCES = {
    FormatSource.HARMONY: (
        "Its channels are read by hand, since the template does not show all that is written on them."
    ),
    FormatSource.LEARNT: "From what the template writes.",
    FormatSource.RESPONSE_TEMPLATE: (
        "They could not be learnt; the model's own tokenizer_config.json says how answers are read, and that reads "
        "what the template writes."
    ),
}
_READ_ONLY = ("  tool_choice", "auto, none", "Not enforced: nothing tells how calls are written.")


def _call_lines(form: CallFormat) -> Iterator[tuple[str, str, str]]:
    call = "".join(map(_named, form.call))
    yield (
        "  one call",
        f"{form.begin}{call}{form.close}",
        "As the template writes it; what stands in «» differs from call to call.",
    )
    if isinstance(form.arguments, TaggedArguments):
        yield "  «arguments»", _arguments(form.arguments), "One by one; a «value» is written as its type is."
    else:
        yield "  «arguments»", form.arguments.notation.encode({"key": ["text", 1, True, None]}), "One object."
    if form.id_pieces is not None:
        yield "  «id»", "".join(map(_named, form.id_pieces)), "The name of a call stands in nothing else."
    if form.between is not None:
        yield "  between two", form.between, "Stands between two calls of a turn."
    choices = ["auto", "none"]
    why = enforceable(form)
    if why is None:
        choices += ["required", "a tool's name", *(["strict"] if form.trigger else [])]
    yield "  tool_choice", ", ".join(choices), "What can be asked for." if why is None else f"Not enforced: {why}."


def _named(piece: Piece) -> str:
    return piece.text if isinstance(piece, LiteralText) else f"«{piece.value}»"


def _arguments(form: TaggedArguments) -> str:
    string = form.styles["string"]
    one = f"«key»{string.open}«value»{string.close}"
    return f"{form.head}{one}{form.separator}{one}{form.tail}"


def turn_document(learnt: LearntTurn) -> dict[str, Any]:
    """The same as plain values."""
    calls = learnt.format.calls
    return {
        **learnt.as_json(),
        "traits": {trait: SENTENCES[trait] for trait in learnt.traits},
        "enforceable": calls is not None and enforceable(calls) is None,
    }
