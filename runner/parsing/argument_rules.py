"""Rules for the arguments of one tool, as a format writes them: one object, or keys and values between literals."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from runner.parsing.dialects import NOT_IN_KEYS, NotationDialect, dialect_of, plain_text
from runner.parsing.ebnf import Rules, either, literal, none_of
from runner.parsing.marks import Marks
from runner.parsing.notations import Cdata, Html, JsonText, Raw, ValueType, members_in_order
from runner.parsing.schema_rules import Field, Rest, SchemaRules, Sequenced, by_type, in_order
from runner.parsing.turn_format import CallFormat, LiteralText, Slot, TaggedArguments, ValueStyle

__all__ = ["ArgumentRules", "EnforcingProperty", "Inexpressible", "ends_of_strings"]

Schema: TypeAlias = Mapping[str, Any]


class EnforcingProperty(enum.StrEnum):
    """What a format and a tool must have for a grammar to be made of them."""

    STRINGS_END = "strings_end"  # something stands behind a string that is written as it is
    TYPES_WRITTEN = "types_written"  # the format has a way to write what a required argument may be
    NONE_WRITTEN = "none_written"  # the format has a way to write a call without arguments
    SATISFIABLE = "schema_satisfiable"  # some arguments fit the schema


class Inexpressible(Exception):
    """No grammar can be made; the message is a clause that says why."""

    def __init__(self, missing: EnforcingProperty, why: str) -> None:
        super().__init__(why)
        self.property = missing


class ArgumentRules:
    """Writes rules for the arguments of each tool of one grammar."""

    def __init__(self, rules: Rules, form: CallFormat) -> None:
        self._rules = rules
        self._form = form

    def of(self, name: str, parameters: Schema) -> str:
        """An expression for the arguments of a tool.

        Raises:
            Inexpressible: they cannot be written in this format.
        """
        schema = {"additionalProperties": False, **parameters}
        try:
            if isinstance(self._form.arguments, TaggedArguments):
                return _Tagged(self._rules, self._form, self._form.arguments, schema, name).expression()
            notation = self._form.arguments.notation
            quote = [literal('"')] if isinstance(notation, JsonText) else []
            written = SchemaRules(self._rules, _dialect(notation), schema, name, "").value(schema)
        except ValueError as error:
            raise Inexpressible(EnforcingProperty.SATISFIABLE, f"{name} takes what nothing fits: {error}") from None
        return " ".join([*quote, written, *quote])


@dataclass(frozen=True, slots=True)
class _Tagged:
    """Arguments of one tool, one by one between literals."""

    rules: Rules
    form: CallFormat
    arguments: TaggedArguments
    schema: Schema
    tool: str

    def expression(self) -> str:
        members = in_order(self.rules, list(self._fields()), self.arguments.separator, self._rest())
        if self.arguments.none is not None:
            return members.within(self.rules, self.arguments.head, self.arguments.tail, self.arguments.none)
        if members.some is None:
            raise Inexpressible(
                EnforcingProperty.NONE_WRITTEN,
                f"{self.tool} takes no arguments, and its chat template has no way to write a call without any",
            )
        return Sequenced(members.some, False).within(self.rules, self.arguments.head, self.arguments.tail, "")

    def _fields(self) -> Iterator[Field]:
        required = self.schema.get("required", ())
        properties = self.schema.get("properties", {})
        for key, schema in members_in_order(properties, sorted_keys=self.arguments.sorted_keys):
            values = self._values(schema)
            if values:
                yield f"{literal(key)} {either(values)}", key in required
            elif key in required:
                raise Inexpressible(
                    EnforcingProperty.TYPES_WRITTEN,
                    f"the argument {key} of {self.tool} has a type that its chat template cannot write",
                )

    def _rest(self) -> Rest | None:
        more = self.schema["additionalProperties"]
        values = [] if more is False else self._values(more)
        if not values:
            return None
        first = "".join(style.open[:1] for style in self.arguments.styles.values())
        return Rest(self.rules.add("pair", f"{none_of(NOT_IN_KEYS + first)}+ {either(values)}"))

    def _values(self, schema: Any) -> list[str]:
        """An expression for each way in which a value may be written behind its key; none where there is no way."""
        found: dict[tuple[str, str], list[str]] = {}
        kinds = list(by_type(schema, self.schema))
        if any(kind == "number" and "enum" not in each for kind, each in kinds):
            kinds.append(("integer", dict(next(each for kind, each in kinds if kind == "number"))))
        # A plain string that a tag ends may be anything, so that nothing has to be said of other types beside it.
        kinds.sort(key=lambda each: each[0] != "string" or "enum" in each[1])
        anything: set[tuple[str, str]] = set()
        for kind, each in kinds:
            style = self.arguments.styles.get(kind)
            if style is None or (around := (style.open, style.close)) in anything:
                continue
            if isinstance(style.notation, Raw) and "enum" not in each and len(self._ends) == 1:
                anything.add(around)
            found.setdefault(around, []).append(self._value(style, kind, each))
        return [
            f"{self.rules.written(opened)} {either(each)} {self.rules.written(closed)}"
            for (opened, closed), each in found.items()
        ]

    def _value(self, style: ValueStyle, kind: ValueType, schema: Schema) -> str:
        notation = style.notation
        if isinstance(notation, Raw | Html | Cdata):
            if "enum" in schema:
                return either(literal(notation.encode(value)) for value in schema["enum"])
            return plain_text(notation, self.rules, self._ends)
        return SchemaRules(self.rules, _dialect(notation), self.schema, self.tool, self._behind(style)).typed(
            kind, schema
        )

    @property
    def _ends(self) -> tuple[str, ...]:
        return ends_of_strings(self.form)

    def _behind(self, style: ValueStyle) -> str:
        """The characters that may stand behind a value; "" where that cannot be told."""
        behind = [style.close + each for each in _behind_values(self.form, self.arguments)]
        told = all(text and not self.rules.control_token_of(text) for text in behind)
        return "".join(text[0] for text in behind) if told else ""


def ends_of_strings(form: CallFormat) -> tuple[str, ...]:
    """What no string may hold that a format writes as it is, since its end could not be told.

    A tag at the end of every value is enough, which holds a model to what it has begun; without one it is all that
    stands between values, and what ends the last one.

    Raises:
        Inexpressible: nothing stands behind such strings.
    """
    arguments = form.arguments
    style = arguments.styles.get("string") if isinstance(arguments, TaggedArguments) else None
    if (
        not isinstance(arguments, TaggedArguments)
        or style is None
        or not isinstance(style.notation, Raw | Html | Cdata)
    ):
        return ()
    ends = [style.close + each for each in _behind_values(form, arguments)]
    if not all(ends):
        raise Inexpressible(
            EnforcingProperty.STRINGS_END, "nothing that its chat template writes tells where a string ends"
        )
    first = _MARKS.of(ends[0].lstrip())[0]
    if _MARKS.is_tag(first) and all(end.lstrip().startswith(first) for end in ends):
        return (first,)
    return tuple(dict.fromkeys(ends))


def _behind_values(form: CallFormat, arguments: TaggedArguments) -> Sequence[str]:
    """What may stand behind a value: what separates it from the next one, and what surely ends the last one."""
    pieces = form.call[form.call.index(Slot.ARGUMENTS) + 1 :]
    text = "".join(piece.text for piece in pieces if isinstance(piece, LiteralText))
    return (arguments.separator, arguments.tail + text + form.post)


def _dialect(notation: Any) -> NotationDialect:
    dialect = dialect_of(notation)
    assert dialect is not None, f"only strings are written as {notation.kind}"
    return dialect


_MARKS: Final = Marks()
