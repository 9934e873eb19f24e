"""The plugin loads nothing, changes nothing, and works with any other installed plugin."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from runner import pytest_plugin
from tests.testing.inner import run, run_apart

pytestmark = pytest.mark.slow

pytest_plugins = ["pytester"]

ONE = """
def test_one(scripted_engine):
    scripted_engine.say(call("multiply", a=6, b=7), "It is 42")
    assert play(Calculator, scripted_engine).reward == 1
"""

LOADED = """
import sys
import runner.pytest_plugin
print(sorted(name for name in sys.modules if name.partition(".")[0] == "runner"))
heavy = {"torch", "vllm", "transformers", "httpx", "anyio", "hypothesis", "jinja2", "pydantic", "pyarrow", "rich"}
print(sorted(heavy & set(sys.modules)))
"""


def test_the_plugin_loads_pytest_and_the_standard_library_only() -> None:
    out = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True).stdout
    ours, others = map(ast.literal_eval, out.splitlines())
    # The package, its plugin, and modules that the package needs for its access to run files. They import nothing else.
    expected = ["runner.engines", "runner.engines.scripted", "runner.engines.scripted.run_files"]
    assert ours == ["runner", *expected, "runner.pytest_plugin"]
    assert others == []


def test_plugin_is_loaded_by_name_without_autoloading(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    run_apart(pytester, ONE, "-p", "runner.pytest_plugin", "-o", "asyncio_default_fixture_loop_scope=").assert_outcomes(
        passed=1
    )


def test_plugin_that_is_named_and_autoloaded_is_loaded_once(pytester: pytest.Pytester) -> None:
    run_apart(pytester, ONE, "-p", "runner.pytest_plugin").assert_outcomes(passed=1)


def test_plugin_works_beside_pytest_asyncio_and_in_async_tests(pytester: pytest.Pytester) -> None:
    test = """
async def test_in_a_loop(scripted_engine, no_leaks, loop_watchdog):
    scripted_engine.say("It is 42")
    assert (await play_async(Calculator, scripted_engine)).reward == 1

async def test_the_wrong_door():
    play(Calculator, "It is 42")
"""
    result = run_apart(pytester, ONE + test, "-o", "asyncio_mode=auto")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*play() is for a plain*write `await play_async(...)` here."])


@pytest.mark.whole
def test_plugin_works_in_xdist_workers(pytester: pytest.Pytester) -> None:
    again = "".join(ONE.replace("test_one", f"test_{number}") for number in range(4))
    run_apart(pytester, again, "-n", "2").assert_outcomes(passed=4)


def test_markers_of_the_plugin_are_registered(pytester: pytest.Pytester) -> None:
    test = """
@pytest.mark.engine
@pytest.mark.scripted_engine(context=64)
def test_one(scripted_engine):
    assert scripted_engine.context == 64
"""
    run(pytester, test, "--strict-markers").assert_outcomes(passed=1)


def test_plugin_uses_no_fixture_and_chooses_no_loop_by_itself(pytester: pytest.Pytester) -> None:
    test = """
import sniffio

@pytest.fixture
def anyio_backend():
    return "trio"

@pytest.mark.anyio
async def test_where(scripted_engine, request):
    assert sniffio.current_async_library() == "trio"
    assert set(request.fixturenames) <= {"anyio_backend", "scripted_engine", "request"}
"""
    run(pytester, test).assert_outcomes(passed=1)
    assert not [name for name in vars(pytest_plugin) if name.startswith("anyio")]
