"""Patch of vLLM's CPU workers: seeded turns work with chunked prompts.

After each chunk but the last vLLM samples an id that it drops, and resets the generator by an offset. Only generators
of GPUs have an offset; those of CPUs raise, which ends the engine (seen with vLLM 0.32).
"""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["patch_generators", "rewinding"]


def patch_generators() -> None:
    """Patch vLLM in this process: requests get generators that can be reset."""
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

    A reset restores its seed, which is exact for a turn without sampled ids. A preempted turn, which is computed again
    from its prompt and its `sampled` ids, continues with new numbers instead.
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
