"""Train on the calculator with TRL's GRPOTrainer, without a GPU: deltarunner plays the episodes for it.

Run it with: pip install trl datasets, then python -m examples.train_trl --help
The settings are as in train_grpo.py. TRL's own forward pass computes the prompt of each episode again, and on a CPU
also the model's head for each id of the prompt. `OneTree` computes a prefix that rows of a step share only once. With
--plain, TRL is unchanged.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import typer
from datasets import Dataset
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from envs.calculator import Calculator, Question
from examples.progress import TrainingProgress, TrainingRecord, TrainingStep
from examples.train_grpo import CLIP_NORM, HELD_OUT_BASE, WARM_UP, Settings, questions
from runner import BackgroundPlayer, Limits, Sampling, VllmEngine
from runner.models import resolve_model
from runner.trainers.trl import episode_reward, rollout_func
from runner.training import TokenTree, weight_proof
from runner.training.rows import TrainingRow
from runner.training.tree import Saving
from runner.training.tree_attention import TREE_ATTENTION
from runner.training.tree_torch import tree_logits, tree_logprobs

PLAIN_ROWS = 16  # episodes in one of TRL's own forward passes
COMPLETION = Settings.turns * 48  # maximum number of ids of a completion


class OneTree(GRPOTrainer):  # type: ignore[misc]  # trl is not installed here
    """GRPOTrainer that computes the log-probabilities of a batch as one token tree, without rows of flat groups."""

    saving: float | None = None  # ids of the last batch's rows per computed node

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        learns = inputs["advantages"] != 0
        learns[0] = True  # TRL needs a row
        kept = {
            name: value[learns] if torch.is_tensor(value) and value.dim() else value for name, value in inputs.items()
        }
        return super()._compute_loss(model, kept) * learns.float().mean()  # the mean over all rows

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, **_: Any
    ) -> tuple[Any, Any, None]:
        seen, prompt = attention_mask.bool().numpy(), input_ids.size(1) - logits_to_keep
        rows = [row_of(ids[here], here[:prompt].sum()) for ids, here in zip(input_ids.numpy(), seen, strict=True)]
        tree = TokenTree.of(rows)
        self.saving = Saving.of([tree]).ratio
        with self.accelerator.autocast():
            logits = tree_logits(model, tree)
        left = prompt - seen[:, :prompt].sum(1)  # padding before each prompt
        column = tree.terms.position + left[tree.terms.row] - prompt
        logprobs = torch.zeros(len(rows), logits_to_keep)
        logprobs = logprobs.index_put(
            (torch.from_numpy(tree.terms.row).long(), torch.from_numpy(column).long()), tree_logprobs(logits, tree)
        )
        return logprobs, -logprobs.detach(), None  # the entropy is only shown, so an estimate suffices


def row_of(ids: Any, prompt: int) -> TrainingRow:
    """A row of ids; the ids after the prompt are trained. It has no trajectory, since TRL has only ids."""
    trained, zeros = np.arange(len(ids)) >= prompt, np.zeros(len(ids), np.int32)
    none: Any = None
    return TrainingRow(none, 0, ids.astype(np.int32), trained, zeros.astype(np.float32), zeros, ())


class HeldOut(Calculator):
    """The calculator; held-out questions are played greedily."""

    limits = Limits(turns=Settings.turns)

    def setup(self) -> None:
        if int(self.task.id.rpartition("-")[2]) >= HELD_OUT_BASE:
            self.sampling = Sampling(temperature=0)


class Progress(TrainerCallback):  # type: ignore[misc]  # trl is not installed here
    """Display of each step with the time of its rollouts; ends the training once `settings.enough` is reached."""

    def __init__(self, settings: Settings, rollouts: Any, progress: TrainingProgress) -> None:
        self.settings, self.rollouts, self.progress = settings, rollouts, progress
        self.began = self.played = 0.0
        self.output: dict[str, list[Any]] = {}
        self.trainer: Any = None

    def play(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """The rollout function for TRL."""
        began, self.trainer = time.monotonic(), trainer
        self.output = self.rollouts(prompts, trainer)
        self.played = time.monotonic() - began
        return self.output

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = self.began or time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now, size = time.monotonic(), self.settings.group_size
        rewards = self.output["reward"]
        scored = [reward for reward in rewards if reward is not None]
        step = TrainingStep(
            number=state.global_step,
            reward=fmean(scored),
            exact=fmean(reward >= 1 for reward in scored),
            groups=sum(len({*rewards[at : at + size]}) > 1 for at in range(0, len(rewards), size)),
            ids=sum(map(sum, self.output["env_mask"])),
            saving=getattr(self.trainer, "saving", None),
            gap=None,  # TRL compares log-probabilities only for its own engine
            seconds={"rollout": self.played, "train": now - self.began - self.played},
            version=self.output["version"][0] or "",
        )
        self.progress.add(step)
        last = [each.exact for each in self.progress.steps[-5:]]
        control.should_training_stop |= len(last) == 5 and fmean(last) >= self.settings.enough
        self.began = now


def evaluate(player: BackgroundPlayer, held_out: Sequence[Question]) -> float:
    """Share of held-out questions with the right answer, with the weights that the engine has."""
    played = player.play_many([(task, 0) for task in held_out])
    return sum(trajectory.rewards.get("exact") == 1 for (trajectory,) in played) / len(held_out)


def config(settings: Settings, rows: int, dtype: str) -> GRPOConfig:
    """The settings of train_grpo, in the names of TRL."""
    return GRPOConfig(
        output_dir=str(settings.out),
        num_generations=settings.group_size,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=settings.tasks * settings.group_size // rows,
        max_steps=settings.steps,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=WARM_UP,
        adam_beta2=0.95,
        loss_type="dr_grpo",  # sum over ids / (episodes * max_completion_length)
        max_completion_length=COMPLETION,
        max_grad_norm=CLIP_NORM / COMPLETION,
        beta=0.0,
        use_cpu=True,
        bf16=dtype == "bfloat16",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        seed=settings.seed,
    )


def train(settings: Settings, console: Console, plain: bool = False) -> TrainingRecord:
    """Train, and write the model, its curve and its figures to the folder `settings.out`."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    held_out, others = questions(settings)
    tasks = list(itertools.islice(others, settings.steps * settings.tasks))
    folder = resolve_model(settings.model).folder
    attention = "sdpa" if plain else TREE_ATTENTION
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    for frozen in (model.get_input_embeddings(), *model.base_model.layers[: settings.frozen_layers]):
        frozen.requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = VllmEngine(settings.model, max_model_len=settings.context)
    with (
        BackgroundPlayer(HeldOut, engine, group_size=settings.group_size, seed=settings.seed) as player,
        TrainingProgress(console) as progress,
    ):
        tokenizer.chat_template = engine.template.text
        before = evaluate(player, held_out)
        progress.say(f"held out, before: {before:.3f}")
        watch = Progress(settings, rollout_func(player, tasks=tasks), progress)
        trainer = (GRPOTrainer if plain else OneTree)(
            model,
            episode_reward,
            args=config(settings, PLAIN_ROWS if plain else settings.tasks * settings.group_size, engine_dtype(engine)),
            train_dataset=Dataset.from_list([{"prompt": task.id} for task in tasks]),
            processing_class=tokenizer,
            rollout_func=watch.play,
            callbacks=[watch],
        )
        trainer.train()
        player.update_weights(model.state_dict(), proof=weight_proof(model, dtype=engine_dtype(engine)))
        after = evaluate(player, held_out)
        progress.say(f"held out, after {progress.seconds:.0f} s of training: {after:.3f}")
        model.to(getattr(torch, engine_dtype(engine)))
    trainer.save_model()
    progress.say(f"play what it learnt: deltarunner run calculator --model {settings.out}")
    title = f"TRL's GRPOTrainer on the calculator, seed {settings.seed}"
    return progress.save(settings.out, title=title, held_out={"greedy": (before, after)})


def engine_dtype(engine: VllmEngine) -> str:
    """Number type of the started engine."""
    return str(engine.describe()["dtype"])


def main(
    seed: int = 0,
    steps: int = 60,
    tasks: int = 8,
    held_out: int = 128,
    plain: bool = False,
    out: Path = Path("runs/trl"),
) -> None:
    """Train the demo model on the calculator with TRL, and save it."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # silences the warning that rollout_func is experimental
    settings = Settings(seed=seed, steps=steps, tasks=tasks, held_out=held_out, out=out)
    train(settings, Console(), plain)


if __name__ == "__main__":  # vLLM starts processes of its own, which import this file
    typer.run(main)
