"""Ctrl-C in a real terminal, on the real engine: it drains, then cancels, then exits; always 130."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from runner import Outcome, RunFile
from tests.terminal import CTRL_C, Terminal

START_SECONDS = 900.0
"""Limit for the start and the first finished episode: ten times their duration on the slowest machine."""
END_SECONDS = 300.0
"""Limit for each step of the end. No test waits for it."""

pytestmark = [pytest.mark.engine, pytest.mark.apart]

DELTARUNNER = str(Path(sys.executable).with_name("deltarunner"))


@pytest.fixture
def playing(tmp_path: Path, demo_model_folder: Path) -> Iterator[Terminal]:
    """A run of a hundred thousand episodes, some of which have finished."""
    options = [
        "--set",
        "questions=100000",
        "--engine-option",
        "max_num_seqs=8",
        "--engine-option",
        "max_model_len=2048",
    ]
    command = [DELTARUNNER, "run", "calculator", "--concurrency", "8", "--file", "run.db", *options]
    with Terminal(command, folder=tmp_path) as terminal:
        terminal.read_until("starting the engine", seconds=END_SECONDS)
        terminal.read_until("reward", seconds=START_SECONDS)
        yield terminal


def outcomes(folder: Path) -> dict[Outcome, int]:
    with RunFile(folder / "run.db") as run_file:
        assert not run_file.complete
        return run_file.outcomes()


@pytest.mark.sample_units("starts and ends", 11)
def test_the_first_ctrl_c_alone_lets_episodes_finish(playing: Terminal, tmp_path: Path) -> None:
    playing.press(CTRL_C)
    playing.read_until("press Ctrl-C again to stop them now", seconds=END_SECONDS)
    assert playing.wait(seconds=2 * END_SECONDS) == 130
    assert re.search(r"finishing \d+ episode", playing.text)
    counts = outcomes(tmp_path)
    assert counts[Outcome.COMPLETED] > 0
    assert Outcome.CANCELLED not in counts
    assert "the same command again" in playing.text
    assert engine_processes(tmp_path) == []


@pytest.mark.sample_units("starts and ends", 11)
def test_first_ctrl_c_drains_and_second_keeps_partial_episodes(playing: Terminal, tmp_path: Path) -> None:
    playing.press(CTRL_C)
    playing.read_until("press Ctrl-C again to stop them now", seconds=END_SECONDS)
    assert re.search(r"finishing \d+ episode", playing.text)
    playing.press(CTRL_C)
    playing.read_until("kept as partial", seconds=END_SECONDS)
    assert playing.wait(seconds=END_SECONDS) == 130
    counts = outcomes(tmp_path)
    assert counts[Outcome.COMPLETED] > 0
    assert counts[Outcome.CANCELLED] > 0
    assert "the same command again" in playing.text
    assert engine_processes(tmp_path) == []


@pytest.mark.sample_units("starts and ends", 11)
def test_the_third_ctrl_c_exits_at_once(playing: Terminal, tmp_path: Path) -> None:
    for said in ("press Ctrl-C again to stop them now", "kept as partial"):
        playing.press(CTRL_C)
        playing.read_until(said, seconds=END_SECONDS)
    playing.press(CTRL_C)
    assert playing.wait(seconds=END_SECONDS) == 130
    assert outcomes(tmp_path)[Outcome.COMPLETED] > 0
    # The processes detect the end of their parent, and end.
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in engine_processes(tmp_path)], timeout=END_SECONDS)
    assert alive == []


@pytest.mark.sample_units("starts and ends", 11)
def test_ctrl_c_during_engine_start_cancels_the_start(tmp_path: Path, demo_model_folder: Path) -> None:
    with Terminal([DELTARUNNER, "run", "calculator", "--file", "run.db"], folder=tmp_path) as terminal:
        terminal.read_until_like(r"starting the engine, ([3-9]|\d\d) s", seconds=END_SECONDS)
        terminal.press(CTRL_C)
        terminal.read_until("cancelling the start", seconds=END_SECONDS)
        assert terminal.wait(seconds=END_SECONDS) == 130
    assert not (tmp_path / "run.db").exists()
    assert engine_processes(tmp_path) == []


def engine_processes(folder: Path) -> list[int]:
    """Return the processes that run in the folder, which are the processes that the run started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found
