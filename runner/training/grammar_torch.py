"""Log-probabilities under token masks for torch, with gradients, equal to those of the engine's sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from runner.errors import BadBatch
from runner.training.token_masks import UNCONSTRAINED_INDEX, TokenMasks

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["apply_bitmask", "head_logprobs", "masked_logprobs"]

_NARROW_COLUMNS = 1 / 16  # if a mask allows at most this share of a vocabulary, only the allowed ids are read

_Scores = Callable[[Any, Any], Any]  # (positions, ids) to logits; None selects all ids


def apply_bitmask(logits: Any, masks: TokenMasks, temperature: Any = 1.0) -> Any:
    """Return the sampler's logits: divided by the temperature, and minus infinity for ids that are not allowed.

    Args:
        logits: shape [n, vocabulary], any floating type.
        masks: the token masks, with an `index` of shape [n].
        temperature: one number for all, or shape [n]; 1 for greedy turns.

    Returns:
        A new tensor of the same shape, float32, or float64 if the logits are float64.

    Raises:
        BadBatch: the shapes do not fit.
    """
    _check(masks, logits.shape[0], logits.shape[1])
    logits = _precise(logits)
    constrained = masks.index != UNCONSTRAINED_INDEX
    if constrained.any():
        rows = _indices(constrained, logits.device)
        logits = logits.index_copy(
            0, rows, logits[rows].masked_fill(~_allowed(masks.take(constrained), logits.device), -torch.inf)
        )
    return logits / _column(temperature, logits)


def masked_logprobs(logits: Any, targets: Any, masks: TokenMasks, temperature: Any = 1.0) -> Any:
    """Return the log-probability of each id in `targets`, normalised over the ids that its mask allows.

    For positions whose masks allow few ids, only the logits of ids that one of these masks allows are read.

    Args:
        logits: the logits that predict the ids, shape [n, vocabulary], any floating type.
        targets: the ids, shape [n], int64.
        masks: the token masks, with an `index` of shape [n].
        temperature: one number for all, or shape [n], such as a batch's `temperatures`.

    Returns:
        Log-probabilities in nats, shape [n], float32, or float64 if the logits are float64; minus infinity for an id
        that was not allowed.

    Raises:
        BadBatch: the shapes do not fit.
    """
    _check(masks, logits.shape[0], logits.shape[1])

    def scores(rows: Any, columns: Any) -> Any:
        return logits[rows] if columns is None else logits[rows[:, None], columns]

    return _logprobs(scores, targets, masks, temperature, like=logits)


def head_logprobs(
    hidden: Any, weight: Any, targets: Any, masks: TokenMasks, temperature: Any = 1.0, *, bias: Any = None
) -> Any:
    """Return the result of `masked_logprobs`, computed from the input of the model's head.

    For positions whose masks allow few ids, only the logits of these ids are computed. The head must be one matrix,
    without a later step such as a soft cap on the logits.

    Args:
        hidden: the last hidden states at the positions that predict the ids, shape [n, width].
        weight: the matrix of the head, `model.get_output_embeddings().weight`, shape [vocabulary, width].
        targets: as for `masked_logprobs`.
        masks: as for `masked_logprobs`.
        temperature: as for `masked_logprobs`.
        bias: the bias of the head, shape [vocabulary].

    Returns:
        The log-probabilities, as `masked_logprobs` returns them.

    Raises:
        BadBatch: the shapes do not fit.
    """
    _check(masks, hidden.shape[0], weight.shape[0])

    def scores(rows: Any, columns: Any) -> Any:
        if columns is None:
            return torch.nn.functional.linear(hidden[rows], weight, bias)
        return torch.nn.functional.linear(hidden[rows], weight[columns], None if bias is None else bias[columns])

    return _logprobs(scores, targets, masks, temperature, like=hidden)


def _logprobs(scores: _Scores, targets: Any, masks: TokenMasks, temperature: Any, *, like: Any) -> Any:
    """Return the log-probability of each target. Positions are processed in groups that read the same ids."""
    targets = torch.as_tensor(targets, dtype=torch.int64, device=like.device)
    logprobs = _precise(like.new_zeros(len(targets)))
    scale = _column(temperature, logprobs).expand(len(targets), 1)
    for chosen, columns in _groups(masks):
        rows = _indices(chosen, like.device)
        inside = torch.from_numpy(columns).to(like.device) if columns is not None else None
        logits = _precise(scores(rows, inside))
        part = masks.take(chosen)
        if (part.index != UNCONSTRAINED_INDEX).all():
            logits = logits.masked_fill(~_allowed(part, like.device, columns), -torch.inf)
        logits = logits / scale[rows]
        logprobs = logprobs.index_copy(0, rows, _gathered(logits, targets[rows], inside) - logits.logsumexp(-1))
    return logprobs


def _groups(masks: TokenMasks) -> Iterator[tuple[NDArray[np.bool_], NDArray[np.int64] | None]]:
    """Yield up to three groups of positions: without a mask, with many allowed ids, and with few.

    Each group is a mask of positions, shape [n], and the ids to read: for few, the union of the allowed ids; else None.
    """
    free = masks.index == UNCONSTRAINED_INDEX
    narrow = ~free & (masks.allowed <= max(1, masks.vocabulary * _NARROW_COLUMNS))
    for chosen in (free, ~free & ~narrow):
        if chosen.any():
            yield chosen, None
    if narrow.any():
        # One gather reads the union of the allowed ids, for all positions of this group.
        together = np.bitwise_or.reduce(masks.table[np.unique(masks.index[narrow])], axis=0)
        united = TokenMasks(together[None], np.zeros(1, dtype=np.int32), masks.vocabulary)
        yield narrow, united.unpacked()[0].nonzero()[0]


def _allowed(masks: TokenMasks, device: Any, columns: NDArray[np.int64] | None = None) -> Any:
    """Return which of the ids `columns` (None for all ids) are allowed at each position, shape [n, ids], bool."""
    used, index = np.unique(masks.index, return_inverse=True)
    distinct = TokenMasks(masks.table, used, masks.vocabulary).unpacked()
    rows = torch.from_numpy(distinct if columns is None else distinct[:, columns])
    return rows.to(device)[torch.from_numpy(index).to(device)]


def _gathered(logits: Any, targets: Any, columns: Any) -> Any:
    """Return the logit of each row's id; minus infinity if the id is not in `columns`."""
    if columns is None:
        return logits.gather(-1, targets[:, None])[:, 0]
    index = torch.searchsorted(columns, targets).clamp(max=len(columns) - 1)
    found = logits.gather(-1, index[:, None])[:, 0]
    return found.masked_fill(columns[index] != targets, -torch.inf)


def _precise(tensor: Any) -> Any:
    """Convert to float32 or wider, as in the engine's sampler."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _indices(chosen: NDArray[np.bool_], device: Any) -> Any:
    return torch.from_numpy(chosen.nonzero()[0]).to(device)


def _column(temperature: Any, like: Any) -> Any:
    """Return the temperature as a divisor of rows of logits, shape [1 or n, 1]."""
    return torch.as_tensor(temperature, dtype=like.dtype, device=like.device).reshape(-1, 1)


def _check(masks: TokenMasks, positions: int, vocabulary: int) -> None:
    if masks.index.shape != (positions,):
        raise BadBatch(f"masks of shape {masks.index.shape} for {positions} positions: select them with masks.take().")
    if masks.vocabulary != vocabulary:
        raise BadBatch(
            f"masks of {masks.vocabulary} ids for {vocabulary} logits: give GrammarMasks the model that sampled."
        )
