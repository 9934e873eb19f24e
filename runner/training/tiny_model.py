"""Tiny models: the architecture of a configuration with few layers and random weights."""

from __future__ import annotations

import copy
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from runner.errors import BadModel, one_line

__all__ = ["float_tensors", "random_model", "save_tiny_model", "tensor_kind", "tiny_config"]

HIDDEN_SIZE: Final = 256
HEAD_COUNT: Final = 4
MAX_CONTEXT: Final = 4096
LAYER_COUNTS: Final = (2, 3, 4, 6, 8)
"""Numbers of layers to try until every kind of tensor is present. Some models begin with several dense layers."""
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_SIZES: Final = {
    "intermediate_size": 512,
    "ffn_dim": 512,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
_HYBRID: Final = {
    "attn_layer_indices": [1],
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 0,
}
"""Attention in the second of two layers, for configurations that compute the types of their layers."""
_TOKENIZER_FILES: Final = ("tokenizer*", "chat_template*", "special_tokens_map.json", "vocab*", "merges.txt")


def tensor_kind(name: str) -> str:
    """Return the name of a tensor with * for the numbers of layers and experts."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def float_tensors(model: Any) -> dict[str, Any]:
    """Return the floating-point parameters and persistent buffers of a torch model by name; tied tensors once.

    Buffers of a checkpoint are weights too, such as the bias by which DeepSeek V3 chooses experts.
    """
    named = model.state_dict(keep_vars=True).items()
    first: dict[int, str] = {id(tensor): name for name, tensor in reversed(list(named)) if tensor.is_floating_point()}
    return {name: tensor for name, tensor in named if first.get(id(tensor)) == name}


def tiny_config(config: Any, *, vocabulary: int | None = None) -> Any:
    """Return the configuration with few layers, small sizes and few experts, but every kind of tensor.

    Args:
        config: transformers' configuration; not changed.
        vocabulary: number of ids; None keeps the configuration's number.

    Raises:
        BadModel: transformers cannot create the model, or its first layers do not have every kind of tensor.
    """
    whole, missing = _tensor_kinds(config), set[str]()
    for count in LAYER_COUNTS:
        tiny = _shrunk(config, vocabulary, count)
        missing = whole - _tensor_kinds(tiny)
        if not missing:
            return tiny
    raise BadModel(
        f"{type(config).__name__}: a model of its first {LAYER_COUNTS[-1]} layers does not have these tensors: "
        f"{', '.join(sorted(missing))[:300]}. Check the model without --tiny."
    )


def _tensor_kinds(config: Any) -> set[str]:
    """Return the kinds of tensors of a configuration's model, which is created without memory for its tensors."""
    import torch

    with torch.device("meta"):
        return set(map(tensor_kind, float_tensors(_created(copy.deepcopy(config)))))


def _created(config: Any) -> Any:
    """Return the model of a configuration.

    Raises:
        BadModel: transformers does not have it, or cannot create it.
    """
    import transformers

    try:
        return transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:  # models of transformers may raise anything
        raise BadModel(f"transformers cannot create a model of {type(config).__name__}: {one_line(error)}") from error


def _shrunk(config: Any, vocabulary: int | None, layers: int) -> Any:
    """Return a copy of the configuration with small sizes, and with `layers` layers or more (see `_layers`)."""
    tiny = copy.deepcopy(config)
    if getattr(tiny, "quantization_config", None) is not None:
        del tiny.quantization_config  # random weights are not quantized
    text = tiny.get_text_config()
    heads = getattr(text, "num_attention_heads", HEAD_COUNT)  # a model with only recurrent layers has no such setting
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    grouped = getattr(text, "num_key_value_heads", None) not in (None, heads)
    hidden = HIDDEN_SIZE if getattr(text, "head_dim", None) else HEAD_COUNT * head_size
    changes: dict[str, Any] = {
        "hidden_size": hidden,
        "num_attention_heads": HEAD_COUNT,
        "num_key_value_heads": HEAD_COUNT // 2 if grouped else HEAD_COUNT,
        "max_position_embeddings": min(MAX_CONTEXT, getattr(text, "max_position_embeddings", MAX_CONTEXT)),
        "vocab_size": vocabulary,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "first_k_dense_replace": 1,
        **_HYBRID,
        **_layers(text, layers),
        **_SIZES,
        **{name: min(8, getattr(text, name, None) or 8) for name in _EXPERTS},
    }
    if embedding := getattr(text, "word_embed_proj_dim", None):  # a setting of OPT, often below the hidden size
        changes["word_embed_proj_dim"] = hidden * embedding // text.hidden_size
    if isinstance(getattr(text, "mamba_d_head", None), int) and hasattr(text, "mamba_expand"):
        inner = text.mamba_expand * hidden
        changes |= {"mamba_n_heads": inner // text.mamba_d_head, "mamba_d_ssm": inner}
    if getattr(text, "model_type", "") == "mamba2":
        changes |= {"num_heads": text.expand * hidden // head_size}
    for name, value in changes.items():
        if value is not None and getattr(text, name, None) is not None:
            with suppress(AttributeError):  # a setting that is computed from others cannot be set
                setattr(text, name, value)
    return tiny


def _layers(text: Any, count: int) -> dict[str, Any]:
    """Return the settings of `count` layers, and of their types if the configuration lists them.

    Each type occurs at least once, so there may be more layers.
    """
    types = getattr(text, "layer_types", None)
    if not types:
        return {"num_hidden_layers": count}
    each = list(dict.fromkeys(types))
    kept = (each * count)[: max(count, len(each))]
    return {"num_hidden_layers": len(kept), "layer_types": kept}


def random_model(config: Any, *, seed: int = 0) -> Any:
    """Return a float32 model whose random weights differ enough for every tensor to matter.

    Raises:
        BadModel: transformers does not have the model, or cannot create it from this configuration.
    """
    import torch

    torch.manual_seed(seed)
    model = _created(config).float().eval()
    with torch.no_grad():
        for tensor in float_tensors(model).values():
            if tensor.ndim >= 2 and tensor.count_nonzero():
                tensor.mul_(3.0)
            else:
                tensor.add_(torch.randn_like(tensor) * 0.2)
    return model


def save_tiny_model(source: Path, folder: Path, *, tokenizer: Path, vocabulary: int | None = None) -> Any:
    """Create a tiny model from the configuration in `source`, save it in `folder` with a tokenizer, and return it.

    Args:
        source: a folder with a config.json.
        folder: folder to save the model in.
        tokenizer: folder of the tokenizer and chat template, whose files are copied.
        vocabulary: number of ids; None keeps the number in the configuration.

    Raises:
        BadModel: transformers cannot read the configuration, or cannot create the model.
    """
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(source)
    except Exception as error:  # models of transformers may raise anything
        raise BadModel(f"{source} has no configuration that transformers reads: {one_line(error)}") from error
    model = random_model(tiny_config(config, vocabulary=vocabulary))
    model.save_pretrained(folder)
    for pattern in _TOKENIZER_FILES:
        for file in tokenizer.glob(pattern):
            shutil.copy(file, folder / file.name)
    return model
