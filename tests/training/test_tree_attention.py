"""Attention in blocks: the ids that each id attends to, the padded batch's gradients, and sdpa for other rows."""

from __future__ import annotations

import numpy as np
import pytest

from runner.errors import BadModel
from runner.training.tree import TokenTree
from tests.training.test_tree_gradients import padded_loss, tree_loss
from tests.training.tiny import (
    EXACT_TOLERANCE,
    GROUPS,
    VOCABULARY_SIZE,
    Rows,
    gradients,
    largest_difference,
    llama,
    on_one_thread,
)

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from runner.training import tree_attention  # noqa: E402  # it imports torch
from runner.training.tree_attention import TREE_ATTENTION  # noqa: E402  # it imports torch
from runner.training.tree_torch import tree_difference, tree_logits  # noqa: E402  # it imports torch

one_thread = pytest.fixture(autouse=True)(on_one_thread)


@pytest.fixture(params=GROUPS.values(), ids=list(GROUPS))
def rows(request: pytest.FixtureRequest) -> Rows:
    return list(request.param)


@pytest.fixture(params=[1, 7, 256])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(tree_attention, "_BLOCK_SIZE", request.param)
    return int(request.param)


def test_a_block_looks_at_what_its_nodes_see_and_at_nothing_else(rows: Rows, block: int) -> None:
    tree = TokenTree.of(rows)
    sees = tree.mask()
    pieces = list(tree_attention._blocks(torch.from_numpy(tree.leave.astype(np.int64))))
    assert np.concatenate([np.arange(len(tree))[queries] for queries, _, _ in pieces]).tolist() == [*range(len(tree))]
    for queries, nodes, mask in pieces:
        expected = np.zeros_like(sees[queries])
        expected[:, nodes.numpy()] = mask[0, 0].numpy()
        assert np.array_equal(expected, sees[queries])
        assert set(nodes.tolist()) == set(np.flatnonzero(sees[queries].any(0)).tolist())


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_loss_and_every_gradient_are_those_of_the_padded_batch(rows: Rows, block: int, kv_heads: int) -> None:
    model = llama(kv_heads=kv_heads)
    expected, padded = gradients(model, lambda: padded_loss(model, rows))
    model.set_attn_implementation(TREE_ATTENTION)
    loss, tree = gradients(model, lambda: tree_loss(model, rows, nodes=10_000))
    assert loss == pytest.approx(expected, abs=EXACT_TOLERANCE)
    assert largest_difference(padded, tree) < EXACT_TOLERANCE
    assert max(float(gradient.abs().max()) for gradient in padded.values()) > 1e-3


def test_gradients_stay_the_same_under_checkpointing(block: int) -> None:
    rows, model = GROUPS["a group"], llama(attention=TREE_ATTENTION)
    plain, expected = gradients(model, lambda: tree_loss(model, rows, nodes=10_000))
    model.train()
    model.gradient_checkpointing_enable()
    loss, checkpointed = gradients(model, lambda: tree_loss(model, rows, nodes=10_000))
    assert loss == pytest.approx(plain, abs=EXACT_TOLERANCE)
    assert largest_difference(expected, checkpointed) < EXACT_TOLERANCE


def test_model_with_tree_attention_computes_trees_exactly(rows: Rows, block: int) -> None:
    assert tree_difference(llama(attention=TREE_ATTENTION), TokenTree.of(rows)) < EXACT_TOLERANCE


def test_tree_attention_under_autocast_is_as_close_as_sdpa(block: int) -> None:
    tree = TokenTree.of(GROUPS["a group"])
    with torch.no_grad():
        exact = tree_logits(llama(dtype="float32"), tree)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (
            float((tree_logits(llama(attention=each, dtype="float32"), tree).float() - exact).abs().max())
            for each in (TREE_ATTENTION, "sdpa")
        )
    assert 0 < ours < 2 * theirs


@pytest.mark.parametrize("change", ["softcap", "s_aux", "position_bias"])
def test_layer_with_changed_scores_is_refused(change: str) -> None:
    scores, leave = torch.zeros(1, 2, 3, 4), torch.tensor([[[[3, 3, 3]]]])
    with pytest.raises(BadModel, match=f"Module changes its scores by {change}, .* attn_implementation='eager'"):
        tree_attention.tree_attention(torch.nn.Module(), scores, scores, scores, leave, **{change: torch.ones(2)})


@pytest.mark.parametrize("change", ["softcap", "s_aux"])
def test_layer_with_changed_scores_is_refused_without_a_tree_too(change: str) -> None:
    scores = torch.zeros(1, 2, 3, 4)
    with pytest.raises(BadModel, match=f"Module changes its scores by {change}"):
        tree_attention.tree_attention(torch.nn.Module(), scores, scores, scores, None, **{change: torch.ones(2)})


def test_int64_mask_that_is_not_of_a_tree_is_passed_to_sdpa() -> None:
    scores = torch.zeros(1, 2, 3, 4)
    with pytest.raises(RuntimeError, match="dtype"):
        tree_attention.tree_attention(
            torch.nn.Module(), scores, scores, scores, torch.ones(1, 1, 3, 3, dtype=torch.int64)
        )


def test_batch_without_a_tree_is_computed_as_by_sdpa() -> None:
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY_SIZE, (2, 9)))
    padded = torch.ones_like(ids)
    padded[0, 6:] = 0
    ours, theirs = llama(attention=TREE_ATTENTION, kv_heads=2), llama(kv_heads=2)
    for mask in (None, padded):
        expected = theirs(input_ids=ids, attention_mask=mask).logits
        assert torch.equal(ours(input_ids=ids, attention_mask=mask).logits, expected)
    changed = ids.clone()
    changed[0, 7] = (ids[0, 7] + 1) % VOCABULARY_SIZE  # no id attends to padding
    seen = ours(input_ids=changed, attention_mask=padded).logits[0, :6]
    assert torch.equal(seen, expected[0, :6])
