"""Advantages: computed by hand, and properties for any rewards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner import BadBatch
from runner.training.advantages import AdvantageRule, dr_grpo, grpo, rloo, without_spread

RULES = [pytest.param(rule, id=rule.__name__) for rule in (grpo, rloo, dr_grpo)]

# At least two per group, so that they can be compared.
rewards_and_groups = (
    st.lists(st.tuples(st.floats(-100, 100, width=32), st.integers(0, 3)), min_size=2, max_size=12)
    .map(lambda pairs: (np.array([reward for reward, _ in pairs]), np.array([group for _, group in pairs])))
    .filter(lambda case: np.bincount(case[1]).max() > 1)
)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # The mean is 0.25, and the deviation is sqrt((3 / 16 * 4) / 3) = 0.5.
        (grpo, [-0.25 / 0.501, -0.25 / 0.501, -0.25 / 0.501, 0.75 / 0.501]),
        # The means of the other members are 1/3, 1/3, 1/3 and 0.
        (rloo, [-1 / 3, -1 / 3, -1 / 3, 1.0]),
        (dr_grpo, [-0.25, -0.25, -0.25, 0.75]),
    ],
    ids=["grpo", "rloo", "dr_grpo"],
)
def test_advantages_of_a_group_equal_those_by_hand(rule: AdvantageRule, expected: list[float]) -> None:
    rewards, groups = np.array([0, 0, 0, 1], np.float32), np.array([7, 7, 7, 7], np.int32)
    given = rule(rewards, groups)
    np.testing.assert_allclose(given, expected, rtol=1e-6)
    assert given.dtype == np.float32


@pytest.mark.parametrize("rule", RULES)
def test_groups_are_compared_within_themselves_only(rule: AdvantageRule) -> None:
    alone = rule(np.array([1, 3], np.float32), np.array([0, 0], np.int32))
    mixed = rule(np.array([50, 1, 90, 3], np.float32), np.array([4, 9, 4, 9], np.int32))
    assert mixed[[1, 3]].tolist() == alone.tolist()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("reward", [0.1, -7.3, 1e6], ids=str)
def test_a_group_without_spread_gets_exactly_zero(rule: AdvantageRule, reward: float) -> None:
    # The computed mean of equal numbers may differ from them: 0.1 + 0.1 + 0.1 is not 0.3.
    rewards, groups = np.array([reward] * 3 + [0, 1]), np.array([0, 0, 0, 1, 1])
    given = rule(rewards, groups)
    assert given[:3].tolist() == [0, 0, 0]
    assert given[3:].all()
    assert without_spread(rewards, groups).tolist() == [True, True, True, False, False]


@pytest.mark.parametrize("rule", RULES)
def test_a_single_member_gets_zero_beside_groups_that_compare(rule: AdvantageRule) -> None:
    assert rule(np.array([5, 0, 1], np.float32), np.array([0, 1, 1], np.int32))[0] == 0


@pytest.mark.parametrize("rule", RULES)
def test_groups_without_two_scored_trajectories_are_refused(rule: AdvantageRule) -> None:
    with pytest.raises(BadBatch, match=r"no group has two scored trajectories.*run.groups\(\)"):
        rule(np.array([1, 0], np.float32), np.array([0, 1], np.int32))


@pytest.mark.parametrize("rule", RULES)
def test_no_trajectories_have_no_advantages(rule: AdvantageRule) -> None:
    assert rule(np.zeros(0, np.float32), np.zeros(0, np.int32)).shape == (0,)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("rewards", "groups", "message"),
    [
        ([0.0, 1.0], [0], "one reward and one group for each"),
        ([[0.0, 1.0]], [[0, 0]], "one reward and one group for each"),
        ([0.0, float("nan")], [0, 0], "reward 1 is nan: leave out trajectories without a reward"),
    ],
    ids=["lengths", "dimensions", "nan"],
)
def test_arrays_that_do_not_fit_are_refused(rule: Any, rewards: Any, groups: Any, message: str) -> None:
    with pytest.raises(BadBatch, match=message):
        rule(rewards, groups)


@pytest.mark.parametrize("rule", RULES)
@settings(deadline=None)
@given(case=rewards_and_groups)
def test_advantages_sum_to_zero_and_keep_the_order(rule: AdvantageRule, case: Any) -> None:
    rewards, groups = case
    advantages = rule(rewards, groups)
    for group in np.unique(groups):
        own = groups == group
        assert abs(float(advantages[own].sum())) <= 1e-4 * (1 + float(np.abs(rewards[own]).max()))
        by_reward = advantages[own][np.argsort(rewards[own], kind="stable")]
        assert (np.diff(by_reward) >= 0).all()


@settings(deadline=None)
@given(rewards_and_groups)
def test_rloo_compares_with_the_mean_of_the_others(case: Any) -> None:
    rewards, groups = case
    for index, advantage in enumerate(rloo(rewards, groups)):
        others = np.delete(rewards, index)[np.delete(groups, index) == groups[index]]
        expected = rewards[index] - others.mean() if len(others) else 0.0
        assert advantage == pytest.approx(expected, rel=1e-5, abs=1e-4)


@settings(deadline=None)
@given(rewards_and_groups)
def test_grpo_is_the_deviation_of_a_sample_as_torch_computes_it(case: Any) -> None:
    rewards, groups = case
    advantages = grpo(rewards, groups)
    for group in np.unique(groups):
        own = rewards[groups == group]
        if len(own) > 1:
            expected = (own - own.mean()) / (own.std(ddof=1) + 1e-3)
            np.testing.assert_allclose(advantages[groups == group], expected, rtol=1e-4, atol=1e-4)
