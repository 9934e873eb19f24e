"""The page about traces of other libraries: its commands print the shown output, and its code runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from runner.cli.app import app
from tests.repository import ROOT

PAGE = (ROOT / "docs" / "verify-trace.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```json\n(.*?)```\n\n```console\n\$ deltarunner (\S+) (\S+) (.*?)\n(.*?)```", PAGE, re.DOTALL)


def test_page_has_an_example_of_each_format() -> None:
    assert [file for _, _, file, _, _ in EXAMPLES] == ["openenv.jsonl", "verifiers.jsonl", "rows.jsonl"]


@pytest.mark.parametrize(("text", "command", "file", "options", "shown"), EXAMPLES, ids=lambda value: str(value)[:15])
def test_command_of_the_page_prints_what_it_shows(
    text: str, command: str, file: str, options: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(text, encoding="utf-8")
    done = CliRunner().invoke(app, [command, file, *options.split()])
    assert done.exit_code == 7
    assert [line.rstrip() for line in done.output.splitlines()] == shown.splitlines()


def test_code_of_the_page_finds_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text, _, file, _, shown = EXAMPLES[0]
    Path(file).write_text(text, encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {})
    printed = capsys.readouterr().out
    assert shown.splitlines()[1].removeprefix("reencoded: ") in printed
    assert "1 13 reencoded" in printed
