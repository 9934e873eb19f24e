"""Architectures whose weight updates are tested: sizes of a large model, which `--tiny` reduces."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

__all__ = ["ARCHITECTURES", "Architecture", "save_tiny"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture of transformers."""

    name: str
    config: str
    """The class of its configuration in transformers."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Differences from the class's default configuration."""
    tied: tuple[bool, ...] = (False, True)
    """The kinds of output layer that the architecture has: False for a separate layer, True for the embedding."""
    model: str = ""
    """The class of its model; empty if it follows from the configuration."""

    @property
    def model_class(self) -> str:
        """Return the class of its causal language model."""
        return self.model or self.config.removesuffix("Config").removesuffix("Text") + "ForCausalLM"

    def configuration(self, **further: Any) -> Any:
        """Return the configuration of transformers."""
        import transformers

        return getattr(transformers, self.config)(**self.fields, **further, architectures=[self.model_class])


_SIZES: Final[dict[str, Any]] = {"num_hidden_layers": 40, "hidden_size": 4096, "num_attention_heads": 32}
_GROUPED: Final[dict[str, Any]] = {**_SIZES, "num_key_value_heads": 8, "intermediate_size": 14336}
_EXPERTS: Final[dict[str, Any]] = {**_GROUPED, "num_experts": 64, "moe_intermediate_size": 1408}
_LATENT: Final[dict[str, Any]] = {
    **_SIZES,
    "num_key_value_heads": 32,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_ONE: Final = (False,)

ARCHITECTURES: Final = (
    Architecture("Llama", "LlamaConfig", _GROUPED),
    Architecture("Mistral", "MistralConfig", _GROUPED),
    Architecture("Qwen2", "Qwen2Config", _GROUPED),
    Architecture("Qwen3", "Qwen3Config", {**_GROUPED, "head_dim": 128}),
    Architecture("Qwen2-MoE", "Qwen2MoeConfig", {**_EXPERTS, "shared_expert_intermediate_size": 5632}),
    Architecture("Qwen3-MoE", "Qwen3MoeConfig", {**_EXPERTS, "head_dim": 128}),
    Architecture("Qwen3-Next", "Qwen3NextConfig", {**_EXPERTS, "head_dim": 256}),
    Architecture("Gemma", "GemmaConfig", {**_GROUPED, "head_dim": 256}, tied=(True,)),
    Architecture("Gemma 2", "Gemma2Config", {**_GROUPED, "head_dim": 256}, tied=(True,)),
    Architecture("Gemma 3", "Gemma3TextConfig", {**_GROUPED, "head_dim": 256}, tied=(True,)),
    Architecture("Phi", "PhiConfig", {**_SIZES, "intermediate_size": 8192}, tied=_ONE),
    Architecture("Phi-3", "Phi3Config", {**_GROUPED, "pad_token_id": 0}),
    Architecture("Phi-3.5-MoE", "PhimoeConfig", {**_GROUPED, "num_local_experts": 16}, tied=_ONE),
    Architecture("Granite", "GraniteConfig", _GROUPED),
    Architecture("GraniteMoE", "GraniteMoeConfig", {**_GROUPED, "num_local_experts": 32}),
    Architecture(
        "Granite 4 (hybrid)",
        "GraniteMoeHybridConfig",
        {**_GROUPED, "num_local_experts": 32, "layer_types": ["mamba", "attention"] * 20},
    ),
    Architecture("Cohere", "CohereConfig", _GROUPED, tied=(True,)),
    Architecture("Cohere 2", "Cohere2Config", _GROUPED, tied=(True,)),
    Architecture("OLMo", "OlmoConfig", _GROUPED),
    Architecture("OLMo 2", "Olmo2Config", _GROUPED),
    Architecture("OLMo 3", "Olmo3Config", _GROUPED),
    Architecture("OLMoE", "OlmoeConfig", {**_GROUPED, "num_experts": 64}),
    Architecture("GPT-NeoX", "GPTNeoXConfig", {**_SIZES, "intermediate_size": 8192}, tied=_ONE),
    Architecture(
        "GPT-2", "GPT2Config", {"n_embd": 1024, "n_layer": 24, "n_head": 16}, tied=(True,), model="GPT2LMHeadModel"
    ),
    Architecture("GPT-J", "GPTJConfig", {"n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64}, tied=_ONE),
    Architecture("OPT", "OPTConfig", {**_SIZES, "ffn_dim": 8192, "word_embed_proj_dim": 4096}, tied=(True,)),
    Architecture("Falcon", "FalconConfig", {**_SIZES}, tied=(True,)),
    Architecture("StableLM", "StableLmConfig", _GROUPED, tied=_ONE),
    Architecture("Starcoder 2", "Starcoder2Config", _GROUPED),
    Architecture("Mixtral", "MixtralConfig", {**_GROUPED, "num_local_experts": 8}),
    Architecture("DeepSeek V2", "DeepseekV2Config", {**_LATENT, "num_experts_per_tok": 6}, tied=_ONE),
    Architecture(
        "DeepSeek V3",
        "DeepseekV3Config",
        {**_LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        tied=_ONE,
    ),
    Architecture("gpt-oss", "GptOssConfig", {**_GROUPED, "num_local_experts": 128, "head_dim": 64}, tied=_ONE),
    Architecture("GLM", "GlmConfig", {**_GROUPED, "head_dim": 128, "pad_token_id": 0}, tied=_ONE),
    Architecture("GLM 4", "Glm4Config", {**_GROUPED, "head_dim": 128, "pad_token_id": 0}, tied=_ONE),
    Architecture("GLM 4 MoE", "Glm4MoeConfig", {**_GROUPED, "head_dim": 128, "n_routed_experts": 64}, tied=_ONE),
    Architecture("Nemotron", "NemotronConfig", {**_GROUPED, "head_dim": 128}, tied=_ONE),
    Architecture("Nemotron-H", "NemotronHConfig", {**_GROUPED, "head_dim": 128}, tied=_ONE),
    Architecture("Falcon-H1", "FalconH1Config", {**_GROUPED, "head_dim": 128}, tied=_ONE),
    Architecture("Bamba", "BambaConfig", {**_GROUPED, "attn_layer_indices": [1, 3]}, tied=_ONE),
    Architecture("Jamba", "JambaConfig", {**_GROUPED, "num_experts": 16, "use_mamba_kernels": False}, tied=_ONE),
    Architecture("Mamba 2", "Mamba2Config", {"hidden_size": 4096, "num_hidden_layers": 40}, tied=_ONE),
    Architecture("LFM 2", "Lfm2Config", _GROUPED, tied=(True,)),
    Architecture("SmolLM 3", "SmolLM3Config", {**_GROUPED, "pad_token_id": 0}),
    Architecture("Seed-OSS", "SeedOssConfig", {**_GROUPED, "head_dim": 128}, tied=_ONE),
    Architecture("ERNIE 4.5", "Ernie4_5Config", {**_GROUPED, "head_dim": 128}),
    Architecture("EXAONE 4", "Exaone4Config", _GROUPED),
    Architecture("Hunyuan", "HunYuanDenseV1Config", {**_GROUPED, "head_dim": 128}),
    Architecture("Apertus", "ApertusConfig", _GROUPED, tied=_ONE),
    Architecture("Arcee", "ArceeConfig", _GROUPED, tied=_ONE),
    Architecture(
        "dots.llm1",
        "Dots1Config",
        {
            **_GROUPED,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 6,
        },
        tied=_ONE,
    ),
)
"""In the order of the page."""


def save_tiny(name: str, folder: Path, tokenizer: Path) -> Any:
    """Save a tiny model of an architecture with the tokenizer of another folder, and return the model."""
    from runner.training.tiny_model import save_tiny_model

    architecture = next(each for each in ARCHITECTURES if each.name == name)
    vocabulary = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    with TemporaryDirectory() as source:
        architecture.configuration().save_pretrained(source)
        return save_tiny_model(Path(source), folder, tokenizer=tokenizer, vocabulary=vocabulary)
