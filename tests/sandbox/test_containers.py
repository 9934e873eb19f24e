"""Real containers: commands, files, limits and faults."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from runner import (
    BadOption,
    Containers,
    ImageBuildFailed,
    Sandbox,
    SandboxFailed,
    SandboxGone,
    SandboxOptions,
    SandboxUnavailable,
)
from runner.logs import log_to_file
from runner.sandbox.container import ContainerSandbox
from runner.sandbox.leftovers import owner_of
from tests.sandbox.engines import IMAGE_FOLDER, containers_of, own_addresses, processor_of, remove_command, sh

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.sample_functions(2)]

ROOT = Path(__file__).parents[2]

RUN_THAT_IS_KILLED = """
import anyio, sys
from runner import Containers, SandboxOptions

async def hold(provider):
    async with provider.open(SandboxOptions(image=sys.argv[2], memory_mb=64)) as sandbox:
        print("open", flush=True)
        await sandbox.exec(["sleep", "1000"], seconds=None)

async def main():
    provider = Containers(sys.argv[1])
    async with anyio.create_task_group() as group:
        for _ in range(int(sys.argv[3])):
            group.start_soon(hold, provider)

anyio.run(main)
"""


# --- commands


async def test_a_command_returns_code_and_both_outputs(box: Sandbox) -> None:
    done = await box.exec(sh("echo out; echo err >&2; echo $COLOUR $SIZE $(pwd); exit 3"), env={"SIZE": "big"})
    assert (done.code, done.stdout, done.stderr, done.ok) == (3, "out\ngreen big /scratch\n", "err\n", False)
    assert str(done) == "out\ngreen big /scratch\nerr\n[code 3]"
    assert (done.ended_by, done.dropped_bytes) == ("exit", 0)


@pytest.mark.whole
async def test_input_folder_and_user_reach_the_command(box: Sandbox) -> None:
    done = await box.exec(sh("wc -c; pwd; id -un"), input=b"x" * 3_000_000, cwd="/tmp", user="model")
    assert done.stdout == "3000000\n/tmp\nmodel\n"


@pytest.mark.whole
async def test_a_missing_program_is_a_result(box: Sandbox) -> None:
    done = await box.exec(["no-such-program"])
    assert (done.code, done.ended_by) == (127, "exit")
    assert "not found" in done.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [("echo a\0b", "null byte"), ("echo \ud800", "surrogates"), ("echo " + "x" * 200_000, "it is too long")],
    ids=["zero", "surrogate", "long"],
)
async def test_a_command_that_cannot_be_started_is_a_result(box: Sandbox, command: str, said: str) -> None:
    done = await box.exec(sh(command))
    assert (done.code, done.stdout, done.ended_by) == (126, "", "exit")
    assert "the command cannot be started" in done.stderr
    assert said in done.stderr


@pytest.mark.whole
async def test_long_output_keeps_its_beginning_and_end(box: Sandbox) -> None:
    done = await box.exec(sh("echo first; seq 20000; echo last"), output_bytes=1000)
    assert done.stdout.startswith("first\n1\n")
    assert done.stdout.endswith("20000\nlast\n")
    assert f"[{done.dropped_bytes} bytes left out]" in done.stdout
    assert done.dropped_bytes > 100_000


async def test_the_network_has_loopback_only(box: Sandbox) -> None:
    done = await box.exec(sh("tail -n +3 /proc/net/dev | cut -d: -f1"))
    assert done.stdout.split() == ["lo"]
    refused = await box.exec(["bash", "-c", "exec 3<>/dev/tcp/192.0.2.1/80"])
    assert "Network is unreachable" in refused.stderr
    # The listener uses all addresses of this machine: the same command reaches it from here, but not from inside.
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        for address in ("127.0.0.1", *own_addresses()):
            connect = ["bash", "-c", f"exec 3<>/dev/tcp/{address}/{port} && echo connected"]
            assert (await anyio.run_process(connect)).stdout == b"connected\n"
            inside = await box.exec(connect)
            assert (inside.stdout, inside.ok) == ("", False)


@pytest.mark.whole
async def test_two_busy_processes_share_the_cores_given(engine: str) -> None:
    options = SandboxOptions(image=IMAGE_FOLDER, memory_mb=64, cpus=0.5)
    async with Containers(engine).open(options) as sandbox:
        assert isinstance(sandbox, ContainerSandbox)
        pid = int(await sandbox._inspect("{{.State.Pid}}"))
        before = seen = processor_of(pid)
        assert seen["quota"] == seen["period"] / 2
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sandbox.exec, sh("while :; do :; done & while :; do :; done"))
            while seen["nr_periods"] < before["nr_periods"] + 20:
                await anyio.sleep(0.05)
                seen = processor_of(pid)
            tasks.cancel_scope.cancel()
    # The test compares counters, not times. The kernel lends each core a slice beyond the quota. Without a limit, the
    # two would use four times as much.
    used, periods = (seen[name] - before[name] for name in ("used", "nr_periods"))
    assert 0 < used <= (periods + 2) * seen["quota"] * 2


@pytest.mark.whole
async def test_limits_of_memory_and_processes_are_those_given(
    box: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    eaten = await box.exec(sh("head -c 200000000 /dev/zero | tail -c 190000000 | wc -c"))
    assert eaten.stdout.strip() != "190000000"
    full = await box.exec(sh("head -c 9000000 /dev/zero >/small/file; rm /small/file"))
    assert full.stderr  # "No space left on device", in the wording of each busybox
    assert (await box.exec(["echo", "alive"])).ok
    assert os.listdir(tmp_path) == []  # conmon would write a file `oom`


# --- actions of a model


async def test_a_time_limit_ends_all_processes_of_a_command(box: Sandbox) -> None:
    children = "trap '' TERM; sleep 900 & (setsid sleep 901 &); (setsid sh -c 'trap \"\" TERM HUP; sleep 902' &)"
    done = await box.exec(sh(f"echo begun; {children}; sleep 903"), seconds=0.5)
    assert (done.ended_by, done.stdout, done.code) == ("time", "begun\n", 137)
    assert str(done).startswith("begun\n[timed out after")
    left = await box.exec(["ps"])
    assert "sleep 90" not in left.stdout


@pytest.mark.whole
async def test_a_flood_of_output_is_ended(box: Sandbox) -> None:
    done = await box.exec(sh("yes >&2"), seconds=50)
    assert done.ended_by == "output"
    assert done.dropped_bytes > 60_000_000
    assert "[ended: too much output]" in str(done)


async def test_a_fork_bomb_is_ended_and_files_stay(box: Sandbox) -> None:
    await box.write("kept", "1")
    done = await box.exec(sh("(bomb() { bomb | bomb & }; bomb) & exec sleep 900"), seconds=1)
    assert done.ended_by == "time"
    assert (await box.exec(["cat", "kept"])).stdout == "1"


@pytest.mark.whole
async def test_left_processes_cannot_block_the_next_command(box: Sandbox) -> None:
    await box.exec(sh("while :; do sleep 900 & done"))
    assert (await box.exec(["echo", "next"])).stdout == "next\n"


@pytest.mark.whole
async def test_a_daemon_survives_its_command_but_not_a_restart(box: Sandbox) -> None:
    await box.restart()  # another test may have used up all processes
    assert (await box.exec(sh("sleep 904 & echo started"))).stdout == "started\n"
    assert "sleep 904" in (await box.exec(["ps"])).stdout
    await box.restart()
    assert "sleep 904" not in (await box.exec(["ps"])).stdout


@pytest.mark.whole
async def test_the_first_process_cannot_be_killed_from_inside(box: Sandbox) -> None:
    await box.exec(sh("kill -9 1; kill -TERM 1; kill -9 -1"))
    assert (await box.exec(["echo", "alive"])).ok


# --- files


async def test_files_are_written_read_and_uploaded(box: Sandbox, tmp_path: Path) -> None:
    await box.write("new/folder/file.txt", "text")
    assert await box.read("new/folder/../folder/file.txt") == b"text"
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "inner" / "run.sh").chmod(0o755)
    (tmp_path / "link").symlink_to("inner/run.sh")
    await box.upload(tmp_path, "/up")
    assert (await box.exec(["/up/link"])).stdout == "ran\n"
    await box.upload(tmp_path / "inner" / "run.sh", "/one/file")
    assert b"echo ran" in await box.read("/one/file")


@pytest.mark.whole
async def test_only_regular_files_of_the_right_size_are_read(box: Sandbox) -> None:
    await box.exec(sh("mkfifo /tmp/pipe; head -c 2000 /dev/zero >/tmp/big; ln -s /etc/passwd /tmp/link"))
    with pytest.raises(FileNotFoundError, match="'/tmp/none' cannot be read in the sandbox: it does not exist"):
        await box.read("/tmp/none")
    for path, said in (("/tmp/none", "does not exist"), ("/tmp/pipe", "regular"), ("/scratch", "regular")):
        with pytest.raises(OSError, match=said):
            await box.read(path)
    with pytest.raises(OSError, match="2000 bytes, more than most_bytes=1000"):
        await box.read("/tmp/big", most_bytes=1000)
    with pytest.raises(OSError, match="/dev/zero"):
        await box.read("/dev/zero")
    for call in (box.read("a\0"), box.write("a\0", "x")):
        with pytest.raises(OSError, match="contains a zero byte"):
            await call
    assert b"model" in await box.read("/tmp/link")


async def test_bad_arguments_of_a_command_are_refused(box: Sandbox) -> None:
    with pytest.raises(BadOption, match="give a list of strings"):
        await box.exec("ls")
    with pytest.raises(BadOption, match="give the path of a file"):
        await box.read("")


# --- faults outside of the container


async def test_a_removed_sandbox_is_gone_even_in_a_command(engine: str) -> None:
    async with Containers(engine).open(SandboxOptions(image=IMAGE_FOLDER, memory_mb=64)) as sandbox:
        assert isinstance(sandbox, ContainerSandbox)

        async def remove() -> None:
            await anyio.sleep(0.7)
            await anyio.run_process(remove_command(engine, sandbox.name))

        async with anyio.create_task_group() as group:
            group.start_soon(remove)
            # the container is stopped before it is removed
            with pytest.raises(SandboxGone, match=r"was (removed|stopped) from outside"):
                await sandbox.exec(["sleep", "100"])
        for call in (sandbox.read("/x"), sandbox.write("/x", ""), sandbox.restart(), sandbox.exec(["true"])):
            with pytest.raises(SandboxGone):
                await call


@pytest.mark.whole
async def test_a_missing_image_names_the_image(engine: str) -> None:
    with pytest.raises(SandboxFailed, match="image 'localhost/none:1': it is not on this machine"):
        async with Containers(engine).open(SandboxOptions(image="localhost/none:1")):
            pass


@pytest.mark.whole
async def test_a_failing_build_shows_its_output(engine: str, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM localhost/deltarunner-tests:probe\nRUN echo the cause; exit 7\n")
    with pytest.raises(ImageBuildFailed, match=r"(?s)image folder '.*ended with code.*the cause"):
        await Containers(engine).prepare(SandboxOptions(image=tmp_path))
    with pytest.raises(SandboxFailed, match="it has no Dockerfile"):
        await Containers(engine).prepare(SandboxOptions(image=tmp_path / "none"))


async def test_no_engine_is_one_error_with_each_reason(tmp_path: Path) -> None:
    broken = tmp_path / "podman"
    broken.write_text("#!/bin/sh\necho 'no user namespace' >&2; exit 1\n")
    broken.chmod(0o755)
    with pytest.raises(SandboxUnavailable, match=r"podman: no user namespace\)\. Install podman, or name"):
        await Containers(str(broken)).check()
    with pytest.raises(SandboxUnavailable, match=r"no-such-engine --root /x: not on PATH"):
        await Containers("no-such-engine --root /x").check()


@pytest.mark.whole
async def test_a_cancelled_command_leaves_no_process(engine: str) -> None:
    async with Containers(engine).open(SandboxOptions(image=IMAGE_FOLDER, memory_mb=64)) as sandbox:
        with anyio.move_on_after(1):
            await sandbox.exec(["sleep", "905"])
        assert "sleep 905" not in (await sandbox.exec(["ps"])).stdout


@pytest.mark.whole
@pytest.mark.parametrize("seconds", [0.05, 0.4, 0.9])
async def test_a_cancelled_creation_leaves_no_container(engine: str, seconds: float) -> None:
    before = containers_of(engine)
    with anyio.move_on_after(seconds):
        async with Containers(engine).open(SandboxOptions(image=IMAGE_FOLDER, memory_mb=64)):
            await anyio.sleep(100)
    assert containers_of(engine) <= before


@pytest.mark.parametrize("phase", ["open", pytest.param("making", marks=pytest.mark.whole)])
def test_nothing_is_left_after_a_killed_process(engine: str, phase: str) -> None:
    command = [sys.executable, "-c", RUN_THAT_IS_KILLED, engine, str(IMAGE_FOLDER), "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        owner = owner_of(process.pid)
        if phase == "open":
            assert [process.stdout.readline() for _ in range(2)] == ["open\n"] * 2
            assert len(containers_of(engine, owner)) == 2
        else:
            time.sleep(1.5)
        os.kill(process.pid, signal.SIGKILL)
    if phase == "making":  # the client may still be working; the watcher checks for ten seconds
        time.sleep(12)
    until = time.monotonic() + 60
    while containers_of(engine, owner) and time.monotonic() < until:
        time.sleep(0.2)
    assert containers_of(engine, owner) == set()


BUILD_THAT_IS_KILLED = """
import anyio, sys
from runner import Containers, SandboxOptions
anyio.run(Containers(sys.argv[1]).prepare, SandboxOptions(image=sys.argv[2]))
"""


@pytest.mark.whole
def test_a_build_ends_with_the_process_that_asked_for_it(engine: str, tmp_path: Path) -> None:
    mark = f"90{os.getpid()}"
    (tmp_path / "Dockerfile").write_text(f"FROM localhost/deltarunner-tests:probe\nRUN sleep {mark}\n")
    with subprocess.Popen([sys.executable, "-c", BUILD_THAT_IS_KILLED, engine, str(tmp_path)], cwd=ROOT) as process:
        wait_until(lambda: is_running(f"sleep {mark}"))
        os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not is_running(f"sleep {mark}") and not is_running(str(tmp_path)))


def is_running(part: str) -> bool:
    """True if a process of this machine, other than this test, has this text in its command."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if part in words and int(path.parent.name) != os.getpid():
            return True
    return False


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.2)


@pytest.mark.whole
async def test_built_images_are_removed_by_the_command_of_the_page(engine: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "sandboxes.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^podman (image prune .*)$", page, flags=re.MULTILINE)
    (tmp_path / "Dockerfile").write_text("FROM localhost/deltarunner-tests:probe\nRUN touch /own\n")
    await Containers(engine).prepare(SandboxOptions(image=tmp_path))
    listing = [engine, "images", "--quiet", "--filter", "label=deltarunner.image"]
    before = set((await anyio.run_process(listing)).stdout.split())
    await anyio.run_process([engine, *command.split()])
    after = set((await anyio.run_process(listing)).stdout.split())  # these belong to sandboxes of other tests
    assert after < before


@pytest.mark.whole
async def test_a_sandbox_that_cannot_be_removed_is_logged(engine: str, tmp_path: Path) -> None:
    broken = tmp_path / Path(engine).name
    broken.write_text(f'#!/bin/sh\ncase $1 in rm) echo the cause >&2; exit 1 ;; esac\nexec {engine} "$@"\n')
    broken.chmod(0o755)
    with log_to_file(tmp_path / "log", "warning"):
        async with Containers(str(broken)).open(SandboxOptions(image=IMAGE_FOLDER, memory_mb=64)) as sandbox:
            assert isinstance(sandbox, ContainerSandbox)
    await anyio.run_process(remove_command(engine, sandbox.name))
    said = f"sandbox {sandbox.name} is left: it cannot be removed (the cause). Remove it: {broken} rm -f {sandbox.name}"
    assert said in (tmp_path / "log").read_text()


@pytest.mark.whole
async def test_a_limit_of_the_disk_holds_or_is_refused(engine: str) -> None:
    provider, options = Containers(engine), SandboxOptions(image=IMAGE_FOLDER, memory_mb=64, disk_mb=64)
    full = None
    with suppress(SandboxFailed):
        async with provider.open(options) as sandbox:
            full = await sandbox.exec(sh("head -c 100000000 /dev/zero >/big"))
    if full is not None:
        assert "No space left" in full.stderr
    else:
        with pytest.raises(SandboxFailed, match=r"(?i)cannot start a sandbox of it: .*(storage|quota|size)"):
            await provider.prepare(options)


@pytest.mark.whole
async def test_a_run_sweeps_what_dead_processes_left(engine: str) -> None:
    tag = "localhost/deltarunner-tests:probe"
    own = owner_of(os.getpid())
    names = {"living": own, "dead": own.replace(f":{os.getpid()}:", ":999999:")}
    for name, owner in names.items():
        label = f"deltarunner.owner={owner}"
        await anyio.run_process([engine, "run", "-d", f"--name=sweep-{name}", f"--label={label}", tag, "sleep", "900"])
    try:
        await Containers(engine).check()
        assert "sweep-living" in containers_of(engine)
        assert containers_of(engine, names["dead"]) == set()
    finally:
        for name in names:
            await anyio.run_process(remove_command(engine, f"sweep-{name}"), check=False)


# --- options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"image": ""}, "give the name of an image"),
        ({"memory_mb": 0}, "memory_mb=0"),
        ({"cpus": 0}, "cpus=0"),
        ({"network": "host"}, "network='host'.*'none' or 'internet'"),
        ({"tmpfs": {"/x": 3}}, "give a dict of strings"),
        ({"env": ["KEY"]}, r"env=\['KEY'\]\): give a dict of strings"),
        ({"env": {"KEY": 12345}}, r"^sandbox\(env=...\): the value of 'KEY' is of type int: give a dict of strings.$"),
    ],
    ids=["image", "memory", "cpus", "network", "tmpfs", "env", "value of env"],
)
def test_bad_options_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(BadOption, match=said):
        SandboxOptions(**{"image": "x", **options})  # type: ignore[arg-type]  # refused on purpose
