"""What tests/lanes.py promises: tests that share an engine are in one process, and so are those of the other groups."""

from __future__ import annotations

from collections import defaultdict

import pytest

pytest_plugins = ["pytester"]

CONFTEST = """
import pytest
from tests import lanes

def pytest_configure(config):
    for marker in ("apart", "engine", "timing", "whole"):
        config.addinivalue_line("markers", marker)

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    lanes.tell(config, items)

@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return lanes.scheduler(config, log)
"""

TESTS = """
import pathlib, pytest

def played(kind, worker):
    with pathlib.Path("played.txt").open("a") as file:
        print(kind, worker, file=file)

@pytest.mark.engine
@pytest.mark.parametrize("n", range(12))
def test_engine(n, worker_id): played("engine", worker_id)

@pytest.mark.timing
@pytest.mark.parametrize("n", range(8))
def test_timing(n, worker_id): played("timing", worker_id)

@pytest.mark.engine
@pytest.mark.apart
@pytest.mark.parametrize("n", range(6))
def test_apart(n, worker_id): played("apart", worker_id)

@pytest.mark.parametrize("n", range(6))
def test_other(n, worker_id): played("other", worker_id)
"""


def test_groups_stay_together_and_all_else_is_where_there_is_time(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess("-n", "3", "-p", "no:asyncio", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=32)
    workers = defaultdict(list)
    for line in (pytester.path / "played.txt").read_text().splitlines():
        kind, worker = line.split()
        workers[kind].append(worker)
    assert {kind: len(where) for kind, where in workers.items()} == {"engine": 12, "timing": 8, "apart": 6, "other": 6}
    groups = [set(workers[kind]) for kind in ("engine", "timing", "apart")]
    assert list(map(len, groups)) == [1, 1, 1]
    assert len(set.union(*groups)) == 3
