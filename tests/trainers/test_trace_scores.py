"""Log-probabilities of traces are compared with an engine's scores: correct ones agree, and wrong ones are found."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from runner import BadOption, Run, Sampling
from runner.cli.app import app
from runner.testing import ScriptedEngine
from runner.testing.engine_pool import PooledEngine
from runner.trainers.openenv import read_training_trace, training_trace
from runner.trainers.trace_scores import ScoreReport, score_trace
from runner.trainers.traced_call import TracedCall
from tests.playing import talking, tasks, twice
from tests.trainers.test_verify_trace import turn


def value_of(token_id: int) -> float:
    return -0.1 * (token_id % 10)


class Model:
    """Engine whose scores depend only on the id, with the sequences that were scored."""

    def __init__(self) -> None:
        self.scored: list[list[int]] = []

    def __call__(self, ids: Sequence[int]) -> list[float]:
        self.scored.append(list(ids))
        return [value_of(token_id) for token_id in ids[1:]]


def call(prompt: list[int], sampled: list[int], **fields: Any) -> TracedCall:
    values = tuple(map(value_of, sampled))
    mask = (True,) * len(sampled)
    made = TracedCall(
        node_id=f"call {len(prompt)}", prompt_ids=tuple(prompt), token_ids=tuple(sampled), logprobs=values, mask=mask
    )
    return replace(made, **fields)


CALLS = [call([1, 2], [3, 4]), call([1, 2, 3, 4, 5], [6]), call([9], [8, 7])]


async def scored(calls: Sequence[TracedCall], model: Model, **options: Any) -> ScoreReport:
    async with ScriptedEngine("unused", scores=model) as engine:
        return await score_trace(calls, engine, **options)


@pytest.mark.anyio
async def test_conversation_is_scored_in_one_pass() -> None:
    model = Model()
    report = await scored(CALLS, model)
    assert (len(report.differences), report.largest, report.findings) == (5, 0.0, [])
    assert sorted(model.scored) == [[1, 2, 3, 4, 5, 6], [9, 8, 7]]


@pytest.mark.anyio
async def test_ids_beyond_the_tolerance_are_found_at_their_place() -> None:
    wrong = replace(CALLS[2], logprobs=(value_of(8) - 0.4, value_of(7) - 2.0))
    (found,) = (await scored([*CALLS[:2], wrong], Model())).findings
    assert (found.turn, found.places, found.ids) == (2, (1,), 2)
    assert found.traced[0] == pytest.approx(found.scored[0] - 2.0)
    (found,) = (await scored([wrong], Model(), tolerance=0.3)).findings
    assert found.places == (0, 1)


@pytest.mark.anyio
async def test_calls_without_comparable_scores_are_counted() -> None:
    calls = [
        replace(CALLS[0], logprobs=()),
        replace(CALLS[1], metadata={"constraint": "json"}),
        replace(CALLS[2], prompt_ids=()),
        call(list(range(40)), [1]),
    ]
    async with ScriptedEngine("unused", scores=Model(), context=20) as engine:
        report = await score_trace(calls, engine)
    assert (report.median, report.largest, report.findings) == (None, None, [])
    *others, refused = sorted(report.unchecked, key=lambda reason: reason.startswith("the engine refuses the call"))
    assert set(others) == {
        "no log-probabilities", "no prompt ids", "sampled under a grammar, which the trace does not have"
    }  # fmt: skip
    assert "41" in refused


@pytest.mark.anyio
@pytest.mark.parametrize("tolerance", [0.0, -1.0, math.nan, math.inf])
async def test_tolerance_is_a_number_above_zero(tolerance: float) -> None:
    with pytest.raises(BadOption, match=r"tolerance=.*give a number of nats above 0"):
        await scored(CALLS, Model(), tolerance=tolerance)


@pytest.mark.engine
def test_trace_of_a_run_agrees_with_the_real_engine(float32_engine: PooledEngine) -> None:
    async def main() -> None:
        for temperature in (1.0, 0.6):
            how = Sampling(temperature=temperature, max_tokens=24)
            async with Run(talking(twice), float32_engine, tasks=tasks(1), sampling=how) as run:
                (trajectory,) = [each async for each in run]
            calls = read_training_trace(training_trace(trajectory))
            report = await score_trace(calls, float32_engine, tolerance=1e-3)
            assert (report.findings, dict(report.unchecked)) == ([], {})
            assert len(report.differences) == sum(len(each.token_ids) for each in calls) > 20
            other = await score_trace(calls, float32_engine, sampling=Sampling(temperature=1.6))
            assert other.findings, "another temperature must be found"

    float32_engine.home.call(main)


# --- the command


def deltarunner(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["verify-trace", *arguments])


@pytest.mark.parametrize("option", [("--tolerance", "1"), ("--sampling", "top_p=0.9"), ("--engine-option", "a=1")])
def test_options_of_scores_need_the_flag(option: tuple[str, str], tmp_path: Path, demo_model_folder: Path) -> None:
    done = deltarunner(str(tmp_path / "t.json"), "--model", str(demo_model_folder), *option)
    assert (done.exit_code, "add --score" in done.output) == (2, True)


def test_sampling_of_scores_has_known_fields(tmp_path: Path, demo_model_folder: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"turns": [turn("a", [5, 6], [7], [], {"role": "assistant", "content": "x"})]}))
    done = deltarunner(str(path), "--model", str(demo_model_folder), "--score", "--sampling", "heat=1")
    assert (done.exit_code, "--sampling heat: Sampling has no such field" in done.output) == (2, True)


@pytest.mark.parametrize("reason", ["no log-probabilities", "the engine refuses the call"])
def test_a_file_of_which_nothing_was_scored_is_not_verified(
    reason: str, tmp_path: Path, demo_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine(*_: Any, **__: Any) -> ScriptedEngine:
        return ScriptedEngine("unused", scores=Model(), context=20)

    monkeypatch.setattr("runner.engines.vllm.engine.VllmEngine", engine)
    monkeypatch.chdir(tmp_path)
    row = {"prompt_ids": [1, 43, 198], "completion_ids": [52] * 40}
    Path("trace.json").write_text(
        json.dumps(row if reason == "no log-probabilities" else {**row, "logprobs": [-0.5] * 40})
    )
    command = ("trace.json", "--model", str(demo_model_folder), "--template", "pythonic")
    assert deltarunner(*command).exit_code == 0
    done = deltarunner(*command, "--score")
    assert done.exit_code == 7, done.output
    assert "not verified: no log-probability was compared" in done.output
    assert f"not scored in 1 calls: {reason}" in done.output
    shown = json.loads(deltarunner(*command, "--score", "--json").stdout)
    assert (shown["exit_code"], shown["verified"], shown["scores"]["ids"]) == (7, False, 0)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.apart
@pytest.mark.whole
def test_command_finds_log_probabilities_of_other_weights(
    tmp_path: Path, small_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = turn("a", [1, 4093, 198], [520, 9531, 198, 63], [], {"role": "assistant", "content": "x"})
    path = tmp_path / "trace.json"

    def checked(logprobs: list[float]) -> tuple[int, Any]:
        path.write_text(json.dumps({"turns": [{**made, "per_token_logps": logprobs}]}))
        options = ("--score", "--engine-option", "dtype=float32", "--engine-option", "max_model_len=512", "--json")
        done = deltarunner(str(path), "--model", str(small_model_folder), "--template", "pythonic", *options)
        assert done.exit_code in (0, 7), done.output
        return done.exit_code, json.loads(done.stdout)

    code, shown = checked([-50.0] * 4)
    (found,) = shown["scores"]["findings"]
    assert (code, shown["verified"], found["places"]) == (7, False, [0, 1, 2, 3])
    code, shown = checked(found["scored"])
    assert (code, shown["verified"], shown["scores"]["findings"]) == (0, True, [])
    assert shown["scores"]["largest"] < 1e-4
