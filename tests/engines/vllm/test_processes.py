"""The real engine's processes: none outlives ours, and Ctrl-C in the terminal reaches none. Each test starts one."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import psutil
import pytest

from runner.concurrency.threads import busy_threads
from runner.engines.base import GenerationRequest
from runner.engines.vllm.engine import VllmEngine
from runner.engines.vllm.parallel import BINDING
from runner.engines.vllm.start import SOCKETS
from runner.engines.vllm.worker import parent_watch
from runner.errors import BadModel, BadOption, EngineDead
from runner.options import Sampling
from tests.playing import until
from tests.repository import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.apart, pytest.mark.spawned]

WATCHDOG_SECONDS = 600.0

RUNNER = """
import dataclasses, json, os, signal, sys
from pathlib import Path
import anyio, anyio.to_thread
from runner.engines.base import GenerationRequest
from runner.cli.quiet_output import quiet_output
from runner.engines.vllm.engine import VllmEngine
from runner.options import Sampling
from multiprocessing.process import BaseProcess

start = BaseProcess.start

def start_and_tell(process):
    start(process)
    print("started", process.name, file=terminal.stdout)

BaseProcess.start = start_and_tell

async def main():
    signal.signal(signal.SIGINT, lambda *_: os.write(terminal.stdout.fileno(), b"interrupted\\n"))
    sampling = dataclasses.replace(Sampling.defaults(), max_tokens=4)
    async with VllmEngine(max_num_seqs=4, max_model_len=512, **json.loads(sys.argv[2])) as engine:
        while True:
            async with engine.stream(GenerationRequest(name="only", prompt=[1, 2], sampling=sampling)) as stream:
                ids = [token async for delta in stream for token in delta.token_ids]
            print("sampled", len(ids), file=terminal.stdout)
            await anyio.to_thread.run_sync(sys.stdin.readline)

with quiet_output(Path(sys.argv[1])) as terminal:
    anyio.run(main)
"""
TWO_RANKS = {"data_parallel_size": 2}
needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need two cores")


@pytest.fixture
def around() -> Iterator[Path]:
    """Parent of an engine's folder. A test's own folder has too long a path for a socket."""
    with tempfile.TemporaryDirectory(prefix="test-") as folder:
        yield Path(folder)


@pytest.fixture
def runner(
    demo_model_folder: Path, tmp_path: Path, around: Path, request: pytest.FixtureRequest
) -> Iterator[subprocess.Popen[str]]:
    """A process that runs an engine, as the leader of its own session and process group."""
    arguments: dict[str, int] = getattr(request, "param", {})
    environment = {**os.environ, SOCKETS: str(around)}
    if (cores := environment.get(BINDING)) and arguments:  # the cores of one worker
        environment[BINDING] = f"{cores}|{cores}"
    command = [sys.executable, "-c", RUNNER, str(tmp_path / "engine.log"), json.dumps(arguments)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        yield process
        process.kill()


def session_of(leader: int) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _session(process.pid) == leader]


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def assert_no_engine_process_is_left() -> None:
    """Assert that no process of our engines exists. They are found by their environment variables."""
    assert_gone([process for process in psutil.process_iter() if _parent(process) == parent_watch.own_process_name()])


def assert_nothing_is_left_in(folder: Path) -> None:
    assert list(folder.iterdir()) == []


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def _parent(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(parent_watch.PARENT)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=WATCHDOG_SECONDS)
    assert alive == []


@pytest.mark.sample_units("starts and ends", 11)
@pytest.mark.parametrize(
    ("runner", "started"),
    [
        pytest.param({}, ["EngineCore"], id="one rank"),
        pytest.param(
            TWO_RANKS,
            ["VLLM_DP_Coordinator", "EngineCore_DP0", "EngineCore_DP1"],
            id="two",
            marks=[pytest.mark.whole, needs_two_cores],
        ),
    ],
    indirect=["runner"],
)
def test_ctrl_c_spares_the_engine_and_kill_9_leaves_nothing(
    runner: subprocess.Popen[str], started: list[str], tmp_path: Path, around: Path
) -> None:
    assert runner.stdin is not None
    assert runner.stdout is not None
    for name in started:
        assert runner.stdout.readline() == f"started {name}\n"
    assert runner.stdout.readline() == "sampled 4\n", "and no output of vLLM between the lines"
    assert "EngineCore" in (tmp_path / "engine.log").read_text()

    os.killpg(runner.pid, signal.SIGINT)
    assert runner.stdout.readline() == "interrupted\n"
    print(file=runner.stdin, flush=True)
    assert runner.stdout.readline() == "sampled 4\n", "the engine answers as before"

    processes = session_of(runner.pid)
    assert len(processes) > len(started), "the runner and each engine core, which may contain its worker"
    (folder,) = around.iterdir()
    assert any(path.is_socket() for path in folder.iterdir())
    runner.kill()
    runner.wait()
    cleanup_processes = [process for process in psutil.process_iter() if str(folder) in _command(process)]
    assert_gone([*processes, *cleanup_processes])
    assert not folder.exists()


@pytest.mark.sample_units("starts and ends", 11)
def test_kill_9_during_the_start_leaves_no_process(runner: subprocess.Popen[str]) -> None:
    assert runner.stdout is not None
    assert runner.stdout.readline() == "started EngineCore\n"
    processes = session_of(runner.pid)
    assert len(processes) >= 2, "the runner and the engine's core"
    runner.kill()
    runner.wait()
    assert_gone(processes)


SCRIPT = """
import os
import anyio
from runner.engines.vllm.engine import VllmEngine

async def main():
    async with VllmEngine(max_num_seqs=4, max_model_len=512):
        print("ready", os.environ.get("LD_PRELOAD"), os.environ.get("LD_LIBRARY_PATH"))

if __name__ == "__main__":
    anyio.run(main)
    print("done")
"""


@pytest.mark.sample_units("starts and ends", 11)
def test_stdout_and_environment_are_free_and_a_stop_is_silent(demo_model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    removed = {"VLLM_LOGGING_STREAM", "LD_PRELOAD", "LD_LIBRARY_PATH"}
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=2 * WATCHDOG_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ready None None\ndone\n"), "LD_PRELOAD names no library"
    assert "EngineCore" in done.stderr, "the log is written to this descriptor"
    for alarming in ("force killing", "EngineDeadError", "Traceback", "leaked shared_memory"):
        assert alarming not in done.stderr


def generation() -> GenerationRequest:
    sampling = dataclasses.replace(Sampling.defaults(), max_tokens=4)
    return GenerationRequest(name="only", prompt=[1, 2], sampling=sampling)


@pytest.mark.sample_units("starts and ends", 11)
@pytest.mark.anyio
async def test_failed_load_has_a_reason_and_leaves_no_process(
    demo_model_folder: Path, tmp_path: Path, around: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SOCKETS, str(around))
    folder = tmp_path / "model"
    shutil.copytree(demo_model_folder, folder, symlinks=True, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = folder / "model.safetensors"
    with (demo_model_folder / weights.name).open("rb") as whole:
        weights.write_bytes(whole.read(1_000_000))
    engine = VllmEngine(folder, template="pythonic", max_num_seqs=4, max_model_len=512)
    with pytest.raises(BadModel, match=r"cannot run the model .*SafetensorError: .*incomplete") as failure:
        await engine.__aenter__()
    assert "\n" not in str(failure.value)
    assert_no_engine_process_is_left()
    assert_nothing_is_left_in(around)
    with pytest.raises(EngineDead, match="not running"):
        await engine.health()


@pytest.mark.whole
@pytest.mark.sample_units("starts and ends", 11)
@pytest.mark.anyio
async def test_an_engine_that_could_not_start_starts_once_it_can(demo_model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo_model_folder, folder, symlinks=True, ignore=shutil.ignore_patterns("*.safetensors"))
    engine = VllmEngine(folder, template="pythonic", max_num_seqs=4, max_model_len=512)
    with pytest.raises(BadModel):
        await engine.__aenter__()

    (folder / "model.safetensors").symlink_to(demo_model_folder / "model.safetensors")
    async with engine, engine.stream(generation()) as stream:
        assert sum([len(delta.token_ids) async for delta in stream]) == 4
    assert_no_engine_process_is_left()
    with pytest.raises(EngineDead, match="not running"):
        async with engine.stream(generation()):
            pytest.fail("it was admitted")


@pytest.mark.sample_units("starts and ends", 11)
@pytest.mark.anyio
@pytest.mark.parametrize(
    "sizes", [pytest.param({}, id="one rank"), pytest.param(TWO_RANKS, id="two", marks=needs_two_cores)]
)
async def test_cancelling_a_start_ends_what_it_started(
    sizes: dict[str, Any], demo_model_folder: Path, around: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SOCKETS, str(around))
    if (cores := os.environ.get(BINDING)) and sizes:  # the cores of one worker
        monkeypatch.setenv(BINDING, f"{cores}|{cores}")
    started = anyio.Event()
    start = BaseProcess.start

    def start_and_tell(process: BaseProcess) -> None:
        start(process)
        anyio.from_thread.run_sync(started.set)

    monkeypatch.setattr(BaseProcess, "start", start_and_tell)
    with anyio.fail_after(WATCHDOG_SECONDS):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(VllmEngine(max_model_len=512, **sizes).__aenter__)
            await started.wait()
            tasks.cancel_scope.cancel()
        assert_no_engine_process_is_left()
        assert_nothing_is_left_in(around)
        # The thread of the start restores the environment variables, after vLLM has failed there.
        await until(lambda: not busy_threads())


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("argument", "value", "problem"),
    [
        ("max_num_seq", 4, "no such engine argument"),
        ("stream_interval", 0, "give 1 id in a delta or more"),
        ("skip_tokenizer_init", True, "the engine sets this argument itself"),
        ("data_parallel_size", 0, "a whole number of at least 1"),
        ("tensor_parallel_size", 100_000, "each with its own CPU core"),
        ("pipeline_parallel_size", 2, "vLLM then dies at its first request"),
    ],
)
async def test_an_impossible_argument_is_refused_by_name(
    demo_model_folder: Path, argument: str, value: object, problem: str
) -> None:
    with pytest.raises(BadOption, match=rf"VllmEngine\({argument}=.*{problem}"):
        async with VllmEngine(**{argument: value}):  # type: ignore[arg-type]
            pytest.fail("it started")
