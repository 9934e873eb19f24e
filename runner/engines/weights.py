"""New weights for a running engine: their sources, and the check that they fit the model."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from runner.errors import BadWeights

__all__ = [
    "FLOATS",
    "SAFETENSORS_NAMES",
    "Checkpoint",
    "LocalTransfer",
    "TensorForm",
    "WeightFolder",
    "WeightTransfer",
    "compare",
    "forms_of_transfer",
    "read_folder",
]

MISTRAL_FILES: Final = "consolidated*.safetensors"
"""Pattern of weight files in Mistral's own format, with other names of tensors than transformers uses."""
INDEX: Final = "model.safetensors.index.json"
"""File that lists the weight files in use, and the file of each tensor."""
_MISTRAL_INDEX: Final = "consolidated.safetensors.index.json"
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
FLOATS = ("float64", "float32", "float16", "bfloat16")
"""Dtypes that may replace each other: vLLM converts them to the model's dtype."""

SAFETENSORS_NAMES = {name: code for code, name in _DTYPES.items()}
"""Names of dtypes in the safetensors format, by torch's name."""

_TIED = "lm_head.weight"
_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "position_ids")
_HEADER_BYTES = 100_000_000  # limit of the safetensors library
_MAX_NAMED_TENSORS = 3  # tensors that one error names
_REQUIRED = ("names", "dtype_names", "shapes")


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Dtype, shape and file of a tensor, without its data."""

    dtype: str
    """Torch's name for the tensor's dtype, such as "bfloat16"."""
    shape: tuple[int, ...]
    file: str = ""
    """Name of the file that holds the tensor; "" for a tensor that is not in a file."""


@dataclass(frozen=True, slots=True)
class WeightFolder:
    """Folder of safetensors whose files are complete."""

    folder: Path
    files: tuple[Path, ...]
    """Files in use; the folder may contain further files."""
    forms: Mapping[str, TensorForm]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Checkpoint with which the engine started; new weights are compared with it."""

    name: str
    """Name of the model, for errors."""
    forms: Mapping[str, TensorForm]
    tied: bool = False
    """True if output layer and embedding are one tensor; then `lm_head.weight` is optional."""

    def optional(self, name: str) -> bool:
        """Return whether a tensor is optional: the model computes it, or has it under another name."""
        return name.endswith(_BUFFERS) or self.is_tied(name)

    def is_tied(self, name: str) -> bool:
        """Return whether this is the name of a tied output layer."""
        return self.tied and (name == _TIED or name.endswith(f".{_TIED}"))


@dataclass(frozen=True, slots=True)
class LocalTransfer:
    """Weights that a trainer in this process sends through one of vLLM's weight transfer engines.

    The engine is started with `VllmEngine(weight_transfer_config={"backend": "nccl"})`, or "ipc".
    """

    info: Any
    """vLLM's `NCCLTrainerInitInfo` or `IPCTrainerInitInfo`: the backend, and how both ends connect."""
    source: Any
    """A `WeightSource` of vLLM, such as `ModuleSource(model)`; each new object needs a new connection."""
    seconds: float = 600.0
    """Seconds without data after which one end counts the other end as lost."""


@dataclass(frozen=True, slots=True)
class WeightTransfer:
    """Weights of a trainer in another process: NCCL broadcasts, or handles of GPU memory (IPC).

    The engine is started with `VllmEngine(weight_transfer_config={"backend": "nccl"})`, or "ipc".
    """

    update: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    """vLLM's update info of the trainer: `names`, `dtype_names`, `shapes` and the backend's own fields.

    A sequence if the trainer sends the weights in parts.
    """
    init: Mapping[str, Any] | None = None
    """vLLM's init info, to connect trainer and engine; used only if it differs from the previous transfer's."""
    seconds: float = 600.0
    """Seconds without data after which the trainer counts as lost."""

    @property
    def parts(self) -> tuple[Mapping[str, Any], ...]:
        """Update infos in the order of sending."""
        return (self.update,) if isinstance(self.update, Mapping) else tuple(self.update)


def read_folder(folder: str | os.PathLike[str], *, mistral_names: bool = False) -> WeightFolder:
    """Read the tensor forms of a folder of safetensors, from the headers only. Blocks the thread.

    Args:
        folder: the folder.
        mistral_names: True to read the copy in Mistral's format, if the folder contains the weights in both formats.

    Raises:
        BadWeights: the folder does not exist or has no safetensors; a file is missing, truncated or damaged; or a
            tensor is missing or in two files. The message names the folder or the file.
    """
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        if path.is_file():
            raise BadWeights(f"the weights {str(folder)!r} are a file: give the folder that holds it.")
        raise BadWeights(f"the folder of weights {str(folder)!r} does not exist: give an existing folder.")
    files, index = _files(path, mistral_names=mistral_names)
    forms: dict[str, TensorForm] = {}
    for file in files:
        for name, form in _read_header(file).items():
            if name in forms:
                raise BadWeights(
                    f"{path}: the tensor {name!r} is in {forms[name].file} and in {file.name}. Remove one of the files."
                )
            forms[name] = form
    for name, listed in index.items():
        if name not in forms:
            raise BadWeights(
                f"{path / listed} has no tensor {name!r}, which the index lists there. Save file and index again."
            )
    return WeightFolder(path, files, forms)


def _files(folder: Path, *, mistral_names: bool) -> tuple[tuple[Path, ...], Mapping[str, str]]:
    """Return the files in use, and the file of each tensor by the index; an empty mapping without an index.

    Raises:
        BadWeights: the folder has no weights, or a file of the index is missing.
    """
    of_mistral = set(folder.glob(MISTRAL_FILES))
    layouts = [(set(folder.glob("*.safetensors")) - of_mistral, INDEX), (of_mistral, _MISTRAL_INDEX)]
    if mistral_names:
        layouts.reverse()
    layouts.sort(key=lambda layout: not layout[0])  # an index without any of its files was only downloaded with others
    for found, index_name in layouts:
        index = _read_index(folder / index_name)
        for name, file in index.items():
            if not (folder / file).is_file():
                raise BadWeights(
                    f"{folder / file} is missing: {index_name} lists the tensor {name!r} there. Save the weights again."
                )
        if index:
            return tuple(folder / file for file in sorted(set(index.values()))), index
        if found:
            return tuple(sorted(found)), {}
    others = sorted(file.name for file in folder.glob("*") if file.suffix in (".bin", ".pt", ".pth", ".gguf"))
    raise BadWeights(
        f"{folder} holds no *.safetensors"
        + (f", only {others[0]}" if others else "")
        + ": save the weights with save_pretrained(folder) or safetensors.torch.save_file(...)."
    )


def _read_index(file: Path) -> Mapping[str, str]:
    if not file.is_file():
        return {}
    try:
        names = json.loads(file.read_bytes())["weight_map"]
        return {str(name): str(where) for name, where in names.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadWeights(f"{file} cannot be read as an index of safetensors: {error!r}. Save it again.") from error


def _read_header(file: Path) -> dict[str, TensorForm]:
    from safetensors import SafetensorError, safe_open

    try:
        entries = _entries(file)
        with safe_open(file, framework="numpy"):  # the library's own checks: overlaps, gaps, sizes
            pass
        return {
            name: TensorForm(_DTYPES.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"]), file.name)
            for name, entry in entries
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise BadWeights(f"{file} cannot be read as safetensors: {error}. Save it again.") from error


def _entries(file: Path) -> list[tuple[str, Any]]:
    """Return the header entry of each tensor, as (name, entry).

    Raises:
        BadWeights: the file is truncated (the message names the first incomplete tensor), or has another format.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or (size < 8 + length and length <= _HEADER_BYTES):
            raise BadWeights(f"{file} is truncated: it ends within its header, after {size} bytes. Save it again.")
        if length > _HEADER_BYTES:
            raise BadWeights(
                f"{file} is not a safetensors file: its header would be {length} bytes long. Save it again."
            )
        header = json.loads(opened.read(length))
    entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
    for name, entry in sorted(entries, key=lambda named: int(named[1]["data_offsets"][1])):
        end = 8 + length + entry["data_offsets"][1]
        if end > size:
            raise BadWeights(
                f"{file} is truncated: the tensor {name!r} ends at byte {end}, the file has {size}. Save it again, "
                "and rename the folder to the name that is loaded once it is complete."
            )
    return entries


def forms_of_transfer(transfer: WeightTransfer) -> dict[str, TensorForm]:
    """Return the tensor forms that a transfer announces.

    Raises:
        BadWeights: the announcement is incomplete or not a mapping, or has a tensor twice.
    """
    forms: dict[str, TensorForm] = {}
    for number, part in enumerate(transfer.parts, 1):
        if not isinstance(part, Mapping):
            raise BadWeights(
                f"WeightTransfer(update=...): part {number} is {_kind(part)}: give a mapping with "
                f"{', '.join(_REQUIRED)}."
            )
        absent = [key for key in _REQUIRED if key not in part]
        if absent:
            raise BadWeights(
                f"WeightTransfer(update=...) has no {absent[0]!r}: give {', '.join(_REQUIRED)}, as the NCCL and IPC "
                "backends announce them, since the engine compares announced tensors with the model before it changes."
            )
        columns = [list(part[key]) for key in _REQUIRED]
        if len(set(map(len, columns))) != 1:
            counts = ", ".join(f"{len(column)} {key}" for key, column in zip(_REQUIRED, columns, strict=True))
            raise BadWeights(f"WeightTransfer(update=...) has {counts}: give one of each for every tensor.")
        for name, dtype, shape in zip(*columns, strict=True):
            if name in forms:
                raise BadWeights(f"WeightTransfer(update=...) has the tensor {name!r} twice: send it once.")
            forms[name] = TensorForm(str(dtype).removeprefix("torch."), tuple(shape))
    return forms


def compare(given: Mapping[str, TensorForm], model: Checkpoint, *, given_as: str) -> None:
    """Check that the weights fit the model.

    Exactly the model's tensors are needed, since vLLM exchanges fused parameters as a whole. Only optional tensors
    (`Checkpoint.optional`) may be missing or additional. Shapes have to be equal. Dtypes in `FLOATS` may replace each
    other; other dtypes have to be equal.

    Raises:
        BadWeights: the weights do not fit; the message names the first wrong tensors.
    """
    missing = [name for name in model.forms if name not in given and not model.optional(name)]
    unknown = [name for name in given if name not in model.forms and not model.optional(name)]
    if missing or unknown:
        buffers = ", with the buffers, which vLLM's ModuleSource leaves out" if "Transfer" in given_as else ""
        raise BadWeights(f"{given_as}: {_misnamed(missing, unknown, given, model)}{'' if unknown else buffers}.")
    wrong = list(_misfits(given, model))
    if wrong:
        raise BadWeights(f"{given_as}: {_first(wrong, '; ')}. The model is {model.name}.")


def _misnamed(missing: list[str], unknown: list[str], given: Mapping[str, TensorForm], model: Checkpoint) -> str:
    problems = []
    if missing:
        problems.append(f"missing {_first([repr(name) for name in missing])}")
    if unknown:
        named = [f"{name!r}{_in_file(given[name])}" for name in unknown]
        problems.append(f"no tensor of the model is called {_first(named)}")
    hint = _naming_hint(missing, unknown)
    return f"{'; '.join(problems)}. The model is {model.name}, with {len(model.forms)} tensors. {hint}"


_WRAPPERS: Final = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""Parts of names that PyTorch's wrappers of modules add: FSDP, activation checkpoints, compile."""


def _naming_hint(missing: list[str], unknown: list[str]) -> str:
    if any(part in name for name in unknown for part in (".base_layer.", ".lora_")):
        return "Merge the adapter into the weights first (PEFT: merge_and_unload()), or give it to add_adapter()"
    prefix = _prefix(missing, unknown)
    if prefix:
        return f"Take {prefix!r} off every name"
    for wrapper in _WRAPPERS:
        if missing and {name.replace(wrapper, "") for name in unknown} >= set(missing):
            return f"Take {wrapper!r} out of every name"
    return "Give exactly the tensors of its checkpoint"


def _prefix(missing: list[str], unknown: list[str]) -> str:
    """Return the prefix that a wrapper of the trainer's model added to every name, or ""."""
    for name in unknown:
        if missing and name.endswith(missing[0]):
            prefix = name.removesuffix(missing[0])
            return prefix if {prefix + lost for lost in missing} <= set(unknown) else ""
    return ""


def _misfits(given: Mapping[str, TensorForm], model: Checkpoint) -> Iterator[str]:
    for name, wanted in model.forms.items():
        form = given.get(name)
        if form is None:
            continue
        if form.shape != wanted.shape:
            sharded = math.prod(form.shape) < math.prod(wanted.shape) and len(form.shape) == 1 < len(wanted.shape)
            hint = " (if this is a shard, gather the whole tensor first)" if sharded or 0 in form.shape else ""
            yield f"the tensor {name!r}{_in_file(form)} has shape {form.shape}, the model's has {wanted.shape}{hint}"
        elif form.dtype != wanted.dtype and not {form.dtype, wanted.dtype} <= set(FLOATS):
            yield (
                f"the tensor {name!r}{_in_file(form)} is {form.dtype}, the model's is {wanted.dtype}, and only "
                f"{', '.join(FLOATS)} may replace each other"
            )


def _in_file(form: TensorForm) -> str:
    return f" in {form.file}" if form.file else ""


def _first(names: Sequence[str], between: str = ", ") -> str:
    rest = len(names) - _MAX_NAMED_TENSORS
    return between.join(names[:_MAX_NAMED_TENSORS]) + (f" and {rest} more" if rest > 0 else "")


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")
