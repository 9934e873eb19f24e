"""New weights of tiny models on the real engine, compared with transformers: no copy of the old weights stays."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runner.engines.base import GenerationRequest
from runner.engines.vllm.engine import VllmEngine
from runner.engines.vllm.weight_loading import VllmWeights
from runner.engines.vllm.worker.reload_patch import _Copies
from runner.errors import BadModel, BadWeights, EngineDead
from runner.options import Sampling
from runner.training import weight_proof
from runner.training.tiny_model import random_model
from tests import sweeps
from tests.engines.small_weights import Llm, saved, tensors

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]

TOLERANCE_NATS = 2e-3  # float32; a stale output layer changes log-probabilities by 0.1 or more
PROMPT = list(range(1000, 1040))
SAMPLED_KINDS = ("experts", "mlp.gate", "q_proj", "embed_tokens")
"""Parts of the names of the tensors that a sampled sweep changes: tensors that vLLM packs, fuses or ties."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # required by vLLM


def _tiny(kind: str, vocabulary: int) -> Any:
    """A model of two layers with random weights that differ enough for every tensor to matter."""
    import transformers

    common: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "head_dim": 64,
    }
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
    configs: dict[str, Any] = {
        "llama tied": lambda: transformers.LlamaConfig(**common, tie_word_embeddings=True),
        "qwen2 tied": lambda: transformers.Qwen2Config(
            **{name: value for name, value in common.items() if name != "head_dim"}, tie_word_embeddings=True
        ),
        "qwen3 moe": lambda: transformers.Qwen3MoeConfig(**common, **experts, num_experts=8, tie_word_embeddings=False),
        "mixtral": lambda: transformers.MixtralConfig(
            **common, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
        ),
        "gpt-oss": lambda: transformers.GptOssConfig(
            **common, num_local_experts=4, num_experts_per_tok=2, sliding_window=128, tie_word_embeddings=False
        ),
    }
    return random_model(configs[kind](), seed=3)


def _changed_kinds(model: Any) -> Iterator[str]:
    """Change each kind of tensor alone, by a third of its spread, and yield the kind's name. The embedding is last."""
    import torch

    kinds: dict[str, list[Any]] = {}
    for name, parameter in model.named_parameters():
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(parameter)
    for kind in sorted(kinds, key=lambda name: "embed_tokens" in name):
        if not sweeps.whole() and not any(part in kind for part in SAMPLED_KINDS):
            continue
        with torch.no_grad():
            for parameter in kinds[kind]:
                parameter.add_(torch.randn_like(parameter) * max(float(parameter.std()), 0.02) * 0.3)
        yield kind


def _save(model: Any, folder: Path, demo_model_folder: Path) -> Path:
    model.save_pretrained(folder)
    for file in demo_model_folder.iterdir():
        if file.name.startswith(("tokenizer", "chat_template")):
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


async def _largest_difference(engine: VllmEngine, model: Any) -> float:
    """The largest difference in nats between the log-probabilities of the engine and of transformers."""
    import torch

    await engine.reset_prefix_cache()
    sampling = dataclasses.replace(Sampling.defaults(), max_tokens=16, temperature=1.0)
    async with engine.stream(GenerationRequest(name="turn", prompt=PROMPT, sampling=sampling, seed=5)) as stream:
        deltas = [delta async for delta in stream]
    ids = [token_id for delta in deltas for token_id in delta.token_ids]
    logprobs = torch.tensor([logprob for delta in deltas for logprob in delta.logprobs or ()])
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    expected = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert len(logprobs) == len(ids) == 16
    return float((logprobs - expected).abs().max())


@pytest.mark.engine
@pytest.mark.apart
@pytest.mark.parametrize(
    "kind",
    [
        "qwen3 moe",
        pytest.param("llama tied", marks=pytest.mark.whole),
        pytest.param("qwen2 tied", marks=pytest.mark.whole),
        pytest.param("mixtral", marks=pytest.mark.whole),
        pytest.param("gpt-oss", marks=pytest.mark.whole),
    ],
)
async def test_each_kind_of_tensor_arrives_on_a_cpu(kind: str, demo_model_folder: Path, tmp_path: Path) -> None:
    import json

    vocabulary = json.loads((demo_model_folder / "config.json").read_text())["vocab_size"]
    model = _tiny(kind, vocabulary)
    start = _save(model, tmp_path / "start", demo_model_folder)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4}
    async with VllmEngine(str(start), template="hermes", **options) as engine:
        assert await _largest_difference(engine, model) < TOLERANCE_NATS
        await engine.update_weights(start)
        assert await _largest_difference(engine, model) < TOLERANCE_NATS, "its own weights again"
        wrong = {}
        for name in _changed_kinds(model):
            model.save_pretrained(tmp_path / "new")
            await engine.update_weights(tmp_path / "new")
            if (after := await _largest_difference(engine, model)) > TOLERANCE_NATS:
                wrong[name] = after
        assert not wrong
        next(_changed_kinds(model))
        await engine.update_weights(model.state_dict())  # with the names of transformers 5
        assert await _largest_difference(engine, model) < TOLERANCE_NATS


@pytest.mark.engine
@pytest.mark.apart
@pytest.mark.whole
async def test_unpatched_reload_keeps_a_tied_output_layer(demo_model_folder: Path, tmp_path: Path) -> None:
    import json

    vocabulary = json.loads((demo_model_folder / "config.json").read_text())["vocab_size"]
    model = _tiny("llama tied", vocabulary)
    start = _save(model, tmp_path / "start", demo_model_folder)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4}
    worker = "tests.engines.stale_worker.UnpatchedReloadWorker"
    async with VllmEngine(str(start), template="hermes", worker_extension_cls=worker, **options) as engine:
        assert list(_changed_kinds(model))
        await engine.update_weights(model.state_dict())
        assert await _largest_difference(engine, model) > 50 * TOLERANCE_NATS, "vLLM has fixed it: remove the patch"


@pytest.mark.engine
@pytest.mark.apart
@pytest.mark.whole
async def test_two_swapped_experts_hold_no_proof(demo_model_folder: Path, tmp_path: Path) -> None:
    import json

    import torch

    vocabulary = json.loads((demo_model_folder / "config.json").read_text())["vocab_size"]
    model = _tiny("qwen3 moe", vocabulary)
    start = _save(model, tmp_path / "start", demo_model_folder)
    async with VllmEngine(str(start), template="hermes", dtype="float32", max_model_len=1024, max_num_seqs=4) as engine:
        right = weight_proof(model, engine.tokenizer)
        await engine.prove(right)
        assert (await engine.update_weights(model.state_dict(), proof=right)).proof is not None
        experts = model.model.layers[1].mlp.experts.down_proj
        with torch.no_grad():
            experts[[0, 1]] = experts[[1, 0]]
        with pytest.raises(EngineDead, match=r"the proof of the weights .* does not hold"):
            await engine.update_weights(model.state_dict(), proof=right)


@pytest.mark.engine
@pytest.mark.apart
@pytest.mark.whole
async def test_adapters_on_experts_are_refused_on_a_cpu(demo_model_folder: Path, tmp_path: Path) -> None:
    start = _save(_tiny("qwen3 moe", 1000), tmp_path / "start", demo_model_folder)
    with pytest.raises(BadModel, match="vLLM supports adapters on experts only on GPUs; leave out enable_lora"):
        async with VllmEngine(str(start), template="hermes", dtype="float32", max_model_len=512, enable_lora=True):
            pass


async def test_compiled_model_on_a_cpu_is_refused(tmp_path: Path) -> None:
    weights = VllmWeights(Llm(saved(tmp_path / "model", tensors()), device="cpu", compiled=3), "the model")
    with pytest.raises(BadWeights, match="start the engine with enforce_eager=True"):
        await weights.check(tensors())


async def test_cpu_engine_without_our_extension_is_refused(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", tensors())
    weights = VllmWeights(Llm(model, device="cpu", extension=""), "the model")
    with pytest.raises(BadWeights, match="own reload leaves packed copies of the old weights"):
        await weights.check(model)


# --- functions with packed copies


def layer_with(function: Any, **attributes: Any) -> Any:
    """Return a layer with a vLLM function of the layer and a tensor, under the name in `attributes`."""
    import torch

    layer = torch.nn.Linear(2, 2)
    for name, value in attributes.items():
        setattr(layer, name, value)
    layer.kernel = function(layer, torch.randn(2, 2))
    return layer


def closure(layer: Any, packed: Any) -> Any:
    def kernel(value: Any, scale: Any = packed) -> Any:
        return value @ packed + scale.sum() + layer.bias

    kernel.__module__ = "vllm.planted"
    return kernel


def closure_in_a_closure(layer: Any, packed: Any) -> Any:
    inner = closure(layer, packed)

    def kernel(value: Any) -> Any:
        return 2 * inner(value)

    kernel.__module__ = "vllm.planted"
    return kernel


def apply(layer: Any, packed: Any, value: Any) -> Any:
    return value @ packed + layer.bias


@pytest.mark.parametrize(
    "made",
    [
        closure,
        closure_in_a_closure,
        lambda layer, packed: functools.partial(apply, layer, packed),
        lambda layer, packed: functools.partial(closure(layer, packed), scale=packed),
        lambda _, packed: functools.partial(apply, SimpleNamespace(bias=0), packed),
    ],
)
def test_packed_copy_beside_a_layer_is_renewed(made: Any) -> None:
    """The function computes with the new copy, and refers to the running model's layer."""
    import torch

    old, new = layer_with(made), layer_with(made)
    copies = _Copies()
    copies.add("layer", old, new)
    copies.apply()
    given = torch.randn(3, 2)
    wanted = new.kernel(given)
    assert torch.equal(old.kernel(given), wanted)
    with torch.no_grad():
        new.bias.add_(1.0)
    assert torch.equal(old.kernel(given), wanted), "the second model is not used"


def test_other_function_with_a_layer_is_refused() -> None:
    old, new = layer_with(closure), layer_with(closure_in_a_closure)
    with pytest.raises(RuntimeError, match=r"layer.kernel is another function in the running model"):
        _Copies().add("layer", old, new)


def test_number_in_a_tuple_is_renewed() -> None:
    old, new = layer_with(closure, scales=(0.5, "all")), layer_with(closure, scales=(0.25, "all"))
    copies = _Copies()
    copies.add("layer", old, new)
    copies.apply()
    assert old.scales == (0.25, "all")


@pytest.mark.parametrize(
    ("mine", "made", "place"),
    [
        (np.zeros(2), np.ones(2), "layer.values"),
        ([np.zeros(2)], [np.ones(2)], r"layer.values\[0\]"),
        ([torch.zeros(2)], [torch.zeros(2), torch.ones(2)], "layer.values"),
        ({}, {"packed": torch.ones(2)}, r"layer.values\['packed'\]"),
        (None, (torch.ones(2),), "layer.values"),
    ],
    ids=["array", "array in a list", "other length", "other key", "other type"],
)
def test_copy_of_an_unknown_kind_is_refused(mine: Any, made: Any, place: str) -> None:
    old, new = layer_with(closure, values=mine), layer_with(closure, values=made)
    with pytest.raises(RuntimeError, match=rf"^{place} is a \w+ that may hold old weights"):
        _Copies().add("layer", old, new)


def test_settings_of_a_layer_are_left_as_they_are() -> None:
    settings = {"sizes": np.array([1, 2]), "names": ["q", "k"], "kinds": {1, 2}, "more": {"a": None}}
    old, new = layer_with(closure, values=dict(settings)), layer_with(closure, values={**settings, "new": [1]})
    _Copies().add("layer", old, new)
    assert old.values == settings


def test_handle_of_packed_weights_is_renewed_with_its_scales() -> None:
    """The kernel has addresses of scales that belong to the second model."""
    import torch

    kinds: dict[str, Any] = {}

    def of_vllm(name: str, module: str) -> Any:
        return kinds.setdefault(name, type(name, (), {"__module__": module}))()

    def layer() -> Any:
        made = torch.nn.Linear(2, 2)
        made.kernel = of_vllm("Kernel", "vllm.planted")
        made.kernel.handler = of_vllm("CPUDNNLGEMMHandler", "vllm._custom_ops")
        return made

    old, new = layer(), layer()
    handle, kernel = new.kernel.handler, old.kernel
    copies = _Copies()
    copies.add("layer", old, new)
    copies.apply()
    assert old.kernel is kernel
    assert old.kernel.handler is handle
    assert handle.tensors == [new.weight, new.bias]
