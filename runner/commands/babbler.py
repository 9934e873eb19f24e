"""What plays the model in `deltarunner check`: it calls every tool with arguments that fit, and says something."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from runner.engines.script import ModelCall, Reply
from runner.messages import ToolCall
from runner.schema import JsonSchema
from runner.tools import Tool

__all__ = ["TURNS", "Babbler"]

TURNS = 8
"""After so many turns it has said enough."""


class Babbler:
    """Plays the model: calls the tools in turn with arguments that fit, and says something at the end."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = tools

    def __call__(self, call: ModelCall) -> Reply:
        rng = call.rng
        if self._tools and call.turn < TURNS - 1:
            # Every tool has its turn, from episode to episode another one first.
            tool = self._tools[(call.turn + random.Random(call.episode).randrange(len(self._tools))) % len(self._tools)]
            return Reply(calls=(ToolCall("", tool.name, _arguments(tool.parameters, rng)),))
        return Reply(rng.choice(("42", "7", "yes", "I do not know.", "hello")))


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
    match schema.get("type"):
        case "integer":
            return rng.randint(schema.get("minimum", 1), schema.get("maximum", 9))
        case "number":
            return round(rng.uniform(schema.get("minimum", 0), schema.get("maximum", 9)), 2)
        case "boolean":
            return rng.random() < 0.5
        case "array":
            return [_value(schema.get("items", {"type": "string"}), definitions, rng)]
        case "object":
            return _arguments({**schema, "$defs": definitions}, rng)
        case "null":
            return None
    return rng.choice(("a", "word", "2"))
