"""The code of docs/scale.md is played, on a fleet without Ray."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest

import runner
from runner import RayEngine, RayEngines, Run
from tests.cluster.playing import Dice, dice_engine, fleet
from tests.repository import DOCS

pytestmark = pytest.mark.anyio

BLOCKS = re.findall(r"```python\n(.*?)```", (DOCS / "scale.md").read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> dict[str, Any]:
    """Names that the page's blocks use and do not define, with engines in this process; `asked` are the runs."""
    asked: list[Run] = []

    def run(environment: Any, engine: Any, **options: Any) -> None:
        asked.append(Run(environment, engine, **options))

    def checked(kind: Any) -> Any:
        def make(*arguments: Any, **named: Any) -> Any:
            inspect.signature(kind).bind(*arguments, **named)
            return dice_engine()

        return make

    weather: Any = ModuleType("weather")
    weather.Weather = Dice
    monkeypatch.setitem(sys.modules, "weather", weather)
    for name, made in {"RayEngines": checked(RayEngines), "RayEngine": checked(RayEngine), "run": run}.items():
        monkeypatch.setattr(runner, name, made)
    monkeypatch.chdir(tmp_path)
    there = {name: getattr(runner, name) for name in ("RayEngine", "RayEngines", "Run", "VllmEngine", "run")}
    return {"__name__": "__main__", "Game": Dice, "Weather": Dice, "asked": asked, **there}


async def play(block: str, names: dict[str, Any]) -> None:
    code = compile(dedent(block), "scale.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    waits = eval(code, names)
    if inspect.iscoroutine(waits):
        await waits


def blocks_with(word: str) -> Iterator[str]:
    return (block for block in BLOCKS if word in block)


def test_every_block_is_played_by_one_of_these_tests() -> None:
    played = [*blocks_with("_parallel_size=8)"), *blocks_with("run("), *blocks_with("engine.workers()")]
    assert sorted(BLOCKS) == sorted({*played, *blocks_with("update_weights(")})


async def test_engines_of_the_page_can_be_made(page: dict[str, Any]) -> None:
    for block in blocks_with("_parallel_size=8)"):
        await play(block, page)


async def test_runs_of_the_page_can_be_requested(page: dict[str, Any]) -> None:
    for block in blocks_with("run("):
        await play(block, page)
    alone, on_a_cluster, with_a_judge = page["asked"]
    assert str(alone.file) == str(on_a_cluster.file) == "weather.db"
    assert set(with_a_judge.options.engines) == {"judge"}


async def test_examples_of_the_page_read_the_workers_of_a_fleet(
    page: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    async with fleet((1, 2)) as (engine, _), engine:
        for block in blocks_with("engine.workers()"):
            await play(block, {**page, "engine": engine})
    assert re.match(r"\d \S+ 0/6 ", capsys.readouterr().out)


async def test_trainer_of_the_page_trains(page: dict[str, Any]) -> None:
    versions: list[str] = []

    def collect(group: Any) -> bool:
        return len(versions) < 2

    def optimise(batch: bool) -> str:
        versions.append(f"new {len(versions)}")
        return versions[-1]

    async with fleet(2) as (engine, launcher):
        names = {"RayEngines": lambda *_, **__: engine, "collect": collect, "optimise": optimise}
        for block in blocks_with("update_weights("):
            await play(block, {**page, **names})
    calls = [[call for call, _ in worker.calls] for worker in launcher.workers.values()]
    assert [each.count("update_weights") for each in calls] == [2, 2]
