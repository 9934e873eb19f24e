"""Credit by turn, GAE over turns and shared credit, each compared with a loop, and both kinds of REINFORCE++."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner import BadBatch, BadOption, Group, Trajectory, Turn
from runner.training import (
    TrainingBatch,
    by_turn,
    dr_grpo,
    gae,
    grpo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
    shared_credit,
    turn_returns,
)
from tests.training.making import group, groups, made, prompt, retried, said
from tests.training.test_corrections import LAYOUTS, forked, padded

Lay = Callable[[list[Group]], TrainingBatch]


def with_turn_rewards(played: list[Group], seed: int) -> list[Group]:
    """Return the groups with a reward for each turn. Later segments have rewritten histories; there are no branches."""
    numbers = np.random.default_rng(seed)
    for each in played:
        for trajectory in each.trajectories:
            for segment in trajectory.segments[1:]:
                segment.cause = "environment"
            for turn in trajectory.turns:
                turn.reward = float(numbers.integers(-2, 3))
    return played


def trained_turns(trajectory: Trajectory) -> list[Turn]:
    """Return the turns with a trained id, found by iteration over the logs."""
    return [turn for turn in trajectory.turns if any(turn.log.mask()[max(turn.start, 1) : turn.end])]


def spread(batch: TrainingBatch, value_of: Callable[[Turn], float]) -> np.ndarray[Any, Any]:
    """Return the value of each trained id's turn."""
    width = batch.loss_mask.shape[1]
    placed = np.zeros(batch.loss_mask.shape)
    for row, start in zip(batch.rows, batch.layout.starts.tolist(), strict=True):
        for turn in row.turns:
            for offset in range(turn.start, turn.end):
                if row.loss_mask[offset]:
                    placed[(start + offset) // width, (start + offset) % width] = value_of(turn)
    return placed


def returns_of(batch: TrainingBatch, discount: float) -> dict[Turn, float]:
    returns = {}
    for trajectory, reward in zip(batch.trajectories, batch.rewards.tolist(), strict=True):
        turns = trained_turns(trajectory)
        for place, turn in enumerate(turns):
            later = [discount ** (n - place) * turns[n].reward for n in range(place, len(turns))]
            returns[turn] = sum(later) + discount ** (len(turns) - 1 - place) * reward
    return returns


@LAYOUTS
@given(played=groups(), seed=st.integers(0, 99), discount=st.sampled_from([0.0, 0.5, 1.0]))
def test_turn_return_is_all_that_follows(lay: Lay, played: Any, seed: int, discount: float) -> None:
    batch = lay(with_turn_rewards([*forked(), *played], seed))
    returns = returns_of(batch, discount)
    np.testing.assert_allclose(turn_returns(batch, discount=discount), spread(batch, returns.__getitem__), rtol=1e-5)


@LAYOUTS
@given(played=groups(), seed=st.integers(0, 99))
def test_turn_is_compared_with_the_same_turn_of_its_group(lay: Lay, played: Any, seed: int) -> None:
    batch = lay(with_turn_rewards([*forked(), *played], seed))
    returns = returns_of(batch, 1.0)
    compared: dict[tuple[int, int], list[float]] = {}
    number = {}
    for trajectory, label in zip(batch.trajectories, batch.group_of.tolist(), strict=True):
        for place, turn in enumerate(trained_turns(trajectory)):
            number[turn] = (label, place)
            compared.setdefault((label, place), []).append(returns[turn])
    expected = spread(batch, lambda turn: returns[turn] - statistics.mean(compared[number[turn]]))
    np.testing.assert_allclose(by_turn(batch), expected, rtol=1e-5, atol=1e-6)


@LAYOUTS
@given(
    played=groups(),
    seed=st.integers(0, 99),
    discount=st.sampled_from([0.5, 1.0]),
    decay=st.sampled_from([0.0, 0.9, 1.0]),
)
def test_gae_is_the_sum_of_later_errors(lay: Lay, played: Any, seed: int, discount: float, decay: float) -> None:
    batch = lay(with_turn_rewards([*forked(), *played], seed))
    values = np.random.default_rng(seed).normal(size=batch.loss_mask.shape)
    value_of: dict[Turn, float] = {}
    width = batch.loss_mask.shape[1]
    for row, start in zip(batch.rows, batch.layout.starts.tolist(), strict=True):
        for turn in row.turns:
            trained = [offset for offset in range(turn.start, turn.end) if row.loss_mask[offset]]
            if trained:
                place = start + trained[0]
                value_of[turn] = float(values[place // width, place % width])
    advantage_of: dict[Turn, float] = {}
    for trajectory, reward in zip(batch.trajectories, batch.rewards.tolist(), strict=True):
        turns = trained_turns(trajectory)
        errors = []
        for place, turn in enumerate(turns):
            is_last = place == len(turns) - 1
            after = 0.0 if is_last else value_of[turns[place + 1]]
            errors.append(turn.reward + (reward if is_last else 0.0) + discount * after - value_of[turn])
        for place, turn in enumerate(turns):
            advantage_of[turn] = sum((discount * decay) ** (n - place) * errors[n] for n in range(place, len(turns)))
    advantages, targets = gae(batch, values, discount=discount, decay=decay)
    np.testing.assert_allclose(advantages, spread(batch, advantage_of.__getitem__), rtol=1e-4, atol=1e-5)
    expected = spread(batch, lambda turn: advantage_of[turn] + value_of[turn])
    np.testing.assert_allclose(targets, expected, rtol=1e-4, atol=1e-5)


def test_gae_without_a_critic_is_the_return() -> None:
    batch = padded(with_turn_rewards(forked(), 1))
    advantages, targets = gae(batch, np.zeros(batch.loss_mask.shape), decay=1.0)
    np.testing.assert_allclose(advantages, turn_returns(batch))
    np.testing.assert_allclose(targets, advantages)


@LAYOUTS
def test_shared_credit_counts_a_rewritten_trajectory_once(lay: Lay) -> None:
    batch = lay(forked())
    shared = shared_credit(batch, [3.0, 5.0])
    by_row = [{float(value) for value in part if value} for part in batch.unpadded(shared)]
    owners = batch.trajectory_of.tolist()
    assert [by_row[place] for place in range(4)] == [{1.0} if owner == 0 else {5.0} for owner in owners]
    whole = batch.with_advantages([3.0, 5.0]).advantages
    np.testing.assert_array_equal(shared_credit(batch, whole), shared)


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_of_any_precision_are_taken_with_their_gradient(lay: Lay, dtype: torch.dtype) -> None:
    batch = lay(with_turn_rewards(forked(), 1))
    numbers = np.random.default_rng(0)
    values = torch.tensor(numbers.normal(size=batch.loss_mask.shape)).to(dtype).requires_grad_()
    plain = values.detach().double().numpy()
    trajectories = torch.tensor([3.0, 5.0], dtype=dtype, requires_grad=True)
    pairs = [
        *zip(gae(batch, values), gae(batch, plain), strict=True),
        (shared_credit(batch, values), shared_credit(batch, plain)),
        (shared_credit(batch, trajectories), shared_credit(batch, [3.0, 5.0])),
    ]
    for got, expected in pairs:
        assert isinstance(got, torch.Tensor)
        assert (got.dtype, got.requires_grad, got.device) == (torch.float32, False, values.device)
        assert isinstance(expected, np.ndarray)
        assert expected.dtype == np.float32
        np.testing.assert_array_equal(got.numpy(), expected)
    taken = batch.with_advantages(values).advantages
    np.testing.assert_array_equal(taken, np.where(batch.loss_mask, plain, 0).astype(np.float32))


@pytest.mark.parametrize("rule", [grpo, rloo, dr_grpo, reinforce_plus_plus, reinforce_plus_plus_baseline])
def test_rules_take_tensors(rule: Any) -> None:
    rewards, groups = torch.tensor(REWARDS, dtype=torch.bfloat16, requires_grad=True), torch.tensor(LABELS)
    np.testing.assert_array_equal(rule(rewards, groups), rule(REWARDS, LABELS))


def branched() -> list[Group]:
    (given,) = forked()
    given.trajectories[0].segments[1].cause = "branch"
    return [given]


def test_branches_share_credit_and_have_no_order_of_turns() -> None:
    batch = padded(branched())
    assert {float(value) for value in shared_credit(batch, [3.0, 0.0]).ravel()} == {0.0, 1.0}
    for function in (turn_returns, by_turn, lambda given: gae(given, np.zeros(given.loss_mask.shape))):
        with pytest.raises(BadBatch, match=r"'t0#0'.*has branches.*shared_credit"):
            function(batch)


def test_retried_turn_has_no_credit() -> None:
    kept = made([prompt(1), said(2), retried(3), prompt(4), said(5)], id="t0#0")
    kept.turns[1].reward = 100.0
    batch = padded([group(kept, made([prompt(1), said(2)], id="t0#1", reward=0.0))])
    assert {float(value) for value in turn_returns(batch).ravel()} == {0.0, 1.0}


def test_credit_refuses_factors_and_shapes_that_do_not_fit() -> None:
    batch = padded(forked())
    with pytest.raises(BadOption, match=r"discount=1.5: give a number from 0 to 1"):
        turn_returns(batch, discount=1.5)
    with pytest.raises(BadBatch, match=r"values of shape \(2,\)"):
        gae(batch, np.zeros(2))
    with pytest.raises(BadBatch, match=r"critic's value of turn \d+ of episode 't0#.' .* is nan"):
        gae(padded(with_turn_rewards(forked(), 1)), np.full(batch.loss_mask.shape, np.nan))


REWARDS = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0]
LABELS = [0, 0, 0, 1, 1, 1]


def test_reinforce_plus_plus_compares_the_whole_batch() -> None:
    mean, deviation = statistics.mean(REWARDS), statistics.pstdev(REWARDS)
    np.testing.assert_allclose(
        reinforce_plus_plus(REWARDS, LABELS), [(reward - mean) / deviation for reward in REWARDS], rtol=1e-5
    )
    assert not reinforce_plus_plus([2.0, 2.0], [0, 1]).any()
    assert reinforce_plus_plus([], []).shape == (0,)


def test_reinforce_plus_plus_with_a_baseline_scales_by_the_batch() -> None:
    centred = [2 / 3, -1 / 3, -1 / 3, 0, 0, 0]
    deviation = statistics.pstdev(centred)
    np.testing.assert_allclose(
        reinforce_plus_plus_baseline(REWARDS, LABELS), [each / deviation for each in centred], rtol=1e-5, atol=1e-7
    )
    with pytest.raises(BadBatch, match="no group has two"):
        reinforce_plus_plus_baseline([1.0], [0])


def test_rules_fit_a_batch() -> None:
    for rule in (grpo, reinforce_plus_plus, reinforce_plus_plus_baseline):
        batch = TrainingBatch.padded(forked(), pad_id=0, advantages=rule)
        assert np.isfinite(batch.advantages).all()
