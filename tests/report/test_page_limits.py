"""Sizes of a page: long parts of an episode are cut, and the page says so."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest

from runner import RunFile, Sampling
from runner.attachments import Attachment, AttachmentKind
from runner.chat_requests import ChatRequest, Verdict
from runner.messages import ToolCall
from runner.report.episode_view import MAX_SHOWN_ITEMS, Vocabulary, episode_view, token_payload
from runner.report.page import write_report
from runner.tokens.log import Source, TokenLog, VersionSpan
from runner.tokens.top_logprobs import TopLogprobs
from runner.trajectory import Segment, Trajectory
from tests.report.browser import browser, browser_sample, needs_browser
from tests.report.playing import store
from tests.store.building import played

pytestmark = pytest.mark.anyio


def given(trajectory: Trajectory) -> None:
    messages: list[Any] = [{"role": "user", "content": "x" * 2_000} for _ in range(5_000)]
    trajectory.segments[0].messages[:1] = messages


def calls(trajectory: Trajectory) -> None:
    for turn in trajectory.turns:
        turn.tool_calls = [ToolCall(f"c{number}", "add", {"text": "x" * 2_000}) for number in range(3_000)]


def segments(trajectory: Trajectory) -> None:
    messages: list[Any] = [{"role": "user", "content": "x" * 2_000}]
    trajectory.segments += [Segment(log=TokenLog(), messages=list(messages), unseen=1) for _ in range(5_000)]


def requests(trajectory: Trajectory) -> None:
    trajectory.requests += [
        ChatRequest(number, Verdict.CONTINUED, form="messages", client="claude-cli/2.1", turn=1, error="<b>late</b>")
        for number in range(9_000)
    ]


def attached(trajectory: Trajectory) -> None:
    png = b"\x89PNG\r\n\x1a\n" + bytes(1_500_000)
    trajectory.attachments += [
        Attachment(name=f"image {n}", kind=AttachmentKind.IMAGE, media_type="image/png", data=png, turn=0)
        for n in range(20)
    ]


@pytest.mark.parametrize(
    ("many", "words"),
    [
        (given, "4,602 messages and turns are left out here"),
        (calls, "2,950 calls left out"),
        (segments, "4,601 segments are left out here"),
        (requests, "8,600 further requests are left out here"),
        (attached, "This image is left out here: the images of the episode are too large together."),
    ],
)
async def test_much_of_one_kind_is_cut_in_words(many: Any, words: str, tmp_path: Path) -> None:
    trajectory = played("much")
    many(trajectory)
    path = await store(tmp_path / "much.db", [trajectory, played("other")])
    with RunFile(path) as run_file:
        written = write_report(run_file, tmp_path / "page.html")
    assert words in (tmp_path / "page.html").read_text()
    assert (written.transcripts, written.size < 9_000_000) == (2, True)
    assert "turn 2" in (tmp_path / "page.html").read_text()


@browser_sample
@needs_browser
async def test_browser_shows_the_requests_of_programs(tmp_path: Path) -> None:
    trajectory = played("program")
    requests(trajectory)
    path = await store(tmp_path / "program.db", [trajectory])
    with RunFile(path) as run_file:
        write_report(run_file, tmp_path / "page.html")
    async with browser(tmp_path / "profile") as tab:
        await tab.open(tmp_path / "page.html", width=360)
        await tab.until("document.documentElement.dataset.ready")
        await tab.click("#list details summary")
        body = await tab.value("document.querySelector('#list details').innerText")
        for words in ("Requests", "claude-cli/2.1", "<b>late</b>", "8,600 further requests"):
            assert words in body
        assert await tab.value("document.documentElement.scrollWidth <= innerWidth")


async def test_last_messages_of_a_cut_segment_are_shown(tmp_path: Path) -> None:
    trajectory = played("long", turns=1_000)
    path = await store(tmp_path / "long.db", [trajectory])
    with RunFile(path) as run_file:
        (agent,) = episode_view(run_file, list(run_file.rows())).agents
    entries = agent.segments[0].entries
    assert len(entries) == MAX_SHOWN_ITEMS + 1
    assert [entry.name for entry in entries[-2:]] == ["999", "1000"]


def long_turn(count: int) -> Trajectory:
    """A turn of `count` ids after 8 ids of a prompt. Ids and alternatives follow from the position."""
    trajectory = played("long", turns=1)
    log = TokenLog()
    log.append_prompt(range(8), Source.PROMPT)
    log.append_sampled(list(range(8, 8 + count)), [-position / 1000 for position in range(8, 8 + count)])
    log.stamp([VersionSpan("old", 0, count // 2), VersionSpan("new", count // 2, count)], 8)
    trajectory.segments[0].log = log
    (turn,) = trajectory.turns
    turn.sampling = Sampling(logprobs=1).over(Sampling.defaults())
    turn.log, turn.start, turn.end = log, 8, 8 + count
    log.append_top(8, TopLogprobs(1, array("i", range(1_008, 1_008 + count)), array("f", [-0.5] * count)))
    return trajectory


def test_long_episode_keeps_the_ids_at_its_ends() -> None:
    vocabulary = Vocabulary(None)
    (whole,) = token_payload(long_turn(1_000), vocabulary, most=1_008) or [{}]
    assert "gap" not in whole
    assert len(whole["ids"]) == 1_008
    (cut,) = token_payload(long_turn(1_000), vocabulary, most=400) or [{}]
    assert cut["ids"] == [*range(200), *range(808, 1_008)]
    assert cut["gap"] == [200, 608]
    assert cut["sources"] == [["prompt", 8], ["sampled", 392]]
    assert cut["logprobs"][0] == whole["logprobs"][0]
    assert cut["logprobs"][-200:] == whole["logprobs"][-200:]
    assert cut["top"]["808"][1] == list(range(1_808, 2_008))
    assert cut["versions"] == whole["versions"]


@browser_sample
@needs_browser
async def test_browser_shows_long_episodes_by_pages(tmp_path: Path) -> None:
    path = await store(tmp_path / "long.db", [long_turn(150_000)])
    with RunFile(path) as run_file:
        write_report(run_file, tmp_path / "page.html")
    last = "[...document.querySelectorAll('.tokens i')].at(-1)"
    async with browser(tmp_path / "profile") as tab:
        await tab.open(tmp_path / "page.html")
        await tab.until("document.documentElement.dataset.ready")
        await tab.click("#list details summary")
        await tab.until("document.querySelector('.show-tokens')")
        await tab.click(".show-tokens")
        await tab.until("document.querySelectorAll('.tokens i').length == 20000")
        assert "150008 ids" in await tab.value("document.querySelector('#list h5').textContent")
        for page in range(2, 6):
            await tab.value(
                "[...document.querySelectorAll('button')].find(e => e.textContent == 'Further ids').click()"
            )
            words = f"{20_000 * (page - 1) + 1} to {20_000 * page} of 100000 ids"
            await tab.until(f"document.querySelector('#list').textContent.includes('{words}')")
            if page == 3:
                assert "50008 ids are left out here." in await tab.value(
                    "document.querySelector('.tokens').textContent"
                )
        await tab.value(f"{last}.click()")
        about = await tab.value("document.querySelector('.about').innerText")
        for fact in ("index 150007 ", "id 150007 ", "log-probability -150.01", "weights new", 'instead: "151007" -0.5'):
            assert fact in about, about
        await tab.value("[...document.querySelectorAll('button')].find(e => e.textContent == 'Earlier ids').click()")
        await tab.value("document.querySelector('.tokens').focus()")
        await tab.press("ArrowLeft")
        assert "index 150006 " in await tab.value("document.querySelector('.about').innerText")
        assert tab.complaints == []
