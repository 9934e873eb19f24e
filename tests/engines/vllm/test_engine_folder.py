"""An engine's own folder: its place, its short path for sockets, and its removal with the engine."""

from __future__ import annotations

import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from runner.engines.vllm.start import SOCKETS, EngineFolder
from runner.engines.vllm.worker import parent_watch

WATCHDOG_SECONDS = 600.0


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="test-", dir="/tmp") as folder:
        monkeypatch.setenv(SOCKETS, folder)
        yield Path(folder)


@pytest.fixture
def engine_folder() -> Iterator[EngineFolder]:
    folder = EngineFolder()
    yield folder
    folder.remove()


def test_folder_is_inside_the_configured_socket_folder(around: Path, engine_folder: EngineFolder) -> None:
    assert engine_folder.path.parent == around
    assert stat.S_IMODE(engine_folder.path.stat().st_mode) == 0o700


@pytest.mark.parametrize("length", [10, 36, 37, 38, 60, 200])
def test_socket_path_fits_for_any_parent_folder(length: int, around: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = around / ("x" * max(1, length - len(str(around)) - 1))
    deep.mkdir()
    monkeypatch.setenv(SOCKETS, str(deep))
    folder = EngineFolder()
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(f"{folder.path}/{uuid4()}")
    finally:
        folder.remove()


def test_path_is_absolute_for_a_relative_socket_folder(around: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(around.parent)
    monkeypatch.setenv(SOCKETS, around.name)
    folder = EngineFolder()
    assert folder.path.is_absolute()
    assert folder.path.parent == around
    folder.remove()


def test_filled_engine_folder_is_removed_and_may_be_removed_again(around: Path, engine_folder: EngineFolder) -> None:
    (engine_folder.path / "socket").touch()
    engine_folder.remove()
    engine_folder.remove()
    assert list(around.iterdir()) == []


def test_failure_is_noted_unless_the_folder_is_gone(engine_folder: EngineFolder) -> None:
    parent_watch.note_failure(engine_folder.failures, "out of memory")
    assert parent_watch.read_failure(engine_folder.failures) == "out of memory"
    engine_folder.remove()
    parent_watch.note_failure(engine_folder.failures, "too late")
    assert not engine_folder.path.exists()
    assert parent_watch.read_failure(engine_folder.failures) is None


@pytest.mark.parametrize(("name", "rank"), [("EngineCore_DP12", 12), ("EngineCore", None), ("VllmWorker-0", None)])
def test_the_rank_of_a_core_is_in_its_name(name: str, rank: int | None) -> None:
    assert parent_watch.rank_named(name) == rank
