"""Runs inside vLLM's processes, which load it by name: the logits processor that samples the ids a request names."""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

__all__ = ["ForcedIds"]


class ForcedIds(AdapterLogitsProcessor):  # type: ignore[misc]  # vLLM is not typed
    """Leaves one logit per step to requests with `SamplingParams(extra_args={"force": ids})`, others alone.

    Past the end of the list the model is free. Raw log-probabilities are taken before any processor, so they stay the
    model's own.
    """

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse in our process what would raise in the engine core, which would die of it.

        Raises:
            ValueError: what is to be forced is no list of ids.
        """
        ids = _forced(sampling_params)
        if not isinstance(ids, list | tuple) or any(type(token_id) is not int or token_id < 0 for token_id in ids):
            raise ValueError(f'extra_args={{"force": {ids!r:.80}}}: give a list of token ids')

    def is_argmax_invariant(self) -> bool:
        return False  # else greedy requests would not be forced

    def new_req_logits_processor(self, params: Any) -> Any:
        ids = _forced(params)
        return partial(_leave_one, ids) if ids else None


def _forced(params: Any) -> Any:
    return (params.extra_args or {}).get("force", ())


# By the count of ids that are there, not by counting calls: a preempted request is sampled again from where it was.
def _leave_one(ids: list[int], sampled: list[int], logits: Any) -> Any:
    """The row `logits`, shape [vocabulary], with nothing but the next forced id in it."""
    if len(sampled) < len(ids):
        logits.fill_(float("-inf"))
        logits[ids[len(sampled)]] = 0.0
    return logits
