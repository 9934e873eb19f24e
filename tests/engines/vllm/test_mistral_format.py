"""Folders with weights in Hugging Face's format and in Mistral's: the names and files of the first are used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from runner import BadWeights, VllmEngine
from runner.engines.vllm.mistral_format import chosen_load_format, needs_mistral_names, require_own_reload
from runner.engines.weights import INDEX, read_folder
from runner.training import weight_proof
from tests.engines.test_proofs import step
from tests.weight_conformance.architectures import save_tiny

SHARD = "model-00001-of-00001.safetensors"
OTHER = "consolidated.safetensors"


def written(folder: Path, *files: str, architecture: str = "MistralForCausalLM") -> Path:
    """Write a folder with the named files; each weight file has one tensor with the name of its format."""
    folder.mkdir(exist_ok=True)
    names = {SHARD: "model.norm.weight", "model.safetensors": "model.norm.weight", OTHER: "norm.weight"}
    for file in files:
        if file == INDEX:
            (folder / file).write_text(json.dumps({"weight_map": {"model.norm.weight": SHARD}}))
        elif file in names:
            save_file({names[file]: np.ones(4, np.float32)}, folder / file)
        else:
            (folder / file).write_text(json.dumps({"architectures": [architecture]}))
    return folder


@pytest.mark.parametrize(
    ("files", "mistral_names", "read"),
    [
        ((SHARD, INDEX, OTHER), False, "model.norm.weight"),
        ((SHARD, INDEX, OTHER), True, "norm.weight"),
        (("model.safetensors", OTHER), False, "model.norm.weight"),
        (("model.safetensors", OTHER), True, "norm.weight"),
        (("model.safetensors",), True, "model.norm.weight"),
        ((OTHER,), False, "norm.weight"),
        ((OTHER, INDEX), False, "norm.weight"),  # the index was downloaded without its files
    ],
)
def test_names_of_hugging_face_are_read_if_a_folder_has_them(
    tmp_path: Path, files: tuple[str, ...], mistral_names: bool, read: str
) -> None:
    found = read_folder(written(tmp_path, *files), mistral_names=mistral_names)
    assert list(found.forms) == [read]


def test_index_without_any_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadWeights, match=f"{SHARD} is missing"):
        read_folder(written(tmp_path, INDEX))


@pytest.mark.parametrize(
    ("files", "architecture", "chosen"),
    [
        ((SHARD, INDEX, OTHER, "config.json"), "MistralForCausalLM", "hf"),
        ((SHARD, INDEX, "config.json"), "MistralForCausalLM", None),
        (("model.safetensors", OTHER, "config.json"), "MistralForCausalLM", None),
        ((INDEX, OTHER, "config.json"), "MistralForCausalLM", None),
        ((SHARD, INDEX, OTHER, "config.json"), "PixtralForConditionalGeneration", None),
        ((SHARD, INDEX, OTHER), "MistralForCausalLM", None),
    ],
)
def test_vllm_reads_the_copy_that_trainers_write(
    tmp_path: Path, files: tuple[str, ...], architecture: str, chosen: str | None
) -> None:
    assert chosen_load_format(written(tmp_path, *files, architecture=architecture)) == chosen


@pytest.mark.parametrize(
    ("config_format", "files", "architecture", "needs"),
    [
        ("auto", (OTHER, "params.json"), "PixtralForConditionalGeneration", True),
        ("auto", (OTHER, "params.json"), "MistralForCausalLM", False),
        ("auto", (OTHER,), "PixtralForConditionalGeneration", False),
        ("auto", ("params.json",), "PixtralForConditionalGeneration", False),
        ("mistral", (), "PixtralForConditionalGeneration", True),
        ("hf", (OTHER, "params.json"), "PixtralForConditionalGeneration", False),
    ],
)
def test_mistral_names_are_needed_by_classes_that_load_no_others(
    tmp_path: Path, config_format: str, files: tuple[str, ...], architecture: str, needs: bool
) -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(config_format=config_format, architectures=[architecture]))
    assert needs_mistral_names(config, written(tmp_path, *files)) is needs


def test_reload_by_vllm_of_an_old_copy_is_refused(tmp_path: Path) -> None:
    both = read_folder(written(tmp_path / "both", "model.safetensors", OTHER))
    auto, hugging_face = (SimpleNamespace(load_config=SimpleNamespace(load_format=name)) for name in ("auto", "hf"))
    with pytest.raises(BadWeights, match=r"two formats, and vLLM's own reload reads only consolidated\.safetensors"):
        require_own_reload(auto, both)
    require_own_reload(hugging_face, both)
    for alone in ("model.safetensors", OTHER):
        require_own_reload(auto, read_folder(written(tmp_path / alone, alone)))


_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "model.": "",
    "self_attn": "attention",
    "mlp": "feed_forward",
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def in_mistral_format(model: Any) -> dict[str, Any]:
    """Return the weights of a model of transformers as Mistral's files have them."""
    config, made = model.config, {}
    for name, tensor in model.state_dict().items():
        renamed = name
        for theirs, mistral in _NAMES.items():
            renamed = renamed.replace(theirs, mistral)
        values = tensor.detach()
        if ".wq." in renamed or ".wk." in renamed:  # the two halves of each head alternate
            heads = values.shape[0] // config.head_dim
            values = values.view(heads, 2, config.head_dim // 2, -1).transpose(1, 2).reshape(values.shape)
        made[renamed] = values.contiguous().numpy().copy()
    return made


@pytest.mark.anyio
@pytest.mark.asyncio_alone
@pytest.mark.engine
@pytest.mark.apart
@pytest.mark.whole
@pytest.mark.parametrize("has_index", [True, False])
async def test_weights_and_adapters_of_a_trainer_fit_a_folder_of_both(
    demo_model_folder: Path, tmp_path: Path, has_index: bool
) -> None:
    from peft import LoraConfig, get_peft_model

    folder = tmp_path / "start"
    model = save_tiny("Mistral", folder, demo_model_folder)
    save_file(in_mistral_format(model), folder / OTHER)
    if has_index:  # these weights are newer than those of the other copy, which a trainer does not write
        (folder / "model.safetensors").unlink()
        step(model, 0.05)
        model.save_pretrained(folder, max_shard_size="100KB")
        assert (folder / INDEX).is_file()
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "enable_lora": True}
    async with VllmEngine(folder, template="hermes", **options) as engine:
        await engine.prove(weight_proof(model, engine.tokenizer))
        step(model, 0.05)
        await engine.update_weights(model.state_dict(), proof=weight_proof(model, engine.tokenizer))
        step(model, 0.05)
        new = shutil.copytree(folder, tmp_path / "new")
        model.save_pretrained(new, **({"max_shard_size": "100KB"} if has_index else {}))
        await engine.update_weights(new, proof=weight_proof(model, engine.tokenizer))
        adapter = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        adapter.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
        await engine.add_adapter("poet", tmp_path / "adapter")
