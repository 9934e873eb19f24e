"""LoRA adapters in PEFT's form: a private copy, checked against the model before vLLM loads it."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.engines.weights import FLOATS, TensorForm, read_folder
from runner.errors import BadOption, BadWeights

__all__ = ["AdapterRules", "check_adapter", "keep_adapter"]

_CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"
_MEMORY = Path("/dev/shm")
_SAVE = "save the adapter with PEFT's model.save_pretrained(folder)"
_PART = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.(?:lora_(?P<part>[AB])\.weight|lora_embedding_(?P<table>[AB]))"
)
_BASE_COPY = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")  # tensors that vLLM skips
_EXPERTS = ".experts"


@dataclass(frozen=True, slots=True)
class AdapterRules:
    """Properties of an engine that an adapter has to match."""

    model: str
    """Name of the model, for errors."""
    forms: Mapping[str, TensorForm]
    """Form of every tensor of the model, by name; empty if unknown."""
    quantized: bool
    """True if the model is quantized. Then its tensors may differ in shape from its matrices, so shapes are not
    compared.
    """
    composite: bool
    """True if the model has a text part and other parts, such as one for images. Its files may name tensors differently
    from PEFT.
    """
    check_config: Callable[[dict[str, Any]], None]
    """Function that raises ValueError for an unsupported configuration."""
    rank_of: Callable[[dict[str, Any], str], int]
    """Function that returns the rank of a module's adapter, from the configuration and the module's name."""


def keep_adapter(given: Any, config: Mapping[str, Any] | None) -> Path:
    """Copy an adapter to a new folder, in memory if there is room, and return the folder. Blocks the thread.

    Args:
        given: the adapter's folder, or its tensors by name.
        config: the entries of adapter_config.json; None for a folder, which has this file.

    Raises:
        BadOption: tensors are given without a configuration, or a folder is given with one.
        BadWeights: `given` is neither a path nor a mapping, the folder does not exist or has no adapter, a value is
            not a tensor, or the copy fails.
    """
    if isinstance(given, Mapping):
        return _keep_tensors(given, config)
    if not isinstance(given, str | os.PathLike):
        raise BadWeights(f"give a folder, or a mapping of names to tensors, not {type(given).__name__}.")
    if config is not None:
        raise BadOption(f"add_adapter(config=...) is for tensors, and a folder has {_CONFIG}: leave config out.")
    folder = Path(given).expanduser()
    _check_folder(folder)
    kept = _new_folder((folder / _TENSORS).stat().st_size)
    try:
        for name in (_CONFIG, _TENSORS):
            shutil.copyfile(folder / name, kept / name)
    except OSError as error:
        shutil.rmtree(kept, ignore_errors=True)
        raise BadWeights(f"the adapter cannot be copied: {error}.") from error
    return kept


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        is_file = "this is a file: give the folder that holds it"
        raise BadWeights(f"{is_file if folder.is_file() else 'the folder does not exist: give an existing folder'}.")
    for name in (_CONFIG, _TENSORS):
        if not (folder / name).is_file():
            other = (folder / "adapter_model.bin").is_file() and name == _TENSORS
            raise BadWeights(
                f"{name} is missing{', and adapter_model.bin is not supported' if other else ''}: {_SAVE}."
            )


def _keep_tensors(tensors: Mapping[str, Any], config: Mapping[str, Any] | None) -> Path:
    from safetensors.torch import save_file
    from torch import Tensor

    if not isinstance(config, Mapping):
        raise BadOption(
            "add_adapter(tensors, config=...): tensors need a configuration: give a dict with the entries of "
            "adapter_config.json, at least r, lora_alpha and target_modules, such as LoraConfig(...).to_dict()."
        )
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise BadWeights(f"{name!r} is {type(tensor).__name__}: give a tensor of torch.")
    written = json.dumps(dict(config), default=_plain)
    kept = _new_folder(sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, kept / _TENSORS)
        (kept / _CONFIG).write_text(written)
    except (OSError, RuntimeError) as error:  # for example, a full disk or tensors that share memory
        shutil.rmtree(kept, ignore_errors=True)
        raise BadWeights(f"the tensors cannot be written to a file: {error}") from error
    return kept


def _plain(value: Any) -> Any:
    """Convert a value that JSON does not support: a set, such as PEFT's target modules, to a list; all else to text."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def _new_folder(size: int) -> Path:
    roomy = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 2 * size
    return Path(tempfile.mkdtemp(prefix="deltarunner-adapter-", dir=_MEMORY if roomy else None))


def check_adapter(folder: Path, rules: AdapterRules) -> None:
    """Check that an adapter fits the model.

    Raises:
        BadWeights: the adapter does not fit; the message names the setting, the tensor or the file.
    """
    config = _config(folder / _CONFIG)
    try:
        rules.check_config(config)
    except (ValueError, TypeError, AttributeError) as error:
        raise BadWeights(f"{_CONFIG}: {error}") from error
    forms = read_folder(folder).forms
    parts = dict(_parts(forms))
    if not parts:
        raise BadWeights(f"{_TENSORS} holds no tensor of an adapter: {_SAVE}.")
    for module, pair in _pairs(parts).items():
        _check_module(module, pair, parts, config, rules)
    _check_complete(config, {module for module, _ in parts}, rules)
    _check_finite(folder / _TENSORS)


def _config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_bytes())
    except ValueError as error:
        raise BadWeights(f"{file.name} is not JSON ({error}): {_SAVE}.") from error
    if not isinstance(config, dict):
        raise BadWeights(f"{file.name} holds {type(config).__name__}, not settings by name: {_SAVE}.")
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise BadWeights(f"{file.name} has peft_type {kind!r}: give an adapter of the type LORA.")
    return config


_Parts = Mapping[tuple[str, str], tuple[str, TensorForm]]
"""Name and form of each tensor, by the module's name and the tensor's part, "A" or "B"."""


def _parts(forms: Mapping[str, TensorForm]) -> Iterator[tuple[tuple[str, str], tuple[str, TensorForm]]]:
    for name, form in forms.items():
        if name.endswith(_BASE_COPY):
            continue
        found = _PART.fullmatch(name)
        if found is None:
            raise BadWeights(f"the tensor {name!r} is not part of a LoRA adapter{_hint(name)}.")
        if form.dtype not in FLOATS:
            raise BadWeights(f"the tensor {name!r} is {form.dtype}: give one of {', '.join(FLOATS)}.")
        yield (found["module"], found["part"] or found["table"]), (name, form)


def _hint(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return ": vLLM does not support DoRA"
    if re.search(r"\.lora_(embedding_)?[AB]\.\w+\.weight$", name):
        return ": take the tensors of PEFT's get_peft_model_state_dict(model), which leaves the adapter's name out"
    return f": {_SAVE}"


def _pairs(parts: _Parts) -> dict[str, bool]:
    """Return for each module, by name, whether it is an embedding."""
    return {module: "lora_embedding" in name for (module, _), (name, _) in parts.items()}


def _check_module(module: str, table: bool, parts: _Parts, config: dict[str, Any], rules: AdapterRules) -> None:
    for one, other in ("AB", "BA"):
        if (module, one) not in parts:
            name, _ = parts[module, other]
            raise BadWeights(f"the tensor {name!r} has no matching lora_{one}: the file is incomplete; {_SAVE}.")
    if not rules.forms or _EXPERTS in module:  # experts may be fused or split in several ways, so only vLLM checks them
        return
    shape = _shape_of(module, rules)
    if shape is None:
        return
    rank = rules.rank_of(config, module)
    given_by, taken_by = shape if not table else reversed(shape)
    for part, wanted in (("A", (rank, taken_by)), ("B", (given_by, rank))):
        name, form = parts[module, part]
        if form.shape != wanted:
            raise BadWeights(
                f"the tensor {name!r} has shape {form.shape}: with rank {rank} and {module}.weight {shape} of "
                f"{rules.model} it must be {wanted}; train the adapter on this model, and give its own configuration."
            )


def _shape_of(module: str, rules: AdapterRules) -> tuple[int, ...] | None:
    """Return the shape of a module's weight in the model; None if unknown.

    Raises:
        BadWeights: the weight is not a matrix, or the model does not have the module, whose tensors vLLM would ignore.
    """
    form = rules.forms.get(f"{module}.weight")
    if form is not None:
        if len(form.shape) != 2:
            raise BadWeights(
                f"{module}.weight of {rules.model} has shape {form.shape}, and adapters are for matrices: train the "
                "adapter without this module."
            )
        return None if rules.quantized else form.shape
    layer = re.search(r"(?<=\.)layers\.\d+\..*", module)
    ends = layer[0] if layer and rules.composite else module
    names = (f".{name}." for name in rules.forms)
    if (rules.quantized or rules.composite) and any(f".{ends}." in name for name in names):
        return None
    inner = _inner(module, rules)
    fix = "" if inner else " Leave them out, or train the adapter on this model."
    raise BadWeights(f"{rules.model} has no module {module!r}{inner}: vLLM would ignore these tensors.{fix}")


def _inner(module: str, rules: AdapterRules) -> str:
    """Return a hint if the model has the module under a longer name, which ends with `module`; else ""."""
    whole = next((name for name in rules.forms if name.endswith(f".{module}.weight")), None)
    return f" but {whole.removesuffix('.weight')!r}; train the whole model, not a part of it" if whole else ""


def _check_complete(config: Mapping[str, Any], modules: Collection[str], rules: AdapterRules) -> None:
    targets = config.get("target_modules")
    if not isinstance(targets, list) or config.get("exclude_modules"):
        return
    for target in targets:
        ends = f".{target}"
        if any(f".{name}".endswith(f"{ends}.weight") for name in rules.forms) and not any(
            f".{module}".endswith(ends) for module in modules
        ):
            raise BadWeights(
                f"{_TENSORS} has no tensor of the target module {target!r}: the file is incomplete; {_SAVE}."
            )


def _check_finite(file: Path) -> None:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118  # `opened` is not a mapping
            if not opened.get_tensor(name).isfinite().all():
                raise BadWeights(
                    f"the tensor {name!r} holds a value that is NaN or infinite: give an adapter of an earlier step."
                )
