"""What makes an engine's constrained decoding write calls as a template does: a grammar of a format and its tools."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, Self, TypeAlias

import orjson

from runner.errors import BadOption
from runner.options import Constraint, ConstraintKind, ToolChoice
from runner.parsing.argument_rules import ArgumentRules, NoGrammar
from runner.parsing.ebnf import NOTHING, Rules, either, literal, text_without
from runner.parsing.harmony import NEXT_MESSAGE
from runner.parsing.turn_format import CallFormat, LiteralText, Piece, ReasoningFormat, Slot
from runner.tools.tool import Tool

__all__ = ["constraint", "enforceable", "harmony_constraint", "not_enforced"]

NO_TOKENS: Final[Mapping[str, int]] = {}
"""For vocabularies that are not known, or spell everything with letters."""

Signatures: TypeAlias = tuple[tuple[str, str], ...]
"""(name, JSON schema of the parameters as text) of each tool that may be called."""


def constraint(
    form: CallFormat,
    tools: Sequence[Tool],
    tool_choice: ToolChoice,
    *,
    parallel: bool = True,
    thought: ReasoningFormat | None = None,
    control_tokens: Mapping[str, int] = NO_TOKENS,
    stops: Collection[str] = (),
) -> Constraint | None:
    """What enforces `tool_choice` in a turn of this format, or None where nothing is or can be enforced.

    "required" and a tool's name leave nothing but calls. "auto" leaves all text free, and holds each call that is begun
    to a tool and its schema: for who wants its arguments strict. A format without a trigger has no such thing, since
    nothing tells where its calls begin.

    Several calls in one turn are allowed only with `parallel`, and where every tool in question may run beside others.

    Args:
        form: how calls are written.
        tools: what may be called.
        tool_choice: what the turn has to do.
        parallel: whether a turn may have several calls.
        thought: what may stand in front of the calls, or has to be ended first where the prompt begins it.
        control_tokens: the parts of the format that are one id of the vocabulary each. Nothing else is let through
            for them, least of all their letters.
        stops: the control tokens that end a turn; nothing is asked for after one.

    Raises:
        BadOption: a call is required and there is no tool, or none of that name, or what the tools take cannot be
            written in this format.
    """
    allowed = [tool for tool in tools if tool_choice in ("auto", "required", tool.name)]
    if tool_choice == "none" or (tool_choice == "auto" and not (form.trigger and allowed)):
        return None
    if not allowed:
        names = ", ".join(tool.name for tool in tools) or "there are none"
        raise BadOption(f"tool_choice={tool_choice!r}: no such tool may be called here. Tools: {names}.")
    if _holds(stops, *_texts_before_close(form, thought)):
        raise BadOption(f"tool_choice={tool_choice!r}: the chat template writes a stop token inside of a call.")
    form = _ended(form, stops)
    signatures = tuple((tool.name, tool.parameters_text) for tool in allowed)
    many = parallel and all(tool.parallel for tool in allowed)
    keyed = _Format.of(form, control_tokens)
    try:
        if tool_choice == "auto":
            return Constraint(ConstraintKind.STRUCTURAL_TAG, _tag(keyed, signatures, many, thought))
        return Constraint(ConstraintKind.GRAMMAR, _grammar(keyed, signatures, many, thought))
    except NoGrammar as error:
        raise BadOption(f"tool_choice={tool_choice!r}: {error}") from None


def _ended(form: CallFormat, stops: Collection[str]) -> CallFormat:
    """The format up to the first stop token: the turn is over there, so that a grammar cannot ask for more."""
    close = form.close[: min((at for stop in stops if (at := form.close.find(stop)) >= 0), default=None)]
    between = None if form.between is not None and _holds(stops, form.between) else form.between
    return form if (close, between) == (form.close, form.between) else replace(form, close=close, between=between)


def _texts_before_close(form: CallFormat, thought: ReasoningFormat | None) -> list[str]:
    pieces = [piece.text for piece in form.call if isinstance(piece, LiteralText)]
    return [form.begin, *pieces, *([] if thought is None else [thought.close])]


def _holds(stops: Collection[str], *texts: str) -> bool:
    return any(stop in text for stop in stops for text in texts)


FIRST_MESSAGE: Final = ReasoningFormat("", NEXT_MESSAGE, opened_by_prompt=True)
"""Of a model that writes on channels, in front of its call."""


def harmony_constraint(
    form: CallFormat,
    tools: Sequence[Tool],
    tool_choice: ToolChoice,
    control_tokens: Mapping[str, int] = NO_TOKENS,
) -> Constraint | None:
    """What enforces `tool_choice`: one message of any text, as a model begins with its thought, and behind it the call.

    Raises:
        BadOption: a call is required and there is no tool, or none of that name.
    """
    return constraint(form, tools, tool_choice, parallel=False, thought=FIRST_MESSAGE, control_tokens=control_tokens)


def not_enforced(form: CallFormat, tool: Tool) -> list[str]:
    """What a tool's schema says that no grammar of this format does, each as a keyword and the argument it is about.

    The check of the arguments finds it; what is not checked either is among `modern(tool.parameters).notes`.
    """
    arguments = ArgumentRules(Rules(NO_TOKENS), form)
    try:
        arguments.of(tool.name, tool.parameters_text)
    except NoGrammar:
        return []  # which refuses the call, by name
    return arguments.left_out.sentences()


def enforceable(form: CallFormat) -> str | None:
    """Why no grammar can be made of this format, or None where one can; what a tool takes may still be unwritable."""
    try:
        _grammar(_Format.of(form, NO_TOKENS), _STRINGS, True, None)
    except NoGrammar as error:
        return str(error)
    return None


_STRINGS: Final[Signatures] = (("f", '{"properties": {"a": {"type": "string"}, "b": {"type": "string"}}}'),)


@dataclass(frozen=True, slots=True)
class _Format:
    """A format in a vocabulary, which can be looked up by what it says."""

    key: bytes
    form: CallFormat = field(compare=False)
    control_tokens: Mapping[str, int] = field(compare=False)

    @classmethod
    def of(cls, form: CallFormat, control_tokens: Mapping[str, int]) -> Self:
        return cls(orjson.dumps([form, control_tokens]), form, control_tokens)


# Every turn of every episode asks for one of the same few grammars.
@lru_cache(maxsize=256)
def _grammar(keyed: _Format, signatures: Signatures, many: bool, thought: ReasoningFormat | None) -> str:
    rules, form = Rules(keyed.control_tokens), keyed.form
    calls = f"{rules.written(form.begin)} {_calls(rules, form, signatures, many)}"
    return rules.grammar(calls if thought is None else f"{_thinking(rules, thought)} {calls}")


@lru_cache(maxsize=256)
def _tag(keyed: _Format, signatures: Signatures, many: bool, thought: ReasoningFormat | None) -> str:
    """A structural tag: free text, in which the trigger begins calls."""
    rules, form = Rules(keyed.control_tokens), keyed.form
    behind_trigger = rules.written(form.begin[len(form.trigger) :])
    grammar = rules.grammar(f"{behind_trigger} {_calls(rules, form, signatures, many)}")
    tokens, again = keyed.control_tokens, many and form.between is not None
    begun: Format = {"type": "grammar", "grammar": grammar}
    if not again:
        begun = {"type": "sequence", "elements": [begun, _anything_but(form.trigger, tokens)]}
    turn = _dispatch({form.trigger: begun}, tokens, again=again)
    if thought is not None and thought.opened_by_prompt:
        # A trigger inside a thought begins nothing, and a thought may be all that there is.
        turn = _dispatch({thought.close.strip(): turn}, tokens, again=False)
    elif thought is not None and (opened := _mark_of(rules, thought.open)) and _alike(opened, form.trigger, tokens):
        # So it is in one that the model begins itself; behind it the turn goes on as if there had been none.
        close = _mark_of(rules, thought.close)
        thinking = _dispatch({close: {"type": "const_string", "value": ""} if again else turn}, tokens, again=False)
        turn = _dispatch({form.trigger: begun, opened: thinking}, tokens, again=again)
    return json.dumps({"type": "structural_tag", "format": turn}, ensure_ascii=False)


Format: TypeAlias = dict[str, Any]
"""A part of a structural tag."""


def _mark_of(rules: Rules, mark: str) -> str:
    """What tells that a thought begins or ends: the control token that `mark` begins with, or else all of it."""
    return rules.control_token_of(mark.strip()) or mark.strip()


def _alike(mark: str, trigger: str, tokens: Mapping[str, int]) -> bool:
    """Both are control tokens or neither is, which is what one part of a tag can wait for, and they can be told."""
    return (mark in tokens) == (trigger in tokens) and not mark.startswith(trigger) and not trigger.startswith(mark)


def _dispatch(parts: Mapping[str, Format], tokens: Mapping[str, int], *, again: bool) -> Format:
    """Free text until one of these marks, behind which its part must stand, and if `again` all that once more."""
    kind = "token_dispatch" if set(parts) <= set(tokens) else "dispatch"
    return {"type": kind, "rules": [[tokens.get(mark, mark), part] for mark, part in parts.items()], "loop": again}


def _anything_but(mark: str, tokens: Mapping[str, int]) -> Format:
    if mark in tokens:
        return {"type": "any_tokens", "exclude_tokens": [tokens[mark]]}
    return {"type": "any_text", "excludes": [mark]}


MOST_SPACE: Final = 4
"""Line breaks and spaces between a thought and the calls behind it; a model could spend a turn on white space."""


def _thinking(rules: Rules, thought: ReasoningFormat) -> str:
    """What is thought in front of the calls; nothing too, where a model begins its thoughts itself."""
    closed = _thought(rules, thought.close)
    if thought.opened_by_prompt:
        return closed
    opened = rules.written(thought.open.strip())
    return rules.add("thinking", either([f"{opened} {closed}", NOTHING])) if thought.open else NOTHING


def _thought(rules: Rules, close: str) -> str:
    """What is left of a thought, what ends it, and a little white space."""
    close = close.strip()
    thought = rules.add("thought", text_without([rules.control_token_of(close) or close]))
    return f"{thought} {rules.written(close)} [ \\n]{{0,{MOST_SPACE}}}"


def _calls(rules: Rules, form: CallFormat, signatures: Signatures, many: bool) -> str:
    """What stands behind the begin of a section of calls."""
    arguments = ArgumentRules(rules, form)
    call = rules.add("call", either(_call(rules, form, arguments, *signature) for signature in signatures))
    more = f" ({rules.written(form.between)} {call})*" if many and form.between is not None else ""
    return f"{call}{more} {rules.written(form.close)}"


def _call(rules: Rules, form: CallFormat, arguments: ArgumentRules, name: str, parameters: str) -> str:
    written = arguments.of(name, parameters)
    return " ".join(written if piece is Slot.ARGUMENTS else _piece(rules, form, piece, name) for piece in form.call)


LONGEST_ID: Final = 32
"""Signs of an id that a model makes up where a call is enforced; every one of them takes 10 ms to compile."""


def _piece(rules: Rules, form: CallFormat, piece: Piece, name: str) -> str:
    match piece:
        case LiteralText(text):
            return rules.written(text)
        case Slot.NAME:
            return literal(name)
        case Slot.INDEX:
            # Models count on where their templates count the calls of the whole conversation.
            return "[0-9]{1,4}"
        case _:
            pieces = form.id_pieces or ()
            return " ".join(_piece(rules, form, each, name) for each in pieces) or form.ids.pattern(LONGEST_ID)
