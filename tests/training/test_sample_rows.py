"""Sample rows: prompt, response and mask of trajectories, also of failed ones, and why ratios are not exact."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from runner import BadBatch, BadOption, Outcome, Sampling, Trajectory
from runner.options import Constraint, ConstraintKind
from runner.training import InexactRows, SampleRow, sample_rows
from tests.training.making import made, pieces, prompt, retried, said

TWO_TURNS = [prompt(1, 2, 3), said(4, 5), prompt(6), said(7, version="1"), prompt(8, 9)]


def only(trajectory: Trajectory, **options: Any) -> SampleRow:
    (row,) = sample_rows(trajectory, **options)
    return row


def test_row_is_split_before_the_first_trained_id() -> None:
    row = only(made(TWO_TURNS))
    assert row.prompt_ids.tolist() == [1, 2, 3]
    assert row.response_ids.tolist() == [4, 5, 6, 7]
    assert row.mask.tolist() == [True, True, False, True]
    assert row.logprobs.tolist() == [-0.5, -0.625, 0.0, -0.875]
    assert row.versions == ("0", "0", "", "1")
    assert (row.version, row.reward, row.failed, row.last) == ("0", 1.0, "", True)
    assert row.temperatures.tolist() == [1.0] * 4
    assert not row.constrained.any()


@given(content=pieces())
def test_prompt_and_response_are_the_ids_up_to_the_last_trained(content: Any) -> None:
    trajectory = made(content)
    row = only(trajectory, counts=InexactRows())
    log = trajectory.segments[0].log
    trained = [place for place, kept in enumerate(log.mask()) if kept and place]
    if not trained:
        assert (row.response_ids.tolist(), row.mask.tolist()) == ([0], [False])
        return
    ids = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
    assert ids == list(log.ids)[: trained[-1] + 1]
    assert len(row.prompt_ids) == trained[0]
    assert [len(row.prompt_ids) + place for place in np.flatnonzero(row.mask)] == trained
    assert len(row.response_ids) == len(row.mask) == len(row.logprobs) == len(row.versions) == len(row.advantages)


def rewritten() -> Trajectory:
    return made([prompt(1), said(2, 3, 4)], [prompt(1, 9), said(5)], [prompt(7), said(6, 8)])


@pytest.mark.parametrize(("segments", "kept"), [("each", [0, 1, 2]), ("last", [2]), ("longest", [0])])
def test_segments_are_chosen_by_name(segments: Any, kept: list[int]) -> None:
    rows = sample_rows(rewritten(), segments=segments)
    assert [row.segment for row in rows] == kept
    assert [row.last for row in rows] == [False] * (len(kept) - 1) + [True]


def test_the_later_of_equally_long_segments_is_the_longest() -> None:
    trajectory = made([prompt(1), said(2, 3)], [prompt(7), said(6, 8)])
    assert only(trajectory, segments="longest").segment == 1


def test_several_segments_are_refused_by_name_if_asked() -> None:
    with pytest.raises(BadBatch, match=r"episode 't0#0' .* has 3 segments .* segments='each'"):
        sample_rows(rewritten(), segments="refuse")
    assert only(made(TWO_TURNS), segments="refuse").segment == 0
    with pytest.raises(BadOption, match="segments='first': give one of each, last, longest, refuse"):
        sample_rows(rewritten(), segments="first")  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"outcome": Outcome.ENV_ERROR, "reward": None}, "env_error"),
        ({"outcome": Outcome.ENGINE_ERROR, "reward": None}, "engine_error"),
        ({"outcome": Outcome.CANCELLED, "reward": None}, "cancelled"),
        ({"reward": None}, "no_reward"),
        ({"trained": False}, "untrained"),
    ],
    ids=["environment", "engine", "cancelled", "a reward of None", "untrained"],
)
def test_failed_episode_has_its_ids_and_trains_nothing(fields: dict[str, Any], reason: str) -> None:
    row = only(made(TWO_TURNS, **fields), advantages=1.0)
    assert row.response_ids.tolist() == [4, 5, 6, 7]
    assert not any(array.any() for array in (row.mask, row.logprobs, row.advantages))
    assert (row.reward, row.failed, row.version) == (None, reason, "")


def test_episode_without_a_turn_is_one_padding_id() -> None:
    row = only(made(outcome=Outcome.ENV_ERROR, reward=None), pad_id=7)
    assert (row.prompt_ids.tolist(), row.response_ids.tolist(), row.mask.tolist()) == ([7], [7], [False])
    assert (row.reward, row.failed, row.segment) == (None, "env_error", -1)
    scored = only(made([prompt(1, 2)]), pad_id=7)
    assert (scored.prompt_ids.tolist(), scored.response_ids.tolist(), scored.failed) == ([1, 2], [7], "no_turn")


def test_retried_turn_is_not_trained() -> None:
    row = only(made([prompt(1), said(2), prompt(3), retried(4), prompt(5), said(6)]))
    assert dict(zip(row.response_ids.tolist(), row.mask.tolist(), strict=True)) == {
        2: True,
        3: False,
        4: False,
        5: False,
        6: True,
    }


def test_advantages_are_of_the_trajectory_or_of_each_turn() -> None:
    assert only(made(TWO_TURNS), advantages=2.0).advantages.tolist() == [2, 2, 0, 2]
    assert only(made(TWO_TURNS), advantages=[1.0, -3.0]).advantages.tolist() == [1, 1, 0, -3]
    for wrong in ([1.0], [1.0, 2.0, 3.0], float("nan")):
        with pytest.raises(BadBatch, match="each of its 2 turns"):
            sample_rows(made(TWO_TURNS), advantages=wrong)


@pytest.mark.parametrize(
    ("length", "prompt_ids", "response_ids"),
    [
        (6, [1, 2, 3], [4, 5, 6]),
        (3, [2, 3], [4]),
        (2, [3], [4]),
        ((3, 3), [1, 2, 3], [4, 5, 6]),
        ((2, 9), [2, 3], [4, 5, 6, 7]),
        ((1, 1), [3], [4]),
    ],
)
def test_row_longer_than_its_limit_is_cut_and_not_trained(
    length: Any, prompt_ids: list[int], response_ids: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    counts = InexactRows()
    routed = made(TWO_TURNS)
    for _ in range(2):
        row = only(routed, length=length, advantages=1.0, counts=counts)
        assert (row.prompt_ids.tolist(), row.response_ids.tolist()) == (prompt_ids, response_ids)
        assert (row.failed, row.reward, bool(row.mask.any()), bool(row.advantages.any())) == (
            "too_long",
            None,
            False,
            False,
        )
        assert len(row.mask) == len(row.logprobs) == len(row.versions) == len(row.temperatures) == len(response_ids)
    assert counts.left_out == {"too_long": 2}
    (record,) = caplog.records
    assert f"'t0#0' of agent 'main' is not trained on (too_long): a row is longer than length={length}" in (
        record.message
    )


@pytest.mark.parametrize("length", [7, (3, 4), [9, 9]])
def test_row_within_its_limit_is_whole(length: Any) -> None:
    row = only(made(TWO_TURNS), length=length)
    assert (len(row.prompt_ids), len(row.response_ids), row.failed, row.mask.sum()) == (3, 4, "", 3)


def test_failed_episode_longer_than_the_limit_is_cut_too() -> None:
    row = only(made(TWO_TURNS, outcome=Outcome.ENV_ERROR, reward=None), length=5)
    assert (len(row.prompt_ids) + len(row.response_ids), row.failed) == (5, "env_error")
    nothing = only(made([prompt(*range(9))], outcome=Outcome.CONTEXT_LIMIT), length=5, pad_id=7)
    assert (nothing.prompt_ids.tolist(), nothing.response_ids.tolist()) == ([5, 6, 7, 8], [7])


@pytest.mark.parametrize("length", [1, 0, -3, "9", 2.5, True, (1, 0), (1, 2, 3), ("a", 1)])
def test_invalid_length_is_refused(length: Any) -> None:
    with pytest.raises(BadOption, match=r"length=.*: give a whole number"):
        only(made(TWO_TURNS), length=length)


def test_reasons_are_counted_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    counts = InexactRows()
    cut = Sampling(top_p=0.9).over(Sampling.defaults())
    with caplog.at_level(logging.WARNING, logger="deltarunner.training"):
        for _ in range(3):
            sample_rows(made(TWO_TURNS, sampling=cut), counts=counts)
        sample_rows(made([prompt(1), said(2, logprobs=[float("nan")])]), counts=counts, needs_logprobs=False)
        sample_rows(made(TWO_TURNS, sampling=cut, outcome=Outcome.ENV_ERROR, reward=None), counts=counts)
    assert counts.turns == {"top_p=0.9": 6}
    assert counts.ids == {"no finite log-probability from the engine": 1}
    assert len(caplog.records) == 2
    assert "rows are not exact: top_p=0.9" in caplog.text


def test_constrained_ids_are_marked_and_counted() -> None:
    trajectory = made(TWO_TURNS)
    trajectory.turns[1].constraint = Constraint(ConstraintKind.REGEX, "a")
    counts = InexactRows()
    row = only(trajectory, counts=counts)
    assert row.constrained.tolist() == [False, False, False, True]
    assert counts.ids == {"a grammar without its masks": 1}
