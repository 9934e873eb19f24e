"""Judges: a number or a failure, cached and counted."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from runner import BadOption, Outcome, Run, Sampling, ScriptedEngine, Trajectory
from runner.interop import Dataset, judge, judging
from runner.testing.engine_pool import PooledEngine

pytestmark = pytest.mark.anyio


async def judged(verdicts: Any, *, replies: Any = "a reply", count: int = 1, **options: Any) -> list[Trajectory]:
    """Return the trajectories of `main`, with a judge that replies with `verdicts`."""
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


@pytest.mark.parametrize(
    "said", ["Very nice indeed!", "Score: 7", "Score: -1", "Score: nan", "Score: 0.5/10", "Score: 1%", ""]
)
async def test_judge_without_a_score_fails_and_is_not_zero(said: str) -> None:
    for each in await judged(said):
        assert each.outcome is Outcome.ENV_ERROR
        assert each.reward is None
        assert "JudgeFailed: two replies of the judge had no score from 0 to 1" in each.error


async def test_score_cut_by_the_token_limit_is_an_error() -> None:
    for each in await judged("Score: 0.85", sampling=Sampling(max_tokens=10)):
        assert each.outcome is Outcome.ENV_ERROR
        assert "the last one is 'Score: 0.8'" in each.error


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


async def cached(file: Path, **options: Any) -> list[float]:
    """Play two equal runs, each with a new judge object. Return the number of turns of each judge."""
    counts = []
    for _ in range(2):
        score = judge(**{"rubric": "Is it polite?", "engine": ScriptedEngine("Score: 1"), "cache": file, **options})
        async with Run(Dataset([{"prompt": "Hello?"}], score=score), ScriptedEngine("Hi.")) as run:
            counts += [each.metrics["judged.calls"] async for each in run if each.agent == "main"]
    return counts


async def test_scores_in_a_file_are_used_by_later_judges(tmp_path: Path) -> None:
    file = tmp_path / "scores.jsonl"
    assert await cached(file) == [1, 0]
    (row,) = map(json.loads, file.read_text().splitlines())
    assert (row["score"], row["calls"]) == (1.0, 1.0)
    assert row["prompt_tokens"] > row["sampled_tokens"] > 0


@pytest.mark.parametrize(
    "other", [{"rubric": "Is it short?"}, {"high": 2.0}, {"sampling": Sampling(temperature=1)}], ids=str
)
async def test_another_rubric_range_or_sampling_is_judged_again(tmp_path: Path, other: dict[str, Any]) -> None:
    file = tmp_path / "scores.jsonl"
    assert await cached(file) == [1, 0]
    assert await cached(file, **other) == [1, 0]


async def test_a_score_that_was_cut_while_written_is_asked_again(tmp_path: Path) -> None:
    file = tmp_path / "scores.jsonl"
    file.write_text('{"key": "ab", "sco')
    assert await cached(file) == [1, 0]
    assert len(file.read_text().splitlines()) == 1


async def test_a_file_that_has_no_scores_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("dear diary\n")
    score = judge("Polite?", engine=ScriptedEngine("Score: 1"), cache=file)
    async with Run(Dataset([{"prompt": "Hello?"}], score=score), ScriptedEngine("Hi."), breaker=1) as run:
        (main,) = [each async for each in run if each.agent == "main"]
    assert (main.outcome, main.reward) == (Outcome.ENV_ERROR, None)
    assert "notes.txt': line 1 is not a score of a judge: give another file" in main.error
    assert file.read_text() == "dear diary\n"


async def test_judge_without_an_engine_is_the_engine_of_the_run() -> None:
    def says(call: Any) -> str:
        return "Score: 0.25" if "You grade replies" in call.prompt else "a reply"

    environment = Dataset([{"prompt": "hello"}], score=judge("Is it polite?"))
    async with Run(environment, ScriptedEngine(says)) as run:
        (main,) = [each async for each in run if each.agent == "main"]
    assert (main.turns[0].text, main.reward) == ("a reply", 0.25)


async def test_scores_of_other_weights_or_adapters_are_not_used(tmp_path: Path) -> None:
    def says(call: Any) -> str:
        return "Score: 1" if "You grade replies" in call.prompt else "a reply"

    async def calls(engine: ScriptedEngine, **options: Any) -> float:
        score = judge("Is it polite?", cache=tmp_path / "scores.jsonl", **options)
        async with Run(Dataset([{"prompt": "hello"}], score=score), engine) as run:
            (main,) = [each async for each in run if each.agent == "main"]
        assert main.reward == 1
        return main.metrics["judged.calls"]

    poet = {"sampling": Sampling(adapter="poet")}
    for first in (1, 0):
        async with ScriptedEngine(says) as engine:
            assert [await calls(engine), await calls(engine)] == [first, 0]
            await engine.update_weights({})
            assert [await calls(engine), await calls(engine)] == [1, 0], "also in a second run with other weights"
            for _ in range(2):
                await engine.add_adapter("poet", {}, config={})
                assert [await calls(engine, **poet), await calls(engine, **poet), await calls(engine)] == [1, 0, 0]


async def test_engine_of_the_run_overrides_that_of_the_judge() -> None:
    environment = Dataset([{"prompt": "hello"}], score=judge("Polite?", engine=ScriptedEngine("Score: 0")))
    async with Run(environment, ScriptedEngine("hi"), engines={"judge": ScriptedEngine("Score: 1")}) as run:
        (main,) = [each async for each in run if each.agent == "main"]
    assert main.reward == 1


@pytest.mark.parametrize(
    "options",
    [
        {"rubric": " "},
        {"engine": "gpt"},
        {"low": 1, "high": 0},
        {"high": math.inf},
        {"cache": "no/x.jsonl"},
        {"choices": {"yes": 1}},
        {"choices": ["yes", "no"]},
        {"choices": {"yes": 1, " ": 0}},
        {"choices": {"yes": 1, "no": math.nan}},
        {"choices": {"1": 1, "10": 10}},
        {"choices": {"yes": 1, "no": 0}, "sampling": Sampling(temperature=1)},
        {"choices": {"yes": 1, "no": 0}, "high": 2},
    ],
    ids=[
        "no rubric",
        "no engine",
        "range",
        "infinite",
        "no folder",
        "one choice",
        "no values",
        "empty choice",
        "no number",
        "prefix",
        "choices and sampling",
        "choices and range",
    ],
)
def test_judge_with_bad_arguments_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadOption, match=r"judge\("):
        judge(**{"rubric": "Polite?", **options})


# --- choices by their probability

CHOICES = {"yes": 1.0, "no": 0.0}


class Says:
    """Scores in which each choice has a given probability after a prompt, spread over its ids."""

    def __init__(self, **probabilities: float) -> None:
        self.probabilities = probabilities
        self.asked: list[str] = []

    def __call__(self, ids: Sequence[int]) -> list[float]:
        text = bytes(each for each in ids if each < 256).decode(errors="replace")
        self.asked.append(text)
        choice, probability = next(pair for pair in self.probabilities.items() if text.endswith(pair[0]))
        return [0.0] * (len(ids) - 1 - len(choice)) + [math.log(probability) / len(choice)] * len(choice)


async def weighed(says: Any, **options: Any) -> tuple[list[Trajectory], Any]:
    score = judge("Is it polite?", engine=ScriptedEngine("unused", scores=says), **{"choices": CHOICES, **options})
    run = Run(Dataset([{"prompt": "Hello?"}], score=score), ScriptedEngine("Hi."), group_size=2, breaker=1)
    async with run:
        return [each async for each in run if each.agent == "main"], score


async def test_score_is_the_mean_of_the_choices_by_probability() -> None:
    says = Says(yes=0.6, no=0.2)
    (first, second), _ = await weighed(says)
    assert [first.reward, second.reward] == pytest.approx([0.75, 0.75])
    assert len(says.asked) in (2, 4), "the second reply is equal, and may be judged at the same time"
    assert all("Reply with one of these and nothing else: yes, no." in text for text in says.asked)
    assert {first.metrics["judged.calls"], second.metrics["judged.calls"]} <= {0, 2}
    assert first.metrics["judged.sampled_tokens"] == 0 < first.metrics["judged.prompt_tokens"]
    (shown,) = first.attachments
    assert json.loads(shown.text) == {"yes": pytest.approx(0.6), "no": pytest.approx(0.2)}


async def test_judge_that_would_reply_otherwise_fails() -> None:
    for each in (await weighed(Says(yes=0.004, no=0.005)))[0]:
        assert (each.outcome, each.reward) == (Outcome.ENV_ERROR, None)
        assert "begins with one of yes, no with a probability of 0.009 only" in each.error


async def test_failed_score_is_an_engine_error() -> None:
    for each in (await weighed(lambda ids: [0.0]))[0]:
        assert (each.outcome, each.reward) == (Outcome.ENGINE_ERROR, None)
        assert "returned 1 values for" in each.error


async def test_choices_of_other_values_are_judged_again(tmp_path: Path) -> None:
    file = tmp_path / "scores.jsonl"
    for high, reward in ((1.0, 0.75), (2.0, 1.5)):
        (first, _), _ = await weighed(Says(yes=0.6, no=0.2), choices={"yes": high, "no": 0.0}, cache=file)
        assert first.reward == pytest.approx(reward)


@pytest.mark.engine
def test_real_judge_weighs_the_choices_by_their_scores(
    float32_engine: PooledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "MIN_CHOICE_PROBABILITY", 0.0)  # the small model writes no sentences
    choices = {"Hello": 1.0, "The": 0.0, "I": 0.5}

    async def main() -> None:
        said = Sampling(max_tokens=4)
        run = Run(
            Dataset([{"prompt": "Hello?"}], score=judge("A greeting.", choices=choices)), float32_engine, sampling=said
        )
        async with run:
            (one,) = [each async for each in run if each.agent == "main"]
        probabilities = json.loads(one.attachments[0].text)
        whole = sum(probabilities.values())
        assert 0 < whole <= 1
        assert one.reward == pytest.approx((probabilities["Hello"] + probabilities["I"] / 2) / whole)

    float32_engine.home.call(main)
