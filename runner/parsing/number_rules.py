"""Grammar rules for numbers within bounds."""

from __future__ import annotations

from decimal import Decimal
from typing import Final

from runner.parsing.ebnf import NOTHING, Rules, either, literal
from runner.tools.value_shapes import NumberRange

__all__ = ["UNBOUNDED", "number_rule"]

UNBOUNDED: Final = NumberRange()

_NUMBERS: Final = {
    "natural": '"0" | [1-9] [0-9]*',
    "integer": '"-"? natural',
    # A number has at most 31 digits before the point and no exponent above 307, so that it is finite.
    "unsigned": '("0" | [1-9] [0-9]{0,30}) ("." [0-9]+)? | [1-9] ("." [0-9]+)? "e" exponent',
    "number": '"-"? unsigned',
    "exponent": '"-" [0-9]{1,3} | "+"? ([0-9]{1,2} | [12] [0-9]{2} | "30" [0-7])',
    "fraction": '"." [0-9]+',
    "short": '"." [0-9]{1,SHORT}',
}
_NEEDED: Final = {"integer": ("natural",), "number": ("exponent", "unsigned"), "unsigned": ("exponent",)}
MAX_DIGITS: Final = 15
"""Number of decimal digits that every float preserves. With more digits, a number may round to an excluded bound."""


def number_rule(rules: Rules, numbers: NumberRange, *, integer: bool) -> tuple[str, bool]:
    """Return an expression for the numbers in a range, and True; or for a larger range of numbers, and False."""
    if numbers == UNBOUNDED:
        return _named(rules, "integer" if integer else "number"), True
    if integer:
        return either(_integers(rules, numbers)), True
    bounds = [each for each in (numbers.low, numbers.high) if each is not None]
    if any(abs(each) >= 10**MAX_DIGITS or "e" in str(Decimal(repr(each))).lower() for each in bounds):
        positive = numbers.low is not None and numbers.low >= 0
        return _named(rules, "unsigned" if positive else "number"), False
    return either(_decimals(rules, numbers)), True


def _named(rules: Rules, name: str) -> str:
    for each in (*_NEEDED.get(name, ()), name):
        rules.named(each, _NUMBERS[each])
    return name


# --- integers


def _integers(rules: Rules, numbers: NumberRange) -> list[str]:
    low, high = numbers.least, numbers.greatest
    found = []
    if high is None or high >= 0:
        found.append(_naturals(rules, max(low or 0, 0), high))
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        found.append(f'"-" {_naturals(rules, least, -low if low is not None else None)}')
    return found


def _naturals(rules: Rules, low: int, high: int | None) -> str:
    """Return a rule for the natural numbers from `low` to `high`."""
    if low == 0 and high is None:
        return _named(rules, "natural")
    return rules.add("naturals", either(_of_lengths(low, high)))


def _of_lengths(low: int, high: int | None) -> list[str]:
    shortest = len(str(low))
    if high is None:
        return [*_between(str(low), "9" * shortest), f"[1-9] [0-9]{{{shortest},}}"]
    found: list[str] = []
    for length in range(shortest, len(str(high)) + 1):
        least = str(low) if length == shortest else "1" + "0" * (length - 1)
        greatest = str(high) if length == len(str(high)) else "9" * length
        found += _between(least, greatest)
    return found


def _between(low: str, high: str) -> list[str]:
    """Return expressions for the digit strings from `low` to `high`, which have equal length."""
    if not low:
        return [NOTHING]
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return [_digits(low[0], high[0]) + (f" [0-9]{{{len(low) - 1}}}" if len(low) > 1 else "")]
    if low[0] == high[0]:
        return [f"{literal(low[0])} {each}" for each in _between(low[1:], high[1:])]
    found = [f"{literal(low[0])} {each}" for each in _between(low[1:], "9" * (len(low) - 1))]
    if int(high[0]) - int(low[0]) > 1:
        found.append(f"{_digits(str(int(low[0]) + 1), str(int(high[0]) - 1))} [0-9]{{{len(low) - 1}}}")
    return [*found, *(f"{literal(high[0])} {each}" for each in _between("0" * (len(low) - 1), high[1:]))]


def _digits(low: str, high: str) -> str:
    return literal(low) if low == high else f"[{low}-{high}]"


# --- decimals


def _decimals(rules: Rules, numbers: NumberRange) -> list[str]:
    low, high = numbers.low, numbers.high
    found: list[str] = []
    if high is None or high > 0 or (high == 0 and not numbers.high_excluded):
        below_zero = low is None or low < 0
        found += _positive(
            rules,
            Decimal(0) if below_zero else Decimal(repr(low)),
            not below_zero and numbers.low_excluded,
            high,
            numbers.high_excluded,
        )
    if low is None or low < 0:
        least = Decimal(0) if high is None or high >= 0 else -Decimal(repr(high))
        excluded = numbers.high_excluded if high is not None and high < 0 else True
        mirrored = _positive(rules, least, excluded, None if low is None else -low, numbers.low_excluded)
        found += [f'"-" {each}' for each in mirrored]
    return found


def _positive(rules: Rules, low: Decimal, low_excluded: bool, high: float | None, high_excluded: bool) -> list[str]:
    """Return expressions for the numbers from `low`, which is at least 0, to `high`."""
    if low == 0 and not low_excluded and high is None:
        return [_named(rules, "unsigned")]
    most = 17 if not (low_excluded or high_excluded) else MAX_DIGITS
    whole = max(1, most - len(str(int(high if high is not None else low))))
    fraction = f'("." [0-9]{{1,{whole}}})?'
    ends = None if high is None else Decimal(repr(high))
    first, last = int(low), None if ends is None else int(ends)
    found: list[str] = []
    if last == first and ends is not None:
        found += [
            f"{literal(str(first))}{each}"
            for each in _fractions_between(low - first, low_excluded, ends - first, high_excluded)
        ]
    else:
        from_first = low == first and not low_excluded
        if not from_first:
            found += [f"{literal(str(first))}{each}" for each in _fractions_above(low - first, low_excluded)]
        start = first if from_first else first + 1
        if last is None or start <= last - 1:
            found.append(f"{_naturals(rules, start, last - 1 if last is not None else None)} {fraction}")
        if ends is not None and last is not None:
            found += [f"{literal(str(last))}{each}" for each in _fractions_below(ends - last, high_excluded)]
    found += _exponents(rules, low, ends)
    return found


def _exponents(rules: Rules, low: Decimal, high: Decimal | None) -> list[str]:
    """Return expressions for numbers with an exponent that are certainly within the bounds."""
    digits = '[1-9] ("." [0-9]{1,16})?'
    found = []
    if low == 0 and (high is None or high >= Decimal("0.001")):
        small = (
            '"0"? [4-9] | [1-9] [0-9] | [12] [0-9] [0-9]'
            if high is not None and high < 1
            else '"0"? [1-9] | [1-9] [0-9] | [12] [0-9] [0-9]'
        )
        found.append(f'{digits} "e-" ({small})')
    if high is None:
        least = max(1, len(str(int(low))))
        found.append(f'{digits} "e" "+"? {_naturals(rules, least, 307)}')
    return found


def _fraction_of(value: Decimal) -> str:
    """Return the digits after the decimal point."""
    return format(value, "f").partition(".")[2].rstrip("0")


def _fractions_above(value: Decimal, excluded: bool) -> list[str]:
    """Return expressions for fractions after an integer part: at least `value`, or above `value` if `excluded`."""
    digits = _fraction_of(value)
    found = [
        f' "." {literal(digits[:n]) if n else NOTHING} [{int(digit) + 1}-9] [0-9]{{0,{MAX_DIGITS}}}'
        for n, digit in enumerate(digits)
        if digit != "9"
    ]
    if not excluded:
        found.append(
            f' "." {literal(digits)} [0-9]{{0,{MAX_DIGITS}}}' if digits else f' ("." [0-9]{{1,{MAX_DIGITS}}})?'
        )
    else:
        found.append(f' "." {literal(digits) if digits else NOTHING} "0"{{0,8}} [1-9] [0-9]{{0,4}}')
    return found


def _fractions_below(value: Decimal, excluded: bool) -> list[str]:
    """Return expressions for fractions after an integer part: at most `value`, or below `value` if `excluded`."""
    digits = _fraction_of(value)
    found = []
    for n, digit in enumerate(digits):
        if digit != "0":
            before = literal(digits[:n]) if n else NOTHING
            found.append(f' "." {before} {_digits("0", str(int(digit) - 1))} [0-9]{{0,{max(0, MAX_DIGITS - n)}}}')
        if n:
            found.append(f' "." {literal(digits[:n])}')
    if digits:
        found.append("")
    if not excluded:
        found.append(f' "." {literal(digits)} "0"{{0,8}}' if digits else ' ("." "0"{1,8})?')
    return found


def _fractions_between(low: Decimal, low_excluded: bool, high: Decimal, high_excluded: bool) -> list[str]:
    """Return expressions for fractions from `low` to `high`, with the decimal places of the bounds and some more."""
    lows, highs = _fraction_of(low), _fraction_of(high)
    places = max(len(lows), len(highs), 1)
    least, greatest = int(lows.ljust(places, "0") or 0), int(highs.ljust(places, "0") or 0)
    found: list[str] = []
    # The last decimal place of the bounds divides the range into steps. Any digits may follow each step.
    first = least + 1 if low_excluded else least
    if first <= greatest - 1:
        found += [
            f' "." {each} [0-9]{{0,9}}' for each in _between(str(first).zfill(places), str(greatest - 1).zfill(places))
        ]
    if low_excluded and greatest > least:
        found.append(f' "." {literal(str(least).zfill(places))} "0"{{0,6}} [1-9] [0-9]{{0,4}}')
    if not high_excluded:
        found.append(f' "." {literal(highs)} "0"{{0,8}}' if highs else ' ("." "0"{1,8})?')
    # These fractions have fewer than `places` decimal places.
    for length in range(places):
        step = 10 ** (places - length)
        lower, upper = -(-first // step), (greatest - (1 if high_excluded else 0)) // step
        if lower <= upper:
            if length == 0:
                found.append("")
            else:
                found += [f' "." {each}' for each in _between(str(lower).zfill(length), str(upper).zfill(length))]
    return found
