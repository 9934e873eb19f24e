"""Grammar rules for the values that a JSON schema allows, in a dialect: one rule for each shape of a value.

Keywords that no rule can express, or only a very large rule, are recorded. Validation of the arguments checks these
keywords, and reports errors to the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from runner.parsing.dialects import NotationDialect
from runner.parsing.ebnf import Rules, either, literal
from runner.parsing.notations import members_in_order
from runner.parsing.number_rules import number_rule
from runner.parsing.sequences import Field, Rest, ordered_fields
from runner.parsing.string_rules import EVERY, FORMATS, UnsupportedPattern, pattern_rule
from runner.tools.schema_shapes import SchemaShapes
from runner.tools.value_shapes import KINDS, Conjunction, NumberRange, ValueShape

__all__ = ["SchemaRules", "UnenforcedKeywords", "UnsatisfiableSchema", "members_of"]

MAX_REPEAT: Final = 4096
"""Largest bound on the length of a list in a rule. Validation checks larger bounds, since they enlarge the grammar."""

MAX_EXCLUDED: Final = 2000
"""Maximum number of characters in the names that a rule for other keys excludes; each character needs a rule."""

MAX_COUNTED: Final = 64
"""Maximum length of a string whose characters are counted. The rules of each character take 10 to 20 ms to compile."""

MAX_UNBOUNDED_PREFIX: Final = 16
"""Maximum number of characters that a rule requires of a string whose maximum length it does not enforce."""

MAX_INDENT_DEPTH: Final = 8
"""Maximum depth of indented objects and lists with content. Deeper ones are empty: each depth needs its own rules."""


class UnsatisfiableSchema(ValueError):
    """No value satisfies a schema; the message is a clause with the path."""


class UnenforcedKeywords:
    """Keywords of a schema that a grammar does not enforce, by path."""

    def __init__(self) -> None:
        self.keywords: dict[tuple[str, str], None] = {}
        """(path, keyword), in order of occurrence."""

    def add(self, path: str, keywords: Sequence[str]) -> None:
        """Record keywords of the schema at `path` that are left to validation."""
        self.keywords |= dict.fromkeys((path, keyword) for keyword in keywords)

    def sentences(self) -> list[str]:
        """Return each keyword with its path, as "keyword of path"; only the keyword if the path is ""."""
        return [f"{keyword} of {path}" if path else keyword for path, keyword in self.keywords]


class SchemaRules:
    """Writer of rules for the schemas of one tool, or of an answer."""

    def __init__(
        self,
        rules: Rules,
        dialect: NotationDialect,
        shapes: SchemaShapes,
        whose: str,
        after: str,
        left_out: UnenforcedKeywords,
    ) -> None:
        """Write into `rules`; `whose` is the name of the tool, or "" for an answer.

        `after` has the characters that may follow a value that is not inside another value; "" if they are unknown.
        Keywords that are not enforced are added to `left_out`.
        """
        self._rules = rules
        self._dialect = dialect
        self._shapes = shapes
        self._whose = whose
        self._after = after
        self._left_out = left_out

    def value(self, conjunction: Conjunction, depth: int = 0, path: str = "") -> str:
        """Return an expression for the values that satisfy all schemas of a conjunction.

        Raises:
            UnsatisfiableSchema: no such value exists.
        """
        if self._too_deep(depth) and self._shapes.is_recursive(conjunction):
            return self._anything(depth)
        key = self._shapes.key(conjunction)
        if not key:
            return self._anything(depth)
        if not self._shapes.is_recursive(conjunction):
            return self._shaped(conjunction, depth, path)
        named = ("schema", self._dialect, self._whose, key, self._level(depth), depth == 0 and self._after)
        return self._rules.recursive(named, "schema", lambda _: self._shaped(conjunction, depth, path))

    def _shaped(self, conjunction: Conjunction, depth: int, path: str) -> str:
        shapes = self._shapes.of(conjunction)
        if not shapes:
            raise UnsatisfiableSchema(f"{path or 'the whole value'} has a schema that allows nothing")
        if {shape.kind for shape in shapes if shape.is_free} == set(KINDS):
            return self._anything(depth)
        return either(self.shape(shape, depth, path) for shape in shapes)

    def shape(self, shape: ValueShape, depth: int = 0, path: str = "", *, closed: bool = False) -> str:
        """Return an expression for the values of one shape.

        With `closed`, an object has members that the schema does not name only if the schema describes or needs them.
        """
        if shape.values is not None:
            return self.listed(shape.values, depth)
        self._left_out.add(path, shape.unexpressed)
        match shape.kind:
            case "number":
                rule, exact = number_rule(self._rules, shape.numbers, integer=shape.integer)
                self._left_out.add(path, () if exact else bound_keywords(shape.numbers))
                return rule
            case "string":
                return self._string(shape, depth, path)
            case "boolean":
                return self.listed([True, False], depth)
            case "null":
                return self.listed([None], depth)
            case "array":
                return self._array(shape, depth, path)
            case _:
                return self._object(shape, depth, path, closed=closed)

    def listed(self, values: Sequence[Any], depth: int = 0) -> str:
        if self._dialect.free_space:
            return either(map(self._freely, values))
        return either(self._written(self._dialect.encode(value, depth)) for value in values)

    def _freely(self, value: Any) -> str:
        """Return an expression for a value with any white space between its punctuation."""
        dialect = self._dialect
        match value:
            case Mapping() if value:
                inside = (
                    f"{literal(self._key(name, 0))} {self._signs(dialect.colon)} {self._freely(each)}"
                    for name, each in value.items()
                )
                return self._around(dialect.open_object, inside, dialect.member, dialect.close_object)
            case list() if value:
                return self._around(dialect.open_list, map(self._freely, value), dialect.item, dialect.close_list)
            case _:
                return literal(dialect.encode(value, 0))

    def _around(self, opened: str, inside: Iterable[str], between: str, closed: str) -> str:
        return f"{self._signs(opened)} {f' {self._signs(between)} '.join(inside)} {self._signs(closed)}"

    def _written(self, text: str) -> str:
        """Return an expression for text that contains names or values of the user's schema.

        Names of control tokens in the text match as letters, or as tokens if the dialect's own signs may be tokens.
        """
        return self._rules.written(text) if self._dialect.signs_are_tokens else literal(text)

    def _signs(self, text: str) -> str:
        return self._dialect.signs(self._rules, text)

    def _after_value(self, depth: int) -> str:
        if depth == 0:
            return self._after
        # All strings inside other values share one rule, so it allows every character that may follow one of them.
        return self._dialect.after_strings

    def _string(self, shape: ValueShape, depth: int, path: str) -> str:
        said, rule = self._limited(shape, self._after_value(depth))
        self._left_out.add(path, [each for each in string_keywords(shape) if each not in said])
        return rule or self._dialect.string(self._rules, self._after_value(depth))

    def _limited(self, shape: ValueShape, after: str) -> tuple[Sequence[str], str | None]:
        """Return the keywords of a string that a rule enforces, and the rule; () and None if there is no rule."""
        if self._dialect.characters is None:
            return (), None
        characters, quote = self._dialect.characters(self._rules), self._quote()
        patterns = [("pattern", each) for each in shape.patterns]
        patterns += [("format", FORMATS[each]) for each in shape.formats if each in FORMATS]
        for keyword, pattern in patterns[:1] if len(shape.patterns) < 2 else ():
            try:
                body = self._rules.add("pattern", pattern_rule(pattern, characters, self._rules))
            except UnsupportedPattern:
                continue
            # A rule enforces one format. If there are several, `format` is reported as not enforced.
            said = () if keyword == "format" and len(shape.formats) > 1 else (keyword,)
            return said, f"{quote} {body} {quote}"
        if shape.most is not None and shape.most <= MAX_COUNTED:
            first = [characters.one_of(EVERY)] * shape.least
            rest = characters.at_most(shape.most - shape.least, quote)
            return ("minLength", "maxLength"), " ".join([quote, *first, rest])
        if not shape.least:
            return (), None
        least = min(shape.least, MAX_UNBOUNDED_PREFIX)
        rest = self._dialect.string(self._rules, after).removeprefix(f"{quote} ")
        rule = " ".join([quote, *[characters.one_of(EVERY)] * least, rest])
        return ("minLength",) if least == shape.least else (), rule

    def _array(self, shape: ValueShape, depth: int, path: str) -> str:
        dialect = self._dialect
        if self._too_deep(depth):
            return self._rules.written(dialect.open_list + dialect.close_list)
        inner = f"{path}[]"
        items: list[str] = []
        most = shape.most
        # After positional items, further items are allowed only if the schema describes or needs them.
        open_ended = not shape.listed or any(part.has_rest for part in shape.arrays) or shape.least > shape.listed
        for index in range(shape.listed):
            item = shape.item(index)
            if (most is not None and index >= most) or not self._shapes.is_satisfiable(item):
                most = index
                break
            items.append(self.value(item, depth + 1, f"{path}[{index}]"))
        fields: list[Field] = [(rule, index < shape.least) for index, rule in enumerate(items)]
        others = shape.item(shape.listed)
        rest = None
        if open_ended and (most is None or most > len(fields)) and self._shapes.is_satisfiable(others):
            room = None if most is None else most - len(fields)
            low, high = max(0, shape.least - len(fields)), room
            if low > MAX_REPEAT or (high is not None and high > MAX_REPEAT):
                self._left_out.add(path, ("minItems", "maxItems"))
            rest = Rest(self.value(others, depth + 1, inner), low, high)
        separator = dialect.item + dialect.line(depth + 1)
        listed = ordered_fields(self._rules, fields, self._signs(separator), rest, all_before=True)
        return self._enclosed(listed, dialect.open_list, dialect.close_list, depth)

    def _object(self, shape: ValueShape, depth: int, path: str, *, closed: bool) -> str:
        dialect = self._dialect
        if self._too_deep(depth):
            return self._rules.written(dialect.open_object + dialect.close_object)

        def member(name: str, conjunction: Conjunction) -> str:
            # The key is a name of the user's schema, so names of control tokens in it are plain text (see `_written`).
            key = self._written(self._key(name, depth))
            return f"{key} {self._signs(dialect.colon)} {self.value(conjunction, depth + 1, _below(path, name))}"

        fields: list[Field] = []
        for name, conjunction, required in members_of(shape, self._shapes, sorted_keys=dialect.sorted_keys):
            fields.append((member(name, conjunction), required))
        rest = self._others(shape, depth, path, closed=closed, named=len(fields))
        members = ordered_fields(
            self._rules,
            fields,
            self._signs(dialect.member + dialect.line(depth + 1)),
            rest,
            least=shape.least,
            most=shape.most,
        )
        if not members.holds_bounds:
            self._left_out.add(path, ("minProperties", "maxProperties"))
        if rest is not None and shape.least - sum(required for _, required in fields) > 1:
            self._left_out.add(path, ("minProperties",))  # no grammar can forbid that a key occurs twice
        return self._enclosed(members, dialect.open_object, dialect.close_object, depth)

    def _others(self, shape: ValueShape, depth: int, path: str, *, closed: bool, named: int) -> Rest | None:
        """Return a rule for members that the schema does not name, or None.

        A rule is needed if the schema describes such members, or requires more members than `named`. It is also needed
        if `named` is 0 and `closed` is False. `named` is the number of named members that have a rule.
        """
        inner = _below(path, "*")
        if not self._shapes.allows_unnamed(shape):
            return None
        values = [
            (pattern, self.value(each, depth + 1, inner))
            for pattern, each in shape.of_patterns
            if self._shapes.is_satisfiable(each)
        ]
        has_additional = any(part.has_additional for part in shape.objects)
        bare = not closed and not named and not shape.of_patterns
        open_ended = (has_additional or bare or shape.least > named) and self._shapes.is_satisfiable(shape.others)
        pairs: list[str] = []
        if open_ended:
            written = self.value(shape.others, depth + 1, inner)
            if values:
                # Validation checks which of these patterns apply to a name.
                self._left_out.add(path, ("patternProperties",))
                written = either([written, *(rule for _, rule in values)])
            pairs.append(f"{self._other_key(shape, path)} {self._signs(self._dialect.colon)} {written}")
        elif values:
            for pattern, written in values:
                pairs.append(
                    f"{self._key_of_pattern(pattern, shape, path)} {self._signs(self._dialect.colon)} {written}"
                )
            if any(self._is_written_twice(name, shape) for name in shape.named):
                self._left_out.add(path, ("patternProperties",))
        if not pairs:
            return None
        return Rest(self._rules.add("pair", either(pairs)))

    def _enclosed(self, inside: Any, opened: str, closed: str, depth: int) -> str:
        dialect = self._dialect
        line, end = dialect.line(depth + 1), dialect.line(depth)
        around = (self._signs(opened + line), self._signs(end + closed), self._signs(opened + closed))
        return self._rules.add("inside", inside.within(*around))

    def _key(self, name: str, depth: int) -> str:
        written = self._dialect.encode({name: 0}, 0)
        return written[len(self._dialect.open_object + self._dialect.line(1)) : written.rindex(self._dialect.colon)]

    def _other_key(self, shape: ValueShape, path: str) -> str:
        """Return an expression for a key that the schema does not name."""
        if self._shapes.key(shape.names):
            return self._key_of_names(shape, path)
        return self._unnamed_key(shape, path)

    def _unnamed_key(self, shape: ValueShape, path: str) -> str:
        if not shape.named:
            return self._dialect.key(self._rules, self._dialect.after_strings)
        if self._dialect.other_key is None or sum(map(len, shape.named)) > MAX_EXCLUDED:
            self._left_out.add(path, ("additionalProperties",))
            return self._dialect.key(self._rules, self._dialect.after_strings)
        return self._dialect.other_key(self._rules, shape.named)

    def _quote(self) -> str:
        """Return the quotation mark around a JSON string."""
        both = self._dialect.encode("", 0)
        return literal(both[: len(both) // 2])

    def _key_of_names(self, shape: ValueShape, path: str) -> str:
        choices: list[str] = []
        meets_named = any(self._shapes.fits(name, shape.names) for name in shape.named)
        for each in self._shapes.of(shape.names):
            if each.kind != "string":
                continue
            if each.values is not None:
                choices += [self._written(self._key(name, 0)) for name in each.values if name not in shape.named]
                continue
            if meets_named:
                # The names that the schema lists are excluded here, since a member could otherwise be written twice.
                self._left_out.add(path, ("propertyNames",))
                choices.append(self._unnamed_key(shape, path))
                continue
            said, rule = self._limited(each, self._dialect.after_strings)
            left = [keyword for keyword in (*string_keywords(each), *each.unexpressed) if keyword not in said]
            self._left_out.add(path, ("propertyNames",) if left else ())
            choices.append(rule or self._dialect.key(self._rules, self._dialect.after_strings))
        return either(choices)

    def _key_of_pattern(self, pattern: str, shape: ValueShape, path: str) -> str:
        if self._shapes.key(shape.names):
            self._left_out.add(path, ("propertyNames",))
        _, rule = self._limited(ValueShape("string", patterns=(pattern,)), self._dialect.after_strings)
        if rule is None or len(shape.of_patterns) > 1:
            self._left_out.add(path, ("patternProperties",))
        return rule or self._dialect.key(self._rules, self._dialect.after_strings)

    def _is_written_twice(self, name: str, shape: ValueShape) -> bool:
        """Return True if a pattern allows a named member to be written again, with values that its name forbids."""
        own = self._shapes.key(shape.member(name))
        return any(re.search(pattern, name) and self._shapes.key(each) != own for pattern, each in shape.of_patterns)

    def _anything(self, depth: int) -> str:
        def any_value() -> str:
            kinds = [kind for kind in KINDS if not (self._too_deep(depth) and kind in ("array", "object"))]
            shapes = [ValueShape(kind) for kind in kinds]
            return either(self.shape(shape, depth) for shape in shapes)

        if self._too_deep(depth):
            return any_value()
        key = ("anything", self._dialect, self._level(depth), depth == 0 and self._after)
        return self._rules.recursive(key, "anything", lambda _: any_value())

    def _level(self, depth: int) -> int:
        """Return the depth for the keys of rules. Without indentation, all depths below the top level share rules."""
        return min(depth, 1) if self._dialect.indent is None else depth

    def _too_deep(self, depth: int) -> bool:
        return self._dialect.indent is not None and depth > MAX_INDENT_DEPTH


def members_of(
    shape: ValueShape, shapes: SchemaShapes, *, sorted_keys: bool
) -> Iterator[tuple[str, Conjunction, bool]]:
    """Yield the named members of an object that can occur: name, schemas of the value, and True if it is required."""
    named = {name: shape.member(name) for name in shape.named}
    for name, conjunction in members_in_order(named, sorted_keys=sorted_keys):
        if shapes.is_satisfiable(conjunction) and (not shape.names or shapes.fits(name, shape.names)):
            yield name, conjunction, name in shape.required


def string_keywords(shape: ValueShape) -> list[str]:
    """Return the JSON schema keywords that restrict a string shape."""
    said = ["pattern"] * bool(shape.patterns) + ["format"] * bool(shape.formats)
    return said + ["minLength"] * (shape.least > 0) + ["maxLength"] * (shape.most is not None)


def bound_keywords(numbers: NumberRange) -> list[str]:
    """Return the JSON schema keywords of the bounds of a range."""
    found = [] if numbers.low is None else ["exclusiveMinimum" if numbers.low_excluded else "minimum"]
    return found + ([] if numbers.high is None else ["exclusiveMaximum" if numbers.high_excluded else "maximum"])


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
