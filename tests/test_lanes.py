"""Groups of tests in one process, and the end of a process: tests/lanes.py and tests/lasting.py.

A group of tests is played in one process, and a process that ends takes no other tests with it. Code of `runner` cannot
end a process of tests, and any other end is reported.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

pytestmark = pytest.mark.slow

pytest_plugins = ["pytester"]

WATCHDOG_SECONDS = 600.0

CONFTEST = """
import pytest
from tests import lanes, lasting

def pytest_configure(config):
    if hasattr(config, "workerinput"):
        lasting.begin()
    for marker in ("apart", "engine", "timing", "whole"):
        config.addinivalue_line("markers", marker)

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    lanes.write_groups(config, items)

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


def play(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, *options: str) -> pytest.RunResult:
    """Play with pytest-xdist and without other plugins, since every process would import them."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return pytester.runpytest_subprocess("-p", "xdist", "-p", "no:cacheprovider", *options, timeout=WATCHDOG_SECONDS)


def test_groups_stay_together_and_begin_before_all_other_tests(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    result = play(pytester, monkeypatch, "-n", "3")
    result.assert_outcomes(passed=32)
    workers = defaultdict(list)
    first_of: dict[str, str] = {}
    for line in (pytester.path / "played.txt").read_text().splitlines():
        kind, worker = line.split()
        workers[kind].append(worker)
        first_of.setdefault(worker, kind)
    counts = {kind: len(where) for kind, where in workers.items()}
    assert counts == {"engine": 12, "timing": 8, "apart": 6, "other": 6}
    assert {"apart", "engine"} <= set(first_of.values())
    groups = [set(workers[kind]) for kind in ("engine", "timing", "apart")]
    assert list(map(len, groups)) == [1, 1, 1]
    assert len(set.union(*groups)) == 3


DYING = """
import os, pathlib, pytest, signal

def played(name, worker):
    with pathlib.Path("played.txt").open("a") as file:
        print(name, worker, file=file)

@pytest.mark.engine
@pytest.mark.parametrize("n", range(20))
def test_engine(n, worker_id):
    played(f"engine{n}", worker_id)
    if n in DEADLY:
        os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.parametrize("n", range(40))
def test_other(n, worker_id):
    played(f"other{n}", worker_id)
    if f"{n}" in DEADLY:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("deadly", [{5}, {19, "3", "39"}], ids=["one of a group", "last of a group and single ones"])
def test_tests_of_a_killed_process_run_elsewhere_except_the_killer(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, deadly: set[object]
) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(DYING.replace("DEADLY", repr(deadly)))
    result = play(pytester, monkeypatch, "-n", "2")
    result.assert_outcomes(passed=60 - len(deadly), failed=len(deadly))
    played = Counter(line.split()[0] for line in (pytester.path / "played.txt").read_text().splitlines())
    assert played == Counter([f"engine{n}" for n in range(20)] + [f"other{n}" for n in range(40)])


ENDED = """
import ctypes, os, signal
from tests.testing.inner import run

pytest_plugins = ["pytester"]

def test_inner(pytester):
    run(pytester, "def test_it(): pass").assert_outcomes(passed=1)

def test_crash():
    ctypes.string_at(0)

def test_ending():
    os.kill(os.getpid(), signal.SIGTERM)

def test_exit():
    from runner.runs.event_loop import exit_now
    exit_now(7)
"""


@pytest.mark.whole
def test_crash_names_its_test_and_our_own_exit_is_an_error(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(ENDED)
    result = play(pytester, monkeypatch, "-n", "1")
    result.assert_outcomes(passed=1, failed=3)
    result.stderr.fnmatch_lines(["Fatal Python error: Segmentation fault", "*in test_crash"])
    result.stderr.fnmatch_lines(["SIGTERM ends process * in *::test_ending (call)"])
    result.stdout.fnmatch_lines(["*AssertionError: runner.runs.event_loop would have ended the process of the tests*7"])


CHANGING = """
import os, pytest, signal

@pytest.mark.parametrize("n", range(9) if os.environ["PYTEST_XDIST_WORKER"] == "gw0" else range(5))
def test_it(n):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_replacement_process_with_other_tests_ends_the_run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(CHANGING)
    result = play(pytester, monkeypatch, "-n", "1")
    result.stdout.fnmatch_lines(["*gw1 takes the place of a process that ended and does not find *5]: were files*"])
    assert result.ret == pytest.ExitCode.INTERNAL_ERROR
