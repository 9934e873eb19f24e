"""Call ids for a history that is rendered from its first message on, in the form that the template requires."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence
from typing import Final

from runner.messages import AnsweredCalls, Message, ToolCallMessage
from runner.parsing.call_writer import id_for
from runner.parsing.turn_format import IdStyle, LiteralText, Slot, TurnFormat

__all__ = ["with_fitting_ids"]

_FIRST_FOREIGN_INDEX: Final = 10_000
"""First number for new ids of calls from other models. Calls of this model have lower numbers, so ids stay unique."""

_MADE: Final = re.compile(r"call_\d+")


def with_fitting_ids(
    form: TurnFormat, messages: Sequence[Message], own: Collection[str] = (), *, by_turn: bool = False
) -> list[Message]:
    """Return the messages with call ids that fit the template, both on calls and on their results.

    A client may send ids from other models. A template may refuse such ids, or show them in place of the tool's name.

    Args:
        form: turn format of the template.
        messages: the complete history.
        own: ids that turns of this model contain; they are kept.
        by_turn: True to number all calls by their position in the turn, for templates that show this number.
    """
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    taken = set() if by_turn else {call["id"] for call in calls if _stays(form, call, own)}
    answered, fitting = AnsweredCalls(), list[Message]()
    for index, message in enumerate(messages):
        answers = answered.by(index, message)
        if message.get("tool_calls"):
            made = message["tool_calls"]
            if by_turn:
                fits = [_numbered(form, call, number) for number, call in enumerate(made)]
            else:
                fits = [_fitting(form, call, own, taken) for call in made]
            message = {**message, "tool_calls": fits}
        elif answers is not None:
            message = {**message, "tool_call_id": fitting[answers.message]["tool_calls"][answers.call]["id"]}
        fitting.append(message)
    return fitting


def _numbered(form: TurnFormat, call: ToolCallMessage, number: int) -> ToolCallMessage:
    made = form.ids.format(number=number) if form.calls is None else id_for(form.calls, _name(call), number)
    return {**call, "id": made}


def _fitting(form: TurnFormat, call: ToolCallMessage, own: Collection[str], taken: set[str]) -> ToolCallMessage:
    if _stays(form, call, own):
        return call
    named = form.calls is not None and form.calls.id_pieces is not None
    for number in itertools.count(0 if named else _FIRST_FOREIGN_INDEX):
        numbered = _numbered(form, call, number)
        # In ids with the tool's name, a model counts the calls of all tools together, so the number must be unique too.
        if numbered["id"] not in taken and not (named and any(each.endswith(f":{number}") for each in taken)):
            taken.add(numbered["id"])
            return numbered
    raise AssertionError("unreachable: itertools.count() does not end")


def _stays(form: TurnFormat, call: ToolCallMessage, own: Collection[str]) -> bool:
    if call["id"] in own:
        return True
    if form.calls is not None and form.calls.id_pieces is not None:
        parts = {Slot.NAME: re.escape(_name(call)), Slot.INDEX: r"\d+"}
        pattern = "".join(
            re.escape(piece.text) if isinstance(piece, LiteralText) else parts[piece] for piece in form.calls.id_pieces
        )
        return re.fullmatch(pattern, call["id"]) is not None
    style = form.ids if form.calls is None else form.calls.ids
    return bool(_MADE.fullmatch(call["id"]) if style is IdStyle.ANY else re.fullmatch(style.pattern(), call["id"]))


def _name(call: ToolCallMessage) -> str:
    return call["function"]["name"]
