"""Transcripts and tables accept any text of tools, tasks and models, and show all of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from runner import ScriptedEngine
from runner.cli.app import app
from runner.cli.run import run_command
from runner.cli.settings import RunSettings
from runner.engines.scripted.script import call
from runner.transcript import printable, printable_line

pytestmark = pytest.mark.slow

AUTHOR = r'''
from runner import Environment, Task, reward, tool

class Writing(Environment):
    def __init__(self, text: str = "", id: str = "t"):
        self.text = text
        self.id = id
    def tasks(self):
        return [Task(id=self.id, prompt="Look.")]
    @tool
    def look(self) -> str:
        """Look."""
        return eval(self.text)
    @reward
    def spoke(self):
        return True
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "mine.py").write_text(AUTHOR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("mine", None)


def show(*options: str) -> str:
    result = CliRunner().invoke(app, ["show", "w.db", *options])
    assert result.exit_code == 0, result.output
    return result.output


def play(text: str, id: str = "t") -> None:
    settings = RunSettings(environment="mine.py:Writing", settings=[f"text={text}", f"id={id}"], file=Path("w.db"))
    assert run_command(settings, lambda _: ScriptedEngine([call("look"), "Seen."])) == 0


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (r"half \ud800 a pair", r"half \ud800 a pair"),
        (r"\ud800", r"\ud800"),
        (r"  white space around half \udc80 a pair ", r"white space around half \udc80 a pair"),
        (r"to the \u202eleft", r"to the \u202eleft"),
        (r"a\u2028b\u2029c", r"a\u2028b\u2029c"),
        (r"a\u2066b\u061cc\u200fd", r"a\u2066b\u061cc\u200fd"),
        (r"\x1b[2J\x07\x9b", r"\x1b[2J\x07\x9b"),
        ("plain ångström, 👩‍👧 and 日本", "plain ångström, 👩‍👧 and 日本"),
    ],
)
def test_tool_result_is_shown_with_control_characters_as_codes(folder: Path, said: str, shown: str) -> None:
    play(f"'{said}'")
    for options in (("t",), ("t", "--brief")):
        (line,) = [line for line in show(*options).split("\n") if line.startswith("tool ")]
        assert line.removeprefix("tool").strip() == shown


def test_task_id_with_a_line_break_keeps_its_row_whole(folder: Path) -> None:
    play("'seen'", id="one\ntwo\tthree\u2028four")
    for output in (show(), show("one\ntwo\tthree\u2028four")):
        (line,) = [line for line in output.split("\n") if "completed " in line and "two" in line]
        assert line.startswith(r"one\ntwo\tthree\u2028four#0")


def test_printable_text_is_unchanged() -> None:
    for text in ("", "a b", "é\n\tü", "👩‍👧"):
        assert printable(text) == text
    assert printable_line("a\nb") == r"a\nb"
