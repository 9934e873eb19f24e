"""Configurations: NeMo RL's own are accepted unchanged, and an invalid one is one error with the key and the fix."""

from __future__ import annotations

import json
from collections import UserDict
from typing import Any

import pytest

from runner import BadOption, ScriptedEngine
from runner.generation import Generation
from runner.generation.config import GenerationSettings
from runner.options import Sampling

NEMO = json.loads("""
{
    "backend": "vllm",
    "max_new_tokens": 512,
    "temperature": 0.9,
    "top_p": 0.95,
    "top_k": null,
    "val_temperature": 0.0,
    "val_top_p": 1.0,
    "val_top_k": null,
    "model_name": "Qwen/Qwen2.5-1.5B",
    "stop_token_ids": [151643],
    "stop_strings": ["</answer>"],
    "bad_words": null,
    "vllm_cfg": {
        "async_engine": true, "precision": "bfloat16", "tensor_parallel_size": 1, "pipeline_parallel_size": 1,
        "expert_parallel_size": 1, "gpu_memory_utilization": 0.6, "max_model_len": 512, "enforce_eager": false,
        "skip_tokenizer_init": false, "load_format": "dummy", "kv_cache_dtype": "auto"
    },
    "vllm_kwargs": {},
    "colocated": {"enabled": true, "resources": {"gpus_per_node": null, "num_nodes": null}},
    "port_range_low": 11001,
    "port_range_high": 15000,
    "use_async_rollouts": true,
    "_pad_token_id": 151643,
    "_mtp_weights_from_refit": false,
    "_debug_payload_metrics": false
}
""")
"""The generation settings of NeMo RL's example of GRPO, with every key that the example adds."""


@pytest.mark.parametrize("kind", [dict, UserDict], ids=["dict", "a mapping of the trainer's own"])
def test_a_configuration_of_nemo_rl_passes_as_it_is(kind: type[Any]) -> None:
    settings = GenerationSettings.read(kind(NEMO))
    sampling = Sampling(max_tokens=512, temperature=0.9, top_p=0.95, top_k=0, stop=("</answer>",))
    assert settings.sampling == sampling.over(Sampling.defaults())
    assert (settings.pad_id, settings.context, settings.stop_token_ids) == (151643, 512, (151643,))
    assert (settings.colocated, settings.seed) == (True, None)


def test_everything_has_a_default() -> None:
    settings = GenerationSettings.read({})
    assert settings.sampling == Sampling.defaults()
    assert (settings.pad_id, settings.context, settings.stop_token_ids) == (0, None, ())
    assert (settings.colocated, settings.seed) == (False, None)


def test_greedy_takes_the_most_likely_id_and_keeps_the_rest() -> None:
    greedy = GenerationSettings.read(NEMO).greedy
    assert (greedy.temperature, greedy.top_p, greedy.top_k) == (0, 1, 1)
    assert (greedy.max_tokens, greedy.stop) == (512, ("</answer>",))


@pytest.mark.parametrize("value", [None, -1], ids=str)
def test_top_k_is_off_as_nemo_rl_writes_it(value: int | None) -> None:
    assert GenerationSettings.read({"top_k": value}).sampling.top_k == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_tokens": 5}, r"config\['max_tokens'\]: .* did you mean 'max_new_tokens'\?"),
        ({"pad_token_id": 5}, r"config\['pad_token_id'\]: .* did you mean '_pad_token_id'\?"),
        ({"colour": 5}, r"config\['colour'\]: a GenerationConfig has no such key; the valid keys are backend, "),
        ({3: 5}, r"config\[3\]: a GenerationConfig has no such key"),
        ({"backend": "megatron"}, r"config\['backend'\] = 'megatron': leave it out"),
        ({"bad_words": ["damn", 5]}, r"config\['bad_words'\] = \['damn', 5\]: give a list of strings"),
        ({"max_new_tokens": 0}, r"config\['max_new_tokens'\] = 0: give a whole number of at least 1\."),
        ({"max_new_tokens": True}, r"config\['max_new_tokens'\] = True: give a whole number"),
        ({"temperature": -0.1}, r"config\['temperature'\] = -0\.1: give a number of at least 0\."),
        ({"temperature": float("nan")}, r"config\['temperature'\] = nan: give a number"),
        ({"temperature": None}, r"config\['temperature'\] = None: give a number"),
        ({"top_p": 0}, r"config\['top_p'\] = 0: give a number above 0 and at most 1\."),
        ({"top_p": 1.1}, r"config\['top_p'\] = 1\.1: give a number above 0 and at most 1\."),
        ({"top_k": 0}, r"config\['top_k'\] = 0: give a whole number of at least 1, or None or -1 for all ids\."),
        ({"top_k": -2}, r"config\['top_k'\] = -2"),
        ({"stop_token_ids": 2}, r"config\['stop_token_ids'\] = 2: give a list of token ids, or None\."),
        ({"stop_token_ids": ["</s>"]}, r"config\['stop_token_ids'\] = \['</s>'\]: give a list of token ids"),
        ({"stop_strings": [""]}, r"config\['stop_strings'\] = \[''\]: give a list of strings, none of them empty"),
        ({"stop_strings": [5]}, r"config\['stop_strings'\] = \[5\]: give a list of strings"),
        ({"colocated": True}, r"config\['colocated'\] = True: give \{'enabled': True\}"),
        ({"vllm_cfg": 5}, r"config\['vllm_cfg'\] = 5: give a dictionary"),
        ({"vllm_cfg": {"max_model_len": 1}}, r"config\['vllm_cfg'\]\['max_model_len'\] = 1: give a whole number"),
        ({"adapter": ""}, r"config\['adapter'\] = '': give the name of an adapter, or None\."),
        ({"seed": 1.5}, r"config\['seed'\] = 1\.5: give a whole number\."),
        ({"_pad_token_id": None}, r"config\['_pad_token_id'\] = None: give a whole number\."),
        ([("top_p", 1)], r"config=\[\('top_p', 1\)\]: give a dictionary"),
    ],
    ids=str,
)
def test_invalid_configuration_is_refused_by_its_key_with_the_fix(config: Any, message: str) -> None:
    with pytest.raises(BadOption, match=message):
        Generation(ScriptedEngine("unused"), config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retries": -1}, r"retries=-1: give a whole number"),
        ({"stall_seconds": 0}, r"stall_seconds=0\): give a number"),
    ],
    ids=str,
)
def test_invalid_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        Generation(ScriptedEngine("unused"), **options)


@pytest.mark.anyio
async def test_stop_id_of_another_tokenizer_is_refused() -> None:
    generation = Generation(ScriptedEngine("unused"), {"stop_token_ids": [10, 151645]})
    with pytest.raises(
        BadOption, match=r"config\['stop_token_ids'\]: 151645 is not an id .* vocabulary of 259: .* tokenizer"
    ):
        await generation.__aenter__()
    assert not generation.engine.running
