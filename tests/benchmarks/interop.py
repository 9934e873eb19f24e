"""Tools and tasks of other projects: calls of MCP and OpenEnv compared with a plain tool, and a large Parquet file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import pyarrow as pa
import pyarrow.parquet as pq

from runner import Environment, Limits, Run, ScriptedEngine, Task, Trajectory, reward, tool
from runner.interop import McpDataset, OpenEnv
from runner.testing import call
from tests.benchmarks.figures import Figure, main
from tests.interop.installing import HOME
from tests.interop.test_openenv import serving

ROUND_COUNT = 5
TURN_COUNT = 50
FILE_BYTES = 1 << 30
ROW_BYTES = 8192
GROUP_ROWS = 2048
"""Rows of a row group: 16 MiB."""

MCP_SERVER = Path(__file__).parents[1] / "interop" / "mcp_server.py"

READ = """
import json, pathlib, sys
from runner.interop import Dataset
shuffle = json.loads(sys.argv[2])
def megabytes():  # of this program alone; ru_maxrss has that of the process that started it
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
tasks = iter(Dataset(sys.argv[1], prompt="{prompt}", answer="{answer}", score="number", shuffle=shuffle).tasks())
before = megabytes()
count = sum(1 for _ in tasks)
print(json.dumps([count, megabytes() - before]))
"""


class Plain(Environment):
    """Environment with a tool of its own."""

    def tasks(self) -> list[Task]:
        return [Task(id="sum", prompt="Add.")]

    @tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @reward
    async def correct(self) -> bool:
        return self.episode.text == "Done."


def measure() -> Iterator[Figure]:
    """Milliseconds from the end of a turn with one call to its answer, and the memory for the tasks of a file."""
    with ExitStack() as stack:
        one = [{"prompt": "Add.", "answer": "3"}]
        server = f"{sys.executable} {MCP_SERVER}"
        rooms: list[tuple[str, Callable[[], Environment], Any]] = [
            ("plain tool", Plain, call("add", a=1, b=2)),
            ("MCP tool, stdio", lambda: McpDataset(server, one, answer="answer"), call("add", a=1, b=2)),
        ]
        if (HOME / "openenv" / "installed.json").is_file():
            url = stack.enter_context(serving())
            rooms.append(("OpenEnv step", lambda: OpenEnv(url, episodes=1), call("act", number=0)))
        else:
            print("interop: OpenEnv is not measured; `make test-interop` installs it", file=sys.stderr)
        for name, environment, made in rooms:
            values = tuple(anyio.run(_answered, environment, made) for _ in range(ROUND_COUNT))
            yield Figure(f"{name}: a call answered", "ms", values)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "tasks.parquet"
        rows = _write(file)
        size = f"{file.stat().st_size / (1 << 20):.0f} MiB"
        for name, shuffle in (("in order", None), ("shuffled", 1)):
            yield Figure(f"tasks of {size} of Parquet, {name}: memory", "MiB", (_memory(file, shuffle, rows),))


async def _answered(environment: Callable[[], Environment], made: Any) -> float:
    """Milliseconds of each call of one episode."""
    replies = [*[[made]] * TURN_COUNT, "Done."]
    limits = Limits(turns=TURN_COUNT + 1)
    async with Run(environment(), ScriptedEngine(replies, context=65536), limits=limits, breaker=1) as run:
        played: list[Trajectory] = [each async for each in run]
    turns = [turn for turn in played[0].turns if turn.tool_calls]
    if len(turns) != TURN_COUNT:
        raise AssertionError(f"{played[0].outcome.value}: {played[0].error}")
    return 1000 * sum(turn.timings.environment for turn in turns) / TURN_COUNT


def _write(file: Path) -> int:
    """Write a file of this size, one row group at a time, and return the number of its rows."""
    rows = 0
    with pq.ParquetWriter(file, _table(0).schema, compression="none", use_dictionary=False) as writer:
        while rows * ROW_BYTES < FILE_BYTES:
            writer.write_table(_table(rows))
            rows += GROUP_ROWS
    return rows


def _table(first: int) -> pa.Table:
    prompts = [f"{number} " + "x" * (ROW_BYTES - 16) for number in range(first, first + GROUP_ROWS)]
    return pa.table({"prompt": prompts, "answer": list(range(GROUP_ROWS))})


def _memory(file: Path, shuffle: int | None, rows: int) -> float:
    """Peak memory in MiB, beyond the memory after the imports, of a process that reads all tasks."""
    command = [sys.executable, "-c", READ, str(file), json.dumps(shuffle)]
    count, memory = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    if count != rows:
        raise AssertionError(f"{count} tasks of {rows} rows")
    return float(memory)


if __name__ == "__main__":
    main(measure)
