"""The proof that a template does not look back: what it writes behind the last turn, after a past of any kind."""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import nodes

from runner.tokens.lookback.interpreter import Interpreter
from runner.tokens.lookback.join import Symbols
from runner.tokens.lookback.values import (
    END,
    GappedList,
    LastArguments,
    Position,
    Symbol,
    Text,
    Unknown,
    UnknownCount,
    Value,
    is_independent,
)
from runner.tokens.shape import Arrival, Shape
from runner.tokens.template import Renderer, ToolSchema, environment

__all__ = ["Lookback", "Proofs"]


class Lookback(enum.StrEnum):
    """What a template's source says of the text behind a turn."""

    NONE = "none"  # no past changes it
    REFUSES = "refuses"  # no past changes it, but some make the template raise
    POSSIBLE = "possible"  # not proven


@dataclass(frozen=True, slots=True)
class Proofs:
    """What can be proven of one template. Work that takes some milliseconds each time; the answers are not kept."""

    renderer: Renderer
    """The template, with its options and its clock fixed."""

    def past(self, shape: Shape, tools: Sequence[ToolSchema], *, asking: bool = True) -> Lookback:
        """Whether what came between the first question and the turn can change the text behind the turn's words."""
        symbols = Symbols()
        messages = [_last_turn(self.renderer, shape, symbols), *_new_messages(shape.new, symbols)]
        output, refuses = self._output(shape, messages, tools, symbols, asking=asking)
        if output is None or not output.is_marked or not all(map(is_independent, output.parts[1:])):
            return Lookback.POSSIBLE
        return Lookback.REFUSES if refuses else Lookback.NONE

    def words_matter(self, shape: Shape, tools: Sequence[ToolSchema]) -> bool:
        """Whether the words of the turn may change the text behind them, or behind the first answer to its calls."""
        # The same proof with other words in the place of the sentinel: any at all.
        symbols = Symbols()
        new = _new_messages(shape.new, symbols)
        unknown = Unknown(text=True, nonempty=True)
        if not shape.calls:
            words = Text((END,))
            turn = _turn(self.renderer, shape, words, unknown)
        elif shape.new and not shape.new[0].empty:
            # What is said in a call is unknown, and stands before the answer, whose words are followed instead.
            words = Text((END,), ("first",))
            call = _call(unknown, unknown, Unknown(nonempty=True))
            turn = _turn(self.renderer, shape, unknown, unknown, [call] * shape.calls)
            new[0] = {**new[0], "content": words}
        else:
            return True
        output, _ = self._output(shape, [turn, *new], tools, symbols, words=words)
        return output is None or not output.has_end or not all(map(is_independent, output.parts[1:]))

    def _output(
        self,
        shape: Shape,
        last_items: Sequence[Value],
        tools: Sequence[ToolSchema],
        symbols: Symbols,
        *,
        asking: bool = True,
        words: Text | None = None,
    ) -> tuple[Text | None, bool]:
        """What the template writes, as far as the turn's words end in it, and whether the past may make it raise."""
        roles = ["system", "user"] if shape.system else ["user"]
        first_items = tuple({"role": role, "content": _filled(symbols, role)} for role in roles)
        start = Position(UnknownCount(0), len(first_items))
        names = {
            **self.renderer.context,
            "messages": GappedList(tuple(last_items), start, first_items),
            "tools": [*tools] or None,
            "add_generation_prompt": asking,
        }
        null_content = self.renderer.null_content
        interpreter = Interpreter(environment(), names, symbols, null_content=null_content, words=words)
        try:
            output = interpreter.output(_parsed(self.renderer.template.text))
        except Exception:  # whatever a template does that is not followed, or raises: then nothing is proven
            return None, False
        return (output if isinstance(output, Text) else None), interpreter.refuses


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> nodes.Template:
    return environment().parse(text)


def _last_turn(renderer: Renderer, shape: Shape, symbols: Symbols) -> dict[str, Value]:
    """The last turn with the end of its words marked, as a bridge renders it."""
    reasoning = _filled(symbols, "reasoning")
    if not shape.calls:
        return _turn(renderer, shape, Text((END,), ("content",)), reasoning)
    as_text = renderer.text_arguments
    calls = []
    for number in range(shape.calls):
        # A call may have no arguments at all, and then an object is empty; as text it is "{}".
        arguments: Value = replace(_filled(symbols, "arguments", number), text=as_text, nonempty=as_text)
        if number == shape.calls - 1:
            arguments = Text((END, '"}'), ("arguments",)) if as_text else LastArguments(_filled(symbols, "argument"))
        calls.append(_call(_filled(symbols, "id", number), _filled(symbols, "name", number), arguments))
    return _turn(renderer, shape, _filled(symbols, "text"), reasoning, calls)


def _turn(
    renderer: Renderer, shape: Shape, content: Value, reasoning: Value, calls: Sequence[Value] = ()
) -> dict[str, Value]:
    if calls and not shape.text:
        content = None if renderer.null_content else ""
    turn = {"role": "assistant", "content": content}
    if shape.reasoning:
        turn["reasoning_content"] = reasoning
    if calls:
        turn["tool_calls"] = [*calls]
    return turn


def _call(call_id: Value, name: Value, arguments: Value) -> dict[str, Value]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _new_messages(new: Sequence[Arrival], symbols: Symbols) -> list[dict[str, Value]]:
    """The new messages: what each says is a symbol."""
    messages: list[dict[str, Value]] = []
    for number, each in enumerate(new):
        message: dict[str, Value] = {"role": each.role, "content": "" if each.empty else _filled(symbols, number)}
        if each.named:
            message["name"] = symbols.of("of whom", number, text=True)
        if each.role == "tool":
            message["tool_call_id"] = _filled(symbols, "answers", number)
        messages.append(message)
    return messages


def _filled(symbols: Symbols, *what: Any) -> Symbol:
    """A symbol for a text that is not empty."""
    return replace(symbols.of("given", *what), text=True, nonempty=True)
