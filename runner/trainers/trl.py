"""A `rollout_func` for TRL's `GRPOTrainer`, and the reward function that belongs to it.

Checked with TRL 1.16.0. This module imports nothing of TRL, since TRL passes its trainer as an argument.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from runner.engines.base import Engine
from runner.engines.proofs import WeightProof
from runner.environment.task_checks import TaskChecks
from runner.episode.key import MAIN
from runner.errors import BadBatch, BadControl, BadModel, BadOption, BadWeights
from runner.quantities import counted
from runner.runs.background_player import BackgroundPlayer
from runner.tasks import Task
from runner.training.sample_rows import SampleRow, SegmentChoice, sample_rows
from runner.training.selection import name_of
from runner.training.weight_proof import PROOF_SIZE, weight_proof
from runner.trajectory import Trajectory

__all__ = ["FailedEpisodes", "episode_reward", "rollout_func"]

RolloutFunction: TypeAlias = Callable[[list[Any], Any], dict[str, Any]]
"""TRL's type of a function of prompts and the trainer. It returns lists by name, with one entry for each prompt; the
list `logprobs` may be None.
"""

_PROBE: Final = "two tokenizers: 12 + 30 = 42, naïve\n\tÅngström <tag> 東京"


class FailedEpisodes(enum.StrEnum):
    """The treatment of episodes without a reward."""

    MASK = "mask"
    """A row whose mask is 0 and whose reward is None, which TRL leaves out of the loss."""
    RAISE = "raise"
    """An error that ends the training."""


def rollout_func(
    player: BackgroundPlayer,
    *,
    tasks: Mapping[str, Task] | Iterable[Task],
    weights: bool = True,
    proof: bool = True,
    failed: FailedEpisodes | Literal["mask", "raise"] = FailedEpisodes.MASK,
    segments: SegmentChoice | Literal["last", "longest", "refuse"] = SegmentChoice.LAST,
    length: int | None = None,
) -> RolloutFunction:
    """Return a function for `GRPOTrainer(rollout_func=)` that plays each prompt's task.

        with BackgroundPlayer(environment, engine, group_size=8) as player:
            trainer = GRPOTrainer(
                model, episode_reward, args=GRPOConfig(num_generations=8, ...),
                train_dataset=Dataset.from_list([{"prompt": task.id} for task in tasks]),
                rollout_func=rollout_func(player, tasks=tasks),
            )
            trainer.train()

    Each rank of a distributed training and each step plays a task with other seeds (another visit of the task).

    New weights are sent to the engine before the first rollout after an optimizer step, with a proof that they arrive:
    one forward pass of the trainer's model over 256 ids. Besides ids, log-probabilities and `env_mask`, a reward
    function receives `reward`, `outcome`, `version` (the oldest weight version of the row) and `constrained` (the
    number of ids that were sampled under a grammar). TRL applies no grammar to its log-probabilities.

    Args:
        player: a started player, whose `group_size` is the trainer's `num_generations`.
        tasks: a mapping from the prompts of the data set to tasks, or an iterable of tasks whose ids are the prompts.
            If a prompt is a conversation, the text of its last message is looked up.
        weights: False to send no weights, for an engine that samples from the trainer's own model, such as a
            `TokenEngine` over it.
        proof: False to send weights without a proof. An engine without scores, or without a known number type, never
            gets a proof.
        failed: treatment of episodes without a reward.
        segments: the segment that becomes the row if a history was rewritten, since TRL takes one row for each prompt.
        length: maximum number of ids of a row; a longer row counts as a failed episode. None for any length.

    Raises:
        BadOption: an argument is invalid.
        BadTask: a task cannot be played.

    Raises (from the function):
        BadOption: a prompt has no task; the engine takes messages; or the model is a PEFT model, whose adapter has to
            be merged first.
        BadModel: the trainer's tokenizer or its starting weights differ from the engine's; or the engine returns no
            log-probabilities, and the trainer has `use_vllm=True`.
        BadBatch: a row was sampled at another temperature than the trainer's; an episode failed or has no reward, and
            `failed` is "raise"; or an episode has no trajectory of the agent `main`.
        RunStopped, EngineError, BadWeights: as the player raises them; `EngineDead` if a proof does not hold.
    """
    try:
        chosen = FailedEpisodes(failed)
    except ValueError:
        raise BadOption(f"failed={failed!r:.60}: give one of {', '.join(FailedEpisodes)}.") from None
    segments = SegmentChoice.of(segments)
    if segments is SegmentChoice.EACH:
        raise BadOption("segments='each': TRL takes one row for each prompt; give 'last', 'longest' or 'refuse'.")
    named = tasks if isinstance(tasks, Mapping) else {task.id: task for task in tasks}
    checks = TaskChecks(player.environment, is_kept=False)
    for task in named.values():
        checks.checked(task)
    return _Rollouts(player, dict(named), weights, proof, chosen, segments, length)


def episode_reward(completions: Sequence[Any], *, reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """Return the rewards of the episodes, as a reward function of TRL; None for a failed episode.

    Raises:
        BadBatch: there are not as many rewards as completions.
    """
    if len(reward) != len(completions):
        raise BadBatch(f"{len(reward)} rewards for {len(completions)} completions: use the rewards of rollout_func().")
    return list(reward)


@dataclass(slots=True)
class _Rollouts:
    player: BackgroundPlayer
    tasks: Mapping[str, Task]
    sends_weights: bool
    proves: bool
    failed: FailedEpisodes
    segments: SegmentChoice
    length: int | None
    _sent_step: int = field(default=0)
    """The optimizer step whose weights the engine has; 0 for the weights with which training starts."""
    _checked: bool = field(default=False)

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        step = int(trainer.state.global_step)
        if not self._checked:
            self._check(trainer)
            # A resumed training has played at most this many visits of a task before.
            ranks = trainer.accelerator
            self.player.player.share_visits(ranks.process_index, ranks.num_processes, skip=step * len(prompts))
            if self.sends_weights and step == self._sent_step:
                self._prove_start(trainer)
            self._checked = True
        if self.sends_weights and step != self._sent_step:
            self.player.update_weights(_model_of(trainer).state_dict(), proof=self._proof(trainer))
            self._sent_step = step
        rows = [self._row(trajectory, trainer) for trajectory in self._played([self._task(each) for each in prompts])]
        return {
            "prompt_ids": [row.prompt_ids.tolist() for row in rows],
            "completion_ids": [row.response_ids.tolist() for row in rows],
            # TRL computes its own log-probabilities if the values of one row are missing.
            "logprobs": [row.logprobs.tolist() for row in rows] if all(map(_has_logprobs, rows)) else None,
            "env_mask": [row.mask.astype(int).tolist() for row in rows],
            "reward": [row.reward for row in rows],
            "version": [row.version for row in rows],
            "outcome": [row.failed or row.trajectory.outcome.value for row in rows],
            "constrained": [int(row.constrained.sum()) for row in rows],
        }

    def _check(self, trainer: Any) -> None:
        engine, tokenizer = self.player.engine, trainer.processing_class
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor of images and text contains the tokenizer
        if not isinstance(engine, Engine):
            raise BadOption(f"{type(engine).__name__} takes messages: TRL trains on ids; use an engine of token ids.")
        ours, theirs = engine.tokenizer.encode(_PROBE), tokenizer.encode(_PROBE, add_special_tokens=False)
        if list(ours) != list(theirs):
            raise BadModel(
                f"the trainer's tokenizer encodes a text as {list(theirs)[:8]}, the engine's as {list(ours)[:8]}: the "
                "two models use different ids for the same text. Give both the same model."
            )
        if trainer.args.use_vllm and engine.describe().get("logprobs") in (None, "none"):
            raise BadModel(
                f"{type(engine).__name__} returns no log-probabilities, and GRPOConfig(use_vllm=True) needs them for "
                "its ratios. Leave use_vllm out, or give an engine with log-probabilities."
            )

    def _prove_start(self, trainer: Any) -> None:
        """Prove that the engine has the trainer's starting weights.

        This measures the difference by rounding alone, from which the tolerance of later proofs is computed.

        Raises:
            BadModel: the weights differ.
        """
        proof = self._proof(trainer)
        if proof is None:
            return
        try:
            self.player.prove(proof)
        except BadWeights as error:
            raise BadModel(
                f"the trainer starts with other weights than the engine: {error} Give both the same checkpoint, or "
                "proof=False."
            ) from None

    def _proof(self, trainer: Any) -> WeightProof | None:
        """Return a proof of the trainer's weights.

        The result is None with `proof=False`, or if the engine has no scores or no number type.
        """
        engine = self.player.engine
        dtype = engine.describe().get("dtype")
        if not self.proves or dtype is None or not isinstance(engine, Engine):
            return None
        try:
            engine.check_scoring(as_sampled=False)
        except BadControl:
            return None
        size = min(PROOF_SIZE, engine.context - 1)
        return weight_proof(_model_of(trainer), engine.tokenizer, size=size, dtype=dtype)

    def _task(self, prompt: Any) -> Task:
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        try:
            return self.tasks[text]
        except KeyError:
            raise BadOption(f"the prompt {text!r:.80} of the data set has no task in tasks=: add one.") from None

    def _played(self, tasks: list[Task]) -> list[Trajectory]:
        """Play the tasks, and return a trajectory of `main` for each, in their order.

        Consecutive equal tasks are played as groups of `group_size`, and the remaining ones as single episodes.
        """
        size = self.player.options.group_size
        counts = [(task, len(list(same))) for task, same in groupby(tasks)]
        whole = [task for task, count in counts for _ in range(count // size)]
        groups = iter(self.player.play_groups(whole))
        singles = [(task, index) for task, count in counts for index in range(count % size)]
        alone = iter(self.player.play_many(singles))
        played: list[Trajectory] = []
        for task, count in counts:
            for _ in range(count // size):
                group = next((each for each in groups if each.agent == MAIN and each.task.id == task.id), None)
                played += _of_main(task, size, group.trajectories if group is not None else ())
            played += [each for _ in range(count % size) for each in _of_main(task, 1, next(alone))]
        return played

    def _row(self, trajectory: Trajectory, trainer: Any) -> SampleRow:
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        (row,) = sample_rows(
            trajectory,
            segments=self.segments,
            length=self.length,
            pad_id=int(pad or 0),
            needs_logprobs=trainer.args.use_vllm,
        )
        if row.failed and self.failed is FailedEpisodes.RAISE:
            cause = trajectory.error or trajectory.reason or "see the log"
            raise BadBatch(
                f"{name_of(trajectory)} has no reward ({row.failed}): {cause}. "
                "With failed='mask' the episode is left out of the training."
            )
        computed = trainer.args.temperature
        sampled = {float(each) for each in row.temperatures[row.mask]}
        # A greedy turn has log-probabilities at temperature 1, but is not a sample from that distribution.
        sampled |= {0.0 for turn in trajectory.turns if turn.sampling is not None and turn.sampling.temperature == 0}
        if row.mask.any() and not np.allclose(list(sampled), computed, rtol=1e-5):
            raise BadBatch(
                f"{name_of(trajectory)} was sampled at temperature {min(sampled):g}, but the trainer's "
                f"log-probabilities are at {computed:g}. Give GRPOConfig and Sampling the same temperature."
            )
        return row


def _of_main(task: Task, count: int, trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """Return the trajectories of `main`; raise BadBatch if their number is not `count`: TRL needs one per prompt."""
    played = [each for each in trajectories if each.agent == MAIN]
    if len(played) != count:
        raise BadBatch(
            f"task {task.id!r}: in {counted(count - len(played), 'episode')} of {count}, agent 'main' took no turn. "
            "TRL needs a trajectory of 'main' for each prompt: let 'main' sample in each episode."
        )
    return played


def _has_logprobs(row: SampleRow) -> bool:
    return bool(np.isfinite(row.logprobs).all())


def _model_of(trainer: Any) -> Any:
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "peft_config"):
        raise BadOption(
            "the trained model is a PEFT model: its adapter is not among the engine's weights. Merge it before "
            "training, or send it in a callback by engine.add_adapter(...) and give weights=False."
        )
    return model
