"""Exactness of the probability ratio, and the temperature that it requires."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from runner import Conversation, Sampling
from runner.options import Constraint, ConstraintKind
from runner.sampling_fields import sampling_names
from runner.training.exactness import constrained_ids, inexact_reason, temperatures
from runner.training.rows import rows_of, version_table
from tests.playing import recording, talked
from tests.training.making import made, prompt, retried, said


def rows(*trajectories: Any) -> Any:
    table = version_table(trajectories)
    return [row for trajectory in trajectories for row in rows_of(trajectory, table)]


def sampling(**given: Any) -> Sampling:
    return Sampling(**given).over(Sampling.defaults())


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, ""),
        ({"temperature": 0.7}, ""),
        ({"max_tokens": 5, "stop": ("x",), "stop_ids": (3,)}, ""),
        ({"ignore_eos": True, "logprobs": 5, "logit_bias": {}, "bad_words": ()}, ""),
        ({"top_p": 0.9}, "top_p=0.9 (2 turns)"),
        ({"top_k": 20}, "top_k=20 (2 turns)"),
        ({"min_p": 0.05}, "min_p=0.05 (2 turns)"),
        ({"temperature": 0.0}, "temperature=0 (2 turns)"),
        ({"temperature": 0.0, "top_k": 20}, "temperature=0 (2 turns)"),
        ({"top_p": 0.9, "top_k": 20, "min_p": 0.05}, "min_p=0.05 (2 turns); top_k=20 (2 turns); top_p=0.9 (2 turns)"),
    ],
    ids=[
        "defaults",
        "temperature",
        "ends",
        "no change",
        "top_p",
        "top_k",
        "min_p",
        "greedy",
        "greedy and top_k",
        "all",
    ],
)
def test_truncating_sampling_is_named(given: Any, reason: str) -> None:
    assert inexact_reason(rows(made([prompt(1), said(2), prompt(3), said(4)], sampling=sampling(**given)))) == reason


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"min_tokens": 4}, "min_tokens=4 (2 turns)"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2 (2 turns)"),
        ({"presence_penalty": -0.5}, "presence_penalty=-0.5 (2 turns)"),
        ({"frequency_penalty": 2}, "frequency_penalty=2 (2 turns)"),
        ({"logit_bias": {5: 1.0, 6: -100}}, "logit_bias of 2 (2 turns)"),
        ({"bad_words": ("moon",)}, "bad_words of 1 (2 turns)"),
        ({"bad_words": ("moon",), "temperature": 0.0}, "temperature=0 (2 turns)"),
    ],
    ids=str,
)
@pytest.mark.parametrize("masked", [False, True], ids=["without masks", "with a grammar's masks"])
def test_probability_changing_sampling_is_named(given: Any, reason: str, masked: bool) -> None:
    trajectory = made([prompt(1), said(2), prompt(3), said(4)], sampling=sampling(**given))
    assert inexact_reason(rows(trajectory), masked=masked) == reason


def test_every_sampling_field_is_classified() -> None:
    applied = {"temperature", "adapter", "schema", "regex", "choice"}
    unchanging = {"max_tokens", "stop", "stop_ids", "ignore_eos", "logprobs"}
    assert {*sampling_names(changes=True), *applied, *unchanging} == {
        field.name for field in dataclasses.fields(Sampling)
    }
    assert set(sampling_names(truncates=True)) < set(sampling_names(changes=True))


def test_turns_without_recorded_sampling_are_named() -> None:
    known = made([prompt(1), said(2)])
    unknown = made([prompt(1), said(2)], sampling=None)
    assert inexact_reason(rows(known, unknown)) == "sampling not recorded (1 turn)"


def test_sampling_of_untrained_turns_does_not_make_rows_inexact() -> None:
    trajectory = made([prompt(1), said(2), retried(3)])
    trajectory.turns[1].sampling = sampling(top_p=0.5)
    assert inexact_reason(rows(trajectory)) == ""


def test_ids_without_a_log_probability_are_counted() -> None:
    trajectory = made([prompt(1), said(2, 3, logprobs=[float("nan"), -1.0])])
    assert inexact_reason(rows(trajectory)) == "no finite log-probability from the engine (1 id)"


def test_temperatures_stand_where_their_turns_were_sampled() -> None:
    trajectory = made([prompt(1, 2), said(3, 4), prompt(5), said(6), said(7), retried(8)])
    for turn, temperature in zip(trajectory.turns, (0.5, 2.0, 0.0, 3.0), strict=True):
        turn.sampling = sampling(temperature=temperature)
    (row,) = rows(trajectory)
    assert temperatures(row).tolist() == [1, 1, 0.5, 0.5, 1, 2, 1, 1]


def test_a_temperature_below_the_engines_coolest_is_that_one() -> None:
    (row,) = rows(made([prompt(1), said(2)], sampling=sampling(temperature=0.001)))
    assert temperatures(row).tolist() == [1, pytest.approx(0.01)]


def test_turns_of_several_adapters_are_named_as_inexact() -> None:
    plain, tuned = made([prompt(1), said(2)]), made([prompt(1), said(2)], sampling=sampling(adapter="style"))
    assert inexact_reason(rows(tuned, tuned)) == ""
    assert inexact_reason(rows(plain, tuned)) == "adapter='style' (1 turn); adapter=None (1 turn)"


def test_an_unknown_temperature_is_1_and_a_reason() -> None:
    (row,) = rows(made([prompt(1), said(2)], sampling=None))
    assert temperatures(row).tolist() == [1, 1]


def test_ids_that_were_sampled_under_a_grammar_are_counted() -> None:
    trajectory = made([prompt(1), said(2, 3), said(4), retried(5)])
    constraint = Constraint(ConstraintKind.REGEX, "[0-9]+")
    trajectory.turns[0].constraint = trajectory.turns[2].constraint = constraint
    assert constrained_ids(rows(trajectory)) == 2
    assert inexact_reason(rows(trajectory)) == "a grammar without its masks (2 ids)"
    assert inexact_reason(rows(trajectory), masked=True) == ""


@pytest.mark.anyio
async def test_every_turn_of_a_run_records_its_sampling() -> None:
    async def talk(conversation: Conversation) -> None:
        await conversation.generate()
        conversation.add("Again?")
        await conversation.generate(sampling=Sampling(top_p=0.8, temperature=0.5))

    trajectory = await talked(talk, recording(["21", "42"]), sampling=Sampling(temperature=2.0))
    (row,) = rows(trajectory)
    assert inexact_reason([row]) == "top_p=0.8 (1 turn)"
    first, second = trajectory.turns
    assert set(temperatures(row)[first.start : first.end]) == {2}
    assert set(temperatures(row)[second.start : second.end]) == {0.5}
