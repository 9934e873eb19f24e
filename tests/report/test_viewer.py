"""`deltarunner view`: the pages of run files on loopback, read-only, including a run in progress."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from urllib.parse import quote, urlsplit

import anyio
import pytest
from typer.testing import CliRunner

from runner import BadOption, RunFile
from runner.cli.app import app
from runner.report.labels import read_labels
from runner.report.row_query import (
    MAX_KEPT_SEARCHES,
    ORDERS,
    PAGE_ROWS,
    RowQuery,
    TextSearches,
    neighbours,
    select_rows,
)
from runner.report.viewer import MIN_FOLLOW_SECONDS, RunView, Viewer
from runner.store.writer import RunWriter
from tests.report.browser import browser, browser_sample, needs_browser
from tests.report.playing import ATTACKS, play_hostile, play_sums, store
from tests.report.viewing import Answer, viewing
from tests.store.building import header, played
from tests.verifying import play as play_wandering

pytestmark = [pytest.mark.anyio, pytest.mark.sample_functions(2)]


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("view") / "sums.db"
    anyio.run(play_sums, path)
    return path


def cut_off(whole: Path, target: Path) -> None:
    data = whole.read_bytes()
    target.write_bytes(data[: len(data) // 2])


def test_page_of_the_viewer_has_results_and_episodes(sums: Path) -> None:
    with viewing(sums) as viewer:
        page = Answer(viewer, "sums.db/")
        assert page.status == 200
        for words in (
            "95% interval",
            "ConnectionError",
            "deltarunner run",
            "1 to 16 of 16 episodes",
            "16 trajectories",
        ):
            assert words in page.text
        body = Answer(viewer, f"sums.db/episode?id={quote('sum0#0')}&part=body").text
        assert "It is 3." in body
        assert "<html" not in body
        episode = Answer(viewer, f"sums.db/episode?id={quote('sum0#1')}").text
        assert 'rel="prev"' in episode
        assert 'rel="next"' in episode
        tokens = Answer(viewer, f"sums.db/tokens?id={quote('sum0#0')}").json()
        assert tokens["agents"][0][0] == "main"
        assert len(tokens["agents"][0][1][0]["ids"]) > 20
        assert Answer(viewer, "").status == 302


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("outcome=failed", 2),
        ("outcome=env_error&sort=-seconds", 2),
        ("task=sum1", 2),
        ("find=did+not+answer", 2),
        ("find=What+is+2+%2B+2", 2),
        ("find=100%25", 0),
        ("low=2", 0),
        *((f"sort={order}", 16) for order in ORDERS),
    ],
)
def test_episodes_are_chosen_and_ordered(sums: Path, query: str, count: int) -> None:
    with viewing(sums) as viewer:
        text = Answer(viewer, f"sums.db/?{query}").text
    assert len(re.findall('<details class="e"', text)) == count
    rewards = re.findall(r"<summary><span>[^<]*</span><span[^>]*>[^<]*</span><span>([^<]*)", text)
    if query == "sort=-reward":
        assert rewards == sorted(rewards, key=lambda text: -1 if text == "-" else float(text), reverse=True)


async def test_long_list_has_pages_and_one_row_an_episode(tmp_path: Path) -> None:
    path = tmp_path / "many.db"
    async with RunWriter(path, header()) as writer:
        for number in range(PAGE_ROWS + 5):
            main, judge = played(f"task{number}"), played(f"task{number}", agent="judge", trained=False)
            await writer.commit_episode([judge, main])
        await writer.finish({})
    with RunFile(path) as run_file:
        rows, total = select_rows(run_file, RowQuery())
        assert (len(rows), total, {row.agent for row in rows}) == (PAGE_ROWS, PAGE_ROWS + 5, {"main"})
        rest, _ = select_rows(run_file, RowQuery(), first=PAGE_ROWS)
        assert [row.id for row in rest] == [f"task{PAGE_ROWS + number}-0-0" for number in range(5)]
        assert neighbours(run_file, rows[0]) == (None, "task1-0-0")
    with viewing(path) as viewer:
        text = Answer(viewer, f"many.db/?from={PAGE_ROWS}").text
        assert "101 to 105 of 105 episodes" in text
        assert 'rel="prev"' in text
        assert 'rel="next"' not in text


def test_other_keys_hosts_and_methods_are_refused(sums: Path) -> None:
    with viewing(sums) as viewer:
        for key in ("", "x", viewer.key[:-1], f"{viewer.key}x", "favicon.ico"):
            refused = Answer(viewer, "sums.db/", key=key)
            assert refused.status == 404
            assert "sum0" not in refused.text
        for host in ("evil.example", "127.0.0.1.evil.example:80", "evil.example:127.0.0.1", "[::2]:80"):
            assert Answer(viewer, "sums.db/", host=host).status == 421
        for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
            refused = Answer(viewer, "sums.db/", method=method)
            assert (refused.status, refused.headers["Allow"]) == (405, "GET, HEAD")
        assert Answer(viewer, "sums.db/", method="HEAD").text == ""
        for path in ("other.db/", "../sums.db/", "%2e%2e%2fsums.db/", "sums.db/nothing", "sums.db", "sums.db/x/y"):
            assert Answer(viewer, path).status == 404
        for query in ("sort=key", "outcome=x", "low=x", "from=-1", "from=1e3"):
            assert Answer(viewer, f"sums.db/?{query}").status == 400
        assert Answer(viewer, "sums.db/episode?id=none").status == 404
        policy = Answer(viewer, "sums.db/").headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy


@pytest.mark.parametrize(
    "request_line",
    [
        "GET * HTTP/1.1",
        "GET  HTTP/1.1",
        "GET / HTTP/1.1\r\nHost: [::",
        "nonsense",
        "GET //{key}/ HTTP/1.1",
        "TRACE /{key}/ HTTP/1.1",
    ],
)
def test_odd_requests_are_refused_without_a_trace(
    sums: Path, request_line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with viewing(sums) as viewer:
        address = urlsplit(viewer.address)
        with socket.create_connection((address.hostname, address.port), timeout=60) as client:
            client.sendall(f"{request_line.format(key=viewer.key)}\r\nConnection: close\r\n\r\n".encode())
            client.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: client.recv(65536), b"")).decode()
        assert "sum0" not in answer
        assert " 200 " not in answer[:20]
        assert Answer(viewer, "sums.db/").status == 200
    assert "Traceback" not in capfd.readouterr().err


def test_viewer_writes_nothing(sums: Path) -> None:
    def state() -> dict[str, bytes]:
        return {each.name: each.read_bytes() for each in sums.parent.iterdir()}

    before = state()
    with viewing(sums) as viewer:
        for page in (
            "",
            "overview",
            "status",
            "?find=x",
            f"episode?id={quote('sum0#0')}",
            f"tokens?id={quote('sum0#0')}",
        ):
            assert Answer(viewer, f"sums.db/{page}").status == 200
    assert state() == before


async def test_folder_lists_its_files_and_names_damaged_ones(sums: Path, tmp_path: Path) -> None:
    shutil.copy(sums, tmp_path / "sums & more.db")
    (tmp_path / "text.db").write_text("hello")
    await store(tmp_path / "empty.db", [])
    cut_off(sums, tmp_path / "cut.db")
    with viewing(tmp_path) as viewer:
        page = Answer(viewer, "").text
        assert "it is not a run file" in page
        assert "tests.report.playing:Sums" in page
        assert "1 to 16 of 16" in Answer(viewer, f"{quote('sums & more.db')}/").text
        assert "No episodes." in Answer(viewer, "empty.db/").text
        assert "No episode matches the filters." in Answer(viewer, "empty.db/?outcome=failed").text
        assert "No further episodes." in Answer(viewer, f"{quote('sums & more.db')}/?from=16").text
        assert Answer(viewer, "text.db/").status == 404
        cut = Answer(viewer, "cut.db/")
        assert (cut.status, "it is damaged" in cut.text) == (500, True)


def test_results_that_cannot_be_computed_show_the_reason(sums: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.db"
    shutil.copy(sums, damaged)
    with closing(sqlite3.connect(damaged)) as connection:
        connection.execute("UPDATE turns SET tool_calls = '<b>'")
        connection.commit()
    with viewing(damaged) as viewer:
        for page in ("damaged.db/", "damaged.db/overview"):
            text = Answer(viewer, page).text
            assert "its rows are damaged, so no summary can be computed" in text
            assert "<b>" not in text
        assert Answer(viewer, "damaged.db/status").json()["settled"]


async def test_text_is_searched_once_in_each_episode(tmp_path: Path) -> None:
    searches, labels = TextSearches(), read_labels(tmp_path / "none.db")
    path = tmp_path / "growing.db"
    async with RunWriter(path, header()) as writer:
        await writer.commit_episode([played("needle 1")])
        with RunFile(path) as run_file:
            statements: list[str] = []
            run_file._connection.set_trace_callback(statements.append)
            assert [len(searches.keys(run_file, "needle", labels)) for _ in range(3)] == [1, 1, 1]
            assert sum("LIKE" in each for each in statements) == 1
            await writer.commit_episode([played("hay")])
            await writer.commit_episode([played("needle 2")])
            assert searches.keys(run_file, "needle", labels) == [1, 3]
            assert sum("LIKE" in each for each in statements) == 2
            assert searches.keys(run_file, "hay", labels) == [2]
            for number in range(MAX_KEPT_SEARCHES):
                searches.keys(run_file, f"other {number}", labels)
            assert len(searches._found) == MAX_KEPT_SEARCHES
        await writer.finish({})


def test_pages_share_the_time_of_following(tmp_path: Path) -> None:
    view = RunView(tmp_path / "run.db", None)
    view.seconds = {"": 0.75, "status": 0.25}  # the processor seconds of one update
    assert [round(view.next_look(), -1) for _ in range(4)] == [100, 200, 300, 400]
    quick = RunView(tmp_path / "run.db", None)
    quick.seconds = {"": 0.001}
    assert quick.next_look() == MIN_FOLLOW_SECONDS


async def test_large_untrained_file_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await store(tmp_path / "run.db", [played(f"t{n}", trained=False) for n in range(3)])
    waits: list[float] = []
    monkeypatch.setattr(RunView, "refresh", lambda self, seen, wait=0.0: waits.append(wait))
    with viewing(tmp_path / "run.db") as viewer:
        for most in (3, 2):
            monkeypatch.setattr("runner.report.viewer.MAX_WAIT_EPISODES", most)
            assert Answer(viewer, "run.db/").status == 200
    assert [wait > 0 for wait in waits] == [True, False]


@pytest.mark.parametrize(("query", "status"), [("?find=%ff", 400), ("episode?id=%ff", 400), ("?find=%ed%a0%80", 200)])
def test_addresses_that_are_not_utf8_have_an_answer(sums: Path, query: str, status: int) -> None:
    with viewing(sums) as viewer:
        assert Answer(viewer, f"sums.db/{query}").status == status


async def test_ids_with_half_a_surrogate_open(tmp_path: Path) -> None:
    path = await store(tmp_path / "odd.db", [played("a\ud800/&?<b>"), played("b")])
    with viewing(path) as viewer:
        page = Answer(viewer, "odd.db/").text
        address = re.findall(r'href="(episode\?id=[^"]*)"', page)[0]
        assert Answer(viewer, f"odd.db/{address}").status == 200
        assert "What is 1 + 1?" in Answer(viewer, f"odd.db/{address}").text


async def test_viewer_follows_a_run_that_still_plays(tmp_path: Path) -> None:
    path = tmp_path / "growing.db"
    async with RunWriter(path, header()) as writer:
        await writer.commit_episode([played("first")])
        with viewing(path) as viewer:
            assert "not complete" in await anyio.to_thread.run_sync(lambda: Answer(viewer, "growing.db/").text)
            before = await anyio.to_thread.run_sync(lambda: Answer(viewer, "growing.db/status").json())
            await writer.commit_episode([played("second")])
            after = await anyio.to_thread.run_sync(lambda: Answer(viewer, "growing.db/status").json())
            assert before["seen"] != after["seen"]
            assert not after["settled"]
            assert "second" in await anyio.to_thread.run_sync(lambda: Answer(viewer, "growing.db/").text)
            await writer.finish({})
            with anyio.fail_after(60):
                while True:
                    last = await anyio.to_thread.run_sync(lambda: Answer(viewer, "growing.db/status").json())
                    if last["settled"]:
                        break
                    await anyio.sleep(0.1)
            assert "2 trajectories, complete." in last["words"]


@pytest.mark.parametrize("path", ["missing.db", "text.db", "."])
def test_paths_without_run_files_are_refused_in_words(tmp_path: Path, path: str) -> None:
    (tmp_path / "text.db").write_text("hello")
    folder = tmp_path / "empty"
    folder.mkdir()
    result = CliRunner().invoke(app, ["view", str(folder if path == "." else tmp_path / path)])
    assert result.exit_code in (2, 7)
    assert "run file" in result.output
    assert "Traceback" not in result.output


def test_taken_port_is_refused_in_words(sums: Path) -> None:
    with viewing(sums) as viewer:
        port = urlsplit(viewer.address).port
        assert port is not None
        with pytest.raises(BadOption, match=f"--port {port}: the server cannot listen on this port"):
            Viewer(sums, port=port)


def test_command_prints_the_address_and_ends_with_ctrl_c(sums: Path) -> None:
    # A process that a shell starts in the background inherits the setting to ignore Ctrl-C.
    interruptible = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{interruptible}; from runner.cli.app import main; main()", "view", str(sums)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"}) as process:
        assert process.stdout is not None
        address = urlsplit(process.stdout.readline().strip())
        assert address.hostname == "127.0.0.1"
        connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=60)
        connection.request("GET", f"{address.path}sums.db/")
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()


# --- in a browser


@browser_sample
@needs_browser
async def test_viewer_opens_episodes_and_tokens_by_clicks(sums: Path, tmp_path: Path) -> None:
    with viewing(sums) as viewer:
        async with browser(tmp_path / "profile") as tab:
            await tab.open(f"{viewer.address}sums.db/?outcome=completed")
            await tab.until("document.documentElement.dataset.ready")
            assert await tab.value("document.querySelectorAll('details.e').length") == 14
            await tab.click("#list details summary")
            await tab.until("document.querySelector('#list .m.sampled')")
            await tab.click(".show-tokens")
            await tab.until("document.querySelectorAll('.tokens i.sampled').length")
            await tab.value("document.querySelector('.tokens i.sampled').click()")
            assert "loss mask 1" in await tab.value("document.querySelector('.about').textContent")
            await tab.press("j")
            await tab.value("document.querySelector('#task').value = 'sum1'; document.forms[0].requestSubmit()")
            await tab.until("document.querySelectorAll('details.e').length == 2")
            await tab.until("document.documentElement.dataset.ready")
            await tab.click("#side")
            await tab.until("document.querySelectorAll('#list.side .m.sampled').length >= 4")
            assert tab.complaints == []
            assert all(url.startswith(viewer.address) for url in tab.requests if "favicon" not in url)


@browser_sample
@needs_browser
async def test_page_shows_new_episodes_while_a_run_plays(tmp_path: Path) -> None:
    path = tmp_path / "growing.db"
    async with RunWriter(path, header()) as writer:
        await writer.commit_episode([played("first")])
        with viewing(path) as viewer:
            async with browser(tmp_path / "profile") as tab:
                await tab.open(f"{viewer.address}growing.db/")
                await tab.until("document.documentElement.dataset.ready")
                await tab.click("#list details summary")
                await tab.until("document.querySelector('#list .m.sampled')")
                await writer.commit_episode([played("second")])
                await tab.until("document.querySelectorAll('#list details').length == 2")
                # The episode that the reader opened stays open.
                assert await tab.value("document.querySelector('#list details').open")
                await writer.finish({})
                await tab.until("document.querySelector('#state').textContent.includes('complete.')")
                await tab.until("document.querySelector('#results').textContent.includes('95% interval')")


@browser_sample
@needs_browser
async def test_viewer_reads_without_javascript_and_by_keyboard(sums: Path, tmp_path: Path) -> None:
    with viewing(sums) as viewer:
        async with browser(tmp_path / "profile") as tab:
            await tab.open(f"{viewer.address}sums.db/?outcome=completed", script=False)
            await tab.click("#list details summary")
            await tab.click("#list details a")
            await tab.until("document.body.innerText.includes('It is 3.')")
        async with browser(tmp_path / "keyboard") as tab:
            await tab.open(f"{viewer.address}sums.db/")
            await tab.until("document.documentElement.dataset.ready")
            await tab.press("j")
            await tab.press("Enter")
            await tab.until("document.querySelector('#list .m.sampled')")
            await tab.press("/")
            assert await tab.value("document.activeElement.id") == "find"


@needs_browser
async def test_adversarial_texts_run_nothing_in_the_viewer(tmp_path: Path) -> None:
    file = tmp_path / "hostile.db"
    await play_hostile(file)
    with viewing(file) as viewer:
        async with browser(tmp_path / "profile") as tab:
            await tab.open(f"{viewer.address}hostile.db/")
            await tab.until("document.documentElement.dataset.ready")
            await tab.value("document.querySelectorAll('#list details').forEach(each => each.open = true)")
            await tab.until("document.querySelectorAll('#list .m').length > 20")
            await tab.value("document.querySelectorAll('.show-tokens').forEach(each => each.click())")
            await tab.until("document.querySelectorAll('.tokens i').length > 500")
            assert await tab.value("document.title") != "attacked"
            assert await tab.value("document.querySelectorAll('img, iframe, link, base, main svg a').length") == 0
            assert ATTACKS[0][:30] in await tab.value("document.body.innerText")
            assert tab.complaints == []
            assert all(url.startswith(viewer.address) for url in tab.requests if "favicon" not in url)


@browser_sample
@needs_browser
async def test_viewer_shows_branches_and_other_agents(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    await play_wandering(file, "pythonic")
    with viewing(file) as viewer:
        async with browser(tmp_path / "profile") as tab:
            await tab.open(f"{viewer.address}run.db/")
            await tab.until("document.documentElement.dataset.ready")
            await tab.click("#list details summary")
            await tab.until("document.querySelector('#list').innerText.includes('judge, segment 0')")
