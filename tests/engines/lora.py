"""LoRA adapters for tests: created by hand, in the file format of PEFT."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["Shapes", "adapter_config", "adapter_tensors", "save_adapter"]

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a model's weights, by name."""

TARGETS = ("q_proj", "v_proj", "gate_proj", "down_proj")


def adapter_config(rank: int = 4, **settings: Any) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(TARGETS),
        "bias": "none",
        **settings,
    }


def adapter_tensors(shapes: Shapes, *, seed: int, rank: int = 4, size: float = 0.05) -> dict[str, Any]:
    """Return random tensors for every module in the configuration, large enough to change the sampled text."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, columns) in ((name, shape) for name, shape in shapes.items() if len(shape) == 2):
        stem = name.removesuffix(".weight")
        if stem.endswith(TARGETS):
            tensors[f"base_model.model.{stem}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * size
            tensors[f"base_model.model.{stem}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * size
    return tensors


def save_adapter(folder: Path, tensors: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config or adapter_config()))
    return folder
