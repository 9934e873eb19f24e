"""Scorers: what each counts as right, and what is wrong however it is written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from runner import Task
from runner.interop.scorers import scorer_of

pytestmark = pytest.mark.anyio

CASES: list[tuple[str, str, str, float]] = [
    ("exact", "Paris", " Paris\n", 1),
    ("exact", "Paris", "paris", 0),
    ("contains", "Paris", "It is PARIS.", 1),
    ("contains", "Paris", "It is Rome.", 0),
    ("number", "...\n#### 1,234", "So we get $1,234.00 in all.", 1),
    ("number", "72", "72 clips, then 73", 0),
    ("number", "72", "#### 72\nI checked 3 times", 1),
    ("number", "-3", "\\boxed{-3} of 4", 1),
    ("number", "0.5", "it is 1/2", 1),
    ("number", "3", "9-3", 1),
    ("number", "0.5", "\\boxed{\\frac{1}{2}}", 1),
    ("number", "0.75", "it is $\\dfrac{3}{4}$", 1),
    ("number", "5", "no idea", 0),
    ("number", "5", "5/0", 0),
    ("number", "5", "1e999999999", 0),
    ("number", "5", "9" * 10_000, 0),
    ("number", "1000", "1e3", 1),
    ("choice", "B", "The answer is (B).", 1),
    ("choice", "B", "b", 1),
    ("choice", "B", "The answer is a tricky one, but I pick B", 1),
    ("choice", "B", "I choose **B**. Option A is wrong", 1),
    ("choice", "B", "the answer is b because 2 is even", 1),
    ("choice", "A", "Answer: a", 1),
    ("choice", "B", "A. is wrong, so B.", 1),
    ("choice", "B", "**B**", 1),
    ("choice", "B", "\\boxed{C} not B", 0),
    ("choice", "B", "A man saw it", 0),
    ("json", '{"a": [1, true]}', 'Here:\n```json\n{"a": [1.0, true]}\n```', 1),
    ("json", '{"a": 1}', '{"a": true}', 0),
    ("json", '{"a": 1}', 'It is {"a": 1}, as asked', 1),
    ("json", '{"a": 1}', "[" * 100_000, 0),
    ("regex:answer is (\\w+)", "Rome", "answer is Paris, no: answer is Rome", 1),
    ("regex:\\d+", "", "has 1", 1),
    ("regex:\\d+", "", "has one", 0),
]


@pytest.mark.parametrize(("score", "answer", "text", "expected"), CASES, ids=[f"{c[0]}-{c[2][:12]}" for c in CASES])
async def test_scorer_scores_a_reply(score: str, answer: str, text: str, expected: float) -> None:
    scorer = scorer_of(score)
    scorer.check(answer)
    assert await scorer.score(text, Task("t", "?", answer)) == expected


async def test_a_function_of_a_module_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_scores.py").write_text("def length(text, task):\n    return len(text) / task.info['most']\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    task = Task("t", "?", info={"most": 8})
    assert await scorer_of("own_scores:length").score("four", task) == 0.5


async def test_functions_score_sync_and_async() -> None:
    async def half(text: str, task: Task) -> float:
        return 0.5

    functions: tuple[Any, ...] = (half, lambda text, task: text == task.answer)
    assert [await scorer_of(each).score("a", Task("t", "?", "a")) for each in functions] == [0.5, True]
