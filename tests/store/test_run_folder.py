"""The choice of a run file: a new file, or a file to resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from runner.store.run_folder import next_run_file
from runner.store.writer import RunWriter
from tests.store.building import header, played


def write(path: Path, *, complete: bool, **fields: Any) -> None:
    async def run() -> None:
        async with RunWriter(path, header(**fields)) as writer:
            await writer.commit_episode([played()])
            if complete:
                await writer.finish({})

    anyio.run(run)


def test_the_first_file_is_number_one(tmp_path: Path) -> None:
    assert next_run_file(tmp_path / "runs", "calculator", header()) == tmp_path / "runs" / "calculator-001.db"


def test_a_complete_run_is_followed_by_the_next_number(tmp_path: Path) -> None:
    write(tmp_path / "sums-001.db", complete=True)
    write(tmp_path / "sums-009.db", complete=True)
    assert next_run_file(tmp_path, "sums", header()) == tmp_path / "sums-010.db"


def test_newest_incomplete_run_of_the_configuration_is_resumed(tmp_path: Path) -> None:
    write(tmp_path / "sums-001.db", complete=False)
    write(tmp_path / "sums-002.db", complete=False)
    write(tmp_path / "sums-003.db", complete=False, seed=5)
    write(tmp_path / "sums-004.db", complete=True)
    write(tmp_path / "other-005.db", complete=False)
    assert next_run_file(tmp_path, "sums", header()) == tmp_path / "sums-002.db"
    assert next_run_file(tmp_path, "sums", header(seed=5)) == tmp_path / "sums-003.db"
    assert next_run_file(tmp_path, "sums", header(seed=6)) == tmp_path / "sums-005.db"


def test_newest_run_is_chosen_with_also_complete(
    tmp_path: Path,
) -> None:
    write(tmp_path / "sums-001.db", complete=False)
    write(tmp_path / "sums-002.db", complete=True)
    write(tmp_path / "sums-003.db", complete=True, seed=5)
    assert next_run_file(tmp_path, "sums", header(), also_complete=True) == tmp_path / "sums-002.db"
    assert next_run_file(tmp_path, "sums", header(seed=6), also_complete=True) == tmp_path / "sums-004.db"


def test_numbers_past_999_are_counted_as_numbers(tmp_path: Path) -> None:
    write(tmp_path / "sums-999.db", complete=True)
    write(tmp_path / "sums-1000.db", complete=True)
    assert next_run_file(tmp_path, "sums", header()) == tmp_path / "sums-1001.db"


@pytest.mark.anyio
async def test_a_file_that_is_being_written_is_passed_over(tmp_path: Path) -> None:
    async with RunWriter(tmp_path / "sums-001.db", header()):
        assert next_run_file(tmp_path, "sums", header()) == tmp_path / "sums-002.db"
    assert next_run_file(tmp_path, "sums", header()) == tmp_path / "sums-001.db"


def test_a_file_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "sums-001.db").write_text("no database, but long enough to be looked at" * 50)
    assert next_run_file(tmp_path, "sums", header()) == tmp_path / "sums-002.db"


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("calculator", "calculator"),
        ("my.games:Chess", "Chess"),
        ("/home/me/games.py:Chess", "Chess"),
        ("../../etc/passwd", "etc-passwd"),
        ("a b", "a-b"),
        ("...", "run"),
    ],
)
def test_names_of_environments_become_names_of_files(tmp_path: Path, name: str, stem: str) -> None:
    assert next_run_file(tmp_path, name, header()) == tmp_path / f"{stem}-001.db"
