"""Inputs of `check_weights`: transfers and adapters created from the model in transformers, and the check of memory."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from runner.engines.weights import LocalTransfer, read_folder
from runner.errors import BadOption, BadWeights
from runner.training.tiny_model import tensor_kind

__all__ = ["DEFAULT_ADAPTER_RANK", "adapter_on", "check_memory", "linear_kinds", "local_transfer"]

DEFAULT_ADAPTER_RANK: Final = 8
LOOPBACK: Final = "127.0.0.1"
_FLOAT32_BYTES: Final = 4
_HALF_BYTES: Final = 2
_GB_BYTES: Final = 1e9


def check_memory(folder: Path, dtype: str, *, on_cpu: bool) -> None:
    """Check that the main memory suffices for an engine, its update, and the model in transformers.

    The call blocks its thread, since it reads files.

    Transformers holds the model in float32, and a copy of its first values. For an engine in half precision, the proof
    needs another copy with rounded values. On a CPU, the engine is in main memory, with a second model while weights
    are loaded. A state dict is copied once in the engine's dtype.

    Args:
        folder: the model's folder. Without safetensors files, nothing is checked, since the model's size is unknown.
        dtype: the engine's dtype; anything but float32 counts as half precision.
        on_cpu: True if the engine computes on a CPU.

    Raises:
        BadOption: the memory does not suffice.
    """
    import psutil  # installed with each engine's extra

    try:
        forms = read_folder(folder).forms.values()
    except BadWeights:
        return
    values = sum(math.prod(form.shape) for form in forms)
    size = _FLOAT32_BYTES if dtype == "float32" else _HALF_BYTES
    references = 2 if size == _FLOAT32_BYTES else 3
    in_transformers = values * references * _FLOAT32_BYTES
    of_engine = values * size * (3 if on_cpu else 1)
    available = psutil.virtual_memory().available
    if in_transformers + of_engine > available:
        raise BadOption(
            f"check_weights({folder.name}): {values / 1e9:,.1f} billion values need "
            f"{in_transformers / _GB_BYTES:.1f} GB for transformers in float32 and {of_engine / _GB_BYTES:.1f} GB for "
            f"the engine and its update, but this machine has {available / _GB_BYTES:.1f} GB of free memory: check "
            "the same architecture with --tiny (tiny=True), or free memory."
        )


def linear_kinds(model: Any) -> list[str]:
    """Return the kinds (see `tensor_kind`) of linear layers, without the output layer, which PEFT also leaves out."""
    import torch

    head = model.get_output_embeddings()
    linear = [
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and module is not head
    ]
    return list(dict.fromkeys(map(tensor_kind, linear)))


@contextmanager
def adapter_on(model: Any, kind: str) -> Iterator[tuple[Any, Mapping[str, Any], dict[str, Any]]]:
    """Add a LoRA adapter of random values to all linear layers of `kind` (see `tensor_kind`), until the block is left.

    Yields:
        The model with the adapter; the adapter's tensors by PEFT's names; PEFT's configuration as a dict.

    Raises:
        BadOption: PEFT is not installed.
        BadWeights: PEFT has no adapter on these layers.
    """
    import torch

    try:
        import peft
    except ImportError:
        raise BadOption("adapters are compared with PEFT, which is not installed: pip install peft") from None
    layers = [name for name, _ in model.named_modules() if tensor_kind(name) == kind]
    config = peft.LoraConfig(
        r=DEFAULT_ADAPTER_RANK,
        lora_alpha=2 * DEFAULT_ADAPTER_RANK,
        target_modules=layers,
        init_lora_weights=False,  # by default the matrix B is zero, so that the adapter has no effect
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(1)
    try:
        adapted = peft.get_peft_model(model, config).eval()
    except ValueError as error:  # for example, the kernel reads the weight of a Mamba layer's output directly
        raise BadWeights(f"PEFT has no adapter on {kind}: {error}") from error
    try:
        of_adapter = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
        tensors = {name: tensor.clone() for name, tensor in of_adapter.items()}
        yield adapted, tensors, _as_json(config)
    finally:
        adapted.unload()


def _as_json(config: Any) -> dict[str, Any]:
    settings = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    return settings | {"peft_type": "LORA", "task_type": "CAUSAL_LM"}


def local_transfer(engine_arguments: Mapping[str, Any], model: Any, folder: Path) -> LocalTransfer:
    """Create a transfer of the model's weights by the backend of the engine.

    Args:
        engine_arguments: arguments of `VllmEngine`; `weight_transfer_config` names the backend, by default "file".
        model: the model in transformers, whose tensors are read again for each update.
        folder: folder for the files of the backend "file".

    Raises:
        BadOption: the backend is not "file", "ipc" or "nccl".
    """
    backend = dict(engine_arguments.get("weight_transfer_config") or {}).get("backend", "file")
    match backend:
        case "file":
            from runner.engines.vllm.worker.file_transfer import FileTransferInfo

            return LocalTransfer(FileTransferInfo(str(folder), rank=0), _ModelTensors(model, device="cpu"))
        case "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            return LocalTransfer(IPCTrainerInitInfo(rank=0), _ModelTensors(model, device="cuda"))
        case "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
            workers = math.prod(int(engine_arguments.get(size) or 1) for size in sizes)
            info = NCCLTrainerInitInfo(LOOPBACK, _free_port(), 1 + workers, rank=0)
            return LocalTransfer(info, _ModelTensors(model, device="cuda"))
    raise BadOption(
        f"check_weights(weight_transfer_config={{'backend': {backend!r}}}): the check supports 'file', 'ipc' and "
        "'nccl': give one of them."
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        port: int = listener.getsockname()[1]
        return port


class _ModelTensors:
    """The model's tensors as a `WeightSource` of vLLM, on a device."""

    def __init__(self, model: Any, *, device: str) -> None:
        self._tensors = model.state_dict
        self._device = device

    def metadata(self) -> list[Any]:
        """Name, number type and shape of each tensor."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors().items()]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((name, tensor.to(self._device)) for name, tensor in self._tensors().items())
