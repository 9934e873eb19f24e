"""Corrections of ratios, each compared with a loop over single ids, in padded, packed and forked batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner import BadBatch, BadOption, Group, Sampling
from runner.options import Constraint, ConstraintKind
from runner.training import Mismatch, TrainingBatch, icepop, mismatch, ratios, sequence_mask, tis
from tests.training.making import group, groups, made, prompt, said

Lay = Callable[[list[Group]], TrainingBatch]


def padded(given: list[Group]) -> TrainingBatch:
    return TrainingBatch.padded(given, pad_id=0)


def packed(given: list[Group]) -> TrainingBatch:
    longest = max((len(s.log) for g in given for t in g.trajectories for s in t.segments), default=1)
    return TrainingBatch.packed(given, pad_id=0, length=2 * max(longest, 1))


LAYOUTS = pytest.mark.parametrize("lay", [padded, packed])


def forked() -> list[Group]:
    """Return a trajectory of three segments, two of which share a beginning, and a trajectory of one segment."""
    first = made(
        [prompt(1, 2), said(3, 4), prompt(5), said(6)],
        [prompt(1, 2, 3, 4, 7), said(8, 9, version="1")],
        [prompt(11), said(12, version="1")],
        id="t0#0",
        reward=1.0,
    )
    return [group(first, made([prompt(1), said(2, 3, version="2")], id="t0#1", reward=0.0))]


def places(batch: TrainingBatch) -> Iterator[tuple[int, int, int]]:
    """Return sequence, column and trajectory of each trained id, found by iteration over the rows."""
    width = batch.loss_mask.shape[1]
    for row, start, owner in zip(batch.rows, batch.layout.starts.tolist(), batch.trajectory_of.tolist(), strict=True):
        for offset in range(len(row)):
            if row.loss_mask[offset]:
                yield (start + offset) // width, (start + offset) % width, owner


def moved(batch: TrainingBatch, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return log-probabilities near the sampled ones, and arbitrary values where nothing is trained."""
    noise = np.random.default_rng(seed).normal(0, 0.7, batch.logprobs.shape)
    return np.where(batch.loss_mask, batch.logprobs + noise, np.nan).astype(np.float32)


@LAYOUTS
@given(played=groups(), seed=st.integers(0, 99))
def test_ratio_is_that_of_each_trained_id(lay: Lay, played: Any, seed: int) -> None:
    batch = lay([*forked(), *played])
    logprobs = moved(batch, seed)
    expected = np.zeros(batch.loss_mask.shape)
    for sequence, column, _ in places(batch):
        expected[sequence, column] = math.exp(
            float(logprobs[sequence, column]) - float(batch.logprobs[sequence, column])
        )
    got = ratios(logprobs, batch)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_the_same_policy_has_ratio_one() -> None:
    batch = padded(forked())
    assert (ratios(batch.logprobs, batch) == batch.loss_mask).all()


@pytest.mark.parametrize("function", [tis, icepop], ids=["tis", "icepop"])
def test_truncation_changes_only_values_outside_the_bounds(function: Any) -> None:
    ratio = np.array([[0.0, 0.4, 0.5, 1.0, 2.0, 2.1, 5.0, 5.1]], np.float32)
    expected = {
        tis: [0.0, 0.4, 0.5, 1.0, 2.0, 2.0, 2.0, 2.0],
        icepop: [0.0, 0.0, 0.5, 1.0, 2.0, 2.1, 5.0, 0.0],
    }[function]
    np.testing.assert_allclose(function(ratio), [expected])


@LAYOUTS
@pytest.mark.parametrize("mean", ["geometric", "product"])
@given(played=groups(), seed=st.integers(0, 99))
def test_sequence_mask_is_by_trajectory_whatever_its_rows(lay: Lay, mean: Any, played: Any, seed: int) -> None:
    batch = lay([*forked(), *played])
    ratio = ratios(moved(batch, seed), batch)
    logs: dict[int, list[float]] = {}
    for sequence, column, owner in places(batch):
        logs.setdefault(owner, []).append(math.log(float(ratio[sequence, column])))
    expected = np.zeros(batch.loss_mask.shape)
    for sequence, column, owner in places(batch):
        total = sum(logs[owner]) / (len(logs[owner]) if mean == "geometric" else 1)
        expected[sequence, column] = 0.8 <= math.exp(total) <= 1.25
    np.testing.assert_array_equal(sequence_mask(ratio, batch, least=0.8, most=1.25, mean=mean), expected)


def figures(values: list[float]) -> dict[str, float]:
    return {
        "ids": len(values),
        "effective": sum(values) ** 2 / sum(value**2 for value in values),
        "mean_gap": sum(abs(math.log(value)) for value in values) / len(values),
        "kl": sum(value - 1 - math.log(value) for value in values) / len(values),
        "largest": max(values),
        "clipped": sum(not 0.5 <= value <= 2 for value in values) / len(values),
    }


def assert_figures(got: Mismatch, values: list[float]) -> None:
    for name, value in figures(values).items():
        assert getattr(got, name) == pytest.approx(value, rel=1e-5), name


@LAYOUTS
@given(played=groups(), seed=st.integers(0, 99))
def test_mismatch_is_counted_for_each_version(lay: Lay, played: Any, seed: int) -> None:
    batch = lay([*forked(), *played])
    ratio = ratios(moved(batch, seed), batch)
    by_version: dict[str, list[float]] = {}
    for sequence, column, _ in places(batch):
        version = batch.versions[batch.weight_versions[sequence, column]]
        by_version.setdefault(version, []).append(float(ratio[sequence, column]))
    got = mismatch(ratio, batch)
    assert_figures(got, [value for values in by_version.values() for value in values])
    assert set(got.by_version) == set(by_version)
    for version, values in by_version.items():
        assert_figures(got.by_version[version], values)


def test_equal_policies_have_no_mismatch() -> None:
    batch = padded(forked())
    got = mismatch(ratios(batch.logprobs, batch), batch)
    assert (got.ids, got.effective, got.mean_gap, got.kl, got.clipped) == (8, 8.0, 0.0, 0.0, 0.0)


@LAYOUTS
def test_torch_and_numpy_agree_without_a_gradient(lay: Lay) -> None:
    batch = lay(forked())
    logprobs = np.where(batch.loss_mask, moved(batch, 3), 0)
    tensor = torch.tensor(logprobs, requires_grad=True)
    ratio, weights = ratios(logprobs, batch), ratios(tensor, batch)
    assert isinstance(weights, torch.Tensor)
    assert (weights.dtype, weights.requires_grad) == (torch.float32, False)
    functions: list[Callable[[Any], Any]] = [tis, icepop, lambda given: sequence_mask(given, batch)]
    for function in functions:
        got = function(weights)
        assert isinstance(got, torch.Tensor)
        np.testing.assert_allclose(got.numpy(), function(ratio), rtol=1e-6)
    assert mismatch(weights, batch) == mismatch(ratio, batch)


def test_inexact_batch_is_refused_with_its_reason() -> None:
    cut = made([prompt(1), said(2)], sampling=Sampling(top_p=0.9).over(Sampling.defaults()))
    with pytest.raises(BadBatch, match=r"not exact: top_p=0.9 \(1 turn\)"):
        ratios(np.zeros((1, 2)), TrainingBatch.padded([cut], pad_id=0))
    constrained = made([prompt(1), said(2)])
    constrained.turns[0].constraint = Constraint(ConstraintKind.REGEX, "a")
    with pytest.raises(BadBatch, match=r"a grammar without its masks .*with_masks\(grammar\)"):
        ratios(np.zeros((1, 2)), TrainingBatch.padded([constrained], pad_id=0))


def test_unusable_values_are_refused_by_name() -> None:
    batch = padded(forked())
    with pytest.raises(BadBatch, match=r"logprobs of shape \(2,\)"):
        ratios(np.zeros(2), batch)
    with pytest.raises(BadBatch, match="a trained id of episode 't0#0' of agent 'main' is -inf"):
        ratios(np.where(batch.loss_mask, -np.inf, 0), batch)
    with pytest.raises(BadOption, match="least=2, most=1"):
        icepop(np.ones((1, 1)), least=2, most=1)
    with pytest.raises(BadOption, match="mean='median': give one of geometric, product"):
        sequence_mask(ratios(batch.logprobs, batch), batch, mean="median")  # type: ignore[arg-type]  # wrong on purpose
