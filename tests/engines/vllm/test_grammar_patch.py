"""Patches of vLLM's engine cores: each is tried, and one that fails is named."""

from __future__ import annotations

import functools
import os

import pytest

from runner.engines.vllm.worker import grammar_patch, parent_watch

PATCHES = {
    "patch_engine_core_calls": "engine cores to hold turns",
    "patch_grammar_compiler": "grammar compiler",
}


@pytest.mark.parametrize("fails", PATCHES)
def test_core_patch_that_fails_is_named_and_the_other_applied(
    fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    applied: list[str] = []

    def patch(name: str) -> None:
        if name == fails:
            raise AttributeError("it has moved")
        applied.append(name)

    for name in PATCHES:
        monkeypatch.setattr(grammar_patch, name, functools.partial(patch, name))
    monkeypatch.setenv(parent_watch.PARENT, f"{os.getppid()}:1")
    grammar_patch.patch_engine_core()
    assert applied == [name for name in PATCHES if name != fails]
    assert caplog.messages == [f"deltarunner cannot patch this vLLM's {PATCHES[fails]}: it has moved"]
