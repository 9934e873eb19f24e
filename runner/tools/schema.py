"""Schemas of tools: from signatures and docstrings to JSON schemas, and validation of a model's arguments."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import (
    Annotated,
    Any,
    Final,
    NamedTuple,
    NotRequired,
    Required,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
)

import docstring_parser
from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation
from pydantic_core import PydanticSerializationError, to_jsonable_python
from typing_extensions import TypedDict

from runner import wording
from runner.errors import BadEnvironment
from runner.tools.argument_problems import schema_problems, typed_problems
from runner.tools.modern_schema import as_shown, modern
from runner.tools.schema_shapes import shapes_for
from runner.tools.typed_dicts import IS_NEEDED, with_readable_typed_dicts
from runner.tools.validators import validator_of

__all__ = ["Check", "FunctionSchema", "JsonSchema", "check_by_schema", "explicit_schema", "function_schema"]

JsonSchema: TypeAlias = dict[str, Any]
"""A JSON schema as a JSON object."""

Check: TypeAlias = Callable[[Mapping[str, Any]], "dict[str, Any] | list[str]"]
"""Function from a model's arguments to the arguments of the call, or to a list of problems, one clause each."""

_WHOSE = " (below Python 3.12, typing_extensions.TypedDict if it is inside another type)" if IS_NEEDED else ""

_UNSUPPORTED = (PydanticUserError, PydanticSchemaGenerationError, PydanticUndefinedAnnotation)


class FunctionSchema(NamedTuple):
    """Description, schemas and validation of a function."""

    description: str
    parameters: JsonSchema
    """JSON schema of the arguments, of type object, in the order of the signature."""
    returns: JsonSchema | None
    """JSON schema of the result; None if the signature has no return type with a JSON schema."""
    check: Check
    """Function that validates and converts arguments."""


def function_schema(
    function: Callable[..., Any],
    where: str,
    *,
    method: bool = False,
    namespace: Mapping[str, Any] | None = None,
    description: str | None = None,
) -> FunctionSchema:
    """Return the schema of a function that a model may call.

    Args:
        function: the function; the first parameter of a method is skipped.
        where: name of the function in errors, such as "Calculator.add".
        method: True for an unbound method.
        namespace: additional names for the annotations of the function.
        description: replaces the description of the docstring.

    Raises:
        BadEnvironment: the signature or the docstring cannot be shown to a model; the message has the fix.
    """
    parameters = list(_signature(function, where).parameters.values())[1 if method else 0 :]
    hints = _hints(function, where, namespace)
    _check_parameters(parameters, hints, where)
    docstring = docstring_parser.google.parse(inspect.getdoc(function) or "")
    text = (description or docstring.description or "").strip()
    if not text:
        raise BadEnvironment(f"{where} is a tool without a docstring: write one for the model.")
    notes = {note.arg_name: note.description or "" for note in docstring.params}
    known = [parameter.name for parameter in parameters]
    for name in notes.keys() - set(known):
        listed = ", ".join(known) or "none"
        raise BadEnvironment(f"{where}: its docstring describes {name!r}, but its parameters are: {listed}. Rename it.")
    adapter = _arguments_adapter(parameters, hints, where)
    _check_defaults(parameters, adapter, where)
    return FunctionSchema(
        description=text,
        parameters=_parameters_schema(adapter, parameters, notes),
        returns=_returns_schema(hints),
        check=_check_by_type(adapter),
    )


def explicit_schema(
    call: Callable[..., Any], where: str, description: str | None, parameters: JsonSchema, *, raw: bool
) -> FunctionSchema:
    """Return the schema of a function with an explicit JSON schema.

    Raises:
        BadEnvironment: the schema does not allow objects, the description is missing, or the function cannot take the
            arguments.
    """
    if not description:
        raise BadEnvironment(f"{where} has parameters= and no description: give a description= for the model.")
    kinds = {parameter.kind for parameter in _signature(call, where).parameters.values()}
    # Validation refuses an argument that the function does not take, with a message for the model.
    parameters = as_shown(parameters)
    if not raw and inspect.Parameter.VAR_KEYWORD not in kinds:
        # Every property that is required or mentioned anywhere in the schema is also an argument.
        named: JsonSchema = {name: {} for shape in shapes_for(parameters).arguments() for name in shape.named}
        if "additionalProperties" not in parameters and not named.keys() <= parameters.get("properties", {}).keys():
            parameters = {**parameters, "properties": {**named, **parameters.get("properties", {})}}
        parameters = {"additionalProperties": False, **parameters}
    check = check_by_schema(parameters, where)
    if not raw:
        _check_callable_with(call, parameters.get("properties", {}), where)
    # The model sees the schema in the order of its author.
    whole = parameters if "properties" in parameters else {"properties": {}, **parameters}
    return FunctionSchema(description, whole, None, check)


def check_by_schema(parameters: JsonSchema, where: str) -> Check:
    """Return a validator of arguments for a JSON schema of any dialect; values are not converted.

    Raises:
        BadEnvironment: the schema does not allow objects, and arguments are always an object.
    """
    made = modern(parameters).schema
    kinds = made.get("type") if isinstance(made, Mapping) else None
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise BadEnvironment(f'{where}: parameters must be a JSON schema with "type": "object", not {kinds!r:.60}.')
    validator = validator_of(made)

    def check(raw: Mapping[str, Any]) -> dict[str, Any] | list[str]:
        return schema_problems(validator.iter_errors(dict(raw))) or dict(raw)

    return check


def _signature(function: Callable[..., Any], where: str) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError as error:  # some functions that are written in C have no signature
        raise BadEnvironment(f"{where}: {error}: write a function with parameters that calls it.") from None


def _check_callable_with(call: Callable[..., Any], names: Iterable[str], where: str) -> None:
    """Check that the function accepts arguments with these names, which may replace arguments bound by `partial`.

    Raises:
        BadEnvironment: the function does not accept these names.
    """
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
        _signature(function, where).bind(*given, **{**by_name, **dict.fromkeys(names)})
    except TypeError as error:
        raise BadEnvironment(
            f"{where}: its function cannot be called with the arguments of its parameters= ({error}): rename its "
            "parameters, or give raw=True to pass all arguments as one mapping."
        ) from None


def _hints(function: Callable[..., Any], where: str, namespace: Mapping[str, Any] | None) -> dict[str, Any]:
    # A callable object has its hints on its class, and a decorated function has its hints below the decorators.
    target: Any = inspect.unwrap(function)
    target = target if inspect.isroutine(target) else type(target).__call__
    try:
        hints = get_type_hints(target, localns=dict(namespace or {}), include_extras=True)
        return {name: with_readable_typed_dicts(hint) for name, hint in hints.items()}
    except NameError as error:
        raise BadEnvironment(
            f"{where}: its annotations name {error.name!r}, which is not defined: define or import {error.name} at "
            "module level, above the class."
        ) from None
    except (TypeError, SyntaxError) as error:
        raise BadEnvironment(f"{where}: its annotations cannot be evaluated ({error}): correct them.") from None


def _check_parameters(parameters: Iterable[inspect.Parameter], hints: Mapping[str, Any], where: str) -> None:
    for parameter in parameters:
        at = f"{where}, parameter {parameter.name!r}:"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise BadEnvironment(f"{at} a model cannot fill {parameter}: write out the parameters, or take one list.")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise BadEnvironment(f"{at} models name their arguments: remove the / from the signature.")
        if parameter.name not in hints:
            raise BadEnvironment(f"{at} it has no type: annotate it, for example {parameter.name}: int.")


def _arguments_adapter(
    parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any], where: str
) -> TypeAdapter[dict[str, Any]]:
    fields = {p.name: _field(hints[p.name], p.default is p.empty) for p in parameters}
    # The arguments are a typed dict, not a model, so that they may have any name, such as `schema`, `copy` or `_x`.
    typed_dict: Any = TypedDict  # created at run time, so type checkers cannot follow it
    arguments: Any = typed_dict("Arguments", fields)
    arguments.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)
    try:
        adapter: TypeAdapter[dict[str, Any]] = TypeAdapter(arguments)
        adapter.json_schema()  # pydantic may be able to validate a type that has no JSON schema
    except _UNSUPPORTED:
        # Parameters are checked one by one, so that the error can name one.
        for parameter in parameters:
            _check_supported(hints[parameter.name], f"{where}, parameter {parameter.name!r}:")
        raise
    return adapter


def _check_defaults(parameters: Iterable[inspect.Parameter], adapter: TypeAdapter[dict[str, Any]], where: str) -> None:
    """Check that defaults satisfy their types, since the model sees defaults and may write them.

    Raises:
        BadEnvironment: a default does not satisfy its type.
    """
    for parameter in parameters:
        name, shown = parameter.name, {} if parameter.default is parameter.empty else _default(parameter.default)
        problems = _unfit(name, shown["default"], adapter) if shown else []
        if problems:
            raise BadEnvironment(
                f"{where}, parameter {name!r}: its default {parameter.default!r:.60} does not fit its type: "
                f"{problems[0]}. The model sees the default, but a call with it is refused: allow it in the type"
                + (f", such as {_optional(parameter)}." if parameter.default is None else ", or take another default.")
            )


def _unfit(name: str, value: Any, adapter: TypeAdapter[dict[str, Any]]) -> list[str]:
    try:
        adapter.validate_json(json.dumps({name: value}, allow_nan=False), strict=True)
    except ValueError as error:  # pydantic raises this; json raises it for infinity, which is a legal default
        errors = error.errors(include_url=False) if isinstance(error, ValidationError) else []
        return typed_problems(
            [one for one in errors if one["loc"][:1] == (name,) and one["type"] != "missing"], {name: value}
        )
    return []


def _optional(parameter: inspect.Parameter) -> str:
    kind = getattr(parameter.annotation, "__name__", None) or str(parameter.annotation)
    return f"{parameter.name}: {kind} | None = None"


def _check_supported(hint: Any, at: str) -> None:
    try:
        TypeAdapter(hint).json_schema()
    except _UNSUPPORTED:
        name = getattr(hint, "__name__", None) or str(hint)
        raise BadEnvironment(
            f"{at} a model cannot write a {name}: use int, float, bool, str, Literal, Enum, list, dict, tuple, a "
            f"dataclass, a TypedDict{_WHOSE} or a pydantic model."
        ) from None


def _field(hint: Any, required: bool) -> Any:
    if get_origin(hint) is Annotated:
        kind, *notes = get_args(hint)
        described = [Field(description=note) if isinstance(note, str) else note for note in notes]
        hint = Annotated[(kind, *described)]
    return Required[hint] if required else NotRequired[hint]


def _parameters_schema(
    adapter: TypeAdapter[dict[str, Any]], parameters: Sequence[inspect.Parameter], notes: Mapping[str, str]
) -> JsonSchema:
    generated = without_titles(adapter.json_schema())
    properties: JsonSchema = generated.get("properties", {})
    for parameter in parameters:
        schema = properties[parameter.name]
        if notes.get(parameter.name):
            schema.setdefault("description", notes[parameter.name])
        if parameter.default is not parameter.empty:
            schema.update(_default(parameter.default))
    # `additionalProperties` is omitted: it uses tokens in every prompt, and validation refuses other names anyway.
    ordered = {"type": "object", "properties": properties}
    return ordered | {key: generated[key] for key in ("required", "$defs") if key in generated}


def _default(value: Any) -> JsonSchema:
    try:
        return {"default": to_jsonable_python(value)}
    except PydanticSerializationError:
        return {}  # a default without a JSON form still applies if the argument is omitted


def _returns_schema(hints: Mapping[str, Any]) -> JsonSchema | None:
    if hints.get("return") is None or hints["return"] is type(None):
        return None
    try:
        schema: JsonSchema = without_titles(TypeAdapter(hints["return"]).json_schema(mode="serialization"))
    except _UNSUPPORTED:
        return None  # the schema of a result is only a description, since results become text
    return schema


def without_titles(schema: Any) -> Any:
    """Return the JSON schema without pydantic's generated titles; properties named "title" are kept."""
    if isinstance(schema, list):
        return [without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _without_titles_below(key, value) for key, value in schema.items() if key != "title"}


def _without_titles_below(key: str, value: Any) -> Any:
    if key in ("properties", "patternProperties", "$defs", "dependentSchemas"):
        return {name: without_titles(schema) for name, schema in value.items()}
    if key in ("default", "enum", "const", "examples"):
        return value
    return without_titles(value)


_FINITE_JSON: Final = json.JSONEncoder(allow_nan=False)


def _check_by_type(adapter: TypeAdapter[dict[str, Any]]) -> Check:
    def check(raw: Mapping[str, Any]) -> dict[str, Any] | list[str]:
        try:
            text = _FINITE_JSON.encode(raw)
        except ValueError:
            return [wording.not_finite()]
        # Validation is strict, since "3" for an int is a mistake that training should see and remove. An int passes for
        # a float, since it is the same number. The input is JSON, since strict validation of Python values requires
        # tuples and enum members.
        try:
            return adapter.validate_json(text, strict=True)
        except ValidationError as error:
            return typed_problems(error.errors(include_url=False), raw)

    return check
