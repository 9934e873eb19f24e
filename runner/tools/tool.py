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
# Names that calls can be written with, and read back, in the format of every template.
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
    """Let a model call this method of an environment; it stays an ordinary method.

    The model is told the type hints and the docstring (Google style; its Args describe the parameters).

    Args:
        function: the method, where the decorator stands without parentheses.
        name: what the model calls it; the method's name unless given.
        seconds: how long one call may take; None lifts the limit, unset is `Limits.tool_seconds`.
        parallel: False makes it a barrier: it runs alone, and a required call is the only one of its turn.
        strict: True holds calls to the schemas while they are sampled, those of all tools beside it too, wherever the
            model begins one by itself; a required call is held to them anyway.
    """

    def mark(function: _FunctionT) -> _FunctionT:
        given: object = function  # whatever an author without a type checker put there
        if not callable(given) and not isinstance(given, classmethod):
            raise BadEnvironment(f"@tool goes on a method, not on {given!r:.40}; a name is given as @tool(name=...).")
        refuse_duplicate(function, "tool")
        # Only noted here: the hints can be read when the class is whole, and may name classes that stand inside it.
        setattr(function, _MARK, {"name": name, "seconds": seconds, "parallel": parallel, "strict": strict})
        return function

    return mark if function is None else mark(function)


class Tool:
    """Something that a model may call.

    `Tool(function)` reads type hints and docstring, as `@tool` does. `Tool(call, name=, description=, parameters=)`
    takes a JSON schema instead and gives `call` the arguments as they came, by name; with `raw=True` as one mapping,
    whatever they are called.

    Args:
        call: the function, sync or async.
        name: what the model calls it; the function's name unless given.
        description: what the model is told of it; the docstring unless given, and needed beside `parameters`.
        parameters: a JSON schema of its arguments, of type object, in place of the type hints.
        returns: a JSON schema of its result, in place of the type hint.
        raw: `call` gets its arguments as one mapping; needs `parameters`.
        seconds: how long one call may take; None lifts the limit, unset is `Limits.tool_seconds`.
        parallel: False makes it a barrier: it runs alone, and a required call is the only one of its turn.
        strict: True holds calls to the schemas while they are sampled, those of all tools beside it too, wherever the
            model begins one by itself; a required call is held to them anyway.

    Raises:
        BadEnvironment: the signature or the schema cannot be used; names the parameter and the fix.
    """

    call: Callable[..., Any]
    """The function that a call of the model runs, as `tool.call(**tool.arguments(raw))`."""
    name: str
    """The name by which the model calls it."""
    description: str
    """The text that tells the model what it does."""
    parameters: JsonSchema
    """The JSON schema of its arguments, of type object; what is changed in it later is not enforced."""
    parameters_text: str
    """The same as text, since every turn that enforces calls looks its grammar up by it."""
    returns: JsonSchema | None
    """The JSON schema of its result, or None where nobody gave one."""
    seconds: float | None
    """The time that one call may take; None has no limit, UNSET stands for `Limits.tool_seconds`."""
    parallel: bool
    """Whether it may run beside other calls of its turn."""
    strict: bool
    """Whether calls that the model begins by itself are held to the schemas while they are sampled."""
    is_async: bool
    """Whether `call` returns an awaitable."""
    attribute: str
    """The name of its method in the environment's class; "" for a tool that was made from a function."""
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
        seconds: float | None = UNSET,
        parallel: bool = True,
        strict: bool = False,
    ) -> None:
        where = f"Tool {name or getattr(call, '__name__', type(call).__name__)}"
        if parameters is not None:
            schema = explicit_schema(call, where, description, parameters, raw=raw)
        elif raw:
            raise BadEnvironment(f"{where}: raw=True: give parameters=, a JSON schema of the mapping that it gets.")
        else:
            schema = function_schema(call, where, description=description)
        if returns is not None:
            schema = schema._replace(returns=returns)
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
        """The tool in OpenAI's shape; "return" inside "function" is the result's schema, where it is known."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        if self.returns is not None:
            function["return"] = self.returns
        return {"type": "function", "function": function}

    def arguments(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """What to call it with: validated and converted; arguments that were left out stay out.

        Args:
            raw: the arguments as the model gave them.

        Raises:
            WrongArguments: they do not fit; its text tells the model why.
        """
        checked = self._check(raw)
        if isinstance(checked, list):
            raise WrongArguments(wording.wrong_arguments(self.name, checked))
        return checked

    def bind(self, instance: object) -> Tool:
        """The same tool as a method of this object; what `collect_tools` found belongs to a class only."""
        return with_call(self, getattr(instance, self.attribute))

    def __repr__(self) -> str:
        return f"<Tool {self.name}({', '.join(self.parameters.get('properties', ()))})>"


def with_call(tool: Tool, call: Callable[..., Any]) -> Tool:
    """The same tool with another function behind it, of the same colour and with the same arguments."""
    made = Tool.__new__(Tool)  # a signature is read once for a class, not for each of its episodes
    for name in Tool.__slots__:
        setattr(made, name, getattr(tool, name))
    made.call = call
    return made


def collect_tools(cls: type) -> dict[str, Tool]:
    """The tools of a class by name, those of its bases first, in the order they are written; `bind` before a call.

    An override must be decorated again; an attribute that is set to None takes a tool away.

    Raises:
        BadEnvironment: a signature cannot be shown to a model, or two tools have one name.
    """
    # A dict keeps each name where it stood first: the order of tools is part of every prompt.
    attributes = {name: None for base in reversed(cls.__mro__) for name, value in vars(base).items() if _mark_of(value)}
    tools: dict[str, Tool] = {}
    for name, value in vars(cls).items():
        if isinstance(value, property) and _mark_of(value.fget):
            raise BadEnvironment(f"{cls.__name__}.{name} is a property: a tool is called, so take @property away.")
    for attribute in attributes:
        # Static, since a descriptor of the author's would run.
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
            raise BadEnvironment(f"{where} and {cls.__name__}.{other} are both called {found.name!r}: rename one.")
        tools[found.name] = found
    return tools


def _mark_of(definition: Any) -> dict[str, Any] | None:
    """The options of `@tool`, which stand on the function inside a static or class method."""
    mark = getattr(definition, _MARK, None) or getattr(getattr(definition, "__func__", None), _MARK, None)
    # An object that answers to every attribute, such as a mock, has no mark of ours.
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
    # Whoever runs tools calls each of them alike, by names.
    def called(**arguments: Any) -> Any:
        return call(arguments)

    return functools.wraps(call)(called)


def _checked_name(name: str | None, function: Callable[..., Any], where: str) -> str:
    name = getattr(function, "__name__", None) if name is None else name
    if name is None or not is_tool_name(name):
        raise BadEnvironment(
            f"{where}: {name!r} is no name for a tool: give a name= of letters, digits, _, ., -, / and :, at most 128."
        )
    return name


def is_tool_name(name: str) -> bool:
    """Whether a call of a tool with this name is written and read in the format of every template."""
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
        raise BadEnvironment(f"{where} yields: a tool has one result; collect what it yields and return it.")
    return inspect.iscoroutinefunction(function)
