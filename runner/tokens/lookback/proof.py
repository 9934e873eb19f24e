"""The proof that a template does not look back: its source is followed with a past of which nothing is known.

What comes behind the words of the last turn is what a bridge writes. The template is rendered with messages of which
those between the first question and the last turn are unknown in number, order and content. Wherever they decide what
is done, both branches are followed, and what the two leave differently is unknown from then on. If nothing unknown
stands behind the words in the end, no past changes it. A template that is not followed to the end is not proven.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import nodes

from runner.tokens.lookback.interpreter import Interpreter
from runner.tokens.lookback.merging import Symbols
from runner.tokens.lookback.values import END, Arguments, Given, Past, Root, Text, Unknown, Value, is_given
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
        turn = _turn(self.renderer, shape, symbols)
        output, refuses = self._output(shape, [turn, *_arrived(shape.new, symbols)], tools, symbols, asking=asking)
        if output is None or not output.is_marked or not all(map(is_given, output.parts[1:])):
            return Lookback.POSSIBLE
        return Lookback.REFUSES if refuses else Lookback.NONE

    def words_matter(self, shape: Shape, tools: Sequence[ToolSchema]) -> bool:
        """Whether the words of the turn may change the text behind them, or behind the first answer to its calls."""
        symbols = Symbols()
        new = _arrived(shape.new, symbols)
        if not shape.calls:
            words = Text((END,))
            turn = {"role": "assistant", "content": words, **_thought(shape, Unknown(text=True, filled=True))}
        elif shape.new and not shape.new[0].empty:
            words = Text((END,), ("first",))
            turn = _unknown_calls(self.renderer, shape)
            new[0] = {**new[0], "content": words}
        else:
            return True
        output, _ = self._output(shape, [turn, *new], tools, symbols, words=words)
        return output is None or not output.has_end or not all(map(is_given, output.parts[1:]))

    def _output(
        self,
        shape: Shape,
        items: Sequence[Value],
        tools: Sequence[ToolSchema],
        symbols: Symbols,
        *,
        asking: bool = True,
        words: Text | None = None,
    ) -> tuple[Text | None, bool]:
        """What the template writes, as far as the turn's words end in it, and whether the past may make it raise."""
        heads = [{"role": role, "content": _filled(symbols, role)} for role in ("system", "user")[not shape.system :]]
        names = {
            **self.renderer.context,
            "messages": Past(tuple(items), Root(0), len(heads), tuple(heads)),
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


def _turn(renderer: Renderer, shape: Shape, symbols: Symbols) -> dict[str, Value]:
    """The last turn with the end of its words marked, as a bridge renders it."""
    thought = _thought(shape, _filled(symbols, "reasoning"))
    if not shape.calls:
        return {"role": "assistant", "content": Text((END,), ("content",)), **thought}
    last = shape.calls - 1
    calls = [
        _call(number, _arguments(renderer, number, number == last, symbols), symbols) for number in range(last + 1)
    ]
    return {
        "role": "assistant",
        "content": _filled(symbols, "text") if shape.text else None if renderer.null_content else "",
        **thought,
        "tool_calls": calls,
    }


def _unknown_calls(renderer: Renderer, shape: Shape) -> dict[str, Value]:
    unknown = Unknown(text=True, filled=True)
    call = {"id": unknown, "type": "function", "function": {"name": unknown, "arguments": Unknown(filled=True)}}
    content = unknown if shape.text else None if renderer.null_content else ""
    return {"role": "assistant", "content": content, **_thought(shape, unknown), "tool_calls": [call] * shape.calls}


def _thought(shape: Shape, thought: Value) -> dict[str, Value]:
    return {"reasoning_content": thought} if shape.reasoning else {}


def _arguments(renderer: Renderer, number: int, last: bool, symbols: Symbols) -> Value:
    if last:
        return Text((END, '"}'), ("arguments",)) if renderer.text_arguments else Arguments(_filled(symbols, "argument"))
    # A call may have no arguments at all, and then an object is empty; as text it is "{}".
    return replace(_filled(symbols, "arguments", number), text=renderer.text_arguments, filled=renderer.text_arguments)


def _call(number: int, arguments: Value, symbols: Symbols) -> dict[str, Value]:
    name = _filled(symbols, "name", number)
    function = {"name": name, "arguments": arguments}
    return {"id": _filled(symbols, "id", number), "type": "function", "function": function}


def _arrived(new: Sequence[Arrival], symbols: Symbols) -> list[dict[str, Value]]:
    """The new messages: what each says is given, and no more is known of it."""
    messages: list[dict[str, Value]] = []
    for number, each in enumerate(new):
        message: dict[str, Value] = {"role": each.role, "content": "" if each.empty else _filled(symbols, number)}
        if each.named:
            message["name"] = symbols.of("of whom", number, text=True)
        if each.role == "tool":
            message["tool_call_id"] = _filled(symbols, "answers", number)
        messages.append(message)
    return messages


def _filled(symbols: Symbols, *what: Any) -> Given:
    return replace(symbols.of("given", *what), text=True, filled=True)
