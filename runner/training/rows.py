"""Rows: one segment of a trajectory as flat arrays, the unit of every training batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runner.errors import BadBatch
from runner.tokens.log import Source, TokenLog, VersionSpan
from runner.trajectory import Trajectory, Turn

__all__ = ["NO_VERSION", "TrainingRow", "row_experts", "rows_of", "top_logprobs", "version_table"]

NO_VERSION = -1
"""Index of the weight version of an id that is not trained."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRow:
    """One segment. All arrays are aligned with `ids`: position p is about `ids[p]` given `ids[:p]`."""

    trajectory: Trajectory
    """Trajectory of the segment."""
    segment: int
    """Index of the segment in the trajectory."""
    ids: NDArray[np.int32]
    """Token ids, shape [length], int32."""
    loss_mask: NDArray[np.bool_]
    """True if the id was sampled in this segment and is trained, shape [length], bool.

    The first value is False, since the model predicts each id from the ids before it.
    """
    logprobs: NDArray[np.float32]
    """Log-probability with which the engine sampled each id, in nats, shape [length], float32.

    It is 0 where `loss_mask` is False, and NaN if the engine returned no value.
    """
    versions: NDArray[np.int32]
    """Index of each id's weight version in the table of versions, shape [length], int32.

    It is `NO_VERSION` where `loss_mask` is False.
    """
    turns: tuple[Turn, ...]
    """Turns that were sampled in this segment, in order."""

    def __len__(self) -> int:
        return len(self.ids)


def rows_of(trajectory: Trajectory, versions: Mapping[str, int]) -> list[TrainingRow]:
    """Return the rows of a trajectory, one for each segment with trained ids. Arrays are copied."""
    rows = [_row(trajectory, index, versions) for index in range(len(trajectory.segments))]
    return [row for row in rows if row.loss_mask.any()]


def top_logprobs(row: TrainingRow, count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the `count` most likely ids at each trained position of a row, and their log-probabilities.

    Both have the shape [length, count]. At untrained positions, the ids are -1 and the log-probabilities 0.

    Raises:
        BadBatch: a trained turn has fewer ids per position; the message names the turn.
    """
    ids, logprobs = np.full((len(row), count), -1, np.int32), np.zeros((len(row), count), np.float32)
    for turn in row.turns:
        trained = row.loss_mask[turn.start : turn.end]
        if not trained.any():
            continue
        of_turn = turn.top_ids
        if of_turn.shape[1] < count:
            raise BadBatch(
                f"{row.trajectory.id}/{turn.agent}/{turn.number} has {of_turn.shape[1]} most likely ids of each "
                f"position, and {count} are needed: sample it with Sampling(logprobs={count})."
            )
        ids[turn.start : turn.end][trained] = of_turn[trained, :count]
        logprobs[turn.start : turn.end][trained] = turn.top_logprobs[trained, :count]
    return ids, logprobs


def row_experts(row: TrainingRow) -> NDArray[np.int16] | None:
    """Return the experts that computed each id of a row, shape [length, layers, experts of each id].

    Ids without experts have -1. Turns that were withdrawn have experts too. The result is None if no turn has experts.

    Raises:
        BadBatch: turns have experts of different shapes.
    """
    known = [turn.routed_experts for turn in row.turns if turn.routed_experts is not None]
    if not known:
        return None
    shapes = {(each.layers, each.top) for each in known}
    if len(shapes) > 1:
        raise BadBatch(
            f"episode {row.trajectory.id!r}: turns have experts of the shapes {sorted(shapes)}: play with one model."
        )
    experts = np.full((len(row), *shapes.pop()), -1, np.int16)
    for each in known:
        experts[each.start : each.end] = each.numbers()
    return experts


def version_table(trajectories: Iterable[Trajectory]) -> dict[str, int]:
    """Return the index of each weight version with trained ids, in the order of their first ids."""
    table: dict[str, int] = {}
    for trajectory in trajectories:
        for segment in trajectory.segments:
            for span in _kept_spans(segment.log):
                table.setdefault(span.version, len(table))
    return table


def _row(trajectory: Trajectory, index: int, versions: Mapping[str, int]) -> TrainingRow:
    log = trajectory.segments[index].log
    mask = np.frombuffer(log.mask(), dtype=np.int8).astype(np.bool_)
    mask[:1] = False  # no id of the row predicts the first id; in a packed batch, an id of the previous row would
    return TrainingRow(
        trajectory=trajectory,
        segment=index,
        ids=np.array(log.ids, dtype=np.int32),  # a copy, since a view would prevent the log's array from growing
        loss_mask=mask,
        logprobs=np.where(mask, np.array(log.logprobs, dtype=np.float32), np.float32(0)),
        versions=_versions(log, mask, versions),
        turns=tuple(turn for turn in trajectory.turns if turn.segment == index),
    )


def _versions(log: TokenLog, mask: NDArray[np.bool_], table: Mapping[str, int]) -> NDArray[np.int32]:
    versions = np.full(len(log), NO_VERSION, dtype=np.int32)
    for span in _kept_spans(log):
        versions[span.start : span.end] = table[span.version]
    versions[~mask] = NO_VERSION
    return versions


def _kept_spans(log: TokenLog) -> Iterator[VersionSpan]:
    """Return the spans that have at least one id that is still trained."""
    return (span for span in log.versions if Source.SAMPLED in log.sources[span.start : span.end])
