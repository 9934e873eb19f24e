"""Grammars that constrain decoding to calls of the allowed tools, in one call format."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Final, Self, TypeAlias

import orjson

from runner.errors import BadOption
from runner.options import Constraint, ConstraintKind, ToolChoice
from runner.parsing.argument_rules import ArgumentRules, GrammarRequirement, NoGrammar
from runner.parsing.ebnf import NOTHING, Rules, either, literal, text_without
from runner.parsing.harmony import NEXT_MESSAGE
from runner.parsing.turn_format import CallFormat, LiteralText, Piece, ReasoningFormat, Slot
from runner.tools.tool import Tool

__all__ = ["constraint", "enforceable", "harmony_constraint", "not_enforced"]

NO_TOKENS: Final[Mapping[str, int]] = {}
"""Control tokens of a vocabulary that is unknown or has none."""

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
    """Return the constraint for `tool_choice` in a turn of this format; None if nothing is enforced.

    "required" and a tool's name allow only calls. "auto" allows any text, and constrains each call to a tool and its
    schema, for strict arguments. In a format without a trigger, "auto" is not constrained, since the beginning of a
    call is unknown.

    A turn may have several calls only if `parallel` is true and every allowed tool is parallel. A tool that cannot be
    called in this format is left out if another tool remains. If no tool remains, "auto" is not constrained.

    Args:
        form: format of the calls.
        tools: tools that may be called.
        tool_choice: "auto", "none", "required" or the name of a tool.
        parallel: True if a turn may have several calls.
        thought: reasoning that may precede the calls; reasoning that the prompt opens must be closed first.
        control_tokens: ids of control tokens, by text. Where the format has a control token, only its id matches.
        stops: control tokens that end a turn; the grammar ends before the first one.

    Raises:
        BadOption: a call is required, and no tool is allowed or can be called; or the format writes a stop token inside
            of a call, or has no text that ends a string.
    """
    allowed = [tool for tool in tools if tool_choice in ("auto", "required", tool.name)]
    if tool_choice == "none" or (tool_choice == "auto" and not (form.trigger and allowed)):
        return None
    if not allowed:
        names = ", ".join(tool.name for tool in tools) or "none"
        raise BadOption(f"tool_choice={tool_choice!r}: no such tool may be called here. Tools: {names}.")
    if _holds(stops, *_texts_before_close(form, thought)):
        raise BadOption(
            f"tool_choice={tool_choice!r}: the chat template writes a stop token inside of a call: give another "
            "template (--template hermes)."
        )
    form = _ended(form, stops)
    signatures = tuple((tool.name, tool.parameters_text) for tool in allowed)
    many = parallel and all(tool.parallel for tool in allowed)
    keyed = _Format.of(form, control_tokens)
    try:
        if tool_choice == "auto":
            return Constraint(ConstraintKind.STRUCTURAL_TAG, _tag(keyed, signatures, many, thought))
        return Constraint(ConstraintKind.GRAMMAR, _grammar(keyed, signatures, many, thought))
    except NoGrammar as error:
        if tool_choice == "auto" and error.requirement is not GrammarRequirement.STRINGS_END:
            return None  # without a grammar, the model receives the error of each call
        raise BadOption(
            f"tool_choice={tool_choice!r}: {error}. Change the tool, or give another template (--template hermes)."
        ) from None


def _ended(form: CallFormat, stops: Collection[str]) -> CallFormat:
    """Return the format with `close` cut at the first stop token, and without a `between` that contains a stop token.

    No text of a turn can follow a stop token.
    """
    close = form.close[: min((at for stop in stops if (at := form.close.find(stop)) >= 0), default=None)]
    between = None if form.between is not None and _holds(stops, form.between) else form.between
    return form if (close, between) == (form.close, form.between) else replace(form, close=close, between=between)


def _texts_before_close(form: CallFormat, thought: ReasoningFormat | None) -> list[str]:
    pieces = [piece.text for piece in form.call if isinstance(piece, LiteralText)]
    return [form.begin, *pieces, *([] if thought is None else [thought.close])]


def _holds(stops: Collection[str], *texts: str) -> bool:
    return any(stop in text for stop in stops for text in texts)


FIRST_MESSAGE: Final = ReasoningFormat("", NEXT_MESSAGE, opened_by_prompt=True)
"""The first message of a turn with channels, before its call."""


def harmony_constraint(
    form: CallFormat,
    tools: Sequence[Tool],
    tool_choice: ToolChoice,
    control_tokens: Mapping[str, int] = NO_TOKENS,
) -> Constraint | None:
    """Return the constraint for `tool_choice`: one message of any text, such as the reasoning, then the call.

    The result is None if nothing is enforced.

    Raises:
        BadOption: a call is required, and no tool is allowed or can be called.
    """
    return constraint(form, tools, tool_choice, parallel=False, thought=FIRST_MESSAGE, control_tokens=control_tokens)


def not_enforced(form: CallFormat, tool: Tool) -> list[str]:
    """Return the requirements of a tool's schema that no grammar of this format enforces, as "keyword of argument".

    Validation of the arguments checks these requirements. Keywords that are not validated either are in
    `modern(tool.parameters).notes`. The list is empty if the format cannot write calls of the tool.
    """
    arguments = ArgumentRules(Rules(NO_TOKENS), form)
    try:
        arguments.of(tool.name, tool.parameters_text)
    except NoGrammar:
        return []  # `schema_faults` and `losses` report that the tool cannot be called
    return arguments.left_out.sentences()


def enforceable(form: CallFormat) -> str | None:
    """Return the reason why no grammar exists for this format; None if one exists.

    Even if the format has a grammar, the arguments of a single tool may have none.
    """
    try:
        _grammar(_Format.of(form, NO_TOKENS), _STRINGS, True, None)
    except NoGrammar as error:
        return str(error)
    return None


_STRINGS: Final[Signatures] = (("f", '{"properties": {"a": {"type": "string"}, "b": {"type": "string"}}}'),)


@dataclass(frozen=True, slots=True)
class _Format:
    """A format and a vocabulary, hashable by content."""

    key: bytes
    form: CallFormat = field(compare=False)
    control_tokens: Mapping[str, int] = field(compare=False)

    @classmethod
    def of(cls, form: CallFormat, control_tokens: Mapping[str, int]) -> Self:
        return cls(orjson.dumps([form, control_tokens]), form, control_tokens)


def _of_callable(make: Callable[[Signatures], str], form: CallFormat, signatures: Signatures) -> str:
    """Return the result of `make` for these tools. If `make` fails, try only the tools that can be called.

    Raises:
        NoGrammar: no tool can be called, or the format has no text that ends a string.
    """
    try:
        return make(signatures)
    except NoGrammar as error:
        if error.requirement is GrammarRequirement.STRINGS_END:
            raise
        kept = tuple(each for each in signatures if _why_left_out(form, *each) is None)
        if not kept:
            raise
    return make(kept)


def _why_left_out(form: CallFormat, name: str, parameters: str) -> NoGrammar | None:
    try:
        ArgumentRules(Rules(NO_TOKENS), form).of(name, parameters)
    except NoGrammar as error:
        return error
    return None


# Grammars are cached, since the turns of all episodes use only a few different ones.
@lru_cache(maxsize=256)
def _grammar(keyed: _Format, signatures: Signatures, many: bool, thought: ReasoningFormat | None) -> str:
    return _of_callable(partial(_grammar_of, keyed, many, thought), keyed.form, signatures)


def _grammar_of(keyed: _Format, many: bool, thought: ReasoningFormat | None, signatures: Signatures) -> str:
    rules, form = Rules(keyed.control_tokens), keyed.form
    calls = f"{rules.written(form.begin)} {_calls(rules, form, signatures, many)}"
    return rules.grammar(calls if thought is None else f"{_thinking(rules, thought)} {calls}")


@lru_cache(maxsize=256)
def _tag(keyed: _Format, signatures: Signatures, many: bool, thought: ReasoningFormat | None) -> str:
    """Return a structural tag: free text in which the trigger begins calls."""
    return _of_callable(partial(_tag_of, keyed, many, thought), keyed.form, signatures)


def _tag_of(keyed: _Format, many: bool, thought: ReasoningFormat | None, signatures: Signatures) -> str:
    rules, form = Rules(keyed.control_tokens), keyed.form
    after_trigger = rules.written(form.begin[len(form.trigger) :])
    grammar = rules.grammar(f"{after_trigger} {_calls(rules, form, signatures, many)}")
    tokens, again = keyed.control_tokens, many and form.between is not None
    begun: Format = {"type": "grammar", "grammar": grammar}
    if not again:
        begun = {"type": "sequence", "elements": [begun, _anything_but(form.trigger, tokens)]}
    turn = _dispatch({form.trigger: begun}, tokens, again=again)
    if thought is not None and thought.opened_by_prompt:
        # A trigger inside reasoning does not begin a call, and a turn may consist only of reasoning.
        turn = _dispatch({thought.close.strip(): turn}, tokens, again=False)
    elif thought is not None and (opened := _mark_of(rules, thought.open)) and _alike(opened, form.trigger, tokens):
        # A trigger inside reasoning that the model opens does not begin a call either. After the reasoning, the turn
        # continues like a turn without reasoning.
        close = _mark_of(rules, thought.close)
        thinking = _dispatch({close: {"type": "const_string", "value": ""} if again else turn}, tokens, again=False)
        turn = _dispatch({form.trigger: begun, opened: thinking}, tokens, again=again)
    return json.dumps({"type": "structural_tag", "format": turn}, ensure_ascii=False)


Format: TypeAlias = dict[str, Any]
"""A part of a structural tag."""


def _mark_of(rules: Rules, mark: str) -> str:
    """Return the mark to search for: the control token at the start of `mark`, or all of its text."""
    return rules.control_token_of(mark.strip()) or mark.strip()


def _alike(mark: str, trigger: str, tokens: Mapping[str, int]) -> bool:
    """Return True if both marks are control tokens, or both are text and neither begins with the other.

    One part of a structural tag can wait only for marks of one kind.
    """
    return (mark in tokens) == (trigger in tokens) and not mark.startswith(trigger) and not trigger.startswith(mark)


def _dispatch(parts: Mapping[str, Format], tokens: Mapping[str, int], *, again: bool) -> Format:
    """Return a format: free text up to a mark in `parts`, then the part of the mark; repeated if `again` is true."""
    kind = "token_dispatch" if set(parts) <= set(tokens) else "dispatch"
    return {"type": kind, "rules": [[tokens.get(mark, mark), part] for mark, part in parts.items()], "loop": again}


def _anything_but(mark: str, tokens: Mapping[str, int]) -> Format:
    if mark in tokens:
        return {"type": "any_tokens", "exclude_tokens": [tokens[mark]]}
    return {"type": "any_text", "excludes": [mark]}


MAX_SPACE: Final = 4
"""Maximum number of spaces and line breaks between reasoning and calls. Without a limit, a model could fill a turn with
white space.
"""


def _thinking(rules: Rules, thought: ReasoningFormat) -> str:
    """Return an expression for reasoning before the calls. Reasoning that the prompt does not open is optional."""
    closed = _thought(rules, thought.close)
    if thought.opened_by_prompt:
        return closed
    opened = rules.written(thought.open.strip())
    return rules.add("thinking", either([f"{opened} {closed}", NOTHING])) if thought.open else NOTHING


def _thought(rules: Rules, close: str) -> str:
    """Return an expression for the rest of the reasoning, its close and a little white space."""
    close = close.strip()
    thought = rules.add("thought", text_without([rules.control_token_of(close) or close]))
    return f"{thought} {rules.written(close)} [ \\n]{{0,{MAX_SPACE}}}"


def _calls(rules: Rules, form: CallFormat, signatures: Signatures, many: bool) -> str:
    """Return an expression for the rest of a section of calls, after its opening text."""
    arguments = ArgumentRules(rules, form)
    call = rules.add("call", either(_call(rules, form, arguments, *signature) for signature in signatures))
    more = f" ({rules.written(form.between)} {call})*" if many and form.between is not None else ""
    return f"{call}{more} {rules.written(form.close)}"


def _call(rules: Rules, form: CallFormat, arguments: ArgumentRules, name: str, parameters: str) -> str:
    written = arguments.of(name, parameters)
    return " ".join(written if piece is Slot.ARGUMENTS else _piece(rules, form, piece, name) for piece in form.call)


MAX_ID_LENGTH: Final = 32
"""Maximum length of a generated id in an enforced call; each character takes 10 ms to compile."""


def _piece(rules: Rules, form: CallFormat, piece: Piece, name: str) -> str:
    match piece:
        case LiteralText(text):
            return rules.written(text)
        case Slot.NAME:
            return literal(name)
        case Slot.INDEX:
            # If a template numbers the calls of the whole conversation, a model continues the count.
            return "[0-9]{1,4}"
        case _:
            pieces = form.id_pieces or ()
            return " ".join(_piece(rules, form, each, name) for each in pieces) or form.ids.pattern(MAX_ID_LENGTH)
