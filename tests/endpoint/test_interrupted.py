"""Ctrl-C on a process whose episodes run agent programs: no process is left, and the episodes are saved."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner import Outcome, RunFile
from runner.chat_requests import Delivery
from tests.endpoint.interrupted import PROGRAMS, STREAMS
from tests.endpoint.test_programs import alive
from tests.repository import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at /proc"),
    pytest.mark.sample_functions(2),
]

WATCHDOG_SECONDS = 60.0


def test_ctrl_c_with_200_streams_ends_programs_and_keeps_ids(tmp_path: Path) -> None:
    file, folder = tmp_path / "run.db", tmp_path / "pids"
    folder.mkdir()
    command = [sys.executable, "-m", "tests.endpoint.interrupted", str(file), str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as process:
        _until(lambda: len(list(folder.glob("*.pids"))) == PROGRAMS or process.poll() is not None)
        process.send_signal(signal.SIGINT)  # the first signal lets episodes finish, and these never do
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=WATCHDOG_SECONDS)
    assert process.returncode in (130, -signal.SIGINT), errors.decode()
    assert b"Error" not in errors.replace(b"KeyboardInterrupt", b""), errors.decode()
    assert b"never retrieved" not in errors
    pids = [int(pid) for each in folder.glob("*.pids") for pid in each.read_text().split()]
    assert len(pids) == 2 * PROGRAMS
    assert not [pid for pid in pids if alive(pid)], "the programs ended before the process"
    with RunFile(file) as stored:
        played = list(stored.trajectories())
    assert {each.outcome for each in played} == {Outcome.CANCELLED}
    turns = [turn for each in played for turn in each.turns]
    assert len(turns) == PROGRAMS * STREAMS
    assert all(turn.end > turn.start for turn in turns)
    assert {request.delivery for each in played for request in each.requests} == {Delivery.CUT}


def _until(true: object) -> None:
    assert callable(true)
    end = time.monotonic() + WATCHDOG_SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)
