"""`deltarunner label`: readers' labels and notes, in a file next to the run file and on the episode's page."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest
from typer.testing import CliRunner

from runner import RunFile
from runner.cli.app import app
from runner.report.labels import labels_path, read_labels
from runner.report.page import write_report
from tests.report.playing import store
from tests.report.viewing import Answer, viewing
from tests.store.building import played


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return anyio.run(store, tmp_path / "run.db", [played("a"), played("b")])


def label(path: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["label", str(path), *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_labels_are_kept_beside_the_file_and_listed(path: Path) -> None:
    before = path.read_bytes()
    label(path, "a-0-0", "--label", "wrong-tool", "--label", "long", "--note", "asks <b>twice</b>", "--reader", "Ann")
    label(path, "a-0-0", "--note", "fine", "--reader", "Bo")
    listed = label(path).splitlines()
    assert listed == ["a-0-0  wrong-tool, long: asks <b>twice</b> (Ann)", "a-0-0  fine (Bo)"]
    assert path.read_bytes() == before
    assert labels_path(path).name == "run.labels.jsonl"


def test_last_label_of_a_reader_holds_and_can_be_removed(path: Path) -> None:
    label(path, "a-0-0", "--label", "first", "--reader", "Ann")
    label(path, "a-0-0", "--label", "second", "--reader", "Ann")
    assert [each.labels for each in read_labels(path).of("a-0-0")] == [("second",)]
    label(path, "a-0-0", "--remove", "--reader", "Ann")
    assert read_labels(path).by_episode == {}


def test_labels_are_in_show_report_and_viewer(path: Path, tmp_path: Path) -> None:
    label(path, "a-0-0", "--label", "look", "--note", "<script>", "--reader", "Ann")
    assert "label: look: <script> (Ann)" in CliRunner().invoke(app, ["show", str(path), "a-0-0"]).output
    with RunFile(path) as run_file:
        write_report(run_file, tmp_path / "page.html")
    assert "look: &lt;script&gt; (Ann)" in (tmp_path / "page.html").read_text()
    with viewing(path) as viewer:
        assert "look: &lt;script&gt; (Ann)" in Answer(viewer, "run.db/episode?id=a-0-0").text


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nothing", "--label", "x"], 7, "'nothing' does not exist"),
        (["a-0-0"], 2, "give --label NAME"),
        (["a-0-0", "--label", "x", "--remove"], 2, "or --remove alone"),
        (["a-0-0", "--label", "  "], 2, "a name of one line"),
        (["--label", "x"], 2, "give an episode as well"),
    ],
)
def test_wrong_use_is_refused_in_words(path: Path, arguments: list[str], code: int, words: str) -> None:
    result = CliRunner().invoke(app, ["label", str(path), *arguments])
    assert (result.exit_code, words in result.output) == (code, True), result.output
    assert not labels_path(path).exists()


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b'{"episode": 1}',
        b"\xff\xfe",
        b"[" * 100_000,
        json.dumps({"episode": "a", "labels": [1], "note": "", "reader": "", "time": ""}).encode(),
    ],
)
def test_damaged_line_hurts_only_itself_and_is_named(path: Path, line: bytes, tmp_path: Path) -> None:
    labels_path(path).write_bytes(b"\n" + line)  # a line without its end, as if writing was cut off
    label(path, "a-0-0", "--label", "good", "--reader", "Ann")
    found = read_labels(path)
    assert [each.words for each in found.of("a-0-0")] == ["good (Ann)"]
    (problem,) = found.problems
    assert "line 2 is damaged and left out" in problem
    assert "line 2 is damaged" in label(path)
    shown = CliRunner().invoke(app, ["show", str(path), "a-0-0"]).output
    assert "good (Ann)" in shown
    assert "line 2 is damaged" in shown
    with RunFile(path) as run_file:
        write_report(run_file, tmp_path / "page.html")
    assert "line 2 is damaged" in (tmp_path / "page.html").read_text()
    with viewing(path) as viewer:
        for address in ("run.db/", "run.db/episode?id=a-0-0"):
            answer = Answer(viewer, address)
            assert (answer.status, "line 2 is damaged" in answer.text) == (200, True)


def test_viewer_finds_labels_notes_and_readers(path: Path) -> None:
    label(path, "b-0-0", "--label", "Wrong-Tool", "--note", "asks twice", "--reader", "Ann")
    with viewing(path) as viewer:
        for text, count in (("wrong-tool", 1), ("TWICE", 1), ("ann", 1), ("bob", 0), ("b-0", 1)):
            assert Answer(viewer, f"run.db/?find={text}").text.count('<details class="e"') == count
