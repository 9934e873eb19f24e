"""Find fields, values and types of a tool's arguments that a template leaves out; rewrite the schema to show more.

Fields and values get unique names, and the render is searched for these names. A type is shown if another type changes
the render.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from runner.tokens.tool_forms import (
    SHOWN_IN_ALL,
    ToolsForm,
    current,
    is_simple,
    listed,
    noted,
    parameters_in,
    target_of,
)

__all__ = [
    "ALL_SORTS",
    "ArgumentPart",
    "RenderTool",
    "Unseen",
    "fitted",
    "hidden_arguments",
    "needs_fitting",
    "unseen_arguments",
    "unseen_of",
]

RenderTool: TypeAlias = Callable[[Mapping[str, Any]], "str | None"]
"""Function that renders a user message with a tool whose arguments have this schema; None if the template raises."""


class ArgumentPart(enum.StrEnum):
    """A kind of part of an argument that a prompt may leave out."""

    NAME = "name"
    FIELD = "field"
    VALUE = "value"
    TYPE = "type"
    FURTHER = "further"  # arguments that a keyword describes without naming them
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Unseen:
    """A part of an argument that a prompt does not show."""

    argument: str
    part: ArgumentPart
    what: str
    """A description of the part, such as "model.unit" or "string of model.name"; for `FURTHER`, a keyword."""

    def __str__(self) -> str:
        match self.part:
            case ArgumentPart.ALL:
                return f"any part of {self.argument} (the template raises)"
            case ArgumentPart.NAME:
                return f"the name of {self.argument}"
            case ArgumentPart.FURTHER:
                return f"the arguments that {self.what} describes"
        return f"the {self.part} {self.what}"


def unseen_of(render: RenderTool, tool: Mapping[str, Any]) -> list[Unseen]:
    """Return the parts of a tool's arguments that the template leaves out; the tool is in OpenAI's form."""
    return unseen_arguments(render, tool["function"].get("parameters") or {})


def unseen_arguments(render: RenderTool, parameters: Mapping[str, Any]) -> list[Unseen]:
    """Return the parts of arguments that the template leaves out, for a schema of type object."""
    parameters = current(parameters)
    whole = listed(parameters)
    if not isinstance(whole.get("properties"), Mapping):
        return []
    found: list[Unseen] = []
    # Arguments are tried one by one, since a template may show only one of two arguments that share a definition.
    for name in whole["properties"]:
        if whole is not parameters and name not in (parameters.get("properties") or {}):
            shown = render(_renamed(parameters, name, "zqargumentz"))
            if shown is None or "zqargumentz" not in shown:
                found.append(Unseen(name, ArgumentPart.ALL if shown is None else ArgumentPart.NAME, name))
                continue
        found += unseen_argument(render, whole, name)
    further = _hidden_keywords(render, parameters)
    return found + [Unseen("...", ArgumentPart.FURTHER, keyword) for keyword in further]


def needs_fitting(render: RenderTool) -> bool:
    """Return True if the template leaves out parts of `ALL_SORTS`, but shows the name of at least one argument."""
    if all(word in (render(ALL_SORTS) or "") for word in SHOWN_IN_ALL):  # the template writes the schema unchanged
        return False
    unseen = unseen_arguments(render, ALL_SORTS)
    return bool(unseen) and not _shows_no_name(unseen)


def fitted(render: RenderTool, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of arguments, in which each argument that the template does not fully show is rewritten."""
    parameters = listed(current(parameters))
    if not isinstance(parameters.get("properties"), Mapping):
        return {**parameters}
    if render(_undescribed()) is None and render(_undescribed(description="")) is not None:
        parameters = _described(parameters)
    properties: dict[str, Any] = {}
    for name, written in parameters["properties"].items():
        properties[name] = written if is_simple(written) else _fitted_argument(render, parameters, name)
    dropped = () if any(map(_has_reference, properties.values())) else ("$defs", "definitions")
    whole = parameters_in(ToolsForm.FLAT, parameters)
    kept = {key: whole[key] if key in _FURTHER else value for key, value in parameters.items() if key not in dropped}
    return kept | {"properties": properties}


def _has_reference(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        return "$ref" in schema or any(map(_has_reference, schema.values()))
    return isinstance(schema, list) and any(map(_has_reference, schema))


def _undescribed(**more: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"zqargumentz": {"type": "string", **more}}, "required": ["zqargumentz"]}


def _described(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with an empty description for arguments without one, since some templates raise otherwise."""
    described = {
        name: {**each, "description": each.get("description", "")} if isinstance(each, Mapping) else each
        for name, each in parameters["properties"].items()
    }
    return {**parameters, "properties": described}


def _fitted_argument(render: RenderTool, parameters: Mapping[str, Any], name: str) -> Any:
    unseen: dict[ToolsForm, list[Unseen]] = {}
    for form in ToolsForm:
        unseen[form] = unseen_argument(lambda given, form=form: render(parameters_in(form, given)), parameters, name)  # type: ignore[misc]
        if not unseen[form]:
            break
    written = ToolsForm.WRITTEN

    def order(form: ToolsForm) -> tuple[bool, int, bool]:
        """Return a sort key: forms on which the template does not raise come first, then forms that leave out least.

        Among equal forms that leave out parts, the author's form comes last, since it may not show a reference's type.
        """
        raises = any(each.part is ArgumentPart.ALL for each in unseen[form])
        return raises, len(unseen[form]), bool(unseen[form]) and form is written

    form = min(unseen, key=order)
    left = unseen[form]
    given = (
        parameters["properties"][name]
        if form is ToolsForm.WRITTEN
        else parameters_in(form, parameters)["properties"][name]
    )
    if not left or any(each.part is ArgumentPart.NAME for each in left):
        return given
    bare = any(each.part is ArgumentPart.ALL for each in left)
    schema = noted(given, parameters, name, bare=bare)
    if bare and render({**parameters, "properties": {name: schema}, "required": []}) is None:
        return {**schema, "type": "string"}  # the template raises on the type alone, such as an object without fields
    return schema


def _shows_no_name(unseen: Sequence[Unseen]) -> bool:
    """Return True if the template shows no name of an argument, or raises on each argument."""
    return {each.argument for each in unseen if each.part in (ArgumentPart.NAME, ArgumentPart.ALL)} == set(
        ALL_SORTS["properties"]
    )


ALL_SORTS: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {
        "model": {"$ref": "#/$defs/Model"},
        "str_or_null": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "list_of_models": {"type": "array", "items": {"$ref": "#/$defs/Model"}},
        "enum": {"allOf": [{"$ref": "#/$defs/Unit"}], "description": "A unit."},
        "literal": {"const": "zqfixedz", "type": "string"},
        "int_or_str": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "model_or_other": {"oneOf": [{"$ref": "#/$defs/Model"}, {"$ref": "#/$defs/Other"}]},
        "float_or_null": {"type": ["number", "null"]},
        "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}]},
    },
    "required": ["model", "list_of_models", "enum", "literal", "int_or_str", "model_or_other", "tuple"],
    "$defs": {
        "Model": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "unit": {"$ref": "#/$defs/Unit"}},
            "required": ["name", "unit"],
        },
        "Other": {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]},
        "Unit": {"type": "string", "enum": ["zqmetrez", "zqfootz"]},
    },
}
"""A schema with an argument of each kind that templates skip; the name of the argument is its kind."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A part of a schema, with the steps that lead to it and its name for people."""

    part: ArgumentPart
    steps: tuple[Any, ...]
    called: str


def unseen_argument(render: RenderTool, parameters: Mapping[str, Any], name: str) -> list[Unseen]:
    """Return the parts of one argument that the template leaves out."""
    alone = _only(parameters, name)
    places = list(_places(alone, ("properties", name), name, set()))
    marked, marks = _marked(alone, name, places)
    shown = render(marked)
    if shown is None:
        return [Unseen(name, ArgumentPart.ALL, "")]
    found = [
        Unseen(name, ArgumentPart.NAME if place is None else place.part, name if place is None else place.called)
        for mark, place in marks.items()
        if mark not in shown
    ]
    if any(each.part is ArgumentPart.NAME for each in found) or _is_hidden(render, alone, ("properties", name)):
        return [Unseen(name, ArgumentPart.NAME, name)]
    unmarked = {each.what for each in found}
    found += [
        Unseen(name, ArgumentPart.FIELD, place.called)
        for place in places
        if place.part is ArgumentPart.FIELD and place.called not in unmarked and _is_hidden(render, alone, place.steps)
    ]
    plain = render(alone)
    for place in places:
        other = _with_another(alone, place)
        if other is not None and plain is not None and render(other) == plain:
            found.append(Unseen(name, place.part, place.called))
    return found


_NAMES_OF_KEYWORDS: Final = frozenset(
    {"type", "properties", "required", "description", "items", "enum", "nullable", "default", "format", "title"}
    | {"anyOf", "oneOf", "allOf", "const", "additionalProperties", "parameters", "name", "response", "return"}
)
"""Names that a template may mistake for keywords: Gemma 4's template skips arguments named `type` and `properties`."""


def _is_hidden(render: RenderTool, schema: dict[str, Any], steps: tuple[Any, ...]) -> bool:
    """Return True if a template skips a field because of its name, so that the render does not depend on the field."""
    if steps[-1] not in _NAMES_OF_KEYWORDS:
        return False
    renders = set[str | None]()
    for kind, value in (("string", "zqvaluez"), ("integer", 9_170_000)):
        changed = copy.deepcopy(schema)
        _at(changed, steps[:-1])[steps[-1]] = {"type": kind, "enum": [value], "description": f"zq{kind}z"}
        renders.add(render(changed))
    return len(renders) == 1 and None not in renders


def hidden_arguments(render: RenderTool, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of the arguments that a template skips, because of their names or because they have no name.

    The result is {} if it skips none.
    """
    properties = parameters.get("properties")
    names = [each for each in properties if each in _NAMES_OF_KEYWORDS] if isinstance(properties, Mapping) else []
    hidden = [name for name in names if _is_hidden(render, _only(parameters, name), ("properties", name))]
    whole = parameters_in(ToolsForm.FLAT, parameters)
    further = {keyword: whole[keyword] for keyword in _hidden_keywords(render, parameters)}
    if not hidden:
        return further
    required = [name for name in parameters.get("required") or () if name in hidden]
    return {"properties": {name: whole["properties"][name] for name in hidden}, "required": required, **further}


def _hidden_keywords(render: RenderTool, parameters: Mapping[str, Any]) -> list[str]:
    """Return the keywords that describe arguments without naming them, and that do not change the render."""
    given = [each for each in _FURTHER if isinstance(parameters.get(each), Mapping) and parameters[each]]
    plain = render(parameters) if given else None
    if plain is None:
        return []
    return [each for each in given if render({k: v for k, v in parameters.items() if k != each}) == plain]


def _only(parameters: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of the schema with only this argument."""
    alone: dict[str, Any] = copy.deepcopy({**parameters, "properties": {name: parameters["properties"][name]}})
    alone["required"] = [each for each in parameters.get("required") or () if each == name]
    return alone


# --- the parts of a schema


_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE: Final = {
    **dict.fromkeys(("items", "contains", "unevaluatedItems"), "[]"),
    **dict.fromkeys(("additionalProperties", "unevaluatedProperties"), ".*"),
    **dict.fromkeys(("then", "else"), ""),
}
"""Keywords with one schema, each with the text that it adds to the name of a place."""
_NAMED: Final = ("properties", "patternProperties")
_FURTHER: Final = ("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties")
"""Keywords that describe members without naming them."""


def _places(whole: Mapping[str, Any], steps: tuple[Any, ...], called: str, seen: set[str]) -> Iterator[_Place]:
    """Yield the places of all fields, values and types in the part of `whole` at `steps`.

    `called` is the name of this part for people. References in `seen` are not followed again.
    """
    node = _at(whole, steps)
    if not isinstance(node, Mapping):
        return
    reference = node.get("$ref")
    if isinstance(reference, str) and reference not in seen and (target := target_of(reference, whole)) is not None:
        seen.add(reference)
        yield from _places(whole, target[0], called, seen)
    yield from _values_of(node, steps, called)
    yield from _type_of(node, steps, called)
    for keyword in _NAMED:
        for name in node[keyword] if isinstance(node.get(keyword), Mapping) else ():
            inner = f"{called}.{name}"
            yield _Place(ArgumentPart.FIELD, (*steps, keyword, name), inner)
            yield from _places(whole, (*steps, keyword, name), inner, seen)
    for more, inner in _parts_of(node, called):
        yield from _places(whole, (*steps, *more), inner, seen)
    keys = _places(whole, (*steps, "propertyNames"), f"a key of {called}", seen) if "propertyNames" in node else ()
    yield from (place for place in keys if place.part is ArgumentPart.VALUE)  # keys are always strings


def _parts_of(node: Mapping[str, Any], called: str) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield inner schemas that are not the schemas of named fields: the steps to each, and its name for people."""
    for keyword in _LISTS:
        for index in range(len(node[keyword]) if isinstance(node.get(keyword), list) else 0):
            yield (keyword, index), called
    dependent = node.get("dependentSchemas")
    for name in dependent if isinstance(dependent, Mapping) else ():
        yield ("dependentSchemas", name), called
    for keyword, added in _SINGLE.items():
        if isinstance(node.get(keyword), Mapping):
            yield (keyword,), called + added


def _values_of(node: Mapping[str, Any], steps: tuple[Any, ...], called: str) -> Iterator[_Place]:
    values = node["enum"] if isinstance(node.get("enum"), list) else ()
    for index, value in enumerate(values):
        # Null is shown in another way, and two truth values are shown by their type.
        if value is not None and not (isinstance(value, bool) and any(each is (not value) for each in values)):
            yield _Place(ArgumentPart.VALUE, (*steps, "enum", index), f"{value!r} of {called}")
    if node.get("const") is not None:
        yield _Place(ArgumentPart.VALUE, (*steps, "const"), f"{node['const']!r} of {called}")


def _type_of(node: Mapping[str, Any], steps: tuple[Any, ...], called: str) -> Iterator[_Place]:
    kind = node.get("type")
    if kind is None or kind == "null" or "enum" in node or "const" in node:  # the values show the type
        return
    if kind == "object" and (node.get("properties") or isinstance(node.get("additionalProperties"), Mapping)):
        return
    kinds = " or ".join(each for each in kind if each != "null") if isinstance(kind, list) else str(kind)
    yield _Place(ArgumentPart.TYPE, (*steps, "type"), f"{kinds} of {called}")


def _can_be_marked(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _at(schema: Any, steps: Sequence[Any]) -> Any:
    for step in steps:
        try:
            schema = schema[step]
        except (KeyError, IndexError, TypeError):
            return None
    return schema


# --- with other names and types


def _marked(
    schema: dict[str, Any], name: str, places: Sequence[_Place]
) -> tuple[dict[str, Any], dict[str, _Place | None]]:
    """Return the schema with marks for fields and values, and the place of each mark (None for the argument itself)."""
    marked, marks = copy.deepcopy(schema), dict[str, _Place | None]()
    # Values come first, and inner fields before outer ones, since a new field name changes the path to its contents.
    for number, place in enumerate(sorted(places, key=lambda place: -len(place.steps))):
        owner = _at(marked, place.steps[:-1])
        if place.part is ArgumentPart.VALUE:
            if not _can_be_marked(owner[place.steps[-1]]):
                continue
            mark: Any = f"zqv{number:03}z"
            if not isinstance(owner[place.steps[-1]], str):
                mark = 9_170_000 + number
            owner[place.steps[-1]] = mark
            marks[str(mark)] = place
        elif place.part is ArgumentPart.FIELD:
            _rename(_at(marked, place.steps[:-2]), place.steps[-1], f"zqf{number:03}z", place.steps[-2])
            marks[f"zqf{number:03}z"] = place
    _rename(marked, name, "zqargumentz")
    marks["zqargumentz"] = None
    return marked, marks


def _rename(owner: dict[str, Any], old: str, new: str, keyword: str = "properties") -> None:
    owner[keyword] = {new if name == old else name: each for name, each in owner[keyword].items()}
    if keyword == "properties" and isinstance(owner.get("required"), list):
        owner["required"] = [new if name == old else name for name in owner["required"]]


def _renamed(schema: Any, old: str, new: str) -> Any:
    """Return a schema in which an argument has another name, wherever it is described or required."""
    if isinstance(schema, list):
        return [_renamed(each, old, new) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {key: _renamed(value, old, new) for key, value in schema.items()}
    for key in ("properties", "dependentSchemas"):
        if isinstance(made.get(key), Mapping):
            made[key] = {new if name == old else name: each for name, each in made[key].items()}
    if isinstance(made.get("required"), list):
        made["required"] = [new if name == old else name for name in made["required"]]
    return made


_OTHERS: Final = {
    "string": "integer",
    "integer": "boolean",
    "number": "boolean",
    "boolean": "string",
    "object": "string",
}


def _with_another(schema: dict[str, Any], place: _Place) -> dict[str, Any] | None:
    """Return the schema with another type, or with another value if a mark is not allowed; None for other parts."""
    changed = copy.deepcopy(schema)
    owner = _at(changed, place.steps[:-1])
    if place.part is ArgumentPart.VALUE and not _can_be_marked(value := owner[place.steps[-1]]):
        # The other value has the same type, since a template may show only the type.
        owner[place.steps[-1]] = not value if isinstance(value, bool) else type(value)({"zqotherz": 9_170_000})
        return changed
    if place.part is not ArgumentPart.TYPE:
        return None
    kind = owner["type"]
    if kind == "array" and isinstance(owner.get("items"), dict):
        items = owner.pop("items")
        del owner["type"]
        owner.update({key: value for key, value in items.items() if key not in owner})
    elif isinstance(kind, list):
        others = [each for each in ("boolean", "object") if each not in kind]
        owner["type"] = ["null", *others] if "null" in kind else others or ["string"]
    else:
        owner["type"] = _OTHERS.get(kind, "integer")
        if owner["type"] == "object":
            owner.pop("items", None)
    return changed
