"""Runs inside vLLM's CPU workers: a mask that lets every id of a vocabulary through writes nothing behind it.

xgrammar's kernel for CPUs looks for the ids that are not let through, and takes one for such that is behind the last
where a vocabulary does not fill its words of 32: it forbids the next turn's first id, or breaks the worker's memory
(seen with xgrammar 0.2.8).
"""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["patch_bitmasks"]

WORD_BITS = 32


def patch_bitmasks() -> None:
    """From now on what no id stands for is let through in this process, so that nothing is looked for there."""
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
