"""The watch in an engine's processes: it ends them only after the end of their parent."""

import logging
import os
import subprocess
import sys
import tempfile
import threading
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from runner.engines.vllm.cleanup_process import process_name
from runner.engines.vllm.start import SOCKETS, contained_vllm
from runner.engines.vllm.worker import parent_watch

WATCHDOG_SECONDS = 600.0

CHILD = """
import sys, threading
from runner.engines.vllm.worker.parent_watch import watch_parent

watch_parent()
watch_parent()
assert len(threading.enumerate()) <= 2, "one watch is enough"
print("up", flush=True)
sys.stdin.read()
"""


def child_of(parent: str | None) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != parent_watch.PARENT}
    if parent is not None:
        environment[parent_watch.PARENT] = parent
    return subprocess.Popen(
        [sys.executable, "-c", CHILD], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_process_ends_after_its_parent_even_before_reaping() -> None:
    with subprocess.Popen(["sleep", "1000"]) as parent, child_of(process_name(parent.pid)) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        parent.kill()
        assert child.wait(WATCHDOG_SECONDS) == 1


def test_a_process_whose_parent_went_while_it_started_ends() -> None:
    with subprocess.Popen(["sleep", "1000"]) as parent:
        name = process_name(parent.pid)
        parent.kill()
    with child_of(name) as child:
        assert child.wait(WATCHDOG_SECONDS) == 1


def test_another_process_that_took_the_id_is_not_the_parent() -> None:
    with child_of(f"{os.getpid()}:1") as child:
        assert child.wait(WATCHDOG_SECONDS) == 1


@pytest.mark.parametrize("parent", [None, parent_watch.own_process_name()], ids=["not ours", "parent alive"])
def test_a_process_with_nothing_to_fear_ends_by_itself_only(parent: str | None) -> None:
    with child_of(parent) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        child.communicate("", WATCHDOG_SECONDS)
        assert child.returncode == 0


@pytest.mark.parametrize("parent", [None, parent_watch.own_process_name()], ids=["not ours", "the parent itself"])
def test_no_thread_starts_where_there_is_nothing_to_watch(parent: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(parent_watch.PARENT, raising=False)
    if parent is not None:
        monkeypatch.setenv(parent_watch.PARENT, parent)
    before = threading.enumerate()
    parent_watch.watch_parent()
    assert threading.enumerate() == before


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of vLLM that names the file by which workers connect; unpatched again after the test."""
    pytest.importorskip("vllm")
    with contained_vllm():
        from vllm.utils import network_utils

    monkeypatch.setattr(network_utils, "tempfile", network_utils.tempfile)
    return network_utils


@pytest.mark.engine
def test_unpatched_file_store_is_in_the_folder_for_all_programs(
    network: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SOCKETS, str(tmp_path))
    place = network.get_file_store_init_method()
    assert place.startswith(f"file://{tempfile.gettempdir()}/vllm"), "vLLM has fixed it: remove the patch"


@pytest.mark.engine
def test_patched_file_store_is_in_the_folder_of_the_engine(network: Any, tmp_path: Path) -> None:
    parent_watch.patch_file_store(str(tmp_path))
    assert network.get_file_store_init_method().startswith(f"file://{tmp_path}/vllm")
    assert tempfile.gettempdir() != str(tmp_path), "only vLLM's own file is moved"


def test_the_first_failure_of_a_process_is_noted_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "failures"
    logger = logging.Logger("vllm of this test")
    logger.addHandler(parent_watch._FailureLogHandler(str(path)))
    for cause, words in [("out of\nmemory", "WorkerProc failed to start."), ("later", "EngineCore failed to start.")]:
        try:
            raise ValueError(cause)
        except ValueError:
            logger.exception(words)
    logger.error("EngineCore, without an exception")
    assert parent_watch.read_failure(path) == "ValueError: out of memory"
    assert len(path.read_text().splitlines()) == 2


def test_no_failure_is_noted_where_none_was(tmp_path: Path) -> None:
    assert parent_watch.read_failure(tmp_path / "none") is None
    (tmp_path / "empty").touch()
    assert parent_watch.read_failure(tmp_path / "empty") is None


def test_importing_the_watch_is_light() -> None:
    heavy = "{'vllm', 'torch', 'anyio', 'jinja2'}"
    code = f"import sys, runner.engines.vllm.worker.parent_watch; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("group", ["vllm.general_plugins", "vllm.platform_plugins"])
def test_entry_point_of_the_watch_is_installed(group: str) -> None:
    (entry_point,) = entry_points(group=group, name=parent_watch.ENTRY_POINT)
    assert entry_point.load() is parent_watch.watch_parent
