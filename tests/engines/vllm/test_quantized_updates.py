"""New weights of a quantized model on the real engine, with their proof."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner import BadControl
from runner.engines.vllm.engine import VllmEngine
from runner.training import weight_proof
from runner.training.tiny_model import random_model, tiny_config

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]

CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}
"""Linear layers in int8, by output channel; their inputs in int8, by token."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # as vLLM


def quantize(model: Any) -> dict[str, Any]:
    """Round a model to int8 in place, and return the tensors of its checkpoint."""
    import torch

    tensors = {}
    for name, tensor in model.state_dict().items():
        tensors[name] = tensor.clone()
        if name.endswith("proj.weight"):
            scale = tensor.abs().amax(1, keepdim=True) / 127
            tensors[name], tensors[f"{name}_scale"] = (tensor / scale).round().to(torch.int8), scale
            tensor.copy_(tensors[name] * scale)
    return tensors


def save(model: Any, folder: Path, demo_model_folder: Path) -> Path:
    from safetensors.torch import save_file

    model.config.save_pretrained(folder)
    save_file(quantize(model), folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))
    for file in demo_model_folder.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.engine
@pytest.mark.apart
@pytest.mark.whole
async def test_weights_in_int8_arrive_and_are_proven(demo_model_folder: Path, tmp_path: Path) -> None:
    import torch
    import transformers

    vocabulary = json.loads((demo_model_folder / "config.json").read_text())["vocab_size"]
    config = transformers.LlamaConfig(
        hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, architectures=["LlamaForCausalLM"]
    )
    model = random_model(tiny_config(config, vocabulary=vocabulary))
    folder = save(model, tmp_path / "start", demo_model_folder)
    async with VllmEngine(folder, template="hermes", dtype="float32", max_model_len=512, max_num_seqs=4) as engine:
        proof = weight_proof(model, engine.tokenizer)
        with pytest.raises(BadControl, match="weights in compressed-tensors, whose difference from the trainer"):
            await engine.update_weights(folder, proof=proof)
        first, figures = np.array(await engine.score(proof.ids)), await engine.prove(proof)
        assert 1e-3 < figures.median < 0.1, "rounding of the layers' inputs to int8"
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.1)
        changed = quantize(model)
        update = await engine.update_weights(changed, proof=weight_proof(model, engine.tokenizer))
        assert update.proof is not None
        assert update.proof.median < 1.5 * figures.median
        assert np.abs(np.array(await engine.score(proof.ids)) - first).mean() > 0.1
        await engine.update_weights(folder, proof=proof)
        assert np.abs(np.array(await engine.score(proof.ids)) - first).max() < 1e-3
