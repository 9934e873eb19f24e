"""Sample rows: a trajectory as prompt, response and mask, in the form that trainers of other libraries take."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from runner.checked import whole
from runner.errors import BadBatch, BadOption
from runner.logs import logger_for
from runner.quantities import counted
from runner.tokens.side_data import SamplingMasks
from runner.training.array_kinds import as_numpy
from runner.training.exactness import reason_counts, temperatures
from runner.training.rows import TrainingRow, row_experts, rows_of, version_table
from runner.training.selection import NO_LOGPROBS, absence, name_of, refusal
from runner.trajectory import Trajectory, Turn

__all__ = ["InexactRows", "SampleRow", "SegmentChoice", "sample_rows"]

log = logger_for("training")

TOO_LONG: Final = "too_long"
"""Reason for a row that is not trained: it has more ids than the trainer accepts."""


class SegmentChoice(enum.StrEnum):
    """The segments of a trajectory that become rows, for trainers that take one row for each sample."""

    EACH = "each"
    """A row for each segment with trained ids, so that no trained id is lost."""
    LAST = "last"
    """The last segment with trained ids; earlier segments are not trained."""
    LONGEST = "longest"
    """The segment with the most trained ids; of several such segments, the last. Other segments are not trained."""
    REFUSE = "refuse"
    """A trajectory that has trained ids in several segments is an error."""

    @classmethod
    def of(cls, given: SegmentChoice | str) -> SegmentChoice:
        """Return the choice of this name.

        Raises:
            BadOption: there is no such choice.
        """
        try:
            return cls(given)
        except ValueError:
            raise BadOption(f"segments={given!r:.60}: give one of {', '.join(cls)}.") from None


Segments: TypeAlias = SegmentChoice | Literal["each", "last", "longest", "refuse"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SampleRow:
    """One segment of a trajectory, split before its first trained id.

    The arrays after `response_ids`, except `routed_experts`, are aligned with it: position p is about
    `response_ids[p]`.
    """

    trajectory: Trajectory
    """Trajectory of the row."""
    segment: int
    """Index of the segment in the trajectory; -1 for a trajectory without segments."""
    last: bool
    """True for the last row of its trajectory."""
    prompt_ids: NDArray[np.int32]
    """Ids before the first trained id, shape [prompt], int32."""
    response_ids: NDArray[np.int32]
    """Ids from the first trained id to the last, with the environment's ids between turns, shape [response], int32."""
    mask: NDArray[np.bool_]
    """True if the id was sampled in this segment and is trained, bool; all False if `failed` is not ""."""
    logprobs: NDArray[np.float32]
    """Log-probability with which the engine sampled each id, in nats, float32; 0 where `mask` is False.

    It is NaN if the engine returned no value, which occurs only with `needs_logprobs=False`.
    """
    versions: tuple[str, ...]
    """Weight version of each id; "" where `mask` is False."""
    constrained: NDArray[np.bool_]
    """True if the id was sampled under a grammar, so that its log-probability is relative to the allowed ids, bool."""
    temperatures: NDArray[np.float32]
    """Divisor of the logits for a log-probability comparable to `logprobs`, float32; 1 where `mask` is False."""
    advantages: NDArray[np.float32]
    """Advantage of each id, float32; 0 where `mask` is False, and everywhere if no advantages were given."""
    sampling_masks: SamplingMasks | None
    """Ids that could be sampled at each position; no ids where `mask` is False or the engine returned none.

    The field is None if the engine returned none for the whole row.
    """
    routed_experts: NDArray[np.int16] | None
    """Experts that computed each id of prompt and response, shape [prompt + response, layers, experts]; -1 if unknown.

    The field is None if the engine returned no experts for the row.
    """
    reward: float | None
    """Reward of the trajectory; None if `failed` is not ""."""
    failed: str
    """Reason why the row is not trained: the outcome of its episode, "no_turn", "no_reward", "untrained", "no_logprobs"
    or "too_long".

    It is "" if the row is trained.
    """

    @property
    def version(self) -> str:
        """The oldest weight version of the row, for trainers that take one number; "" without a trained id.

        Versions only increase in a segment, so the first trained id has the oldest one.
        """
        return next((version for version in self.versions if version), "")


class InexactRows:
    """A counter of the reasons why ratios of probabilities are not exact. It logs a warning once for each reason.

    `INEXACT` of this module counts for the whole process: `from runner.training.sample_rows import INEXACT`.
    """

    def __init__(self) -> None:
        self._turns: Counter[str] = Counter()
        self._ids: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()

    @property
    def turns(self) -> Mapping[str, int]:
        """Number of turns by reason, such as "top_p=0.9"."""
        return dict(self._turns)

    @property
    def ids(self) -> Mapping[str, int]:
        """Number of ids by reason: "a grammar without its masks", "no finite log-probability from the engine"."""
        return dict(self._ids)

    @property
    def left_out(self) -> Mapping[str, int]:
        """Number of rows that are not trained although their episode has a reward: "no_logprobs", "too_long"."""
        return dict(self._left_out)

    def leave_out(self, trajectory: Trajectory, reason: str, cause: str) -> None:
        """Count a row that is not trained, and log the first one of each reason."""
        if reason not in self._left_out:
            log.warning(
                "%s is not trained on (%s): %s. This is logged once; INEXACT.left_out of runner.training.sample_rows "
                "has the counts",
                name_of(trajectory),
                reason,
                cause,
            )
        self._left_out[reason] += 1

    def add(self, rows: Sequence[TrainingRow]) -> None:
        """Count the reasons why these rows are not exact, and log each new reason."""
        turns, ids = reason_counts(rows, recorded=True)  # the rows contain their masks
        for reason in sorted({*turns, *ids} - {*self._turns, *self._ids}):
            log.warning(
                "rows are not exact: %s. The trainer's log-probability of such an id is not comparable to the "
                "engine's. This is logged once; INEXACT of runner.training.sample_rows has the counts",
                reason,
            )
        self._turns += turns
        self._ids += ids


INEXACT: Final = InexactRows()
"""The counts of this process."""


def sample_rows(
    trajectory: Trajectory,
    *,
    segments: Segments = SegmentChoice.EACH,
    advantages: float | Sequence[float] | None = None,
    length: int | tuple[int, int] | None = None,
    pad_id: int = 0,
    needs_logprobs: bool = True,
    counts: InexactRows = INEXACT,
) -> list[SampleRow]:
    """Return a trajectory as rows, at least one.

    The rows of a failed episode have its ids, no trained position and reward None. The same holds for an episode with a
    trained id whose log-probability is not finite, and for a row that is too long, which is cut to the length. These
    two cases are counted, and logged once. A trajectory without a trained id has one row, whose response is one padding
    id.

    Args:
        trajectory: a trajectory of a trained agent.
        segments: the segments that become rows.
        advantages: one number for the trajectory, or one for each of its turns.
        length: maximum number of ids of prompt and response together; or a pair, the maximum numbers of prompt ids and
            of response ids. None for any length.
        pad_id: the padding id, for the response of a trajectory without a trained id.
        needs_logprobs: False for a trainer that ignores `logprobs`: ids without a log-probability are trained too.
        counts: counter of reasons for inexact ratios, and of rows that are left out.

    Raises:
        BadBatch: there are several rows and `segments` is "refuse", the turns have no ids, or the advantages do not
            fit.
        BadOption: `segments` is not a choice, or a length is out of its range.
    """
    choice = SegmentChoice.of(segments)
    limit = _Limit.of(length)
    if trajectory.turns and not any(turn.has_ids for turn in trajectory.turns):
        raise BadBatch(
            f"{name_of(trajectory)} was run on a message engine: it has no token ids to train on. Play it on an engine "
            "of token ids."
        )
    credit = _by_turn(trajectory, advantages)
    table = version_table([trajectory])
    rows = _chosen(rows_of(trajectory, table), choice, trajectory)
    failed = refusal(trajectory) if needs_logprobs else absence(trajectory)
    if not failed:
        counts.add(rows)
    if failed == NO_LOGPROBS:
        counts.leave_out(trajectory, failed, "the engine gave no finite log-probability for an id that it sampled")
    made = [_row(row, tuple(table), credit, failed=failed, last=row is rows[-1], limit=limit) for row in rows]
    for row in made:
        if row.failed == TOO_LONG:
            cause = f"a row is longer than length={length}. Play with Limits(context=...) or a smaller max_tokens"
            counts.leave_out(trajectory, TOO_LONG, cause)
    return made or [_empty(trajectory, failed, pad_id, limit)]


@dataclass(frozen=True, slots=True)
class _Limit:
    """Maximum number of ids of a row."""

    whole: int | None = None
    prompt: int | None = None
    response: int | None = None

    @classmethod
    def of(cls, length: Any) -> _Limit:
        if length is None:
            return cls()
        given = f"length={length!r:.60}"
        if isinstance(length, tuple | list) and len(length) == 2:
            return cls(None, *(whole(given, each, least=1) for each in length))
        pair = ", or a pair: the maximum numbers of prompt ids and of response ids"
        return cls(whole(given, length, least=2, otherwise=pair))

    def kept(self, prompt: int, response: int) -> tuple[int, int]:
        """Return the numbers of ids of prompt and response that fit. The last ids of the prompt are kept."""
        if self.whole is not None:
            response = min(response, max(1, self.whole - prompt))
            return min(prompt, self.whole - response), response
        return min(prompt, self.prompt or prompt), min(response, self.response or response)


def _chosen(rows: list[TrainingRow], choice: SegmentChoice, trajectory: Trajectory) -> list[TrainingRow]:
    if len(rows) < 2 or choice is SegmentChoice.EACH:
        return rows
    if choice is SegmentChoice.REFUSE:
        raise BadBatch(
            f"{name_of(trajectory)} has {len(rows)} segments with trained ids, since its history was rewritten: give "
            "segments='each' for one row per segment, or 'last' or 'longest' for one segment."
        )
    if choice is SegmentChoice.LAST:
        return rows[-1:]
    return [max(reversed(rows), key=lambda row: int(row.loss_mask.sum()))]


def _row(
    row: TrainingRow,
    versions: tuple[str, ...],
    credit: Mapping[Turn, float],
    *,
    failed: str,
    last: bool,
    limit: _Limit,
) -> SampleRow:
    trained = np.flatnonzero(row.loss_mask)
    first, end = int(trained[0]), int(trained[-1]) + 1
    before, after = limit.kept(first, end - first)
    if (before, after) != (first, end - first):
        failed = failed or TOO_LONG
    start, end = first - before, first + after
    part = slice(first, end)
    constrained, advantages = np.zeros(len(row), np.bool_), np.zeros(len(row), np.float32)
    for turn in row.turns:
        constrained[turn.start : turn.end] = turn.constraint is not None
        advantages[turn.start : turn.end] = credit.get(turn, 0.0)
    mask = row.loss_mask & (not failed)
    names = [versions[index] if trains else "" for index, trains in zip(row.versions, mask, strict=True)]
    return SampleRow(
        trajectory=row.trajectory,
        segment=row.segment,
        last=last,
        prompt_ids=row.ids[start:first],
        response_ids=row.ids[part],
        mask=mask[part],
        logprobs=np.where(mask, row.logprobs, np.float32(0))[part],
        versions=tuple(names[part]),
        constrained=(constrained & mask)[part],
        temperatures=np.where(mask, temperatures(row), np.float32(1))[part],
        advantages=np.where(mask, advantages, np.float32(0))[part],
        sampling_masks=_masks(row, mask, first, end),
        routed_experts=None if (experts := row_experts(row)) is None else experts[start:end],
        reward=None if failed else row.trajectory.reward,
        failed=failed,
    )


def _masks(row: TrainingRow, mask: NDArray[np.bool_], first: int, end: int) -> SamplingMasks | None:
    given = [(turn, turn.sampling_masks) for turn in row.turns]
    if all(masks is None for _, masks in given):
        return None
    rows: list[list[int]] = [[] for _ in range(len(row))]
    for turn, masks in given:
        if masks is not None:
            rows[turn.start : turn.end] = masks.rows()
    return SamplingMasks.of(ids if trains else () for ids, trains in zip(rows[first:end], mask[first:end], strict=True))


def _empty(trajectory: Trajectory, failed: str, pad_id: int, limit: _Limit) -> SampleRow:
    """Return the row of a trajectory without a trained id.

    Its prompt is the last segment, and its response is one padding id.
    """
    ids = list(trajectory.segments[-1].log.ids) if trajectory.segments else []
    ids = ids[len(ids) - limit.kept(len(ids), 1)[0] :]
    return SampleRow(
        trajectory=trajectory,
        segment=len(trajectory.segments) - 1,
        last=True,
        prompt_ids=np.array(ids or [pad_id], np.int32),
        response_ids=np.array([pad_id], np.int32),
        mask=np.zeros(1, np.bool_),
        logprobs=np.zeros(1, np.float32),
        versions=("",),
        constrained=np.zeros(1, np.bool_),
        temperatures=np.ones(1, np.float32),
        advantages=np.zeros(1, np.float32),
        sampling_masks=None,
        routed_experts=None,
        reward=None if failed else trajectory.reward,
        failed=failed,
    )


def _by_turn(trajectory: Trajectory, advantages: float | Sequence[float] | None) -> Mapping[Turn, float]:
    turns = trajectory.turns
    if advantages is None:
        return {}
    values = as_numpy(advantages).astype(np.float32)
    if values.shape not in ((), (len(turns),)) or not np.isfinite(values).all():
        raise BadBatch(
            f"{name_of(trajectory)}: advantages of shape {values.shape}: give one finite number, or one for each of "
            f"its {counted(len(turns), 'turn')}."
        )
    return dict(zip(turns, np.broadcast_to(values, len(turns)).tolist(), strict=True))
