"""Screenshots for the pages: `python -m tests.report.screenshots [RUN.db]`, or `make screenshots`.

Without a run file, it plays 64 episodes of the calculator on the scripted engine. It needs Chromium.
"""

from __future__ import annotations

import base64
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio

from envs.calculator import Calculator, question
from runner import RunFile, Sampling
from runner.engines.scripted.script import ModelCall
from runner.messages import ToolCall
from runner.report.page import write_report
from runner.testing import Latency, ScriptedEngine, call, play_many_async
from tests.report.browser import Page, browser
from tests.repository import DOCS

FOLDER = DOCS / "images"
MAX_BYTES = 150_000


async def take(tab: Page, name: str) -> None:
    """Write the visible part of the page as an image."""
    data = base64.b64decode((await tab.send("Page.captureScreenshot", format="png"))["data"])
    assert len(data) <= MAX_BYTES, f"{name} has {len(data):,} bytes"
    (FOLDER / f"{name}.png").write_bytes(data)
    print(f"{FOLDER / name}.png: {len(data):,} bytes")


async def take_all(page: Path, folder: Path) -> None:
    FOLDER.mkdir(exist_ok=True)
    async with browser(folder / "light") as tab:
        await tab.open(page, width=1180)
        await tab.until("document.documentElement.dataset.ready")
        await take(tab, "report")
    async with browser(folder / "dark") as tab:
        await tab.open(page, width=1180, dark=True)
        await tab.until("document.documentElement.dataset.ready")
        rows = "[...document.querySelectorAll('details.e[data-chunk]')]"
        await tab.value(f"{rows}.find(each => !each.querySelector('.bad')).open = true")
        await tab.until("document.querySelector('.show-tokens')")
        await tab.value("document.querySelector('.show-tokens').click()")
        await tab.until("document.querySelectorAll('.tokens i.sampled').length > 5")
        await tab.value("document.querySelectorAll('.tokens i.sampled')[5].click()")
        await tab.value("document.querySelector('details.e[open] .show-tokens').scrollIntoView()")
        await take(tab, "tokens")


def speak(turn: ModelCall) -> ToolCall | str:
    """Reply as a model that solves the calculator's questions, with a mistake in one turn of twelve."""
    number = int(turn.episode.partition("#")[0].rpartition("-")[2])
    steps = [dict(each) for each in solved_calls(number)]
    step = steps[min(turn.turn, len(steps) - 1)]
    name = str(step.pop("name"))
    mistaken = turn.rng.random() < 1 / 12
    return call(name, **{key: value + int(mistaken) for key, value in step.items()})


def solved_calls(number: int) -> Iterator[dict[str, Any]]:
    """Return the calls that solve a question."""
    made = question(number, inners="+", outers="*")
    yield from ({"name": name, "a": a, "b": b} for name, a, b in made.calls)
    yield {"name": "answer", "value": made.value}


async def play_calculator(file: Path) -> None:
    """Play 64 episodes with this model, on the scripted engine."""
    engine = ScriptedEngine(speak, latency=Latency(first=4, between=1))
    sampling = Sampling(temperature=1, logprobs=3)
    await play_many_async(Calculator(questions=16), engine, file=file, group_size=4, sampling=sampling)


def main(given: list[str]) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        file = Path(given[0]) if given else folder / "calculator.db"
        if not given:
            anyio.run(play_calculator, file)
        with RunFile(file) as run_file:
            write_report(run_file, folder / "report.html")
        anyio.run(take_all, folder / "report.html", folder)


if __name__ == "__main__":
    main(sys.argv[1:])
