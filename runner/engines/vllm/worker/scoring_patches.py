"""Patches for scoring in vLLM's workers: prompts with adapters, and given ids instead of sampled ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["patch_prompt_scores", "patch_sampler"]


def patch_prompt_scores(model_runner: Any) -> None:
    """Patch a worker so that log-probabilities of a prompt use the adapter of its request; idempotent.

    vLLM (0.32) applies adapters to prompt logits with the indices of the sampled rows of the same step. These are other
    rows, so an engine with adapters computes wrong values, or fails if the numbers of rows differ.
    """
    compute = model_runner._get_prompt_logprobs_dict
    if model_runner.lora_config is None or hasattr(compute, "has_adapters"):
        return
    from vllm.lora.layers import LogitsProcessorWithLoRA

    kinds = [each for each in model_runner.model.modules() if isinstance(each, LogitsProcessorWithLoRA)]
    if not kinds:
        return
    punica = kinds[0].punica_wrapper

    def with_adapters(hidden_states: Any, *rest: Any, **named: Any) -> Any:
        if not model_runner.num_prompt_logprobs:  # this is the case in nearly every step
            return {}
        with _logits_of_prompts(model_runner.model, punica, hidden_states):
            return compute(hidden_states, *rest, **named)

    vars(with_adapters)["has_adapters"] = True
    model_runner._get_prompt_logprobs_dict = with_adapters


@contextmanager
def _logits_of_prompts(model: Any, punica: Any, hidden_states: Any) -> Iterator[None]:
    """A block in which the model's logits for rows of `hidden_states` use each row's adapter."""
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
    """A block in which `punica`, vLLM's wrapper of LoRA kernels, computes logits with the adapters of some rows.

    These are `count` rows of the batch, from row `first` on.
    """
    wanted = punica._token_lora_indices[first : first + count].clone()
    before, length = punica._sampler_indices[:count].clone(), punica.indices_len[1]
    punica._sampler_indices[:count] = wanted
    punica.indices_len[1] = count
    mapping = getattr(punica, "prompt_mapping_meta", None)  # GPU kernels use this copy of the indices
    if mapping is not None:
        mapping.prepare_tensors(wanted)
    try:
        yield
    finally:
        punica._sampler_indices[:count] = before
        punica.indices_len[1] = length
        if mapping is not None:
            mapping.prepare_tensors(punica.sampler_indices)


SCORE = "score"
"""Key of the ids to score in `SamplingParams(extra_args=)`."""


def patch_sampler(model_runner: Any) -> None:
    """Patch a worker to replace sampled ids by the given ids of `extra_args={"score": ids}`; idempotent.

    The log-probabilities of given ids are those that sampling would have reported: vLLM's sampler applies temperature,
    penalties, masks and `top_p` before the id is replaced.

    Raises:
        AttributeError: this vLLM samples in another way; nothing changed.
    """
    sampler = model_runner.sampler
    sample, update_states = sampler.sample, model_runner._update_states
    if hasattr(sample, "has_ids"):
        return
    scored: dict[str, Sequence[int]] = {}
    """Ids to score, by request name. Without entries, steps take almost no extra time."""

    def note_scored(scheduled: Any, *rest: Any, **named: Any) -> Any:
        for request in scheduled.scheduled_new_reqs:
            parameters = request.sampling_params
            if parameters is not None and parameters.extra_args and SCORE in parameters.extra_args:
                scored[request.req_id] = parameters.extra_args[SCORE]
        for name in scheduled.finished_req_ids:
            scored.pop(name, None)
        return update_states(scheduled, *rest, **named)

    def sample_or_given(logits: Any, metadata: Any, *rest: Any, **named: Any) -> Any:
        sampled, logprobs = sample(logits, metadata, *rest, **named)
        batch = model_runner.input_batch
        for name, ids in scored.items():
            row = batch.req_id_to_index.get(name)
            if row is not None and 0 <= (place := _place(model_runner, batch, row)) < len(ids):
                sampled[row] = ids[place]
        return sampled, logprobs

    vars(sample_or_given)["has_ids"] = True
    sampler.sample, model_runner._update_states = sample_or_given, note_scored


def _place(model_runner: Any, batch: Any, row: int) -> int:
    """Return the index of this step's id in its request's turn; negative during the prompt.

    The index is the number of computed tokens after the prompt. The list of sampled ids is not used: with asynchronous
    scheduling, it may lack the ids of the last step.
    """
    starts = model_runner.query_start_loc.np
    computed = int(batch.num_computed_tokens_cpu[row]) + int(starts[row + 1] - starts[row])
    return computed - int(batch.num_prompt_tokens[row])
