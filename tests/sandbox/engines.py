"""The container engine that the tests use, and an image that needs no registry.

podman as root gets a folder of its own, and a configuration that also works inside a container. The tests use the first
engine that can start a container. If no engine can, they are skipped with the reason of each engine.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import socket
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

from runner.sandbox.client import ContainerClient
from runner.sandbox.containers import ENGINE_VARIABLE
from runner.sandbox.leftovers import OWNER_LABEL, owner_of, remove_flags

__all__ = [
    "HOME",
    "IMAGE_FOLDER",
    "containers_of",
    "engine_or_reason",
    "own_addresses",
    "processor_of",
    "remove_command",
    "sh",
]

HOME: Final = Path(tempfile.gettempdir()) / f"deltarunner-test-containers-{os.getuid()}"
"""Images and settings of the tests. They are outside of the checkout, since podman mounts the folder, and the checkout
could then not be removed.
"""
IMAGE_FOLDER: Final = HOME / "image"
"""A folder with a Dockerfile: busybox, bash, and a user `model`."""

DOCKERFILE: Final = """FROM scratch
COPY busybox /bin/busybox
RUN ["/bin/busybox", "--install", "-s", "/bin"]
COPY bash /
COPY passwd /etc/passwd
RUN ["/bin/busybox", "mkdir", "-m", "1777", "/tmp"]
WORKDIR /scratch
"""

CONFIGURATION: Final = """[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
netns = "none"
cgroups = "enabled"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
"""

PROBE_SECONDS: Final = 120


@cache
def engine_or_reason() -> tuple[str, str]:
    """Return the command of an engine that starts containers of the image, or "" and the reason why there is none."""
    busybox = shutil.which("busybox")
    if busybox is None:
        return "", "no container runs here: busybox is not on PATH (apt-get install busybox-static)"
    HOME.mkdir(mode=0o700, exist_ok=True)
    if HOME.stat().st_uid != os.getuid():
        return "", f"no container runs here: {HOME} has another owner"
    with (HOME / "lock").open("w") as lock:  # several processes of pytest begin at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        _write_image(Path(busybox))
        reasons = []
        for command in _candidates():
            reason = _reason_against(command)
            if not reason:
                return command, ""
            reasons.append(f"{command}: {reason}")
    return "", f"no container runs here: {'; '.join(reasons) or 'neither podman nor docker is on PATH'}"


def containers_of(command: str, owner: str = "") -> set[str]:
    """Return the names of a process's containers, by default of this process."""
    label = f"label={OWNER_LABEL}={owner or owner_of(os.getpid())}"
    listed = subprocess.run(
        [*shlex.split(command), "ps", "-a", "--filter", label, "--format", "{{.Names}}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(listed.stdout.split())


def remove_command(command: str, name: str) -> list[str]:
    """Return the command that removes a container at once."""
    engine = shlex.split(command)
    return [*engine, "rm", *remove_flags(ContainerClient(engine)), name]


def processor_of(pid: int) -> dict[str, int]:
    """Return processor time, periods and quota of a process's control group (version 1 or 2), in microseconds."""
    rows = [line.split(":") for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    groups = {kind: path for _, kinds, path in rows for kind in kinds.split(",")}
    if "cpu" in groups:
        folder = Path(f"/sys/fs/cgroup/cpu{groups['cpu']}")
        limits = [(folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")]
        used = int(Path(f"/sys/fs/cgroup/cpuacct{groups['cpuacct']}/cpuacct.usage").read_text()) // 1000
    else:
        folder = Path(f"/sys/fs/cgroup{groups['']}")
        limits, used = (folder / "cpu.max").read_text().split(), 0
    seen = {name: int(count) for name, count in map(str.split, (folder / "cpu.stat").read_text().splitlines())}
    return {"used": seen.get("usage_usec", used), **seen, "quota": int(limits[0]), "period": int(limits[1])}


def own_addresses() -> set[str]:
    """Return the addresses of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # this sends no packet
        except OSError:  # this machine has no network
            return set()
        return {probe.getsockname()[0]}


def sh(command: str) -> list[str]:
    """Return the arguments that run a command in a shell."""
    return ["sh", "-c", command]


def _candidates() -> list[str]:
    if given := os.environ.get(ENGINE_VARIABLE):
        return [given]
    found = []
    if (podman := shutil.which("podman")) is not None:
        runtime = shutil.which("runc") or shutil.which("crun")
        if os.getuid() == 0 and runtime is not None:
            found += [_wrapped(podman, runtime, driver) for driver in ("overlay", "vfs")]
        found.append(podman)
    if (docker := shutil.which("docker")) is not None:
        found.append(docker)
    return found


def _wrapped(podman: str, runtime: str, driver: str) -> str:
    """Return a script with the options of podman, since some of the options are variables."""
    configuration, script = HOME / "containers.conf", HOME / driver / "podman"
    configuration.write_text(CONFIGURATION)
    script.parent.mkdir(exist_ok=True)
    options = f"--storage-driver={driver} --runtime={runtime} --root={HOME / driver}/root --runroot={HOME / driver}/run"
    new = f'#!/bin/sh\nexport CONTAINERS_CONF={configuration} BUILDAH_ISOLATION=chroot\nexec {podman} {options} "$@"\n'
    if not script.exists() or script.read_text() != new:
        script.write_text(new)
        script.chmod(0o755)
    return str(script)


def _write_image(busybox: Path) -> None:
    if not (IMAGE_FOLDER / "Dockerfile").exists() or (IMAGE_FOLDER / "Dockerfile").read_text() != DOCKERFILE:
        IMAGE_FOLDER.mkdir(exist_ok=True)
        shutil.copy(busybox, IMAGE_FOLDER / "busybox")
        (IMAGE_FOLDER / "passwd").write_text("root:x:0:0::/:/bin/sh\nmodel:x:1000:1000::/tmp:/bin/sh\n")
        _copy_bash(IMAGE_FOLDER / "bash")
        (IMAGE_FOLDER / "Dockerfile").write_text(DOCKERFILE)


def _copy_bash(folder: Path) -> None:
    """Copy bash and its libraries. bash can open connections, which a static busybox cannot do everywhere."""
    bash = shutil.which("bash")
    assert bash is not None, "the tests of sandboxes need bash"
    listed = subprocess.run(["ldd", bash], capture_output=True, text=True, check=True).stdout
    libraries = [word for line in listed.splitlines() for word in line.split() if word.startswith("/")]
    for path in (*libraries, "/bin/bash"):
        target = folder / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(bash if path == "/bin/bash" else path, target)


def _reason_against(command: str) -> str:
    """Return the last line of the first failing call, or "" if a container runs with limits."""
    engine, tag = shlex.split(command), "localhost/deltarunner-tests:probe"
    limits = ["--network=none", "--memory=64m", "--memory-swap=64m", "--pids-limit=16", "--cpus=1"]
    for arguments in (["build", "-q", "-t", tag, str(IMAGE_FOLDER)], ["run", "--rm", *limits, tag, "true"]):
        try:
            done = subprocess.run(
                [*engine, *arguments], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if done.returncode:
            return (done.stderr.strip() or "it failed").splitlines()[-1]
    return ""
