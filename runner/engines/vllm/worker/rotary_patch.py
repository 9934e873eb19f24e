"""Patch of vLLM's CPU workers: rotary embeddings rotate every head of a query with three dimensions.

vLLM's CPU kernel (seen with 0.32.0) takes the head dimension of a query of shape [ids, heads, size] for its ids, and
rotates by wrong positions. Multi-head latent attention (DeepSeek V2 and V3) passes such queries.
"""

from __future__ import annotations

from typing import Any

__all__ = ["patch_rotary_embeddings"]


def patch_rotary_embeddings() -> None:
    """Patch the rotary embeddings of this process; has to come before the model is created."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    unpatched = RotaryEmbedding.forward_cpu
    if hasattr(unpatched, "flattens"):
        return

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> tuple[Any, Any]:
        rotated, rotated_key = unpatched(self, positions, _flat(query), None if key is None else _flat(key))
        return rotated.view(query.shape), None if key is None else rotated_key.view(key.shape)

    vars(forward_cpu)["flattens"] = True
    RotaryEmbedding.forward_cpu = forward_cpu


def _flat(states: Any) -> Any:
    """Return states of shape [ids, heads, size] as [ids, heads * size]."""
    return states.flatten(1) if states.ndim > 2 else states
