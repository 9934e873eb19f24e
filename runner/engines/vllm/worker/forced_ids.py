"""Logits processor in vLLM's processes, loaded by name, that forces the ids of a request."""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

__all__ = ["ForcedIds"]


class ForcedIds(AdapterLogitsProcessor):  # type: ignore[misc]  # vLLM is not typed
    """Logits processor that allows one id per step for requests with `SamplingParams(extra_args={"force": ids})`.

    After the end of the list the model samples freely. Raw log-probabilities are computed before any processor, so they
    stay the model's own.
    """

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Check a request in the user's process, since an error in the engine core would end the core.

        Raises:
            ValueError: the forced ids are not a list of ids.
        """
        ids = _forced(sampling_params)
        if not isinstance(ids, list | tuple) or any(type(token_id) is not int or token_id < 0 for token_id in ids):
            raise ValueError(f'extra_args={{"force": {ids!r:.80}}}: give a list of token ids')

    def is_argmax_invariant(self) -> bool:
        return False  # with True, greedy requests would not be forced

    def new_req_logits_processor(self, params: Any) -> Any:
        ids = _forced(params)
        return partial(_leave_one, ids) if ids else None


def _forced(params: Any) -> Any:
    return (params.extra_args or {}).get("force", ())


# The position is the number of sampled ids, not the number of calls, since a preempted request is sampled again.
def _leave_one(ids: list[int], sampled: list[int], logits: Any) -> Any:
    """Return the logits of a row, shape [vocabulary]: 0 for the next forced id, minus infinity for all other ids.

    After the last forced id, the logits are unchanged.
    """
    if len(sampled) < len(ids):
        logits.fill_(float("-inf"))
        logits[ids[len(sampled)]] = 0.0
    return logits
