"""Log-probabilities under masks in torch: the engine's arithmetic with less work, and the same gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runner.errors import BadBatch
from runner.training.token_masks import UNCONSTRAINED_INDEX, TokenMasks

torch = pytest.importorskip("torch")
xgrammar = pytest.importorskip("xgrammar")

from runner.training.grammar_torch import (  # noqa: E402  # imports torch, which the tests need
    apply_bitmask,
    head_logprobs,
    masked_logprobs,
)

VOCABULARY_SIZE, WIDTH, POSITIONS = 333, 8, 40


def masks_of(*allowed: list[int] | None, vocabulary: int = VOCABULARY_SIZE) -> TokenMasks:
    """Return one position for each list of allowed ids; None allows all."""
    table = np.zeros((len(allowed), -(-vocabulary // 32)), dtype=np.uint32)
    for row, ids in zip(table, allowed, strict=True):
        for token_id in ids or ():
            row[token_id // 32] |= np.uint32(1 << token_id % 32)
    index = [place if ids is not None else UNCONSTRAINED_INDEX for place, ids in enumerate(allowed)]
    return TokenMasks(table.view(np.int32), np.array(index, dtype=np.int32), vocabulary)


class Case:
    """Positions of every kind in any order: free, forced, with few ids and with many. Targets are allowed ids."""

    def __init__(self, kinds: str = "free forced few many") -> None:
        random = np.random.default_rng(0)
        sizes = {"free": VOCABULARY_SIZE, "forced": 1, "few": 6, "many": 250}
        chosen = [kinds.split()[place % len(kinds.split())] for place in random.permutation(POSITIONS)]
        allowed = [random.choice(VOCABULARY_SIZE, sizes[kind], replace=False).tolist() for kind in chosen]
        self.masks = masks_of(*(None if kind == "free" else ids for kind, ids in zip(chosen, allowed, strict=True)))
        self.targets = torch.tensor([ids[0] for ids in allowed])
        self.temperature = torch.tensor(random.choice([0.5, 0.7, 1.0], POSITIONS))
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(POSITIONS, WIDTH, generator=generator, dtype=torch.float64)
        self.weight = torch.randn(VOCABULARY_SIZE, WIDTH, generator=generator, dtype=torch.float64)
        self.bias = torch.randn(VOCABULARY_SIZE, generator=generator, dtype=torch.float64)
        self.logits = self.hidden @ self.weight.T + self.bias

    def expected(self, logits: Any) -> Any:
        """Compute the log-probabilities in the plainest way."""
        allowed = torch.from_numpy(self.masks.unpacked())
        logprobs = (logits.masked_fill(~allowed, -torch.inf) / self.temperature[:, None]).log_softmax(-1)
        return logprobs.gather(-1, self.targets[:, None])[:, 0]


KINDS = ["free", "forced", "few", "many", "free few", "free forced few many"]


@pytest.mark.parametrize("kinds", KINDS)
def test_log_probabilities_are_those_of_masking_all_logits(kinds: str) -> None:
    case = Case(kinds)
    expected = case.expected(case.logits)
    assert expected.isfinite().all()
    of_logits = masked_logprobs(case.logits, case.targets, case.masks, case.temperature)
    of_head = head_logprobs(case.hidden, case.weight, case.targets, case.masks, case.temperature, bias=case.bias)
    torch.testing.assert_close(of_logits, expected)
    torch.testing.assert_close(of_head, expected)


@pytest.mark.parametrize("kinds", KINDS)
def test_gradients_are_those_of_masking_all_logits(kinds: str) -> None:
    case = Case(kinds)
    inputs = [case.hidden, case.weight, case.bias]
    pull = torch.randn(POSITIONS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def gradients(logprobs: Any) -> Any:
        return torch.autograd.grad((logprobs * pull).sum(), inputs)

    for tensor in inputs:
        tensor.requires_grad_()
    logits = case.hidden @ case.weight.T + case.bias
    expected = gradients(case.expected(logits))
    logits = case.hidden @ case.weight.T + case.bias
    of_logits = gradients(masked_logprobs(logits, case.targets, case.masks, case.temperature))
    of_head = gradients(
        head_logprobs(case.hidden, case.weight, case.targets, case.masks, case.temperature, bias=case.bias)
    )
    for ours, theirs, reference in zip(of_logits, of_head, expected, strict=True):
        assert reference.isfinite().all()
        torch.testing.assert_close(ours, reference)
        torch.testing.assert_close(theirs, reference)


def test_bitmask_equals_xgrammars_and_keeps_the_logits() -> None:
    case = Case()
    logits = case.logits.float()
    before = logits.clone()
    bitmask = torch.from_numpy(np.array(case.masks.table))
    theirs = logits.clone()
    constrained = np.flatnonzero(case.masks.index != UNCONSTRAINED_INDEX)
    xgrammar.apply_token_bitmask_inplace(theirs, bitmask, vocab_size=VOCABULARY_SIZE, indices=constrained.tolist())
    ours = apply_bitmask(logits, case.masks, 0.7)
    assert torch.equal(ours, theirs / torch.tensor(0.7))
    assert torch.equal(logits, before)
    assert torch.equal(apply_bitmask(logits, masks_of(*[None] * POSITIONS)), before)


def test_forced_ids_have_log_probability_0_and_no_gradient() -> None:
    case = Case("forced")
    assert case.masks.forced.all()
    logits = case.logits.clone().requires_grad_()
    logprobs = masked_logprobs(logits, case.targets, case.masks, case.temperature)
    assert (logprobs == 0).all()
    (gradient,) = torch.autograd.grad(logprobs.sum(), logits)
    assert (gradient == 0).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_results_are_float32(dtype: str) -> None:
    case = Case()
    logits = case.logits.to(getattr(torch, dtype))
    logprobs = masked_logprobs(logits, case.targets, case.masks, 0.7)
    assert logprobs.dtype is torch.float32
    case.temperature = torch.full((POSITIONS,), 0.7)
    torch.testing.assert_close(logprobs, case.expected(logits.float()))
    assert apply_bitmask(logits, case.masks).dtype is torch.float32


def test_excluded_id_has_minus_infinity() -> None:
    masks = masks_of([3, 5], list(range(100)), [3])
    logits = torch.zeros(3, VOCABULARY_SIZE)
    assert (masked_logprobs(logits, [4, 100, 332], masks) == -torch.inf).all()
    assert masked_logprobs(logits, [5, 7, 3], masks).isfinite().all()


def test_no_positions_give_no_log_probabilities() -> None:
    masks = masks_of([3]).take([])
    assert masked_logprobs(torch.zeros(0, VOCABULARY_SIZE), [], masks).shape == (0,)


def test_the_masks_of_a_batch_are_chosen_by_its_loss_mask() -> None:
    case = Case()
    grid = TokenMasks(case.masks.table, case.masks.index.reshape(4, 10), VOCABULARY_SIZE)
    loss_mask = np.arange(POSITIONS).reshape(4, 10) % 3 == 0
    logits = case.logits.reshape(4, 10, VOCABULARY_SIZE)[loss_mask]
    targets, temperature = case.targets[loss_mask.ravel()], case.temperature[loss_mask.ravel()]
    logprobs = masked_logprobs(logits, targets, grid.take(loss_mask), temperature)
    torch.testing.assert_close(logprobs, case.expected(case.logits)[loss_mask.ravel()])


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((3, VOCABULARY_SIZE), r"masks of shape \(40,\) for 3 positions"),
        ((POSITIONS, 320), "masks of 333 ids for 320 log"),
    ],
    ids=["positions", "vocabulary"],
)
def test_masks_of_another_shape_are_refused(shape: tuple[int, int], said: str) -> None:
    case = Case()
    with pytest.raises(BadBatch, match=said):
        masked_logprobs(torch.zeros(shape), case.targets, case.masks)
    with pytest.raises(BadBatch, match=said):
        apply_bitmask(torch.zeros(shape), case.masks)
    with pytest.raises(BadBatch, match=said):
        head_logprobs(torch.zeros(shape[0], WIDTH), torch.zeros(shape[1], WIDTH), case.targets, case.masks)
