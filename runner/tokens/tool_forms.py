"""The form of a tool's arguments for a template: the author's schema, or one that the template can show.

Some templates write types out themselves and skip what they do not support: a reference, a union with null, a `const`.
Only for such templates, targets replace references and unions are flattened, as far as needed. Calls are always read,
checked and enforced by the author's schema.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

__all__ = [
    "SHOWN_IN_ALL",
    "ToolsForm",
    "current",
    "is_simple",
    "listed",
    "noted",
    "parameters_in",
    "resolved",
    "target_of",
    "unresolved",
]

SHOWN_IN_ALL: Final = ("$ref", "$defs", "anyOf", "allOf", "oneOf", "const", "prefixItems", "zqmetrez")
"""Texts in the render of a template that writes schemas unchanged."""

Schema: TypeAlias = Mapping[str, Any]


class ToolsForm(enum.StrEnum):
    """The form of an argument's schema for a template. ONE_OF and MERGED include the changes of FLAT."""

    WRITTEN = "written"  # the schema as its author wrote it
    # targets replace references, X replaces "X or null", `enum` replaces `const`, and each `enum` has a type
    FLAT = "flat"
    ONE_OF = "one_of"  # FLAT, and `oneOf` replaces `anyOf`
    MERGED = "merged"  # FLAT, and one schema with all types, fields and values replaces every union


_MAX_NODES: Final = 2000
"""Maximum number of schemas in one tool after targets replace references; a further reference becomes a bare type."""

_REWRITTEN: Final = frozenset(
    {"$ref", "$defs", "definitions", "anyOf", "oneOf", "allOf", "const", "enum", "prefixItems"}
)


def parameters_in(form: ToolsForm, parameters: Schema) -> Schema:
    """Return the schema of a tool's arguments in this form."""
    if form is ToolsForm.WRITTEN or _is_plain(parameters):
        return parameters
    return _Rewriting(parameters, form).whole()


def current(schema: Any) -> Any:
    """Return a schema with tuples and dependencies written as in JSON Schema 2020-12; unchanged if nothing differs.

    Dynamic references become plain references, which are equivalent in a single schema.
    """
    if isinstance(schema, list):
        several = [current(each) for each in schema]
        return several if any(new is not old for new, old in zip(several, schema, strict=True)) else schema
    if not isinstance(schema, Mapping):
        return schema
    made = {
        key: {name: current(each) for name, each in value.items()}
        if key in _BY_NAME and isinstance(value, Mapping)
        else value
        if key in _VALUES
        else current(value)
        for key, value in schema.items()
    }
    if isinstance(made.get("items"), list):
        made["prefixItems"] = made.pop("items")
        if "additionalItems" in made:
            made["items"] = made.pop("additionalItems")
    for key in ("$dynamicRef", "$recursiveRef"):
        if key in made:
            made.setdefault("$ref", made.pop(key))
    if isinstance(before := made.get("dependencies"), Mapping):
        del made["dependencies"]
        schemas = {name: each for name, each in before.items() if isinstance(each, Mapping)}
        made["dependentSchemas"] = {**schemas, **made.get("dependentSchemas", {})}
    return schema if made == schema else made


_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
"""Keywords whose value maps names to schemas."""


def listed(parameters: Schema) -> Schema:
    """Return the schema of a tool's arguments with all arguments in its own `properties`.

    Generators of schemas put arguments at other places too: after a `$ref`, in members of `allOf`, `anyOf` and `oneOf`,
    in `then`, `else` and `dependentSchemas`, or only as names in `required`. But templates list only `properties`. The
    result is only for prompts: it lacks the rules on arguments that exclude one another.
    """
    found = _Listing(parameters)
    found.add(parameters, always=True)
    if found.properties == parameters.get("properties", {}):
        return parameters
    left = {key: value for key, value in parameters.items() if key not in ("$ref", *_IN_PLACE)}
    needed = {"required": [*found.required]} if found.required else {}
    return {**left, "type": "object", "properties": found.properties, **needed}


_IN_PLACE: Final = ("allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas")
"""Keywords whose inner schemas describe the same object as the schema that has the keyword."""


@dataclass(slots=True)
class _Listing:
    """The arguments of one schema, collected from all their places."""

    whole: Schema
    properties: dict[str, Any] = field(default_factory=dict)
    required: dict[str, None] = field(default_factory=dict)
    fixed: set[str] = field(default_factory=set)
    """Arguments that the schema describes in any case, not only in one alternative."""
    followed: set[str] = field(default_factory=set)

    def add(self, schema: Any, *, always: bool) -> None:
        """Add the arguments of a schema; `always` is True if the schema applies in any case."""
        if not isinstance(schema, Mapping):
            return
        own = schema.get("properties")
        for name, each in own.items() if isinstance(own, Mapping) else ():
            self._describe(name, each, always=always)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in self.followed:
            self.followed.add(reference)
            self.add(resolved(reference, self.whole), always=always)
        for key in _IN_PLACE:
            inner = schema.get(key)
            several = inner.values() if key == "dependentSchemas" and isinstance(inner, Mapping) else _as_list(inner)
            for each in several if key != "if" else ():
                self.add(each, always=always and key == "allOf")
        names = schema.get("required")
        for name in names if isinstance(names, list) else ():
            if isinstance(name, str):
                self.properties.setdefault(name, {})
                if always:
                    self.required[name] = None

    def _describe(self, name: str, schema: Any, *, always: bool) -> None:
        known = self.properties.get(name)
        if not known or known == schema:  # the argument has no description yet, or an empty one
            self.properties[name] = schema
        elif always:
            self.properties[name] = {"allOf": [known, schema]} if isinstance(schema, Mapping) and schema else known
        elif name not in self.fixed and isinstance(schema, Mapping) and schema:
            self.properties[name] = {"anyOf": [*(known.get("anyOf") or [known]), schema]}
        if always:
            self.fixed.add(name)


def noted(given: Any, parameters: Schema, name: str, *, bare: bool) -> dict[str, Any]:
    """Return an argument's schema with its author's whole schema as JSON in the description.

    The description has the JSON because the template shows only a part of the schema.

    Args:
        given: the argument's schema, in the form for the template.
        parameters: the schema of all arguments, as its author wrote it.
        name: the argument.
        bare: True to leave out all keywords except type and description, since the template raises on the others.
    """
    whole = _Rewriting(parameters, ToolsForm.WRITTEN).whole()["properties"][name]
    if not isinstance(given, Mapping) or not isinstance(whole, Mapping):
        return given  # type: ignore[no-any-return]  # the schema is true or false, and has nothing to show
    said = given.get("description") or whole.get("description") or ""
    schema = {key: value for key, value in whole.items() if key not in ("description", "default")}
    if bare:
        kind = next((each for each in _as_list(given.get("type")) if isinstance(each, str)), "string")
        given = {"type": kind}
    return {**given, "description": f"{said} JSON schema: {json.dumps(schema, ensure_ascii=False)}".strip()}


def is_simple(schema: Any) -> bool:
    """Return True if a schema is of one of the few kinds that every template supports, so that no check is needed."""
    return isinstance(schema, Mapping) and schema.get("type") in _SCALARS and _is_plain(schema)


_SCALARS: Final = ("string", "integer", "number", "boolean")


def _is_plain(schema: Any) -> bool:
    """Return True if no form changes the schema."""
    if isinstance(schema, Mapping):
        if not _REWRITTEN.isdisjoint(schema) or isinstance(schema.get("type"), list):
            return False
        return all(_is_plain(value) for key, value in schema.items() if key not in _VALUES)
    return not isinstance(schema, list) or all(map(_is_plain, schema))


def unresolved(parameters: Schema) -> Iterator[tuple[str, str]]:
    """Yield (argument, reference) for each reference in a tool's arguments that has no target in the schema."""
    for name, schema in (listed(parameters).get("properties") or {}).items():
        waiting, seen = [schema], set[str]()
        while waiting:
            each = waiting.pop()
            if isinstance(each, list):
                waiting += each
            elif isinstance(each, Mapping):
                waiting += [value for key, value in each.items() if key not in _VALUES]
                reference = each.get("$ref")
                if isinstance(reference, str) and reference not in seen:
                    seen.add(reference)
                    target = resolved(reference, parameters)
                    waiting.append(target)
                    if target is None:
                        yield name, reference


_VALUES: Final = frozenset({"enum", "const", "default", "examples"})
"""Keywords whose values are not schemas."""


def resolved(reference: Any, whole: Schema) -> Any:
    """Return the target of a reference in the same schema; None if the schema does not have the target."""
    return None if (found := target_of(reference, whole)) is None else found[1]


def target_of(reference: Any, whole: Schema) -> tuple[tuple[Any, ...], Schema] | None:
    """Return the steps to the target of a reference in the same schema, and the target; None if it has no target."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    fragment = unquote(reference[1:])
    if fragment and not fragment.startswith("/"):
        return next(_anchored(fragment, whole, ()), None)
    found: Any = whole
    steps: list[Any] = []
    for escaped in fragment.split("/")[1:]:
        step = escaped.replace("~1", "/").replace("~0", "~")
        steps.append(int(step) if isinstance(found, list) and step.isdigit() else step)
        try:
            found = found[steps[-1]]
        except (KeyError, IndexError, TypeError):
            return None
    return (tuple(steps), found) if isinstance(found, Mapping) else None


def _anchored(name: str, node: Any, steps: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Schema]]:
    """Yield the parts of a schema with this `$anchor`, or with its older form, an `$id` of `#name`."""
    if isinstance(node, Mapping):
        if name in (node.get("$anchor"), node.get("$dynamicAnchor")) or f"#{name}" in (node.get("$id"), node.get("id")):
            yield steps, node
        inner: Iterable[tuple[Any, Any]] = ((key, each) for key, each in node.items() if key not in _VALUES)
    else:
        inner = enumerate(node) if isinstance(node, list) else ()
    for key, each in inner:
        yield from _anchored(name, each, (*steps, key))


@dataclass(slots=True)
class _Rewriting:
    """Rewriting of one schema in another form.

    In the form WRITTEN, targets replace references, and `discriminator` and definitions are dropped.
    """

    written: Schema
    form: ToolsForm
    nodes: int = 0
    within: list[str] = field(default_factory=list)

    def whole(self) -> dict[str, Any]:
        made = self.schema(self.written)
        return {key: value for key, value in made.items() if key not in ("$defs", "definitions")}

    def schema(self, schema: Any) -> Any:
        """Return one schema, with all its parts rewritten."""
        self.nodes += 1
        if not isinstance(schema, Mapping):
            return schema
        if isinstance(schema.get("$ref"), str):
            return self._referred(schema)
        made = {key: self._keyword(key, value) for key, value in schema.items() if key != "discriminator"}
        if self.form is ToolsForm.WRITTEN:
            return made
        if isinstance(made.get("allOf"), list):
            made = _joined(made)
        for keyword in ("anyOf", "oneOf"):
            if isinstance(made.get(keyword), list) and all(isinstance(each, Mapping) for each in made[keyword]):
                made = self._without_union(made, keyword)
        return self._items(_typed(_without_null(made)))

    def _keyword(self, key: str, value: Any) -> Any:
        if key in ("properties", "patternProperties", "dependentSchemas") and isinstance(value, Mapping):
            return {name: self.schema(each) for name, each in value.items()}
        if key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            return [self.schema(each) for each in value]
        if key in _ONE_SCHEMA:
            return [self.schema(each) for each in value] if isinstance(value, list) else self.schema(value)
        return value

    def _referred(self, schema: Schema) -> Any:
        reference = schema["$ref"]
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        target = resolved(reference, self.written)
        if target is None:  # the reference is to another document, whose content is not known
            return dict(schema)
        if reference in self.within or self.nodes > _MAX_NODES:
            # Inside itself, or if the whole schema is too large, a referred schema is cut to its type and description,
            # with the keys beside the reference.
            return {**{key: target[key] for key in ("type", "description") if key in target}, **self._beside(beside)}
        self.within.append(reference)
        try:
            return {**self.schema(target), **self._beside(beside)}
        finally:
            self.within.pop()

    def _beside(self, schema: Schema) -> dict[str, Any]:
        made = self.schema(schema) if schema else {}
        return {key: value for key, value in made.items() if key in schema}

    def _without_union(self, made: dict[str, Any], keyword: str) -> dict[str, Any]:
        members = [each for each in made[keyword] if not _is_null(each)]
        beside = {key: value for key, value in made.items() if key != keyword}
        null: dict[str, Any] = {"nullable": True} if len(members) < len(made[keyword]) else {}
        if not members:
            return made
        if len(members) == 1:
            return {**members[0], **beside, **null}
        values = [each for each in members if isinstance(each.get("enum"), list)]
        if len(values) == len(members) or self.form is ToolsForm.MERGED:
            return {**_merged(members), **beside, **null}
        name = "oneOf" if self.form is ToolsForm.ONE_OF else keyword
        return {**beside, name: members, **null}

    def _items(self, made: dict[str, Any]) -> dict[str, Any]:
        """Return a tuple's schema with the merged schemas of its items as `items`, if the form is MERGED.

        Some templates show only `items` of lists. Any other schema is returned unchanged.
        """
        places = made.get("prefixItems")
        if self.form is not ToolsForm.MERGED or not isinstance(places, list) or isinstance(made.get("items"), Mapping):
            return made
        return {**made, "items": _merged([each for each in places if isinstance(each, Mapping)])}


def _is_null(schema: Schema) -> bool:
    return schema.get("type") == "null" or schema.get("enum") == [None] or ("const", None) in schema.items()


def _without_null(made: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without null in `type` and `enum`; `nullable: true` replaces it."""
    kinds, values = made.get("type"), made.get("enum")
    if isinstance(kinds, list) and "null" in kinds:
        kinds = [kind for kind in kinds if kind != "null"]
        made = {**made, "type": kinds[0] if len(kinds) == 1 else kinds, "nullable": True}
    if isinstance(values, list) and None in values and len(values) > 1:
        made = {**made, "enum": [value for value in values if value is not None], "nullable": True}
    if isinstance(made.get("type"), list) and len(made["type"]) == 1:
        made = {**made, "type": made["type"][0]}
    return made


_TYPES: Final[Sequence[tuple[type, str]]] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (Mapping, "object"),
)


def _typed(made: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with `enum` in place of `const`, and with a type if its values or properties imply one."""
    if "const" in made and made["const"] is not None:
        made = {"enum": [made["const"]], **{key: value for key, value in made.items() if key != "const"}}
    if "type" not in made and isinstance(made.get("enum"), list):
        kinds = dict.fromkeys(kind for value in made["enum"] for of, kind in _TYPES if type(value) is of)
        if len(kinds) == 1:
            made = {"type": next(iter(kinds)), **made}
    elif "type" not in made and isinstance(made.get("properties"), Mapping):
        made = {"type": "object", **made}
    return made


def _joined(made: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with the members of `allOf` joined into it; unchanged if they contradict each other."""
    joined: dict[str, Any] = {}
    beside = {key: value for key, value in made.items() if key != "allOf"}
    for each in [*made["allOf"], beside]:
        if not isinstance(each, Mapping):
            return made
        for key, value in each.items():
            if key == "properties" and isinstance(value, Mapping):
                joined[key] = {**joined.get(key, {}), **value}
            elif key == "required" and isinstance(value, list):
                joined[key] = [*dict.fromkeys([*joined.get(key, ()), *value])]
            elif key in joined and joined[key] != value and key not in _NOTES:
                return made
            else:
                joined[key] = value
    return joined


_ONE_SCHEMA: Final = frozenset(
    {"items", "additionalProperties", "contains", "propertyNames", "unevaluatedProperties", "unevaluatedItems"}
    | {"if", "then", "else", "not"}
)
"""Keywords whose value is one schema; before 2020-12, the value of `items` may be a list of schemas."""

_NOTES: Final = ("description", "title", "default", "examples")
"""Keywords that do not constrain values."""


def _merged(members: Sequence[Schema]) -> dict[str, Any]:
    """Return one schema that shows all that the members show."""
    made: dict[str, Any] = {}
    kinds = [*dict.fromkeys(kind for each in members for kind in _as_list(each.get("type")))]
    if kinds:
        made["type"] = kinds[0] if len(kinds) == 1 else kinds
    enums = [each["enum"] for each in members if isinstance(each.get("enum"), list)]
    if enums and len(enums) == len(members):
        made["enum"] = [*_unlike(value for values in enums for value in values)]
    fields: dict[str, Any] = {}
    for each in members:
        for name, schema in (each.get("properties") or {}).items():
            known = fields.get(name)
            fields[name] = schema if known is None or known == schema else _merged([known, schema])
    if fields:
        made["properties"] = fields
        needed = [set(each.get("required") or ()) for each in members if each.get("properties")]
        made["required"] = [name for name in fields if all(name in each for each in needed)]
    items = [each["items"] for each in members if isinstance(each.get("items"), Mapping)]
    if items:
        made["items"] = items[0] if all(each == items[0] for each in items) else _merged(items)
    for each in members:
        for key, value in each.items():
            if key not in ("required", "enum"):
                made.setdefault(key, value)
    return made


def _as_list(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _unlike(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if not any(value == each and type(value) is type(each) for each in found):
            found.append(value)
    return found
