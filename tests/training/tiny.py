"""Rows and models for tests of token trees, small enough for a padded batch in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from runner.tasks import Task
from runner.training.rows import TrainingRow
from runner.trajectory import Trajectory

__all__ = [
    "EXACT_TOLERANCE",
    "GROUPS",
    "VOCABULARY_SIZE",
    "Rows",
    "gradients",
    "group",
    "in_its_own_dtype",
    "largest_difference",
    "llama",
    "on_one_thread",
    "row",
]

TRAJECTORY = Trajectory(id="episode", task=Task(id="task", prompt="Say"), index=0, agent="main", seed=0)
VOCABULARY_SIZE = 64
EXACT_TOLERANCE = 1e-9

Rows = list[TrainingRow]


def row(ids: Sequence[int], prompt: int, random: np.random.Generator) -> TrainingRow:
    """Return a row with a prompt and two sampled turns, with a tool's answer between them."""
    mask = np.arange(len(ids)) >= prompt
    mask[prompt + 3 : prompt + 5] = False
    return TrainingRow(
        trajectory=TRAJECTORY,
        segment=0,
        ids=np.array(ids, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, random.uniform(-6, -2, len(ids)), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turns=(),
    )


def group(prompt: int, lengths: Sequence[int], *, seed: int = 0, begin: Sequence[int] = ()) -> Rows:
    """Return rows that share `begin` and a prompt of `prompt` ids. Every second one also shares its first turn."""
    random = np.random.default_rng(seed)
    shared = [*begin, *random.integers(0, VOCABULARY_SIZE, prompt).tolist()]
    turn = random.integers(0, VOCABULARY_SIZE, 5).tolist()
    rows = []
    for number, length in enumerate(lengths):
        own = random.integers(0, VOCABULARY_SIZE, length).tolist()
        ids = shared + (turn + own if number % 2 else own)
        rows.append(row(ids, len(shared), random))
    return rows


def repeated(rows: Rows) -> Rows:
    """Return the rows, some of them twice with other log-probabilities, one of these cut short."""
    random = np.random.default_rng(9)
    first, last = rows[0].ids.tolist(), rows[-1].ids.tolist()
    return [*rows, row(first, 10, random), row(first, 10, random), row(last[:-4], 10, random)]


GROUPS: dict[str, Rows] = {
    "a group": group(12, [9, 14, 7, 11]),
    "rows twice and cut short": repeated(group(12, [9, 14, 7, 11])),
    "several groups that share nothing": group(12, [9, 8], seed=1) + group(7, [9, 14, 3], seed=2),
    "several groups with one system prompt": group(5, [9, 8], seed=1, begin=range(6))
    + group(7, [9, 14, 3], seed=2, begin=range(6)),
    "one row": group(12, [9]),
}


def llama(*, attention: str = "sdpa", kv_heads: int = 4, dtype: str = "float64", **settings: Any) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        vocab_size=VOCABULARY_SIZE,
        initializer_range=0.4,  # large, so that attention matters
        attn_implementation=attention,
        **settings,
    )
    return in_its_own_dtype(transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)))


def in_its_own_dtype(model: Any) -> Any:
    """Replace the model's norms by torch's: the norms of transformers compute in float32 for any model dtype."""
    import torch

    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = torch.nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon, dtype=model.dtype)
            model.set_submodule(name, norm)
    return model


def gradients(model: Any, loss: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Return the result of `loss`, and its gradients."""
    model.zero_grad(set_to_none=True)
    return loss(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def largest_difference(first: dict[str, Any], second: dict[str, Any]) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def on_one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Use one thread: small models wait for their threads longer than they compute, but the real model does not."""
    import torch

    threads = torch.get_num_threads()
    if request.node.get_closest_marker("engine") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
