"""`deltarunner report`: one page, read in a real browser."""

from __future__ import annotations

import html
import re
import sqlite3
import time
from contextlib import closing
from itertools import product
from pathlib import Path

import anyio
import pytest
from typer.testing import CliRunner

from runner import Environment, RunFile, Task, ToolError, reward, tool
from runner.cli.app import app
from runner.report.overview import overview_of, staleness_of
from runner.report.page import MAX_EPISODES, write_report
from runner.store.writer import RunWriter
from runner.testing import ScriptedEngine, call
from runner.tokens.log import VersionSpan
from runner.trajectory import Outcome, Trajectory
from tests.playing import play_all
from tests.report.browser import browser, browser_sample, needs_browser
from tests.report.playing import ATTACKS, play_hostile, play_sums, store
from tests.report.screenshots import MAX_BYTES
from tests.report.viewing import viewing
from tests.repository import DOCS
from tests.store.building import header, played
from tests.verifying import play as play_wandering

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "sums.db"
    anyio.run(play_sums, path)
    return path


@pytest.fixture(scope="module")
def page(sums: Path) -> Path:
    return report(sums)


def report(file: Path, *options: str) -> Path:
    target = file.with_name(f"{file.stem}{len(list(file.parent.glob('*.html')))}.html")
    result = CliRunner().invoke(app, ["report", str(file), "-o", str(target), *options])
    assert result.exit_code == 0, result.output
    return target


# --- without a browser


def test_page_has_run_results_failures_and_transcripts(page: Path) -> None:
    text = page.read_text()
    for words in (
        "tests.report.playing:Sums",
        "pass^k",
        "95% interval",
        "env_error",
        "deltarunner run tests.report.playing:Sums --group-size 2 --episodes 16 --seed 0 --temperature 1",
        "What is 2 + 2?",
    ):
        assert words in text
    # The place of the failure in the author's code.
    assert re.search(r'<td>ConnectionError</td><td class="text"><code>add, [^<]*playing.py:\d+</code>', text)
    # The page contains a long system message only once.
    assert text.count("You add numbers. You add numbers.") <= 20


def test_page_names_no_address_of_another_place(page: Path) -> None:
    text = re.sub(r'<script type="text/plain".*?</script>', "", page.read_text(), flags=re.DOTALL)
    assert "default-src 'none'" in html.unescape(text)
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"', text)
    assert "http" not in text.replace("http-equiv", "")


async def test_file_without_episodes_has_a_page_with_a_note(tmp_path: Path) -> None:
    path = await store(tmp_path / "empty.db", [])
    assert "The file has no episodes yet." in report(path).read_text()


def test_other_files_are_refused_in_words(tmp_path: Path) -> None:
    text = tmp_path / "text.db"
    text.write_text("hello")
    for file in (text, tmp_path / "missing.db"):
        result = CliRunner().invoke(app, ["report", str(file)])
        assert result.exit_code == 7
        assert "Traceback" not in result.output


def test_damaged_file_is_refused_in_words(sums: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(sums.read_bytes())
    with closing(sqlite3.connect(damaged)) as connection:
        connection.execute("UPDATE segments SET ids = x'00'")
        connection.commit()
    result = CliRunner().invoke(app, ["report", str(damaged)])
    assert result.exit_code == 7
    assert "damaged" in result.output
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("command", ["report", "show", "compare", "label", "export"])
def test_file_that_was_cut_off_is_refused_in_words(sums: Path, tmp_path: Path, command: str, share: float) -> None:
    whole = sums.read_bytes()
    cut = tmp_path / "cut.db"
    cut.write_bytes(whole[: int(len(whole) * share)])
    result = CliRunner().invoke(app, [command, *([str(sums)] if command == "compare" else []), str(cut)])
    assert result.exit_code == 8
    assert "it is damaged" in result.output
    assert "Traceback" not in result.output
    assert [each.name for each in tmp_path.iterdir()] == ["cut.db"]


def test_pictures_of_the_docs_are_small_and_shown() -> None:
    pages = "".join(page.read_text() for page in [DOCS.parent / "README.md", *DOCS.glob("*.md")])
    pictures = sorted((DOCS / "images").glob("*.png"))
    assert {"report.png", "tokens.png"} <= {each.name for each in pictures}
    for each in pictures:
        assert each.stat().st_size <= MAX_BYTES
        assert f"images/{each.name})" in pages


def test_run_file_is_never_replaced_by_a_page(sums: Path) -> None:
    before = sums.read_bytes()
    assert CliRunner().invoke(app, ["report", str(sums), "-o", str(sums)]).exit_code == 2
    assert sums.read_bytes() == before


async def test_staleness_counts_updates_since_the_oldest_weights(tmp_path: Path) -> None:
    def sampled_by(task: str, version: str) -> Trajectory:
        made = played(task)
        made.segments[0].log.versions = [VersionSpan(version, 8, len(made.segments[0].log))]
        return made

    path = tmp_path / "weights.db"
    async with RunWriter(path, header()) as writer:
        await writer.commit_episode([sampled_by("before", "start")])
        for number in range(3):
            await writer.commit_weights(0, f"step-{number}", None, time.time())
        await writer.commit_episode([sampled_by("fresh", "step-2")])
        await writer.commit_episode([sampled_by("old", "step-0")])
        await writer.commit_episode([sampled_by("oldest", "start")])
    with RunFile(path) as run_file:
        assert staleness_of(run_file) == [0, 0, 2, 3]
    assert "Staleness. 4 values from 0 to 3 weight updates" in report(path).read_text()


async def test_failed_episodes_come_first_if_not_all_fit(tmp_path: Path) -> None:
    outcomes = [Outcome.ENV_ERROR if number == 41 else Outcome.COMPLETED for number in range(60)]
    episodes = [played(f"task{number}", outcome=outcome) for number, outcome in enumerate(outcomes)]
    path = await store(tmp_path / "many.db", episodes)
    with RunFile(path) as run_file:
        written = write_report(run_file, tmp_path / "page.html", most=9)
    assert (written.episodes, written.total) == (9, 60)
    assert 'id="e-task41-0-0"' in (tmp_path / "page.html").read_text()
    assert MAX_EPISODES >= 1000


async def test_thousands_of_turns_and_a_megabyte_are_cut_in_words(tmp_path: Path) -> None:
    long = played("long", turns=10_000)
    long.segments[0].messages[0]["content"] = "a" * 1_000_000
    path = await store(tmp_path / "long.db", [long])
    text = report(path).read_text()
    assert "9,601 messages and turns are left out here" in text
    assert "992,000 characters left out" in text
    assert len(text) < 1_000_000


async def test_failed_tools_are_counted_and_shown(tmp_path: Path) -> None:
    class Shop(Environment):
        @tool
        def buy(self, name: str) -> str:
            """Buy."""
            if name == "gold":
                raise ToolError("too expensive")
            return "bought"

        @reward
        def fine(self) -> float:
            return 1.0

    file = tmp_path / "shop.db"
    engine = ScriptedEngine([[call("buy", name="gold"), call("buy", name="tea"), call("buy")], "done"])
    await play_all(Shop, engine, file=file, tasks=[Task(id="t", prompt="Buy.")])
    with RunFile(file) as run_file:
        overview = overview_of(run_file)
        assert run_file.summary()["failed_calls"] == 2
    assert overview.tools == [("buy", 3, 0, 2)]
    text = report(file).read_text()
    assert len(re.findall(r'buy \{"name":"gold"\}\s*<span class="bad">failed', text)) == 1
    assert "3, 2 of them failed" in CliRunner().invoke(app, ["show", str(file)]).output


@pytest.mark.whole
async def test_thousand_short_episodes_fit_in_three_megabytes(tmp_path: Path) -> None:
    path = await store(tmp_path / "many.db", [played(f"task{number}", turns=4) for number in range(1_000)])
    assert len(report(path).read_bytes()) < 3_000_000


# --- in a browser


@needs_browser
async def test_adversarial_texts_run_nothing(tmp_path: Path) -> None:
    file = tmp_path / "hostile.db"
    await play_hostile(file)
    target = report(file)
    async with browser(tmp_path / "profile") as tab:
        await tab.open(target)
        await tab.until("document.documentElement.dataset.ready")
        await tab.value("document.querySelectorAll('details').forEach(each => each.open = true)")
        await tab.until("document.querySelectorAll('.show-tokens').length > 0")
        await tab.value("document.querySelectorAll('.show-tokens').forEach(each => each.click())")
        await tab.until("document.querySelectorAll('.tokens i').length > 500")
        assert await tab.value("document.title") != "attacked"
        assert await tab.value("document.querySelectorAll('img, iframe, link, base, main svg a').length") == 0
        assert await tab.value("document.querySelectorAll('script:not([type])').length") == 1
        assert await tab.value("document.querySelectorAll('meta[http-equiv]').length") == 1
        body = await tab.value("document.body.innerText")
        for attack in ATTACKS[:3]:
            assert attack[:30] in body
        assert "{{ 7 * 7 }}" in body
        assert r"\u202e" in body
        assert (tab.requests, tab.complaints) == ([], [])


@browser_sample
@needs_browser
async def test_page_reads_at_three_widths_light_and_dark(page: Path, sums: Path, tmp_path: Path) -> None:
    with viewing(sums) as viewer:
        async with browser(tmp_path / "profile") as tab:
            for address in (page, f"{viewer.address}sums.db/"):
                for width, dark in product((360, 768, 1180), (False, True)):
                    await tab.open(address, width=width, dark=dark)
                    await tab.until("document.documentElement.dataset.ready")
                    assert await tab.value("document.documentElement.scrollWidth <= innerWidth")
                    background = await tab.value("getComputedStyle(document.body).backgroundColor")
                    assert (background == "rgb(255, 255, 255)") is not dark
                    assert tab.complaints == []


@browser_sample
@needs_browser
async def test_page_filters_sorts_and_shows_tokens_by_clicks(page: Path, tmp_path: Path) -> None:
    shown = "[...document.querySelectorAll('details.e:not([hidden])')]"
    async with browser(tmp_path / "profile") as tab:
        await tab.open(page)
        await tab.until("document.documentElement.dataset.ready")
        assert await tab.value(f"{shown}.length") == 16
        await tab.value("outcome.focus()")
        await tab.press("e")  # selects the option that begins with this letter
        assert sorted(await tab.value(f"{shown}.map(e => e.id)")) == ["e-sum3#0", "e-sum3#1"]
        for _ in range(3):
            await tab.press("ArrowUp")
        assert await tab.value(f"{shown}.length") == 16
        await tab.value("sort.focus()")
        await tab.press("r")
        await tab.press("ArrowDown")
        assert await tab.value("sort.value") == "-reward"
        rewards = await tab.value(f"{shown}.map(e => e.querySelectorAll('summary span')[2].textContent)")
        assert rewards == sorted(rewards, key=lambda text: -1 if text == "-" else float(text), reverse=True)
        # The numbers of all rows are rounded to three digits, but the order follows the exact numbers.
        for _ in range(3):
            await tab.press("ArrowDown")
        assert await tab.value("sort.value") == "-seconds"
        seconds = await tab.value(f"{shown}.map(e => Number(e.dataset.figures.split(' ')[3]))")
        assert seconds == sorted(seconds, reverse=True)
        await tab.click("#e-sum0\\#0 summary")
        await tab.until("document.querySelector('#e-sum0\\\\#0 .show-tokens')")
        await tab.click("#e-sum0\\#0 .show-tokens")
        await tab.until("document.querySelectorAll('.tokens i.sampled').length")
        # The first sampled id: its text, its log-probability as a colour, and its details.
        await tab.value("document.querySelector('.tokens i.sampled').click()")
        about = await tab.value("document.querySelector('.about').textContent")
        for fact in ("source sampled", "loss mask 1", "log-probability", "weights"):
            assert fact in about
        assert await tab.value("document.querySelectorAll('.tokens .chip').length") == 2
        assert tab.complaints == []


@browser_sample
@needs_browser
async def test_page_works_with_the_keyboard_alone(page: Path, tmp_path: Path) -> None:
    async with browser(tmp_path / "profile") as tab:
        await tab.open(page)
        await tab.until("document.documentElement.dataset.ready")
        await tab.press("j")
        await tab.press("j")
        assert await tab.value("document.activeElement.parentElement.dataset.number") == "1"
        await tab.press("Enter")
        await tab.until("document.activeElement.parentElement.querySelector('.show-tokens')")
        await tab.press("Tab")
        await tab.press("Enter")
        await tab.until("document.querySelectorAll('.tokens i').length")
        await tab.press("Tab")
        for _ in range(3):
            await tab.press("ArrowRight")
        assert (await tab.value("document.querySelector('.about').textContent")).startswith("index 2 ")
        await tab.press("/")
        assert await tab.value("document.activeElement.id") == "find"


@browser_sample
@needs_browser
async def test_page_reads_without_javascript(page: Path, tmp_path: Path) -> None:
    async with browser(tmp_path / "profile") as tab:
        await tab.open(page, script=False)
        # The DevTools protocol reads the page, although the page's scripts do not run.
        assert await tab.value("document.documentElement.dataset.ready") is None
        assert await tab.value("document.querySelector('#controls').hidden") is True
        await tab.click("#e-sum0\\#0 summary")
        body = await tab.value("document.body.innerText")
        for words in ("95% interval", "What deserves a look", "turn 1", "It is 3."):
            assert words in body


@browser_sample
@needs_browser
async def test_page_shows_branches_agents_and_junctions(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    await play_wandering(file, "pythonic")
    async with browser(tmp_path / "profile") as tab:
        await tab.open(report(file))
        await tab.until("document.documentElement.dataset.ready")
        await tab.click("#list details summary")
        body = await tab.value("document.querySelector('#list details').innerText")
        for words in (
            "Branches",
            "judge, segment 0",
            "segment 1 (environment",
            "appended: ",
            "not seen",
            "not trained",
        ):
            assert words in body
