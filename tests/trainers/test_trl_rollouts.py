"""The rollout function for TRL: rows in the order of prompts, weights, failed episodes, and refusals by name.

The trainer here is a stand-in with the attributes that are read. `make test-interop` plays with TRL's own trainer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner import (
    BackgroundPlayer,
    BadBatch,
    BadModel,
    BadOption,
    BadTask,
    Conversation,
    EngineDead,
    RunFile,
    Sampling,
    Task,
    reward,
)
from runner.testing import ScriptedEngine
from runner.trainers.trl import episode_reward, rollout_func
from runner.training.weight_proof import PROOF_SIZE, weight_proof
from tests.playing import Plain, recording, tasks

TASKS = tasks(3)


class Rewarded(Plain):
    """Environment whose reward is the number of the task. Some episodes fail, and some rewrite their history."""

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()
        if self.task.id == "t1":
            raise OSError("no disk")
        if self.task.id == "t2":
            conversation.replace([{"role": "user", "content": "Again."}])
            await conversation.generate()

    @reward
    def correct(self) -> Any:
        return float(self.task.id[1:])


class Trainer:
    def __init__(self, engine: ScriptedEngine, **model: Any) -> None:
        tokenizer = engine.tokenizer

        def encode(text: str, *, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return tokenizer.encode(text)

        self.processing_class = SimpleNamespace(encode=encode, pad_token_id=0, eos_token_id=0)
        self.state = SimpleNamespace(global_step=0)
        self.args = SimpleNamespace(use_vllm=False, temperature=1.0)
        self.model = SimpleNamespace(state_dict=lambda: {"weight": self.state.global_step}, **model)
        self.accelerator = SimpleNamespace(unwrap_model=lambda given: given, process_index=0, num_processes=1)


def test_rows_come_in_the_order_of_the_prompts() -> None:
    engine = recording("Yes")
    with BackgroundPlayer(Rewarded, engine, group_size=2) as player:
        rollouts = rollout_func(player, tasks=TASKS)
        output = rollouts(["t0", "t0", "t2", "t2", "t2", "t0"], Trainer(engine))
    assert output["reward"] == [0.0, 0.0, 2.0, 2.0, 2.0, 0.0]
    assert {len(values) for values in output.values()} == {6}
    for ids, mask, logprobs in zip(output["completion_ids"], output["env_mask"], output["logprobs"], strict=True):
        assert len(ids) == len(mask) == len(logprobs)
        assert engine.tokenizer.decode(ids).startswith("Yes")
    assert episode_reward(output["completion_ids"], reward=output["reward"], prompts=[]) == output["reward"]


def test_conversations_are_found_by_their_last_message() -> None:
    engine = recording("Yes")
    with BackgroundPlayer(Rewarded, engine) as player:
        rollouts = rollout_func(player, tasks={"How?": TASKS[2]})
        output = rollouts([[{"role": "system", "content": "x"}, {"role": "user", "content": "How?"}]], Trainer(engine))
    assert output["reward"] == [2.0]


def test_failed_episode_has_no_reward_and_mask_zero() -> None:
    engine = recording("Yes")
    with BackgroundPlayer(Rewarded, engine, group_size=2) as player:
        output = rollout_func(player, tasks=TASKS)(["t1", "t1", "t0", "t0"], Trainer(engine))
        raising = rollout_func(player, tasks=TASKS, failed="raise")
        with pytest.raises(BadBatch, match=r"has no reward \(env_error\).*no disk.*failed='mask'"):
            raising(["t1", "t1"], Trainer(engine))
    assert output["reward"] == [None, None, 0.0, 0.0]
    assert [sum(mask) > 0 for mask in output["env_mask"]] == [False, False, True, True]
    assert output["outcome"] == ["env_error", "env_error", "completed", "completed"]


class Silent(Plain):
    """Environment in which another agent replaces `main` in episodes with an odd index."""

    async def rollout(self, conversation: Conversation) -> None:
        silent = self.episode.index % 2
        await (self.episode.conversation("helper", prompt="Hi", train=True) if silent else conversation).generate()


@pytest.mark.parametrize(
    ("size", "prompts", "fault"), [(2, 2, "1 episode of 2"), (4, 4, "2 episodes of 4"), (4, 2, "1 episode of 1")]
)
def test_silent_main_agent_is_one_clear_error(size: int, prompts: int, fault: str) -> None:
    engine = recording("Yes")
    said = rf"task 't0': in {fault}, agent 'main' took no turn"
    with BackgroundPlayer(Silent, engine, group_size=size) as player, pytest.raises(BadBatch, match=said):
        rollout_func(player, tasks=TASKS)(["t0"] * prompts, Trainer(engine))


@pytest.mark.parametrize("temperature", [0.7, 0.0])
def test_another_temperature_than_the_trainers_is_refused(temperature: float) -> None:
    engine = recording("Yes")
    trainer = Trainer(engine)
    with BackgroundPlayer(Rewarded, engine, sampling=Sampling(temperature=temperature)) as player:
        rollouts = rollout_func(player, tasks=TASKS)
        with pytest.raises(BadBatch, match=rf"sampled at temperature {temperature:g}, but .* are at 1\. Give GRPOConf"):
            rollouts(["t0"], trainer)
        if not temperature:
            return
        trainer.args.temperature = temperature
        assert rollouts(["t0"], trainer)["reward"] == [0.0]


def test_ranks_and_steps_have_other_seeds() -> None:
    seeds: list[int | None] = []
    for rank, first_step in ((0, 0), (1, 0), (0, 2), (1, 2)):  # two ranks, and again after a checkpoint
        engine = recording("Yes")
        trainer = Trainer(engine)
        trainer.accelerator.process_index, trainer.accelerator.num_processes = rank, 2
        with BackgroundPlayer(Rewarded, engine, group_size=2) as player:
            rollouts = rollout_func(player, tasks=TASKS, weights=False)
            for step in range(first_step, first_step + 2):
                trainer.state.global_step = step
                rollouts(["t0", "t0", "t0", "t0"], trainer)
        seeds += [played.seed for played in engine.calls]
    assert len(set(seeds)) == len(seeds) == 4 * 2 * 4


def test_weights_are_sent_once_for_each_step() -> None:
    engine = recording("Yes")
    trainer = Trainer(engine)
    versions = []
    with BackgroundPlayer(Rewarded, engine) as player:
        rollouts = rollout_func(player, tasks=TASKS)
        for step in (0, 0, 1, 1, 2):
            trainer.state.global_step = step
            versions += rollouts(["t0"], trainer)["version"]
    assert versions == ["scripted", "scripted", "1", "1", "2"]


class Copy:
    """The engine's copy of a torch model: a scripted engine of float32 that scores with the copy."""

    def __init__(self, model: Any) -> None:
        self.model, self.source = copy.deepcopy(model), model
        self.arrives = True

    def __call__(self, ids: Sequence[int]) -> list[float]:
        if self.arrives:
            self.model.load_state_dict(self.source.state_dict())
        return list(weight_proof(self.model, ids=ids).logprobs)


class Typed(ScriptedEngine):
    """An engine that reports its number type, like engines with a model."""

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "dtype": "float32"}


def tiny_llama(vocabulary: int, seed: int = 0) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=vocabulary
    )
    return transformers.LlamaForCausalLM(config).float()


def proving(model: Any, scores: Copy) -> tuple[Typed, Any]:
    engine = Typed("Yes", scores=scores)
    trainer = Trainer(engine)
    trainer.model = model
    return engine, trainer


def change(model: Any, factor: float = 1.2) -> None:
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


def test_each_update_is_proven_by_the_trainers_model(tmp_path: Path) -> None:
    model = tiny_llama(ScriptedEngine("Yes").tokenizer.size)
    engine, trainer = proving(model, Copy(model))
    model.train()
    with BackgroundPlayer(Rewarded, engine, file=tmp_path / "run.db") as player:
        rollouts = rollout_func(player, tasks=TASKS)
        rollouts(["t0"], trainer)
        change(model)
        trainer.state.global_step = 1
        assert rollouts(["t0"], trainer)["version"] == ["1"]
    assert model.training
    with RunFile(tmp_path / "run.db") as file:
        (row,) = file.weights()
    assert (row.version, row.proof_ids) == ("1", PROOF_SIZE - 1)
    assert row.proof_largest == pytest.approx(0, abs=1e-5)


def test_weights_that_did_not_arrive_end_the_training() -> None:
    model = tiny_llama(ScriptedEngine("Yes").tokenizer.size)
    scores = Copy(model)
    engine, trainer = proving(model, scores)
    with BackgroundPlayer(Rewarded, engine) as player:
        rollouts = rollout_func(player, tasks=TASKS)
        rollouts(["t0"], trainer)
        change(model)
        trainer.state.global_step, scores.arrives = 1, False
        with pytest.raises(EngineDead, match=r"the proof of the weights '1' does not hold.*those of the old weights"):
            rollouts(["t0"], trainer)


def test_mixed_precision_is_not_taken_for_other_weights() -> None:
    torch = pytest.importorskip("torch")
    model = tiny_llama(ScriptedEngine("Yes").tokenizer.size)
    change(model, 4.0)  # large enough that half precision shows
    engine, trainer = proving(model, Copy(model))
    plain = model.forward

    def forward(*arguments: Any, **named: Any) -> Any:
        """Compute as accelerate wraps it: half precision inside, and logits in float32."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = plain(*arguments, **named)
        output.logits = output.logits.float()
        return output

    model.forward = forward
    with BackgroundPlayer(Rewarded, engine) as player:
        assert rollout_func(player, tasks=TASKS)(["t0"], trainer)["reward"] == [0.0]


def test_trainer_with_other_first_weights_is_refused() -> None:
    size = ScriptedEngine("Yes").tokenizer.size
    model, other = tiny_llama(size), tiny_llama(size, seed=1)
    engine, trainer = proving(model, Copy(other))
    with BackgroundPlayer(Rewarded, engine) as player:
        with pytest.raises(BadModel, match=r"the trainer starts with other weights than the engine.*proof=False"):
            rollout_func(player, tasks=TASKS)(["t0"], trainer)
        assert rollout_func(player, tasks=TASKS, proof=False)(["t0"], trainer)["reward"] == [0.0]


def test_second_segment_is_kept_chosen_or_refused() -> None:
    engine = recording(["Yes, that is a long answer", "No"])
    with BackgroundPlayer(Rewarded, engine) as player:
        kept = [
            rollout_func(player, tasks=TASKS, segments=segments)(["t2"], Trainer(engine))["completion_ids"][0]
            for segments in ("last", "longest")
        ]
        with pytest.raises(BadBatch, match="has 2 segments"):
            rollout_func(player, tasks=TASKS, segments="refuse")(["t2"], Trainer(engine))
        with pytest.raises(BadOption, match="one row for each prompt"):
            rollout_func(player, tasks=TASKS, segments="each")  # type: ignore[arg-type]  # wrong on purpose
    assert [engine.tokenizer.decode(ids)[:3] for ids in kept] == ["No<", "Yes"]


def test_unusable_trainers_and_prompts_are_refused_by_name() -> None:
    engine = recording("Yes")
    with BackgroundPlayer(Rewarded, engine) as player:
        rollouts = rollout_func(player, tasks=TASKS)
        other = Trainer(engine)
        other.processing_class.encode = lambda text, *, add_special_tokens: [1, 2, 3]
        with pytest.raises(BadModel, match=r"encodes a text as \[1, 2, 3\]"):
            rollouts(["t0"], other)
        with pytest.raises(BadOption, match="the prompt 'who' of the data set has no task"):
            rollouts(["who"], Trainer(engine))
        peft = Trainer(engine, peft_config={})
        peft.state.global_step = 1
        with pytest.raises(BadOption, match="a PEFT model"):
            rollouts(["t0"], peft)
        with pytest.raises(BadBatch, match=r"has no reward \(too_long\)"):
            rollout_func(player, tasks=TASKS, length=3, failed="raise")(["t0"], Trainer(engine))
        with pytest.raises(BadOption, match="failed='drop'"):
            rollout_func(player, tasks=TASKS, failed="drop")  # type: ignore[arg-type]  # wrong on purpose
        with pytest.raises(BadTask, match="no id"):
            rollout_func(player, tasks=[Task(id="")])
    with pytest.raises(BadBatch, match="2 rewards for 1 completions"):
        episode_reward(["x"], reward=[1.0, 0.0])
