"""Log-probabilities that are not finite: no interface passes one to a trainer with an id that would be trained."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest

from runner import BackgroundPlayer, BadBatch, BadModel, Conversation, Outcome, RunFile, Trajectory
from runner.store.export import export_jsonl, export_parquet
from runner.testing import ScriptedEngine
from runner.trainers.openenv import export_openenv, training_trace
from runner.trainers.trl import rollout_func
from runner.trainers.trl_async import RolloutWorker
from runner.trainers.verifiers_traces import episode_head, trace_delta
from runner.training import InexactRows, sample_rows
from tests.playing import Plain, recording, tasks
from tests.store.test_reader import write
from tests.trainers.test_trl_rollouts import Rewarded, Trainer
from tests.training.making import group, made, prompt, said

NOT_FINITE = pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])


def lacking(value: float, **fields: Any) -> Trajectory:
    """Return two turns. The last id has this log-probability, and the messages agree with the ids."""
    trajectory = made([prompt(1, 2), said(3), prompt(4), said(5, 6, logprobs=[-0.5, value])], **fields)
    say = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    trajectory.segments[0].messages.extend(say)  # type: ignore[arg-type]  # plain messages
    return trajectory


@NOT_FINITE
def test_row_without_finite_logprobs_is_counted_and_not_trained(value: float, caplog: pytest.LogCaptureFixture) -> None:
    counts = InexactRows()
    for _ in range(2):
        (row,) = sample_rows(lacking(value), advantages=1.0, counts=counts)
        assert (row.failed, row.reward, bool(row.mask.any())) == ("no_logprobs", None, False)
        assert np.isfinite(row.logprobs).all()
    assert (counts.left_out, counts.ids) == ({"no_logprobs": 2}, {})
    (record,) = caplog.records
    assert "episode 't0#0' of agent 'main' is not trained on (no_logprobs)" in record.message


@NOT_FINITE
def test_failed_episode_keeps_its_own_reason(value: float) -> None:
    (row,) = sample_rows(lacking(value, outcome=Outcome.ENV_ERROR, reward=None))
    assert (row.failed, bool(np.isfinite(row.logprobs).all())) == ("env_error", True)


@NOT_FINITE
def test_trainer_that_computes_its_own_logprobs_trains_on_all_ids(value: float) -> None:
    counts = InexactRows()
    (row,) = sample_rows(lacking(value), needs_logprobs=False, counts=counts)
    assert (row.failed, row.reward, row.mask.sum()) == ("", 1.0, 3)
    assert (counts.left_out, counts.ids) == ({}, {"no finite log-probability from the engine": 1})


@NOT_FINITE
@pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.ENV_ERROR])
def test_trace_of_verifiers_is_an_error_and_trains_nothing(value: float, outcome: Outcome) -> None:
    trajectory = lacking(value, outcome=outcome)
    delta = trace_delta(trajectory, task={}, weights={})
    head = episode_head([made([prompt(1), said(2)]), trajectory], task={}, environment="E", number="1")
    reason = "no_logprobs" if outcome.scored else "env_error"
    assert (delta["set"]["ok"], [error["type"] for error in delta["errors"]]) == (False, [reason])
    assert (head["ok"], [error["type"] for error in head["errors"]]) == (False, [reason])
    assert not any(any(node["mask"]) or node["logprobs"] for node in delta["nodes"])
    assert [node["sampled"] for node in delta["nodes"]] == [False, True, False, True]
    json.dumps(delta, allow_nan=False)


@NOT_FINITE
def test_openenv_trace_is_refused_by_its_turn(value: float, tmp_path: Path) -> None:
    with pytest.raises(BadBatch, match=r"t0#0/main/1 .* has no finite log-probabilities"):
        training_trace(lacking(value))
    write(tmp_path / "run.db", [lacking(value)])
    with RunFile(tmp_path / "run.db") as file, pytest.raises(BadBatch, match="no finite log-probabilities"):
        export_openenv(file, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


@NOT_FINITE
def test_exports_of_run_files_have_null_in_its_place(value: float, tmp_path: Path) -> None:
    write(tmp_path / "run.db", [lacking(value)])
    with RunFile(tmp_path / "run.db") as file:
        export_parquet(file, tmp_path / "run.parquet")
        export_jsonl(file, tmp_path / "run.jsonl")
    expected = [None, None, -0.375, None, -0.5, None]
    assert parquet.read_table(tmp_path / "run.parquet")["logprobs"].to_pylist() == [[expected]]
    assert json.loads((tmp_path / "run.jsonl").read_text())["segments"][0]["logprobs"] == expected


@NOT_FINITE
def test_asynchronous_trainer_gets_no_sample_without_logprobs(value: float) -> None:
    with BackgroundPlayer(Plain, ScriptedEngine("Yes")) as player:
        worker = RolloutWorker(player, tasks=tasks(1))
        good = [made([prompt(1), said(2)], id=f"t0#{number}", reward=float(number)) for number in (1, 2)]
        samples = list(worker._samples(group(lacking(value), *good), 0))
        assert len(samples) == 2
        assert all(np.isfinite(sample["old_log_probs"]).all() for sample in samples)
        assert list(worker._samples(group(lacking(value), good[0]), 0)) == []


class Lacking(Rewarded):
    """Environment whose engine returns NaN for an id in some episodes."""

    async def rollout(self, conversation: Conversation) -> None:
        turn = await conversation.generate()
        if self.task.id == "t0":
            turn.log.logprobs[turn.start] = math.nan


def test_trl_omits_a_row_without_logprobs_if_it_uses_them() -> None:
    engine = recording("Yes")
    trainer = Trainer(engine)
    trainer.args = SimpleNamespace(use_vllm=True, temperature=1.0)
    with BackgroundPlayer(Lacking, engine) as player:
        output = rollout_func(player, tasks=tasks(3))(["t0", "t1"], trainer)
        assert (output["outcome"], output["reward"]) == (["no_logprobs", "completed"], [None, 1.0])
        assert [sum(mask) > 0 for mask in output["env_mask"]] == [False, True]
        assert all(np.isfinite(row).all() for row in output["logprobs"])
        with pytest.raises(BadBatch, match=r"has no reward \(no_logprobs\)"):
            rollout_func(player, tasks=tasks(3), failed="raise")(["t0"], trainer)


def test_trl_gets_no_logprobs_if_it_computes_its_own() -> None:
    engine = recording("Yes")
    with BackgroundPlayer(Lacking, engine) as player:
        output = rollout_func(player, tasks=tasks(3))(["t0", "t1"], Trainer(engine))
    assert (output["logprobs"], output["reward"]) == (None, [0.0, 1.0])
    assert all(map(sum, output["env_mask"]))


def test_engine_without_logprobs_is_refused_if_trl_uses_them() -> None:
    engine = recording("Yes", logprobs=False)
    trainer = Trainer(engine)
    trainer.args = SimpleNamespace(use_vllm=True, temperature=1.0)
    with BackgroundPlayer(Plain, engine) as player, pytest.raises(BadModel, match="returns no log-probabilities"):
        rollout_func(player, tasks=tasks(1))(["t0"], trainer)
