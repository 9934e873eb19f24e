"""A small model with an even number of heads, which two workers can share. The demo model has nine heads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

__all__ = ["even_model"]


def even_model(folder: Path, demo: Path) -> Path:
    """Create a model of two layers of eight heads with random weights, and the demo model's vocabulary and template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    given = json.loads((demo / "config.json").read_text())
    kept = {name: given[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    config = LlamaConfig(
        **kept,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    for path in demo.iterdir():
        if path.suffix != ".safetensors" and path.name != "config.json":
            shutil.copy(path, folder / path.name)
    return folder
