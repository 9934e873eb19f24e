"""LoRA adapters in vLLM: each version has its own id and folder, so caches never mix versions."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import anyio
import anyio.to_thread

from runner.engines.adapters import Adapters, AdapterVersion
from runner.engines.vllm.adapter_files import AdapterRules, check_adapter, keep_adapter
from runner.engines.vllm.parallel import call_all_workers
from runner.engines.weights import TensorForm, read_folder
from runner.errors import BadOption, BadWeights, EngineDead, EngineError
from runner.logs import logger_for
from runner.models import ResolvedModel

__all__ = ["VllmAdapters"]

MAX_SHOWN_COUNT: Final = 4
"""Maximum number of modules that an error names."""
_log = logger_for("engines")

Answers: TypeAlias = Callable[[str, Awaitable[Any]], Awaitable[Any]]
"""Function that waits for vLLM's answer to a call. It raises EngineDead if vLLM dies first, and EngineError if the call
fails. The first argument is the name of the call, for errors; the second is the call itself."""


class VllmAdapters(Adapters):
    """Adapters of one `AsyncLLM`.

    In vLLM, the key of a cached prompt includes the name and the folder of the adapter. The key of an adapter's weights
    is an integer id. Each version of an adapter has its own name, folder and id. vLLM may evict an adapter and later
    read its folder again, so the folder is a private copy.
    """

    def __init__(self, llm: Any, model: ResolvedModel, answered: Answers) -> None:
        super().__init__()
        self._llm = llm
        self._model = model
        self._answered = answered
        self._rules: AdapterRules | None = None
        self._masked = False
        self._folders: set[Path] = set()
        weakref.finalize(self, _delete_all, self._folders)  # deletes the copies even if the engine is never stopped

    def request(self, version: AdapterVersion | None) -> Any:
        """Return the argument `lora_request` of vLLM's `add_request`; None without an adapter."""
        if version is None:
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest(version.label, version.key, str(version.folder))

    async def load(self, version: AdapterVersion, given: Any, config: Mapping[str, Any] | None) -> None:
        """Copy the adapter, check it against the model, and load it into vLLM.

        Raises:
            BadOption: the engine was started without support for adapters, its CPU kernels cannot be patched, tensors
                are given without a configuration, or a folder is given with one.
            BadWeights: the adapter does not fit the model, or vLLM refuses it.
        """
        if self._llm.vllm_config.lora_config is None:
            raise BadOption(
                f"add_adapter({version.name!r}): the engine was started without adapters: start it with "
                "VllmEngine(enable_lora=True, max_lora_rank=16), and max_loras=COUNT to use COUNT adapters at once."
            )
        await self._mask()
        version.folder = await anyio.to_thread.run_sync(partial(self._prepare, version, given, config))
        try:
            await self._add(version)
        except BaseException:
            self._delete(version.folder)
            raise

    async def _mask(self) -> None:
        """Patch the kernels of a CPU engine before the first adapter is loaded.

        Without the patch, adapters would also change turns without an adapter.

        Raises:
            BadOption: the engine runs on a CPU, and its kernels cannot be patched.
        """
        if self._masked or self._llm.vllm_config.device_config.device_type != "cpu":
            return
        try:
            masked = await self._answered("add_adapter()", call_all_workers(self._llm, "patch_adapters"))
        except EngineDead:
            raise
        except EngineError as error:
            raise BadOption(
                "add_adapter(): adapters on a CPU need deltarunner's worker extension, and this engine has another: "
                f"let its class inherit from runner.engines.vllm.worker.extension.WeightWorker ({error})."
            ) from error
        if not all(masked):
            raise BadOption(
                "add_adapter(): this vLLM's CPU backend applies adapters to turns without an adapter: use a GPU, or "
                "another version of vLLM."
            )
        self._masked = True

    def _prepare(self, version: AdapterVersion, given: Any, config: Mapping[str, Any] | None) -> Path:
        named = f"the adapter {version.name!r} ({version.given or 'tensors'})"
        try:
            folder = keep_adapter(given, config)
        except BadWeights as error:
            raise BadWeights(f"{named}: {error}") from error
        self._folders.add(folder)
        try:
            self._rules = self._rules or _rules(self._llm.vllm_config, self._model)
            check_adapter(folder, self._rules)
        except BadWeights as error:
            self._delete(folder)
            raise BadWeights(f"{named}: {str(error).replace(str(folder), str(version.given or 'tensors'))}") from error
        return folder

    async def _add(self, version: AdapterVersion) -> None:
        # A shield is needed: after a cancellation vLLM might keep the adapter forever.
        with anyio.CancelScope(shield=True):
            try:
                await self._answered("add_adapter()", self._llm.add_lora(self.request(version)))
            except EngineDead:
                raise
            except EngineError as error:
                raise BadWeights(f"the adapter {version.name!r}: vLLM refuses it: {error}") from error
            if unused := await self._unused_modules(version):
                await self._answered("remove_adapter()", self._llm.remove_lora(version.key))
                raise BadWeights(
                    f"the adapter {version.name!r}: vLLM applies no adapter to {_some(unused)}, and would sample "
                    "without these tensors: train the adapter without these modules (PEFT's exclude_modules)."
                )

    async def _unused_modules(self, version: AdapterVersion) -> list[str]:
        """Return the modules of a loaded adapter that no worker applies; empty if the workers cannot list them."""
        if not self._llm.vllm_config.parallel_config.worker_extension_cls:
            return []
        try:
            of_workers = await self._answered(
                "add_adapter()", call_all_workers(self._llm, "unused_adapter_modules", key=version.key)
            )
        except EngineDead:
            raise
        except EngineError as error:
            _log.warning("the adapter %r: not checked for modules that vLLM ignores: %s", version.name, error)
            return []
        # A stage of pipeline parallelism applies only the modules of its own layers.
        return sorted(set.intersection(*map(set, of_workers)))

    async def unload(self, version: AdapterVersion) -> None:
        """Unload a version that no request uses, and delete its private copy."""
        # A shield is needed: otherwise the copy could stay after vLLM unloaded the adapter.
        with anyio.CancelScope(shield=True):
            await self._answered("remove_adapter()", self._llm.remove_lora(version.key))
        self._delete(version.folder)

    def _delete(self, folder: Path | None) -> None:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
            self._folders.discard(folder)

    def close(self) -> None:
        """Delete the private copies of all versions."""
        super().close()
        _delete_all(self._folders)


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - MAX_SHOWN_COUNT} more" if len(names) > MAX_SHOWN_COUNT else ""
    return ", ".join(names[:MAX_SHOWN_COUNT]) + rest


def _delete_all(folders: set[Path]) -> None:
    while folders:
        shutil.rmtree(folders.pop(), ignore_errors=True)


def _rules(config: Any, model: ResolvedModel) -> AdapterRules:
    """Return the properties of the engine that an adapter has to match. Blocks the thread."""
    from vllm.lora.peft_helper import PEFTHelper

    highest = config.lora_config.max_lora_rank

    def check(settings: dict[str, Any]) -> None:
        rank = max([settings.get("r", 0), *(settings.get("rank_pattern") or {}).values()])
        if rank > highest:
            raise ValueError(
                f"rank {rank} is above the engine's max_lora_rank={highest}: start the engine with "
                f"VllmEngine(enable_lora=True, max_lora_rank={rank}), or the next higher value that vLLM supports."
            )
        PEFTHelper.from_dict(settings).validate_legal(config.lora_config)

    def rank_of(settings: dict[str, Any], module: str) -> int:
        peft = PEFTHelper.from_dict(settings)
        rank: int = peft.get_rank_and_scaling(module)[0] if hasattr(peft, "get_rank_and_scaling") else peft.r
        return rank

    served = config.model_config
    return AdapterRules(
        model=model.name,
        forms=_forms(model.folder),
        quantized=served.quantization is not None,
        composite=served.hf_config.get_text_config() is not served.hf_config,
        check_config=check,
        rank_of=rank_of,
    )


def _forms(folder: Path) -> Mapping[str, TensorForm]:
    try:
        return read_folder(folder).forms
    except BadWeights:  # no readable safetensors: only vLLM's own checks apply
        return {}
