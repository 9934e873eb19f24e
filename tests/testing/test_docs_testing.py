"""docs/testing.md: every block is a test file with the result on the page."""

from __future__ import annotations

import inspect
import re

import pytest

from runner import pytest_plugin
from runner.testing import QueuedEngine, strategies  # noqa: F401  # `strategies` is used in inner runs
from tests.repository import DOCS
from tests.testing.inner import PLAIN

pytestmark = pytest.mark.slow

pytest_plugins = ["pytester"]

PAGE = (DOCS / "testing.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(python|text)\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
TESTS = [text for language, text in BLOCKS if language == "python"]
FAILING = next(text for text in TESTS if "unused_reply_fails" in text)
REAL = next(text for text in TESTS if "real_engine" in text)


@pytest.fixture
def calculator(pytester: pytest.Pytester) -> pytest.Pytester:
    source = re.findall(
        r"^```python\n(.*?)^```", (DOCS / "environments.md").read_text(), flags=re.DOTALL | re.MULTILINE
    )
    pytester.makepyfile(calculator=source[0])
    return pytester


def run(calculator: pytest.Pytester, test: str, *options: str) -> pytest.RunResult:
    calculator.makepyfile(test_page=test)
    return calculator.runpytest_inprocess(*PLAIN, "--strict-markers", "-W", "error", *options)


@pytest.mark.parametrize("number", [number for number, test in enumerate(TESTS) if test not in (FAILING, REAL)])
def test_every_block_passes(calculator: pytest.Pytester, number: int) -> None:
    result = run(calculator, TESTS[number])
    outcomes = result.parseoutcomes()
    assert set(outcomes) == {"passed"}
    assert outcomes["passed"] >= TESTS[number].count("def test_")


def test_the_first_ten_lines_are_a_test_that_works(calculator: pytest.Pytester) -> None:
    assert len(TESTS[0].splitlines()) <= 10
    run(calculator, TESTS[0]).assert_outcomes(passed=1)


def test_the_message_of_the_page_is_the_one_that_is_shown(calculator: pytest.Pytester) -> None:
    result = run(calculator, FAILING)
    result.assert_outcomes(passed=1, errors=1)
    message = next(text for language, text in BLOCKS if language == "text")
    assert message in result.stdout.str() + "\n"


def test_missing_recording_and_unused_engine_on_the_page(calculator: pytest.Pytester) -> None:
    result = run(calculator, REAL, "-m", "not engine")
    result.assert_outcomes(failed=1, deselected=1)
    result.stdout.fnmatch_lines(
        ["the recording *recordings/page.recorded_replies_play.json does not exist: *--runner-record=once*"]
    )


def test_every_fixture_option_and_method_is_on_the_page() -> None:
    source = inspect.getsource(pytest_plugin)
    fixtures = re.findall(r"@pytest\.fixture.*\ndef (\w+)", source)
    options = re.findall(r'"(--runner-\w+)"', source)
    methods = [name for name in vars(QueuedEngine) if not name.startswith("_") and name != "leftovers"]
    assert len(fixtures) >= 8
    assert len(options) >= 2
    assert [name for name in (*fixtures, *options, *methods) if name not in PAGE] == []
