"""The check of environment variables that every test has."""

from __future__ import annotations

import os

import pytest

from tests.variables import unchanged


def change_three() -> None:
    os.environ["LD_PRELOAD"] = "first.so:second.so"
    os.environ["TMPDIR"] = "/elsewhere"
    del os.environ["HOME"]


def test_variables_that_a_block_changes_are_named_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "first.so")
    monkeypatch.setenv("HOME", "/home/first")
    monkeypatch.delenv("TMPDIR", raising=False)
    with pytest.raises(AssertionError, match=r"variables changed: HOME, LD_PRELOAD, TMPDIR$"), unchanged():
        change_three()
    assert (os.environ["LD_PRELOAD"], os.environ["HOME"]) == ("first.so", "/home/first")
    assert "TMPDIR" not in os.environ


def test_variables_of_libraries_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    with unchanged():
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    assert os.environ["VLLM_LOGGING_LEVEL"] == "ERROR"


def test_every_test_has_the_check(request: pytest.FixtureRequest) -> None:
    assert "unchanged_variables" in request.fixturenames
