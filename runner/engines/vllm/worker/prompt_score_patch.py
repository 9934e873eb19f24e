"""Runs inside vLLM's workers: the log-probabilities of a prompt have the adapter of its request.

vLLM (0.32) applies adapters to the logits of prompts by the indices of the ids that are sampled in the same step, which
are other rows: an engine with adapters computes wrong values, or dies of their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["patch_prompt_scores"]


def patch_prompt_scores(model_runner: Any) -> None:
    """Mend the prompt log-probabilities of a worker with adapters; once, and nothing where there are none."""
    compute = model_runner._get_prompt_logprobs_dict
    if model_runner.lora_config is None or hasattr(compute, "has_adapters"):
        return
    from vllm.lora.layers import LogitsProcessorWithLoRA

    kinds = [each for each in model_runner.model.modules() if isinstance(each, LogitsProcessorWithLoRA)]
    if not kinds:
        return
    punica = kinds[0].punica_wrapper

    def with_adapters(hidden_states: Any, *rest: Any, **named: Any) -> Any:
        if not model_runner.num_prompt_logprobs:  # as in nearly every step
            return {}
        with _logits_of_prompts(model_runner.model, punica, hidden_states):
            return compute(hidden_states, *rest, **named)

    vars(with_adapters)["has_adapters"] = True
    model_runner._get_prompt_logprobs_dict = with_adapters


@contextmanager
def _logits_of_prompts(model: Any, punica: Any, hidden_states: Any) -> Iterator[None]:
    """While the block lasts, the model's logits are those of rows of `hidden_states`, with each row's adapter."""
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
    """Have the wrapper take the adapters of these rows of the batch for those of the sampled ids."""
    wanted = punica._token_lora_indices[first : first + count].clone()
    before, length = punica._sampler_indices[:count].clone(), punica.indices_len[1]
    punica._sampler_indices[:count] = wanted
    punica.indices_len[1] = count
    mapping = getattr(punica, "prompt_mapping_meta", None)  # what kernels of GPUs read
    if mapping is not None:
        mapping.prepare_tensors(wanted)
    try:
        yield
    finally:
        punica._sampler_indices[:count] = before
        punica.indices_len[1] = length
        if mapping is not None:
            mapping.prepare_tensors(punica.sampler_indices)
