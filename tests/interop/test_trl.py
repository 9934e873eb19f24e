"""TRL's own GRPOTrainer on episodes of two turns: a tiny random model through `TokenEngine`, with exact ids."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from runner import (
    BackgroundPlayer,
    Conversation,
    Environment,
    RunFile,
    Sampling,
    Task,
    TokenEngine,
    TokenOutput,
    VllmEngine,
    reward,
)
from runner.testing import ScriptedEngine
from runner.trainers.trl import episode_reward, rollout_func
from runner.training.weight_proof import PROOF_SIZE

pytestmark = [
    pytest.mark.package("trl"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # warnings of TRL, transformers and torch
]

TASKS = [Task(id=f"task {number}", prompt=f"Say {number}.") for number in range(4)]


class TwoTurns(Environment):
    """Environment with two turns and a message between them. The reward is the share of even ids."""

    sampling = Sampling(max_tokens=6)

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()
        if self.task.id == "task 3":
            raise OSError("no disk")
        conversation.add("And again?")
        await conversation.generate()

    @reward
    def even(self) -> float:
        ids = [token_id for turn in self.episode.turns for token_id in turn.token_ids]
        return sum(token_id % 2 == 0 for token_id in ids) / len(ids)


@pytest.fixture
def model(demo_model_folder: Path) -> Any:
    """Create a model of two layers with random weights, in float32, with the demo model's vocabulary."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(demo_model_folder)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 32, 48, 2
    config.num_attention_heads = config.num_key_value_heads = 4
    config.head_dim = 8
    return transformers.LlamaForCausalLM(config).float()


@pytest.fixture
def tokenizer(demo_model_folder: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(demo_model_folder)


def sampler(model: Any, version: Any) -> Any:
    """Return a token function that samples from the model in its current state."""
    import torch

    def sample(prompt: list[int], sampling: Any) -> TokenOutput:
        numbers = torch.Generator().manual_seed(sampling.seed or 0)
        ids = list(prompt)
        logprobs: list[float] = []
        with torch.no_grad():
            while len(logprobs) < sampling.max_tokens and (not logprobs or ids[-1] not in sampling.stop_ids):
                values = model(torch.tensor([ids])).logits[0, -1].float() / sampling.temperature
                ids.append(int(torch.multinomial(values.softmax(-1), 1, generator=numbers)))
                logprobs.append(float(values.log_softmax(-1)[ids[-1]]))
        said = ids[len(prompt) :]
        return TokenOutput(said, logprobs, sampling.finish_of(said), version=version())

    async def generate(prompt: list[int], sampling: Any, *, session: str) -> TokenOutput:
        return await anyio.to_thread.run_sync(sample, prompt, sampling)

    return generate


def config(folder: Path, **settings: Any) -> Any:
    from trl import GRPOConfig

    given = {
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_steps": 3,
        "learning_rate": 1e-2,
        **settings,
    }
    return GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        temperature=1.0,
        beta=0.0,
        disable_tqdm=True,
        save_strategy="no",
        **given,
    )


class Watched:
    """A rollout function that also keeps its results, and the trainer's log-probabilities of them."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.outputs: list[dict[str, list[Any]]] = []
        self.gaps: list[float] = []

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        import torch

        output: dict[str, list[Any]] = self.function(prompts, trainer)
        self.outputs.append({name: list(values) for name, values in output.items()})
        for number, (before, after) in enumerate(zip(output["prompt_ids"], output["completion_ids"], strict=True)):
            ids = torch.tensor([[*before, *after]])
            with torch.no_grad():
                logprobs = trainer._get_per_token_logps_and_entropies(
                    trainer.model, ids, torch.ones_like(ids), len(after)
                )[0]
            for theirs, ours, trained in zip(
                logprobs[0].tolist(), output["logprobs"][number], output["env_mask"][number], strict=True
            ):
                if trained:
                    self.gaps.append(abs(theirs - ours))
        return output


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_three_steps_of_grpo_train_the_trainers_own_model(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import GRPOTrainer

    step = [0]
    engine = TokenEngine(sampler(model, lambda: step[0]), tokenizer=tokenizer.name_or_path, context=512)
    with BackgroundPlayer(TwoTurns, engine, group_size=4) as player:
        played = rollout_func(player, tasks=TASKS, weights=False)

        def rollouts(prompts: list[Any], trainer: Any) -> Any:
            step[0] = trainer.state.global_step
            return played(prompts, trainer)

        watched = Watched(rollouts)
        trainer = GRPOTrainer(
            model,
            episode_reward,
            args=config(tmp_path),
            train_dataset=Dataset.from_list([{"prompt": task.id} for task in TASKS]),
            processing_class=tokenizer,
            rollout_func=watched,
        )
        before = {name: value.clone() for name, value in model.state_dict().items()}
        trainer.train()
        assert player.error is None
    assert [sorted({v for v in output["version"] if v}) for output in watched.outputs] == [["0"], ["1"], ["2"]]
    assert max(watched.gaps) < 1e-5
    assert len(watched.gaps) > 100
    assert any((before[name] != value).any() for name, value in model.state_dict().items())
    failed = [
        (rewarded, sum(mask))
        for output in watched.outputs
        for rewarded, mask, outcome in zip(output["reward"], output["env_mask"], output["outcome"], strict=True)
        if outcome == "env_error"
    ]
    assert failed
    assert set(failed) == {(None, 0)}
    masks = [mask for output in watched.outputs for mask in output["env_mask"] if sum(mask)]
    assert all(mask[0] == mask[-1] == 1 and 0 in mask for mask in masks)


def test_weights_are_sent_before_each_rollout_after_a_step(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import GRPOTrainer

    from runner.tokens.tokenizer import load_tokenizer

    engine = ScriptedEngine("Yes.", tokenizer=load_tokenizer(Path(tokenizer.name_or_path)))
    with BackgroundPlayer(TwoTurns, engine, group_size=4) as player:
        watched = Watched(rollout_func(player, tasks=TASKS))
        trainer = GRPOTrainer(
            model,
            episode_reward,
            args=config(tmp_path),
            train_dataset=Dataset.from_list([{"prompt": task.id} for task in TASKS]),
            processing_class=tokenizer,
            rollout_func=watched,
        )
        trainer.train()
        assert engine.weight_version == "2"
    assert [sorted({v for v in output["version"] if v}) for output in watched.outputs] == [["scripted"], ["1"], ["2"]]


def test_one_tree_of_a_batch_has_trls_own_gradients(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    import torch
    from datasets import Dataset
    from trl import GRPOTrainer

    from examples.train_trl import OneTree

    trainer = OneTree(
        model,
        episode_reward,
        args=config(tmp_path, loss_type="dr_grpo"),
        train_dataset=Dataset.from_list([{"prompt": "1"}]),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    # Rows with a common beginning, one of them twice. Prompts are padded on the left and completions on the right.
    batch = {
        "prompt_ids": torch.tensor([[0, 7, 8, 9], [0, 7, 8, 9], [1, 7, 8, 2], [0, 7, 8, 9]]),
        "prompt_mask": torch.tensor([[0, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]]),
        "completion_ids": torch.tensor([[5, 6, 0], [5, 4, 3], [2, 0, 0], [5, 6, 0]]),
        "completion_mask": torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]]),
        "tool_mask": torch.tensor([[1, 1, 0], [1, 0, 1], [1, 0, 0], [1, 1, 0]]),
        "advantages": torch.tensor([0.0, -100.0, 0.0, 200.0]),  # groups with equal rewards have no advantage
        "num_items_in_batch": torch.tensor(8),
    }
    whole = [torch.cat([batch[f"prompt_{part}"], batch[f"completion_{part}"]], dim=1) for part in ("ids", "mask")]
    found = []
    for each in (OneTree, GRPOTrainer):
        model.zero_grad()
        trainer.__class__ = each
        loss = trainer._compute_loss(model, dict(batch))
        loss.backward()
        gradient = model.model.layers[0].mlp.up_proj.weight.grad.clone()
        with torch.no_grad():
            logprobs, _, _ = trainer._get_per_token_logps_and_entropies(model, whole[0], whole[1], 3)
        found.append((logprobs[batch["completion_mask"] == 1], gradient, loss.detach()))
    for ours, theirs in zip(*found, strict=True):
        assert theirs.abs().max() > 1e-3
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


@pytest.mark.engine
@pytest.mark.apart
def test_demo_model_in_vllm_samples_with_the_weights_of_each_step(
    demo_model_folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    import torch
    import transformers
    from datasets import Dataset
    from trl import GRPOTrainer

    model = transformers.AutoModelForCausalLM.from_pretrained(demo_model_folder, dtype=torch.float32)
    settings = config(
        tmp_path, num_generations=2, per_device_train_batch_size=2, max_steps=2, optim="sgd", learning_rate=1.0
    )
    engine = VllmEngine(demo_model_folder, dtype="float32", max_model_len=512, max_num_seqs=2)
    file = tmp_path / "run.db"
    with BackgroundPlayer(TwoTurns, engine, group_size=2, sampling=Sampling(max_tokens=3), file=file) as player:
        watched = Watched(rollout_func(player, tasks=TASKS[:2]))
        trainer = GRPOTrainer(
            model,
            episode_reward,
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": task.id} for task in TASKS[:2]]),
            processing_class=tokenizer,
            rollout_func=watched,
        )
        trainer.train()
        assert player.error is None
        first, second = [{version for version in output["version"] if version} for output in watched.outputs]
        assert (len(first), second) == (1, {engine.weight_version})
        assert first != second
    assert len(watched.gaps) >= 12
    assert max(watched.gaps) < 1e-3  # TRL's forward pass with the same weights, but other kernels
    with RunFile(file) as stored:
        (proven,) = stored.weights()
    assert (proven.version, proven.proof_ids) == (engine.weight_version, PROOF_SIZE - 1)
