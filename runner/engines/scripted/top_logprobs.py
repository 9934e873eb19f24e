"""Most likely ids at the positions of scripted replies: from the reply, or synthetic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from runner.errors import RequestRejected
from runner.tokens.top_logprobs import TopLogprobs

__all__ = ["given", "synthetic_top"]


def given(name: str, top: TopLogprobs | Sequence[Mapping[int, float]], count: int) -> TopLogprobs:
    """Return the `count` most likely ids of each position from a reply.

    Raises:
        RequestRejected: the reply has fewer; `name` is the request's name.
    """
    fewest = top.count if isinstance(top, TopLogprobs) else min(map(len, top), default=count)
    if fewest < count:
        raise RequestRejected(
            f"{name}: Sampling(logprobs={count}) asks for {count} most likely ids, and the reply's top_logprobs have "
            f"{fewest}. Ask for fewer, or add some."
        )
    return top.narrowed(count) if isinstance(top, TopLogprobs) else TopLogprobs.of(top, count)


def synthetic_top(ids: Sequence[int], logprobs: Sequence[float], count: int, vocabulary: int) -> TopLogprobs:
    """Return synthetic rows: half of the rest of each sampled id goes to the next id of the vocabulary, and so on."""
    rows = []
    for token_id, logprob in zip(ids, logprobs, strict=True):
        left = -math.expm1(logprob)
        rest = math.log(left) if left > 0 else -math.inf
        row = {(token_id + n) % vocabulary: rest - n * math.log(2) for n in range(1, min(count + 1, vocabulary))}
        rows.append({**row, token_id: logprob})
    return TopLogprobs.of(rows, count)
