"""Run files for the tests of reports: ordinary ones, and one with attacks in every text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner import Environment, Sampling, Task, metric, reward, tool
from runner.store.writer import RunWriter
from runner.testing import ScriptedEngine, call
from runner.trajectory import Trajectory
from tests.playing import play_all
from tests.store.building import header

ATTACKS = (
    "<script>document.title='attacked'</script>",
    "</pre></details></main><img src=x onerror=\"document.title='attacked'\">",
    "<svg onload=\"document.title='attacked'\"><a href=\"javascript:document.title='attacked'\">click</a>",
    "</script><script>document.title='attacked'</script><style>body{display:none}</style>",
    "<!--<script>",
    "<iframe srcdoc=\"<script>parent.document.title='attacked'</script>\"></iframe>",
    "{{ 7 * 7 }}{% include 'parts.jinja' %} ${7*7} \ud800 \x1b[31m \u202egnp.exe \x00",
    '<meta http-equiv=refresh content="0;url=http://127.0.0.1:9/"><base href="http://127.0.0.1:9/">',
    '"\'><link rel=stylesheet href="http://127.0.0.1:9/a.css">',
)


class Sums(Environment):
    """Environment with tasks of two levels, one of which fails."""

    system_prompt = "You add numbers. " * 20

    def tasks(self) -> list[Task]:
        levels = ("easy", "hard")
        return [
            Task(id=f"sum{n}", prompt=f"What is {n} + {n}?", answer=str(2 * n), info={"level": levels[n % 2]})
            for n in range(8)
        ]

    @tool
    def add(self, a: int, b: int) -> int:
        """Add."""
        if self.task.id == "sum3":
            raise ConnectionError("the server did not answer")
        return a + b

    @reward
    def correct(self) -> float:
        return float(self.episode.rng.random() > 0.4)

    @metric
    def length(self) -> float:
        return len(self.episode.text)


async def play_sums(file: Path, **options: Any) -> None:
    engine = ScriptedEngine([[call("add", a=1, b=2)], "It is 3."])
    await play_all(Sums, engine, file=file, group_size=2, sampling=Sampling(temperature=1), **options)


class Hostile(Environment):
    """Environment in which every text is an attack."""

    system_prompt = "".join(ATTACKS) * 5

    def tasks(self) -> list[Task]:
        return [
            Task(
                id=f"{number} {attack[:60]}".replace("\ud800", ""), prompt=attack, answer=attack, info={attack: attack}
            )
            for number, attack in enumerate(ATTACKS)
        ]

    @tool
    def add(self, text: str) -> str:
        """Add."""
        return "".join(ATTACKS)

    @reward
    def correct(self) -> float:
        if self.task.id.startswith("1"):
            raise ValueError("".join(ATTACKS))
        return 1.0


async def play_hostile(file: Path) -> None:
    text = "".join(ATTACKS)
    await play_all(Hostile, ScriptedEngine([[call("add", text=text)], text]), file=file)


async def store(path: Path, trajectories: Sequence[Trajectory], **fields: Any) -> Path:
    """Write a run file with these episodes."""
    async with RunWriter(path, header(**fields)) as writer:
        for trajectory in trajectories:
            await writer.commit_episode([trajectory])
        await writer.finish({})
    return path
