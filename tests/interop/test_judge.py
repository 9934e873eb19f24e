"""Judges: a number or a failure, remembered, and counted."""

from __future__ import annotations

import math
from typing import Any

import pytest

from runner import BadOption, Outcome, Run, ScriptedEngine, Trajectory
from runner.interop import Dataset, judge

pytestmark = pytest.mark.anyio


async def judged(verdicts: Any, *, replies: Any = "a reply", count: int = 1, **options: Any) -> list[Trajectory]:
    """The trajectories of `main`, with a judge that says `verdicts`."""
    rows = [{"prompt": f"Question {n}?", "answer": "gold"} for n in range(count)]
    score = judge("Is it polite?", engine=ScriptedEngine(verdicts), **options)
    run = Run(Dataset(rows, answer="answer", score=score), ScriptedEngine(replies), group_size=2, breaker=1)
    async with run:
        return [each async for each in run if each.agent == "main"]


@pytest.mark.parametrize(
    ("said", "score"),
    [("It is fine.\nScore: 0.75", 0.75), ("0.5", 0.5), ("**Score:** 1", 1.0), ("Score: 0", 0.0), ("score = 1/1", 1.0)],
)
async def test_judge_returns_the_number_it_writes(said: str, score: float) -> None:
    assert {each.reward for each in await judged(said)} == {score}


@pytest.mark.parametrize("said", ["Very nice indeed!", "Score: 7", "Score: -1", "Score: nan", "Score: 0.5/10", ""])
async def test_judge_without_a_score_fails_and_is_not_zero(said: str) -> None:
    for each in await judged(said):
        assert each.outcome is Outcome.ENV_ERROR
        assert each.reward is None
        assert "JudgeFailed: the judge wrote no score from 0 to 1, twice" in each.error


async def test_judge_that_wrote_prose_is_asked_once_more() -> None:
    for each in await judged(["Very nice!", "0.5"]):
        assert (each.outcome, each.reward) == (Outcome.COMPLETED, 0.5)


async def test_equal_replies_are_judged_once_and_the_cost_is_counted() -> None:
    row = [{"prompt": "Question?", "answer": "gold"}]
    score = judge("Is it polite?", engine=ScriptedEngine("Score: 1"))
    environment = Dataset(row, answer="answer", score=score)
    seen = []
    for _ in range(2):
        async with Run(environment, ScriptedEngine("a reply")) as run:
            seen += [each async for each in run if each.agent == "main"]
    first, second = seen
    assert (first.metrics["judged.calls"], first.metrics["judged.cached"]) == (1, 0)
    assert first.metrics["judged.prompt_tokens"] > first.metrics["judged.sampled_tokens"] > 0
    assert (second.metrics["judged.calls"], second.metrics["judged.cached"]) == (0, 1)
    assert (first.reward, second.reward) == (1, 1)


async def test_judge_without_an_engine_is_the_engine_of_the_run() -> None:
    def says(call: Any) -> str:
        return "Score: 0.25" if "You grade replies" in call.prompt else "a reply"

    environment = Dataset([{"prompt": "hello"}], score=judge("Is it polite?"))
    async with Run(environment, ScriptedEngine(says)) as run:
        (main,) = [each async for each in run if each.agent == "main"]
    assert (main.turns[0].text, main.reward) == ("a reply", 0.25)


async def test_engine_of_the_run_overrides_that_of_the_judge() -> None:
    environment = Dataset([{"prompt": "hello"}], score=judge("Polite?", engine=ScriptedEngine("Score: 0")))
    async with Run(environment, ScriptedEngine("hi"), engines={"judge": ScriptedEngine("Score: 1")}) as run:
        (main,) = [each async for each in run if each.agent == "main"]
    assert main.reward == 1


@pytest.mark.parametrize(
    "options",
    [{"rubric": " "}, {"engine": "gpt"}, {"low": 1, "high": 0}, {"high": math.inf}],
    ids=["no rubric", "no engine", "range", "infinite"],
)
def test_judge_with_bad_arguments_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadOption, match=r"judge\("):
        judge(**{"rubric": "Polite?", **options})
