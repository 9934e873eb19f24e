"""Attention over token trees in blocks: a block of nodes attends only to itself and its ancestors."""

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
"""Value for `AutoModelForCausalLM.from_pretrained(..., attn_implementation=)`. Work and memory of a tree grow with
the number of attended nodes, summed over all nodes, and not with the square of the number of nodes. Masks that are not
a tree's are passed to sdpa.
"""

_BLOCK_SIZE = 256  # nodes: smaller blocks compute fewer masked scores, but need more calls
_CHANGES = ("softcap", "s_aux")  # changes of a layer's scores that sdpa ignores


def tree_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *, dropout: float = 0.0, **options: Any
) -> tuple[Any, None]:
    """Attention function of a layer, by transformers' interface.

    Args:
        module: the layer.
        query: shape [1, heads, nodes, width].
        key: shape [1, key-value heads, nodes, width].
        value: as `key`.
        attention_mask: a tree's `leave`, shape [1, 1, 1, nodes], int64. Any other mask is passed to sdpa.
        dropout: dropout of the attention weights.
        options: `scaling`, and options of sdpa.

    Returns:
        Output of shape [1, nodes, heads, width], and None for the weights.

    Raises:
        BadModel: the layer changes its scores in a way that this attention does not support.
    """
    is_tree = (
        attention_mask is not None and attention_mask.shape[:3] == (1, 1, 1) and attention_mask.dtype == torch.int64
    )
    names = (*_CHANGES, "position_bias") if is_tree else _CHANGES
    if changes := [name for name in names if options.get(name) is not None]:
        raise BadModel(
            f"{type(module).__name__} changes its scores by {' and '.join(changes)}, which block attention does "
            "not support: load the model with attn_implementation='eager'."
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
    """Yield each block of queries, the nodes that it attends to, and the mask, shape [1, 1, queries, nodes]."""
    every = torch.arange(len(leave), device=leave.device)
    for block in (slice(start, start + _BLOCK_SIZE) for start in range(0, len(leave), _BLOCK_SIZE)):
        ancestors = (leave[: block.start] > block.start).nonzero()[:, 0]
        queries = every[block]
        nodes = torch.cat([ancestors, queries])
        sees = (nodes <= queries[:, None]) & (queries[:, None] < leave[nodes])
        yield block, nodes, sees[None, None]


AttentionInterface.register(TREE_ATTENTION, tree_attention)
AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)
