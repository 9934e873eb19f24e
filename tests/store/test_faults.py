"""Faults of disks and processes, and the files after them."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from runner.errors import RunFileError, StorageFailed
from runner.store.reader import RunFile
from runner.store.writer import RunWriter
from runner.trajectory import Outcome
from tests import sweeps
from tests.repository import ROOT
from tests.store.building import assert_equal, header, played

pytestmark = [pytest.mark.slow, pytest.mark.sample_functions(2)]

ANNOUNCER = Path(__file__).with_name("announcer.py")


def announcer(path: Path, episodes: int, at_once: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ANNOUNCER), str(path), str(episodes), str(at_once)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def kill_after(process: subprocess.Popen[bytes], lines: int) -> list[int]:
    """Return the announced indices of a process that was killed after at least `lines` of them."""
    assert process.stdout is not None
    announced = [process.stdout.readline() for _ in range(lines)]
    os.kill(process.pid, signal.SIGKILL)
    with process.stdout:
        announced += process.stdout.readlines()
    process.wait()
    # A line that the kill cut does not count as an announcement.
    return [int(line) for line in announced if line.endswith(b"\n")]


@pytest.mark.parametrize("at_once", [pytest.param(1, marks=pytest.mark.whole), 32])
def test_kill_9_loses_no_announced_episode(tmp_path: Path, at_once: int) -> None:
    path, episodes = tmp_path / "run.db", sweeps.times(3000, 1000)
    dice = random.Random(at_once)
    announced: list[int] = []
    for _ in range(5):
        announced += kill_after(announcer(path, episodes, at_once), dice.randrange(1, 150))
        check_file(path, announced)
    process = announcer(path, episodes, at_once)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    announced += [int(line) for line in output.splitlines()]
    check_file(path, announced)
    with RunFile(path) as run_file:
        assert run_file.complete
        # Each occurs once, including those that were committed but not yet announced.
        assert sorted(row.index for row in run_file) == list(range(episodes))
    assert len(announced) == len(set(announced))


def check_file(path: Path, announced: list[int]) -> None:
    with RunFile(path) as run_file:
        stored = {row.index: row for row in run_file}
        assert set(announced) <= stored.keys()
        for index in random.Random(0).sample(sorted(stored), min(20, len(stored))):
            assert_equal(run_file.trajectory(stored[index]), played(index=index, turns=4))
            assert run_file.trajectory(stored[index], agent="user").agent == "user"
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        (halves,) = connection.execute(
            "SELECT count(*) FROM (SELECT id FROM episodes GROUP BY id HAVING count(*) != 2)"
        ).fetchone()
        assert halves == 0, "an episode is in the file with all its agents or not at all"


# --- disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of 2 MB, which only root can mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("mounting a small disk takes root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def remount(folder: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", str(folder)], check=True)


async def fill(path: Path) -> tuple[list[int], StorageFailed]:
    """Commit until the disk is full. Return the announced indices, and the error's text."""
    announced: list[int] = []
    async with RunWriter(path, header()) as writer:
        claimed = writer.claim(played().task, 0)
        try:
            for index in range(5000):
                if index not in claimed.finished:
                    await writer.commit_episode([played(index=index, turns=20)])
                    announced.append(index)
        except StorageFailed as error:
            return announced, error
    raise AssertionError("the disk never got full")


@pytest.mark.anyio
async def test_full_disk_loses_nothing_and_the_command_resumes(small_disk: Path) -> None:
    path, ballast = small_disk / "run.db", small_disk / "ballast"
    ballast.write_bytes(bytes(1_000_000))
    announced, error = await fill(path)
    assert "the disk is full" in str(error)
    assert str(path) in str(error)
    assert "Free some space and run the same command again" in str(error)
    assert announced
    with RunFile(path) as run_file:
        assert [row.index for row in run_file] == announced
    ballast.unlink()
    more, _ = await fill(path)
    assert more
    with RunFile(path) as run_file:
        assert [row.index for row in run_file] == announced + more
        assert_equal(run_file.trajectory(f"sum-0-{more[-1]}"), played(index=more[-1], turns=20))


@pytest.mark.anyio
async def test_writer_continues_once_a_full_disk_has_space(small_disk: Path) -> None:
    path, ballast = small_disk / "run.db", small_disk / "ballast"
    announced: list[int] = []
    async with RunWriter(path, header()) as writer:
        await writer.commit_episode([played(index=0)])
        ballast.write_bytes(bytes(free(small_disk)))
        with pytest.raises(StorageFailed, match="the disk is full"):  # noqa: PT012
            for index in range(1, 2000):
                await writer.commit_episode([played(index=index)])
                announced.append(index)
        ballast.unlink()
        await writer.commit_episode([played(index=5000)])
    with RunFile(path) as run_file:
        assert [row.index for row in run_file] == [0, *announced, 5000]


def free(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


QUOTA = """
import resource, signal, sys
from pathlib import Path
import anyio
from runner.errors import StorageFailed
from runner.store.writer import RunWriter
from tests.store.building import header, played

async def main():
    async with RunWriter(Path(sys.argv[1]), header()) as writer:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
        try:
            for index in range(5000):
                await writer.commit_episode([played(index=index, turns=20)])
                print(index, flush=True)
        except StorageFailed as error:
            print(error, file=sys.stderr)

anyio.run(main)
"""


def test_a_quota_that_is_used_up_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    command = [sys.executable, "-c", QUOTA, str(path)]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, text=True, timeout=120, check=True)
    announced = [int(line) for line in done.stdout.splitlines()]
    assert announced
    assert f"run file {path}: " in done.stderr
    assert "episodes reported as finished are in the file" in done.stderr
    with RunFile(path) as run_file:
        assert [row.index for row in run_file] == announced


async def opened(path: Path) -> None:
    async with RunWriter(path, header()):
        pass


@pytest.mark.anyio
async def test_a_read_only_disk_is_named(small_disk: Path) -> None:
    remount(small_disk, "ro")
    with pytest.raises(StorageFailed, match=r"run\.db.*writable, or give another path"):
        await opened(small_disk / "run.db")
    with pytest.raises(StorageFailed, match=r"folder cannot be created.*Read-only"):
        await opened(small_disk / "runs" / "run.db")


@pytest.mark.anyio
async def test_a_run_file_can_be_read_from_a_read_only_disk(small_disk: Path) -> None:
    path = small_disk / "run.db"
    async with RunWriter(path, header()) as writer:
        await writer.commit_episode([played()])
    remount(small_disk, "ro")
    with RunFile(path) as run_file:
        assert [row.outcome for row in run_file] == [Outcome.COMPLETED]
    with pytest.raises(StorageFailed, match=r"read-only|cannot be opened"):
        await opened(path)


@pytest.mark.anyio
async def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFailed, match=r"its folder cannot be created.*Give a path in a folder"):
        await opened(tmp_path / "file" / "run.db")
    with pytest.raises(StorageFailed, match="its folder cannot be created"):
        await opened(Path("/proc/nothing/run.db"))


@pytest.mark.anyio
async def test_a_missing_folder_is_made(tmp_path: Path) -> None:
    await opened(tmp_path / "a" / "b" / "run.db")
    assert (tmp_path / "a" / "b" / "run.db").is_file()


@pytest.mark.anyio
async def test_other_files_are_refused_by_name_and_unchanged(tmp_path: Path) -> None:
    text = tmp_path / "notes.db"
    text.write_text("These are notes, and they are long enough to be taken for a file. " * 20)
    foreign = tmp_path / "foreign.db"
    with closing(sqlite3.connect(foreign)) as connection:
        connection.execute("CREATE TABLE things (name)")
    for path, said in [
        (text, "not a SQLite database"),
        (foreign, "not a run file of deltarunner"),
        (tmp_path, "it is a folder"),
    ]:
        before = path.read_bytes() if path.is_file() else b""
        with pytest.raises(RunFileError, match=said):
            await opened(path)
        assert not path.is_file() or path.read_bytes() == before
    for path in (text, foreign):
        with pytest.raises(RunFileError) as caught:
            RunFile(path)
        assert not isinstance(caught.value, StorageFailed)  # the disk has no fault


@pytest.mark.anyio
async def test_a_lock_does_not_outlive_its_process(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    process = announcer(path, 100_000, 4)
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(StorageFailed, match=rf"is being written by process {process.pid} on"):
        await opened(path)
    kill_after(process, 1)
    with pytest.raises(Exception, match="group_size"):  # the lock is free, so the header is now checked
        await opened(path)


@pytest.mark.anyio
async def test_a_file_whose_run_ended_before_it_began_is_begun(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    path.touch()
    with pytest.raises(RunFileError, match="it is empty"):
        RunFile(path)
    await opened(path)
    with RunFile(path) as run_file:
        assert len(run_file) == 0


def test_copy_without_the_log_of_writes_names_the_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    process = announcer(path, 50, 8)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    copied = Path(shutil.copy(path, tmp_path / "copy.db"))
    process.kill()
    process.communicate()
    with pytest.raises(RunFileError, match=r"copy copy\.db-wal too"):
        RunFile(copied)


def test_a_copy_of_a_finished_file_is_the_whole_run(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    process = announcer(path, 50, 8)
    process.communicate(timeout=60)
    copied = Path(shutil.copy(path, tmp_path / "copy.db"))
    with RunFile(copied) as run_file:
        assert len(run_file) == 50
        assert run_file.complete
