"""Tools of somebody else's loop: schemas that a model is shown, with no function of ours behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from runner.errors import BadEnvironment, BadOption
from runner.tools.tool import Tool

__all__ = ["tools_of"]


def tools_of(schemas: Sequence[Any]) -> list[Tool]:
    """The tools of a request, given in OpenAI's form or as `Tool` objects.

    Raises:
        BadOption: one is no function with a name, or two have one name; names which one.
    """
    tools = [each if isinstance(each, Tool) else _tool_of(index, each) for index, each in enumerate(schemas)]
    names = [tool.name for tool in tools]
    for name in names if len(set(names)) < len(names) else ():
        if names.count(name) > 1:
            raise BadOption(f"two tools are called {name!r}: give one another name.")
    return tools


def _tool_of(index: int, schema: Any) -> Tool:
    function = schema.get("function") if isinstance(schema, Mapping) and schema.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        kind = schema.get("type") if isinstance(schema, Mapping) else type(schema).__name__
        raise BadOption(
            f"tool {index} is of type {kind!r}: only functions can be called, as "
            f'{{"type": "function", "function": {{"name": ..., "description": ..., "parameters": ...}}}}.'
        )
    for name, kind, wanted in (("parameters", Mapping, "a JSON schema"), ("description", str, "a string")):
        value = function.get(name)
        if value and not isinstance(value, kind):
            raise BadOption(f"tool {index} ({function['name']}): its {name}: give {wanted}, not {value!r:.60}.")
    parameters = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
    try:
        tool = Tool(
            _not_ours, name=function["name"], description=function.get("description") or "-", parameters=parameters
        )
    except BadEnvironment as error:
        raise BadOption(f"tool {index}: {error}") from None
    tool.description = function.get("description") or ""
    return tool


def _not_ours(**arguments: object) -> NoReturn:
    raise RuntimeError("a tool of somebody else's loop was called here: whoever asked is to run it")
