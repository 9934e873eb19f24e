"""Start times of `import runner` and of the command line."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.benchmarks.figures import Figure, main

ROUND_COUNT = 9


def measure() -> Iterator[Figure]:
    """Start times, each in a new process."""
    command = str(Path(sys.executable).with_name("deltarunner"))
    nothing = _milliseconds([sys.executable, "-c", "pass"])
    imported = _milliseconds([sys.executable, "-c", "import runner"])
    used = _milliseconds([sys.executable, "-c", "from runner import Environment, Run, ScriptedEngine, VllmEngine"])
    bare = sorted(nothing)[ROUND_COUNT // 2]
    yield Figure("import runner", "ms", tuple(max(0.0, value - bare) for value in imported), under=150)
    yield Figure("  and what a run needs from it", "ms", tuple(max(0.0, value - bare) for value in used))
    yield Figure("deltarunner --help", "ms", _milliseconds([command, "--help"]), under=500)
    yield Figure("  python that does nothing", "ms", nothing)


def _milliseconds(command: Sequence[str]) -> tuple[float, ...]:
    def once() -> float:
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return (time.perf_counter() - began) * 1e3

    once()  # writes the compiled files
    return tuple(once() for _ in range(ROUND_COUNT))


if __name__ == "__main__":
    main(measure)
