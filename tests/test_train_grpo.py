"""The GRPO example: its training data, its gradient, and two steps on the real engine."""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
from anyio import from_thread
from rich.console import Console

from envs.calculator import Calculator
from examples.progress import HEAD, TrainingProgress, TrainingRecord, TrainingStep
from runner import Group, Limits, Sampling, Task, VllmEngine
from runner.engines.base import GenerationRequest
from runner.models import demo_model
from runner.training.advantages import grpo
from runner.training.batch import TrainingBatch
from runner.training.selection import Selection
from runner.training.tree import TokenTree
from tests import sweeps

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from examples import train_grpo, train_proof  # noqa: E402  # the examples need torch
from examples.train_grpo import Batch, Loop, Settings, Trainer, play, questions, train  # noqa: E402  # the same
from runner.training.grammar import GrammarMasks  # noqa: E402  # the same
from runner.training.grammar_torch import masked_logprobs  # noqa: E402  # it imports torch
from runner.training.tree_attention import TREE_ATTENTION  # noqa: E402  # it imports torch

pytestmark = pytest.mark.anyio

SMALL = Settings(
    steps=sweeps.times(2, 1),
    tasks=3,
    group_size=4,
    held_out=2,
    learning_rate=9e-4 if sweeps.whole() else 2e-4,
    frozen_layers=sweeps.times(20, 27),
    enough=2.0,
)
"""Settings with large steps, so that new weights differ clearly from old ones. Whole sweeps play until episodes get
long.
"""


def tiny_model(**settings: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        **settings,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep torch's number of threads: a trainer takes every core, and one core belongs to another process of tests."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


@pytest.fixture
async def trained_engine(engine: VllmEngine) -> AsyncIterator[VllmEngine]:
    """The real engine; it gets its first weights back after the test."""
    yield engine
    await engine.update_weights(demo_model())


@pytest.fixture(scope="module")
async def groups(session_engine: VllmEngine) -> Sequence[Group]:
    _, tasks = questions(SMALL)
    played = await play(session_engine, list(itertools.islice(tasks, SMALL.tasks)), group_size=SMALL.group_size, seed=3)
    assert any(len({each.reward for each in group.trajectories}) > 1 for group in played), (
        "no group has different rewards"
    )
    return played


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_held_out_and_prompt_questions_are_not_trained_on(seed: int) -> None:
    held_out, training = questions(Settings(seed=seed))
    texts = {task.prompt for task in held_out}
    assert len(held_out) == len(texts) == 128
    shown = {str(message["content"]) for message in Calculator.prompt(_asked()) if message["role"] == "user"}
    taken = list(itertools.islice(training, 5000))
    trained_on = {task.prompt for task in taken}
    assert not {task.id for task in taken} & {task.id for task in Calculator().tasks()}, (
        "`deltarunner run` must play other tasks"
    )
    assert not texts & trained_on
    assert len(shown) == 3
    assert not (shown - {"What is it?"}) & texts


def _asked() -> Calculator:
    environment = Calculator()
    environment.task = Task(id="asked", prompt="What is it?")  # type: ignore[assignment]  # only the prompt is read
    return environment


@pytest.mark.slow
def test_saved_model_continues_in_float32(small_model_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(small_model_folder, dtype=torch.float32)
    trainer = Trainer(model, GrammarMasks(), SMALL)
    trainer.save(tmp_path, "{{ messages }}")
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ messages }}"


def test_seeds_train_on_other_questions_and_hold_out_the_same() -> None:
    (held_out, first), (same, second) = questions(Settings(seed=0)), questions(Settings(seed=1))
    assert [task.prompt for task in held_out] == [task.prompt for task in same]
    assert [task.id for task in itertools.islice(first, 64)] != [task.id for task in itertools.islice(second, 64)]


async def test_the_gradient_is_that_of_the_loss_on_a_padded_batch(
    groups: Sequence[Group], engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = GrammarMasks.of_engine(engine)
    trainer = Trainer(tiny_model(attn_implementation=TREE_ATTENTION), grammar, SMALL)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # in float32, so that both can be compared
    gaps = trainer.gradient(trainer.batch(groups), engine.weight_version)
    assert fmean(gaps) > 0.5  # the engine has other weights, but their version matches
    ours = [parameter.grad.clone() for parameter in trainer.parameters]
    assert all(gradient.abs().max() > 0 for gradient in ours)

    padded = tiny_model()
    batch = TrainingBatch.padded(groups, pad_id=0, advantages=grpo, drop_flat=True)
    masks = grammar.masks_for(batch.rows, batch.layout)
    tensors = batch.torch()
    at = tensors.loss_mask[:, 1:]
    logits = padded(**tensors.model_inputs).logits[:, :-1][at]
    where = np.concatenate([np.zeros((len(batch), 1), dtype=np.bool_), at.numpy()], axis=1)
    logprobs = masked_logprobs(logits, tensors.input_ids[:, 1:][at], masks.take(where))
    (-(logprobs * tensors.advantages[:, 1:][at]).sum() / trainer.episodes).backward()
    named = dict(padded.named_parameters())
    theirs = [named[name].grad for name, each in trainer.model.named_parameters() if each.requires_grad]
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


async def test_ratios_use_recorded_log_probabilities_of_other_weights(
    groups: Sequence[Group], engine: VllmEngine
) -> None:
    trainer = Trainer(tiny_model(), GrammarMasks.of_engine(engine), SMALL)
    batch = trainer.batch(groups)
    tree, masks = batch.trees[0], batch.masks[0]
    with torch.no_grad():
        now = trainer.logprobs(tree, masks)
    older = trainer.ratios(now, tree, batch.rows.versions, "newer weights")
    expected = np.exp(now.numpy() - tree.terms.logprobs)
    assert np.allclose(older.numpy(), expected)
    assert (np.abs(expected - 1) > 0.5).any()
    assert trainer.ratios(now, tree, batch.rows.versions, engine.weight_version).unique().tolist() == [1.0]


async def test_older_id_teaches_until_its_probability_moved_by_the_ratio(
    groups: Sequence[Group], engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(tiny_model(), GrammarMasks.of_engine(engine), SMALL)
    batch = trainer.batch(groups)
    (terms,) = (tree.terms for tree in batch.trees)
    moved = torch.log(torch.where(torch.arange(len(terms)) % 2 == 0, 2.0, 0.5)).requires_grad_()
    recorded = torch.from_numpy(terms.logprobs)
    monkeypatch.setattr(trainer, "logprobs", lambda _tree, _masks: recorded + moved)
    gaps = trainer.gradient(batch, "newer weights")
    assert gaps == pytest.approx([np.log(2)] * len(terms), abs=1e-5)
    advantages = batch.advantages[terms.row]
    ratios = moved.detach().exp().numpy()
    beyond = np.where(advantages > 0, ratios > 1.25, ratios < 0.8)
    assert {(bool(gain > 0), bool(past)) for gain, past in zip(advantages, beyond, strict=True)} == {
        (True, True),
        (True, False),
        (False, True),
        (False, False),
    }
    expected = np.where(beyond, 0, -advantages * ratios / trainer.episodes)
    assert moved.grad is not None
    assert np.allclose(moved.grad.numpy(), expected, atol=1e-6)


async def test_trainer_steps_move_the_weights_and_leave_a_usable_folder(
    trained_engine: VllmEngine, tmp_path: Path
) -> None:
    engine, settings, output = trained_engine, replace(SMALL, out=tmp_path / "trained"), io.StringIO()
    before = engine.weight_version
    record = await train(settings, engine, Console(file=output, width=150))

    lines = output.getvalue().splitlines()
    before_steps = lines[: lines.index(HEAD)]
    assert f"{settings.held_out} held-out questions, greedy" in before_steps
    assert any(line.startswith("held out, before") for line in before_steps)
    assert [step.number for step in record.steps] == list(range(1, SMALL.steps + 1))
    assert record.steps[-1].version == engine.weight_version != before
    assert record.steps[0].groups > 0
    assert (record.steps[0].saving or 0) > 2
    assert all(min(step.seconds.values()) > 0 for step in record.steps)
    assert all(step.gap is not None and step.gap < 0.1 for step in record.steps), (
        "trainer and engine compute the same except for rounding"
    )
    assert TrainingRecord.load(settings.out) == record
    assert (settings.out / "training.png").stat().st_size > 10_000

    trained = await greedy(engine)
    if sweeps.whole():
        played = await play(engine, list(itertools.islice(questions(SMALL)[1], 3)))
        grammar = GrammarMasks.of_engine(engine)
        ours, first = (difference(folder, grammar, played) for folder in (settings.out, demo_model()))
        assert ours < first / 2, "the engine sampled with the trainer's new weights"
    await engine.update_weights(settings.out)
    assert await greedy(engine) == trained, "the folder contains the engine's weights"
    await engine.update_weights(demo_model())
    assert await greedy(engine) != trained

    if sweeps.whole():
        command = [sys.executable, "-m", "runner.cli.app", "run", "calculator", "--model", str(settings.out)]
        done = await anyio.run_process([*command, "--episodes", "2"], check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr.decode()


async def greedy(engine: VllmEngine) -> tuple[list[int], list[float]]:
    """The engine's greedy reply to a fixed prompt, with log-probabilities. It runs alone, so it is reproducible."""
    await engine.reset_prefix_cache()
    sampling = Sampling(temperature=0, max_tokens=32).over(Sampling.defaults())
    request = GenerationRequest(name="greedy", prompt=list(range(1000, 1040)), sampling=sampling)
    async with engine.stream(request) as deltas:
        said = [delta async for delta in deltas]
    return [i for delta in said for i in delta.token_ids], [x for delta in said for x in delta.logprobs or ()]


def difference(folder: Path, grammar: GrammarMasks, played: Sequence[Group]) -> float:
    """Mean difference per id, in nats, between a model's log-probabilities in bfloat16 and the recorded ones."""
    from transformers import AutoModelForCausalLM

    trainer = Trainer(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), grammar, SMALL)
    rows = Selection.of(played).rows
    differences = []
    for tree in TokenTree.packs(rows):
        with torch.no_grad():
            logprobs = trainer.logprobs(tree, grammar.masks_for_terms(rows, tree.terms))
        differences.append(np.abs(logprobs.numpy() - tree.terms.logprobs))
    return float(np.concatenate(differences).mean())


class Nudged(Trainer):
    """Trainer that changes its weights by a fixed factor, as soon as the next episodes are in flight."""

    engine: VllmEngine
    batches: list[Batch]

    def learn(self, batch: Batch, version: str) -> list[float]:
        self.batches.append(batch)
        from_thread.run(self.sampling)
        with torch.no_grad():
            self.model.model.layers[5].mlp.down_proj.weight.mul_(1.05)
        return []

    async def sampling(self) -> None:
        before = self.engine.stats().sampled_tokens
        with anyio.fail_after(1200):
            while self.engine.stats().sampled_tokens == before:  # noqa: ASYNC110  # there is no event
                await anyio.sleep(0.01)


@pytest.mark.whole
async def test_overlapping_updates_report_ratios_by_version(
    trained_engine: VllmEngine,
) -> None:
    from transformers import AutoModelForCausalLM

    settings = replace(SMALL, steps=2, overlap=True, tasks=2)
    model = AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.float32)
    trainer = Nudged(model, GrammarMasks.of_engine(trained_engine), settings)
    trainer.engine, trainer.batches = trained_engine, []
    _, tasks = questions(settings)
    progress = TrainingProgress(Console(file=io.StringIO(), width=150))
    first = trained_engine.weight_version
    await Loop(settings, trained_engine, trainer, progress, tasks).run()

    second = progress.steps[0].version
    assert trainer.batches[0].rows.versions == (first,)
    batch = trainer.batches[1]
    assert set(batch.rows.versions) == {first, second}
    ratios, own, gaps = [], [], []
    for tree, masks in zip(batch.trees, batch.masks, strict=True):
        with torch.no_grad():
            now = trainer.logprobs(tree, masks)
        ratios.append(trainer.ratios(now, tree, batch.rows.versions, second).numpy())
        own.append(np.array(batch.rows.versions)[tree.terms.versions] == second)
        gaps.append(np.abs(now.numpy() - tree.terms.logprobs))
    all_ratios, is_own = np.concatenate(ratios), np.concatenate(own)
    assert 0 < is_own.sum() < len(is_own)
    assert set(all_ratios[is_own].tolist()) == {1.0}
    assert (all_ratios[~is_own] != 1).any()
    assert np.concatenate(gaps)[is_own].mean() < 0.1, "the engine sampled with the weights of its version"


@pytest.mark.parametrize("name", ["exact", "solved"])
async def test_failed_held_out_question_counts_as_unanswered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards: list[dict[str, float | None]] = [{name: 1.0}, {name: 0.0}, {}, {name: None}]

    async def played(*_: Any, **__: Any) -> list[Any]:
        return [SimpleNamespace(trajectories=[SimpleNamespace(rewards=each)]) for each in rewards]

    monkeypatch.setattr(train_grpo, "play", played)
    engine: Any = None
    asked = questions(replace(SMALL, held_out=4))[0]
    assert await train_grpo.evaluate(engine, asked, name) == {"greedy": 0.25, "temperature 1": 0.25}


async def test_settings_limit_the_turns_of_training_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[Limits] = []

    async def played(*_: Any, **options: Any) -> list[Any]:
        limits.append(options["limits"])
        return []

    monkeypatch.setattr(train_grpo, "play", played)
    none: Any = None
    await Loop(replace(SMALL, turns=7), none, none, none, questions(SMALL)[1]).rollouts()
    assert limits == [Limits(turns=7)]


def test_proof_is_a_table_that_names_seeds_that_did_not_learn() -> None:
    good = TrainingRecord(
        title="", steps=(_step(100.0),), held_out={"greedy": (0.8, 0.99), "temperature 1": (0.4, 0.9)}
    )
    weak = replace(good, held_out={"greedy": (0.8, 0.94), "temperature 1": (0.4, 0.9)})
    slow = replace(good, steps=(_step(301.0),))
    assert [train_proof.proved(each) for each in (good, weak, slow)] == [True, False, False]
    assert train_proof.table({0: good, 1: weak}).splitlines() == [
        "| seed | greedy | temperature 1 | steps | time | rollout | batch | train | update | 0.95 in 5 minutes |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| 0 | 0.800 → 0.990 | 0.400 → 0.900 | 1 | 100 | 40 | 0 | 60 | 0 | yes |",
        "| 1 | 0.800 → 0.940 | 0.400 → 0.900 | 1 | 100 | 40 | 0 | 60 | 0 | no |",
    ]


def _step(seconds: float) -> TrainingStep:
    return TrainingStep(
        number=1,
        reward=1.0,
        exact=1.0,
        groups=1,
        ids=1,
        saving=6.0,
        gap=0.01,
        seconds={"rollout": 40.0, "train": seconds - 40.0},
        version="1",
    )
