"""Leaks are found and named; objects that an event loop keeps for reuse are not leaks."""

import gc
import os
import socket
import subprocess
import threading
import time
import warnings
from contextlib import ExitStack
from pathlib import Path

import anyio
import anyio.abc
import pytest
from anyio import to_thread
from anyio.lowlevel import checkpoint

from runner.engines.base import GenerationRequest, Session
from runner.options import Sampling
from runner.testing import Fault, Latency, Leaked, Reply, ScriptedEngine, no_leaks

pytestmark = [pytest.mark.slow, pytest.mark.sample_functions(2)]


def request(session: Session | None = None) -> GenerationRequest:
    return GenerationRequest(name="e/main/0", prompt=[1], sampling=Sampling.defaults(), session=session)


def test_a_block_that_cleans_up_passes(tmp_path: Path) -> None:
    with no_leaks():
        thread = threading.Thread(target=lambda: None)
        thread.start()
        (tmp_path / "file").write_text("closed again")
    assert not thread.is_alive()


def test_a_thread_that_is_left_is_named(release: threading.Event) -> None:
    with pytest.raises(Leaked, match="thread 'the hung one'"), no_leaks(settle=0.05):
        threading.Thread(target=release.wait, name="the hung one").start()


def test_ending_thread_is_not_a_leak(release: threading.Event) -> None:
    with no_leaks(settle=60):
        threading.Thread(target=lambda: release.wait(0.1)).start()
    assert not release.is_set()


def test_file_of_an_ending_thread_is_not_a_leak(tmp_path: Path, release: threading.Event) -> None:
    opened = threading.Event()

    def read() -> None:
        with (tmp_path / "source.py").open("w"):
            opened.set()
            release.wait(0.1)

    with no_leaks(settle=60):
        threading.Thread(target=read).start()
        assert opened.wait(60)
    assert not release.is_set()


def test_an_open_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "left open"
    with pytest.raises(Leaked, match="left open"), no_leaks():
        descriptor = os.open(path, os.O_CREAT)
    os.close(descriptor)


def started(*command: str) -> subprocess.Popen[bytes]:
    """Start a process, and wait until it has its command line, which the system sets a moment after the start."""
    process = subprocess.Popen(command)
    while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
        time.sleep(0.001)
    return process


def test_running_process_is_a_leak_and_an_ended_one_is_not() -> None:
    with no_leaks(settle=0), subprocess.Popen(["true"]) as ended:
        ended.wait()
    left: list[subprocess.Popen[bytes]] = []
    with pytest.raises(Leaked, match=r"process \d+ \(sleep 600\)"), no_leaks(settle=0):
        left.append(started("sleep", "600"))
    left[0].kill()
    left[0].wait()


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_a_task_that_is_left_is_named() -> None:
    async with anyio.create_task_group() as tasks:
        with pytest.raises(Leaked, match="the wanderer"), no_leaks():
            tasks.start_soon(anyio.sleep_forever, name="the wanderer")
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_idle_worker_threads_are_not_a_leak() -> None:
    with no_leaks():
        for _ in range(3):
            await to_thread.run_sync(lambda: None)


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_a_worker_thread_at_work_is_a_leak(release: threading.Event) -> None:
    working = threading.Event()

    def work() -> None:
        working.set()
        release.wait()

    async def start() -> None:
        tasks.start_soon(to_thread.run_sync, work)
        while not working.is_set():
            await checkpoint()

    async with anyio.create_task_group() as tasks:
        with pytest.raises(Leaked, match="thread"), no_leaks(settle=0.05):
            await start()
        release.set()


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_open_requests_and_live_sessions_are_counted() -> None:
    async with ScriptedEngine(Reply("abc", fault=Fault.stall(1)), latency=Latency()) as engine:
        session = engine.session()
        stream = engine.stream(request(session))
        with pytest.raises(Leaked, match=r"live session 1 of ScriptedEngine 0; open request 1 of"), no_leaks(engine):
            await stream.__aenter__()
        await stream.__aexit__(None, None, None)
        engine.close_session(session)


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_stream_opened_before_the_block_is_not_a_leak() -> None:
    async with ScriptedEngine(Reply("abc", fault=Fault.stall(1))) as engine, engine.stream(request()):
        with no_leaks(engine):
            async with engine.stream(request()):
                pass


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_an_exception_passes_with_a_note_of_what_leaked() -> None:
    async with ScriptedEngine("abc") as engine:
        stream = engine.stream(request())

        async def fail() -> None:
            await stream.__aenter__()
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError) as caught, no_leaks(engine):
            await fail()
        assert "leaked: open request 1 of ScriptedEngine 0" in caught.value.__notes__
        await stream.__aexit__(None, None, None)


@pytest.mark.filterwarnings("ignore:known to be")
def test_garbage_collected_file_is_a_leak() -> None:
    def warn() -> None:
        for text in ("unclosed door", "known to be unclosed"):
            warnings.warn(text, ResourceWarning, stacklevel=1)
        warnings.warn("old", DeprecationWarning, stacklevel=1)

    with pytest.warns(DeprecationWarning, match="old"), pytest.raises(Leaked) as caught, no_leaks():
        warn()
    assert caught.value.leaks == ("closed by the garbage collector alone: door",)


def test_garbage_made_before_the_block_is_not_a_leak() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cycle: list[object] = [open(__file__)]  # noqa: SIM115  # the leak
        cycle.append(cycle)
        del cycle
        with no_leaks():
            gc.collect()
    assert [one.category for one in caught] == [ResourceWarning]


@pytest.mark.whole
def test_uvloop_reserve_descriptor_is_not_a_leak() -> None:
    async def connects() -> None:
        near, far = socket.socketpair()
        far.close()
        await (await anyio.abc.SocketStream.from_socket(near)).aclose()

    async def watched(opened: int) -> None:
        with ExitStack() as stack, no_leaks(settle=0):
            await connects()
            for _ in range(opened):
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))

    anyio.run(watched, 0, backend_options={"use_uvloop": True})
    with pytest.raises(Leaked, match=r"file \d+ \(/dev/null\)"):
        anyio.run(watched, 1, backend_options={"use_uvloop": True})
    with pytest.raises(Leaked, match=r"file \d+ \(/dev/null\)"):
        anyio.run(watched, 1)
