"""Patches for vLLM's CPU workers: grammar masks, rotary embeddings, routers, seeds and LoRA kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = [
    "masks",
    "patch_bitmasks",
    "patch_generators",
    "patch_lora_kernels",
    "patch_rotary_embeddings",
    "patch_routers",
    "rewinding",
]

WORD_BITS = 32


def patch_bitmasks() -> None:
    """Patch xgrammar in this process, so that masks do not write past the end of a vocabulary.

    xgrammar's CPU kernel also masks the unused bits after the last id if the size of a vocabulary is not a multiple of
    32. It then forbids the first id of the next row, or corrupts the worker's memory (seen with xgrammar 0.2.8). With
    the patch these bits count as allowed.
    """
    import xgrammar

    apply = xgrammar.apply_token_bitmask_inplace
    if hasattr(apply, "fills"):
        return

    @functools.wraps(apply)
    def patched(logits: Any, bitmask: Any, **named: Any) -> None:
        if logits.device.type == "cpu":
            _fill(bitmask, logits.shape[-1])
        apply(logits, bitmask, **named)

    vars(patched)["fills"] = True
    xgrammar.apply_token_bitmask_inplace = patched


def _fill(bitmask: Any, size: int) -> None:
    whole, ids = divmod(size, WORD_BITS)
    if ids and whole < bitmask.shape[-1]:
        bitmask[..., whole] |= -1 << ids
        whole += 1
    bitmask[..., whole:] = -1


def patch_rotary_embeddings() -> None:
    """Patch the rotary embeddings of this process to rotate every head. Call this before the model is created.

    In a query of shape [ids, heads, size], vLLM's CPU kernel (seen with 0.32.0) reads the dimension of heads as the
    dimension of ids, and rotates by wrong positions. Multi-head latent attention (DeepSeek V2 and V3) has queries of
    this shape.
    """
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


def patch_routers() -> None:
    """Patch the routers of this process to choose experts by their biased scores where experts have no groups.

    Without groups, vLLM's CPU router (seen with 0.32.0) ignores the bias, so Ernie 4.5 computes with wrong experts, and
    new values of its bias have no effect. The patch uses one group of all experts, with which the bias is applied.
    """
    from vllm.model_executor.layers.fused_moe.router import cpu_router

    unpatched = cpu_router.CPURouter._compute_routing
    if hasattr(unpatched, "biased"):
        return

    @functools.wraps(unpatched)
    def patched(self: Any, hidden_states: Any, router_logits: Any, *arguments: Any, **named: Any) -> tuple[Any, Any]:
        without_groups = not self.use_grouped_topk and self.custom_routing_function is None
        known = self.scoring_func in ("softmax", "sigmoid")
        if self.e_score_correction_bias is None or not (without_groups and known):
            routing: tuple[Any, Any] = unpatched(self, hidden_states, router_logits, *arguments, **named)
            return routing
        grouped: tuple[Any, Any] = cpu_router._grouped_topk(
            gating_output=router_logits,
            topk=self.top_k,
            renormalize=self.renormalize,
            num_expert_group=1,
            topk_group=1,
            scoring_func=self.scoring_func,
            routed_scaling_factor=self.routed_scaling_factor,
            e_score_correction_bias=self.e_score_correction_bias,
        )
        return grouped

    vars(patched)["biased"] = True
    cpu_router.CPURouter._compute_routing = patched


def patch_generators() -> None:
    """Patch vLLM in this process, so that requests with a seed get CPU generators that can be reset.

    After each chunk of a prompt but the last, vLLM samples an id, drops it, and resets the generator by an offset. Only
    generators of GPUs have an offset. A CPU generator raises an error, which ends the engine (seen with vLLM 0.32).
    """
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    begin = CachedRequestState.__post_init__
    if hasattr(begin, "rewinds"):
        return

    @functools.wraps(begin)
    def patched(state: Any) -> None:
        begin(state)
        if state.generator is not None and state.generator.device.type == "cpu":
            state.generator = rewinding(state.generator.initial_seed(), state.output_token_ids)

    vars(patched)["rewinds"] = True
    CachedRequestState.__post_init__ = patched


def rewinding(seed: int, sampled: list[int]) -> Any:
    """Return a CPU generator that vLLM can reset.

    A reset restores the seed while `sampled`, the list of the turn's sampled ids, is empty. After that a reset has no
    effect: a preempted turn, computed again from its prompt and its sampled ids, continues with new random numbers.
    """
    generator = _type()(device="cpu")
    generator.manual_seed(seed)
    generator.sampled = sampled
    return generator


@functools.cache
def _type() -> Any:
    import torch

    class Rewinding(torch.Generator):  # type: ignore[misc]  # torch is not typed here
        sampled: list[int]

        def get_offset(self) -> int:
            return 0

        def set_offset(self, offset: int) -> None:
            if not self.sampled:
                self.manual_seed(self.initial_seed())

    return Rewinding


_KERNELS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")


def patch_lora_kernels() -> bool:
    """Patch the LoRA kernels of this process if needed; return whether they are correct now.

    vLLM marks an id without an adapter by the index -1. Its GPU kernels skip such ids; its CPU kernels use -1 as an
    index and apply the adapter of the last slot: https://github.com/vllm-project/vllm/pull/48421.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    if not masks(lora_ops):
        for name in _KERNELS:
            masked = _masked(getattr(lora_ops, name))
            for module in (lora_ops, punica_cpu):  # the second module has imported the kernels by name
                setattr(module, name, masked)
    return masks(lora_ops) and masks(punica_cpu)


def masks(kernels: Any) -> bool:
    """Return whether the kernels in a module skip ids without an adapter."""
    import torch

    ones, index = torch.ones(1, 2), torch.tensor([-1])
    given = torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2)
    kernels.bgmv_shrink(ones, torch.ones(2, 1, 2, 2), given[0], index, 1.0)
    kernels.bgmv_expand(ones, torch.ones(2, 1, 2, 2), given[1], index, True)
    kernels.bgmv_expand_slice(ones, torch.ones(2, 1, 2, 2), given[2], index, 0, 2, True)
    return not any(output.any() for output in given)


def _masked(kernel: Callable[..., None]) -> Callable[..., None]:
    """Return a kernel that uses zeros as the inputs of ids without an adapter, so that their results are zero."""
    import torch

    @functools.wraps(kernel)
    def masked(inputs: Any, weights: Any, output: Any, indices: Any, *rest: Any, **named: Any) -> None:
        has = (indices >= 0).unsqueeze(1)
        kernel(torch.where(has, inputs, torch.zeros_like(inputs)), weights, output, indices, *rest, **named)

    return masked
