"""Training batches: trajectories as padded or packed arrays, with everything that a policy gradient needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from runner.checked import is_whole, whole
from runner.errors import BadBatch, BadOption
from runner.training.advantages import AdvantageRule
from runner.training.exactness import constrained_ids, inexact_reason, temperatures
from runner.training.packing import Layout
from runner.training.rows import NO_VERSION, TrainingRow, likeliest
from runner.training.selection import ComparedGroup, GroupsOrTrajectories, Selection, name_of
from runner.trajectory import Trajectory

if TYPE_CHECKING:
    import torch

    from runner.training.grammar import GrammarMasks
    from runner.training.token_masks import TokenMasks

__all__ = ["TrainingBatch", "TrainingTensors"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TrainingBatch:
    """Rows, each one segment of a trajectory, in arrays of shape [sequences, length].

    Padding is on the right. At position p stands what is known of the id there, given those before it in its row: a
    model's logits at p - 1 predict it. The first id of a row is never trained, so shifting by one mixes no rows.

    `len(batch)` is the number of sequences. It is 0, and the batch false, where every trajectory was absent or left
    out: such a step is to be skipped.
    """

    input_ids: NDArray[np.int32]
    """Token ids, `pad_id` in the padding, int32."""
    attention_mask: NDArray[np.bool_]
    """Whether an id stands here and no padding, bool. It does not keep packed rows apart."""
    position_ids: NDArray[np.int32]
    """Positions that count from 0 in each row, and in the padding behind the last row of a sequence; int32."""
    segment_ids: NDArray[np.int32]
    """The index into `rows` + 1 of the row that stands here, and 0 for padding, int32.

    A query may see the keys of its own segment id.
    """
    loss_mask: NDArray[np.bool_]
    """Whether the id is trained, which it is in the segment in which it was sampled, bool."""
    logprobs: NDArray[np.float32]
    """The log-probability that the id was sampled with, in nats, float32.

    It is 0 where nothing is trained, and NaN where the engine gave none.
    """
    temperatures: NDArray[np.float32]
    """What logits are divided by to get that log-probability, 1 where nothing is trained, float32."""
    advantages: NDArray[np.float32]
    """The advantage of the id, float32; 0 until advantages are given, and where nothing is trained."""
    weight_versions: NDArray[np.int32]
    """The index into `versions` of the weights that sampled the id, -1 where nothing is trained, int32."""
    versions: tuple[str, ...]
    """The weight versions."""
    rows: tuple[TrainingRow, ...]
    """The rows that were laid out.

    Each belongs to one trajectory, and a trajectory has as many as it has segments in which something is trained.
    """
    trajectory_of: NDArray[np.int32]
    """The index of each row's trajectory in `trajectories`, shape [rows], int32."""
    trajectories: tuple[Trajectory, ...]
    """The trajectories that have a reward, in the order they were given."""
    rewards: NDArray[np.float32]
    """The reward of each trajectory, shape [trajectories], float32."""
    group_of: NDArray[np.int32]
    """The index of each trajectory's group in `groups`, shape [trajectories], int32."""
    groups: tuple[ComparedGroup, ...]
    """Every group that was given, with what became of it: whole or partial, flat or not."""
    absent: Mapping[str, int]
    """How many trajectories have no reward, by outcome, or by why a scored one has none."""
    layout: Layout
    """Where each row stands."""
    inexact_reason: str
    """Why exp(trainer's log-probability - `logprobs`) is not exactly the ratio of two policies.

    An example is "top_p=0.9 (12 turns)"; "" says that it is.
    """
    constrained: int
    """The number of trained ids that were sampled under a grammar.

    For them the ratio is exact only with the grammar's mask on the trainer's logits.
    """
    masks: TokenMasks | None = None
    """The token masks of the grammars, `index` in the batch's shape; None until `with_masks`."""

    @classmethod
    def padded(
        cls,
        source: GroupsOrTrajectories,
        *,
        pad_id: int,
        length: int | None = None,
        multiple_of: int = 1,
        advantages: AdvantageRule | None = None,
        partial: bool = False,
        drop_flat: bool = False,
        vocabulary: int | None = None,
    ) -> Self:
        """One row to a sequence, shape [rows, length].

        Args:
            source: groups; or trajectories, each of them compared with no other.
            pad_id: the id of the padding. It may be one that is also sampled: padding is told by `attention_mask`.
            length: the length of the sequences; by default that of the longest row. A longer row is refused, never cut.
            multiple_of: the length is rounded up to a multiple of this.
            advantages: the rule that makes them of rewards and groups, `grpo`, `rloo`, `dr_grpo` or one of yours.
            partial: take groups of which not every episode has been played.
            drop_flat: leave out the trajectories of groups whose rewards are all equal, which teach nothing.
            vocabulary: how many ids the model knows; a batch of another tokenizer is refused.

        Raises:
            BadBatch: nothing was given, or what is no group; a group is not complete; a trajectory was given twice; a
                row is too long; an id is not in the vocabulary; the advantages do not fit.
            BadOption: a number is out of its range, or `advantages` is no function.
        """
        chosen = Selection.of(source, partial=partial, drop_flat=drop_flat, vocabulary=vocabulary)
        if length is not None:
            _check_lengths(chosen.rows, length)
        layout = Layout.padded([len(row) for row in chosen.rows], length=length, multiple_of=multiple_of)
        return cls._laid_out(chosen, layout, _checked_id(pad_id, vocabulary), advantages)

    @classmethod
    def packed(
        cls,
        source: GroupsOrTrajectories,
        *,
        length: int,
        pad_id: int,
        advantages: AdvantageRule | None = None,
        partial: bool = False,
        drop_flat: bool = False,
        vocabulary: int | None = None,
    ) -> Self:
        """Several rows to a sequence, the longest first, each into the first sequence that has room for all of it.

        A row may see itself only: by its `segment_ids`, or by `position_ids`, which begin again with every row.

        Arguments and errors are those of `padded`.
        """
        chosen = Selection.of(source, partial=partial, drop_flat=drop_flat, vocabulary=vocabulary)
        _check_lengths(chosen.rows, length)
        layout = Layout.packed([len(row) for row in chosen.rows], length=length)
        return cls._laid_out(chosen, layout, _checked_id(pad_id, vocabulary), advantages)

    @classmethod
    def _laid_out(cls, chosen: Selection, layout: Layout, pad_id: int, advantages: AdvantageRule | None) -> Self:
        rows = chosen.rows
        segment_ids = layout.segment_ids()
        batch = cls(
            input_ids=layout.fill((row.ids for row in rows), pad_id, np.int32),
            attention_mask=segment_ids > 0,
            position_ids=layout.position_ids(),
            segment_ids=segment_ids,
            loss_mask=layout.fill((row.loss_mask for row in rows), False, np.bool_),
            logprobs=layout.fill((row.logprobs for row in rows), 0, np.float32),
            temperatures=layout.fill(map(temperatures, rows), 1, np.float32),
            advantages=np.zeros(segment_ids.shape, dtype=np.float32),
            weight_versions=layout.fill((row.versions for row in rows), NO_VERSION, np.int32),
            versions=chosen.versions,
            rows=rows,
            trajectory_of=chosen.trajectory_of,
            trajectories=chosen.trajectories,
            rewards=chosen.rewards,
            group_of=chosen.group_of,
            groups=chosen.groups,
            absent=chosen.absent,
            layout=layout,
            inexact_reason=inexact_reason(rows),
            constrained=constrained_ids(rows),
        )
        if advantages is None:
            return batch
        if not callable(advantages):
            raise BadOption(
                f"advantages={advantages!r:.60}: give a function: grpo, rloo or dr_grpo (from runner.training import "
                "grpo), or one of yours from rewards and groups. Values that you have go to "
                "batch.with_advantages(values)."
            )
        return batch.with_advantages(advantages(batch.rewards, batch.group_of))

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def exact(self) -> bool:
        """Whether exp(trainer's log-probability - `logprobs`) is the ratio of two policies, and nothing else is in it.

        The trainer's is to be at the same `temperatures`, and under `masks` where `constrained` is above 0.
        """
        return not self.inexact_reason

    @property
    def trained(self) -> int:
        """The number of ids that are trained, by which a loss by token is divided."""
        return int(self.loss_mask.sum())

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of ids in each row, shape [rows]."""
        return self.layout.lengths

    def with_advantages(self, values: ArrayLike) -> Self:
        """The same batch with these advantages; they are put where ids are trained, and 0 elsewhere.

        Args:
            values: one for each of `trajectories`, which all its segments get; or one for each position, shape
                [sequences, length].

        Raises:
            BadBatch: the shape is another one, or a value is not finite where an id is trained.
        """
        given = np.asarray(values, dtype=np.float32)
        if given.shape == self.rewards.shape:
            # The segment id 0 is that of padding, and gets the first value.
            by_segment_id = np.concatenate([np.zeros(1, np.float32), given[self.trajectory_of]])
            given = by_segment_id[self.segment_ids]
        elif given.shape != self.loss_mask.shape:
            raise BadBatch(
                f"advantages of shape {given.shape}: give one for each of the {len(self.trajectories)} trajectories, "
                f"or one for each position, shape {self.loss_mask.shape}."
            )
        placed = np.where(self.loss_mask, given, np.float32(0))
        bad = np.argwhere(~np.isfinite(placed))
        if len(bad):
            row = self.rows[self.segment_ids[tuple(bad[0])] - 1]
            raise BadBatch(f"the advantage of {name_of(row.trajectory)} is {placed[tuple(bad[0])]}: give finite ones.")
        return dataclasses.replace(self, advantages=placed)

    def with_masks(self, grammar: GrammarMasks) -> Self:
        """The same batch with the token masks of its constrained turns, worked out from the grammars they keep.

        Raises:
            BadBatch: an id is not allowed where it stands, or a constraint cannot be compiled; names which.
        """
        masks = grammar.masks_for(self.rows, self.layout)
        return dataclasses.replace(self, masks=masks, inexact_reason=inexact_reason(self.rows, masked=True))

    def top_logprobs(self, count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The `count` likeliest ids in the place of each trained id, and their log-probabilities, likeliest first.

        Both are made at each call, since they are `count` times as large as the other arrays together.

        Args:
            count: how many of each position, at most the n of the `Sampling(logprobs=n)` of every trained turn.

        Returns:
            Ids, int32, -1 where nothing is trained, and log-probabilities in nats, float32, 0 there; both of shape
            [sequences, length, count].

        Raises:
            BadBatch: a trained turn has fewer; names it.
            BadOption: `count` is below 1.
        """
        whole(f"count={count!r}", count, least=1)
        rows = [likeliest(row, count) for row in self.rows]
        ids = [self.layout.fill((row_ids[:, n] for row_ids, _ in rows), -1, np.int32) for n in range(count)]
        logprobs = [self.layout.fill((values[:, n] for _, values in rows), 0, np.float32) for n in range(count)]
        return np.stack(ids, axis=-1), np.stack(logprobs, axis=-1)

    def unpadded(self, array: Any) -> list[Any]:
        """Each row's part of an array or tensor of shape [sequences, length, ...], without padding, as in `rows`."""
        return self.layout.split(array)

    def torch(self, *, device: Any = "cpu") -> TrainingTensors:
        """The arrays as tensors of their own, on a device."""
        import torch

        def tensor(name: str) -> torch.Tensor:
            array = getattr(self, name)
            dtype = torch.bool if name == "loss_mask" else torch.float32 if array.dtype.kind == "f" else torch.int64
            return torch.tensor(array, dtype=dtype, device=device)

        return TrainingTensors(**{name: tensor(name) for name in _TENSORS}, masks=self.masks)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TrainingTensors:
    """The arrays of a `TrainingBatch` as torch tensors, all of shape [sequences, length].

    Integers are int64, which is what Transformers takes. What each holds is said at the field of the batch.
    """

    input_ids: torch.Tensor
    """Token ids, int64."""
    attention_mask: torch.Tensor
    """1 where an id stands, and 0 in the padding, int64."""
    position_ids: torch.Tensor
    """Positions that count from 0 in each row, int64."""
    segment_ids: torch.Tensor
    """The index + 1 of the row that stands here, and 0 for padding, int64."""
    loss_mask: torch.Tensor
    """Whether the id is trained, bool."""
    logprobs: torch.Tensor
    """The log-probability that the id was sampled with, in nats, float32."""
    temperatures: torch.Tensor
    """What logits are divided by to get that log-probability, float32."""
    advantages: torch.Tensor
    """The advantage of the id, float32."""
    weight_versions: torch.Tensor
    """The index of the weight version that sampled the id, -1 where nothing is trained, int64."""
    masks: TokenMasks | None = None
    """The grammar's token masks, packed as in the batch, for `masked_logprobs` and its like in `grammar_torch`."""

    @property
    def model_inputs(self) -> dict[str, Any]:
        """The arguments of a model of Transformers, `model(**tensors.model_inputs)`, so that a row sees itself only.

        It tells packed rows apart by `position_ids`, and only without an attention mask and without a cache. Padding
        needs no mask either: it is on the right, where no row sees it. With `attn_implementation="flash_attention_2"`
        it looks at one sequence only: give `reshape(1, -1)` of both arrays there.
        """
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, "use_cache": False}

    def split(self, sequences: int) -> Iterator[TrainingTensors]:
        """Parts of at most so many sequences, for a pass forward and backward each; views, no copies.

        Raises:
            BadOption: `sequences` is below 1.
        """
        whole(f"sequences={sequences!r}", sequences, least=1)
        for start in range(0, len(self.input_ids), sequences):
            part = slice(start, start + sequences)
            # The table of masks is shared: it has no rows of its own for the sequences.
            masks = None if self.masks is None else dataclasses.replace(self.masks, index=self.masks.index[part])
            yield TrainingTensors(**{name: getattr(self, name)[part] for name in _TENSORS}, masks=masks)


_TENSORS = [each.name for each in dataclasses.fields(TrainingTensors) if each.name != "masks"]


def _check_lengths(rows: Sequence[TrainingRow], length: int) -> None:
    whole(f"length={length!r}", length, least=1)
    for row in rows:
        if len(row) > length:
            longest = max(map(len, rows))
            raise BadBatch(
                f"{name_of(row.trajectory)}, segment {row.segment}, has {len(row)} ids and does not fit into "
                f"length={length}. Rows are never cut: give length={longest}, or play with Limits(context={length})."
            )


def _checked_id(pad_id: int, vocabulary: int | None) -> int:
    if not is_whole(pad_id, least=0):
        raise BadOption(f"pad_id={pad_id!r:.60}: give a token id, such as tokenizer.pad_token_id or the EOS.")
    if vocabulary is not None and pad_id >= vocabulary:
        raise BadOption(f"pad_id={pad_id} is none of the {vocabulary} ids of this vocabulary.")
    return pad_id
