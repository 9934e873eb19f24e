"""A cluster of Ray in a process of its own, for tests; and whether anything of such a process is left.

Usage: python -m tests.cluster.ray_cluster FOLDER CPUS. It says its address, and adds and kills nodes as stdin says.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.repository import ROOT

__all__ = ["Standing", "environ_of", "marked", "require_ray", "standing", "until_none_is_left"]

MARK = "DELTARUNNER_TEST_MARK"
"""A variable that every process inherits which a test has started, Ray's own included."""

WATCHDOG = 120.0

CPUS = 16


def require_ray() -> None:
    """Skip a test where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")


def environ_of(mark: str, **more: str) -> dict[str, str]:
    """The environment of a process whose descendants are to be found again."""
    return {**os.environ, MARK: mark, "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_USAGE_STATS_ENABLED": "0", **more}


def marked(mark: str) -> list[int]:
    """The processes with this mark that are alive."""
    wanted = f"{MARK}={mark}".encode()
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if _environ(folder).count(wanted)]


def _environ(folder: Path) -> list[bytes]:
    try:
        return (folder / "environ").read_bytes().split(b"\0")
    except OSError:  # it has just ended, or is a zombie
        return []


def until_none_is_left(mark: str) -> None:
    """Wait until no process with this mark is left."""
    until = time.monotonic() + WATCHDOG
    while left := marked(mark):
        if time.monotonic() > until:
            commands = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ") for pid in left]
            raise AssertionError(f"left: {commands}")
        time.sleep(0.1)


@dataclass(frozen=True)
class Standing:
    """A cluster that stands."""

    address: str
    mark: str
    process: subprocess.Popen[str]

    def tell(self, order: str) -> None:
        """Have it `add` a node, or `kill` the one that was added last; returns when it is so."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().strip() == order


@contextmanager
def standing(folder: Path, *, cpus: int = CPUS) -> Iterator[Standing]:
    """A cluster, and after the block nothing of it."""
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "tests.cluster.ray_cluster", str(folder), str(cpus)]
    with (
        (folder / "cluster.log").open("w") as log,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environ_of(mark),
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
            yield Standing(line.split()[1], mark, process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(WATCHDOG)
    until_none_is_left(mark)


def main() -> None:
    from ray.cluster_utils import Cluster

    folder, cpus = sys.argv[1:]
    node: Mapping[str, Any] = {"include_dashboard": False, "object_store_memory": 100 * 1024**2}
    cluster: Any = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": int(cpus), "temp_dir": folder})
    print(f"address {cluster.address}", flush=True)
    added = []
    for line in sys.stdin:
        order = line.strip()
        if order == "add":
            added.append(cluster.add_node(num_cpus=1, object_store_memory=100 * 1024**2))
        elif order == "kill":
            cluster.remove_node(added.pop(), allow_graceful=False)
        print(order, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
