"""A small model's tensors, and a stand-in for vLLM that records its calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import anyio
import torch
from safetensors.torch import save_file

from runner.engines.vllm.weight_loading import VllmWeights
from runner.engines.vllm.worker.extension import WeightWorker

__all__ = [
    "EMBEDDING",
    "NORM",
    "OURS",
    "UP",
    "Llm",
    "Source",
    "Tensors",
    "llm_of",
    "load",
    "same",
    "saved",
    "tensors",
    "without",
]

OURS = "runner.engines.vllm.worker.extension.WeightWorker"
EMBEDDING, UP, NORM = "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"

Tensors = dict[str, torch.Tensor]


def tensors() -> Tensors:
    return {
        EMBEDDING: torch.arange(24).reshape(6, 4).to(torch.bfloat16),
        UP: torch.ones(2, 4, dtype=torch.bfloat16),
        NORM: torch.ones(4, dtype=torch.bfloat16),
        "table": torch.arange(3),
    }


def saved(folder: Path, *parts: Mapping[str, torch.Tensor], index: Mapping[str, str] | None = None) -> Path:
    """Save a folder of safetensors, with one file for each part."""
    folder.mkdir(exist_ok=True)
    for number, part in enumerate(parts):
        name = "model.safetensors" if len(parts) == 1 else f"model-{number}.safetensors"
        save_file(dict(part), folder / name, metadata={"format": "pt"})
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


class Llm:
    """Stand-in for vLLM that records its calls, and reads weights as a worker does."""

    def __init__(
        self,
        model: Path,
        *,
        extension: str = OURS,
        tied: bool = False,
        transfer: bool = False,
        device: str = "cuda",
        compiled: int = 0,
    ) -> None:
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                config_format="auto",
                architectures=["LlamaForCausalLM"],
                model=str(model),
                dtype=torch.bfloat16,
                hf_config=SimpleNamespace(tie_word_embeddings=tied),
            ),
            load_config=SimpleNamespace(load_format="auto", download_dir=None),
            parallel_config=SimpleNamespace(worker_extension_cls=extension),
            weight_transfer_config=SimpleNamespace(backend="nccl") if transfer else None,
            device_config=SimpleNamespace(device_type=device),
            compilation_config=SimpleNamespace(mode=compiled),
        )
        self.asked: list[Any] = []
        self.loaded: Tensors = {}
        self.fails = ""
        self.hangs = ""

    async def _ask(self, name: str, given: Any = None) -> None:
        self.asked.append((name, given) if given is not None else name)
        if name == self.fails:
            raise RuntimeError(f"the worker failed\nin {name}")
        if name == self.hangs:
            await anyio.sleep_forever()

    async def collective_rpc(self, method: str, *, kwargs: dict[str, Any]) -> None:
        await self._ask(method, kwargs)
        if method == "load_weight_files":
            self.loaded = {}
            worker = WeightWorker()
            worker.reload_weights = lambda weights_iterator: self.loaded.update(weights_iterator)
            worker.load_weight_files(**kwargs)

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self._ask("init", request.init_info)

    async def start_weight_update(self) -> None:
        await self._ask("start")

    async def update_weights(self, request: Any) -> None:
        await self._ask("update", request.update_info["names"])

    async def finish_weight_update(self) -> None:
        await self._ask("finish")


class Listed(NamedTuple):
    """A tensor's shape and type, like vLLM's `ParamMeta`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Source:
    """A trainer's model, as vLLM's `WeightSource`."""

    def __init__(self, given: Mapping[str, torch.Tensor]) -> None:
        self.given = given

    def metadata(self) -> list[Any]:
        return [Listed(name, one.dtype, tuple(one.shape)) for name, one in self.given.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.given.items())


def without(name: str) -> Tensors:
    return {other: tensor for other, tensor in tensors().items() if other != name}


def llm_of(weights: VllmWeights) -> Llm:
    llm: Llm = weights._llm
    return llm


def same(loaded: Tensors, wanted: Tensors) -> bool:
    return loaded.keys() == wanted.keys() and all(torch.equal(loaded[name], wanted[name]) for name in wanted)


async def load(weights: VllmWeights, source: Any) -> Tensors:
    await weights.load(await weights.check(source))
    return llm_of(weights).loaded
