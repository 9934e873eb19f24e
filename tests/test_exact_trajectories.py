"""Exact trajectories in the run file, of many tool-use episodes at once on the real engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envs.calculator import Calculator, Question
from runner import Outcome, Run, RunFile, Sampling, Trajectory, VllmEngine
from runner.tokens.junction import Result
from runner.tokens.log import Source
from tests import sweeps

EPISODES = sweeps.times(64, 24)  # both numbers exceed the engine's places

pytestmark = pytest.mark.anyio


@pytest.fixture
def sent(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """The prompt ids that reached vLLM, by the name of the turn."""
    prompts: dict[str, list[int]] = {}
    add_request = engine.vllm.llm.add_request

    async def record(name: str, prompt: Any, parameters: Any, **named: Any) -> Any:
        prompts[name.rpartition("#")[0]] = list(prompt["prompt_token_ids"])
        return await add_request(name, prompt, parameters, **named)

    monkeypatch.setattr(engine.vllm.llm, "add_request", record)
    return prompts


async def play(engine: VllmEngine, path: Path) -> None:
    # No other test asks these questions: blocks that another run left in the cache would be no evidence.
    environment = Calculator(questions=EPISODES, first=20_000)
    async with Run(environment, engine, sampling=Sampling(temperature=0), file=path) as run:
        async for trajectory in run:
            assert trajectory.outcome.scored, trajectory.error


def trajectories(path: Path) -> Iterator[Trajectory]:
    with RunFile(path, task_class=Question) as file:
        yield from file.trajectories()


async def test_run_file_holds_the_sent_ids_and_prompts_extend_the_last(
    engine: VllmEngine, sent: dict[str, list[int]], tmp_path: Path
) -> None:
    path = tmp_path / "calculator.db"
    await play(engine, path)

    await engine.idle()
    assert engine.stats().open == 0
    stored = list(trajectories(path))
    assert len(stored) == EPISODES
    assert {len(trajectory.segments) for trajectory in stored} == {1}
    assert sum(len(trajectory.turns) for trajectory in stored) == len(sent)

    exact = []
    block = engine.describe()["arguments"].get("block_size") or engine.describe()["chosen"]["block_size"]
    for trajectory in stored:
        exact.append(trajectory.rewards["exact"])
        before: list[int] = []
        for turn in trajectory.turns:
            prompt = sent[f"{trajectory.id}/main/{turn.number}"]
            assert list(turn.prompt_ids) == prompt
            assert prompt[: len(before)] == before
            if before:
                assert turn.junction is not None
                assert turn.junction.result is Result.APPENDED
                # The engine's own counter is evidence: the cache had every full block of the ids before this turn.
                assert turn.cached_tokens == (len(before) - 1) // block * block
            before = prompt + list(turn.token_ids)
        mask = trajectory.segments[0].log.mask()
        assert sum(mask) == trajectory.sampled
        assert all(
            (source == Source.SAMPLED) == bool(one)
            for source, one in zip(trajectory.segments[0].log.sources, mask, strict=True)
        )
    assert sum(len(trajectory.turns) >= 2 for trajectory in stored) > EPISODES / 2
    assert sum(score or 0 for score in exact) / EPISODES > 0.4


async def test_the_same_command_again_plays_nothing_that_is_finished(engine: VllmEngine, tmp_path: Path) -> None:
    path = tmp_path / "calculator.db"
    async with Run(Calculator(questions=8), engine, sampling=Sampling(temperature=0), file=path) as run:
        first = [trajectory.id async for trajectory in run]
    async with Run(Calculator(questions=8), engine, sampling=Sampling(temperature=0), file=path) as run:
        assert [trajectory.id async for trajectory in run] == []
        assert sorted(trajectory.id for trajectory in run.stored()) == sorted(first)


async def test_real_ids_have_log_probabilities_and_weight_versions(engine: VllmEngine, tmp_path: Path) -> None:
    async with Run(Calculator(questions=4), engine) as run:
        async for trajectory in run:
            assert trajectory.outcome in (Outcome.COMPLETED, Outcome.TURN_LIMIT)
            for turn in trajectory.turns:
                assert len(turn.logprobs) == len(turn.token_ids) > 0
                assert all(logprob <= 0 for logprob in turn.logprobs)
            log = trajectory.segments[0].log
            covered = {index for span in log.versions for index in range(span.start, span.end)}
            assert covered == {index for index, source in enumerate(log.sources) if source == Source.SAMPLED}
