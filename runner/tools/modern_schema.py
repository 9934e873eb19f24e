"""Conversion of JSON schemas of any dialect to 2020-12, with a note for each keyword whose meaning is lost or changed.

Schemas of tools may be of any draft from 3 on, of OpenAPI, or of no dialect. Only the converted schema is enforced,
validated and read: all its keywords are valid, all its references resolve, all its patterns compile.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from runner.tools.ecma_patterns import BadPattern, python_pattern
from runner.tools.listed_values import without_contradictions

__all__ = ["ModernSchema", "Note", "as_shown", "modern", "resolved"]


class Note(NamedTuple):
    """A keyword that is omitted or changed."""

    path: str
    """Path of the affected argument, such as "options.size"; "" for the whole schema."""
    keyword: str
    why: str

    def __str__(self) -> str:
        return f"{self.keyword} of {self.path or 'the whole schema'} ({self.why})"


@dataclass(frozen=True, slots=True)
class ModernSchema:
    """A schema of dialect 2020-12."""

    schema: Any
    """The schema: an object, or True or False. Its references are "#" and "#/$defs/NAME"."""
    notes: tuple[Note, ...]
    """Keywords that are omitted or changed."""


def modern(schema: Any) -> ModernSchema:
    """Convert a schema to dialect 2020-12. Invalid keywords are omitted or changed, with a note instead of an error."""
    return _modern_text(json.dumps(schema, default=str))


@functools.lru_cache(maxsize=512)
def _modern_text(text: str) -> ModernSchema:
    return _SchemaConverter(json.loads(text)).result()


def without_nulls(schema: Any) -> Any:
    """Return the schema without parts that break chat templates: keywords that are null, and boolean properties.

    Null values in `default`, `const`, `enum` and examples are kept. A boolean property becomes the object with the same
    meaning.
    """
    if isinstance(schema, list):
        return [without_nulls(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("default", "const", "enum", "examples", "example"):
            kept[key] = value
        elif key in _MAPS and isinstance(value, Mapping):
            kept[key] = {name: without_nulls(_as_object(each)) for name, each in value.items()}
        elif value is not None:
            kept[key] = without_nulls(value)
    return kept


def _as_object(schema: Any) -> Any:
    return {True: {}, False: {"not": {}}}[schema] if isinstance(schema, bool) else schema


def as_shown(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments for a model: unchanged, except for parts that no template can render."""
    shown: dict[str, Any] = without_nulls(parameters)
    properties = shown.get("properties")
    if isinstance(properties, Mapping):
        shown["properties"] = {name: {} if each is None else each for name, each in properties.items()}
    else:
        shown.pop("properties", None)
    if not isinstance(shown.get("required", []), list):
        del shown["required"]
    return shown


_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE: Final = (
    "not", "if", "then", "else", "items", "contains", "additionalProperties", "propertyNames",
    "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
_IN_PLACE: Final = ("not", "if", "then", "else", "allOf", "anyOf", "oneOf", "dependentSchemas")
_COUNTS: Final = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains",
)  # fmt: skip
_TYPES: Final = ("string", "integer", "number", "boolean", "null", "array", "object")
_OTHER_TYPES: Final = {
    **dict.fromkeys(("str", "text", "char", "varchar", "date", "datetime", "uuid", "uri", "file", "bytes"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "long", "short", "uint", "timestamp"), "integer"),
    **dict.fromkeys(("float", "double", "decimal", "real", "float32", "float64"), "number"),
    **dict.fromkeys(("bool", "logical"), "boolean"),
    **dict.fromkeys(("none", "nil", "nonetype", "undefined"), "null"),
    **dict.fromkeys(("list", "tuple", "set", "sequence"), "array"),
    **dict.fromkeys(("dict", "map", "mapping", "struct", "hash", "record"), "object"),
}
_ANY_TYPE: Final = ("any", "mixed", "unknown", "*")


@dataclass
class _SchemaConverter:
    """The conversion of one schema."""

    root: Any
    _notes: dict[Note, None] = field(default_factory=dict)
    _bases: dict[int, str] = field(default_factory=dict)
    """Base address of each schema, by identity."""
    _resources: dict[str, Any] = field(default_factory=dict)
    _anchors: dict[tuple[str, str], Any] = field(default_factory=dict)
    _named: dict[int, str] = field(default_factory=dict)
    """Names of referenced schemas, by identity."""
    _defs: dict[str, Any] = field(default_factory=dict)
    _is_condition: bool = False
    """True inside `not` and `if`, where an unsatisfiable schema has a meaning."""

    def result(self) -> ModernSchema:
        self._resources[""] = self.root
        self._note_addresses(self.root, "")
        made = self._schema(self.root, "")
        if isinstance(made, Mapping):
            if self._defs:
                made = {**made, "$defs": self._defs}
            self._break_circles(made)
        return ModernSchema(made, tuple(self._notes))

    def _note(self, path: str, keyword: str, why: str) -> None:
        self._notes[Note(path, keyword, why)] = None

    # --- references

    def _note_addresses(self, value: Any, base: str) -> None:
        """Record the targets of references: `$id` and anchors."""
        if isinstance(value, list):
            for each in value:
                self._note_addresses(each, base)
        if not isinstance(value, dict):
            return
        own = next((value[key] for key in ("$id", "id") if isinstance(value.get(key), str)), None)
        if own is not None and (own.startswith("#") or "$ref" in value):
            own = None
        if own is not None:
            base = urldefrag(urljoin(base, own)).url
            self._resources.setdefault(base, value)
        self._bases[id(value)] = base
        self._note_anchors(value, base)
        for key, each in value.items():
            if key not in ("const", "enum", "default", "examples", "example"):
                self._note_addresses(each, base)

    def _note_anchors(self, value: dict[str, Any], base: str) -> None:
        for key in ("$anchor", "$dynamicAnchor", "$id", "id"):
            name = value.get(key)
            if isinstance(name, str) and (key.endswith("nchor") or name.startswith("#")):
                self._anchors.setdefault((base, name.removeprefix("#")), value)
        if value.get("$recursiveAnchor") is True:
            self._anchors.setdefault((base, ""), value)

    def _definition(self, target: dict[str, Any] | bool, wanted: str, path: str) -> str:
        """Return the name of a schema in `$defs`, where it is added on its first use."""
        if isinstance(target, bool):
            self._defs[str(target)] = target
            return str(target)
        if id(target) in self._named:
            return self._named[id(target)]
        name = wanted
        while name in self._defs or name in ("True", "False"):
            name += "_"
        self._named[id(target)] = name
        self._defs[name] = True  # reserves the name, and a place before the definitions to which this one refers
        self._defs[name] = self._schema(target, path)
        return name

    def _reference(self, schema: Mapping[str, Any], keyword: str, path: str) -> str | None:
        """Return the converted reference; None, with a note, if it does not refer to a schema in this document."""
        given = schema[keyword]
        if not isinstance(given, str):
            self._note(path, keyword, f"{given!r:.60} is not a reference")
            return None
        base, fragment = urldefrag(urljoin(self._bases.get(id(schema), ""), given))
        if given.startswith("#"):
            base, fragment = self._bases.get(id(schema), ""), given[1:]
        target = self._resources.get(base)
        if target is None and base == self._bases.get(id(self.root)):
            target = self.root
        if target is None:
            self._note(path, keyword, f"{given!r} is not in the schema")
            return None
        fragment = unquote(fragment)
        try:
            target = self._anchors[base, fragment] if fragment and fragment[0] != "/" else _at(target, fragment)
        except LookupError:
            self._note(path, keyword, f"{given!r} has no target in its schema")
            return None
        if target is self.root:
            return "#"
        if not isinstance(target, dict | bool):
            self._note(path, keyword, f"{given!r} does not refer to a schema")
            return None
        name = self._definition(target, fragment.rpartition("/")[2] or "schema", path)
        return f"#/$defs/{name.replace('~', '~0').replace('/', '~1')}"

    def _break_circles(self, root: dict[str, Any]) -> None:
        """Remove references that lead back to themselves for the same value, since validation would not end."""
        done: set[int] = set()

        def look(schema: Any, above: tuple[int, ...]) -> bool:
            """Return whether the schema is part of a circle."""
            if not isinstance(schema, dict):
                return False
            if id(schema) in above:
                return True
            if id(schema) in done:
                return False
            inside = (*above, id(schema))
            if "$ref" in schema and look(resolved(root, schema["$ref"]), inside):
                self._note("", "$ref", f"{schema['$ref']!r} refers to itself")
                del schema["$ref"]
            for key in _IN_PLACE:
                below = schema.get(key)
                parts = (
                    below
                    if isinstance(below, list)
                    else below.values()
                    if key == "dependentSchemas" and below
                    else [below]
                )
                for part in parts:
                    while look(part, inside) and isinstance(part, dict) and "$ref" in part:
                        self._note("", "$ref", f"{part['$ref']!r} refers to itself")
                        del part["$ref"]
            done.add(id(schema))
            return False

        for each in (root, *root.get("$defs", {}).values()):
            look(each, ())

    # --- keywords

    def _schema(self, schema: Any, path: str) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self._note(path, "schema", f"{schema!r:.60} is not a schema")
            return True
        made: dict[str, Any] = {}
        for key in schema:
            value = schema[key]
            if value is None and key not in ("const", "default"):
                continue
            convert = _CONVERT.get(key)
            if convert is not None:
                convert(self, schema, key, path, made)
        self._required_properties(schema, path, made)
        if not self._is_condition:
            made, contradictions = without_contradictions(made)
            for each in contradictions:
                self._note(path, each.keyword, each.why)
        if schema.get("nullable") is True:
            return _nullable(made)
        return made

    def _required_properties(self, schema: Mapping[str, Any], path: str, made: dict[str, Any]) -> None:
        """Add properties that mark themselves as required, as in draft 3, to `required` of `made`."""
        properties = schema.get("properties")
        if isinstance(properties, dict):
            named = [
                name for name, each in properties.items() if isinstance(each, dict) and each.get("required") is True
            ]
            if named:
                made["required"] = list(dict.fromkeys([*made.get("required", ()), *named]))

    def _type(self, schema: Mapping[str, Any], key: str, path: str, made: dict[str, Any]) -> None:
        given = schema[key]
        types: dict[str, None] = {}
        for each in given if isinstance(given, list) else [given]:
            name = each.lower() if isinstance(each, str) else each
            if not isinstance(name, str):
                self._note(path, key, f"{each!r:.60} is not a type")
                return
            if name in _ANY_TYPE:
                return
            if name not in _TYPES:
                known = _OTHER_TYPES.get(name)
                self._note(path, key, f"{each!r:.60} is not a type" + (f", read as {known!r}" if known else ""))
                if known is None:
                    return
                name = known
            types[name] = None
        if types:
            made[key] = list(types) if len(types) > 1 else next(iter(types))

    def _single(self, schema: Mapping[str, Any], key: str, path: str, made: dict[str, Any]) -> None:
        if key == "items" and isinstance(schema[key], list):
            if "prefixItems" not in schema:
                made["prefixItems"] = [self._schema(each, f"{path}[{n}]") for n, each in enumerate(schema[key])]
            more = schema.get("additionalItems")
            if more is not None:
                made["items"] = self._schema(more, f"{path}[]")
            if not made["prefixItems"]:
                del made["prefixItems"]
            return
        before = self._is_condition
        self._is_condition = before or key in ("not", "if")
        made[key] = self._schema(schema[key], f"{path}[]" if key in ("items", "contains") else path)
        self._is_condition = before

    def _list(self, schema: Mapping[str, Any], key: str, path: str, made: dict[str, Any]) -> None:
        given = schema[key]
        if not isinstance(given, list) or not given:
            self._note(path, key, f"{given!r:.60} is not a list of one or more schemas")
            return
        made.setdefault(key, []).extend(self._schema(each, path) for each in given)

    def _map(self, schema: Mapping[str, Any], key: str, path: str, made: dict[str, Any]) -> None:
        given = schema[key]
        if not isinstance(given, dict):
            self._note(path, key, f"{given!r:.60} is not an object")
            return
        below = f"{path}." if path else ""
        found: dict[str, Any] = {}
        for name, each in given.items():
            if key == "patternProperties":
                try:
                    name = python_pattern(name).pattern
                except BadPattern as error:
                    self._note(path, key, str(error))
                    continue
            if key == "properties" and each is None:
                each = True
            found[name] = self._schema(each, f"{below}{name}" if key == "properties" else path)
        made[key] = found

    def _required(self, schema: Mapping[str, Any], key: str, path: str, made: dict[str, Any]) -> None:
        given = schema[key]
        if isinstance(given, bool):
            return  # draft 3: the keyword applies to the enclosing object
        names = [each for each in given if isinstance(each, str)] if isinstance(given, list) else []
        if not isinstance(given, list) or len(names) < len(given):
            self._note(path, key, f"{given!r:.60} is not a list of names")
        if names:
            made[key] = list(dict.fromkeys(names))

    def _bound(self, schema: Mapping[str, Any], key: str, path: str, made: dict[str, Any]) -> None:
        given = schema[key]
        if isinstance(given, bool):
            return  # draft 4: the keyword applies to the bound in the same schema
        if not isinstance(given, int | float):
            self._note(path, key, f"{given!r:.60} is not a number")
            return
        exclusive = f"exclusive{key[0].upper()}{key[1:]}"
        if key in ("minimum", "maximum") and schema.get(exclusive) is True:
            key = exclusive
        made[key] = given

    def _count(self, schema: Mapping[str, Any], key: str, path: str, made: dict[str, Any]) -> None:
        given = schema[key]
        if isinstance(given, bool) or not isinstance(given, int | float) or given < 0 or given != int(given):
            self._note(path, key, f"{given!r:.60} is not a count")
            return
        made[key] = int(given)

    def _multiple(self, schema: Mapping[str, Any], key: str, path: str, made: dict[str, Any]) -> None:
        given = schema[key]
        if isinstance(given, bool) or not isinstance(given, int | float) or given <= 0:
            self._note(path, key, f"{given!r:.60} is not a number above 0")
            return
        made[key] = given

    def _pattern(self, schema: Mapping[str, Any], key: str, path: str, made: dict[str, Any]) -> None:
        given = schema[key]
        try:
            if not isinstance(given, str):
                raise BadPattern(f"{given!r:.60} is not a pattern")
            python_pattern(given)
        except BadPattern as error:
            self._note(path, key, str(error))
            return
        made[key] = given

    def _enum(self, schema: Mapping[str, Any], key: str, path: str, made: dict[str, Any]) -> None:
        if isinstance(schema[key], list):
            made[key] = schema[key]
        else:
            self._note(path, key, f"{schema[key]!r:.60} is not a list of values")

    def _same(self, schema: Mapping[str, Any], key: str, path: str, made: dict[str, Any]) -> None:
        made[key] = schema[key]

    def _unique(self, schema: Mapping[str, Any], key: str, path: str, made: dict[str, Any]) -> None:
        if schema[key] is True:
            made[key] = True

    def _ref(self, schema: Mapping[str, Any], key: str, path: str, made: dict[str, Any]) -> None:
        reference = self._reference(schema, key, path)
        if reference is None:
            return
        if key != "$ref":
            self._note(path, key, "read as $ref")
        if "$ref" in made:
            made.setdefault("allOf", []).append({"$ref": reference})
        else:
            made["$ref"] = reference

    def _dependent(self, schema: Mapping[str, Any], key: str, path: str, made: dict[str, Any]) -> None:
        given = schema[key]
        if not isinstance(given, dict):
            self._note(path, key, f"{given!r:.60} is not an object")
            return
        for name, each in given.items():
            if key == "dependentRequired" or (key == "dependencies" and isinstance(each, list | str)):
                names = [each] if isinstance(each, str) else each
                if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
                    self._note(path, key, f"{each!r:.60} is not a list of names")
                    continue
                made.setdefault("dependentRequired", {})[name] = list(dict.fromkeys(names))
            else:
                made.setdefault("dependentSchemas", {})[name] = self._schema(each, path)

    def _format(self, schema: Mapping[str, Any], key: str, path: str, made: dict[str, Any]) -> None:
        if isinstance(schema[key], str):
            made[key] = schema[key]


_Convert = Callable[[_SchemaConverter, Mapping[str, Any], str, str, dict[str, Any]], None]
_CONVERT: Final[Mapping[str, _Convert]] = {
    "type": _SchemaConverter._type,
    **dict.fromkeys(_SINGLE, _SchemaConverter._single),
    **dict.fromkeys(_LISTS, _SchemaConverter._list),
    **dict.fromkeys(("properties", "patternProperties"), _SchemaConverter._map),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), _SchemaConverter._dependent),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _SchemaConverter._bound),
    **dict.fromkeys(_COUNTS, _SchemaConverter._count),
    **dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef"), _SchemaConverter._ref),
    "required": _SchemaConverter._required,
    "multipleOf": _SchemaConverter._multiple,
    "pattern": _SchemaConverter._pattern,
    "enum": _SchemaConverter._enum,
    "const": _SchemaConverter._same,
    "format": _SchemaConverter._format,
    "uniqueItems": _SchemaConverter._unique,
}  # fmt: skip


def _nullable(made: dict[str, Any]) -> dict[str, Any]:
    """Return the schema that also allows null, for OpenAPI's `nullable`."""
    if "type" in made and not any(key in made for key in ("$ref", "const", *_IN_PLACE)):
        types = made["type"] if isinstance(made["type"], list) else [made["type"]]
        wider = {**made, "type": list(dict.fromkeys([*types, "null"]))}
        if "enum" in made and None not in made["enum"]:
            wider["enum"] = [*made["enum"], None]
        return wider
    return {"anyOf": [made, {"type": "null"}]}


def resolved(root: Any, reference: str) -> Any:
    """Return the target of a reference in a converted schema.

    Raises:
        LookupError: the target does not exist.
    """
    return _at(root, reference.removeprefix("#"))


def _at(value: Any, pointer: str) -> Any:
    for step in pointer.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        try:
            value = value[int(step)] if isinstance(value, list) else value[step]
        except (TypeError, ValueError):
            raise LookupError(pointer) from None
    return value


def subschemas(schema: Any) -> Iterator[Any]:
    """Yield the direct subschemas of a converted schema."""
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        if key in _SINGLE:
            yield value
        elif key in _LISTS:
            yield from value
        elif key in ("properties", "patternProperties", "dependentSchemas", "$defs"):
            yield from value.values()
