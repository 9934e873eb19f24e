"""The benchmark against verifiers: which prompts have lost their ids, and that only equal episodes are compared."""

from __future__ import annotations

import pytest

from tests.benchmarks.verifiers import Round, Turns, Way, continuing, figures, same_prompts


def played(*episodes: Turns) -> Way:
    measured = Round(wall=2.0, processor=1.0, right=0.0, episodes=episodes)
    return Way(measured, [measured])


def test_prompt_that_does_not_extend_the_ids_before_is_counted() -> None:
    kept: Turns = [([1, 2], [3]), ([1, 2, 3, 4], [5]), ([1, 2, 3, 4, 5], [6])]
    encoded_anew: Turns = [([1, 2], [3, 4]), ([1, 2, 34, 5], [6]), ([1, 2, 34, 5, 6, 7], [8])]
    shorter: Turns = [([1, 2], [3]), ([1, 2], [3])]
    assert continuing([kept]) == (2, 0)
    assert continuing([encoded_anew]) == (2, 1)
    assert continuing([shorter, kept]) == (3, 1)


def test_a_first_prompt_continues_nothing() -> None:
    assert continuing([[([1], [2])], [([3], [4])]]) == (0, 0)


def test_episodes_that_begin_with_other_prompts_are_not_compared() -> None:
    first, other = [([1], [2])], [([7], [2])]
    same_prompts({"ours": played(first, other), "theirs": played(other, first)})
    with pytest.raises(RuntimeError, match="other prompts theirs than ours"):
        same_prompts({"ours": played(first), "theirs": played(other)})


def test_round_is_reported_in_turns_and_ids() -> None:
    medians = {each.name.strip(): each.median for each in figures({"ours": played([([1], [2, 3]), ([1, 2, 3], [4])])})}
    assert medians["turns"] == 1.0
    assert medians["of a turn"] == 500.0
    assert medians["ids sampled"] == 3
    assert medians["prompts that continue, temperature 0"] == 1
