"""Sampling masks and experts in batches: exact with the masks, not exact without them, computed over all ids."""

from __future__ import annotations

import math
import re
from typing import Any

import anyio
import numpy as np
import pytest

from runner import BadBatch, Group, Sampling, Trajectory
from runner.options import Constraint, ConstraintKind
from runner.testing import ScriptedEngine, play_many
from runner.tokens.side_data import RoutedExperts, SamplingMasks, SideData
from runner.training import TokenTree, TrainingBatch, ratios
from runner.training.sample_rows import InexactRows, sample_rows
from runner.training.token_masks import RecordedMasks
from tests.histories import Twice
from tests.playing import Plain
from tests.repository import DOCS
from tests.training.making import group, made, prompt, retried, said

torch = pytest.importorskip("torch")

VOCABULARY_SIZE = 40
TRUNCATED = Sampling(top_p=0.9, top_k=4, min_p=0.01, temperature=1.0).over(Sampling.defaults())


def logit(before: int, token_id: int) -> float:
    """Return the logit of an id after another one, in a model whose context is one id."""
    return math.sin(before * 1.7 + token_id * 0.9) * 2


def logprob(before: int, token_id: int, allowed: Any) -> float:
    """Return the log-probability of an id among the allowed ids, computed over all of them."""
    return logit(before, token_id) - math.log(sum(math.exp(logit(before, each)) for each in allowed))


def recorded(trajectory: Trajectory, *, experts: bool = False) -> Trajectory:
    """Return the trajectory with a mask for each sampled id, and the log-probabilities within these masks."""
    for turn in trajectory.turns:
        rows = [
            sorted({token_id, (token_id + 3) % VOCABULARY_SIZE, place}) for place, token_id in enumerate(turn.token_ids)
        ]
        side = SideData(SamplingMasks.of(rows))
        if experts:
            numbers = np.arange(2 * 3 * (turn.end - 1)).reshape(-1, 2, 3) % 64
            side.experts = RoutedExperts.of(numbers)
        turn.log.append_side(turn.start, side)
        for place, (token_id, row) in enumerate(zip(turn.token_ids, rows, strict=True)):
            before = turn.log.ids[turn.start + place - 1]
            turn.log.logprobs[turn.start + place] = logprob(before, token_id, row)
    return trajectory


def episodes(**settings: Any) -> Group:
    """Return a plain episode, one with a second segment, and one with a turn that was taken back."""
    one = made([prompt(1, 2), said(3, 4, 5), prompt(6), said(7)], id="t0#0", sampling=TRUNCATED, reward=1.0)
    two = made([prompt(1), said(8, 9)], [prompt(2, 3), said(10)], id="t0#1", sampling=TRUNCATED, reward=0.0)
    three = made([prompt(4), retried(5), prompt(6), said(11, 12)], id="t0#2", sampling=TRUNCATED, reward=0.5)
    return group(*(recorded(each, **settings) for each in (one, two, three)))


def batches(source: Any) -> list[TrainingBatch]:
    return [
        TrainingBatch.padded(source, pad_id=0),
        TrainingBatch.padded(source, pad_id=0, multiple_of=16),
        TrainingBatch.packed(source, length=16, pad_id=0),
    ]


@pytest.mark.parametrize("number", range(3))
def test_ratios_with_recorded_masks_are_one(number: int) -> None:
    batch = batches([episodes()])[number].with_masks(RecordedMasks(VOCABULARY_SIZE))
    assert batch.exact
    assert batch.masks is not None
    allowed = batch.masks.unpacked()
    own = np.zeros(batch.loss_mask.shape)
    for place in zip(*np.nonzero(batch.loss_mask), strict=True):
        before = int(batch.input_ids[place[0], place[1] - 1])
        own[place] = logprob(before, int(batch.input_ids[place]), np.flatnonzero(allowed[place]).tolist())
    assert np.allclose(ratios(own, batch)[batch.loss_mask], 1, atol=1e-5)
    assert batch.trained == 9


@pytest.mark.parametrize("number", range(3))
def test_truncation_without_applied_masks_stays_inexact(number: int) -> None:
    batch = batches([episodes()])[number]
    assert not batch.exact
    assert batch.inexact_reason == "min_p=0.01 (5 turns); top_k=4 (5 turns); top_p=0.9 (5 turns)"
    with pytest.raises(BadBatch, match=r"top_p=0\.9"):
        ratios(np.zeros(batch.loss_mask.shape), batch)


def test_one_turn_without_its_mask_keeps_the_reason() -> None:
    given = episodes()
    missing = given.trajectories[0].turns[1]
    del missing.log.side_data[missing.start]
    batch = TrainingBatch.padded([given], pad_id=0).with_masks(RecordedMasks(VOCABULARY_SIZE))
    assert batch.inexact_reason == "min_p=0.01 (1 turn); top_k=4 (1 turn); top_p=0.9 (1 turn)"


def test_penalties_are_inexact_with_masks_too() -> None:
    penalised = Sampling(top_p=0.9, presence_penalty=0.5).over(Sampling.defaults())
    trajectory = recorded(made([prompt(1), said(2, 3)], sampling=penalised))
    batch = TrainingBatch.padded([trajectory], pad_id=0).with_masks(RecordedMasks(VOCABULARY_SIZE))
    assert batch.inexact_reason == "presence_penalty=0.5 (1 turn)"


def test_recorded_masks_replace_those_of_a_grammar() -> None:
    trajectory = made([prompt(1), said(2, 3)])
    trajectory.turns[0].constraint = Constraint(ConstraintKind.REGEX, "x")
    batch = TrainingBatch.padded([trajectory], pad_id=0)
    with pytest.raises(BadBatch, match="under a grammar and has no sampling masks"):
        batch.with_masks(RecordedMasks(VOCABULARY_SIZE))
    recorded(trajectory)
    assert TrainingBatch.padded([trajectory], pad_id=0).with_masks(RecordedMasks(VOCABULARY_SIZE)).exact


def test_masks_of_a_token_tree_are_those_of_its_rows() -> None:
    batch = TrainingBatch.padded([episodes()], pad_id=0).with_masks(RecordedMasks(VOCABULARY_SIZE))
    (tree,) = TokenTree.packs(batch.rows, nodes=4096)
    masks = RecordedMasks(VOCABULARY_SIZE).masks_for_terms(batch.rows, tree.terms)
    assert batch.masks is not None
    allowed, of_terms = batch.masks.unpacked(), masks.unpacked()
    for term, (row, position) in enumerate(zip(tree.terms.row, tree.terms.position, strict=True)):
        assert (of_terms[term] == allowed[row, position]).all()


@pytest.mark.parametrize("rows", [[[3], [99]], [[1], [2]], [[3, -1], [4]]])
def test_mask_of_another_vocabulary_is_refused(rows: list[list[int]]) -> None:
    trajectory = made([prompt(1), said(3, 4)], sampling=TRUNCATED)
    turn = trajectory.turns[0]
    turn.log.append_side(turn.start, SideData(SamplingMasks.of(rows)))
    with pytest.raises(BadBatch, match=r"at sampled id \d+ \(the first is 0\), the sampling mask lacks"):
        TrainingBatch.padded([trajectory], pad_id=0).with_masks(RecordedMasks(VOCABULARY_SIZE))


# --- experts


@pytest.mark.parametrize("number", range(3))
def test_experts_stand_at_their_ids_in_every_layout(number: int) -> None:
    batch = batches([episodes(experts=True)])[number]
    experts = batch.routed_experts()
    assert experts.shape == (*batch.loss_mask.shape, 2, 3)
    for row, of_row in zip(batch.rows, batch.unpadded(experts), strict=True):
        expected = np.full((len(row), 2, 3), -1)
        for turn in row.turns:
            if (part := turn.routed_experts) is not None:
                expected[part.start : part.end] = part.numbers()
        assert (of_row == expected).all()
        assert (of_row[-1] == -1).all()
    assert (experts[~batch.attention_mask] == -1).all()


def test_experts_of_a_batch_without_any_are_refused() -> None:
    with pytest.raises(BadBatch, match="no turn has routed experts"):
        TrainingBatch.padded([episodes()], pad_id=0).routed_experts()


# --- rows for other trainers


def test_sample_rows_carry_masks_and_experts() -> None:
    counts = InexactRows()
    trajectory = episodes(experts=True).trajectories[0]
    (row,) = sample_rows(trajectory, counts=counts)
    assert row.sampling_masks is not None
    assert row.routed_experts is not None
    rows = row.sampling_masks.rows()
    assert [bool(each) for each in rows] == row.mask.tolist()
    assert all(one in each for one, each in zip(row.response_ids.tolist(), rows, strict=True) if each)
    assert len(row.routed_experts) == len(row.prompt_ids) + len(row.response_ids)
    assert not counts.turns
    (plain,) = sample_rows(made([prompt(1), said(2)], sampling=TRUNCATED), counts=counts)
    assert (plain.sampling_masks, plain.routed_experts) == (None, None)
    assert counts.turns == {"min_p=0.01": 1, "top_k=4": 1, "top_p=0.9": 1}


def test_played_episodes_are_exact_with_their_masks() -> None:
    engine = ScriptedEngine(["one", "two"], sampling_masks=True, routed_experts=(1, 2))
    played = play_many(Twice(), engine, sampling=Sampling(top_p=0.9))
    batch = TrainingBatch.padded(played, pad_id=0)
    assert not batch.exact
    assert batch.with_masks(RecordedMasks(engine.tokenizer.size)).exact
    assert batch.routed_experts().shape[2:] == (1, 2)


def test_page_makes_truncated_sampling_exact() -> None:
    page = (DOCS / "training-batches.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n([^`]*RecordedMasks.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {"TrainingBatch": TrainingBatch}
    exec(block, names)
    assert anyio.run(names["exact_with_masks"], Plain()).exact
