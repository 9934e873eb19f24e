"""Numbers from callers: accepted values, and the text of refusals."""

from __future__ import annotations

from typing import Any

import pytest

from runner import checked
from runner.errors import BadOption


@pytest.mark.parametrize("value", [True, 1.0, "1", None], ids=repr)
def test_values_other_than_integers_are_refused(value: Any) -> None:
    assert not checked.is_whole(value)
    with pytest.raises(BadOption, match=r"^n: give a whole number\.$"):
        checked.whole("n", value)


@pytest.mark.parametrize(
    ("check", "value", "bounds", "message"),
    [
        (checked.whole, 0, {"least": 1}, "give a whole number of at least 1."),
        (checked.whole, 3, {"least": 0, "most": 2}, "give a whole number of at least 0 and at most 2."),
        (checked.number, float("inf"), {"above": 0, "finite": True}, "give a finite number above 0."),
        (checked.number, False, {}, "give a number."),
        (checked.number, 0, {"above": 0}, "give a number above 0."),
        (checked.number, 1.5, {"above": 0, "most": 1}, "give a number above 0 and at most 1."),
        (checked.number, float("nan"), {"least": 0}, "give a number of at least 0."),
        (checked.number, -1, {"least": 0, "otherwise": ", or None"}, "give a number of at least 0, or None."),
    ],
)
def test_number_out_of_bounds_is_refused_with_the_bounds(
    check: Any, value: Any, bounds: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadOption) as refused:
        check("Limits(x=?)", value, **bounds)

    assert str(refused.value) == f"Limits(x=?): {message}"


def test_valid_number_is_returned() -> None:
    assert checked.whole("n", 3, least=3) == 3
    assert checked.number("n", float("inf"), above=0) == float("inf")
