"""The README's examples run unchanged."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from runner import Run, ScriptedEngine, Task
from runner.engines.scripted.script import ModelCall, call
from runner.training import TrainingTensors
from tests.repository import ROOT

# Some blocks of the README are not weather scripts: tests/endpoint/test_pages.py plays the ones for agent programs.
BLOCKS = [
    block
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    if "serve()" not in block
]


@pytest.fixture
def weather(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The README's `weather.py`, as a module that its other examples import."""
    (tmp_path / "weather.py").write_text(BLOCKS[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("weather")
    del sys.modules["weather"]


def test_the_site_begins_with_the_readme_environment() -> None:
    assert f"```python\n{BLOCKS[0]}```" in (ROOT / "docs" / "index.md").read_text()


@pytest.mark.anyio
async def test_readme_environment_rewards_nothing_for_doing_nothing(weather: ModuleType) -> None:
    async with Run(weather.Weather(), ScriptedEngine("It may be anything.")) as run:
        assert {trajectory.reward async for trajectory in run} == {0.0}


@pytest.mark.parametrize("block", BLOCKS[1:3], ids=["summary", "groups"])
def test_the_scripts_of_the_readme_run(
    weather: ModuleType, block: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    says: list[Any] = [call("weather", city="Oslo"), "Sunny, rainy or foggy."]
    # Only the engine is replaced: the tests in tests/engines start the real one.
    monkeypatch.setattr("runner.VllmEngine", lambda model: ScriptedEngine(says))
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "Oslo" in printed
    assert "1.0" in printed


def training_step() -> Any:
    """Return the function `step` of the README."""
    names: dict[str, Any] = {}
    exec(compile(BLOCKS[3], "README.md", "exec"), names)
    return names["step"]


def weights_after(trained: list[TrainingTensors]) -> Any:
    """Return an optimizer that only records its tensors in `trained`."""

    def optimise(tensors: TrainingTensors) -> dict[str, Any]:
        trained.append(tensors)
        return {}

    return optimise


@pytest.mark.anyio
async def test_readme_training_step_changes_the_weights(weather: ModuleType) -> None:
    step, trained = training_step(), list[TrainingTensors]()

    def model(request: ModelCall) -> Any:
        first, correct = request.turn == 0, request.episode.endswith("#0")
        return (
            [call("weather", city="Oslo")] if first else "Sunny, rainy or foggy." if correct else "It may be anything."
        )

    engine = ScriptedEngine(model)
    async with engine:
        async with Run(weather.Weather(), engine, group_size=2) as run:
            await step(engine, run, weights_after(trained))
        assert engine.weight_version == "1"
    (tensors,) = trained
    assert len(tensors.input_ids) == 8
    assert bool(tensors.advantages[tensors.loss_mask].ne(0).all())


@pytest.mark.anyio
async def test_next_readme_training_step_takes_the_next_eight_tasks(weather: ModuleType) -> None:
    step, trained = training_step(), list[TrainingTensors]()

    def model(request: ModelCall) -> Any:
        right = "Sunny, rainy or foggy." if request.episode.endswith("#0") else "It may be anything."
        return [call("weather", city="Oslo")] if request.turn == 0 else right

    engine = ScriptedEngine(model)
    tasks = [Task(id=f"{number}", prompt="What is the weather?") for number in range(20)]
    async with engine, Run(weather.Weather(), engine, tasks=tasks, group_size=2) as run:
        for _ in range(3):
            await step(engine, run, weights_after(trained))
    assert [len(tensors.input_ids) for tensors in trained] == [16, 16, 8]


@pytest.mark.anyio
async def test_the_step_of_the_readme_is_skipped_where_every_group_is_flat(weather: ModuleType) -> None:
    step = training_step()
    engine = ScriptedEngine("It may be anything.")
    async with engine:
        async with Run(weather.Weather(), engine, group_size=2) as run:
            await step(engine, run, lambda tensors: pytest.fail("there is nothing to train on"))
        assert engine.weight_version == "scripted"
