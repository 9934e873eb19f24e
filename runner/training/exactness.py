"""Whether a trainer can compute the very probabilities that ids were sampled with, and at which temperature."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from runner.options import Sampling
from runner.training.rows import TrainingRow
from runner.trajectory import Turn

__all__ = ["CHANGING", "constrained_ids", "inexact_reason", "temperatures"]

CHANGING: Final[Mapping[str, Any]] = {
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "min_tokens": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "bad_words": (),
}
"""The fields of `Sampling` that change what is sampled from and that no trainer applies, and what each is when off."""

_MIN_TEMPERATURE = 0.01  # vLLM takes this for anything between 0 and it


def inexact_reason(rows: Sequence[TrainingRow], *, masked: bool = False) -> str:
    """Why exp(trainer's log-probability - recorded one) is not the ratio of two policies; "" where it is.

    The recorded one is that of the distribution which was sampled from. With top-k, top-p or min-p that is what was
    left of the vocabulary, scaled up to 1: over the whole vocabulary a trainer gets less, by the share that was cut,
    with no change of the policy at all. A penalty, a bias and whatever keeps ids from being sampled moved the others'
    probabilities too, position by position, which a trainer's logits do not know. What was sampled at temperature 0 had
    no distribution, and what several LoRA adapters sampled no one policy. A temperature is no such reason, since a
    trainer can apply it, and a grammar is none where its masks are at hand.

    Each reason comes with how many turns, or ids, it concerns. `masked`: the grammar's masks are at hand.
    """
    samplings = [turn.sampling for row in rows for turn in _trained(row)]
    turns = Counter(reason for sampling in samplings for reason in _reasons(sampling))
    adapters = Counter(f"adapter={sampling.adapter!r}" for sampling in samplings if sampling is not None)
    if len(adapters) > 1:
        turns += adapters
    said = [f"{reason} ({count} {'turn' if count == 1 else 'turns'})" for reason, count in sorted(turns.items())]
    unknown = sum(int(np.isnan(row.logprobs).sum()) for row in rows)
    constrained = 0 if masked else constrained_ids(rows)
    if constrained:
        said.append(f"a grammar without its masks ({constrained} {'id' if constrained == 1 else 'ids'})")
    if unknown:
        said.append(f"no log-probability from the engine ({unknown} {'id' if unknown == 1 else 'ids'})")
    return "; ".join(said)


def temperatures(row: TrainingRow) -> NDArray[np.float32]:
    """What a trainer divides the logits by that predict each position, shape [length], float32.

    It is 1 where nothing is trained, and where it is not known (`inexact_reason` says so). It is 1 for temperature 0
    too: there the engine gives the log-probability at temperature 1 of the id that it took.
    """
    values = np.ones(len(row), dtype=np.float32)
    for turn in _trained(row):
        if turn.sampling is not None and turn.sampling.temperature > 0:
            values[turn.start : turn.end] = max(turn.sampling.temperature, _MIN_TEMPERATURE)
    return values


def constrained_ids(rows: Iterable[TrainingRow]) -> int:
    """How many trained ids were sampled under a grammar, whose mask a trainer must apply for an exact ratio."""
    return sum(turn.end - turn.start for row in rows for turn in _trained(row) if turn.constraint is not None)


def _trained(row: TrainingRow) -> Iterator[Turn]:
    return (turn for turn in row.turns if turn.end > turn.start and not turn.retried)


def _reasons(sampling: Sampling | None) -> Iterator[str]:
    if sampling is None:
        yield "sampling not recorded"
        return
    if sampling.temperature == 0:
        yield "temperature=0"
        return  # the likeliest id is in whatever is left
    for name, off in CHANGING.items():
        value = getattr(sampling, name)
        if value != off and value is not None:
            yield f"{name}={value:g}" if isinstance(value, int | float) else f"{name} of {len(value)}"
