"""A model on token trees: logits, loss and all gradients are the same as for the padded batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.training.tree import TokenTree
from tests.training.tiny import EXACT_TOLERANCE, GROUPS, Rows, gradients, largest_difference, llama, on_one_thread, row

pytestmark = [pytest.mark.slow, pytest.mark.sample_cases(5)]

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from runner.training.tree_torch import (  # noqa: E402  # imports torch, which the tests need
    tree_difference,
    tree_inputs,
    tree_logits,
    tree_logprobs,
)

CLOSE = {
    "sdpa": EXACT_TOLERANCE,
    "eager": 1e-4,
}  # transformers' eager attention computes its softmax in float32 for any model dtype

one_thread = pytest.fixture(autouse=True)(on_one_thread)


@pytest.fixture(params=GROUPS)
def rows(request: pytest.FixtureRequest) -> Rows:
    return GROUPS[request.param]


def padded_logits(model: Any, rows: Rows) -> Any:
    """Return the logits of one padded batch, shape [rows, longest, vocabulary]."""
    longest = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.int64), torch.zeros(len(rows), longest, dtype=torch.int64)
    for index, one in enumerate(rows):
        ids[index, : len(one)] = torch.from_numpy(one.ids)
        mask[index, : len(one)] = 1
    return model(input_ids=ids, attention_mask=mask, use_cache=False).logits


def padded_logprobs(model: Any, rows: Rows) -> Any:
    """Return the log-probability of each trained id of each row, as in a padded batch, shape [terms]."""
    logprobs = padded_logits(model, rows).log_softmax(-1)
    return torch.stack(
        [
            logprobs[index, position - 1, one.ids[position]]
            for index, one in enumerate(rows)
            for position in np.flatnonzero(one.loss_mask)
        ]
    )


def clipped_loss(new: Any, old: np.ndarray[Any, Any], advantages: np.ndarray[Any, Any]) -> Any:
    """Return the sum of PPO's clipped terms."""
    advantage = torch.from_numpy(advantages).to(new.dtype)
    ratio = (new - torch.from_numpy(old).to(new.dtype)).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()


def advantages_of(rows: Rows) -> np.ndarray[Any, Any]:
    return np.linspace(-1.5, 2.0, len(rows))


def padded_loss(model: Any, rows: Rows) -> float:
    """Return the loss of the padded batch, and add its gradient to the model's."""
    old = np.concatenate([one.logprobs[one.loss_mask] for one in rows])
    advantages = np.repeat(advantages_of(rows), [one.loss_mask.sum() for one in rows])
    loss = clipped_loss(padded_logprobs(model, rows), old, advantages) / len(old)
    loss.backward()
    return float(loss.detach())


def tree_loss(model: Any, rows: Rows, *, nodes: int, logits_of: Callable[..., Any] = tree_logits) -> float:
    """Return the loss of token trees, one after the other, and add its gradient to the model's."""
    trees = TokenTree.packs(rows, nodes=nodes)
    total, count = 0.0, sum(len(tree.terms) for tree in trees)
    for tree in trees:
        new = tree_logprobs(logits_of(model, tree), tree)
        loss = clipped_loss(new, tree.terms.logprobs, advantages_of(rows)[tree.terms.row]) / count
        loss.backward()
        total += float(loss.detach())
    return total


@pytest.mark.parametrize(("attention", "kv_heads"), [("sdpa", 4), ("sdpa", 2), ("eager", 1)])
def test_the_logits_at_every_position_are_the_padded_ones(rows: Rows, attention: str, kv_heads: int) -> None:
    model = llama(attention=attention, kv_heads=kv_heads)
    padded, tree = padded_logits(model, rows), TokenTree.of(rows)
    logits = model(**tree_inputs(tree, torch.float64), use_cache=False).logits[0]
    for one, path, expected in zip(rows, tree.row_nodes, padded, strict=True):
        assert (logits[torch.from_numpy(path)] - expected[: len(one)]).abs().max() < CLOSE[attention]


@pytest.mark.parametrize(
    ("attention", "kv_heads", "nodes"),
    [("sdpa", 4, 10_000), ("sdpa", 2, 10_000), ("sdpa", 2, 40), ("eager", 1, 10_000)],
    ids=["one tree", "grouped queries", "packs", "eager"],
)
def test_loss_and_every_gradient_are_those_of_the_padded_batch(
    rows: Rows, attention: str, kv_heads: int, nodes: int
) -> None:
    model = llama(attention=attention, kv_heads=kv_heads)
    expected, padded = gradients(model, lambda: padded_loss(model, rows))
    loss, tree = gradients(model, lambda: tree_loss(model, rows, nodes=nodes))
    assert loss == pytest.approx(expected, abs=CLOSE[attention])
    assert largest_difference(padded, tree) < CLOSE[attention]
    assert max(float(gradient.abs().max()) for gradient in padded.values()) > 1e-3


def test_tied_embeddings_have_the_padded_gradient() -> None:
    rows, model = GROUPS["a group"], llama(tie_word_embeddings=True)
    _, padded = gradients(model, lambda: padded_loss(model, rows))
    _, tree = gradients(model, lambda: tree_loss(model, rows, nodes=10_000))
    assert "lm_head.weight" not in padded
    assert largest_difference(padded, tree) < EXACT_TOLERANCE


def test_gradients_stay_the_padded_ones_under_checkpointing() -> None:
    rows, model = GROUPS["a group"], llama().train()
    _, padded = gradients(model, lambda: padded_loss(model, rows))
    model.gradient_checkpointing_enable()
    _, tree = gradients(model, lambda: tree_loss(model, rows, nodes=10_000))
    assert largest_difference(padded, tree) < EXACT_TOLERANCE


def test_float32_is_as_close_as_float32_is() -> None:
    rows, model = GROUPS["rows twice and cut short"], llama(dtype="float32")
    _, padded = gradients(model, lambda: padded_loss(model, rows))
    _, tree = gradients(model, lambda: tree_loss(model, rows, nodes=10_000))
    assert largest_difference(padded, tree) < 1e-4


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("attention_mask", lambda tree: torch.ones(len(tree), len(tree)).tril().bool()[None, None]),
        ("position_ids", lambda tree: torch.arange(len(tree))[None]),
    ],
    ids=["causal mask only", "positions counted through"],
)
def test_a_wrong_mask_or_position_would_be_seen(name: str, wrong: Callable[[TokenTree], Any]) -> None:
    def wrong_logits(model: Any, tree: TokenTree) -> Any:
        inputs = {**tree_inputs(tree), name: wrong(tree)}
        return model(**inputs, use_cache=False).logits[0, torch.from_numpy(tree.logit_nodes)]

    rows, model = GROUPS["a group"], llama()
    _, padded = gradients(model, lambda: padded_loss(model, rows))
    _, tree = gradients(model, lambda: tree_loss(model, rows, nodes=10_000, logits_of=wrong_logits))
    assert largest_difference(padded, tree) > 1e-3


# --- the demo model, whole in whole sweeps


def answers(folder: Path) -> Rows:
    """Return eight answers of different lengths to one prompt of 300 ids."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    system = " ".join(
        f"Tool {number} takes two numbers, a and b, and returns a + {number} * b." for number in range(40)
    )
    prompt = tokenizer.encode(system, add_special_tokens=False).ids[:300]
    said = [
        f"I call tool {number}. " + f"The sum of {number} and 17 is {number + 17}. " * number for number in range(1, 9)
    ]
    random = np.random.default_rng(0)
    return [row(prompt + tokenizer.encode(text, add_special_tokens=False).ids, len(prompt), random) for text in said]


@pytest.mark.whole
@pytest.mark.slow
def test_tree_of_eight_answers_keeps_results_of_the_demo_model(small_model_folder: Path) -> None:
    rows = answers(small_model_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(small_model_folder, dtype=torch.float32).eval()
    tree = TokenTree.of(rows)
    assert tree_difference(model, tree) < 1e-3
    assert tree.saving.ratio > 2, str(tree.saving)
