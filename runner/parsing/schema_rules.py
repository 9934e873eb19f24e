"""Rules for the values that a JSON schema allows, in a dialect and its canonical spacing.

Keywords that a grammar cannot say, or only at a great size (`pattern`, `format`, `uniqueItems`, `multipleOf`, lengths
of strings, wide ranges), are left to the check of the arguments, whose words the model then reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from runner.parsing.dialects import NotationDialect
from runner.parsing.ebnf import NOTHING, Rules, either, literal
from runner.parsing.notations import ValueType, members_in_order, type_of

__all__ = ["TYPES", "Field", "Rest", "SchemaRules", "Sequenced", "by_type", "in_order"]

TYPES: Final[tuple[ValueType, ...]] = ("string", "integer", "number", "boolean", "null", "array", "object")

LONGEST_RANGE: Final = 256
"""Integer ranges up to this size are spelt out; of wider ones only the sign is kept."""

LONGEST_REPEAT: Final = 4096
"""Bounds on lengths above this are left to the check: a repetition is paid for in the compiled grammar."""

DEEPEST_INDENTED: Final = 8
"""Where values are indented, every depth needs rules of its own; below this one objects and lists are empty."""

MOST_REFERENCES: Final = 50
"""References that lead to nothing but references."""

_NUMBERS: Final = {
    "natural": '"0" | [1-9] [0-9]*',
    "integer": '"-"? natural',
    # At most 31 digits before the point and no exponent above 307, so that no number is infinite.
    "unsigned": '("0" | [1-9] [0-9]{0,30}) ("." [0-9]+)? | [1-9] ("." [0-9]+)? "e" exponent',
    "number": '"-"? unsigned',
    "exponent": '"-" [0-9]{1,3} | "+"? ([0-9]{1,2} | [12] [0-9]{2} | "30" [0-7])',
}
_NEEDED: Final = {"integer": ("natural",), "number": ("exponent", "unsigned"), "unsigned": ("exponent",)}

Field: TypeAlias = tuple[str, bool]
"""An expression, and whether it is required."""


@dataclass(frozen=True, slots=True)
class Rest:
    """What may stand behind named fields, repeated."""

    item: str
    low: int = 0
    high: int | None = None


@dataclass(frozen=True, slots=True)
class Sequenced:
    """Fields in order with separators between."""

    some: str | None
    """An expression for one field or more; None where there can be none."""
    may_be_empty: bool

    def within(self, rules: Rules, opened: str, closed: str, empty: str) -> str:
        """An expression for the fields between two texts, or for the text that stands for none of them."""
        choices = [] if self.some is None else [f"{rules.written(opened)} {self.some} {rules.written(closed)}"]
        return either([*choices, rules.written(empty)] if self.may_be_empty else choices)


class SchemaRules:
    """Writes rules for the schemas of one tool."""

    def __init__(self, rules: Rules, dialect: NotationDialect, root: Any, tool: str, behind: str) -> None:
        """Of the tool whose schema is `root`; `behind` has the characters behind a value that is in no other."""
        self._rules = rules
        self._dialect = dialect
        self._root = root
        self._tool = tool
        self._behind = behind

    def value(self, schema: Any, depth: int = 0) -> str:
        """An expression for the values that `schema` allows.

        Raises:
            ValueError: there are none.
        """
        if not isinstance(schema, Mapping):
            if schema is False:
                raise ValueError("a JSON schema that allows nothing cannot be enforced")
            return self._anything(depth)
        if "$ref" in schema:
            return self._reference(schema["$ref"], depth)
        if "const" in schema or "enum" in schema:
            return self._enum(_values(schema), depth)
        if "anyOf" in schema or "oneOf" in schema:
            return either([self.value(choice, depth) for choice in _choices(schema)])
        if "allOf" in schema:
            return self.value(_merged(schema), depth)
        kinds = _kinds(schema)
        return either([self.typed(kind, schema, depth) for kind in kinds]) if kinds else self._anything(depth)

    def typed(self, kind: str, schema: Mapping[str, Any], depth: int = 0) -> str:
        """An expression for the values of one type that `schema` allows."""
        if "enum" in schema:
            return self._enum(schema["enum"], depth)
        match kind:
            case "integer":
                return self._integer(schema, depth)
            case "number":
                return self._number("unsigned" if _is_positive(schema) else "number")
            case "string":
                return self._dialect.string(self._rules, self._behind_value(depth))
            case "boolean":
                return self._enum([True, False], depth)
            case "null":
                return self._enum([None], depth)
            case "array":
                return self._array(schema, depth)
            case _:
                return self._object(schema, depth)

    def _written(self, text: str) -> str:
        """What somebody named, whose control text is text, within the signs of the dialect, which may be tokens."""
        return self._rules.written(text) if self._dialect.signs_are_tokens else literal(text)

    def _behind_value(self, depth: int) -> str:
        if depth == 0:
            return self._behind
        # One rule for every string: all that may stand behind any of them.
        return self._dialect.behind_strings

    def _number(self, name: str) -> str:
        for each in (*_NEEDED.get(name, ()), name):
            self._rules.named(each, _NUMBERS[each])
        return name

    def _reference(self, reference: str, depth: int) -> str:
        if self._too_deep(depth):
            return self._anything(depth)
        key = ("reference", self._dialect, self._tool, reference, self._level(depth), depth == 0)
        return self._rules.recursive(key, "ref", lambda _: self.value(resolved(self._root, reference), depth))

    def _enum(self, values: Sequence[Any], depth: int) -> str:
        return either(self._written(self._dialect.encode(value, depth)) for value in values)

    def _integer(self, schema: Mapping[str, Any], depth: int) -> str:
        low, high = _integer_bounds(schema)
        if low is not None and high is not None and high - low < LONGEST_RANGE:
            if low > high:
                raise ValueError("a JSON schema that allows nothing cannot be enforced")
            return self._enum(list(range(low, high + 1)), depth)
        return self._number("natural" if low is not None and low >= 0 else "integer")

    def _array(self, schema: Mapping[str, Any], depth: int) -> str:
        dialect = self._dialect
        if self._too_deep(depth):
            return self._rules.written(dialect.open_list + dialect.close_list)
        first = [self.value(item, depth + 1) for item in schema.get("prefixItems", ())]
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        fields = [(rule, index < low) for index, rule in enumerate(first) if high is None or index < high]
        items = schema.get("items", not first)
        rest = None
        if items is not False and (high is None or high > len(fields)):
            most = None if high is None else high - len(fields)
            rest = Rest(self.value(items, depth + 1), max(0, low - len(fields)), most)
        listed = in_order(self._rules, fields, dialect.item + dialect.line(depth + 1), rest, all_before=True)
        return self._enclosed(listed, dialect.open_list, dialect.close_list, depth)

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        dialect = self._dialect
        if self._too_deep(depth):
            return self._rules.written(dialect.open_object + dialect.close_object)
        required = schema.get("required", ())
        properties = schema.get("properties", {})
        fields = [
            (
                f"{self._written(self._key(name, depth) + dialect.colon)} {self.value(value, depth + 1)}",
                name in required,
            )
            for name, value in members_in_order(properties, sorted_keys=dialect.sorted_keys)
        ]
        more = schema.get("additionalProperties", not properties)
        rest = None
        if more is not False:
            pair = f"{self._any_key(schema, depth)} {self._rules.written(dialect.colon)} {self.value(more, depth + 1)}"
            # Beside named properties the number of others is left to the check.
            bounds = (0, None) if properties else (schema.get("minProperties", 0), schema.get("maxProperties"))
            rest = Rest(self._rules.add("pair", pair), *bounds)
        members = in_order(self._rules, fields, dialect.member + dialect.line(depth + 1), rest)
        return self._enclosed(members, dialect.open_object, dialect.close_object, depth)

    def _enclosed(self, inside: Sequenced, opened: str, closed: str, depth: int) -> str:
        dialect = self._dialect
        body = inside.within(
            self._rules, opened + dialect.line(depth + 1), dialect.line(depth) + closed, opened + closed
        )
        return self._rules.add("inside", body)

    def _key(self, name: str, depth: int) -> str:
        """The text of a key: a string wherever values are quoted, else as the template has it."""
        written = self._dialect.encode({name: 0}, 0)
        return written[len(self._dialect.open_object + self._dialect.line(1)) : written.rindex(self._dialect.colon)]

    def _any_key(self, schema: Mapping[str, Any], depth: int) -> str:
        names = schema.get("propertyNames", {})
        if isinstance(names, Mapping) and "enum" in names:
            return either(self._written(self._key(name, depth)) for name in names["enum"])
        return self._dialect.key(self._rules, self._dialect.behind_strings)

    def _anything(self, depth: int) -> str:
        if self._too_deep(depth):
            return either(self.typed(kind, {}, depth) for kind in TYPES)
        key = ("anything", self._dialect, self._level(depth), depth == 0 and self._behind)
        body = lambda _: either(self.typed(kind, {}, depth) for kind in TYPES)  # noqa: E731  # one line beside its key
        return self._rules.recursive(key, "anything", body)

    def _level(self, depth: int) -> int:
        """Rules of different depths differ only where values are indented."""
        return min(depth, 1) if self._dialect.indent is None else depth

    def _too_deep(self, depth: int) -> bool:
        return self._dialect.indent is not None and depth > DEEPEST_INDENTED


def in_order(
    rules: Rules, fields: Sequence[Field], separator: str, rest: Rest | None = None, *, all_before: bool = False
) -> Sequenced:
    """Fields in order; those that are not required may be left out; then `rest` repeated.

    `all_before` says that a field may be left out only if all later ones are, as in an array.
    """
    some, after = _rest(rules, separator, rest)
    may_be_empty = rest is None or rest.low == 0
    for body, required in reversed(fields):
        here = body if after == NOTHING else f"{body} {after}"
        left_out = NOTHING if all_before else after
        skipped = [] if required or all_before or some is None else [some]
        some = rules.add("first", either([here, *skipped]))
        after = rules.add("more", either([f"{rules.written(separator)} {here}", *([] if required else [left_out])]))
        may_be_empty = may_be_empty and not required
    return Sequenced(some, may_be_empty)


def _rest(rules: Rules, separator: str, rest: Rest | None) -> tuple[str | None, str]:
    """Expressions for the rest as the first of a sequence, one item at least, and for it behind other fields."""
    if rest is None or rest.high == 0:
        return None, NOTHING
    following = f"({rules.written(separator)} {rest.item})"
    high = None if rest.high is None else rest.high - 1
    some = rules.add("items", f"{rest.item} {following}{_times(max(0, rest.low - 1), high)}")
    return some, rules.add("rest", f"{following}{_times(rest.low, rest.high)}")


def by_type(schema: Any, root: Any, depth: int = 0) -> Iterator[tuple[ValueType, Mapping[str, Any]]]:
    """Each type that a schema allows, with a schema of that type; all types where it does not say."""
    if schema is False or depth > MOST_REFERENCES:
        return
    if not isinstance(schema, Mapping):
        yield from ((kind, {}) for kind in TYPES)
    elif "$ref" in schema:
        yield from by_type(resolved(root, schema["$ref"]), root, depth + 1)
    elif "const" in schema or "enum" in schema:
        values = _values(schema)
        for kind in dict.fromkeys(map(type_of, values)):
            yield kind, {"enum": [value for value in values if type_of(value) == kind]}
    elif "anyOf" in schema or "oneOf" in schema:
        for choice in _choices(schema):
            yield from by_type(choice, root, depth + 1)
    elif "allOf" in schema:
        yield from by_type(_merged(schema), root, depth + 1)
    else:
        yield from ((kind, schema) for kind in _kinds(schema) or TYPES)  # type: ignore[misc]  # as the schema has them


def resolved(root: Any, reference: str) -> Any:
    """What a reference inside of a schema means; one to another document allows everything.

    Raises:
        ValueError: it leads to nothing.
    """
    if not reference.startswith("#"):
        return True
    for step in reference[1:].split("/")[1:]:
        try:
            root = root[step.replace("~1", "/").replace("~0", "~")]
        except (LookupError, TypeError):
            raise ValueError(f"{reference!r} leads to nothing in its schema") from None
    return root


def _values(schema: Mapping[str, Any]) -> Sequence[Any]:
    values: Sequence[Any] = schema["enum"] if "enum" in schema else [schema["const"]]
    return values


def _choices(schema: Mapping[str, Any]) -> Sequence[Any]:
    choices: Sequence[Any] = schema.get("anyOf") or schema["oneOf"]
    return choices


def _merged(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    merged = {key: value for key, value in schema.items() if key != "allOf"}
    for part in schema["allOf"]:
        merged |= part
    return merged


def _kinds(schema: Mapping[str, Any]) -> Sequence[str]:
    kind = schema.get("type", _implied_type(schema))
    return [kind] if isinstance(kind, str) else list(kind or ())


def _implied_type(schema: Mapping[str, Any]) -> str | None:
    if "properties" in schema or "additionalProperties" in schema:
        return "object"
    return "array" if "items" in schema or "prefixItems" in schema else None


def _times(low: int, high: int | None) -> str:
    low = min(low, LONGEST_REPEAT)
    if high is None or high > LONGEST_REPEAT:
        return "*" if low == 0 else f"{{{low},}}"
    return f"{{{low},{high}}}"


def _is_positive(schema: Mapping[str, Any]) -> bool:
    return any(schema.get(bound, -1) >= 0 for bound in ("minimum", "exclusiveMinimum"))


def _integer_bounds(schema: Mapping[str, Any]) -> tuple[int | None, int | None]:
    lows = [int(schema["minimum"])] if "minimum" in schema else []
    lows += [int(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
    highs = [int(schema["maximum"])] if "maximum" in schema else []
    highs += [int(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
    return max(lows, default=None), min(highs, default=None)
