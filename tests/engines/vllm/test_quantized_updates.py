"""New weights of a quantized model on the real engine, with their proof."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner import BadControl
from runner.engines.vllm.engine import VllmEngine
from runner.training import weight_proof
from runner.training.tiny_model import random_model, tiny_config

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]

CONFIGS: dict[str, dict[str, Any]] = {
    "int8": {  # linear layers by output channel, and their inputs by token
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
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False},
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    },
}
"""Settings in config.json, by kind."""
GROUP_SIZE = 128
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # required by vLLM


def quantize(model: Any, kind: str) -> dict[str, Any]:
    """Round the linear layers of a model in place, and return the tensors of its checkpoint."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if not name.endswith("proj.weight"):
            tensors[name] = tensor.clone()
        elif kind == "int8":
            tensors[name], tensors[f"{name}_scale"] = in_int8(tensor)
        else:
            layer = name.removesuffix(".weight")
            tensors |= {f"{layer}.{part}": packed for part, packed in in_int4(tensor, kind).items()}
    return tensors


def in_int8(weight: Any) -> tuple[Any, Any]:
    """Round a matrix in place, by output channel."""
    import torch

    scale = weight.abs().amax(1, keepdim=True) / 127
    whole = (weight / scale).round().to(torch.int8)
    weight.copy_(whole * scale)
    return whole, scale


def in_int4(weight: Any, kind: str) -> dict[str, Any]:
    """Round a matrix in place, by groups of its inputs, and return its tensors in GPTQ's or AWQ's form."""
    import torch

    rows, columns = weight.shape
    groups = weight.reshape(rows, -1, GROUP_SIZE)
    scale = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16().float()
    whole = (groups / scale).round().clamp(-8, 7)
    weight.copy_((whole * scale).reshape(rows, columns))
    values, scales = (whole + 8).reshape(rows, columns).t().int(), scale[..., 0].t().contiguous().bfloat16()
    zeros = torch.full_like(scales, 8, dtype=torch.int32)
    if kind == "awq":
        return {"qweight": packed(values, AWQ_ORDER), "qzeros": packed(zeros, AWQ_ORDER), "scales": scales}
    return {
        "qweight": packed(values.t(), range(8)).t().contiguous(),
        "qzeros": packed(zeros - 1, range(8)),  # the first version of the format stores zeros minus one
        "scales": scales,
        "g_idx": torch.arange(columns, dtype=torch.int32) // GROUP_SIZE,
    }


def packed(values: Any, order: Iterable[int]) -> Any:
    """Pack eight columns of values below 16 into one column of 32 bits."""
    import torch

    eights = values.long().reshape(len(values), -1, 8)
    bits = sum(eights[:, :, column] << 4 * place for place, column in enumerate(order))
    return torch.where(bits >= 2**31, bits - 2**32, bits).int().contiguous()


def save(model: Any, kind: str, folder: Path, demo_model_folder: Path) -> Path:
    from safetensors.torch import save_file

    model.config.save_pretrained(folder)
    save_file(quantize(model, kind), folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIGS[kind]}))
    for file in demo_model_folder.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.engine
@pytest.mark.apart
@pytest.mark.whole
@pytest.mark.parametrize(("kind", "dtype"), [("int8", "float32"), ("gptq", "bfloat16"), ("awq", "bfloat16")])
async def test_quantized_weights_arrive_and_are_proven(
    kind: str, dtype: str, demo_model_folder: Path, tmp_path: Path
) -> None:
    import torch
    import transformers

    vocabulary = json.loads((demo_model_folder / "config.json").read_text())["vocab_size"]
    config = transformers.LlamaConfig(
        hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, architectures=["LlamaForCausalLM"]
    )
    model = random_model(tiny_config(config, vocabulary=vocabulary))
    folder = save(model, kind, tmp_path / "start", demo_model_folder)
    async with VllmEngine(folder, template="hermes", dtype=dtype, max_model_len=512, max_num_seqs=4) as engine:
        proof = weight_proof(model, engine.tokenizer)
        with pytest.raises(BadControl, match=r"weights in .*, and the difference to the trainer"):
            await engine.update_weights(folder, proof=proof)
        first, figures = np.array(await engine.score(proof.ids)), await engine.prove(proof)
        assert 1e-3 < figures.median < 0.1, "the inputs of the layers are rounded"
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.1)
        changed = quantize(model, kind)
        update = await engine.update_weights(changed, proof=weight_proof(model, engine.tokenizer))
        assert update.proof is not None
        assert update.proof.median < 2 * figures.median
        assert np.abs(np.array(await engine.score(proof.ids)) - first).mean() > 0.1
        await engine.update_weights(folder, proof=proof)
        assert np.abs(np.array(await engine.score(proof.ids)) - first).max() < 1e-3
