"""The hermes form of tool calls: a JSON object between <tool_call> tags, as Hermes and Qwen2.5 models learnt it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from runner.messages import ToolCall
from runner.parsing.base import CallParameters, Signatures, ToolFormat
from runner.parsing.grammar import JSON, GrammarWriter, literal

__all__ = ["Hermes"]

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"

_SPACE: Final = re.compile(r"\s*")


class Hermes(ToolFormat):
    """`<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`, any number of them, text beside them."""

    name: ClassVar[str] = "hermes"

    def render(self, calls: Sequence[ToolCall]) -> str:
        bodies = (f'{{"name": "{call.name}", "arguments": {_dumps(call.arguments)}}}' for call in calls)
        return "\n".join(f"{OPEN}\n{body}\n{CLOSE}" for body in bodies)

    def _parse(self, text: str, parameters: CallParameters | None) -> tuple[str, list[ToolCall]]:
        content: list[str] = []
        calls: list[ToolCall] = []
        end = 0
        while (start := text.find(OPEN, end)) >= 0:
            content.append(text[end:start])
            call, end = _read_call(text, start + len(OPEN))
            calls.append(call)
        if not calls:
            return text, []
        content.append(text[end:])
        return "\n".join(stripped for part in content if (stripped := part.strip())), calls

    def _grammar(self, signatures: Signatures, many: bool) -> str:
        writer = GrammarWriter(JSON)
        closing = literal("}\n" + CLOSE)
        calls = []
        for name, schema in signatures:
            opening = literal(f'{OPEN}\n{{"name": "{name}", "arguments": ')
            calls.append(f"{opening} {writer.arguments_object(json.loads(schema))} {closing}")
        call = writer.rule("call", " | ".join(calls))
        return writer.finish(f"{call} ({literal(chr(10))} {call})*" if many else call)


def _read_call(text: str, start: int) -> tuple[ToolCall, int]:
    """The call that was opened right before `start`, and where the text goes on after it."""
    close = text.find(CLOSE, start)
    end = len(text) if close < 0 else close
    after = min(len(text), end + len(CLOSE))
    try:
        try:
            value = _DECODER.decode(text[start:end])
        except json.JSONDecodeError as error:
            if close < 0 or not error.msg.startswith("Unterminated string"):
                raise
            # The closing tag may stand in a string: then the JSON decides where the call ends.
            value, end = _DECODER.raw_decode(text, _SPACE.match(text, start).end())  # type: ignore[union-attr]  # it matches ""
            close = text.find(CLOSE, end)
    except json.JSONDecodeError as error:
        return _malformed(f"{error.msg} at character {error.pos} of the JSON"), after
    except (ValueError, RecursionError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        return _malformed(what), after
    if close < 0 or text[end:close].strip():
        return _malformed(f"{CLOSE} is missing after the JSON object"), after
    return _call(value), close + len(CLOSE)


def _call(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _malformed('it must be a JSON object with "name" and "arguments"')
    name, arguments = value["name"], value.get("arguments")
    if isinstance(arguments, str) and arguments.strip():  # encoded twice, as OpenAI's own messages have it
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            return _malformed('"arguments" is a string that is no JSON object', name)
    if arguments is None or arguments == "":
        arguments = {}
    if not isinstance(arguments, dict):
        return _malformed('"arguments" must be a JSON object', name)
    return ToolCall("", name, arguments)


def _malformed(error: str, name: str = "") -> ToolCall:
    return ToolCall("", name, error=error)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


# The standard library's decoder, since orjson turns integers past 64 bits into floats.
_DECODER: Final = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant)
