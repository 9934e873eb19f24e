"""Tools: methods and functions that a model may call."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, overload

from runner import wording
from runner.checked import is_number
from runner.class_bodies import refuse_duplicate
from runner.errors import BadEnvironment, WrongArguments
from runner.messages import canonical_json
from runner.options import UNSET
from runner.tools.schema import Check, FunctionSchema, JsonSchema, explicit_schema, function_schema

__all__ = ["Tool", "collect_tools", "is_tool_name", "tool", "with_call"]

_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])

_MARK = "__deltarunner_tool__"
# Characters of names that every template's format can write and read.
_NAME = re.compile(r"""[^\s<>{}()\[\]"'`,=|\\]{1,128}""")


@overload
def tool(function: _FunctionT, /) -> _FunctionT: ...
@overload
def tool(
    *, name: str | None = None, seconds: float | None = UNSET, parallel: bool = True, strict: bool = False
) -> Callable[[_FunctionT], _FunctionT]: ...
def tool(
    function: _FunctionT | None = None,
    /,
    *,
    name: str | None = None,
    seconds: float | None = UNSET,
    parallel: bool = True,
    strict: bool = False,
) -> _FunctionT | Callable[[_FunctionT], _FunctionT]:
    """Mark a method of an environment as a tool that a model may call. The method itself does not change.

    The model sees the type hints and the docstring (Google style; its Args describe the parameters).

    Args:
        function: the method, for the decorator without parentheses.
        name: name for the model; the method's name by default.
        seconds: time limit of one call; None for no limit, unset for `Limits.tool_seconds`.
        parallel: False makes the tool a barrier: it runs alone, and a turn with a required call has only that call.
        strict: True enforces the schemas of all tools of a turn while calls are sampled, also in calls that the model
            begins by itself. Required calls are always enforced.

    Raises:
        BadEnvironment: the decorated object is not a method, or the class has a decorated method with this name.
    """

    def mark(function: _FunctionT) -> _FunctionT:
        given: object = function  # without a type checker, an author may pass any object
        if not callable(given) and not isinstance(given, classmethod):
            raise BadEnvironment(f"@tool decorates a method, not {given!r:.40}; a name is given as @tool(name=...).")
        refuse_duplicate(function, "tool")
        # The options are only recorded here. Hints may name nested classes, so they can be read only after the class
        # is complete.
        setattr(function, _MARK, {"name": name, "seconds": seconds, "parallel": parallel, "strict": strict})
        return function

    return mark if function is None else mark(function)


class Tool:
    """A function that a model may call.

    `Tool(function)` reads type hints and docstring, as `@tool` does. `Tool(call, name=, description=, parameters=)`
    takes a JSON schema instead, and passes the arguments unchanged, by name. With `raw=True`, all arguments are passed
    as one mapping, and may have any names.

    Args:
        call: the function, sync or async.
        name: name for the model; the function's name by default.
        description: description for the model; the docstring by default, required with `parameters`.
        parameters: JSON schema of the arguments, of type object, in place of type hints.
        returns: JSON schema of the result, in place of the type hint.
        raw: pass the arguments to `call` as one mapping; requires `parameters`.
        checked: False also passes arguments that violate the schema, for a `call` that checks them itself.
        seconds: time limit of one call; None for no limit, unset for `Limits.tool_seconds`.
        parallel: False makes the tool a barrier: it runs alone, and a turn with a required call has only that call.
        strict: True enforces the schemas of all tools of a turn while calls are sampled, also in calls that the model
            begins by itself. Required calls are always enforced.

    Raises:
        BadEnvironment: the signature, the schema or an option cannot be used; the message names it and has the fix.
    """

    call: Callable[..., Any]
    """Function that runs for a call of the model, as `tool.call(**tool.arguments(raw))`."""
    name: str
    """Name for the model."""
    description: str
    """Description for the model."""
    parameters: JsonSchema
    """JSON schema of the arguments, of type object; later changes to this dict are not enforced."""
    parameters_text: str
    """`parameters` as text. It is the key of the grammar for turns with enforced calls."""
    returns: JsonSchema | None
    """JSON schema of the result; None if it is not known."""
    seconds: float | None
    """Seconds that one call may take; None for no limit, UNSET for `Limits.tool_seconds`."""
    parallel: bool
    """True if a call may run at the same time as other calls of its turn."""
    strict: bool
    """True if the schemas are enforced while the model samples calls that it begins by itself."""
    is_async: bool
    """True if `call` returns an awaitable."""
    attribute: str
    """Name of the tool's method in the environment's class; "" for a tool made from a function."""
    _check: Check
    __slots__ = tuple(__annotations__)

    def __init__(
        self,
        call: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        parameters: JsonSchema | None = None,
        returns: JsonSchema | None = None,
        raw: bool = False,
        checked: bool = True,
        seconds: float | None = UNSET,
        parallel: bool = True,
        strict: bool = False,
    ) -> None:
        where = f"Tool {name or getattr(call, '__name__', type(call).__name__)}"
        if parameters is not None:
            schema = explicit_schema(call, where, description, parameters, raw=raw)
        elif raw:
            raise BadEnvironment(f"{where} has raw=True: give parameters=, a JSON schema of the passed mapping.")
        else:
            schema = function_schema(call, where, description=description)
        if returns is not None:
            schema = schema._replace(returns=returns)
        if not checked:
            schema = schema._replace(check=dict)
        self._set(schema, call, where, name=name, seconds=seconds, parallel=parallel, strict=strict)
        if raw:
            self.call = _taking_one_mapping(call)

    def _set(
        self,
        schema: FunctionSchema,
        call: Callable[..., Any],
        where: str,
        *,
        name: str | None,
        seconds: float | None,
        parallel: bool,
        strict: bool,
        attribute: str = "",
    ) -> None:
        self.call = call
        self.name = _checked_name(name, call, where)
        self.description, self.parameters, self.returns, self._check = schema
        self.parameters_text = canonical_json(self.parameters)
        self.seconds = _checked_seconds(seconds, where)
        self.parallel = parallel
        self.strict = strict
        self.is_async = _is_async(call, where)
        self.attribute = attribute

    def as_openai(self) -> dict[str, Any]:
        """Return the tool in OpenAI's form; "return" inside "function" is the schema of its result, if known."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        if self.returns is not None:
            function["return"] = self.returns
        return {"type": "function", "function": function}

    def arguments(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the validated and converted arguments for a call; omitted arguments stay omitted.

        Args:
            raw: arguments as the model wrote them.

        Raises:
            WrongArguments: the arguments are invalid; the text explains the problems to the model.
        """
        checked = self._check(raw)
        if isinstance(checked, list):
            raise WrongArguments(wording.wrong_arguments(self.name, checked))
        return checked

    def bind(self, instance: object) -> Tool:
        """Return the tool as a method of this object; `collect_tools` returns unbound tools."""
        return with_call(self, getattr(instance, self.attribute))

    def __repr__(self) -> str:
        return f"<Tool {self.name}({', '.join(self.parameters.get('properties', ()))})>"


def with_call(tool: Tool, call: Callable[..., Any]) -> Tool:
    """Return the tool with another function, which must have the same parameters, and be async if `tool.is_async`."""
    made = Tool.__new__(Tool)  # a copy, so that the signature is read once per class, not once per episode
    for name in Tool.__slots__:
        setattr(made, name, getattr(tool, name))
    made.call = call
    return made


def collect_tools(cls: type) -> dict[str, Tool]:
    """Return the tools of a class by name: tools of its bases first, in source order. `bind` them before a call.

    An override must be decorated again; an attribute set to None removes a tool.

    Raises:
        BadEnvironment: a signature cannot be shown to a model, two tools have the same name, a tool is a property, or
            an override of a tool is not decorated.
    """
    # The order of tools is a part of every prompt, so an override keeps the position of the tool that it replaces.
    attributes = {name: None for base in reversed(cls.__mro__) for name, value in vars(base).items() if _mark_of(value)}
    tools: dict[str, Tool] = {}
    for name, value in vars(cls).items():
        if isinstance(value, property) and _mark_of(value.fget):
            raise BadEnvironment(f"{cls.__name__}.{name} is a property: a tool must be callable: remove @property.")
    for attribute in attributes:
        # The attribute is read statically, since a descriptor of the author would run otherwise.
        definition = inspect.getattr_static(cls, attribute)
        if definition is None:
            continue
        where = f"{cls.__name__}.{attribute}"
        mark = _mark_of(definition)
        if mark is None:
            raise BadEnvironment(f"{where} overrides a tool: decorate it with @tool, or write {attribute} = None.")
        found = _of_method(cls, attribute, definition, mark, where)
        if found.name in tools:
            other = tools[found.name].attribute
            raise BadEnvironment(f"{where} and {cls.__name__}.{other} are both named {found.name!r}: rename one.")
        tools[found.name] = found
    return tools


def _mark_of(definition: Any) -> dict[str, Any] | None:
    """Return the options of `@tool`, which static and class methods have on the inner function.

    The result is None if the definition is not a tool.
    """
    mark = getattr(definition, _MARK, None) or getattr(getattr(definition, "__func__", None), _MARK, None)
    # A mock has every attribute, but its value is not a dict of options.
    return mark if isinstance(mark, dict) else None


def _of_method(cls: type, attribute: str, definition: Any, mark: Mapping[str, Any], where: str) -> Tool:
    nested = {name: value for name, value in vars(cls).items() if isinstance(value, type)}
    method = not isinstance(definition, staticmethod | classmethod)
    function = getattr(cls, attribute)
    made = Tool.__new__(Tool)
    schema = function_schema(function, where, method=method, namespace=nested)
    made._set(schema, function, where, **mark, attribute=attribute)
    return made


def _taking_one_mapping(call: Callable[..., Any]) -> Callable[..., Any]:
    # All tools are called with arguments by name.
    def called(**arguments: Any) -> Any:
        return call(arguments)

    return functools.wraps(call)(called)


def _checked_name(name: str | None, function: Callable[..., Any], where: str) -> str:
    name = getattr(function, "__name__", None) if name is None else name
    if name is None or not is_tool_name(name):
        raise BadEnvironment(
            f"{where}: {name!r} is not a tool name: give a name= of letters, digits, _, ., -, / and :, at most 128."
        )
    return name


def is_tool_name(name: str) -> bool:
    """Return whether every template's format can write and read a call with this name."""
    return _NAME.fullmatch(name) is not None and name.isprintable()


def _checked_seconds(seconds: float | None, where: str) -> float | None:
    if seconds is UNSET or seconds is None:
        return seconds
    if not is_number(seconds) or not seconds > 0:
        raise BadEnvironment(f"{where}: seconds={seconds!r}: give a number above 0, or None for no limit.")
    return seconds


def _is_async(call: Callable[..., Any], where: str) -> bool:
    function: Any = call if inspect.isroutine(call) or isinstance(call, partial) else type(call).__call__
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise BadEnvironment(f"{where} yields: a tool has one result: return a list of the yielded values.")
    return inspect.iscoroutinefunction(function)
