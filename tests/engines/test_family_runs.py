"""`deltarunner run` on models of many families, each in a folder like its repository: required calls."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from runner import RunFile
from runner.engines.base import FinishReason
from runner.parsing.harmony import NEXT_MESSAGE
from runner.tokens.tokenizer import load_tokenizer
from tests import sweeps
from tests.engines.polyglot import family_folder
from tests.parsing.families import Family, family
from tests.verifying import verify

pytestmark = [pytest.mark.engine, pytest.mark.apart, pytest.mark.sample_units("unusual engines", 7)]

RUN = ("Llama 3.1", "Ministral 3", "DeepSeek V3.2", "GLM 4.6", "Kimi K2", "Gemma 4", "Qwen3-Coder", "gpt-oss")
"""Families with different call formats. An engine starts for each; `test_family_calls` has all families on one."""
OPTIONS = {"max_num_seqs": 4, "max_model_len": 8192}


def deltarunner(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runner.cli.app", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def brief(of: Family, model: Path) -> list[str]:
    """Return sampling that makes a random model end its reasoning at once."""
    encode = load_tokenizer(model).encode
    thought = of.form.reasoning
    closes = NEXT_MESSAGE if of.form.harmony else thought.close.strip() if thought else ""
    biases = {**dict.fromkeys(encode("0123456789"), -100), **dict.fromkeys(encode(closes)[:1], 100)}
    return [f"--logit-bias={token_id}={bias}" for token_id, bias in biases.items()]


@pytest.mark.parametrize("name", sweeps.part(RUN, len(RUN)))
def test_calculator_run_on_each_model_family_is_verified(name: str, polyglot_folder: Path, tmp_path: Path) -> None:
    of = family(name)
    (model := tmp_path / "model").mkdir()
    family_folder(model, polyglot_folder, of)
    engine = [f"--engine-option={option}={value}" for option, value in OPTIONS.items()]
    play = ["--episodes=2", "--seed=3", "--max-tokens=256", "--limit=turns=2", "--file=run.db", "--json"]
    done = deltarunner(tmp_path, "run", "calculator", "--model=model", *play, *engine, *brief(of, model))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["summary"]["episodes"] == 2
    with RunFile(tmp_path / "run.db") as file:
        turns = [turn for trajectory in file.trajectories() for turn in trajectory.turns]
    finished = [turn for turn in turns if turn.finish is FinishReason.STOP]
    assert len(finished) > 1
    for turn in finished:
        (call,) = turn.tool_calls
        assert call.error is None
        assert call.name in ("add", "subtract", "multiply", "answer")
        assert all(type(value) is int for value in call.arguments.values())
    verified = verify(tmp_path / "run.db", "--model", str(model))
    assert verified.exit_code == 0, verified.output
