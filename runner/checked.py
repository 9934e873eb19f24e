"""Checks of numbers from callers: type and bounds; errors name the fix.

Booleans are refused although they are integers in Python: `group_size=True` is a mistake, not a group of one.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from runner.errors import BadOption

__all__ = ["is_number", "is_whole", "number", "whole"]


def is_whole(value: object, *, least: float = float("-inf")) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is an integer or a float, including infinity and NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole(given: str, value: Any, *, least: int | None = None, most: int | None = None, otherwise: str = "") -> int:
    """Return the value if it is an integer within bounds.

    Args:
        given: the value as the caller wrote it, such as "retries=-1"; the message begins with it.
        value: the value.
        least: minimum; None for no minimum.
        most: maximum; None for no maximum.
        otherwise: end of the message, such as ", or None for any age".

    Raises:
        BadOption: the value is not an integer, or out of bounds.
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
    """Return the value if it is a number within bounds; NaN is never within bounds.

    Args:
        given: the value as the caller wrote it; the message begins with it.
        value: the value.
        least: minimum.
        above: exclusive minimum.
        most: maximum.
        finite: True to refuse infinity.
        otherwise: end of the message, such as ", or None for no limit".

    Raises:
        BadOption: the value is not a number, or out of bounds.
    """
    if is_number(value) and least <= value <= most and value > above and (math.isfinite(value) or not finite):
        return value
    bounds = [
        *([f"of at least {least:g}"] if least > float("-inf") else []),
        *([f"above {above:g}"] if above > float("-inf") else []),
        *([f"and at most {most:g}"] if most < float("inf") else []),
    ]
    raise BadOption(f"{given}: give {' '.join(['a finite number' if finite else 'a number', *bounds])}{otherwise}.")
