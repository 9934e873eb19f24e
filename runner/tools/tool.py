"""Tools: methods and functions that a model may call."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, overload

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_jsonable_python

from runner import wording
from runner.checked import is_number
from runner.errors import BadEnvironment, WrongArguments
from runner.options import UNSET
from runner.tools.schema import Check, JsonSchema, check_by_schema, function_schema

__all__ = ["Tool", "ToolSpec", "collect_tools", "result_text", "tool"]

_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])

_MARK = "__deltarunner_tool__"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}")


@dataclass(frozen=True, slots=True)
class _Mark:
    """What `@tool` was given."""

    name: str | None = None
    seconds: float | None = UNSET
    parallel: bool = True
    eager: bool = False


@overload
def tool(function: _FunctionT, /) -> _FunctionT: ...
@overload
def tool(
    *, name: str | None = None, seconds: float | None = UNSET, parallel: bool = True, eager: bool = False
) -> Callable[[_FunctionT], _FunctionT]: ...
def tool(
    function: _FunctionT | None = None,
    /,
    *,
    name: str | None = None,
    seconds: float | None = UNSET,
    parallel: bool = True,
    eager: bool = False,
) -> _FunctionT | Callable[[_FunctionT], _FunctionT]:
    """Let a model call this method of an environment; it stays an ordinary method.

    The model is told the type hints and the docstring (Google style; its Args describe the parameters).

    Args:
        function: the method, where the decorator stands without parentheses.
        name: what the model calls it; the method's name unless given.
        seconds: how long one call may take; None lifts the limit, unset is `Limits.tool_seconds`.
        parallel: False makes it a barrier: it runs alone, and a required call is the only one of its turn.
        eager: start it as soon as its call is complete in the stream.
    """

    def mark(function: _FunctionT) -> _FunctionT:
        given: object = function  # whatever an author without a type checker put there
        if not callable(given) and not isinstance(given, classmethod):
            raise BadEnvironment(f"@tool goes on a method, not on {given!r:.40}; a name is given as @tool(name=...).")
        setattr(function, _MARK, _Mark(name, seconds, parallel, eager))
        return function

    return mark if function is None else mark(function)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """What a model is told of a tool and how its arguments are checked, without the object that it belongs to.

    Attributes:
        name: what the model calls it.
        description: what it does.
        parameters: JSON schema of its arguments, of type object.
        returns: JSON schema of its result, or None where it is not known.
        seconds: how long one call may take; None has no limit, unset is `Limits.tool_seconds`.
        parallel: it may run beside other calls of its turn.
        eager: it is started as soon as its call is complete in the stream.
        is_async: its call returns an awaitable.
        check: validates and converts arguments.
        attribute: the method's name in its class.
    """

    name: str
    description: str
    parameters: JsonSchema
    returns: JsonSchema | None
    seconds: float | None
    parallel: bool
    eager: bool
    is_async: bool
    check: Check
    attribute: str = ""

    def bind(self, instance: object) -> Tool:
        """The tool of this object."""
        bound = Tool.__new__(Tool)
        bound._set(self, getattr(instance, self.attribute))
        return bound


class Tool:
    """Something that a model may call.

    `Tool(function)` reads type hints and docstring, as `@tool` does. `Tool(call, name=, description=, parameters=)`
    takes a JSON schema instead and gives `call` the arguments as they came, by name; with `raw=True` as one mapping,
    whatever they are called. `returns=` is a JSON schema of the result.

    Attributes:
        call: the function, sync or async; called with `**tool.arguments(raw)`.
        spec: what the model is told, and the rest.

    Raises:
        BadEnvironment: the signature or the schema cannot be used; names the parameter and the fix.
    """

    __slots__ = ("call", "spec")

    call: Callable[..., Any]
    spec: ToolSpec

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
        eager: bool = False,
    ) -> None:
        where = f"Tool {name or getattr(call, '__name__', type(call).__name__)}"
        mark = _Mark(name, seconds, parallel, eager)
        if parameters is not None:
            spec = _explicit_spec(call, where, mark, description, parameters, raw=raw)
        elif raw:
            raise BadEnvironment(f"{where}: raw=True: give parameters=, a JSON schema of the mapping that it gets.")
        else:
            spec = _spec(call, where, mark, description=description)
        if returns is not None:
            spec = dataclasses.replace(spec, returns=returns)
        self._set(spec, _taking_one_mapping(call) if raw else call)

    def _set(self, spec: ToolSpec, call: Callable[..., Any]) -> None:
        self.spec = spec
        self.call = call

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def description(self) -> str:
        return self.spec.description

    @property
    def parameters(self) -> JsonSchema:
        """JSON schema of the arguments, of type object."""
        return self.spec.parameters

    @property
    def returns(self) -> JsonSchema | None:
        """JSON schema of the result, or None where it is not known."""
        return self.spec.returns

    @property
    def seconds(self) -> float | None:
        """How long one call may take; None has no limit, UNSET is `Limits.tool_seconds`."""
        return self.spec.seconds

    @property
    def parallel(self) -> bool:
        """It may run beside other calls of its turn."""
        return self.spec.parallel

    @property
    def eager(self) -> bool:
        """It is started as soon as its call is complete in the stream."""
        return self.spec.eager

    @property
    def is_async(self) -> bool:
        """Its call returns an awaitable."""
        return self.spec.is_async

    def as_openai(self) -> dict[str, Any]:
        """The tool in OpenAI's shape; "return" inside "function" is the result's schema, where it is known."""
        spec = self.spec
        function = {"name": spec.name, "description": spec.description, "parameters": spec.parameters}
        if spec.returns is not None:
            function["return"] = spec.returns
        return {"type": "function", "function": function}

    def arguments(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """What to call it with: validated and converted; arguments that were left out stay out.

        Raises:
            WrongArguments: they do not fit; its text tells the model why.
        """
        checked = self.spec.check(raw)
        if isinstance(checked, list):
            raise WrongArguments(wording.wrong_arguments(self.spec.name, checked))
        return checked

    def __repr__(self) -> str:
        return f"<Tool {self.spec.name}({', '.join(self.spec.parameters.get('properties', ()))})>"


def collect_tools(cls: type) -> dict[str, ToolSpec]:
    """The tools of a class by name, those of its bases first, in the order they are written.

    An override must be decorated again; an attribute that is set to None takes a tool away.

    Raises:
        BadEnvironment: a signature cannot be shown to a model, or two tools have one name.
    """
    attributes = {name: None for base in reversed(cls.__mro__) for name, value in vars(base).items() if _mark_of(value)}
    specs: dict[str, ToolSpec] = {}
    for name, value in vars(cls).items():
        if isinstance(value, property) and _mark_of(value.fget):
            raise BadEnvironment(f"{cls.__name__}.{name} is a property: a tool is called, so take @property away.")
    for attribute in attributes:
        definition = inspect.getattr_static(cls, attribute)
        if definition is None:
            continue
        where = f"{cls.__name__}.{attribute}"
        mark = _mark_of(definition)
        if mark is None:
            raise BadEnvironment(f"{where} overrides a tool: decorate it with @tool, or write {attribute} = None.")
        spec = _method_spec(cls, attribute, definition, mark, where)
        if spec.name in specs:
            other = specs[spec.name].attribute
            raise BadEnvironment(f"{where} and {cls.__name__}.{other} are both called {spec.name!r}: rename one.")
        specs[spec.name] = spec
    return specs


def _mark_of(definition: Any) -> _Mark | None:
    mark = getattr(definition, _MARK, None) or getattr(getattr(definition, "__func__", None), _MARK, None)
    return mark if isinstance(mark, _Mark) else None


def _method_spec(cls: type, attribute: str, definition: Any, mark: _Mark, where: str) -> ToolSpec:
    nested = {name: value for name, value in vars(cls).items() if isinstance(value, type)}
    method = not isinstance(definition, staticmethod | classmethod)
    return _spec(getattr(cls, attribute), where, mark, method=method, namespace=nested, attribute=attribute)


def _spec(
    function: Callable[..., Any],
    where: str,
    mark: _Mark,
    *,
    method: bool = False,
    namespace: Mapping[str, Any] | None = None,
    description: str | None = None,
    attribute: str = "",
) -> ToolSpec:
    schema = function_schema(function, where, method=method, namespace=namespace, description=description)
    return ToolSpec(
        name=_name(mark, function, where),
        description=schema.description,
        parameters=schema.parameters,
        returns=schema.returns,
        seconds=_checked_seconds(mark.seconds, where),
        parallel=mark.parallel,
        eager=mark.eager,
        is_async=_is_async(function, where),
        check=schema.check,
        attribute=attribute,
    )


def _explicit_spec(
    call: Callable[..., Any], where: str, mark: _Mark, description: str | None, parameters: JsonSchema, *, raw: bool
) -> ToolSpec:
    if not description:
        raise BadEnvironment(f"{where}: give it a description=, which tells the model what it does.")
    kinds = {parameter.kind for parameter in inspect.signature(call).parameters.values()}
    if (
        not raw and inspect.Parameter.VAR_KEYWORD not in kinds
    ):  # an argument that the function does not take is the model's mistake
        parameters = {"additionalProperties": False, **parameters}
    check = check_by_schema(parameters, where)
    if not raw:
        _check_callable_with(call, parameters.get("properties", {}), where)
    return ToolSpec(
        name=_name(mark, call, where),
        description=description,
        parameters={"properties": {}, **parameters},
        returns=None,
        seconds=_checked_seconds(mark.seconds, where),
        parallel=mark.parallel,
        eager=mark.eager,
        is_async=_is_async(call, where),
        check=check,
    )


def _check_callable_with(call: Callable[..., Any], names: Iterable[str], where: str) -> None:
    """What it is bound to already may be called as one of its arguments, which shows only in the function itself."""
    function: Any = call
    given: tuple[Any, ...] = ()
    by_name: dict[str, Any] = {}
    while isinstance(function, partial):
        given, by_name = (*function.args, *given), {**function.keywords, **by_name}
        function = function.func
    function = function if inspect.isroutine(function) else type(function).__call__.__get__(function)
    if inspect.ismethod(function):
        function, given = function.__func__, (function.__self__, *given)
    try:
        inspect.signature(function).bind(*given, **{**by_name, **dict.fromkeys(names)})
    except TypeError as error:
        raise BadEnvironment(
            f"{where}: its function cannot be called with the arguments of its parameters= ({error}): give raw=True, "
            "and it gets them all as one mapping."
        ) from None


def _taking_one_mapping(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(**arguments: Any) -> Any:
        return call(arguments)

    return functools.wraps(call)(called)


def _name(mark: _Mark, function: Callable[..., Any], where: str) -> str:
    name = getattr(function, "__name__", None) if mark.name is None else mark.name
    if name is None or not _NAME.fullmatch(name):
        raise BadEnvironment(
            f"{where}: {name!r} is no name for a tool: give a name= of letters, digits, _, . and -, at most 64, that "
            "does not begin with a digit."
        )
    return name


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


def result_text(value: Any) -> str:
    """A tool's result as the model reads it: strings as they are, everything else as JSON, so None as "null".

    The empty string is told as "(empty)", since templates drop a message whose content is empty.
    Sets are sorted, so that the text is the same in every process.

    Raises:
        TypeError: JSON cannot say it; the author should return a string.
    """
    if isinstance(value, str) and not isinstance(value, enum.Enum):
        return value or wording.EMPTY_RESULT
    try:
        return _JSON.encode(value)
    except TypeError:
        return json.dumps(_jsonable(value), ensure_ascii=False)  # keys that are not strings, such as enums and dates


def _plain(value: Any) -> Any:
    """One level of a value that JSON does not know; what is inside comes by in its turn."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=result_text)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, BaseModel):
        return value.model_dump()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):  # numpy and torch, without importing them
        return value.tolist()
    return _jsonable(value)


_JSON = json.JSONEncoder(ensure_ascii=False, default=_plain)


def _jsonable(value: Any) -> Any:
    try:
        return to_jsonable_python(value)
    except (PydanticSerializationError, UnicodeDecodeError):
        kind = type(value).__name__
        raise TypeError(f"a tool returned a {kind}, which has no JSON form: return a string instead") from None
