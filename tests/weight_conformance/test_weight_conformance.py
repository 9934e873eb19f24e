"""The page of weight conformance, and a sample of its cases, which is played again."""

from __future__ import annotations

import pytest

from tests.weight_conformance.__main__ import PAGE, Case, cases, is_current, play, read_results
from tests.weight_conformance.architectures import ARCHITECTURES
from tests.weight_conformance.page import page, sentence_for

SAMPLE = ("Llama, tied, float32", "Qwen3-MoE, untied, float32", "GPT-NeoX, untied, float32")

REFUSED_SINCE = {("Qwen2-MoE, untied, bfloat16, GPU", "adapter", "model.layers.*.mlp.shared_expert_gate")}
"""Faults that these cases found and that are now refused by name. A repetition needs a GPU."""


def case_named(key: str) -> Case:
    (case,) = (case for case in cases() if case.key == key)
    return case


def test_page_is_made_of_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(read_results(), [case.key for case in cases() if not case.gpu])


def test_every_error_of_the_results_has_a_plain_sentence() -> None:
    results = read_results().values()
    errors = {row["reason"] for result in results for row in result.get("rows", ()) if row["verdict"] != "right"}
    errors |= {result[field] for result in results for field in ("not_run", "failure") if result.get(field)}
    assert [error for error in errors if error and sentence_for(error) is None] == []


def test_every_case_on_a_cpu_has_a_result() -> None:
    assert {case.key for case in cases() if not case.gpu} <= read_results().keys()


def test_results_are_of_known_cases_and_thirty_architectures() -> None:
    results = read_results()
    assert results.keys() <= {case.key for case in cases()}
    played = {key.split(",")[0] for key, result in results.items() if "rows" in result}
    assert len(played) >= 30
    assert played <= {architecture.name for architecture in ARCHITECTURES}


def test_results_of_an_older_check_are_played_again() -> None:
    new = {"rows": [], "changes_differ": True, "steps": True, "turns": True}
    assert is_current(new)
    assert is_current({"not_run": "vLLM does not have it"})
    assert not any(
        map(
            is_current,
            (None, {"rows": []}, {**new, "steps": False}, {**new, "changes_differ": False}, {**new, "turns": False}),
        )
    )


def test_no_tensor_is_wrong() -> None:
    wrong = {
        (key, row["way"], row["tensor"])
        for key, result in read_results().items()
        for row in result.get("rows", ())
        if row["verdict"] == "wrong"
    }
    assert wrong == REFUSED_SINCE


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.apart
@pytest.mark.whole
@pytest.mark.parametrize("key", SAMPLE)
def test_sample_played_again_has_the_stored_verdicts(key: str) -> None:
    result = play(case_named(key))
    verdicts = [(row["way"], row["tensor"], row["verdict"]) for row in result["rows"]]
    stored = [(row["way"], row["tensor"], row["verdict"]) for row in read_results()[key]["rows"]]
    assert verdicts == stored
