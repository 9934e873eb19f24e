"""Patch of xgrammar in vLLM's CPU workers: masks do not write past the end of a vocabulary.

xgrammar's CPU kernel also masks the unused bits after the last id if a vocabulary is not a multiple of 32. It then
forbids the first id of the next row, or corrupts the worker's memory (seen with xgrammar 0.2.8).
"""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["patch_bitmasks"]

WORD_BITS = 32


def patch_bitmasks() -> None:
    """Patch xgrammar in this process: unused bits after the last id count as allowed."""
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
