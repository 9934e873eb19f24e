"""Training batches: trajectories as padded or packed arrays for policy gradients."""

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
from runner.training.array_kinds import as_numpy
from runner.training.exactness import constrained_ids, inexact_reason, temperatures
from runner.training.packing import Layout
from runner.training.rows import NO_VERSION, TrainingRow, row_experts, top_logprobs
from runner.training.selection import ComparedGroup, GroupsOrTrajectories, Selection, name_of
from runner.trajectory import Trajectory

if TYPE_CHECKING:
    import torch

    from runner.training.token_masks import RecordedMasks, TokenMasks

__all__ = ["TrainingBatch", "TrainingTensors"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TrainingBatch:
    """Rows in arrays of shape [sequences, length]. Each row is one segment of a trajectory.

    Padding is on the right. Values at position p are about the id at p, which a model's logits at p - 1 predict. The
    first id of a row is never trained, so a shift by one never mixes rows.

    `len(batch)` is the number of sequences. It is 0, and `bool(batch)` is False, if every trajectory was absent or left
    out; skip such a step.
    """

    input_ids: NDArray[np.int32]
    """Token ids, `pad_id` in the padding, int32."""
    attention_mask: NDArray[np.bool_]
    """True for ids, False for padding, bool. It does not separate packed rows."""
    position_ids: NDArray[np.int32]
    """Positions from 0 in each row. The padding at the end of a sequence also counts from 0; int32."""
    segment_ids: NDArray[np.int32]
    """1 + the index of the row in `rows`, and 0 for padding, int32.

    A query may attend to keys of the same segment id.
    """
    loss_mask: NDArray[np.bool_]
    """True if the id was sampled in this segment and is trained, bool."""
    logprobs: NDArray[np.float32]
    """Log-probability with which the engine sampled the id, in nats, float32.

    It is 0 at untrained positions, and NaN if the engine returned no value.
    """
    temperatures: NDArray[np.float32]
    """Divisor of the logits for a log-probability that is comparable to `logprobs`; 1 at untrained positions, float32.
    """
    advantages: NDArray[np.float32]
    """Advantage of the id, float32; 0 before advantages are given, and at untrained positions."""
    weight_versions: NDArray[np.int32]
    """Index into `versions` of the weights that sampled the id, -1 at untrained positions, int32."""
    versions: tuple[str, ...]
    """Weight versions, to which `weight_versions` refers."""
    rows: tuple[TrainingRow, ...]
    """Rows of the batch.

    A trajectory has one row for each segment with trained ids.
    """
    trajectory_of: NDArray[np.int32]
    """Index of each row's trajectory in `trajectories`, shape [rows], int32."""
    trajectories: tuple[Trajectory, ...]
    """Trajectories with a reward, in the given order."""
    rewards: NDArray[np.float32]
    """Reward of each trajectory, shape [trajectories], float32."""
    group_of: NDArray[np.int32]
    """Index of each trajectory's group in `groups`, shape [trajectories], int32."""
    groups: tuple[ComparedGroup, ...]
    """All given groups, with their state: complete or partial, flat or not."""
    absent: Mapping[str, int]
    """Number of absent trajectories by reason: an outcome, "no_turn", "no_reward" or "untrained"."""
    layout: Layout
    """Positions of the rows in the arrays."""
    inexact_reason: str
    """Reason why exp(trainer's log-probability - `logprobs`) is not exactly the ratio of two policies.

    An example is "top_p=0.9 (12 turns)"; "" if it is exact.
    """
    constrained: int
    """Number of trained ids that were sampled under a grammar.

    Their ratio is exact only with the grammar's mask on the trainer's logits.
    """
    masks: TokenMasks | None = None
    """Token masks of the grammars, with `index` in the batch's shape; None before `with_masks`."""

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
        """Create a batch with one row per sequence, shape [rows, length].

        Args:
            source: groups; or single trajectories, which are not compared with each other.
            pad_id: id of the padding. It may also be a sampled id, since `attention_mask` marks the padding.
            length: length of the sequences; by default the length of the longest row. A longer row is refused, never
                cut.
            multiple_of: the length is rounded up to a multiple of this number.
            advantages: rule from rewards and groups to advantages: `grpo`, `rloo`, `dr_grpo` or your own.
            partial: accept groups with unfinished episodes.
            drop_flat: leave out the trajectories of groups with equal rewards, which have no gradient.
            vocabulary: number of ids of the model; an id at or above it is an error. None for no maximum.

        Raises:
            BadBatch: as for `Selection.of`; or a row is too long, or the advantages do not fit.
            BadOption: a number is out of its range, or `advantages` is not a function.
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
        """Create a batch with several rows per sequence: longest first, each row in the first sequence with room.

        A row may attend only to itself: use `segment_ids`, or `position_ids`, which restart with every row.

        Arguments and errors are as for `padded`.
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
                "grpo), or your own, from rewards and groups. For computed values use "
                "batch.with_advantages(values)."
            )
        return batch.with_advantages(advantages(batch.rewards, batch.group_of))

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def exact(self) -> bool:
        """True if exp(trainer's log-probability - `logprobs`) is exactly the ratio of two policies.

        The trainer's value needs the same `temperatures`, and `masks` if `constrained` is above 0.
        """
        return not self.inexact_reason

    @property
    def trained(self) -> int:
        """Number of trained ids, the divisor of a token-level loss."""
        return int(self.loss_mask.sum())

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of ids in each row, shape [rows]."""
        return self.layout.lengths

    def with_advantages(self, values: ArrayLike) -> Self:
        """Return the batch with these advantages at trained positions, and 0 elsewhere.

        Args:
            values: an array or a tensor: one value for each of `trajectories`, used for all segments of the trajectory;
                or one value for each position, shape [sequences, length].

        Raises:
            BadBatch: the shape does not fit, or the value of a trained id is not finite.
        """
        given = as_numpy(values).astype(np.float32)
        if given.shape == self.rewards.shape:
            # Segment id 0 is padding. It gets the first value, 0.
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
            raise BadBatch(
                f"the advantage of {name_of(row.trajectory)} is {placed[tuple(bad[0])]}: give finite numbers."
            )
        return dataclasses.replace(self, advantages=placed)

    def with_masks(self, grammar: RecordedMasks) -> Self:
        """Return the batch with the token masks of its turns: recorded masks, or masks computed from grammars.

        Args:
            grammar: `GrammarMasks` for turns that were sampled under a grammar; `RecordedMasks` for turns whose engine
                returned the ids that could be sampled.

        Raises:
            BadBatch: an id is not allowed by its mask, a constraint cannot be compiled, or a constrained turn has no
                masks; the message names the turn.
        """
        masks = grammar.masks_for(self.rows, self.layout)
        return dataclasses.replace(
            self, masks=masks, inexact_reason=inexact_reason(self.rows, masked=True, recorded=True)
        )

    def top_logprobs(self, count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the `count` most likely ids at each trained position and their log-probabilities, sorted.

        The result is not cached, since it is large: `count` ids and log-probabilities for each position.

        Args:
            count: number of ids per position, at most the n of `Sampling(logprobs=n)` of every trained turn.

        Returns:
            Ids, int32, -1 at untrained positions, and log-probabilities in nats, float32, 0 there; both of shape
            [sequences, length, count].

        Raises:
            BadBatch: a trained turn has fewer ids per position; the message names the turn.
            BadOption: `count` is below 1.
        """
        whole(f"count={count!r}", count, least=1)
        rows = [top_logprobs(row, count) for row in self.rows]
        ids = [self.layout.fill((row_ids[:, n] for row_ids, _ in rows), -1, np.int32) for n in range(count)]
        logprobs = [self.layout.fill((values[:, n] for _, values in rows), 0, np.float32) for n in range(count)]
        return np.stack(ids, axis=-1), np.stack(logprobs, axis=-1)

    def routed_experts(self) -> NDArray[np.int16]:
        """Return the experts that computed each id, for a trainer that uses the same routing as the engine.

        The result is not cached, since it is much larger than all other arrays together. The last sampled id of a
        request is not an input of the engine's model, so the last sampled id of a row has no experts.

        Returns:
            Shape [sequences, length, layers, experts of each id], int16, -1 without experts.

        Raises:
            BadBatch: no turn has experts, or turns differ in the number of layers or of experts for each id.
        """
        rows = [row_experts(row) for row in self.rows]
        shapes = {row.shape[1:] for row in rows if row is not None}
        if len(shapes) != 1:
            found = "no turn has routed experts" if not shapes else f"turns have experts of the shapes {sorted(shapes)}"
            raise BadBatch(f"{found}: play with VllmEngine(enable_return_routed_experts=True) and one model.")
        (shape,) = shapes
        missing = (np.full((len(row), *shape), -1, np.int16) for row in self.rows)
        given = (none if each is None else each for each, none in zip(rows, missing, strict=True))
        return self.layout.fill(given, -1, np.int16)

    def unpadded(self, array: Any) -> list[Any]:
        """Split an array or tensor of shape [sequences, length, ...] into unpadded rows, in the order of `rows`."""
        return self.layout.split(array)

    def torch(self, *, device: Any = "cpu") -> TrainingTensors:
        """Copy the arrays to torch tensors on a device."""
        import torch

        def tensor(name: str) -> torch.Tensor:
            array = getattr(self, name)
            dtype = torch.bool if name == "loss_mask" else torch.float32 if array.dtype.kind == "f" else torch.int64
            return torch.tensor(array, dtype=dtype, device=device)

        return TrainingTensors(**{name: tensor(name) for name in _TENSORS}, masks=self.masks)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TrainingTensors:
    """Arrays of a `TrainingBatch` as torch tensors, all of shape [sequences, length].

    Integers are int64, as Transformers needs them. The fields of `TrainingBatch` describe the contents.
    """

    input_ids: torch.Tensor
    """Token ids, int64."""
    attention_mask: torch.Tensor
    """1 for ids and 0 for padding, int64."""
    position_ids: torch.Tensor
    """Positions from 0 in each row, int64."""
    segment_ids: torch.Tensor
    """1 + the index of the row, and 0 for padding, int64."""
    loss_mask: torch.Tensor
    """True if the id is trained, bool."""
    logprobs: torch.Tensor
    """Log-probability with which the engine sampled the id, in nats, float32."""
    temperatures: torch.Tensor
    """Divisor of the logits for a log-probability that is comparable to `logprobs`, float32."""
    advantages: torch.Tensor
    """Advantage of the id, float32."""
    weight_versions: torch.Tensor
    """Index of the weight version that sampled the id, -1 at untrained positions, int64."""
    masks: TokenMasks | None = None
    """Token masks of the grammars, for the functions of `grammar_torch`; None if the batch has none."""

    @property
    def model_inputs(self) -> dict[str, Any]:
        """Arguments of a Transformers model, `model(**tensors.model_inputs)`. With them, a row attends only to itself.

        Transformers separates packed rows by `position_ids`, but only without an attention mask and without a cache.
        Padding needs no mask: it is on the right, where no row attends to it. `attn_implementation="flash_attention_2"`
        separates rows only in a batch of one sequence: give it `reshape(1, -1)` of both tensors.
        """
        return {"input_ids": self.input_ids, "position_ids": self.position_ids, "use_cache": False}

    def split(self, sequences: int) -> Iterator[TrainingTensors]:
        """Yield parts of at most `sequences` sequences, for separate forward and backward passes.

        The tensors of the parts are views of these tensors.

        Raises:
            BadOption: `sequences` is below 1.
        """
        whole(f"sequences={sequences!r}", sequences, least=1)
        for start in range(0, len(self.input_ids), sequences):
            part = slice(start, start + sequences)
            # All sequences share the table of masks.
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
        raise BadOption(f"pad_id={pad_id}: give one of the {vocabulary} ids of this vocabulary, such as the EOS.")
    return pad_id
