"""Prompt scores of an engine with adapters: every row of a prompt uses the adapter of its own request."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runner.engines.vllm.start import contained_vllm
from runner.engines.vllm.worker.scoring_patches import patch_prompt_scores

pytestmark = pytest.mark.engine

WITH, WITHOUT = 0, -1  # the slot of the adapter, and vLLM's mark of a row without one


class Model:
    """A model without weights, which notes the adapters that its logits would use."""

    def __init__(self, logits: Any) -> None:
        self.logits = logits
        self.used: list[list[int]] = []

    def modules(self) -> list[Any]:
        return [self.logits]

    def compute_logits(self, rows: Any) -> Any:
        self.used.append(self.logits.punica_wrapper.sampler_indices.tolist())
        return torch.zeros(len(rows), 5)


def runner_of_two_prompts() -> Any:
    """A model runner before a step with two prompts of 3 ids each: "a" with an adapter, and "b" without one."""
    with contained_vllm():
        from vllm.lora.layers import LogitsProcessorWithLoRA, LoRAMapping
        from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    logits = LogitsProcessorWithLoRA.__new__(LogitsProcessorWithLoRA)
    torch.nn.Module.__init__(logits)
    logits.punica_wrapper = PunicaWrapperCPU(16, 4, "cpu")
    mapping = LoRAMapping(index_mapping=(1, 1, 1, 0, 0, 0), prompt_mapping=(1, 0), is_prefill=True)
    logits.punica_wrapper.update_metadata(mapping, [1], 1, 5)
    prompt = {"prompt_token_ids": [1, 2, 3], "in_progress_prompt_logprobs_cpu": None, "num_computed_tokens": 0}
    runner = SimpleNamespace(
        num_prompt_logprobs={"a": 0, "b": 0},
        requests={"a": SimpleNamespace(**prompt), "b": SimpleNamespace(**prompt)},
        input_batch=SimpleNamespace(req_id_to_index={"a": 0, "b": 1}),
        query_start_loc=SimpleNamespace(np=np.array([0, 3, 6])),
        device="cpu",
        lora_config=object(),
        model=Model(logits),
        model_config=SimpleNamespace(logprobs_mode="processed_logprobs"),
        sampler=SimpleNamespace(
            compute_logprobs=lambda logits: logits.log_softmax(-1),
            gather_logprobs=lambda scores, _, ids: (ids[:, None], scores.gather(1, ids[:, None]), ids),
        ),
        _sync_device=lambda: None,
    )
    runner._get_prompt_logprobs_dict = functools.partial(GPUModelRunner._get_prompt_logprobs_dict, runner)
    return runner


def adapters_of_prompts(runner: Any) -> list[list[int]]:
    """The adapters of the scored rows of both prompts."""
    assert runner._get_prompt_logprobs_dict(torch.zeros(6, 4), {"a": 3, "b": 3}).keys() == {"a", "b"}
    used: list[list[int]] = runner.model.used
    return used


def test_unpatched_prompt_scores_use_adapters_of_sampled_rows() -> None:
    used = adapters_of_prompts(runner_of_two_prompts())
    assert used == [[WITH, WITHOUT]] * 2, "vLLM has fixed it: remove the patch"


def test_patched_prompt_scores_use_the_adapter_of_their_request() -> None:
    runner = runner_of_two_prompts()
    patch_prompt_scores(runner)
    once = runner._get_prompt_logprobs_dict
    patch_prompt_scores(runner)
    assert runner._get_prompt_logprobs_dict is once
    assert adapters_of_prompts(runner) == [[WITH, WITH], [WITHOUT, WITHOUT]]
    assert runner.model.logits.punica_wrapper.sampler_indices.tolist() == [WITH, WITHOUT], "as before the scores"
