"""Default dtype on a CPU: the fastest one of the processor."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

__all__ = ["ChosenDtype", "choose_dtype", "gives_dtype", "is_fast", "weight_bytes"]

_AUTO: Final = "auto"
_HALVES: Final = ("bfloat16", "float16")
_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_ASKED: Final = {"bfloat16": "_is_mkldnn_bf16_supported", "float16": "_is_mkldnn_fp16_supported"}
_QUANTIZED: Final = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class ChosenDtype:
    """Dtype for vLLM, with the reason for it."""

    name: str = _AUTO
    """Value of vLLM's argument `dtype`."""
    why: str = ""
    """Reason for people; empty if vLLM chooses."""


def gives_dtype(given: Mapping[str, Any]) -> bool:
    """Return whether the engine arguments contain a dtype, which has priority."""
    return bool(given.get("dtype", _AUTO) != _AUTO)


def choose_dtype(
    folder: Path, given: Mapping[str, Any], *, is_fast: Callable[[str], bool], memory: int, copies: int = 1
) -> ChosenDtype:
    """Return the fastest dtype for a model on a CPU; `auto` if vLLM's own choice is as fast, or the only one.

    vLLM computes in the checkpoint's dtype, and in bfloat16 for float32 checkpoints. On a processor without bfloat16
    instructions this takes several times as long as float32.

    Args:
        folder: the model's folder, with config.json.
        given: the engine arguments that the user gave.
        is_fast: returns whether this processor computes fast in a dtype.
        memory: bytes for weights.
        copies: number of copies of the weights, one per data-parallel rank.
    """
    config = _json(folder / "config.json")
    if given.get("quantization") or any(_has(config, name) for name in _QUANTIZED):
        return ChosenDtype()  # its kernels support only 16 bits
    stored = _stored(config)
    usual = stored if stored in _HALVES else "bfloat16"
    if is_fast(usual):
        return ChosenDtype(why=f"{usual} is fast on this processor")
    if is_fast("bfloat16"):
        return ChosenDtype("bfloat16", f"{usual} is slow on this processor")
    needed = copies * weight_bytes(folder) * _BYTES["float32"] // _BYTES.get(stored, 2)
    if needed > memory:
        return ChosenDtype(why=f"slow on this processor, but float32 would need {needed / 1e9:.0f} GB of memory")
    return ChosenDtype("float32", f"{usual} is slow on this processor")


def is_fast(dtype: str) -> bool:
    """Return whether oneDNN, which multiplies matrices on CPUs, has instructions for a dtype on this processor.

    Depends on oneDNN's variable `ONEDNN_MAX_CPU_ISA`. Imports torch.
    """
    import torch

    asked = getattr(torch.ops.mkldnn, _ASKED.get(dtype, ""), None)
    if asked is None or not torch.backends.mkldnn.is_available():
        return True  # unknown: keep vLLM's choice
    return bool(asked())


def weight_bytes(folder: Path) -> int:
    """Return the bytes of a model's weights by its files; 0 if unknown."""
    indexed = _json(folder / "model.safetensors.index.json").get("metadata", {}).get("total_size", 0)
    return int(indexed) or sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _stored(config: Mapping[str, Any]) -> str:
    """Return the dtype of the checkpoint; in a multimodal model it is in the text part."""
    for part in (config, config.get("text_config"), config.get("llm_config")):
        if isinstance(part, Mapping) and (name := part.get("dtype") or part.get("torch_dtype")):
            return str(name).removeprefix("torch.")
    return ""


def _has(config: Mapping[str, Any], name: str) -> bool:
    return any(isinstance(part, Mapping) and part.get(name) for part in (config, config.get("text_config")))


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
