"""OpenEnv's TrainingTrace: written from episodes, read back unchanged, and refused by turn and field if malformed."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from runner import BadBatch, Outcome, Sampling, Trajectory, tool
from runner.testing import call
from runner.trainers.openenv import read_training_trace, training_trace
from tests.playing import Plain, play_all, recording, talked, twice
from tests.training.making import made, prompt, retried, said

pytestmark = pytest.mark.anyio


def checked(trajectory: Trajectory) -> dict[str, Any]:
    """Return the trace, validated by OpenEnv's own classes if these are installed."""
    trace = training_trace(trajectory)
    if importlib.util.find_spec("openenv") is not None:
        from openenv.core.harness.training import TrainingTrace

        TrainingTrace.model_validate(trace)
    return trace


async def test_trace_of_an_episode_is_read_back_the_same() -> None:
    trajectory = await talked(twice, recording(["21", "42"]))
    calls = read_training_trace(json.dumps(checked(trajectory)))
    assert len(calls) == 2
    for each, turn in zip(calls, trajectory.turns, strict=True):
        assert list(each.prompt_ids) == turn.prompt_ids.tolist()
        assert list(each.token_ids) == turn.token_ids.tolist()
        assert list(each.logprobs) == turn.logprobs.tolist()
        assert each.mask == (True,) * turn.tokens
        assert each.metadata["versions"] == ["scripted"]


async def test_messages_of_each_turn_are_in_the_shape_of_openai() -> None:
    trajectory = await talked(twice, recording(["21", "42"]))
    first, second = training_trace(trajectory)["turns"]
    assert [message["role"] for message in first["request"]["messages"]] == ["user"]
    assert [message["role"] for message in second["request"]["messages"]] == ["user", "assistant", "user"]
    assert second["response"]["choices"][0]["message"]["content"] == "42"


async def test_ignored_stops_are_in_the_request() -> None:
    for ignored in (True, False):
        trajectory = await talked(twice, recording(["21", "42"]), sampling=Sampling(ignore_eos=ignored, max_tokens=9))
        calls = read_training_trace(json.dumps(checked(trajectory)))
        assert [each.ignores_stops for each in calls] == [ignored, ignored]


async def test_arguments_of_calls_are_text() -> None:
    class Adds(Plain):
        @tool
        def add(self, a: int) -> int:
            """Add one."""
            return a + 1

    (trajectory,) = await play_all(Adds, recording([[call("add", a=1)], "42"]))
    sent = [m for t in checked(trajectory)["turns"] for m in t["request"]["messages"] if "tool_calls" in m]
    assert [json.loads(message["tool_calls"][0]["function"]["arguments"]) for message in sent] == [{"a": 1}]


def test_turn_that_is_not_trained_has_mask_zero() -> None:
    trajectory = made([prompt(1), said(2, 3), prompt(4), retried(5), prompt(6), said(7)])
    trajectory.turns[2].left_out = True
    assert [sum(turn["loss_mask"]) for turn in checked(trajectory)["turns"]] == [2, 0, 0]


@pytest.mark.parametrize("fields", [{"outcome": Outcome.ENV_ERROR, "reward": None}, {"reward": None}])
def test_failed_episode_has_mask_zero_in_each_turn(fields: dict[str, Any]) -> None:
    trace = checked(made([prompt(1), said(2, 3)], **fields))
    assert [turn["loss_mask"] for turn in trace["turns"]] == [[0, 0, 0]]


def test_turn_without_log_probabilities_is_refused() -> None:
    with pytest.raises(BadBatch, match=r"t0#0/main/0 .* has no finite log-probabilities"):
        training_trace(made([prompt(1), said(2, logprobs=[float("nan")])]))


GOOD = {
    "node_id": "a",
    "prompt_token_ids": [1, 2],
    "completion_token_ids": [3],
    "per_token_logps": [-0.5],
    "loss_mask": [0, 0, 1],
}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"loss_mask": [1]}, r"turn 1: loss_mask has 1 value for 2 \+ 1 ids"),
        ({"loss_mask": [1, 0, 1]}, "turn 1: loss_mask has 1 for an id of the prompt: give 0"),
        ({"completion_token_ids": [900]}, r"turn 1: completion_token_ids\[0\] is 900: .* from 0 to 299"),
        ({"prompt_token_ids": [1, -2]}, r"turn 1: prompt_token_ids\[1\] is -2"),
        ({"per_token_logps": []}, "turn 1: per_token_logps has 0 values for 1 sampled id"),
        ({"per_token_logps": [0.5]}, r"turn 1: per_token_logps\[0\] is 0.5"),
        ({"node_id": "first"}, "turn 1: the node_id 'first' occurs twice"),
        ({"node_id": ""}, "turn 1: node_id is ''"),
        ({"loss_mask": None}, "turn 1: loss_mask is None"),
    ],
)
def test_malformed_turn_is_refused_by_field(changes: dict[str, Any], fault: str) -> None:
    trace = {"schema_version": 1, "turns": [{**GOOD, "node_id": "first"}, {**GOOD, **changes}]}
    with pytest.raises(BadBatch, match=fault):
        read_training_trace(trace, vocabulary=300)


def test_trace_of_another_schema_is_refused() -> None:
    with pytest.raises(BadBatch, match="schema_version 2, and only version 1"):
        read_training_trace({"schema_version": 2, "turns": []})
    with pytest.raises(BadBatch, match="not JSON"):
        read_training_trace("{")
    with pytest.raises(BadBatch, match="no list of turns"):
        read_training_trace("[]")
