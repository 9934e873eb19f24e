"""Grammar rules for the arguments of one tool in a call format: one object, or tagged keys and values."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from runner.parsing.cut_points import CutPoints
from runner.parsing.dialects import NOT_IN_KEYS, NotationDialect, dialect_of, plain_text
from runner.parsing.ebnf import Rules, either, literal, none_of
from runner.parsing.notations import Cdata, Html, JsonText, Raw, ValueType, members_in_order
from runner.parsing.schema_rules import (
    MAX_EXCLUDED,
    SchemaRules,
    UnenforcedKeywords,
    UnsatisfiableSchema,
    members_of,
    string_keywords,
)
from runner.parsing.sequences import Field, Rest, ordered_fields
from runner.parsing.string_rules import character_class, characters_but, text_but
from runner.parsing.turn_format import CallFormat, LiteralText, Slot, TaggedArguments, ValueStyle
from runner.tools.schema_shapes import SchemaShapes, shapes_of
from runner.tools.value_shapes import ValueShape, kind_of

__all__ = ["ArgumentRules", "GrammarRequirement", "NoGrammar", "ends_of_strings"]


class GrammarRequirement(enum.StrEnum):
    """A condition that a format and a tool must fulfil to have a grammar."""

    STRINGS_END = "strings_end"  # the format has text after an unquoted string
    TYPES_WRITTEN = "types_written"  # the format can write at least one type of each needed argument
    NONE_WRITTEN = "none_written"  # the format can write a call without arguments
    SATISFIABLE = "schema_satisfiable"  # some arguments satisfy the schema


class NoGrammar(Exception):
    """No grammar exists for a format and a tool; the message is a clause with the reason."""

    def __init__(self, missing: GrammarRequirement, why: str) -> None:
        super().__init__(why)
        self.requirement = missing


class ArgumentRules:
    """Writer of the rules for tool arguments in one grammar."""

    def __init__(self, rules: Rules, form: CallFormat) -> None:
        self._rules = rules
        self._form = form
        self.left_out = UnenforcedKeywords()
        """Keywords of the schemas that the rules do not enforce."""

    def of(self, name: str, parameters: str) -> str:
        """Return a grammar expression for the arguments of the tool `name`; `parameters` is its schema as JSON text.

        Raises:
            NoGrammar: the format cannot write these arguments, or no arguments satisfy the schema.
        """
        shapes = shapes_of(parameters)
        why = shapes.why_uncallable()
        if why is not None:
            raise _unsatisfiable(name, why)
        arguments = shapes.arguments()
        try:
            if isinstance(self._form.arguments, TaggedArguments):
                tagged = partial(
                    _TaggedRules, self._rules, self._form, self._form.arguments, shapes, name, self.left_out
                )
                return either(tagged(shape).expression() for shape in arguments)
            notation = self._form.arguments.notation
            quote = [literal('"')] if isinstance(notation, JsonText) else []
            schemas = SchemaRules(self._rules, _dialect(notation), shapes, name, "", self.left_out)
            written = either(schemas.shape(shape, closed=True) for shape in arguments)
        except UnsatisfiableSchema as error:
            raise _unsatisfiable(name, str(error)) from None
        return " ".join([*quote, written, *quote])


def _unsatisfiable(name: str, why: str) -> NoGrammar:
    return NoGrammar(GrammarRequirement.SATISFIABLE, f"no arguments fit the tool {name}: {why}")


@dataclass(frozen=True, slots=True)
class _TaggedRules:
    """Rules for the tagged arguments of one tool, for one shape of its schema."""

    rules: Rules
    form: CallFormat
    arguments: TaggedArguments
    shapes: SchemaShapes
    tool: str
    left_out: UnenforcedKeywords
    shape: ValueShape

    def expression(self) -> str:
        if self.shape.values is not None:
            return either(self._listed(value) for value in self.shape.values)
        self.left_out.add("", self.shape.unexpressed)
        fields = list(self._fields())
        rest = self._rest(len(fields))
        if rest is None and len(fields) < self.shape.least:
            raise NoGrammar(
                GrammarRequirement.TYPES_WRITTEN,
                f"{self.tool} needs {self.shape.least} arguments, and the chat template can write {len(fields)}",
            )
        members = ordered_fields(
            self.rules,
            fields,
            self.rules.written(self.arguments.separator),
            rest,
            least=self.shape.least,
            most=self.shape.most,
        )
        if not members.holds_bounds:
            self.left_out.add("", ("minProperties", "maxProperties"))
        if rest is not None and self.shape.least - sum(required for _, required in fields) > 1:
            self.left_out.add("", ("minProperties",))  # no grammar can forbid that a key occurs twice
        around = (self.rules.written(self.arguments.head), self.rules.written(self.arguments.tail))
        if self.arguments.none is not None:
            return members.within(*around, self.rules.written(self.arguments.none))
        if members.some is None:
            raise self._without_arguments()
        return replace(members, may_be_empty=False).within(*around, "")

    def _without_arguments(self) -> NoGrammar:
        return NoGrammar(
            GrammarRequirement.NONE_WRITTEN,
            f"{self.tool} takes no arguments, and the chat template has no way to write a call without any",
        )

    def _listed(self, arguments: Mapping[str, Any]) -> str:
        """Return an expression for exactly these arguments."""
        if not arguments:
            if self.arguments.none is None:
                raise self._without_arguments()
            return self.rules.written(self.arguments.none)
        fields: list[Field] = []
        for key, value in members_in_order(arguments, sorted_keys=self.arguments.sorted_keys):
            written = self._values([ValueShape(kind_of(value), (value,))], key)
            if not written:
                raise self._unwritable(key)
            fields.append((f"{literal(key)} {either(written)}", True))
        members = ordered_fields(self.rules, fields, self.rules.written(self.arguments.separator))
        return members.within(self.rules.written(self.arguments.head), self.rules.written(self.arguments.tail), "")

    def _unwritable(self, key: str) -> NoGrammar:
        return NoGrammar(
            GrammarRequirement.TYPES_WRITTEN,
            f"the argument {key} of {self.tool} has a type that the chat template cannot write",
        )

    def _fields(self) -> Iterator[Field]:
        for key, conjunction, required in members_of(self.shape, self.shapes, sorted_keys=self.arguments.sorted_keys):
            values = self._values(self.shapes.of(conjunction), key)
            if values:
                yield f"{literal(key)} {either(values)}", required
            elif required:
                raise self._unwritable(key)

    def _rest(self, named: int) -> Rest | None:
        """Return a rule for arguments that the schema does not name; None if it is not needed or not possible.

        A rule is needed if the schema describes such arguments, or requires more arguments than `named`. `named` is
        the number of arguments that the schema names and the template can write.
        """
        others = [each for _, each in self.shape.of_patterns]
        if any(part.has_additional for part in self.shape.objects) or self.shape.least > named:
            others.append(self.shape.others)
        if not others or not self.shapes.allows_unnamed(self.shape):
            return None
        shapes = [shape for each in others for shape in self.shapes.of(each)]
        values = self._values(shapes, "*")
        if not values:
            return None
        if self.shape.of_patterns:
            self.left_out.add("", ("patternProperties",))
        if self.shapes.key(self.shape.names):
            self.left_out.add("", ("propertyNames",))
        return Rest(self.rules.add("pair", f"{self._other_key()} {either(values)}"))

    def _other_key(self) -> str:
        """Return an expression for a key that the schema does not name."""
        first = "".join(style.open[:1] for style in self.arguments.styles.values())
        if sum(map(len, self.shape.named)) > MAX_EXCLUDED:
            self.left_out.add("", ("additionalProperties",))
            return f"{none_of(NOT_IN_KEYS + first)}+"
        every = characters_but(NOT_IN_KEYS + first)
        return text_but(["", *self.shape.named], self.rules, literal, lambda each: [character_class(each)], every)

    def _values(self, shapes: Sequence[ValueShape], path: str) -> list[str]:
        """Return an expression for each form of a value after its key; an empty list if no form can be written."""
        found: dict[tuple[str, str], list[str]] = {}
        # An unquoted string that ends at a tag may contain any text, so its expression also matches other types.
        ordered = sorted(shapes, key=lambda shape: shape.kind != "string" or shape.values is not None)
        anything: set[tuple[str, str]] = set()
        for kind, shape in (pair for each in ordered for pair in _by_style(each)):
            style = self.arguments.styles.get(kind)
            if style is None or (around := (style.open, style.close)) in anything:
                continue
            if isinstance(style.notation, Raw) and shape.values is None and len(self._ends) == 1:
                anything.add(around)
            found.setdefault(around, []).append(self._value(style, shape, path))
        return [
            f"{self.rules.written(opened)} {either(each)} {self.rules.written(closed)}"
            for (opened, closed), each in found.items()
        ]

    def _value(self, style: ValueStyle, shape: ValueShape, path: str) -> str:
        notation = style.notation
        if isinstance(notation, Raw | Html | Cdata):
            if shape.values is not None:
                return either(literal(notation.encode(value)) for value in shape.values)
            self.left_out.add(path, (*shape.unexpressed, *string_keywords(shape)))
            return plain_text(notation, self.rules, self._ends)
        after = self._after(style)
        rules = SchemaRules(self.rules, _dialect(notation), self.shapes, self.tool, after, self.left_out)
        return rules.shape(shape, path=path)

    @property
    def _ends(self) -> tuple[str, ...]:
        return ends_of_strings(self.form)

    def _after(self, style: ValueStyle) -> str:
        """Return the characters that may follow a value; "" if they are unknown."""
        after = [style.close + each for each in _after_values(self.form, self.arguments)]
        known = all(text and not self.rules.control_token_of(text) for text in after)
        return "".join(text[0] for text in after) if known else ""


def ends_of_strings(form: CallFormat) -> tuple[str, ...]:
    """Return the texts that end an unquoted string, and that the string must not contain; () if strings have quotes.

    If a tag follows every value, only this tag is returned. Otherwise, the texts are the separator between values and
    the text after the last value.

    Raises:
        NoGrammar: no text follows an unquoted string.
    """
    arguments = form.arguments
    style = arguments.styles.get("string") if isinstance(arguments, TaggedArguments) else None
    if (
        not isinstance(arguments, TaggedArguments)
        or style is None
        or not isinstance(style.notation, Raw | Html | Cdata)
    ):
        return ()
    ends = [style.close + each for each in _after_values(form, arguments)]
    if not all(ends):
        raise NoGrammar(
            GrammarRequirement.STRINGS_END,
            "the chat template writes strings without quotes, and no text that ends them",
        )
    marks = _CUT_POINTS.split(ends[0].lstrip())  # empty if the end is only white space
    if marks and _CUT_POINTS.is_tag(marks[0]) and all(end.lstrip().startswith(marks[0]) for end in ends):
        return (marks[0],)
    return tuple(dict.fromkeys(ends))


def _after_values(form: CallFormat, arguments: TaggedArguments) -> Sequence[str]:
    """Return the texts that may follow a value: the separator, or the text after the last value."""
    pieces = form.call[form.call.index(Slot.ARGUMENTS) + 1 :]
    text = "".join(piece.text for piece in pieces if isinstance(piece, LiteralText))
    return (arguments.separator, arguments.tail + text + form.post)


def _dialect(notation: Any) -> NotationDialect:
    dialect = dialect_of(notation)
    assert dialect is not None, f"only strings are written as {notation.kind}"
    return dialect


def _by_style(shape: ValueShape) -> Iterator[tuple[ValueType, ValueShape]]:
    """Yield each type that a template writes in its own style, with the part of the shape that has this type.

    Numbers without a point are integers.
    """
    if shape.kind != "number":
        yield shape.kind, shape
    elif shape.values is not None:
        whole = tuple(value for value in shape.values if isinstance(value, int))
        others = tuple(value for value in shape.values if not isinstance(value, int))
        yield from (("integer", replace(shape, values=whole)),) if whole else ()
        yield from (("number", replace(shape, values=others)),) if others else ()
    else:
        if not shape.integer:
            yield "number", shape
        yield "integer", replace(shape, integer=True)


_CUT_POINTS: Final = CutPoints()
