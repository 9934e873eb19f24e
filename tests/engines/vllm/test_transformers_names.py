"""State dicts of transformers 5 under their checkpoints' names: exactly what `save_pretrained` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.engines.vllm.transformers_names import CheckpointSource, compare_with_checkpoint, to_checkpoint_names
from runner.engines.weights import Checkpoint, TensorForm, read_folder
from runner.errors import BadWeights

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "q_lora_rank": None}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-MoE": ("Qwen3MoeConfig", {**COMMON, **EXPERTS, "num_experts": 4}),
    "Qwen3-Next": ("Qwen3NextConfig", {**COMMON, **EXPERTS, **LINEAR, "num_experts": 4}),
    "Mixtral": ("MixtralConfig", {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "DeepSeek-V2": (
        "DeepseekV2Config",
        {**COMMON, **EXPERTS, **LATENT, "n_routed_experts": 4, "first_k_dense_replace": 1},
    ),
    "GLM-4-MoE": ("Glm4MoeConfig", {**COMMON, **EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1}),
    "GPT-NeoX": ("GPTNeoXConfig", {name: value for name, value in COMMON.items() if name != "num_key_value_heads"}),
}


def tiny(name: str) -> Any:
    kind, fields = {**CONFIGS, **TIED}[name]
    config = getattr(transformers, kind)(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    return model


def saved(model: Any, folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    return dict(load_file(folder / "model.safetensors"))


TIED: dict[str, tuple[str, dict[str, Any]]] = {
    "Bloom": ("BloomConfig", {"vocab_size": 128, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "Llama tied": ("LlamaConfig", {**COMMON, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_values_are_those_of_save_pretrained(name: str, tmp_path: Path) -> None:
    import torch

    model = tiny(name)
    wanted, converted = saved(model, tmp_path), to_checkpoint_names(model.config, model.state_dict())
    assert converted is not None
    assert converted.keys() == wanted.keys()
    assert all(torch.equal(converted[each], tensor) for each, tensor in wanted.items())


def test_a_model_whose_names_are_the_checkpoints_is_left_alone() -> None:
    config = transformers.LlamaConfig(**COMMON)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert to_checkpoint_names(config, model.state_dict()) is None


def test_a_model_that_transformers_does_not_have_is_left_alone() -> None:
    class Own:
        architectures = ("OwnForCausalLM",)

    assert to_checkpoint_names(Own(), {"a": [1.0]}) is None


@pytest.mark.parametrize("name", ["Qwen3-MoE", "GPT-NeoX", "Bloom", "Llama tied"])
def test_a_source_announces_and_sends_what_the_checkpoint_holds(name: str, tmp_path: Path) -> None:
    """A tied output layer is not in the checkpoint, and vLLM's Bloom raises an error at it."""
    base = pytest.importorskip("vllm.distributed.weight_transfer.base", reason="vLLM is not installed")
    import torch

    model = tiny(name)
    assert model.config.tie_word_embeddings == (name in TIED)
    wanted = saved(model, tmp_path)
    checkpoint = Checkpoint(name, read_folder(tmp_path).forms, tied=name in TIED)
    source = CheckpointSource(model.config, base.ModuleSource(model), checkpoint)
    announced = {one.name: (one.dtype, tuple(one.shape)) for one in source.metadata()}
    assert announced == {each: (tensor.dtype, tuple(tensor.shape)) for each, tensor in wanted.items()}
    sent = dict(source)
    assert sent.keys() == wanted.keys()
    assert all(torch.equal(sent[each], tensor) for each, tensor in wanted.items())


@pytest.mark.parametrize("name", ["Qwen3-MoE", "GPT-NeoX"])
def test_names_of_transformers_are_refused_with_their_remedy(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    checkpoint = Checkpoint(name, forms_of(saved(model, tmp_path)))
    given = forms_of(model.state_dict())
    with pytest.raises(BadWeights, match=r"no tensor of the model is called .* own model: save it again\."):
        compare_with_checkpoint(given, checkpoint, model.config, given_as="these", remedy="save it again")
    others = {f"other.{each}": form for each, form in given.items()}
    with pytest.raises(BadWeights) as raised:
        compare_with_checkpoint(others, checkpoint, model.config, given_as="these", remedy="save it again")
    assert "save it again" not in str(raised.value)


def forms_of(tensors: dict[str, Any]) -> dict[str, TensorForm]:
    return {name: TensorForm("float32", tuple(tensor.shape)) for name, tensor in tensors.items()}
