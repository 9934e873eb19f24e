"""The pages on sandboxes and Harbor tasks run unchanged, except for the image."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from runner import RunFile, Sandbox, ScriptedEngine
from runner.cli import run
from runner.cli.app import app
from runner.interop.harbor_tasks import find_task_folders, read_task
from runner.testing import call, play_many_async
from tests.repository import DOCS
from tests.sandbox.engines import IMAGE_FOLDER
from tests.sandbox.harbor_folders import IMAGE

pytestmark = [pytest.mark.slow]

SANDBOXES = (DOCS / "sandboxes.md").read_text(encoding="utf-8")
HARBOR = (DOCS / "harbor.md").read_text(encoding="utf-8")


def write_page_task(folder: Path) -> Path:
    """Write the task that the page shows."""
    for name, text in re.findall(r"^`([\w./]+)`[^\n]*:\n\n```\w*\n(.*?)```", HARBOR, flags=re.DOTALL | re.MULTILINE):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("debian:stable-slim", IMAGE))
    return folder


@pytest.mark.whole
@pytest.mark.usefixtures("default_engine")
def test_the_task_of_the_page_passes_its_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_page_task(tmp_path / "tasks" / "greeting").parent.parent)
    done = CliRunner().invoke(app, ["check", "harbor:tasks/"])
    assert done.exit_code == 0, done.output
    assert "greeting: solution 1, no action 0" in " ".join(done.output.split())


def test_the_task_of_the_page_can_be_read(tmp_path: Path) -> None:
    (folder,) = find_task_folders(write_page_task(tmp_path / "greeting")).values()
    task = read_task(folder)
    assert (task.prompt, task.agent_seconds, task.verifier_seconds) == ("Write hello into greeting.txt.", 300, 60)
    assert (task.options.memory_mb, task.options.network, task.has_solution) == (512, "none", True)


@pytest.mark.whole
@pytest.mark.usefixtures("default_engine")
def test_the_first_command_of_the_page_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = re.search(r"```\n(echo .*?)```", SANDBOXES, flags=re.DOTALL)
    assert lines is not None
    echo, _, command = lines[1].replace("\\\n", "").partition("\n")
    (tmp_path / "tasks.jsonl").write_text(echo.split("'")[1])
    script: Any = [[call("bash", command="ls /etc | wc -l >count.txt")], "done"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run.run_command, "__defaults__", (lambda settings: ScriptedEngine(script),))
    words = shlex.split(command.replace("debian:stable-slim", str(IMAGE_FOLDER)))
    done = CliRunner().invoke(app, [*words[1:], "--file", "x.db"])
    assert done.exit_code == 0, done.output
    with RunFile(Path("x.db")) as stored:
        assert [row.reward for row in stored] == [1]


@pytest.mark.anyio
@pytest.mark.whole
@pytest.mark.usefixtures("default_engine")
async def test_the_environment_of_the_page_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", SANDBOXES, flags=re.DOTALL)
    scope: dict[str, Any] = {"__name__": "page"}
    exec(compile(block.replace('"image/"', repr(str(IMAGE_FOLDER))), "sandboxes.md", "exec"), scope)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "test.sh").write_text("test -e fixed")
    monkeypatch.chdir(tmp_path)
    (trajectory,) = await play_many_async(scope["Repair"], ScriptedEngine([[call("bash", command=">fixed")], "done"]))
    assert trajectory.reward == 1, trajectory.error


def test_the_page_names_every_method_of_a_sandbox() -> None:
    methods = {name for name, each in vars(Sandbox).items() if callable(each) and not name.startswith("_")}
    assert {name for name in methods if f"`{name}(" not in SANDBOXES} == {"listen"}  # only the endpoint uses it
