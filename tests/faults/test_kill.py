"""kill -9: announced episodes are in the file, and a resumed run plays exactly the others."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from runner import Run, RunFile
from tests import sweeps
from tests.faults.comparing import stored
from tests.faults.crowd import GROUP_SIZE, Crowd, engine
from tests.repository import ROOT

pytestmark = pytest.mark.slow

WATCHDOG_SECONDS = 600.0
ROUNDS = sweeps.times(6, 4)


def start(file: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.faults.crowd", str(file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)


def kill_after(process: subprocess.Popen[bytes], lines: int) -> list[bytes]:
    """Return the complete lines of announcements of a process that was killed at or after this number."""
    assert process.stdout is not None
    announced = [process.stdout.readline() for _ in range(lines)]
    os.kill(process.pid, signal.SIGKILL)
    with process.stdout:
        announced += process.stdout.readlines()
    process.wait()
    return [line for line in announced if line.endswith(b"\n")]


def finished(file: Path) -> set[str]:
    with RunFile(file) as run_file:
        return {row.id for row in run_file if not row.outcome.cut_short}


@pytest.mark.parametrize("seed", sweeps.part(range(2), 2))
def test_kill_9_loses_no_announced_episode_and_resume_completes(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    file = tmp_path / "run.db"
    announced: list[bytes] = []
    for _ in range(ROUNDS):
        announced += kill_after(start(file), dice.randrange(1, 24))
        ids = {line.split(b"\t")[0].decode() for line in announced}
        assert ids <= finished(file), "an announced episode is not in the file"
    before = finished(file)
    last = start(file)
    output, _ = last.communicate(timeout=WATCHDOG_SECONDS)
    assert last.returncode == 0
    rest = {line.split(b"\t")[0].decode() for line in output.splitlines()}
    everything = {f"{task.id}#{index}" for task in Crowd().tasks() for index in range(GROUP_SIZE)}
    assert before | rest == everything
    assert len(announced) == len(set(announced)), "an episode was announced twice"
    undisturbed = tmp_path / "undisturbed.db"
    anyio.run(play, undisturbed)
    assert stored(file) == stored(undisturbed), "an episode differs from the undisturbed one"
    with RunFile(file) as run_file:
        assert run_file.complete


async def play(file: Path) -> None:
    async with Run(Crowd(), engine(), group_size=GROUP_SIZE, file=file, seed=9) as run:
        async for _ in run:
            pass
