"""GRPO in one process: a small model learns to use a calculator, without a GPU, within minutes.

Run it with: make train, or python -m examples.train_grpo --help
Rollouts by `Run`, batches as token trees under the grammar's masks, new weights into the engine that runs.
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

HELD_OUT_BASE = 1_000_000_000  # the number of the first question that is never trained on
WARM_UP, CLIP_NORM, RATIO = 3, 1.0, (0.8, 1.25)  # steps; of the gradient; beyond it an old id has no more to teach
TURNS, NODES = 3, 4096  # of an episode: two calls and the answer; of a token tree: what 4 GB hold


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings; `tasks` questions with `group_size` episodes each make a step."""

    seed: int = 0
    steps: int = 60
    minutes: float = 8.0  # most: on a current processor less is enough, and training stops then
    overlap: bool = False
    out: Path = Path("runs/trained")
    model: str = "smollm2-135m"
    tasks: int = 8
    group_size: int = 8
    held_out: int = 128
    learning_rate: float = 8e-5
    frozen_layers: int = 20  # of the demo model's 30, the lower ones: a step takes 40% less
    enough: float = 0.995  # mean exact reward of five steps at which training stops early


@dataclass(frozen=True)
class Batch:
    """Data of one step: groups with different rewards as token trees, each with its grammar's masks."""

    rows: Selection
    trees: list[TokenTree]
    masks: list[TokenMasks]
    advantages: np.ndarray[Any, np.dtype[np.float32]]  # one for each row


class Trainer:
    """The weights that learn: kept in float32, computed with in the engine's dtype; embeddings, lower layers stay."""

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
        """Each episode against its group: reward less the mean, over the deviation; groups without spread drop out."""
        rows = Selection.of(groups, drop_flat=True)
        trees = TokenTree.packs(rows.rows, nodes=NODES)
        masks = [self.grammar.masks_for_terms(rows.rows, tree.terms) for tree in trees]
        return Batch(rows, trees, masks, grpo(rows.rewards, rows.group_of)[rows.trajectory_of])

    def learn(self, batch: Batch, version: str) -> list[float]:
        """Do one optimizer step from the weights `version`; return the result of `gradient`."""
        gaps = self.gradient(batch, version)
        if batch.trees:  # else every group was solved by all its episodes, or by none
            torch.nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
            self.optimizer.step()
            self.warm_up.step()
            self.optimizer.zero_grad()
        return gaps

    def gradient(self, batch: Batch, version: str) -> list[float]:
        """Add the gradient of the batch's loss; return the difference of each log-probability from the engine's."""
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
        """With what log-probability these weights sample each id, among those that the grammar allows in its place."""
        half = self.dtype is not torch.float32
        with torch.autocast(self.model.device.type, self.dtype if half else None, enabled=half):
            return tree_head_logprobs(self.model, tree, masks)

    def ratios(self, now: torch.Tensor, tree: TokenTree, versions: Sequence[str], version: str) -> torch.Tensor:
        """Each id's probability now over that when it was sampled: 1, with a gradient, where these weights did it."""
        own = torch.from_numpy(np.array([each == version for each in versions])[tree.terms.versions])
        # There the engine's own figure differs by rounding only; it is older weights that have to be asked.
        then = torch.where(own, now.detach(), torch.from_numpy(tree.terms.logprobs))
        return (now - then).exp()

    def save(self, folder: Path, template: str) -> None:
        """A folder that any engine loads, in the engine's dtype, with its tokenizer and the training's template."""
        tokenizer = AutoTokenizer.from_pretrained(self.model.config.name_or_path)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        deepcopy(self.model).to(self.dtype).save_pretrained(folder)


def questions(settings: Settings) -> tuple[list[Question], Iterator[Question]]:
    """The held-out questions, all different, and as many others as are wanted: none is among those held out."""
    different = {
        task.prompt: task for task in map(question, range(HELD_OUT_BASE, HELD_OUT_BASE + 2 * settings.held_out))
    }
    held_out = dict(itertools.islice(different.items(), settings.held_out))
    others = map(question, itertools.count((settings.seed + 1) * 1_000_000))  # after those of `deltarunner run`
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


async def evaluate(engine: VllmEngine, tasks: Sequence[Question], console: Console | None = None) -> dict[str, float]:
    """Share of held-out questions with the right answer; a failed episode counts as wrong."""
    shares = {}
    for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
        shown = None
        if console is not None:
            console.print(f"{len(tasks)} held-out questions, {name}")
            shown = PlainDisplay(console, name)
        groups = await play(engine, tasks, shown, sampling=Sampling(temperature=temperature))
        shares[name] = sum(group.trajectories[0].rewards.get("exact") == 1 for group in groups) / len(tasks)
    return shares


def mean_of(groups: Sequence[Group], reward: str | None = None) -> float:
    """Mean of the reward, or of one of its parts; an episode that failed has none."""
    scored = [each for group in groups for each in group.trajectories if each.reward is not None]
    return fmean((each.rewards[reward] if reward else each.reward) or 0.0 for each in scored)


@dataclass
class Loop:
    """Rollouts, a batch, a step of the optimizer, new weights into the engine; and again."""

    settings: Settings
    engine: VllmEngine
    trainer: Trainer
    progress: TrainingProgress
    tasks: Iterator[Question]

    async def rollouts(self) -> list[Group]:
        """The episodes of the next step; none may be more than one update older than the weights that learn."""
        tasks, size = list(itertools.islice(self.tasks, self.settings.tasks)), self.settings.group_size
        limits, seed = Limits(turns=TURNS), self.settings.seed
        return await play(self.engine, tasks, group_size=size, seed=seed, limits=limits, max_version_lag=1)

    async def play_ahead(self, played: MemoryObjectSendStream[list[Group]]) -> None:
        while True:
            await played.send(await self.rollouts())

    async def proof(self) -> WeightProof:
        """The log-probabilities by which the engine shows that it has the weights that learn."""
        prove = partial(weight_proof, self.trainer.model, self.engine.tokenizer, dtype=self.trainer.dtype)
        return await anyio.to_thread.run_sync(prove)

    async def run(self) -> None:
        await self.engine.prove(await self.proof())
        send, receive = anyio.create_memory_object_stream[list[Group]](0)
        async with send, receive, anyio.create_task_group() as tasks:
            if self.settings.overlap:  # the next step's episodes are in flight while this one is learnt from
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
            exact=mean_of(groups, "exact"),
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
    """Train, and leave the model, its curve and its figures in the folder `settings.out`."""
    held_out, tasks = questions(settings)
    folder = resolve_model(engine.model).folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=TREE_ATTENTION)
    dtype = getattr(torch, engine.describe()["dtype"])
    trainer = Trainer(model, GrammarMasks.of_engine(engine), settings, dtype)
    before = await evaluate(engine, held_out, console)
    with TrainingProgress(console) as progress:
        progress.say(f"held out, before: {before}")
        await Loop(settings, engine, trainer, progress, tasks).run()
        after = await evaluate(engine, held_out, console)
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
            engine = VllmEngine(settings.model, max_model_len=2048)
            async with started_before(console, engine):
                await train(settings, engine, console)

    anyio.run(started)


if __name__ == "__main__":  # vLLM starts processes of its own, which import this file
    typer.run(main)
