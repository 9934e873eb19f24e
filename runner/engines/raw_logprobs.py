"""Test for turns that are sampled from the model's own, unchanged distribution."""

from __future__ import annotations

from runner.engines.base import GenerationRequest
from runner.options import Sampling

__all__ = ["samples_raw_distribution"]

_UNCHANGED = ("top_p", "top_k", "min_p", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty")


def samples_raw_distribution(request: GenerationRequest) -> bool:
    """Return whether a turn is sampled from the model's own distribution, without penalty, mask or grammar."""
    sampling, off = request.sampling, Sampling.defaults()
    return (
        request.constraint is None
        and sampling.temperature in (0, 1)
        and not sampling.logit_bias
        and not sampling.bad_words
        and all(getattr(sampling, name) == getattr(off, name) for name in _UNCHANGED)
    )
