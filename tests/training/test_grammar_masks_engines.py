"""Token masks of an engine's own model: the supported engines, and the engines that are refused by name."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner import ScriptedEngine
from runner.engines.vllm.settings import choose_settings
from runner.errors import BadInput, BadOption
from runner.training.grammar import GrammarMasks


class Vllm:
    """Stand-in for the used part of a `VllmEngine`."""

    stop_ids = (2, 0)

    def __init__(self, model: Path, **given: Any) -> None:
        self.model, self.given, self.vocabulary = model, given, 49152


def test_an_engine_brings_its_model_vocabulary_and_stop_ids(demo_model_folder: Path) -> None:
    masks = GrammarMasks.of_engine(Vllm(demo_model_folder, dtype="float32"))
    assert (masks.vocabulary, sorted(masks.stop_ids)) == (49152, [0, 2])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"structured_outputs_config": {"backend": "guidance"}}, "backend='guidance'"),
        ({"structured_outputs_config": {"disable_any_whitespace": True}}, "backend='auto'"),
        ({"structured_outputs_config": SimpleNamespace(backend="outlines")}, "backend='outlines'"),
        ({"structured_outputs_config": {"backend": "xgrammar", "reasoning_parser": "qwen3"}}, "reasoning_parser"),
        ({"reasoning_parser": "qwen3"}, "reasoning_parser"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode='raw_logprobs'.*after mask and temperature.*Leave it out"),
    ],
    ids=["guidance", "auto", "outlines", "reasoning", "reasoning beside", "log-probabilities without masks"],
)
def test_an_engine_that_masks_in_another_way_is_refused(demo_model_folder: Path, given: Any, said: str) -> None:
    with pytest.raises(BadOption, match=said):
        GrammarMasks.of_engine(Vllm(demo_model_folder, **given))


def test_an_engine_that_masks_nothing_is_refused() -> None:
    with pytest.raises(BadOption, match="ScriptedEngine has no token masks: give a VllmEngine"):
        GrammarMasks.of_engine(ScriptedEngine("hello"))


def test_engines_enforce_constraints_with_the_mask_library() -> None:
    known = frozenset({"structured_outputs_config", "reasoning_parser", "max_num_seqs"})
    chosen = choose_settings({}, cpu=True, known=known).arguments
    assert chosen["structured_outputs_config"] == {"backend": "xgrammar"}
    theirs = choose_settings({"reasoning_parser": "qwen3"}, cpu=True, known=known).arguments
    assert "structured_outputs_config" not in theirs


def test_without_xgrammar_the_extra_that_brings_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(BadInput, match=r"pip install 'deltarunner\[grammars\]'"):
        GrammarMasks("smollm2-135m")
