"""Batches for trainers that use padded tensors: NeMo RL's generation interface on any engine of token ids."""

from runner.generation.batches import BatchResults, Generation
from runner.generation.config import (
    ColocationConfig,
    GenerationConfig,
    GenerationDatumSpec,
    GenerationOutputSpec,
    TextDatumSpec,
    TextOutputSpec,
)
from runner.generation.padding import verify_right_padding

__all__ = [
    "BatchResults",
    "ColocationConfig",
    "Generation",
    "GenerationConfig",
    "GenerationDatumSpec",
    "GenerationOutputSpec",
    "TextDatumSpec",
    "TextOutputSpec",
    "verify_right_padding",
]
