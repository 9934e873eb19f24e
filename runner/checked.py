"""Checks of the numbers that a caller gave: of the right kind and within their bounds, or refused with the fix.

True and False are integers to Python. Here they are none: `group_size=True` is a slip, and no group of one.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from runner.errors import BadOption

__all__ = ["is_number", "is_whole", "number", "whole"]


def is_whole(value: object, *, least: float = float("-inf")) -> TypeGuard[int]:
    """Whether it is an integer of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is an integer or a float, infinity and NaN among them."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole(given: str, value: Any, *, least: int | None = None, most: int | None = None, otherwise: str = "") -> int:
    """The value, if it is an integer within its bounds.

    Args:
        given: the value as its caller wrote it, such as "retries=-1"; the message begins with it.
        value: what was given.
        least: the smallest that will do; None where any will.
        most: the largest that will do; None where any will.
        otherwise: ends the message, such as ", or None for any age".

    Raises:
        BadOption: it is none, or out of its bounds.
    """
    if is_whole(value) and (least is None or value >= least) and (most is None or value <= most):
        return value
    bounds = [
        *([f"of at least {least}"] if least is not None else []),
        *([f"and at most {most}"] if most is not None else []),
    ]
    raise BadOption(f"{given}: give {' '.join(['a whole number', *bounds])}{otherwise}.")


def number(
    given: str,
    value: Any,
    *,
    least: float = float("-inf"),
    above: float = float("-inf"),
    most: float = float("inf"),
    finite: bool = False,
    otherwise: str = "",
) -> float:
    """The value, if it is a number within its bounds; NaN is within none.

    Args:
        given: the value as its caller wrote it; the message begins with it.
        value: what was given.
        least: the smallest that will do.
        above: what it must be larger than.
        most: the largest that will do.
        finite: whether infinity is refused too.
        otherwise: ends the message, such as ", or None for no limit".

    Raises:
        BadOption: it is no number, or out of its bounds.
    """
    if is_number(value) and least <= value <= most and value > above and (math.isfinite(value) or not finite):
        return value
    bounds = [
        *([f"of at least {least:g}"] if least > float("-inf") else []),
        *([f"above {above:g}"] if above > float("-inf") else []),
        *([f"and at most {most:g}"] if most < float("inf") else []),
    ]
    raise BadOption(f"{given}: give {' '.join(['a finite number' if finite else 'a number', *bounds])}{otherwise}.")
