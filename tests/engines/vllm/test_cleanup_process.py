"""The cleanup process of an engine: nothing stays in the system if all of the engine's processes are killed."""

from __future__ import annotations

import fcntl
import logging
import mmap
import multiprocessing
import os
import resource
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from runner.engines.vllm import cleanup_process
from runner.engines.vllm.start import VllmProcess
from runner.models import ResolvedModel

WATCHDOG_SECONDS = 600.0

OWNER = """
import os, subprocess, sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from runner.engines.vllm.cleanup_process import FOLDER, CleanupProcess

HOLDER = '''
import sys
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=64)
print(memory.name, flush=True)
sys.stdin.read()
'''

def started(environment):
    command = [sys.executable, "-c", HOLDER]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()

folder = sys.argv[1]
cleanup = CleanupProcess(Path(folder))
engines, name = started({**os.environ, FOLDER: folder})
other, others_name = started(dict(os.environ))
if sys.argv[2] == "it runs":
    cleanup.engine_started()
print(name, others_name, flush=True)
for line in sys.stdin:
    if line == "dismiss\\n":
        cleanup.dismiss()
        cleanup.dismiss()
        print("dismissed", flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "engine"
    path.mkdir()
    (path / "socket").touch()
    return path


@contextmanager
def owner_of(folder: Path, state: str = "it runs") -> Iterator[tuple[subprocess.Popen[str], list[Path]]]:
    """Yield a process with an engine process and one further process, and the shared memory of these two."""
    command = [sys.executable, "-c", OWNER, str(folder), state]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        memory = [Path("/dev/shm", name) for name in owner.stdout.readline().split()]
        family = [psutil.Process(owner.pid), *psutil.Process(owner.pid).children(recursive=True)]
        try:
            assert len(memory) == 2
            assert all(path.exists() for path in memory)
            yield owner, memory
        finally:
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            for path in memory:
                path.unlink(missing_ok=True)


def cleanup_processes(folder: Path) -> list[psutil.Process]:
    return [each for each in psutil.process_iter() if _is_cleanup_process(each, folder)]


def _is_cleanup_process(process: psutil.Process, folder: Path) -> bool:
    try:
        return {cleanup_process.__file__, str(folder)} <= set(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def kill_all(owner: int) -> list[psutil.Process]:
    """Kill a process and all of its descendants, after stopping all of them so that none can clean up."""
    processes = [*psutil.Process(owner).children(recursive=True), psutil.Process(owner)]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    for process in processes:
        process.kill()
    return processes


@pytest.mark.parametrize("state", [pytest.param("it starts", marks=pytest.mark.whole), "it runs"])
def test_killed_engine_leaves_nothing_and_others_are_untouched(folder: Path, state: str) -> None:
    with owner_of(folder, state) as (owner, (memory, of_another)):
        (cleanup,) = cleanup_processes(folder)
        if state == "it starts":
            time.sleep(2 * cleanup_process._SECONDS)  # it checks once a second
        family = kill_all(owner.pid)
        assert len(family) > 3, "the owner, its engine, the other process, and Python's trackers"
        assert cleanup not in family
        assert os.getsid(cleanup.pid) != os.getsid(0), "the cleanup process has its own session"
        owner.wait(WATCHDOG_SECONDS)
        assert memory.exists(), "only the cleanup process removes it"
        cleanup.wait(WATCHDOG_SECONDS)
        assert not memory.exists()
        assert not folder.exists()
        assert of_another.exists()


def test_cleanup_process_keeps_memory_while_an_engine_process_lives(folder: Path) -> None:
    with owner_of(folder) as (owner, (memory, _)):
        (cleanup,) = cleanup_processes(folder)
        children = psutil.Process(owner.pid).children(recursive=True)
        (engine, *its_own) = (child for child in children if child.environ().get(cleanup_process.FOLDER) == str(folder))
        for process in (engine, *its_own):
            process.suspend()  # else it would end with its owner
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(WATCHDOG_SECONDS)
        with pytest.raises(psutil.TimeoutExpired):
            cleanup.wait(4 * cleanup_process._SECONDS)
        assert memory.exists()
        assert folder.exists()
        for process in (engine, *its_own):
            process.kill()
        cleanup.wait(WATCHDOG_SECONDS)
        assert not memory.exists()
        assert not folder.exists()


@pytest.mark.whole
def test_shared_memory_in_use_by_another_process_is_kept(folder: Path) -> None:
    with owner_of(folder) as (owner, (memory, _)):
        (cleanup,) = cleanup_processes(folder)
        with memory.open("r+b") as opened, mmap.mmap(opened.fileno(), 0):
            kill_all(owner.pid)
            cleanup.wait(WATCHDOG_SECONDS)
        assert memory.exists()
        assert not folder.exists()


@pytest.mark.whole
@pytest.mark.skipif(os.fsencode("\udcff") != b"\xff", reason="file names of this system are not bytes")
def test_names_of_any_bytes_do_not_end_a_cleanup_process(tmp_path: Path) -> None:
    folder = tmp_path / "of an engine \udcff"
    folder.mkdir()
    with owner_of(folder) as (owner, (memory, _)):
        (cleanup,) = cleanup_processes(folder)
        kill_all(owner.pid)
        cleanup.wait(WATCHDOG_SECONDS)
        assert not memory.exists()
        assert not folder.exists()


def test_start_waits_for_a_scan_of_the_cleanup_process(folder: Path) -> None:
    cleanup = cleanup_process.CleanupProcess(folder)
    (process,) = cleanup_processes(folder)
    process.suspend()
    started = threading.Thread(target=cleanup.engine_started)
    started.start()
    try:
        started.join(0.5)
        assert started.is_alive()
    finally:
        process.resume()
    started.join(WATCHDOG_SECONDS)
    assert select.select([cleanup._answers], [], [], 0)[0], "the answer, not the time limit, ended the wait"
    cleanup.dismiss()
    process.wait(WATCHDOG_SECONDS)
    cleanup.engine_started()  # returns at once


def test_start_waits_also_in_a_process_with_many_open_files(folder: Path) -> None:
    cleanup = cleanup_process.CleanupProcess(folder)
    low = cleanup._answers
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    try:
        cleanup._answers = os.fdopen(fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1024), "rb", buffering=0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    low.close()
    cleanup.engine_started()
    os.set_blocking(cleanup._answers.fileno(), False)
    assert cleanup._answers.read(1) == cleanup_process._SCANNED
    cleanup.dismiss()


def test_killed_cleanup_process_does_not_delay_the_start(folder: Path) -> None:
    cleanup = cleanup_process.CleanupProcess(folder)
    (process,) = cleanup_processes(folder)
    process.kill()
    process.wait(WATCHDOG_SECONDS)
    cleanup.engine_started()
    assert cleanup._answers.read(1) == b""
    cleanup.dismiss()


# --- an engine that is started and stopped


def hold(name: Connection) -> None:
    """A core of an engine, which has shared memory."""
    memory = SharedMemory(create=True, size=64)
    name.send(memory.name)
    name.recv()


def started(monkeypatch: pytest.MonkeyPatch) -> tuple[VllmProcess, Path]:
    """Yield an engine with a stand-in for vLLM's core, and the shared memory of that core."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    names: list[str] = []

    def construct(_: VllmProcess) -> Any:
        core = multiprocessing.get_context("spawn").Process(target=hold, args=(theirs,), name="EngineCore")
        core.start()
        names.append(ours.recv())
        return SimpleNamespace(shutdown=lambda: None, ours=ours)

    monkeypatch.setattr(VllmProcess, "_construct", construct)
    process = VllmProcess(ResolvedModel("none", "none", Path("none")), {})
    process._start()
    return process, Path("/dev/shm", names[0])


@pytest.mark.parametrize("dead", [True, False])
def test_stop_frees_shared_memory_of_a_dead_core(monkeypatch: pytest.MonkeyPatch, *, dead: bool) -> None:
    process, memory = started(monkeypatch)
    assert process.folder is not None
    (cleanup,) = cleanup_processes(process.folder.path)
    if dead:
        process.kill()
        process.cores[0].join(WATCHDOG_SECONDS)
    assert memory.exists()
    process._stop()
    assert not memory.exists()
    assert not process.folder.path.exists()
    cleanup.wait(WATCHDOG_SECONDS)


class LateShutdown:
    """vLLM's engine, whose core ends by itself just before vLLM kills it."""

    def __init__(self, error: Exception) -> None:
        self._error: Exception | None = error
        self.calls: list[str] = []
        self.engine_core = SimpleNamespace(resources=lambda: self.calls.append("sockets closed"))

    def shutdown(self) -> None:
        error, self._error = self._error, None
        self.calls.append("shutdown" if error is None else "interrupted")
        if error is not None:
            raise error


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by torch in its own code
def test_core_may_end_just_before_vllm_kills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.core_client import BackgroundResources

    assert "__call__" in vars(BackgroundResources), "vLLM closes its sockets in another way"
    process, memory = started(monkeypatch)
    process.llm = llm = LateShutdown(psutil.NoSuchProcess(1))
    process._stop()
    assert llm.calls == ["interrupted", "sockets closed", "shutdown"]
    assert not memory.exists()
    assert not any(core.is_alive() for core in process.cores)


def test_shutdown_of_vllm_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    process, memory = started(monkeypatch)
    assert process.folder is not None
    process.llm = LateShutdown(RuntimeError("a worker did not answer"))
    with pytest.raises(RuntimeError, match="a worker did not answer"):
        process._stop()
    assert not memory.exists()
    assert not process.folder.path.exists()
    assert not any(core.is_alive() for core in process.cores)


def test_engine_starts_without_a_cleanup_process_and_logs_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(_: Path) -> Any:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("runner.engines.vllm.start.CleanupProcess", none)
    process, memory = started(monkeypatch)
    said = "cannot start the cleanup process: [Errno 11] Resource temporarily unavailable"
    assert ("deltarunner.engines", logging.WARNING, said) in caplog.record_tuples
    process._stop()
    assert not memory.exists()


@pytest.mark.whole
def test_dismissed_cleanup_process_keeps_the_folder(folder: Path) -> None:
    with owner_of(folder) as (owner, _):
        assert owner.stdin is not None
        assert owner.stdout is not None
        (cleanup,) = cleanup_processes(folder)
        print("dismiss", file=owner.stdin, flush=True)
        assert owner.stdout.readline() == "dismissed\n"
        cleanup.wait(WATCHDOG_SECONDS)
        assert owner.poll() is None
    assert folder.exists()


def test_owner_dismisses_a_killed_cleanup_process_without_error(folder: Path) -> None:
    with owner_of(folder) as (owner, _):
        assert owner.stdin is not None
        assert owner.stdout is not None
        (cleanup,) = cleanup_processes(folder)
        cleanup.kill()
        cleanup.wait(WATCHDOG_SECONDS)
        print("dismiss", file=owner.stdin, flush=True)
        assert owner.stdout.readline() == "dismissed\n"


def test_reused_process_id_and_zombie_are_not_alive() -> None:
    assert cleanup_process.is_alive(cleanup_process.process_name(os.getpid()))
    assert not cleanup_process.is_alive(f"{os.getpid()}:1")
    with subprocess.Popen(["sleep", "1000"]) as process:
        name = cleanup_process.process_name(process.pid)
        assert cleanup_process.is_alive(name)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not cleanup_process.is_alive(name), "the process is dead, but not reaped"
    with pytest.raises(OSError, match="No such file"):
        cleanup_process.process_name(process.pid)


def test_memory_of_a_killed_process_is_freed_without_warning() -> None:
    script = """
    import multiprocessing, os
    from multiprocessing.shared_memory import SharedMemory
    from runner.engines.vllm.cleanup_process import release, shared_memory_of

    def hold(pipe):
        memory = SharedMemory(create=True, size=64)
        pipe.send(memory.name)
        pipe.recv()

    context = multiprocessing.get_context("fork")
    multiprocessing.resource_tracker.ensure_running()
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(theirs,))
    process.start()
    name = ours.recv()
    held = shared_memory_of(process.pid)
    assert held == {name}, held
    process.kill()
    process.join()
    assert shared_memory_of(process.pid) == set()
    release(held)
    release(held)
    assert not os.path.exists(f"/dev/shm/{name}")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
