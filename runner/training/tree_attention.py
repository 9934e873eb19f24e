"""Attention over token trees in blocks: a block of nodes looks at itself and its ancestors, and at nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from runner.errors import BadModel

__all__ = ["TREE_ATTENTION", "tree_attention"]

TREE_ATTENTION = "token_tree"
"""`AutoModelForCausalLM.from_pretrained(..., attn_implementation=TREE_ATTENTION)`: work and memory of a tree then grow
with its nodes times what each sees, not with the square of its nodes. Anything but a tree is computed as by sdpa."""

_BLOCK_SIZE = 256  # nodes: fewer look at less that they do not see, more are fewer calls
_CHANGES = ("softcap", "s_aux")  # what else a layer may ask of its scores, and sdpa leaves out


def tree_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *, dropout: float = 0.0, **options: Any
) -> tuple[Any, None]:
    """What a layer attends with: transformers' attention interface.

    Args:
        module: the layer.
        query: shape [1, heads, nodes, width].
        key: shape [1, key-value heads, nodes, width].
        value: as `key`.
        attention_mask: a tree's `leave`, shape [1, 1, 1, nodes], int64; any other is sdpa's.
        dropout: the dropout of the attention's weights.
        options: `scaling`, and what is sdpa's.

    Returns:
        Shape [1, nodes, heads, width], and no weights.
    """
    is_tree = (
        attention_mask is not None and attention_mask.shape[:3] == (1, 1, 1) and attention_mask.dtype == torch.int64
    )
    names = (*_CHANGES, "position_bias") if is_tree else _CHANGES
    if changes := [name for name in names if options.get(name) is not None]:
        raise BadModel(
            f"{type(module).__name__} changes its scores by {' and '.join(changes)}, which attention in blocks does "
            "not: load the model with attn_implementation='eager'."
        )
    if not is_tree:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, **options)
        return output, None
    times = query.shape[1] // key.shape[1]
    seen = []
    for block, nodes, sees in _blocks(attention_mask[0, 0, 0]):
        keys, values = (repeat_kv(each.index_select(2, nodes), times) for each in (key, value))
        seen.append(
            torch.nn.functional.scaled_dot_product_attention(
                query[:, :, block], keys, values, attn_mask=sees, dropout_p=dropout, scale=options.get("scaling")
            )
        )
    return torch.cat(seen, 2).transpose(1, 2), None


def _blocks(leave: Any) -> Iterator[tuple[slice, Any, Any]]:
    """Each block of queries, the nodes that any of them sees, and who sees which, shape [1, 1, queries, nodes]."""
    every = torch.arange(len(leave), device=leave.device)
    for block in (slice(start, start + _BLOCK_SIZE) for start in range(0, len(leave), _BLOCK_SIZE)):
        ancestors = (leave[: block.start] > block.start).nonzero()[:, 0]
        queries = every[block]
        nodes = torch.cat([ancestors, queries])
        sees = (nodes <= queries[:, None]) & (queries[:, None] < leave[nodes])
        yield block, nodes, sees[None, None]


AttentionInterface.register(TREE_ATTENTION, tree_attention)
AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)
