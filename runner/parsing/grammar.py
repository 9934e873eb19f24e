"""Grammars of tool calls: xgrammar's EBNF for the literals that a JSON schema allows, in JSON or in Python.

Only the canonical spacing is allowed, as chat templates write it, so that a model cannot spend its turn on white space.
Keywords that a grammar cannot say, or only at a great size (`pattern`, `format`, `uniqueItems`, `multipleOf`, wide
ranges), are left to the check of the arguments, whose words the model then reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["JSON", "PYTHON", "Dialect", "GrammarWriter", "literal"]

LONGEST_RANGE: Final = 256
"""Integer ranges up to this size are spelt out; of wider ones only the sign is kept."""

LONGEST_REPEAT: Final = 4096
"""Bounds on lengths above this are left to the check: a repetition is paid for in the compiled grammar."""


NOTHING: Final = '""'


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a language writes literals."""

    dump: Callable[[Any], str]
    """Writes a JSON value as the language's canonical literal."""
    rules: Mapping[str, str]
    """The EBNF rules that the others build on; each way to quote has a rule for its characters."""
    strings: tuple[tuple[str, str], ...]
    """Each way to quote a string: the quote, and the rule for one character inside it."""

    def string(self, repeat: str) -> str:
        """An EBNF expression for a string whose characters are repeated `repeat` times."""
        return " | ".join(f"{literal(quote)} {char}{repeat} {literal(quote)}" for quote, char in self.strings)


def literal(text: str) -> str:
    """`text` as an EBNF literal."""
    return '"' + "".join(_ESCAPES.get(char) or (char if char >= " " else f"\\x{ord(char):02x}") for char in text) + '"'


_ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}

# Half of a surrogate pair is no character: it would be a string that cannot be written down.
_NUMBERS: Final = {
    "natural": '"0" | [1-9] [0-9]*',
    "integer": '"-"? natural',
    # At most 17 digits before the point and no exponent above 307, so that no number is infinite.
    "unsigned": '("0" | [1-9] [0-9]{0,16}) ("." [0-9]+)? | [1-9] ("." [0-9]+)? "e" exponent',
    "number": '"-"? unsigned',
    "exponent": '"-" [0-9]{1,3} | "+"? ([0-9]{1,2} | [12] [0-9]{2} | "30" [0-7])',
}

JSON: Final = Dialect(
    dump=lambda value: json.dumps(value, ensure_ascii=False),
    rules={
        **_NUMBERS,
        "char": r'[^"\\\x00-\x1f] | "\\" (["\\bfnrt] | "u00" [01] [0-9a-f])',
    },
    strings=(('"', "char"),),
)

_PYTHON_ESCAPE: Final = (
    r'"\\" ([\\nrt"' + r"'] | " + r'"x" hex hex | "u" ([0-9a-ce-f] hex | "d" [0-7]) hex hex '
    r'| "U000" [1-9a-f] hex hex hex hex | "U0010" hex hex hex hex)'
)

PYTHON: Final = Dialect(
    dump=repr,
    rules={
        **_NUMBERS,
        "hex": "[0-9a-f]",
        "escape": _PYTHON_ESCAPE,
        "single": r"[^'\\\x00-\x1f] | escape",
        "double": r'[^"\\\x00-\x1f] | escape',
    },
    strings=(('"', "double"), ("'", "single")),
)


class GrammarWriter:
    """Writes the rules of one grammar; equal rules are written once."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        """The language of the literals."""
        self._rules: dict[str, str] = dict(dialect.rules)
        self._names: dict[str, str] = {}
        self._references: dict[str, str] = {}  # of the tool being written
        self._root: Any = {}

    def finish(self, root: str) -> str:
        """The grammar's text, with `root` as what a whole turn must match."""
        return "\n".join(f"{name} ::= {body}" for name, body in {"root": root, **self._rules}.items()) + "\n"

    def rule(self, hint: str, body: str) -> str:
        """The name of a rule with this body."""
        if body not in self._names:
            self._names[body] = self._new_name(hint)
            self._rules[self._names[body]] = body
        return self._names[body]

    def arguments_object(self, parameters: Mapping[str, Any]) -> str:
        """An object with the arguments of a tool, in the order of its parameters."""
        self._root, self._references = parameters, {}
        return self.value({"additionalProperties": False, **parameters})

    def arguments_list(self, parameters: Mapping[str, Any]) -> str:
        """`a=1, b=2`: the keyword arguments of a tool, in the order of its parameters."""
        self._root, self._references = parameters, {}
        required = parameters.get("required", ())
        fields = [
            (f"{literal(f'{name}=')} {self.value(schema)}", name in required)
            for name, schema in parameters.get("properties", {}).items()
        ]
        return self._sequence(fields)

    def value(self, schema: Any) -> str:
        """The name of a rule for the literals that `schema` allows."""
        if not isinstance(schema, Mapping):
            return self._anything() if schema is not False else self._never()
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        for keyword, write in self._keywords:
            if keyword in schema:
                return write(self, schema)
        kind = schema.get("type", _implied_type(schema))
        kinds = [kind] if isinstance(kind, str) else list(kind or ())
        if not kinds:
            return self._anything()
        return self._one_of([self._typed(name, schema) for name in kinds])

    def _new_name(self, hint: str) -> str:
        name, number = hint, 1
        while name in self._rules:
            number += 1
            name = f"{hint}{number}"
        self._rules[name] = ""
        return name

    def _reference(self, reference: str) -> str:
        if reference not in self._references:
            # Named before it is written: it may refer to itself.
            name = self._references[reference] = self._new_name("ref")
            self._rules[name] = self.value(_resolve(self._root, reference))
        return self._references[reference]

    def _enum(self, schema: Mapping[str, Any]) -> str:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return self.rule("enum", " | ".join(literal(self.dialect.dump(value)) for value in values))

    def _union(self, schema: Mapping[str, Any]) -> str:
        return self._one_of([self.value(choice) for choice in schema.get("anyOf") or schema["oneOf"]])

    def _all_of(self, schema: Mapping[str, Any]) -> str:
        merged = {key: value for key, value in schema.items() if key != "allOf"}
        for part in schema["allOf"]:
            merged |= part
        return self.value(merged)

    _keywords = (("const", _enum), ("enum", _enum), ("anyOf", _union), ("oneOf", _union), ("allOf", _all_of))

    def _one_of(self, rules: Sequence[str]) -> str:
        return rules[0] if len(rules) == 1 else self.rule("union", " | ".join(dict.fromkeys(rules)))

    def _typed(self, kind: str, schema: Mapping[str, Any]) -> str:
        match kind:
            case "integer":
                return self._integer(schema)
            case "number":
                low = max(schema.get("minimum", -1), schema.get("exclusiveMinimum", -1))
                return "unsigned" if low >= 0 else "number"
            case "string":
                return self.rule("string", self.dialect.string(_repeat(schema, "minLength", "maxLength")))
            case "boolean":
                return self._enum({"enum": [True, False]})
            case "null":
                return self._enum({"const": None})
            case "array":
                return self._array(schema)
            case _:
                return self._object(schema)

    def _integer(self, schema: Mapping[str, Any]) -> str:
        low, high = _integer_bounds(schema)
        if low is not None and high is not None and high - low < LONGEST_RANGE:
            return self._enum({"enum": list(range(low, high + 1))}) if low <= high else self._never()
        return "natural" if low is not None and low >= 0 else "integer"

    def _array(self, schema: Mapping[str, Any]) -> str:
        first = [self.value(item) for item in schema.get("prefixItems", ())]
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        fields = [(rule, index < low) for index, rule in enumerate(first) if high is None or index < high]
        items = schema.get("items", not first)
        rest = None
        if items is not False and (high is None or high > len(fields)):
            rest = (self.value(items), max(0, low - len(fields)), None if high is None else high - len(fields))
        return self.rule("array", f'"[" {self._sequence(fields, rest, nested=True)} "]"')

    def _object(self, schema: Mapping[str, Any]) -> str:
        required = schema.get("required", ())
        properties = schema.get("properties", {})
        fields = [
            (f"{literal(f'{self.dialect.dump(name)}: ')} {self.value(value)}", name in required)
            for name, value in properties.items()
        ]
        more = schema.get("additionalProperties", not properties)
        rest = None
        if more is not False:
            key = self.value({"type": "string", **schema.get("propertyNames", {})})
            pair = self.rule("pair", f'{key} ": " {self.value(more)}')
            # Beside named properties the number of others is left to the check.
            rest = (
                (pair, 0, None) if properties else (pair, schema.get("minProperties", 0), schema.get("maxProperties"))
            )
        return self.rule("object", f'"{{" {self._sequence(fields, rest)} "}}"')

    def _anything(self) -> str:
        if "anything" not in self._rules:
            self._rules["anything"] = ""  # it refers to itself
            kinds = ("string", "integer", "number", "boolean", "null", "array", "object")
            self._rules["anything"] = " | ".join(self._typed(kind, {}) for kind in kinds)
        return "anything"

    def _never(self) -> str:
        raise ValueError("a JSON schema that allows nothing cannot be enforced")

    def _sequence(
        self,
        fields: Sequence[tuple[str, bool]],
        rest: tuple[str, int, int | None] | None = None,
        *,
        nested: bool = False,
    ) -> str:
        """Fields in order with ", " between, those that are not required may be left out, then `rest` repeated.

        `nested` says that a field may be left out only if all later ones are, as in an array.
        """
        after = self._tail(rest)
        start = self._head(rest)
        for body, required in reversed(fields):
            here = body if after == NOTHING else f"{body} {after}"
            without_first, without = (NOTHING, NOTHING) if nested else (start, after)
            start = self.rule("first", here if required else f"{here} | {without_first}")
            after = self.rule("more", f'", " {here}' if required else f'", " {here} | {without}')
        return start

    def _tail(self, rest: tuple[str, int, int | None] | None) -> str:
        if rest is None:
            return NOTHING
        item, low, high = rest
        return self.rule("rest", f'(", " {item}){_times(low, high)}')

    def _head(self, rest: tuple[str, int, int | None] | None) -> str:
        if rest is None or rest[2] == 0:
            return NOTHING
        item, low, high = rest
        listed = f'{item} (", " {item}){_times(max(0, low - 1), None if high is None else high - 1)}'
        return self.rule("items", listed if low > 0 else f'{listed} | ""')


def _times(low: int, high: int | None) -> str:
    low = min(low, LONGEST_REPEAT)
    if high is None or high > LONGEST_REPEAT:
        return "*" if low == 0 else f"{{{low},}}"
    return f"{{{low},{high}}}"


def _repeat(schema: Mapping[str, Any], low: str, high: str) -> str:
    return _times(schema.get(low, 0), schema.get(high))


def _integer_bounds(schema: Mapping[str, Any]) -> tuple[int | None, int | None]:
    lows = [int(schema["minimum"])] if "minimum" in schema else []
    lows += [int(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
    highs = [int(schema["maximum"])] if "maximum" in schema else []
    highs += [int(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
    return max(lows, default=None), min(highs, default=None)


def _implied_type(schema: Mapping[str, Any]) -> str | None:
    if "properties" in schema or "additionalProperties" in schema:
        return "object"
    return "array" if "items" in schema or "prefixItems" in schema else None


def _resolve(root: Any, reference: str) -> Any:
    if not reference.startswith("#"):
        return True
    for step in reference[1:].split("/")[1:]:
        root = root[step.replace("~1", "/").replace("~0", "~")]
    return root
