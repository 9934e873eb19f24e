"""Patch of vLLM's CPU workers: adapters do not change turns without an adapter.

vLLM marks an id without an adapter by the index -1. Its GPU kernels skip such ids; its CPU kernels use -1 as an index
and apply the adapter of the last slot: https://github.com/vllm-project/vllm/pull/48421.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["masks", "patch_lora_kernels"]

_KERNELS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")


def patch_lora_kernels() -> bool:
    """Patch the kernels of this process if needed; return whether they are correct now."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    if not masks(lora_ops):
        for name in _KERNELS:
            masked = _masked(getattr(lora_ops, name))
            for module in (lora_ops, punica_cpu):  # the second imported them by name
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
    """Return the kernel with zeros as inputs for ids without an adapter, so that its result is zero."""
    import torch

    @functools.wraps(kernel)
    def masked(inputs: Any, weights: Any, output: Any, indices: Any, *rest: Any, **named: Any) -> None:
        has = (indices >= 0).unsqueeze(1)
        kernel(torch.where(has, inputs, torch.zeros_like(inputs)), weights, output, indices, *rest, **named)

    return masked
