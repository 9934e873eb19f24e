"""TRL's GRPOTrainer learns the calculator: its episodes are played here, and its weights go into the engine.

Run it with: pip install trl datasets, then python -m examples.train_trl --help
The settings are those of train_grpo.py. A step takes longer here, since TRL computes each episode's prompt again.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from datasets import Dataset
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from envs.calculator import Calculator, Question
from examples.progress import TrainingProgress, TrainingRecord, TrainingStep
from examples.train_grpo import CLIP_NORM, HELD_OUT, TURNS, WARM_UP, Settings, questions
from runner import BackgroundPlayer, Limits, Sampling, VllmEngine
from runner.models import resolve_model
from runner.trainers.trl import episode_reward, rollout_func

ROWS = 16  # episodes in one forward pass of TRL


class HeldOut(Calculator):
    """The calculator; questions that are never trained on are played greedily."""

    limits = Limits(turns=TURNS)

    def setup(self) -> None:
        if int(self.task.id.rpartition("-")[2]) >= HELD_OUT:
            self.sampling = Sampling(temperature=0)


class Progress(TrainerCallback):  # type: ignore[misc]  # trl is not installed here
    """Splits the time of each step into rollout and training, and plays the held-out questions."""

    def __init__(self, player: BackgroundPlayer, held_out: Sequence[Question], progress: TrainingProgress) -> None:
        self.player, self.held_out, self.progress = player, held_out, progress
        self.began = self.rollout = 0.0
        self.output: dict[str, list[Any]] = {}

    def watched(self, rollouts: Any) -> Any:
        """A rollout function that takes the time of another one, and keeps its result."""

        def play(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
            began = time.monotonic()
            self.output = rollouts(prompts, trainer)
            self.rollout = time.monotonic() - began
            return self.output

        return play

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = self.began or time.monotonic()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.monotonic()
        rewards = [reward for reward in self.output["reward"] if reward is not None]
        size = self.player.options.group_size
        groups = [self.output["reward"][start : start + size] for start in range(0, len(rewards), size)]
        self.progress.add(
            TrainingStep(
                number=len(self.progress.steps) + 1,
                reward=sum(rewards) / len(rewards),
                exact=sum(reward >= 1 for reward in rewards) / len(rewards),
                groups=sum(len(set(group)) > 1 for group in groups),
                ids=sum(map(sum, self.output["env_mask"])),
                saving=1.0,
                gap=0.0,  # TRL does not compare log-probabilities here
                seconds={"rollout": self.rollout, "train": now - self.began - self.rollout},
                version=self.output["version"][0] or "",
            )
        )
        self.began = time.monotonic()

    def evaluate(self) -> float:
        """Share of held-out questions with the right answer, with the weights that the engine has."""
        played = self.player.play_many([(task, 0) for task in self.held_out])
        return sum(trajectory.rewards.get("exact") == 1 for (trajectory,) in played) / max(1, len(played))


def train(settings: Settings, console: Console) -> TrainingRecord:
    """Train, and leave the model, its curve and its figures in the folder `settings.out`."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    held_out, others = questions(settings)
    tasks = list(itertools.islice(others, settings.steps * settings.tasks))
    folder = resolve_model(settings.model).location
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for frozen in (model.get_input_embeddings(), *model.base_model.layers[: settings.frozen_layers]):
        frozen.requires_grad_(False)
    engine = VllmEngine(settings.model, max_model_len=2048)
    episodes = settings.tasks * settings.group_size
    rows = min(ROWS, episodes)
    with (
        BackgroundPlayer(HeldOut, engine, group_size=settings.group_size, seed=settings.seed) as player,
        TrainingProgress(console) as progress,
    ):
        watch = Progress(player, held_out, progress)
        rollouts = rollout_func(player, tasks=[*tasks, *held_out])
        trainer = GRPOTrainer(
            model,
            episode_reward,
            args=GRPOConfig(
                output_dir=str(settings.out),
                num_generations=settings.group_size,
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=episodes // rows,
                max_steps=settings.steps,
                learning_rate=settings.learning_rate,
                lr_scheduler_type="constant_with_warmup",
                warmup_steps=WARM_UP,
                adam_beta2=0.95,
                max_grad_norm=CLIP_NORM,
                beta=0.0,
                use_cpu=True,
                bf16=engine_dtype(engine) == "bfloat16",
                gradient_checkpointing=False,
                shuffle_dataset=False,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                logging_strategy="no",
                seed=settings.seed,
            ),
            train_dataset=Dataset.from_list([{"prompt": task.id} for task in tasks]),
            processing_class=AutoTokenizer.from_pretrained(folder),
            rollout_func=watch.watched(rollouts),
            callbacks=[watch],
        )
        before = watch.evaluate()
        progress.say(f"held out, before: {before:.3f}")
        trainer.train()
        player.update_weights(model.state_dict())
        after = watch.evaluate()
        progress.say(f"held out, after {progress.seconds:.0f} s of training: {after:.3f}")
    trainer.save_model()
    title = f"TRL's GRPOTrainer on the calculator, seed {settings.seed}"
    return progress.save(settings.out, title=title, held_out={"greedy": (before, after)})


def engine_dtype(engine: VllmEngine) -> str:
    """Number type of the started engine."""
    return str(engine.describe()["dtype"])


def main(seed: int = 0, steps: int = 20, tasks: int = 8, held_out: int = 128, out: Path = Path("runs/trl")) -> None:
    """Train the demo model on the calculator with TRL, and save it."""
    settings = Settings(seed=seed, steps=steps, tasks=tasks, held_out=held_out, out=out)
    train(settings, Console())


if __name__ == "__main__":  # vLLM starts processes of its own, which import this file
    typer.run(main)
