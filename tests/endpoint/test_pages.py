"""The agent programs of the README and of the page about agent programs are played unchanged."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from runner import Outcome
from tests.endpoint.test_programs import ASKS
from tests.playing import play_all
from tests.repository import ROOT

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]

PAGES = {"README.md": "claude", "docs/agents.md": "mini"}
"""Each page, and the program of its first example."""

EPISODE_COUNT = 3


def example(page: str, name: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    return next(block for block in map(str, blocks) if f"class {name}(" in block)


def command(path: Path, code: str) -> None:
    script = path.with_suffix(".py")
    script.write_text(code)
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(script))} "$@"\n')
    path.chmod(0o755)


@pytest.mark.parametrize("page", PAGES)
async def test_agent_program_works_in_its_own_folder(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "bin"
    there.mkdir()
    script = "word = next(each for each in sys.argv if each.startswith('Say '))\nopen('said', 'a').write(ask(word))"
    command(there / PAGES[page], ASKS + script)
    command(there / "pytest", "assert open('said').read() == open('given').read() == 'Yes.'")
    monkeypatch.setenv("PATH", f"{there}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "template").mkdir()
    (tmp_path / "template" / "given").write_text("Yes.")
    lines = ({"id": f"t{number}", "prompt": f"Say {number}"} for number in range(EPISODE_COUNT))
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    names: dict[str, Any] = {"__name__": "repair"}
    exec(compile(example(page, "Repair"), page, "exec"), names)
    # The checks begin after all programs have ended, so they see a file that a program wrote into another one's folder.
    together = threading.Barrier(EPISODE_COUNT, timeout=60)
    made = names["Repair"].rollout

    async def rollout(self: Any, conversation: Any) -> None:
        await made(self, conversation)
        await anyio.to_thread.run_sync(together.wait)

    monkeypatch.setattr(names["Repair"], "rollout", rollout)
    trajectories = await play_all(names["Repair"], lambda asked: "Yes.", tasks="tasks.jsonl")
    assert [(each.outcome, each.reward) for each in trajectories] == [(Outcome.COMPLETED, 1.0)] * EPISODE_COUNT


def test_the_readme_shows_an_agent_program_in_fifteen_lines() -> None:
    assert len([line for line in example("README.md", "Repair").splitlines() if line]) <= 15
