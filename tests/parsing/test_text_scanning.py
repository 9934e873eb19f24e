"""Positions in a text at which literals may end, and the budget for reading a growing text again."""

from __future__ import annotations

from runner.parsing.cut_points import CutPoints
from runner.parsing.end_detector import RereadBudget


def test_longest_control_token_is_one_unit() -> None:
    points = CutPoints(frozenset({"[call", "[call]x", "[call]"}))
    assert points.split("[call]x [call]y") == ["[call]x", " ", "[call]", "y"]


def test_a_text_as_long_as_the_failed_reads_may_be_read() -> None:
    budget = RereadBudget()
    budget.spend(budget.FREE_LENGTH + 1000)
    assert budget.allows(1000)
    assert not budget.allows(999)
    assert not budget.allows(1000, likely=False)
    budget.renew()
    assert budget.allows(1)
