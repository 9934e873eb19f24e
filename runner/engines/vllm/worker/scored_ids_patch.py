"""Patch of vLLM's workers: scored requests get their given ids instead of sampled ones.

Their log-probabilities are those that sampling would have reported: vLLM's sampler applies temperature, penalties,
masks and `top_p` before the id is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["SCORE", "patch_sampler"]

SCORE = "score"
"""Key of the ids in `SamplingParams(extra_args=)`."""


def patch_sampler(model_runner: Any) -> None:
    """Patch a worker to replace the sampled ids of scored requests, which have `extra_args={"score": ids}`; idempotent.

    Raises:
        AttributeError: this vLLM samples in another way; nothing changed.
    """
    sampler = model_runner.sampler
    sample, update_states = sampler.sample, model_runner._update_states
    if hasattr(sample, "has_ids"):
        return
    scored: dict[str, Sequence[int]] = {}
    """Ids of scored requests by request name, so that other steps cost nothing."""

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
    """Return the index of this step's id in its request's turn; below 0 during the prompt.

    It is derived from the computed tokens: with asynchronous scheduling the ids of the last step may be missing.
    """
    starts = model_runner.query_start_loc.np
    computed = int(batch.num_computed_tokens_cpu[row]) + int(starts[row + 1] - starts[row])
    return computed - int(batch.num_prompt_tokens[row])
