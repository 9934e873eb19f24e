"""Scorers: answers that each counts as correct, and answers that are wrong in any notation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from runner import Task, VerifierFailed
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
    ("number", "5kg", "It weighs 5 kg.", 1),
    ("number", "5", "so 5kg in 3D, the 2nd time", 1),
    ("number", "7", "7m² at 80km/h", 0),
    ("number", "80", "7m² at 80km/h", 1),
    ("number", "5", "B5kg", 0),
    ("number", "5", "1," * 100_000 + "a", 0),
    ("choice", "B", "answer" + " " * 200_000, 0),
    ("json", "1", "```" + "\n" * 200_000, 0),
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


async def test_a_pattern_that_never_ends_fails_and_blocks_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.interop.scorers.REGEX_SECONDS", 1.0)
    scorer, turns = scorer_of("regex:^(a+)+$"), 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.sleep(0.01)

    async with anyio.create_task_group() as group:
        group.start_soon(count)
        with pytest.raises(
            VerifierFailed, match=r"score=regex: the scorer was killed: it took over 1 s or too much memory"
        ):
            await scorer.score("a" * 60 + "b", Task("t", "?"))
        group.cancel_scope.cancel()
    assert turns > 10
    assert await scorer.score("aaa", Task("t", "?")) == 1


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
