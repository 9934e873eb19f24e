"""The likeliest ids beside those that a scripted engine says: as the reply gives them, or made up around its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from runner.errors import RequestRejected
from runner.tokens.top_logprobs import TopLogprobs

__all__ = ["given", "synthetic_top"]


def given(name: str, top: TopLogprobs | Sequence[Mapping[int, float]], count: int) -> TopLogprobs:
    """What a reply gives, the `count` likeliest of each position.

    Raises:
        RequestRejected: it gives fewer; `name` is that of the request.
    """
    fewest = top.count if isinstance(top, TopLogprobs) else min(map(len, top), default=count)
    if fewest < count:
        raise RequestRejected(
            f"{name}: Sampling(logprobs={count}) asks for the {count} likeliest ids, and the reply's top_logprobs have "
            f"{fewest}. Ask for fewer, or add some."
        )
    return top.narrowed(count) if isinstance(top, TopLogprobs) else TopLogprobs.of(top, count)


def synthetic_top(ids: Sequence[int], logprobs: Sequence[float], count: int, vocabulary: int) -> TopLogprobs:
    """Half of what each sampled id leaves is the next id's of the vocabulary, half of the rest the one's after, ..."""
    rows = []
    for token_id, logprob in zip(ids, logprobs, strict=True):
        left = -math.expm1(logprob)
        rest = math.log(left) if left > 0 else -math.inf
        row = {(token_id + n) % vocabulary: rest - n * math.log(2) for n in range(1, min(count + 1, vocabulary))}
        rows.append({**row, token_id: logprob})
    return TopLogprobs.of(rows, count)
