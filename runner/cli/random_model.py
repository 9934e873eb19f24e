"""What plays the model in `deltarunner check`: it calls every tool with arguments that fit, and says something."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runner.engines.scripted.script import ModelCall, Reply
from runner.messages import ToolCall
from runner.tools.schema import JsonSchema
from runner.tools.tool import Tool

__all__ = ["TURNS", "RandomModel"]

TURNS = 8
"""After so many turns it has said enough."""


class RandomModel:
    """Plays the model: calls the tools in turn with arguments that fit, and says something at the end.

    What it says follows from the task, the agent and the turn alone: episodes of a group are told the same.

    Args:
        tools_of: what the agent that is asked may call now.
        together: call two asynchronous tools in one turn.
    """

    def __init__(self, tools_of: Callable[[ModelCall], Sequence[Tool]], *, together: bool = False) -> None:
        self.known: dict[str, Tool] = {}
        """The tools that it could have called, by name."""
        self._tools_of = tools_of
        self._together = together

    def __call__(self, call: ModelCall) -> Reply:
        task = call.episode.rpartition("#")[0]
        rng = random.Random(f"{task} {call.agent} {call.turn}")
        tools = self._tools_of(call)
        self.known |= {tool.name: tool for tool in tools if tool.name not in self.known}
        if not tools or call.turn >= TURNS - 1:
            return Reply(rng.choice(("42", "7", "yes", "I do not know.", "hello")))
        # Every tool has its turn, from task to task another one first.
        first = call.turn + random.Random(task).randrange(len(tools))
        chosen = [tools[first % len(tools)]]
        beside = [tool for tool in tools if tool.is_async and tool.parallel] if self._together else []
        if beside:
            one = first - call.turn + call.turn // 2  # with itself at one turn, with the next tool at the other
            chosen = [beside[number % len(beside)] for number in (one, one + call.turn % 2)]
        return Reply(calls=tuple(ToolCall("", tool.name, _arguments(tool.parameters, rng)) for tool in chosen))


def _arguments(schema: JsonSchema, rng: random.Random) -> dict[str, Any]:
    definitions, properties = schema.get("$defs", {}), schema.get("properties", {})
    needed = [name for name in schema.get("required", ()) if name in properties]
    return {name: _value(properties[name], definitions, rng) for name in needed}


def _value(schema: Mapping[str, Any], definitions: Mapping[str, Any], rng: random.Random) -> Any:
    """A value that fits the schema, or nearly: lengths and patterns are not looked at."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return _value(schema[key][0], definitions, rng)
    kind = schema.get("type")
    match kind[0] if isinstance(kind, list) else kind:
        case "integer":
            return rng.randint(*map(int, _bounds(schema, 1, 9)))
        case "number":
            return round(rng.uniform(*_bounds(schema, 0, 9)), 2)
        case "boolean":
            return rng.random() < 0.5
        case "array":
            return [_value(schema.get("items", {"type": "string"}), definitions, rng)]
        case "object":
            return _arguments({**schema, "$defs": definitions}, rng)
        case "null":
            return None
    return rng.choice(("a", "word", "2"))


def _bounds(schema: Mapping[str, Any], least: float, most: float) -> tuple[float, float]:
    """The schema's where it has them, and else near the one that it has."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is None:
        low = least if high is None else min(least, high)
    return low, max(low, most) if high is None else high
