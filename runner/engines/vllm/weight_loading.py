"""Loading of new weights into vLLM: they are checked and copied while vLLM runs, and loaded while it is paused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from runner.engines.transfers import RelayedTransfer
from runner.engines.vllm.mistral_format import needs_mistral_names, require_own_reload
from runner.engines.vllm.shared_weights import SharedWeights, form_of
from runner.engines.vllm.tied_weights import compare_tied, equal_in_folder, equal_in_memory
from runner.engines.vllm.trainer_endpoint import worker_error
from runner.engines.vllm.transformers_names import compare_with_checkpoint, to_checkpoint_names
from runner.engines.vllm.weight_transfer import Transfer, VllmTransfers
from runner.engines.vllm.worker.extension import WeightWorker
from runner.engines.weights import (
    FLOATS,
    Checkpoint,
    LocalTransfer,
    TensorForm,
    WeightFolder,
    WeightTransfer,
    compare,
    read_folder,
)
from runner.errors import BadWeights, EngineError

__all__ = ["CheckedWeights", "VllmWeights", "moves_keys"]

_EXTENSION = f"{WeightWorker.__module__}.{WeightWorker.__qualname__}"


@dataclass(frozen=True, slots=True)
class CheckedWeights:
    """Weights that fit the model and are not loaded yet."""

    folder: Path | None = None
    """Folder of the weights; None if they are in no folder."""
    files: tuple[str, ...] = ()
    """Paths of the safetensors files that vLLM's workers load."""
    ignored: tuple[str, ...] = ()
    """Tensors in the files that the model does not use."""
    memory: SharedWeights | None = None
    """Memory with a copy of the state dict; None if no state dict was given."""
    transfer: Transfer | None = None
    """Transfer through which the weights arrive; None if the weights are in files."""

    def close(self) -> None:
        """Free the memory; idempotent, and also done when the object is dropped."""
        if self.memory is not None:
            self.memory.close()


class VllmWeights:
    """Weights of one `AsyncLLM`."""

    def __init__(self, llm: Any, name: str) -> None:
        self._llm = llm
        self._name = name
        self._checkpoint: Checkpoint | BadWeights | None = None
        self._signature: tuple[tuple[str, int, int], ...] = ()
        self._mistral_names = False
        self._transfers = VllmTransfers(llm)

    async def prepare(self) -> None:
        """Read the checkpoint's tensor forms at the engine's start, before another program can overwrite its folder."""
        if self._checkpoint is None:
            self._checkpoint = await anyio.to_thread.run_sync(self._read_checkpoint)

    async def checkpoint(self) -> Checkpoint:
        """Return the checkpoint of the engine's model, as `prepare` first read it.

        Raises:
            BadWeights: the checkpoint is missing.
        """
        await self.prepare()
        assert self._checkpoint is not None
        if isinstance(self._checkpoint, BadWeights):
            raise self._checkpoint
        return self._checkpoint

    async def check(self, given: Any) -> CheckedWeights:
        """Check weights against the model and prepare them for loading; vLLM runs during this.

        A state dict is copied; its tensors must not change before this returns.

        Raises:
            BadWeights: the weights do not fit the model, or this engine cannot exchange them.
        """
        model = await self.checkpoint()
        self._refuse_stale_copies()
        if isinstance(given, WeightTransfer | LocalTransfer | RelayedTransfer):
            await self._transfers.check(given, model)
            return CheckedWeights(transfer=given)
        check: Callable[[Any, Checkpoint], CheckedWeights]
        if isinstance(given, str | os.PathLike):
            check = self._check_folder
        elif isinstance(given, Mapping):
            check = self._check_tensors
        else:
            state = " Give model.state_dict()." if hasattr(given, "state_dict") else ""
            if isinstance(given, Iterator | list | tuple):
                state = " Give dict(...) of pairs of names and tensors."
            raise BadWeights(
                f"the weights are {type(given).__name__}: give a folder, a mapping of names to tensors (a state "
                f"dict), a WeightTransfer or a LocalTransfer.{state}"
            )
        made: list[CheckedWeights] = []  # a list, since an idle thread would keep its result in memory
        await anyio.to_thread.run_sync(lambda: made.append(check(given, model)))
        return made.pop()

    async def check_own(self) -> CheckedWeights | None:
        """Return the weights with which the engine started, ready to be loaded again.

        The result is None if their files changed, cannot be read, or fail the check.
        """
        await self.prepare()
        if isinstance(self._checkpoint, BadWeights) or self._checkpoint is None:
            return None
        return await anyio.to_thread.run_sync(self._check_own, self._checkpoint)

    def _check_own(self, model: Checkpoint) -> CheckedWeights | None:
        try:
            folder = _model_folder(self._llm.vllm_config)
            return self._check_folder(folder, model) if _signature(folder) == self._signature else None
        except (BadWeights, OSError, ValueError):
            return None

    async def load(self, checked: CheckedWeights) -> None:
        """Exchange the weights while vLLM is paused, and free the memory of a state dict in any case.

        Raises:
            EngineError: vLLM failed midway. It has neither the old nor the new weights, and has to be ended.
        """
        try:
            if checked.transfer is not None:
                await self._transfers.receive(checked.transfer)
            elif self.extended:
                names = {"files": list(checked.files), "ignored": list(checked.ignored)}
                await self._llm.collective_rpc("load_weight_files", kwargs=names)
            else:
                await self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checked.folder)})
        except EngineError:
            raise
        except Exception as error:  # vLLM's workers may raise any exception
            raise EngineError(worker_error(error)) from error
        finally:
            checked.close()

    # --- checks

    def _refuse_stale_copies(self) -> None:
        """Check that nothing of the old weights would stay, such as keys in a connector or packed copies on a CPU.

        Raises:
            BadWeights: something would stay.
        """
        config = self._llm.vllm_config
        if keeping := list(_connectors_that_keep(getattr(config, "kv_transfer_config", None))):
            raise BadWeights(
                f"the connector {keeping[0]} (kv_transfer_config) cannot drop the keys and values that it stores, so "
                "turns would still read those of the old weights: start the engine without this connector, or with "
                "kv_offloading_size=GIB, which vLLM can clear."
            )
        if config.device_config.device_type != "cpu":
            return
        if not self.extended:
            raise BadWeights(
                "on a CPU, vLLM's own reload leaves packed copies of the old weights: start the engine with "
                f"worker_extension_cls={_EXTENSION!r}, or with a class that inherits from it."
            )
        if config.compilation_config.mode:
            raise BadWeights(
                "this model was compiled for a CPU, and its compiled code holds packed copies of the old weights: "
                "start the engine with enforce_eager=True to exchange its weights."
            )

    def _read_checkpoint(self) -> Checkpoint | BadWeights:
        try:
            path = _model_folder(self._llm.vllm_config)
            self._mistral_names = needs_mistral_names(self._llm.vllm_config, path)
            folder = read_folder(path, mistral_names=self._mistral_names)
            self._signature = _signature(folder.folder)
        except (BadWeights, OSError, ValueError) as error:  # the Hugging Face hub raises the last two
            return BadWeights(
                f"the weights of {self._name!r} cannot be exchanged: the checkpoint to compare with is missing: {error}"
            )
        config = self._llm.vllm_config.model_config.hf_config
        text = getattr(config, "text_config", config)
        tied = getattr(config, "tie_word_embeddings", False) or getattr(text, "tie_word_embeddings", False)
        return Checkpoint(self._name, folder.forms, tied=bool(tied))

    def _check_folder(self, given: str | os.PathLike[str], model: Checkpoint) -> CheckedWeights:
        found: WeightFolder = read_folder(given, mistral_names=self._mistral_names)
        if not self.extended:
            require_own_reload(self._llm.vllm_config, found)
        compare_with_checkpoint(
            found.forms,
            model,
            self._llm.vllm_config.model_config.hf_config,
            given_as=str(found.folder),
            remedy="save the folder with its save_pretrained(folder)",
        )
        self._compare_tied(found.forms, model, partial(equal_in_folder, found), str(found.folder))
        files = tuple(map(str, found.files))
        # The model computes these tensors itself, or has them under another name.
        ignored = tuple(name for name in found.forms if name not in model.forms)
        return CheckedWeights(found.folder, files, ignored)

    def _compare_tied(
        self, forms: Mapping[str, TensorForm], model: Checkpoint, equal: Callable[[str, str], bool], given_as: str
    ) -> None:
        compare_tied(forms, model, self._llm.vllm_config.model_config.hf_config, equal, given_as=given_as)

    def _check_tensors(self, given: Mapping[str, Any], model: Checkpoint) -> CheckedWeights:
        if not self.extended:
            extension = self._llm.vllm_config.parallel_config.worker_extension_cls
            raise BadWeights(
                f"a state dict needs deltarunner's worker extension, and the engine was started with "
                f"worker_extension_cls={extension!r}: let that class inherit from {_EXTENSION}, or give a folder."
            )
        if not given.keys() <= model.forms.keys():
            given = to_checkpoint_names(self._llm.vllm_config.model_config.hf_config, given) or given
        forms = {name: form_of(name, tensor) for name, tensor in given.items()}
        compare(forms, model, given_as="the state dict")
        self._compare_tied(forms, model, lambda one, other: equal_in_memory(given[one], given[other]), "the state dict")
        loaded = {name: given[name] for name in model.forms if name in given}
        dtypes = {name: self._written(forms[name], model.forms[name]) for name in loaded}
        memory = SharedWeights.of(loaded, dtypes)
        return CheckedWeights(files=(memory.path,), memory=memory)

    def _written(self, given: TensorForm, wanted: TensorForm) -> str:
        """Return the dtype in which to write a tensor.

        This is the model's dtype, which saves memory, if vLLM would round to it anyway; else the tensor's own dtype.
        """
        model_dtype = str(self._llm.vllm_config.model_config.dtype).removeprefix("torch.")
        rounded = {given.dtype, wanted.dtype} <= set(FLOATS) and wanted.dtype == model_dtype
        return model_dtype if rounded else given.dtype

    @property
    def extended(self) -> bool:
        """True if the workers have our extension."""
        given: str = self._llm.vllm_config.parallel_config.worker_extension_cls
        if given in ("", _EXTENSION):
            return given == _EXTENSION
        from vllm.utils.import_utils import resolve_obj_by_qualname

        return WeightWorker in resolve_obj_by_qualname(given).__mro__


def moves_keys(config: Any) -> bool:
    """Return whether vLLM, with this configuration, moves keys and values out of its own cache."""
    return getattr(config, "kv_transfer_config", None) is not None


def _connectors_that_keep(transfer: Any) -> Iterator[str]:
    """Yield the names of the connectors in a KVTransferConfig that have no method to drop their keys and values."""
    if transfer is None or transfer.kv_connector is None:
        return
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    if transfer.kv_connector == "MultiConnector":
        for part in transfer.kv_connector_extra_config.get("connectors", ()):
            yield from _connectors_that_keep(KVTransferConfig(**part))
    elif KVConnectorFactory.get_connector_class(transfer).reset_cache is KVConnectorBase_V1.reset_cache:
        yield transfer.kv_connector


def _signature(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return name, size in bytes and modification time in nanoseconds of each safetensors file in a folder."""
    found = sorted((path, path.stat()) for path in folder.glob("*.safetensors"))
    return tuple((path.name, stat.st_size, stat.st_mtime_ns) for path, stat in found)


def _model_folder(config: Any) -> Path:
    model = Path(config.model_config.model)
    if model.is_dir():
        return model
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            config.model_config.model,
            revision=config.model_config.revision,
            cache_dir=config.load_config.download_dir,
            allow_patterns=["*.safetensors", "*.safetensors.index.json"],
            local_files_only=True,
        )
    )
