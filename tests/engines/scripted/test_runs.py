"""The scripted engine in whole runs: its page of the documentation, and a replay of a recorded run."""

import re
from pathlib import Path
from typing import Any

import pytest

from runner import BadOption, Environment, Run, RunFile, ScriptedEngine, Task, Trajectory, reward, tool
from runner.testing import ModelCall, Reply, call
from runner.trajectory import Outcome
from tests.conformance.corpus import corpus
from tests.repository import DOCS

PAGE = DOCS / "scripted-engine.md"


def test_every_example_of_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert len(examples) >= 6
    names: dict[str, Any] = {"__name__": "page"}
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)


class Sums(Environment):
    """Environment that adds two numbers, one of which only the tool has."""

    def tasks(self) -> list[Task]:
        return [Task(id=str(number), prompt=f"What is {number} + 1?", answer=str(number + 1)) for number in range(4)]

    @tool
    def add(self, a: int, b: int) -> int:
        """Add two integers."""
        return a + b

    @reward
    def correct(self) -> bool:
        return self.task.answer in self.episode.text.split()


def by_chance(asked: ModelCall) -> Any:
    if asked.turn == 0:
        return call("add", a=asked.rng.randint(0, 3), b=1)
    return f"It is {asked.prompt.rsplit('tool', 1)[-1].split()[0]} {asked.rng.random()}"


def said(trajectories: list[Trajectory]) -> dict[tuple[str, int], list[tuple[list[int], list[float]]]]:
    return {
        (trajectory.task.id, trajectory.index): [
            (turn.token_ids.tolist(), turn.logprobs.tolist()) for turn in trajectory.turns
        ]
        for trajectory in trajectories
    }


def gpt_oss(folder: Path) -> Path:
    """A file with the template of a family whose turns need its control tokens."""
    path = folder / "gpt-oss.jinja"
    path.write_text(next(each.text for each in corpus() if each.name == "openai-gpt-oss-120b"), encoding="utf-8")
    return path


@pytest.mark.anyio
async def test_a_template_from_a_file_is_played_with_its_own_control_tokens(tmp_path: Path) -> None:
    engine = ScriptedEngine([call("add", a=0, b=1), "<|channel|>final<|message|>1"], template=gpt_oss(tmp_path))
    async with Run(Sums, engine, tasks=Sums().tasks()[:1]) as run:
        (trajectory,) = [each async for each in run]
    assert trajectory.outcome is Outcome.COMPLETED
    assert trajectory.reward == 1
    (mark,) = engine.tokenizer.encode("<|channel|>")
    assert all(mark in turn.token_ids for turn in trajectory.turns)


def test_unwritable_calls_are_refused_with_the_fix(tmp_path: Path) -> None:
    calls = [call("add", a=0, b=1), call("name", of="x")]
    with pytest.raises(
        BadOption, match=r"a reply that calls add, name: .*the format allows only one call in a turn.*one a turn"
    ):
        ScriptedEngine([Reply(calls=calls)], template=gpt_oss(tmp_path))


@pytest.mark.anyio
async def test_a_recorded_run_is_said_again_id_by_id_also_within_a_group(tmp_path: Path) -> None:
    path = tmp_path / "recorded.db"
    async with Run(Sums, ScriptedEngine(by_chance, seed=9), file=path, group_size=3, seed=4) as first:
        before = said([trajectory async for trajectory in first])
    async with Run(Sums, ScriptedEngine(path), file=None, group_size=3, seed=4) as again:
        after = said([trajectory async for trajectory in again])
    assert len(before) == 12
    assert after == before
    assert len({str(turns) for turns in before.values()}) == 12


@pytest.mark.anyio
async def test_an_open_run_file_serves_as_well_as_its_path(tmp_path: Path) -> None:
    path = tmp_path / "recorded.db"
    async with Run(Sums, ScriptedEngine(["no call"]), file=path) as first:
        assert len([trajectory async for trajectory in first]) == 4
    with RunFile(path) as run_file:
        async with Run(Sums, ScriptedEngine(run_file), file=None) as again:
            assert [trajectory.text async for trajectory in again] == ["no call"] * 4


@pytest.mark.anyio
async def test_unrecorded_prompt_is_rejected_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "recorded.db"
    async with Run(Sums, ScriptedEngine(["no call"]), file=path) as first:
        assert len([trajectory async for trajectory in first]) == 4
    other = [Task(id="other", prompt="What is 2 + 2?", answer="4")]
    async with Run(Sums, ScriptedEngine(path), tasks=other, file=None, retries=0, breaker=1.0) as again:
        (trajectory,) = [trajectory async for trajectory in again]
    assert trajectory.outcome is Outcome.ENGINE_ERROR
    assert "the recorded run has no turn with this prompt" in trajectory.error
