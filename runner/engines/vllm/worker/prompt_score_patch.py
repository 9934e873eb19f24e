"""Patch of vLLM's workers: log-probabilities of a prompt use the adapter of its request.

vLLM (0.32) applies adapters to prompt logits with the indices of the sampled rows of the same step. These are other
rows, so an engine with adapters computes wrong values, or fails if the numbers of rows differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["patch_prompt_scores"]


def patch_prompt_scores(model_runner: Any) -> None:
    """Patch the prompt log-probabilities of a worker with adapters; idempotent."""
    compute = model_runner._get_prompt_logprobs_dict
    if model_runner.lora_config is None or hasattr(compute, "has_adapters"):
        return
    from vllm.lora.layers import LogitsProcessorWithLoRA

    kinds = [each for each in model_runner.model.modules() if isinstance(each, LogitsProcessorWithLoRA)]
    if not kinds:
        return
    punica = kinds[0].punica_wrapper

    def with_adapters(hidden_states: Any, *rest: Any, **named: Any) -> Any:
        if not model_runner.num_prompt_logprobs:  # nearly every step
            return {}
        with _logits_of_prompts(model_runner.model, punica, hidden_states):
            return compute(hidden_states, *rest, **named)

    vars(with_adapters)["has_adapters"] = True
    model_runner._get_prompt_logprobs_dict = with_adapters


@contextmanager
def _logits_of_prompts(model: Any, punica: Any, hidden_states: Any) -> Iterator[None]:
    """In this block the model's logits for rows of `hidden_states` use each row's adapter."""
    compute_logits = model.compute_logits
    row_bytes = hidden_states.stride(0) * hidden_states.element_size()

    def logits_of(rows: Any, *rest: Any, **named: Any) -> Any:
        first = (rows.data_ptr() - hidden_states.data_ptr()) // row_bytes
        with _adapters_of(punica, first, rows.shape[0]):
            return compute_logits(rows, *rest, **named)

    model.compute_logits = logits_of
    try:
        yield
    finally:
        del model.compute_logits


@contextmanager
def _adapters_of(punica: Any, first: int, count: int) -> Iterator[None]:
    """In this block the wrapper uses the adapters of these rows of the batch for logits."""
    wanted = punica._token_lora_indices[first : first + count].clone()
    before, length = punica._sampler_indices[:count].clone(), punica.indices_len[1]
    punica._sampler_indices[:count] = wanted
    punica.indices_len[1] = count
    mapping = getattr(punica, "prompt_mapping_meta", None)  # used by GPU kernels
    if mapping is not None:
        mapping.prepare_tensors(wanted)
    try:
        yield
    finally:
        punica._sampler_indices[:count] = before
        punica.indices_len[1] = length
        if mapping is not None:
            mapping.prepare_tensors(punica.sampler_indices)
