"""Noise is written to the log, and intended output to the terminal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.cli.quiet_output import quiet_output
from runner.errors import StorageFailed


def test_library_output_goes_to_log_and_ours_to_terminal(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "logs" / "engine.log"
    with quiet_output(log) as terminal:
        os.write(1, b"from C++\n")
        subprocess.run([sys.executable, "-c", "import sys; print('child', file=sys.stderr)"], check=True)
        print("seen", file=terminal.stdout)
        print("warned", file=terminal.stderr)
    os.write(1, b"after\n")
    assert log.read_text() == "from C++\nchild\n"
    assert tuple(capfd.readouterr()) == ("seen\nafter\n", "warned\n")


def test_output_is_put_back_after_an_exception(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(KeyError), quiet_output(tmp_path / "log"):
        raise KeyError
    os.write(2, b"shown\n")
    assert capfd.readouterr().err == "shown\n"


def test_a_log_is_appended_to(tmp_path: Path) -> None:
    for line in (b"one\n", b"two\n"):
        with quiet_output(tmp_path / "log"):
            os.write(1, line)
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with quiet_output(tmp_path / "log"):
        pass
    assert os.listdir("/proc/self/fd") == before


def test_a_log_that_cannot_be_written_is_named() -> None:
    with pytest.raises(StorageFailed, match="/proc/nowhere/log"), quiet_output(Path("/proc/nowhere/log")):
        pytest.fail("it was opened")
