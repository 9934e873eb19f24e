"""GRPO in one process: a small model learns to use a calculator, without a GPU, within minutes.

Run it with: make train, or python -m examples.train_grpo --help
`Run` plays the episodes, batches are token trees with the masks of the grammar, and the running engine loads the new
weights.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import anyio
import numpy as np
import torch
import typer
from anyio.streams.memory import MemoryObjectSendStream
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from envs.calculator import Calculator, Question, question
from examples.progress import Stopwatch, TrainingProgress, TrainingRecord, TrainingStep, started_before
from runner import Concurrency, Group, Limits, Run, Sampling, VllmEngine, WeightProof
from runner.cli.display import PlainDisplay
from runner.cli.quiet_output import quiet_output
from runner.models import resolve_model
from runner.training import GrammarMasks, Saving, Selection, TokenMasks, TokenTree, grpo, weight_proof
from runner.training.tree_attention import TREE_ATTENTION
from runner.training.tree_torch import tree_head_logprobs

HELD_OUT_BASE = 1_000_000_000  # number of the first held-out question
WARM_UP, CLIP_NORM, RATIO = 3, 1.0, (0.8, 1.25)  # steps; norm of the gradient; bounds of a ratio
MAX_NODES = 4096  # nodes of a token tree in 4 GB


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a training. A step has `tasks` questions with `group_size` episodes each."""

    seed: int = 0
    steps: int = 60
    minutes: float = 8.0  # at most: training stops earlier if `enough` is reached
    overlap: bool = False
    out: Path = Path("runs/trained")
    model: str = "smollm2-135m"
    exact_reward: str = "exact"  # name of the reward that is 1 for a right answer, without partial credit
    turns: int = 3  # of a training episode, instead of the environment's limit: two calls and the answer
    context: int = 2048  # ids of a conversation at most
    tasks: int = 8
    group_size: int = 8
    held_out: int = 128
    learning_rate: float = 8e-5
    frozen_layers: int = 20  # lower layers of the demo model's 30 that stay as they are: a step takes 40% less
    enough: float = 0.995  # mean exact reward of five steps at which training stops early


@dataclass(frozen=True)
class Batch:
    """Data of one step: groups with different rewards as token trees, each with its grammar's masks."""

    rows: Selection
    trees: list[TokenTree]
    masks: list[TokenMasks]
    advantages: np.ndarray[Any, np.dtype[np.float32]]  # one for each row


class Trainer:
    """The trained weights, in float32; computed in the engine's dtype. Embeddings and lower layers are frozen."""

    def __init__(
        self, model: Any, grammar: GrammarMasks, settings: Settings, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        for frozen in (model.get_input_embeddings(), *model.base_model.layers[: settings.frozen_layers]):
            frozen.requires_grad_(False)
        self.model, self.grammar, self.dtype = model, grammar, dtype
        self.episodes = settings.tasks * settings.group_size
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.Adam(self.parameters, settings.learning_rate, betas=(0.9, 0.95), fused=True)
        self.warm_up = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1, (step + 1) / WARM_UP))

    def batch(self, groups: Sequence[Group]) -> Batch:
        """Return the batch of some groups, with GRPO's advantages. Groups with equal rewards are left out."""
        rows = Selection.of(groups, drop_flat=True)
        trees = TokenTree.packs(rows.rows, nodes=MAX_NODES)
        masks = [self.grammar.masks_for_terms(rows.rows, tree.terms) for tree in trees]
        return Batch(rows, trees, masks, grpo(rows.rewards, rows.group_of)[rows.trajectory_of])

    def learn(self, batch: Batch, version: str) -> list[float]:
        """Do one optimizer step from the weights `version`; return the result of `gradient`."""
        gaps = self.gradient(batch, version)
        if batch.trees:  # no trees if each group has equal rewards
            torch.nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
            self.optimizer.step()
            self.warm_up.step()
            self.optimizer.zero_grad()
        return gaps

    def gradient(self, batch: Batch, version: str) -> list[float]:
        """Add the gradient of the batch's loss; return how far each log-probability is from the engine's, in nats."""
        gaps = []
        for tree, masks in zip(batch.trees, batch.masks, strict=True):
            now = self.logprobs(tree, masks)
            ratios = self.ratios(now, tree, batch.rows.versions, version)
            advantages = torch.from_numpy(batch.advantages[tree.terms.row])
            gain = torch.minimum(ratios * advantages, ratios.clamp(*RATIO) * advantages)
            (-gain.sum() / self.episodes).backward()
            gaps += (now.detach() - torch.from_numpy(tree.terms.logprobs)).abs().tolist()
        return gaps

    def logprobs(self, tree: TokenTree, masks: TokenMasks) -> torch.Tensor:
        """Return the log-probability of each id under these weights, among the ids that the grammar allows there."""
        half = self.dtype is not torch.float32
        with torch.autocast(self.model.device.type, self.dtype if half else None, enabled=half):
            return tree_head_logprobs(self.model, tree, masks)

    def ratios(self, now: torch.Tensor, tree: TokenTree, versions: Sequence[str], version: str) -> torch.Tensor:
        """Return each probability now over the one at sampling: 1, with a gradient, for ids that `version` sampled."""
        own = torch.from_numpy(np.array([each == version for each in versions])[tree.terms.versions])
        # For ids of these weights, the engine's value differs only by rounding. Ids of older weights need the engine's
        # value.
        then = torch.where(own, now.detach(), torch.from_numpy(tree.terms.logprobs))
        return (now - then).exp()

    def save(self, folder: Path, template: str) -> None:
        """Save the model in the engine's dtype, with its tokenizer and the template of the training."""
        tokenizer = AutoTokenizer.from_pretrained(self.model.config.name_or_path)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        deepcopy(self.model).to(self.dtype).save_pretrained(folder)


def questions(settings: Settings) -> tuple[list[Question], Iterator[Question]]:
    """Return the held-out questions, all different, and an endless iterator of other questions."""
    different = {
        task.prompt: task for task in map(question, range(HELD_OUT_BASE, HELD_OUT_BASE + 2 * settings.held_out))
    }
    held_out = dict(itertools.islice(different.items(), settings.held_out))
    others = map(question, itertools.count((settings.seed + 1) * 1_000_000))  # `deltarunner run` has lower numbers
    return list(held_out.values()), (task for task in others if task.prompt not in held_out)


async def play(
    engine: VllmEngine, tasks: Sequence[Question], shown: PlainDisplay | None = None, **options: Any
) -> list[Group]:
    async with Run(Calculator(), engine, tasks=tasks, concurrency=Concurrency(episodes=64), **options) as run:
        async with anyio.create_task_group() as watching:
            if shown is not None:
                shown.total = len(tasks)
                watching.start_soon(shown.watch, run)
            groups = [group async for group in run.groups()]
            watching.cancel_scope.cancel()
        return groups


async def evaluate(
    engine: VllmEngine, tasks: Sequence[Question], exact_reward: str, console: Console | None = None
) -> dict[str, float]:
    """Share of held-out questions with the right answer; a failed episode counts as wrong."""
    shares = {}
    for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
        shown = None
        if console is not None:
            console.print(f"{len(tasks)} held-out questions, {name}")
            shown = PlainDisplay(console, name)
        groups = await play(engine, tasks, shown, sampling=Sampling(temperature=temperature))
        shares[name] = sum(group.trajectories[0].rewards.get(exact_reward) == 1 for group in groups) / len(tasks)
    return shares


def mean_of(groups: Sequence[Group], reward: str | None = None) -> float:
    """Mean of the reward, or of one of its parts, over the episodes that did not fail."""
    scored = [each for group in groups for each in group.trajectories if each.reward is not None]
    return fmean((each.rewards[reward] if reward else each.reward) or 0.0 for each in scored)


@dataclass
class Loop:
    """The loop of training: rollouts, a batch, a step of the optimizer, and new weights for the engine."""

    settings: Settings
    engine: VllmEngine
    trainer: Trainer
    progress: TrainingProgress
    tasks: Iterator[Question]

    async def rollouts(self) -> list[Group]:
        """Play the episodes of the next step. Ids may be sampled at most one update before the current weights."""
        tasks, size = list(itertools.islice(self.tasks, self.settings.tasks)), self.settings.group_size
        limits, seed = Limits(turns=self.settings.turns), self.settings.seed
        return await play(self.engine, tasks, group_size=size, seed=seed, limits=limits, max_version_lag=1)

    async def play_ahead(self, played: MemoryObjectSendStream[list[Group]]) -> None:
        while True:
            await played.send(await self.rollouts())

    async def proof(self) -> WeightProof:
        """Return log-probabilities of the trained weights, with which the engine's weights are compared."""
        prove = partial(weight_proof, self.trainer.model, self.engine.tokenizer, dtype=self.trainer.dtype)
        return await anyio.to_thread.run_sync(prove)

    async def run(self) -> None:
        await self.engine.prove(await self.proof())
        send, receive = anyio.create_memory_object_stream[list[Group]](0)
        async with send, receive, anyio.create_task_group() as tasks:
            if self.settings.overlap:  # play the next step while this one is trained on
                tasks.start_soon(self.play_ahead, send)
            while not self.done:
                watch = Stopwatch()
                with watch("rollout"):
                    groups = await (receive.receive() if self.settings.overlap else self.rollouts())
                self.progress.add(await self.step(groups, watch))
            tasks.cancel_scope.cancel()

    async def step(self, groups: list[Group], watch: Stopwatch) -> TrainingStep:
        with watch("batch"):
            batch = await anyio.to_thread.run_sync(self.trainer.batch, groups)
        with watch("train"):
            gaps = await anyio.to_thread.run_sync(self.trainer.learn, batch, self.engine.weight_version)
        with watch("update"):  # `keep`: turns in flight are paused, and continue with the new weights
            proof = await self.proof()
            update = await self.engine.update_weights(self.trainer.model.state_dict(), mode="keep", proof=proof)
        return TrainingStep(
            number=len(self.progress.steps) + 1,
            reward=mean_of(groups),
            exact=mean_of(groups, self.settings.exact_reward),
            groups=sum(not group.flat for group in batch.rows.groups),
            ids=len(gaps),
            saving=Saving.of(batch.trees).ratio,
            gap=fmean(gaps or [0.0]),
            seconds=watch.seconds,
            version=update.version,
        )

    @property
    def done(self) -> bool:
        steps, seconds = self.progress.steps, 60 * self.settings.minutes - self.progress.seconds
        enough = len(steps) >= 5 and fmean(step.exact for step in steps[-5:]) >= self.settings.enough
        return bool(steps) and (enough or len(steps) >= self.settings.steps or seconds < steps[-1].total)


async def train(settings: Settings, engine: VllmEngine, console: Console) -> TrainingRecord:
    """Train, and write the model, its curve and its figures to the folder `settings.out`."""
    held_out, tasks = questions(settings)
    folder = resolve_model(engine.model).folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=TREE_ATTENTION)
    dtype = getattr(torch, engine.describe()["dtype"])
    trainer = Trainer(model, GrammarMasks.of_engine(engine), settings, dtype)
    before = await evaluate(engine, held_out, settings.exact_reward, console)
    with TrainingProgress(console) as progress:
        progress.say(f"held out, before: {before}")
        await Loop(settings, engine, trainer, progress, tasks).run()
        after = await evaluate(engine, held_out, settings.exact_reward, console)
        progress.say(f"held out, after {progress.seconds:.0f} s of training: {after}")
    trainer.save(settings.out, engine.template.text)
    progress.say(f"play what it learnt: deltarunner run calculator --model {settings.out}")
    both = {name: (before[name], after[name]) for name in before}
    return progress.save(settings.out, title=f"GRPO on the calculator, seed {settings.seed}", held_out=both)


def main(seed: int = 0, steps: int = 60, minutes: float = 8, overlap: bool = False, out: Path = Settings.out) -> None:
    """Train the demo model on the calculator, and save it."""
    settings = Settings(seed=seed, steps=steps, minutes=minutes, overlap=overlap, out=out)

    async def started() -> None:
        with quiet_output(out / "engine.log") as terminal:
            console = Console(file=terminal.stdout)
            engine = VllmEngine(settings.model, max_model_len=settings.context)
            async with started_before(console, engine):
                await train(settings, engine, console)

    anyio.run(started)


if __name__ == "__main__":  # vLLM starts processes of its own, which import this file
    typer.run(main)
