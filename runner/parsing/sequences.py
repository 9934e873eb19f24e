"""Grammar rules for ordered fields with separators, such as the members of an object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from runner.parsing.ebnf import NOTHING, Rules, either

__all__ = ["Field", "Rest", "Sequenced", "ordered_fields"]

MAX_REPEAT: Final = 4096
"""Largest number of repetitions in a rule. Validation checks larger bounds, since repetitions enlarge the grammar."""

MAX_COUNTED_RULES: Final = 1200
"""Maximum number of rules that count the fields of a sequence. If more were needed, fields are not counted."""

Field: TypeAlias = tuple[str, bool]
"""An expression for a field, and True if the field is required."""


@dataclass(frozen=True, slots=True)
class Rest:
    """Repeated items after the named fields."""

    item: str
    low: int = 0
    high: int | None = None


@dataclass(frozen=True, slots=True)
class Sequenced:
    """Expressions for ordered fields with separators."""

    some: str | None
    """Expression for one or more fields; None if no field is allowed."""
    may_be_empty: bool
    holds_bounds: bool = True
    """True if the number of fields is enforced."""

    def within(self, opened: str, closed: str, empty: str) -> str:
        """Return an expression for fields between `opened` and `closed`, or for `empty` if no field is required."""
        choices = [] if self.some is None else [f"{opened} {self.some} {closed}"]
        return either([*choices, empty] if self.may_be_empty else choices)


def ordered_fields(
    rules: Rules,
    fields: Sequence[Field],
    separator: str,
    rest: Rest | None = None,
    *,
    all_before: bool = False,
    least: int = 0,
    most: int | None = None,
) -> Sequenced:
    """Return expressions for fields in order, possibly without optional ones, and then repetitions of `rest`.

    Args:
        rules: rules of the grammar.
        fields: the fields.
        separator: expression between two fields.
        rest: items after the fields.
        all_before: True if a field may be omitted only together with all later fields, as in an array.
        least: minimum number of fields and rest items.
        most: maximum number of fields and rest items.
    """
    required = sum(needed for _, needed in fields)
    no_more = rest is None and (most is None or most >= len(fields))
    if least <= required and (most is None or no_more):
        return _uncounted(rules, fields, separator, rest, all_before=all_before)
    top = max(least, most or 0)
    too_many = top * (len(fields) + 1) > MAX_COUNTED_RULES and (bool(fields) or rest is None)
    if too_many or top > MAX_REPEAT:
        plain = _uncounted(rules, fields, separator, rest, all_before=all_before)
        return Sequenced(plain.some, plain.may_be_empty, holds_bounds=False)
    return _Counted(rules, fields, separator, rest, least, most).sequenced()


def _uncounted(
    rules: Rules, fields: Sequence[Field], separator: str, rest: Rest | None, *, all_before: bool
) -> Sequenced:
    some, after = _rest(rules, separator, rest)
    may_be_empty = rest is None or rest.low == 0
    for body, required in reversed(fields):
        here = body if after == NOTHING else f"{body} {after}"
        left_out = NOTHING if all_before else after
        skipped = [] if required or all_before or some is None else [some]
        some = rules.add("first", either([here, *skipped]))
        after = rules.add("more", either([f"{separator} {here}", *([] if required else [left_out])]))
        may_be_empty = may_be_empty and not required
    return Sequenced(some, may_be_empty)


def _rest(rules: Rules, separator: str, rest: Rest | None) -> tuple[str | None, str]:
    """Return two expressions for the rest: for one or more items alone, and for any number of items after fields."""
    if rest is None or rest.high == 0:
        return None, NOTHING
    following = f"({separator} {rest.item})"
    high = None if rest.high is None else rest.high - 1
    some = rules.add("items", f"{rest.item} {following}{_times(max(0, rest.low - 1), high)}")
    return some, rules.add("rest", f"{following}{_times(rest.low, rest.high)}")


@dataclass(frozen=True, slots=True)
class _Counted:
    """Writer of the rules of a sequence whose fields are counted."""

    rules: Rules
    fields: Sequence[Field]
    separator: str
    rest: Rest | None
    least: int
    most: int | None

    def sequenced(self) -> Sequenced:
        known: dict[tuple[int, int], str | None] = {}
        for index in range(len(self.fields), -1, -1):
            for count in range(index + 1):
                known[index, count] = self._after(index, count, known)
        empty = self.least == 0 and not any(required for _, required in self.fields)
        return Sequenced(self._first(0, known), empty)

    def _after(self, index: int, count: int, known: dict[tuple[int, int], str | None]) -> str | None:
        """Return an expression for the rest of a sequence after `index` fields, of which `count` are written.

        The result is None if no such sequence is allowed.
        """
        if self.most is not None and count > self.most:
            return None
        if index == len(self.fields):
            high = None if self.most is None else self.most - count
            low = max(0, self.least - count)
            if self.rest is None or high == 0:
                return NOTHING if low == 0 else None
            return self.rules.add("rest", f"({self.separator} {self.rest.item}){_times(low, high)}")
        body, required = self.fields[index]
        choices = []
        taken = known[index + 1, count + 1]
        if taken is not None:
            choices.append(f"{self.separator} {body} {taken}".removesuffix(f" {NOTHING}"))
        left_out = None if required else known[index + 1, count]
        if left_out is not None:
            choices.append(left_out)
        return self.rules.add("more", either(choices)) if choices else None

    def _first(self, index: int, known: dict[tuple[int, int], str | None]) -> str | None:
        if index == len(self.fields):
            if self.rest is None or self.most == 0:
                return None
            high = None if self.most is None else self.most - 1
            following = f"({self.separator} {self.rest.item}){_times(max(0, self.least - 1), high)}"
            return self.rules.add("items", f"{self.rest.item} {following}")
        body, required = self.fields[index]
        choices = []
        taken = known[index + 1, 1]
        if taken is not None:
            choices.append(f"{body} {taken}".removesuffix(f" {NOTHING}"))
        left_out = None if required else self._first(index + 1, known)
        if left_out is not None:
            choices.append(left_out)
        return self.rules.add("first", either(choices)) if choices else None


def _times(low: int, high: int | None) -> str:
    low = min(low, MAX_REPEAT)
    if high is None or high > MAX_REPEAT:
        return "*" if low == 0 else f"{{{low},}}"
    return f"{{{low},{high}}}"
