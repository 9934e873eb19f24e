"""The tests on real Ray, in a separate process: Ray's native threads stay in a process, and may end it later."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests import sweeps
from tests.cluster.ray_cluster import require_ray
from tests.repository import ROOT


@pytest.mark.apart
@pytest.mark.slow
def test_all_that_is_promised_of_ray_holds_on_ray(request: pytest.FixtureRequest) -> None:
    """To play one of the tests: `pytest --ray tests/cluster -k NAME`. Benchmarks also need `--sweeps=whole`."""
    require_ray()
    option = request.config.option
    how = ["--sweeps", "whole" if sweeps.whole() else "sampled", "--sweep-seed", str(option.sweep_seed)]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--ray",
        "-m",
        "ray",
        "-p",
        "no:cacheprovider",
        "--show-capture=log",
        *how,
        *_files(),
    ]
    # Ray lowers the priority of its workers, which then wait for all other tests: 45 minutes in a whole sweep.
    variables = {**os.environ, "RAY_worker_niceness": "0"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    print(done.stdout.strip().splitlines()[-1])


def _files() -> list[str]:
    """The files with such tests. Other files import torch and vLLM, which these tests do not need."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file) for file in files if re.search(r"\bmark\.ray\b", file.read_text(encoding="utf-8"))]
