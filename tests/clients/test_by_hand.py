"""Programs started by hand with the commands of `deltarunner serve`, each in a home folder of its own."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from runner import Conversation, Run
from runner.cli.serve import key_lines
from tests.clients.installing import CLIENTS
from tests.clients.playing import PROMPT, ProgramEpisode, assert_good, environment_of, in_order, respelling
from tests.clients.programs import PROGRAMS

pytestmark = pytest.mark.anyio

FURTHER = {
    "claude": ["--dangerously-skip-permissions", "-p", PROMPT],
    "codex": ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
    "opencode": ["run", PROMPT],
    "qwen": ["-y", "-p", PROMPT],
    "pi": ["-p", PROMPT],
}
"""Arguments after the printed ones."""


def typed(lines: list[str], name: str) -> list[str]:
    """Return the exports and the command line of a program, or its name if it has no command line."""
    exported = next(line for line in lines if " export " in line).partition(" export ")[2]
    own = next((line.split(maxsplit=1)[1] for line in lines if line.split()[0] == name), name)
    words = shlex.split(own.replace("'PROMPT'", shlex.quote(PROMPT)))
    return [*shlex.split(exported), *(CLIENTS[name].program(name) if each == name else each for each in words)]


def by_hand(name: str, played: ProgramEpisode, home: Path) -> Any:
    base: Any = environment_of(PROGRAMS[name].argv, played, {}, {})

    class ByHand(base):  # type: ignore[misc]  # the type of the base is not known here
        async def rollout(self, conversation: Conversation) -> None:
            async with self.episode.serve() as endpoint:
                lines = key_lines("key-0#0", endpoint, await endpoint.home())
                argv = ["env", f"HOME={home}", *typed(lines, name), *FURTHER[name]]
                played.finished = await endpoint.run(argv, cwd=played.folder, check=False)
                played.threads = endpoint.threads

    return ByHand


@pytest.mark.parametrize("name", [pytest.param(each, marks=pytest.mark.client(each)) for each in FURTHER])
async def test_program_plays_with_the_printed_exports_and_command(
    name: str, tmp_path: Path, demo_model_folder: Path
) -> None:
    program = PROGRAMS[name]
    engine = respelling(in_order(*program.says()), demo_model_folder)
    played = ProgramEpisode(tmp_path / "work", tmp_path / "run.db")
    for folder in (played.folder, tmp_path / "home"):
        folder.mkdir()
    async with Run(by_hand(name, played, tmp_path / "home"), engine, file=played.file, breaker=1) as run:
        played.trajectories = [trajectory async for trajectory in run]
    await assert_good(played, engine, demo_model_folder)
    assert played.verdicts == [*program.verdicts]
