"""The proof that a template does not look back: earlier messages do not change its output after the last turn."""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import nodes

from runner.tokens.lookback.interpreter import Interpreter
from runner.tokens.lookback.join import Symbols
from runner.tokens.lookback.operators import LastTurnText
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
from runner.tokens.template import Renderer, ToolSchema, environment
from runner.tokens.turn_shape import Arrival, TurnShape

__all__ = ["Lookback", "Proofs"]


class Lookback(enum.StrEnum):
    """The result of the analysis of the text after a turn."""

    NONE = "none"  # earlier messages do not change the text
    REFUSES = "refuses"  # earlier messages do not change the text, but some of them make the template raise
    POSSIBLE = "possible"  # nothing is proven, so earlier messages may change the text


@dataclass(frozen=True, slots=True)
class Proofs:
    """Proofs about one template. Each proof takes some milliseconds, and its result is not cached."""

    renderer: Renderer
    """The template with fixed options and clock."""

    def past(self, shape: TurnShape, tools: Sequence[ToolSchema], *, asking: bool = True) -> Lookback:
        """Return the effect of messages between the first user message and the turn on the text after the turn.

        `asking` is True if the text includes the generation prompt.
        """
        symbols = Symbols()
        messages = [_last_turn(self.renderer, shape, symbols), *_new_messages(shape.new, symbols)]
        output, refuses = self._output(shape, messages, tools, symbols, asking=asking)
        if output is None or not output.is_marked or not all(map(is_independent, output.parts[1:])):
            return Lookback.POSSIBLE
        return Lookback.REFUSES if refuses else Lookback.NONE

    def words_matter(self, shape: TurnShape, tools: Sequence[ToolSchema]) -> bool:
        """Return True if the turn's words may change the text after them, or after the first result of its calls."""
        # A call without arguments has no text to mark, so nothing can be proven about the text after it.
        return shape.bare or not self._same_after_words(shape, tools, given=False)

    def past_matters_to_words(self, shape: TurnShape, tools: Sequence[ToolSchema]) -> bool:
        """Return True if, for some words of the turn, earlier messages may change the text after the words.

        `past` proves the same only for the sentinel, which is never empty or blank.
        """
        return not self._same_after_words(shape, tools, given=True)

    def _same_after_words(self, shape: TurnShape, tools: Sequence[ToolSchema], *, given: bool) -> bool:
        """Return True if the text after the turn's words does not depend on earlier messages, nor on the words.

        `given` is True to allow that the text depends on the words. The proof is like the proof in `past`, but with any
        words that the shape allows in place of the sentinel.
        """
        places = ["argument", "first"] if shape.calls and shape.new else ["content"]
        return not (shape.calls and not shape.new) and all(
            self._same_after(place, shape, tools, given=given) for place in places
        )

    def _same_after(self, place: str, shape: TurnShape, tools: Sequence[ToolSchema], *, given: bool) -> bool:
        """Return True if the text is fixed after a place: the turn's content, its last argument, or the first result.

        The names of these places are "content", "argument" and "first".
        """
        symbols, as_text = Symbols(), self.renderer.text_arguments
        new = _new_messages(shape.new, symbols)

        def said(*what: Any, text: bool = True, nonempty: bool = True) -> Value:
            if given:
                return replace(symbols.of("said", *what), text=text, nonempty=nonempty)
            return Unknown(text=text, nonempty=nonempty)

        end = Text((END,), (place,) if given or place == "first" else None)
        calls = [
            _call(
                said("id", number),
                said("name", number, nonempty=False),
                # The arguments of a call without arguments are an empty object, or the text "{}".
                said("arguments", number, text=as_text, nonempty=as_text or not shape.bare),
            )
            for number in range(shape.calls)
        ]
        content = said("text")
        match place:
            case "content":
                # Without `given`, the words may also be the sentinel, which is not empty even if the content is.
                words = LastTurnText(end, shape.text if given or shape.text else None)
                content = words.text
            case "argument":
                words = LastTurnText(end, True if as_text else None, typed=as_text)
                calls[-1]["function"]["arguments"] = end if as_text else LastArguments(said("argument"), end)
            case _:
                words = LastTurnText(end, not shape.new[0].empty)
                new[0] = {**new[0], "content": end}
        turn = _turn(self.renderer, shape, content, said("reasoning"), calls)
        output, _ = self._output(shape, [turn, *new], tools, symbols, words=words)
        # If the words are given, the text after them is also compared with the render of these words.
        if output is None or not (output.is_marked if given else output.has_end):
            return False
        return all(map(is_independent, output.parts[1:]))

    def _output(
        self,
        shape: TurnShape,
        last_items: Sequence[Value],
        tools: Sequence[ToolSchema],
        symbols: Symbols,
        *,
        asking: bool = True,
        words: LastTurnText | None = None,
    ) -> tuple[Text | None, bool]:
        """Return the output, and True if earlier messages may make the template raise.

        The output is None if the template raises or has an operation that is not modelled, or if its output is not a
        `Text`.
        """
        roles = ["system", "user"] if shape.system else ["user"]
        first_items = tuple({"role": role, "content": _filled(symbols, role)} for role in roles)
        start = Position(UnknownCount(0), len(first_items))
        names = {
            **self.renderer.context,
            "messages": GappedList(tuple(last_items), start, first_items),
            "tools": self.renderer.shown(tools) or None,
            "add_generation_prompt": asking,
        }
        null_content = self.renderer.null_content
        interpreter = Interpreter(environment(), names, symbols, null_content=null_content, words=words)
        try:
            output = interpreter.output(_parsed(self.renderer.template.text))
        except Exception:  # any unknown operation or error of a template means that nothing is proven
            return None, False
        return (output if isinstance(output, Text) else None), interpreter.refuses


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> nodes.Template:
    return environment().parse(text)


def _last_turn(renderer: Renderer, shape: TurnShape, symbols: Symbols) -> dict[str, Value]:
    """Return the last turn with the end of its words marked, as a bridge renders it."""
    reasoning = _filled(symbols, "reasoning")
    if not shape.calls:
        return _turn(renderer, shape, Text((END,), ("content",)), reasoning)
    as_text = renderer.text_arguments
    calls = []
    for number in range(shape.calls):
        # The arguments of a call without arguments are an empty object, or the text "{}".
        arguments: Value = replace(_filled(symbols, "arguments", number), text=as_text, nonempty=as_text)
        if number == shape.calls - 1:
            arguments = Text((END, '"}'), ("arguments",)) if as_text else LastArguments(_filled(symbols, "argument"))
        name = symbols.of("name", number, text=True)
        calls.append(_call(_filled(symbols, "id", number), name, arguments))
    return _turn(renderer, shape, _filled(symbols, "text"), reasoning, calls)


def _turn(
    renderer: Renderer, shape: TurnShape, content: Value, reasoning: Value, calls: Sequence[Value] = ()
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
    """Return the new messages, with a symbol for each text."""
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
    """Return a symbol for a non-empty text."""
    return replace(symbols.of("given", *what), text=True, nonempty=True)
