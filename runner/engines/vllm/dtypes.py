"""Default dtype on a CPU: the fastest one of the processor."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

__all__ = [
    "ChosenDtype",
    "choose_dtype",
    "emulates_bfloat16",
    "gives_dtype",
    "is_fast",
    "machine_memory",
    "weight_bytes",
]

_AUTO: Final = "auto"
_HALVES: Final = ("bfloat16", "float16")
_BYTES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_NAMES: Final = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "double": "float64"}
"""Name of a dtype in this module, by another name of this dtype."""
_ASKED: Final = {"bfloat16": "_is_mkldnn_bf16_supported", "float16": "_is_mkldnn_fp16_supported"}
_MULTIPLIES_BFLOAT16: Final = ("avx512_bf16", "amx_bf16", "avx_ne_convert")
"""Torch's names of the x86 instruction sets that multiply or convert bfloat16."""
_LIMITS_BELOW_BFLOAT16: Final = ("AVX512_CORE", "AVX512_CORE_VNNI")
"""Values of oneDNN's `ONEDNN_MAX_CPU_ISA` that allow AVX-512 but not its instructions for bfloat16."""
_TEXT_PARTS: Final = ("text_config", "llm_config", "language_config", "thinker_config")
_QUANTIZED: Final = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class ChosenDtype:
    """Dtype for vLLM, with the reason for it."""

    name: str = _AUTO
    """Value of vLLM's argument `dtype`."""
    why: str = ""
    """Reason, as text for the user; "" if the weights are quantized."""


def gives_dtype(given: Mapping[str, Any]) -> bool:
    """Return whether the engine arguments contain a dtype other than `auto`; such a dtype replaces the default."""
    return bool(given.get("dtype", _AUTO) != _AUTO)


def choose_dtype(
    folder: Path, given: Mapping[str, Any], *, is_fast: Callable[[str], bool], memory: int, copies: int = 1
) -> ChosenDtype:
    """Return the fastest dtype for a model on a CPU; `auto` if vLLM's choice is as fast, or the only possible one.

    By default vLLM computes in the checkpoint's dtype, but in bfloat16 for a float32 checkpoint. On a processor without
    bfloat16 instructions, bfloat16 can take several times as long as float32.

    Args:
        folder: the model's folder, with config.json.
        given: the engine arguments that the user gave.
        is_fast: function that returns whether this processor computes fast in a dtype.
        memory: memory for the weights, in bytes.
        copies: number of copies of the weights, one per data-parallel rank.
    """
    config = _json(folder / "config.json")
    if given.get("quantization") or _is_quantized(folder, config):
        return ChosenDtype()  # kernels for quantized weights support only 16 bits
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

    The result depends on oneDNN's environment variable `ONEDNN_MAX_CPU_ISA`. It is True if torch cannot report the
    instructions.
    """
    import torch

    asked = getattr(torch.ops.mkldnn, _ASKED.get(dtype, ""), None)
    if asked is None or not torch.backends.mkldnn.is_available():
        return True  # if this is unknown, vLLM's choice is kept
    if not asked():
        return False
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA", "")
    return dtype != "bfloat16" or not emulates_bfloat16(torch.cpu.get_capabilities(), limit)


def emulates_bfloat16(capabilities: Mapping[str, Any], limit: str) -> bool:
    """Return whether oneDNN computes bfloat16 with AVX-512 instructions for float32.

    This is slower than float32. oneDNN supports bfloat16 on every processor with AVX-512. Only some of these processors
    have instructions for it: Cooper Lake, Sapphire Rapids, Zen 4 and later ones.

    Args:
        capabilities: the processor's instructions as torch names them.
        limit: the value of `ONEDNN_MAX_CPU_ISA`, or "".
    """
    if not capabilities.get("avx512_f"):
        return False
    return limit.upper() in _LIMITS_BELOW_BFLOAT16 or not any(capabilities.get(name) for name in _MULTIPLIES_BFLOAT16)


def machine_memory(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory of this machine, or of its container if that may use less.

    Args:
        groups: the folder of Linux's control groups.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # control groups of version 2 and 1
        with suppress(OSError, ValueError):  # ValueError for "max", which means no limit
            memory = min(memory, int((groups / limit).read_text()))
    return memory


def weight_bytes(folder: Path) -> int:
    """Return the size of a model's weights in bytes, from the files in its folder; 0 if unknown."""
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if indexed := _json(folder / index).get("metadata", {}).get("total_size", 0):
            return int(indexed)
    # Mistral's folders contain the same weights twice. The second copy is named "consolidated".
    for pattern in ("model*.safetensors", "*.safetensors", "pytorch_model*.bin"):
        if size := sum(path.stat().st_size for path in folder.glob(pattern)):
            return size
    return 0


def _stored(config: Mapping[str, Any]) -> str:
    """Return the checkpoint's dtype; "" if unknown.

    In a multimodal model, the dtype may be only in the configuration of the text part.
    """
    for part in _parts(config):
        name = part.get("dtype") or part.get("torch_dtype")
        if isinstance(name, Mapping):  # a dict with one dtype for each part
            name = name.get("text_config") or name.get("")
        if isinstance(name, str):
            name = name.removeprefix("torch.")
            return _NAMES.get(name, name)
    return ""


def _is_quantized(folder: Path, config: Mapping[str, Any]) -> bool:
    if any(part.get(name) for part in _parts(config) for name in _QUANTIZED):
        return True
    return (folder / "hf_quant_config.json").exists() or any(folder.glob("*.gguf"))


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a configuration, and then the configurations nested in it, beginning with the text model's."""
    yield config
    nested = [(name, part) for name, part in config.items() if name.endswith("_config") and isinstance(part, Mapping)]
    for _, part in sorted(nested, key=lambda each: each[0] not in _TEXT_PARTS):
        yield from _parts(part)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
