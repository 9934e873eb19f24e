"""A Ray cluster in a process of its own, for tests, and checks that none of its processes is left.

Usage: python -m tests.cluster.ray_cluster FOLDER CPUS. It prints its address, and adds and kills nodes on orders from
stdin. The actors of its runs are found by their titles and their working folders, since their parent processes change.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.repository import ROOT

__all__ = ["Standing", "actors", "children", "family", "require_ray", "send", "standing", "until_gone"]

WATCHDOG_SECONDS = 600.0

CPU_COUNT = 16


def require_ray() -> None:
    """Skip a test if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")


def family(pid: int) -> set[int]:
    """Return a process, its living descendants, and the given processes.

    Environment variables do not identify them: Ray's processes write their titles over the variables.
    """
    return {pid}.union(*map(family, children(pid)))


def children(pid: int) -> set[int]:
    """Return the living direct child processes of a process."""
    found = set()
    for started in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has just ended
            found |= {*map(int, started.read_text().split())}
    return found


def actors(kind: str = "(WorkerActor|HostActor|SharedLimiters)") -> set[int]:
    """Return Ray's processes that are actors of `runner`, of one kind or of any kind."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has just ended
            title = (process / "cmdline").read_bytes().decode(errors="replace")
            if re.match(f"ray::{kind}", title) and (process / "cwd").readlink() == ROOT:
                found.add(int(process.name))
    return found


def send(what: signal.Signals, pids: Collection[int]) -> None:
    """Send a signal to the given processes that exist."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, what)


def until_gone(pids: Collection[int]) -> None:
    """Wait until none of these processes exists."""
    until = time.monotonic() + WATCHDOG_SECONDS
    while left := [pid for pid in pids if _lives(pid)]:
        if time.monotonic() > until:
            commands = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ") for pid in left]
            raise AssertionError(f"left: {commands}")
        time.sleep(0.1)


def _lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@dataclass(frozen=True)
class Standing:
    """A running cluster."""

    address: str
    process: subprocess.Popen[str]

    def tell(self, order: str) -> int:
        """Send `add` (a node with a core), `add 3` (three cores) or `kill` (the last node). Return its raylet's pid."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        done, raylet = self.process.stdout.readline().split()
        assert done == order.split()[0]
        return int(raylet)


@contextmanager
def standing(folder: Path, *, cpus: int = CPU_COUNT, **settings: str) -> Iterator[Standing]:
    """Yield a cluster with these environment variables, and remove it after the block."""
    # Ray stores the address of the machine's cluster in this folder, and does not create the folder. A separate folder
    # hides this cluster from other programs.
    (folder / "ray").mkdir()
    command = [sys.executable, "-m", "tests.cluster.ray_cluster", str(folder), str(cpus)]
    with (
        (folder / "cluster.log").open("w") as log,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "RAY_TMPDIR": str(folder), **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("address "), (folder / "cluster.log").read_text()
        try:
            yield Standing(line.split()[1], process)
        finally:
            started = family(process.pid)
            assert process.stdin is not None
            process.stdin.close()
            process.wait(WATCHDOG_SECONDS)
    until_gone(started)


def main() -> None:
    from ray.cluster_utils import Cluster

    folder, cpus = sys.argv[1:]
    node: Mapping[str, Any] = {"include_dashboard": False, "object_store_memory": 100 * 1024**2}
    cluster: Any = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": int(cpus), "temp_dir": folder})
    print(f"address {cluster.address}", flush=True)
    added: list[Any] = []
    for line in sys.stdin:
        order, *cores = line.split()
        if order == "add":
            added.append(cluster.add_node(num_cpus=int([*cores, 1][0]), object_store_memory=100 * 1024**2))
        raylet = added[-1].all_processes["raylet"][0].process.pid
        if order == "kill":
            cluster.remove_node(added.pop(), allow_graceful=False)
        print(order, raylet, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
