"""`Episode.attach`: attachments of an author are in the trajectory, the run file, pages and the terminal."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from runner import Environment, RunFile, Task, reward, tool
from runner.attachments import MAX_ATTACHED_BYTES, MAX_ATTACHMENT_BYTES, MAX_ATTACHMENTS, AttachmentKind
from runner.cli.app import app
from runner.report.page import write_report
from runner.testing import ScriptedEngine, call
from runner.trajectory import Outcome, Trajectory
from tests.playing import Plain, play_all
from tests.report.browser import browser, browser_sample, needs_browser

pytestmark = pytest.mark.anyio


def png(width: int = 3, height: int = 2) -> bytes:
    """A small red PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\x00\x00\x00"
    rows = zlib.compress((b"\x00" + b"\xff\x00\x00" * width) * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


class Board(Environment):
    """Environment that attaches each kind: one before the first turn, the others in the hooks after it."""

    log: Path | None = None

    def tasks(self) -> list[Task]:
        return [Task(id="board", prompt="Move.")]

    def setup(self) -> None:
        self.episode.attach("rules", text="<script>document.title='attacked'</script>")

    @tool
    def move(self) -> str:
        """Move."""
        self.episode.attach("state", json={"x": 1, "y": [2, None]})
        self.episode.attach("screen", image=png())
        self.episode.attach("broken", image=b"\x89PNG\r\n\x1a\n and nothing else")
        self.episode.attach("log", file=self.log)
        return "moved"

    @reward
    def won(self) -> bool:
        self.episode.attach("verdict", text="half \ud800")
        return True


class Attaches(Plain):
    """Environment that attaches the values that the test sets."""

    given: ClassVar[dict[str, Any]] = {}
    times = 1

    def setup(self) -> None:
        for _ in range(self.times):
            self.episode.attach("thing", **self.given)


async def play_board(folder: Path) -> Path:
    log = folder / "log.txt"
    log.write_bytes(b"line\n")
    environment = type("Logged", (Board,), {"log": log, "__module__": __name__})
    await play_all(environment, ScriptedEngine([[call("move")], "Done."]), file=folder / "board.db")
    return folder / "board.db"


async def play_attaching(times: int = 1, **given: Any) -> Trajectory:
    environment = type("Given", (Attaches,), {"given": given, "times": times, "__module__": __name__})
    (trajectory,) = await play_all(environment, ScriptedEngine(["Done."]), breaker=1)
    return trajectory


async def test_attachments_come_back_from_the_run_file(tmp_path: Path) -> None:
    path = await play_board(tmp_path)
    with RunFile(path) as run_file:
        (trajectory,) = run_file.trajectories()
    assert [(each.name, each.kind, each.media_type, each.turn) for each in trajectory.attachments] == [
        ("rules", AttachmentKind.TEXT, "text/plain", 0),
        ("state", AttachmentKind.JSON, "application/json", 1),
        ("screen", AttachmentKind.IMAGE, "image/png", 1),
        ("broken", AttachmentKind.IMAGE, "image/png", 1),
        ("log", AttachmentKind.FILE, "text/plain", 1),
        ("verdict", AttachmentKind.TEXT, "text/plain", 2),
    ]
    assert trajectory.attachments[2].data == png()
    assert trajectory.attachments[4].data == b"line\n"
    assert trajectory.attachments[5].text == "half \ud800"


async def test_show_has_attachments_after_their_turns(tmp_path: Path) -> None:
    path = await play_board(tmp_path)
    lines = CliRunner().invoke(app, ["show", str(path), "board#0"]).output.splitlines()
    shown = [line.split()[1] for line in lines if line.startswith("attached")]
    assert shown == ["rules:", "state:", "screen:", "broken:", "log:", "verdict:"]
    place = {
        word: next(n for n, line in enumerate(lines) if word in line)
        for word in ("rules:", "turn 1", "state:", "moved", "verdict:")
    }
    assert sorted(place, key=place.__getitem__) == ["rules:", "turn 1", "state:", "moved", "verdict:"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "give one of text=, json=, image= and file=, got 0"),
        ({"text": "a", "json": 1}, "got 2"),
        ({"text": b"a"}, "give text as a str, got bytes"),
        ({"json": {1, 2}}, "the value is not JSON"),
        ({"image": b"<svg onload=alert(1)>"}, "the data is not a PNG, JPEG, GIF or WebP image"),
        ({"image": 3}, "give bytes or a path, got int"),
        ({"file": "/nowhere/at/all"}, "): give a readable path, or the bytes"),
        ({"text": "a" * (MAX_ATTACHMENT_BYTES + 1)}, f"at most {MAX_ATTACHMENT_BYTES:,} are kept"),
        ({"text": "a", "times": MAX_ATTACHMENTS + 1}, "1,001 attachments"),
        (
            {"text": "a" * MAX_ATTACHMENT_BYTES, "times": MAX_ATTACHED_BYTES // MAX_ATTACHMENT_BYTES + 1},
            "5 attachments with 41,943,040 bytes",
        ),
    ],
)
async def test_wrong_attachment_is_an_error_that_names_it(given: dict[str, Any], words: str) -> None:
    trajectory = await play_attaching(**given)
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert words in trajectory.error
    assert "'thing'" in trajectory.error


async def test_failed_episode_keeps_what_was_attached() -> None:
    trajectory = await play_attaching(text="a", times=MAX_ATTACHMENTS + 1)
    assert len(trajectory.attachments) == MAX_ATTACHMENTS


async def test_page_has_attachments_in_place(tmp_path: Path) -> None:
    with RunFile(await play_board(tmp_path)) as run_file:
        write_report(run_file, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert f"data:image/png;base64,{base64.b64encode(png()).decode()}" in text
    assert text.index("<p>rules</p>") < text.index("turn 1</b>") < text.index("<p>screen</p>") < text.index("moved")
    assert "<script>document.title" not in text


@browser_sample
@needs_browser
async def test_browser_shows_attached_images_and_runs_nothing(tmp_path: Path) -> None:
    with RunFile(await play_board(tmp_path)) as run_file:
        write_report(run_file, tmp_path / "page.html")
    async with browser(tmp_path / "profile") as tab:
        await tab.open(tmp_path / "page.html")
        await tab.until("document.documentElement.dataset.ready")
        await tab.click("#list details summary")
        await tab.until("[...document.images].every(each => each.complete)")
        assert await tab.value("[...document.images].map(each => [each.alt, each.naturalWidth])") == [
            ["screen", 3],
            ["broken", 0],
        ]
        assert await tab.value("document.title") != "attacked"
        assert (tab.requests, tab.complaints) == ([], [])
