"""Hypothesis strategies for tests of environments and tokens: awkward text, calls, conversations, chunkings.

Only this module of the test kit needs hypothesis.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from runner.engines.scripted.script import Chunks
from runner.errors import BadOption
from runner.messages import Message, ToolCall
from runner.tools.schema import JsonSchema
from runner.tools.tool import Tool

__all__ = ["awkward_text", "chunkings", "conversations", "tool_calls"]

# Pytest leaves out the frames of this module and shows the line of the test, where the fix belongs.
__tracebackhide__ = True

_PIECES: Final = (
    *("<|im_end|>", "<|im_start|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "[f(a=1)]"),
    *("é", "e\u0301", "日本語", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u202e", "\ufeff", "\x00", "\u2028"),
    *(
        "\n",
        "\r\n",
        "  ",
        "\t",
        " ",
        '"',
        "'",
        "\\",
        "\\n",
        "{}",
        "{{ x }}",
        "{% if %}",
        "null",
        "False",
        "1e-7",
        "-0.0",
    ),
)
_NAMES: Final = st.from_regex(r"[a-z][a-z_]{0,11}", fullmatch=True)


def awkward_text(*, max_pieces: int = 8) -> SearchStrategy[str]:
    """Text with control tokens, markers, quotes, template code and equivalent Unicode forms; no surrogates.

    Args:
        max_pieces: maximum number of pieces of a text.
    """
    plain = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    return st.lists(st.sampled_from(_PIECES) | plain, max_size=max_pieces).map("".join)


def tool_calls(tools: Sequence[Tool] | None = None) -> SearchStrategy[ToolCall]:
    """Calls of given tools with arguments that fit their schemas, or with any names and arguments.

    Args:
        tools: the tools, such as `Calculator().bound_tools()`.

    Raises:
        BadOption: `tools` is empty, or not a list of tools.
    """
    if tools is None:
        values = st.recursive(
            st.none() | st.booleans() | st.integers(-(2**53), 2**53) | awkward_text(max_pieces=3),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
            max_leaves=6,
        )
        arguments = st.dictionaries(_NAMES, values, max_size=4)
        return st.builds(ToolCall, st.just(""), _NAMES, arguments)
    if isinstance(tools, type) or not isinstance(tools, Iterable):
        raise BadOption(f"tool_calls({tools!r:.60}): give an environment's tools: Calculator().bound_tools().")
    if not tools:
        raise BadOption("tool_calls([]): give at least one tool, or no argument for calls of any name.")
    return st.one_of([st.builds(ToolCall, st.just(""), st.just(tool.name), _arguments(tool)) for tool in tools])


def conversations(*, max_messages: int = 6, text: SearchStrategy[str] | None = None) -> SearchStrategy[list[Message]]:
    """Conversations that templates accept.

    A conversation has an optional system message, a user message, and answers of the model. An answer without calls is
    followed by a user message, an answer with calls by the results of all calls.

    Args:
        max_messages: approximate maximum number of messages.
        text: texts of the messages; by default `awkward_text()`.
    """
    return _conversation(max_messages, text if text is not None else awkward_text())


def chunkings(*, most: int = 8) -> SearchStrategy[Chunks]:
    """Ways to cut ids into deltas: see `Chunks`.

    Args:
        most: maximum number of ids of a delta.
    """
    size = st.integers(1, most)
    named: SearchStrategy[Chunks] = st.sampled_from(["whole", "random", None])
    return named | size | st.lists(size, min_size=1, max_size=5).map(tuple)


@st.composite
def _conversation(draw: st.DrawFn, most: int, text: SearchStrategy[str]) -> list[Message]:
    messages: list[Message] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(text)})
    messages.append({"role": "user", "content": draw(text)})
    while len(messages) < most and draw(st.booleans()):
        calls = draw(st.lists(tool_calls(), max_size=2))
        said: Message = {"role": "assistant", "content": draw(text)}
        made = [replace(call, id=f"call_{len(messages)}_{number}") for number, call in enumerate(calls)]
        if not made:
            messages += [said, {"role": "user", "content": draw(text)}]
            continue
        messages.append({**said, "tool_calls": [call.as_message() for call in made]})
        for call in made:
            messages.append({"role": "tool", "content": draw(text), "tool_call_id": call.id, "name": call.name})
    return messages


def _arguments(tool: Tool) -> SearchStrategy[Any]:
    return _fitting(tool.parameters, tool.parameters.get("$defs", {}))


def _fitting(schema: JsonSchema, definitions: JsonSchema) -> SearchStrategy[Any]:
    """Values that fit a schema; strings if the schema has no type, or a type that JSON Schema does not define."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return st.deferred(lambda: _fitting(definitions[name], definitions))
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return st.one_of([_fitting(one, definitions) for one in schema[several]])
    kind = schema.get("type")
    return st.one_of([_of_kind(one, schema, definitions) for one in (kind if isinstance(kind, list) else [kind])])


def _of_kind(kind: Any, schema: JsonSchema, definitions: JsonSchema) -> SearchStrategy[Any]:
    low, high = schema.get("minimum"), schema.get("maximum")
    match kind:
        case "integer":
            return st.integers(low if low is not None else -1000, high if high is not None else 1000)
        case "number":
            return st.floats(low, high, allow_nan=False, allow_infinity=False)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            items = _fitting(schema.get("items", {"type": "string"}), definitions)
            return st.lists(items, min_size=schema.get("minItems", 0), max_size=schema.get("maxItems", 3))
        case "object":
            return _objects(schema, definitions)
    return st.text("abc é\n\"'", min_size=schema.get("minLength", 0), max_size=schema.get("maxLength", 12))


def _objects(schema: JsonSchema, definitions: JsonSchema) -> SearchStrategy[Any]:
    properties = schema.get("properties", {})
    extra = schema.get("additionalProperties")
    if not properties and isinstance(extra, dict):
        return st.dictionaries(_NAMES, _fitting(extra, definitions), max_size=3)
    required = set(schema.get("required", ()))
    fields = {name: _fitting(own, definitions) for name, own in properties.items()}
    return st.fixed_dictionaries(
        {name: own for name, own in fields.items() if name in required},
        optional={name: own for name, own in fields.items() if name not in required},
    )
