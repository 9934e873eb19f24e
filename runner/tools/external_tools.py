"""Tools of external agents: schemas for the model, without a function to call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from runner.errors import BadEnvironment, BadOption
from runner.tools.modern_schema import as_shown, modern
from runner.tools.tool import Tool, is_tool_name

__all__ = ["tool_of", "tools_of"]


def tools_of(schemas: Sequence[Any]) -> list[Tool]:
    """Return the tools of a request, given in OpenAI's form or as `Tool` objects.

    Any text is allowed as a name, even if some models cannot write it.

    Raises:
        BadOption: a tool is not a function with a name and a valid schema, or two tools have the same name; the message
            names the tool.
    """
    tools = [tool_of(index, each) for index, each in enumerate(schemas)]
    names = set[str]()
    for tool in tools:
        if tool.name in names:
            raise BadOption(f"two tools are named {tool.name!r}: rename one of them.")
        names.add(tool.name)
    return tools


def tool_of(index: int, schema: Any) -> Tool:
    """Return the tool for one entry of a request. `index` is the position of the entry, for errors.

    Raises:
        BadOption: the tool is not a function with a name and a valid schema; the message names the tool.
    """
    if isinstance(schema, Tool):
        return schema
    function = schema.get("function") if isinstance(schema, Mapping) and schema.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        kind = schema.get("type") if isinstance(schema, Mapping) else type(schema).__name__
        raise BadOption(
            f"tool {index} (of type {kind!r}) is not a function with a name: give "
            f'{{"type": "function", "function": {{"name": ..., "description": ..., "parameters": ...}}}}.'
        )
    for name, kind, wanted in (("parameters", Mapping, "a JSON schema"), ("description", str, "a string")):
        value = function.get(name)
        if value and not isinstance(value, kind):
            raise BadOption(f"tool {index} ({function['name']}): {name} is {value!r:.60}: give {wanted}.")
    name = function["name"]
    if not name:
        raise BadOption(f"tool {index} has an empty name: give a name, such as run.")
    own = name if is_tool_name(name) else "tool"
    parameters = as_shown(function.get("parameters") or {})
    if not _takes_objects(parameters):
        parameters["type"] = "object"  # arguments are always an object
    try:
        tool = Tool(_not_ours, name=own, description=function.get("description") or "-", parameters=parameters)
    except BadEnvironment as error:
        raise BadOption(f"tool {index}: {error}") from None
    tool.name = name
    tool.description = function.get("description") or ""
    return tool


def _takes_objects(parameters: Mapping[str, Any]) -> bool:
    made = modern(parameters).schema
    kinds = made.get("type") if isinstance(made, Mapping) else None
    return kinds == "object" or (isinstance(kinds, list) and "object" in kinds)


def _not_ours(**arguments: object) -> NoReturn:
    raise RuntimeError("an external tool was called here; only its client can run it")
