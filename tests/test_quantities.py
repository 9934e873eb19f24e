"""Numbers with their nouns."""

from __future__ import annotations

import pytest

from runner.quantities import counted


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "trajectory", "1 trajectory"),
        (0, "trajectory", "0 trajectories"),
        (1000, "trajectory", "1,000 trajectories"),
        (2, "key", "2 keys"),
        (12345, "id", "12,345 ids"),
        (1, "id", "1 id"),
    ],
)
def test_noun_is_plural_unless_there_is_one(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text
