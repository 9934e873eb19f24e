"""Rich displays of notebooks: their content, with every text escaped."""

from __future__ import annotations

import random
from html.parser import HTMLParser
from pathlib import Path

import pytest

from runner import RunFile
from runner.trajectory import Group, Outcome, Trajectory
from tests.playing import Plain, play_all
from tests.report.playing import ATTACKS, play_hostile
from tests.store.building import played

pytestmark = pytest.mark.anyio


class Tags(HTMLParser):
    """The elements of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.names |= {name for name, _ in attrs}


def display(made: object) -> str:
    text = made._repr_html_()  # type: ignore[attr-defined]  # the method that notebooks call
    assert isinstance(text, str)
    return text


async def test_hostile_trajectory_shows_text_and_no_element(tmp_path: Path) -> None:
    await play_hostile(tmp_path / "hostile.db")
    with RunFile(tmp_path / "hostile.db") as run_file:
        shown = [display(each) for each in run_file.trajectories()]
    assert len(shown) == len(ATTACKS)
    for text in shown:
        tags = Tags(text)
        assert tags.seen <= {"div", "b", "pre", "details", "summary"}
        assert tags.names <= {"style", "open"}
        text.encode()  # no half surrogate is left
    assert "&lt;script&gt;" in "".join(shown)


def test_trajectory_shows_scores_turns_and_errors() -> None:
    text = display(played("sum"))
    for words in ("sum-0-0", "completed, reward 1 (correct 1)", "2 turns", "What is 1 + 1?", "segment 0"):
        assert words in text
    failed = played("sum", outcome=Outcome.ENV_ERROR)
    failed.error = "it <broke>"
    assert "it &lt;broke&gt;" in display(failed)


def test_long_trajectory_is_cut_in_words() -> None:
    long = played("long", turns=500)
    long.segments[0].messages[0]["content"] = "a" * 100_000
    text = display(long)
    assert "441 messages are left out" in text
    assert "98,000 characters left out" in text
    assert len(text) < 50_000


def test_group_has_a_row_for_each_trajectory() -> None:
    trajectories: list[Trajectory] = [played("sum", index) for index in range(3)]
    group = Group(trajectories[0].task, "main", trajectories, random.Random(0), complete=False)
    text = display(group)
    assert text.count("<tr>") == 4
    assert "not complete" in text


async def test_summary_has_outcomes_rewards_and_ids() -> None:
    from runner import Run
    from runner.testing import ScriptedEngine

    async with Run(Plain(), ScriptedEngine("yes"), group_size=2) as run:
        async for _ in run:
            pass
    text = display(run.summary)
    for words in ("2 episodes", "completed", "reward", "pass@2", "ids sampled"):
        assert words in text
    assert await play_all(Plain, "yes")
