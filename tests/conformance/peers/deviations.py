"""Text that deviates from a template as models deviate, built for each format from its own parts."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from runner.parsing.call_writer import Unwritable, WrittenCall, id_for, write_calls
from runner.parsing.cut_points import CutPoints
from runner.parsing.learning.probe_renders import ProbeCall
from runner.parsing.literals import Unreadable, read_literal
from runner.parsing.notations import Json, Nested, Python, Raw
from runner.parsing.turn_format import CallFormat, LiteralText, TaggedArguments, WholeArguments
from tests.conformance.peers.cases import Kind, Trial, schemas_of

__all__ = ["deviating"]

FIRST: Final = ProbeCall("look_up", {"query": "first one", "limit": 3})
SECOND: Final = ProbeCall("refresh", {"hard": True})
WORDS: Final = "I look it up."


@dataclass(frozen=True, slots=True)
class Deviation:
    """A text of a model, and its meaning."""

    text: str
    calls: tuple[ProbeCall, ...]
    content: str = ""


Make: TypeAlias = Callable[[CallFormat], Deviation | None]


def deviating(form: CallFormat, tokens: Collection[str]) -> Iterator[Trial]:
    """Yield the deviations that are possible in this format, in a vocabulary with these control tokens."""
    for kind, make in DEVIATIONS.items():
        if kind is Kind.SPELT and form.trigger not in tokens:
            continue
        try:
            deviation = make(form)
        except Unwritable:
            continue
        if deviation is not None:
            schemas = schemas_of(deviation.calls or [FIRST])
            text, calls, content = deviation.text, deviation.calls, deviation.content
            yield Trial(kind, kind.value, text, calls, content, schemas, spelt=kind is Kind.SPELT)


def _calls(form: CallFormat) -> tuple[ProbeCall, ...]:
    """The calls of most deviations."""
    return (FIRST, SECOND) if form.between is not None else (FIRST,)


def _write(form: CallFormat, calls: Sequence[ProbeCall]) -> str:
    """The text of the calls in the format."""
    # Every template accepts an id of nine letters and digits.
    ids = [id_for(form, said.name, number) for number, said in enumerate(calls)]
    return write_calls(form, [WrittenCall(said.name, said.arguments, id) for said, id in zip(calls, ids, strict=True)])


# --- literals


def _mapped(form: CallFormat, change: Callable[[str], str]) -> CallFormat:
    """The format with other literals."""
    arguments = form.arguments
    if isinstance(arguments, TaggedArguments):
        styles = {
            kind: dataclasses.replace(style, open=change(style.open), close=change(style.close))
            for kind, style in arguments.styles.items()
        }
        none = None if arguments.none is None else change(arguments.none)
        arguments = dataclasses.replace(
            arguments,
            head=change(arguments.head),
            separator=change(arguments.separator),
            tail=change(arguments.tail),
            none=none,
            styles=styles,
        )
    return dataclasses.replace(
        form,
        begin=change(form.begin),
        call=tuple(LiteralText(change(piece.text)) if isinstance(piece, LiteralText) else piece for piece in form.call),
        between=None if form.between is None else change(form.between),
        close=change(form.close),
        arguments=arguments,
    )


def _relaid(form: CallFormat, change: Callable[[str], str]) -> Deviation | None:
    """The calls with changed literals, or None if the change makes no difference."""
    calls = _calls(form)
    text = _write(_mapped(form, change), calls)
    return Deviation(text, calls) if text != _write(form, calls) else None


def _squeezed(literal: str) -> str:
    """Remove the white space that separates no words."""
    return re.sub(r"(?<!\w)\s+|\s+(?![\w\s]|\Z)", "", literal)


def _spread(literal: str) -> str:
    return re.sub(r">\s*<", ">\n\n<", literal)


# --- text around calls


def _words_before(form: CallFormat) -> Deviation:
    calls = _calls(form)
    return Deviation(f"{WORDS}\n{_write(form, calls)}", calls, WORDS)


def _words_after(form: CallFormat) -> Deviation:
    calls = _calls(form)
    return Deviation(f"{_write(form, calls)}\n\n{WORDS}", calls, WORDS)


def _words_between(form: CallFormat) -> Deviation | None:
    if not _each_by_itself(form):
        return None
    return Deviation(f"{_write(form, [FIRST])}\n{WORDS}\n{_write(form, [SECOND])}", (FIRST, SECOND), WORDS)


def _each_by_itself(form: CallFormat) -> bool:
    """True if every call has an opening and a close of its own."""
    own = form.close + form.begin
    return form.between is not None and bool(form.trigger) and "".join(form.between.split()) == "".join(own.split())


def _twice(form: CallFormat) -> Deviation | None:
    if not form.trigger:
        return None
    calls = _calls(form)
    return Deviation(f"{form.trigger}\n{_write(form, calls)}", calls)


def _unopened(form: CallFormat) -> Deviation | None:
    """Remove the mark that begins calls, which is all of the opening or a part of it."""
    if not form.trigger:
        return None
    return Deviation(_write(form, [FIRST]).replace(form.trigger, "", 1).lstrip(), (FIRST,))


def _open_call(form: CallFormat) -> Deviation | None:
    """Remove the close of the last call, except for the part that ends its arguments."""
    calls, close = _calls(form), form.close.strip()
    kept = ""
    if isinstance(form.arguments, TaggedArguments):
        kept = CutPoints().split(close)[0] if close else ""
    if not form.trigger or close == kept:
        return None
    return Deviation(_write(form, calls).rstrip().removesuffix(close) + kept, calls)


def _open_section(form: CallFormat) -> Deviation | None:
    calls, post = _calls(form), form.post.strip()
    text = _write(form, calls).rstrip()
    rest = text.rpartition(post)[2] if post else ""
    return Deviation(text.removesuffix(rest), calls) if rest.strip() else None


def _open_argument(form: CallFormat) -> Deviation | None:
    if not isinstance(form.arguments, TaggedArguments):
        return None
    shared = CutPoints().common_prefix([form.arguments.separator, form.arguments.tail]).rstrip()
    if not shared:
        return None
    separator = form.arguments.separator.removeprefix(shared)
    form = dataclasses.replace(form, arguments=dataclasses.replace(form.arguments, separator=separator))
    return Deviation(_write(form, [FIRST]), (FIRST,))


def _sections(form: CallFormat) -> Deviation | None:
    if form.between is None or not form.trigger or _each_by_itself(form):
        return None
    return Deviation(f"{_write(form, [FIRST])}\n{_write(form, [SECOND])}", (FIRST, SECOND))


def _mentioned(form: CallFormat) -> Deviation | None:
    if not form.trigger.strip():
        return None
    words = f"A call is begun by {form.trigger.strip()} and by nothing else."
    return Deviation(words, (), words)


# --- JSON


def _respelt(form: CallFormat, said: ProbeCall, number: int, spell: Callable[[Any], str]) -> str | None:
    """Return one call whose object is spelt by `spell`, or the object of its arguments; None if there is no object."""
    one = dataclasses.replace(form, begin="", close="")
    if form.container is not None:
        call = WrittenCall(said.name, said.arguments, id_for(form, said.name, number))
        text = write_calls(one, [call])
        try:
            value, end = read_literal(text)
        except Unreadable:
            return None
        return text[: len(text) - len(text.lstrip())] + spell(value) + text[end:]
    if not isinstance(form.arguments, WholeArguments):
        return None
    # no format has this notation, but it can be written
    spelt = WholeArguments(_Spelt(spell))  # type: ignore[arg-type]
    call = WrittenCall(said.name, said.arguments, id_for(form, said.name, number))
    return write_calls(dataclasses.replace(one, arguments=spelt), [call])


@dataclass(frozen=True, slots=True)
class _Spelt:
    """A notation that only a deviation uses."""

    encode: Callable[[Any], str]


def _json(spell: Callable[[Any], str], *calls: ProbeCall) -> Make:
    """Return a deviation that spells JSON differently."""

    def make(form: CallFormat) -> Deviation | None:
        said = calls or _calls(form)
        respelt = [_respelt(form, each, number, spell) for number, each in enumerate(said)]
        if None in respelt or (len(said) > 1 and form.between is None):
            return None
        text = form.begin + (form.between or "").join(filter(None, respelt)) + form.close
        return Deviation(text, said) if text != _write(form, said) else None

    return make


def _object(change: Callable[[CallFormat, dict[str, Any]], Any], *calls: ProbeCall) -> Make:
    """Return a deviation that changes the object of a call."""

    def make(form: CallFormat) -> Deviation | None:
        if form.container is None or not form.container.arguments or len(form.container.arguments) > 1:
            return None
        return _json(lambda value: _dumped(form, change(form, value)), *calls)(form)

    return make


def _dumped(form: CallFormat, value: Any) -> str:
    """Return JSON, or Python's literals if the format uses them."""
    notation = form.arguments.notation if isinstance(form.arguments, WholeArguments) else None
    return repr(value) if isinstance(notation, Python) else json.dumps(value, ensure_ascii=False)


def _reordered(form: CallFormat, value: dict[str, Any]) -> Any:
    return dict(reversed(value.items()))


def _more_members(form: CallFormat, value: dict[str, Any]) -> Any:
    return {"reason": "it was asked for", **value, "confidence": 0.9}


def _other_key(form: CallFormat, value: dict[str, Any]) -> Any:
    (own,) = form.container.arguments if form.container else ("",)
    other = "parameters" if own == "arguments" else "arguments"
    return {other if key == own else key: member for key, member in value.items()}


def _as_text(form: CallFormat, value: dict[str, Any]) -> Any:
    (own,) = form.container.arguments if form.container else ("",)
    return {
        key: json.dumps(member) if key == own and isinstance(member, dict) else member for key, member in value.items()
    }


def _left_out(form: CallFormat, value: dict[str, Any]) -> Any:
    (own,) = form.container.arguments if form.container else ("",)
    return {key: member for key, member in value.items() if key != own}


def _is_list(form: CallFormat) -> bool:
    """True if the calls of a turn are the items of one list."""
    return form.container is not None and form.begin.rstrip().endswith("[") and form.close.lstrip().startswith("]")


def _together(form: CallFormat) -> Deviation | None:
    if form.container is None or not _each_by_itself(form) or _is_list(form):
        return None
    between = dataclasses.replace(form, between="\n")
    return Deviation(_write(between, (FIRST, SECOND)), (FIRST, SECOND))


def _listed(form: CallFormat) -> Deviation | None:
    if form.container is None or not _each_by_itself(form) or _is_list(form):
        return None
    listed = dataclasses.replace(form, begin=f"{form.begin}[", between=", ", close=f"]{form.close}")
    return Deviation(_write(listed, (FIRST, SECOND)), (FIRST, SECOND))


def _unlisted(form: CallFormat) -> Deviation | None:
    if not _is_list(form):
        return None
    begin, close = form.begin.rstrip().removesuffix("["), form.close.lstrip().removeprefix("]")
    return Deviation(_write(dataclasses.replace(form, begin=begin, close=close), [FIRST]), (FIRST,))


# --- other literals


def _literals(form: CallFormat) -> Deviation | None:
    """Swap `true` and `True`, in arguments that are not JSON."""
    arguments = form.arguments
    if isinstance(arguments, WholeArguments):
        return None
    style = arguments.styles.get("boolean")
    if style is None or isinstance(style.notation, Nested | Raw):
        return None
    other: Json | Python = Python() if style.notation.encode(True) == "true" else Json()
    styles: Mapping[Any, Any] = {**arguments.styles, "boolean": dataclasses.replace(style, notation=other)}
    form = dataclasses.replace(form, arguments=dataclasses.replace(arguments, styles=styles))
    return Deviation(_write(form, [SECOND]), (SECOND,))


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _with_comma(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text[:-1] + ", }" if text.endswith("}") and len(text) > 2 else text


DEVIATIONS: Final[Mapping[Kind, Make]] = {
    Kind.SQUEEZED: lambda form: _relaid(form, _squeezed),
    Kind.SPREAD: lambda form: _relaid(form, _spread),
    Kind.WORDS_BEFORE: _words_before,
    Kind.WORDS_AFTER: _words_after,
    Kind.WORDS_BETWEEN: _words_between,
    Kind.TWICE: _twice,
    Kind.UNOPENED: _unopened,
    Kind.OPEN_CALL: _open_call,
    Kind.OPEN_SECTION: _open_section,
    Kind.OPEN_ARGUMENT: _open_argument,
    Kind.SECTIONS: _sections,
    Kind.TOGETHER: _together,
    Kind.LISTED: _listed,
    Kind.UNLISTED: _unlisted,
    Kind.COMPACT: _json(_compact),
    Kind.INDENTED: _json(lambda value: json.dumps(value, ensure_ascii=False, indent=2)),
    Kind.ESCAPED: _json(json.dumps, ProbeCall("look_up", {"query": "naïve 日本語 🙂"})),
    Kind.PYTHON: _json(repr, FIRST),
    Kind.LITERALS: _literals,
    Kind.COMMA: _json(_with_comma, FIRST),
    Kind.LINE_BREAK: _json(
        lambda value: json.dumps(value).replace("\\n", "\n"), ProbeCall("look_up", {"query": "one\ntwo"})
    ),
    Kind.FENCED: _json(lambda value: f"```json\n{json.dumps(value)}\n```", FIRST),
    Kind.DOUBLED: _json(lambda value: f"{{{json.dumps(value)}}}", FIRST),
    Kind.REORDERED: _object(_reordered),
    Kind.MORE_MEMBERS: _object(_more_members),
    Kind.OTHER_KEY: _object(_other_key),
    Kind.AS_TEXT: _object(_as_text),
    Kind.LEFT_OUT: _object(_left_out, ProbeCall("refresh", {})),
    Kind.MENTIONED: _mentioned,
    Kind.SPELT: _mentioned,
}
