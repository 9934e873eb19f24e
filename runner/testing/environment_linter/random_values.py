"""Random values that fit a JSON schema or a pattern, for the random model of the environment linter."""

from __future__ import annotations

import importlib
import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from runner.engines.scripted.script import ModelCall, Reply
from runner.messages import ToolCall
from runner.options import ConstraintKind
from runner.parsing.ebnf import literal
from runner.parsing.string_rules import FORMATS
from runner.tools.ecma_patterns import BadPattern, python_pattern
from runner.tools.schema_shapes import SchemaShapes, shapes_for
from runner.tools.tool import Tool
from runner.tools.value_shapes import Conjunction, ValueShape

__all__ = ["MAX_TURNS", "RandomModel", "random_arguments", "random_text", "random_value"]


MAX_TRIES: Final = 60
"""Maximum number of attempts to draw a value that passes the validator, which checks more than the shape."""

MAX_DEPTH: Final = 6
"""Depth of nesting beyond which optional parts of a value are left out."""

WORDS: Final = ("a", "word", "2")
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"


def random_value(schema: Any, rng: random.Random) -> Any:
    """Return a value that fits a schema: the last attempt if all fail, and None if no value can fit."""
    shapes = shapes_for(schema)
    return _fitting(_Drawing(shapes, rng), shapes.of(shapes.whole), shapes.whole)


def random_arguments(parameters: Any, rng: random.Random) -> dict[str, Any]:
    """Return required arguments that fit a tool's schema: the last attempt if all fail, and {} if no value can fit."""
    shapes = shapes_for(parameters)
    drawn: dict[str, Any] = _fitting(_Drawing(shapes, rng), shapes.arguments(), shapes.whole) or {}
    return drawn


def random_text(pattern: str, rng: random.Random) -> str:
    """A text that contains a match of a pattern: the last attempt if all fail; a word if the pattern is invalid."""
    try:
        compiled = python_pattern(pattern)
        parsed = importlib.import_module("re._parser").parse(compiled.pattern)
    except BadPattern:
        return rng.choice(WORDS)
    for _ in range(MAX_TRIES):
        text = _sequence(parsed, rng)
        if compiled.search(text):
            return text
    return text


def _fitting(drawing: _Drawing, shapes: Sequence[ValueShape], whole: Conjunction) -> Any:
    value = None
    for _ in range(MAX_TRIES if shapes else 0):
        value = drawing.shape(drawing.rng.choice(shapes), 0)
        if drawing.shapes.fits(value, whole):
            return value
    return value


class _Drawing:
    """A source of random values for one schema."""

    def __init__(self, shapes: SchemaShapes, rng: random.Random) -> None:
        self.shapes = shapes
        self.rng = rng

    def value(self, conjunction: Conjunction, depth: int) -> Any:
        shapes: Sequence[ValueShape] = self.shapes.of(conjunction)
        if not shapes:
            return None
        if depth > MAX_DEPTH:  # take the smallest shape, so that a recursive value ends
            shapes = sorted(shapes, key=lambda shape: (len(shape.required) + shape.least, shape.kind == "object"))[:1]
        if not self.shapes.key(conjunction):
            return self.rng.choice(WORDS)
        return self.shape(self.rng.choice(shapes), depth)

    def shape(self, shape: ValueShape, depth: int) -> Any:
        if shape.values is not None:
            return self.rng.choice(shape.values)
        match shape.kind:
            case "string":
                return self._string(shape)
            case "number":
                return self._number(shape)
            case "boolean":
                return self.rng.random() < 0.5
            case "null":
                return None
            case "array":
                return self._array(shape, depth)
            case _:
                return self._object(shape, depth)

    def _string(self, shape: ValueShape) -> str:
        patterns = [*shape.patterns, *(FORMATS[each] for each in shape.formats if each in FORMATS)]
        if patterns:
            return random_text(self.rng.choice(patterns), self.rng)
        word = self.rng.choice(WORDS)
        if len(word) < shape.least:
            word += "".join(self.rng.choice(LETTERS) for _ in range(shape.least - len(word)))
        return word if shape.most is None else word[: max(shape.most, shape.least)]

    def _number(self, shape: ValueShape) -> float:
        low, high = shape.numbers.low, shape.numbers.high
        if low is None:
            low = 1 if high is None else min(1, high)
        if high is None:
            high = max(low, 9) if low < 9 else low + 9
        if shape.integer:
            least, greatest = shape.numbers.least, shape.numbers.greatest
            first = math.ceil(low) if least is None else least
            last = math.floor(high) if greatest is None else greatest
            return self.rng.randint(first, max(first, last))
        return round(self.rng.uniform(low, high), 2)

    def _array(self, shape: ValueShape, depth: int) -> list[Any]:
        most = shape.least + 1 if shape.most is None else shape.most
        length = min(max(shape.least, 1 if depth <= MAX_DEPTH else 0), max(most, shape.least))
        items = []
        for index in range(length):
            if not self.shapes.is_satisfiable(shape.item(index)):
                break
            items.append(self.value(shape.item(index), depth + 1))
        return items

    def _object(self, shape: ValueShape, depth: int) -> dict[str, Any]:
        names = list(shape.required)
        others = [name for name in shape.named if name not in names and self.shapes.is_satisfiable(shape.member(name))]
        self.rng.shuffle(others)
        names += others[: max(0, shape.least - len(names))]
        while len(names) < shape.least:
            names.append(self._name(shape, names))
        return {name: self.value(shape.member(name), depth + 1) for name in names}

    def _name(self, shape: ValueShape, taken: Sequence[str]) -> str:
        for _ in range(MAX_TRIES):
            if shape.of_patterns and self.rng.random() < 0.7:
                pattern = self.rng.choice(shape.of_patterns)[0]
                name = random_text(pattern, self.rng)
                longer = name + self.rng.choice(LETTERS)
                name = longer if name in taken and python_pattern(pattern).search(longer) else name
            else:
                name = str(self.value(shape.names, 0)) if shape.names else f"key{len(taken)}"
            if name not in taken:
                return name
        return f"key{len(taken)}"


# --- patterns


def _sequence(parsed: Any, rng: random.Random) -> str:
    return "".join(_one(str(name), value, rng) for name, value in parsed)


def _one(name: str, value: Any, rng: random.Random) -> str:
    match name:
        case "LITERAL":
            return chr(value)
        case "NOT_LITERAL":
            return rng.choice([each for each in LETTERS if ord(each) != value])
        case "ANY":
            return rng.choice(LETTERS)
        case "IN":
            return _of_class(value, rng)
        case "BRANCH":
            return _sequence(rng.choice(value[1]), rng)
        case "SUBPATTERN":
            return _sequence(value[3], rng)
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            low, high, inner = value
            most = low + 3 if str(high) == "MAXREPEAT" else min(int(high), low + 3)
            return "".join(_sequence(inner, rng) for _ in range(rng.randint(low, most)))
        case _:  # anchors and lookaheads
            return ""


def _of_class(items: Sequence[Any], rng: random.Random) -> str:
    if str(items[0][0]) == "NEGATE":
        ranges = [(value, value) if str(name) == "LITERAL" else value for name, value in items[1:] if _is_range(name)]
        free = [chr(code) for code in range(32, 127) if not any(low <= code <= high for low, high in ranges)]
        return rng.choice(free) if free else ""
    name, value = rng.choice(items)
    match str(name):
        case "LITERAL":
            return chr(value)
        case "RANGE":
            return chr(rng.randint(value[0], min(value[1], value[0] + 64)))
        case _:
            return _OF_CATEGORY.get(str(value), "a")


def _is_range(name: Any) -> bool:
    return str(name) in ("LITERAL", "RANGE")


_OF_CATEGORY: Final = {"CATEGORY_SPACE": " ", "CATEGORY_DIGIT": "7", "CATEGORY_NOT_WORD": "-"}

MAX_TURNS = 8
"""Maximum number of turns of an episode. The last turn calls a tool only if a call is required."""


class RandomModel:
    """A random model: it calls tools one after another with arguments that fit, and replies with a text at the end.

    A turn that is constrained to a schema, a pattern, a choice or a call satisfies the constraint.

    Replies depend only on the task, the agent and the turn, so all episodes of a group get the same replies.

    Args:
        tools_of: a function that returns the tools that the agent of a call may use.
        two_calls: call two asynchronous tools in one turn.
    """

    def __init__(self, tools_of: Callable[[ModelCall], Sequence[Tool]], *, two_calls: bool = False) -> None:
        self.known_tools: dict[str, Tool] = {}
        """All tools that could be called so far, by name."""
        self._tools_of = tools_of
        self._two_calls = two_calls

    def __call__(self, call: ModelCall) -> Reply:
        task = call.episode.rpartition("#")[0]
        rng = random.Random(f"{task} {call.agent} {call.turn}")
        tools = self._tools_of(call)
        self.known_tools |= {tool.name: tool for tool in tools if tool.name not in self.known_tools}
        text = _constrained(call, rng)
        if text is not None:
            return Reply(text)
        must = _must_call(call, tools)
        tools = must or tools
        if not tools or (call.turn >= MAX_TURNS - 1 and not must):
            return Reply(rng.choice(("42", "7", "yes", "I do not know.", "hello")))
        # Each turn calls the next tool. The first tool is random, but fixed for the task.
        first = call.turn + random.Random(task).randrange(len(tools))
        chosen = [tools[first % len(tools)]]
        two_calls = self._two_calls and all(tool.parallel for tool in must)
        concurrent = [tool for tool in tools if tool.is_async and tool.parallel] if two_calls else []
        if concurrent:
            # Even turns call the same tool twice. Odd turns call it and the next tool.
            one = first - call.turn + call.turn // 2
            chosen = [concurrent[number % len(concurrent)] for number in (one, one + call.turn % 2)]
        return Reply(calls=tuple(ToolCall("", tool.name, random_arguments(tool.parameters, rng)) for tool in chosen))


def _constrained(call: ModelCall, rng: random.Random) -> str | None:
    """A text that satisfies the sampling's constraint; None without a constraint."""
    sampling = call.request.sampling
    if sampling.choice is not None:
        return rng.choice(sampling.choice)
    if sampling.regex is not None:
        return random_text(f"^(?:{sampling.regex})$", rng)
    return None if sampling.schema is None else json.dumps(random_value(sampling.schema, rng))


def _must_call(call: ModelCall, tools: Sequence[Tool]) -> list[Tool]:
    """Return the tools of which one must be called; an empty list if no call is required."""
    constraint = call.request.constraint
    if constraint is None or constraint.kind is not ConstraintKind.GRAMMAR:
        return []
    return [tool for tool in tools if literal(tool.name) in constraint.value]
