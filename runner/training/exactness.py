"""Reasons why a trainer cannot compute the exact probabilities of the sampling, and the temperatures that it needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from runner.quantities import counted
from runner.sampling_fields import SAMPLING_FIELDS
from runner.training.rows import TrainingRow
from runner.trajectory import Turn

__all__ = ["constrained_ids", "inexact_reason", "reason_counts", "temperatures"]

NO_FINITE_LOGPROB: Final = "no finite log-probability from the engine"

_MIN_TEMPERATURE = 0.01  # vLLM's minimum for temperatures above 0


def inexact_reason(rows: Sequence[TrainingRow], *, masked: bool = False, recorded: bool = False) -> str:
    """Return the reasons why exp(trainer's - recorded log-probability) is not a ratio of two policies; "" if it is.

    The recorded value is of the sampling distribution. With top-k, top-p or min-p, that distribution covers a part of
    the vocabulary, whose probabilities are scaled to the sum 1. A trainer, which covers the whole vocabulary, computes
    a lower value for the same policy. Penalties, biases and excluded ids change the probabilities of other ids too. A
    trainer's logits do not contain these changes. Temperature 0 has no distribution, and several LoRA adapters are
    several policies. Any other temperature is not a reason, since a trainer can apply it. A grammar with available
    masks is not a reason.

    Args:
        rows: the rows, in which the turns or ids of each reason are counted.
        masked: True if the masks of the grammars are available.
        recorded: True if the trainer applies the sampling masks of turns. Truncation and grammars of turns with such
            masks are then not reasons.
    """
    turns, ids = reason_counts(rows, masked=masked, recorded=recorded)
    said = [f"{reason} ({counted(count, 'turn')})" for reason, count in sorted(turns.items())]
    said += [f"{reason} ({counted(count, 'id')})" for reason, count in sorted(ids.items())]
    return "; ".join(said)


def reason_counts(
    rows: Sequence[TrainingRow], *, masked: bool = False, recorded: bool = False
) -> tuple[Counter[str], Counter[str]]:
    """Return the reasons of `inexact_reason` in two counters: the number of turns, and the number of ids, by reason."""
    trained = [turn for row in rows for turn in _trained(row)]
    turns = Counter(reason for turn in trained for reason in _reasons(turn, recorded=recorded))
    adapters = Counter(f"adapter={turn.sampling.adapter!r}" for turn in trained if turn.sampling is not None)
    if len(adapters) > 1:
        turns += adapters
    ids = Counter(
        {
            "a grammar without its masks": 0 if masked else constrained_ids(rows, recorded=recorded),
            NO_FINITE_LOGPROB: sum(int((~np.isfinite(row.logprobs)).sum()) for row in rows),
        }
    )
    return turns, +ids  # without counts of 0


def temperatures(row: TrainingRow) -> NDArray[np.float32]:
    """Return the divisor of the logits that predict each position, shape [length], float32.

    The divisor is 1 at untrained positions, and if the sampling was not recorded. It is also 1 for temperature 0, since
    the engine then reports the log-probability at temperature 1.
    """
    values = np.ones(len(row), dtype=np.float32)
    for turn in _trained(row):
        if turn.sampling is not None and turn.sampling.temperature > 0:
            values[turn.start : turn.end] = max(turn.sampling.temperature, _MIN_TEMPERATURE)
    return values


def constrained_ids(rows: Iterable[TrainingRow], *, recorded: bool = False) -> int:
    """Return the number of trained ids that were sampled under a grammar. An exact ratio needs the mask of the grammar.

    `recorded`: True to leave out the ids of turns that have sampling masks.
    """
    constrained = (turn for row in rows for turn in _trained(row) if turn.constraint is not None)
    return sum(turn.end - turn.start for turn in constrained if not (recorded and turn.sampling_masks is not None))


def _trained(row: TrainingRow) -> Iterator[Turn]:
    return (turn for turn in row.turns if turn.end > turn.start and not turn.retried)


def _reasons(turn: Turn, *, recorded: bool) -> Iterator[str]:
    sampling = turn.sampling
    if sampling is None:
        yield "sampling not recorded"
        return
    if sampling.temperature == 0:
        yield "temperature=0"
        return  # without a distribution, the other settings do not matter
    has_masks = recorded and turn.sampling_masks is not None
    for name, value in sampling.changes().items():
        if not (has_masks and SAMPLING_FIELDS[name].truncates):
            yield f"{name}={value:g}" if isinstance(value, int | float) else f"{name} of {len(value)}"
