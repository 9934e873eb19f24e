"""Runs inside vLLM's CPU workers: a seeded turn survives that its prompt is computed in pieces.

Behind each piece but the last vLLM samples an id that it drops, and takes the turn's random numbers back by an offset.
Only generators of GPUs have one; those of CPUs raise, and the engine dies of it (seen with vLLM 0.32).
"""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["patch_generators", "rewinding"]


def patch_generators() -> None:
    """From now on this process's requests have generators that can be taken back."""
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
    """A generator for CPUs that vLLM can take back.

    It goes back to its seed, which is exact for a turn that has sampled nothing. A turn that was preempted, and is
    computed anew from its prompt and what it has `sampled`, goes on with fresh numbers instead.
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
