"""Each wrong command line leads to one clear message with the fix, and to an exit code of its kind.

These tests run in this process. tests/faults/test_command_line.py checks the exit codes of real processes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from runner.cli import run
from runner.cli.app import app
from tests.faults.command import AUTHOR, scripted_engine


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with an author's file of environments."""
    (tmp_path / "mine.py").write_text(AUTHOR)
    (tmp_path / "typo.jsonl").write_text('{"id": "a", "prompt": "hello"}\n{"id": "b", "promt": "hello"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "200")
    yield tmp_path
    sys.modules.pop("mine", None)


CODES = {
    "BadOption": 2,
    "BadEnvironment": 3,
    "BadTask": 4,
    "BelowThreshold": 4,
    "BadModel": 5,
    "BadTemplate": 6,
    "RunFileError": 7,
    "StorageFailed": 8,
    "TooManyFailures": 10,
}

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def deltarunner(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The command line on a scripted engine: its exit code, its stdout and its stderr."""

    def call(*arguments: str, engine: str = "scripted") -> tuple[int, str, str]:
        with monkeypatch.context() as patch:
            if engine == "scripted":
                patch.setattr(run.run_command, "__defaults__", (scripted_engine,))
            done = CliRunner().invoke(app, arguments)
        below = capfd.readouterr()  # a run writes to the descriptors themselves
        return done.exit_code, done.stdout + below.out, done.stderr + below.err

    return call


RUN: dict[str, tuple[list[str], str, list[str]]] = {
    "unknown environment": (
        ["calculater"],
        "BadEnvironment",
        ["nknown environment 'calculater'", "Did you mean 'calculator'?"],
    ),
    "unknown file": (["nothing.py:Greeting"], "BadEnvironment", ["'nothing.py' is not an existing file", "path.py:"]),
    "unknown class": (["mine.py:Greetings"], "BadEnvironment", ["Greetings does not exist", "Greeting"]),
    "no reward": (["mine.py:Rewardless"], "BadEnvironment", ["Rewardless has no reward", "@reward"]),
    "a task without id": (["mine.py:Nameless"], "BadTask", ["a task has no id", "'who am I?'", "unique"]),
    "duplicate ids": (["mine.py:Twice"], "BadTask", ["task 3 has the same id 'same' as task 2", "a unique id"]),
    "tasks that raise": (["mine.py:Exploding"], "BadTask", ["the dataset is gone", "mine.py:"]),
    "tasks that raise at once": (
        ["mine.py:Raising"],
        "BadTask",
        ["raised FileNotFoundError: no puzzles here (in tasks,"],
    ),
    "a lifespan that raises": (
        ["mine.py:Disconnected"],
        "BadEnvironment",
        ["lifespan() raised", "the database is gone", "mine.py:"],
    ),
    "only over-long prompts": (
        ["mine.py:Long"],
        "TooManyFailures",
        ["endless#0: 6019 ids leave no room for a turn in the context of 2000"],
    ),
    "a result below a threshold": (
        ["mine.py:Greeting", "--fail-under", "reward=2", "--fail-under", "pass@1=0"],
        "BelowThreshold",
        ["below 2 (--fail-under)"],
    ),
    "an unknown threshold": (
        ["mine.py:Greeting", "--fail-under", "luck=1"],
        "BadOption",
        ["'luck=1': this run has no such result; give one of reward"],
    ),
    "a threshold without a number": (
        ["mine.py:Greeting", "--fail-under", "reward"],
        "BadOption",
        ["'reward': give NAME=NUMBER"],
    ),
    "an impossible limit": (["mine.py:Greeting", "--limit", "turns=0"], "BadOption", ["turns=0", "at least 1"]),
    "a limit that is not a number": (
        ["mine.py:Greeting", "--limit", "seconds=soon"],
        "BadOption",
        ["seconds='soon'", "number"],
    ),
    "an unknown limit": (
        ["mine.py:Greeting", "--limit", "turn=3"],
        "BadOption",
        ["unknown limit", "Did you mean 'turns'?"],
    ),
    "an unknown setting": (["mine.py:Greeting", "--set", "cuont=3"], "BadOption", ["cuont", "Did you mean 'count'?"]),
    "a setting without value": (["mine.py:Greeting", "--set", "count"], "BadOption", ["write --set name=value"]),
    "a negative temperature": (["mine.py:Greeting", "--temperature", "-1"], "BadOption", ["of at least 0"]),
    "too many logprobs": (["mine.py:Greeting", "--logprobs", "21"], "BadOption", ["logprobs=21", "at most 20"]),
    "a bias of no number": (
        ["mine.py:Greeting", "--logit-bias", "7=much"],
        "BadOption",
        ["7: 'much'", "give a number"],
    ),
    "a least length above the most": (
        ["mine.py:Greeting", "--min-tokens", "9", "--max-tokens", "5"],
        "BadOption",
        ["min_tokens=9, max_tokens=5", "at most max_tokens"],
    ),
    "half a group": (
        ["mine.py:Greeting", "-n", "3", "--group-size", "2"],
        "BadOption",
        ["not a multiple of --group-size 2"],
    ),
    "no such member": (
        ["mine.py:Greeting", "--group-size", "2", "--task", "t-0", "--index", "2"],
        "BadOption",
        ["the episodes of a group are 0 to 1"],
    ),
    "no such task": (
        ["mine.py:Greeting", "--task", "nowhere"],
        "BadTask",
        ["None of 8 tasks has the id 'nowhere'; the first ids are 't-0', 't-1', 't-2'"],
    ),
    "no task file": (
        ["mine.py:Greeting", "--tasks", "none.jsonl"],
        "BadTask",
        ["'none.jsonl' is not an existing file", "JSONL"],
    ),
    "a misspelt field": (
        ["mine.py:Greeting", "--tasks", "typo.jsonl", "-n", "2"],
        "BadTask",
        ["typo.jsonl:2: unknown field 'promt'"],
    ),
    "an unknown template": (["mine.py:Greeting", "--template", "hermess"], "BadTemplate", ["hermess", "hermes"]),
    "no template file": (["mine.py:Greeting", "--template", "nowhere.jinja"], "BadTemplate", ["nowhere.jinja"]),
    "a folder that cannot be made": (
        ["mine.py:Greeting", "--file", "mine.py/run.db"],
        "StorageFailed",
        ["mine.py", "Give another"],
    ),
    "a read-only folder": (
        ["mine.py:Greeting", "--file", "/proc/deltarunner/run.db"],
        "StorageFailed",
        ["/proc/deltarunner", "Give another"],
    ),
    "a file that is not a run file": (
        ["mine.py:Greeting", "--file", "mine.py"],
        "RunFileError",
        ["mine.py", "not a SQLite database"],
    ),
}

OF_THE_ENGINE: dict[str, tuple[list[str], str, list[str]]] = {
    "unknown model": (
        ["mine.py:Greeting", "--model", "./no-such-folder"],
        "BadModel",
        ["no-such-folder", "smollm2-135m"],
    ),
    "a model among the engine's": (
        ["mine.py:Greeting", "--engine-option", "model=other"],
        "BadOption",
        ["give --model"],
    ),
    "an interval that is not a number": (
        ["mine.py:Greeting", "--engine-option", "stream_interval=often"],
        "BadOption",
        ["give a whole number of ids"],
    ),
}

OTHERS: dict[str, tuple[list[str], int, list[str]]] = {
    "no number": (["run", "calculator", "--temperature", "warm"], 2, ["temperature"]),
    "show what is not there": (["show", "nowhere.db"], 7, ["the run file nowhere.db does not exist"]),
    "export a file that is not a run file": (["export", "mine.py"], 7, ["not a run file"]),
    "no such command": (["nonsense"], 2, ["No such command"]),
}


def assert_one_message(err: str, said: list[str]) -> None:
    assert "Traceback" not in err
    assert err.count("deltarunner:") == 1, err
    for part in said:
        assert part in err


ROWS = [pytest.param("scripted", *row, id=name) for name, row in RUN.items()]
ROWS += [pytest.param("real", *row, id=name) for name, row in OF_THE_ENGINE.items()]


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize(("engine", "arguments", "kind", "said"), ROWS)
def test_impossible_run_is_refused_with_one_message(
    folder: Path, deltarunner: Command, engine: str, arguments: list[str], kind: str, said: list[str]
) -> None:
    code, out, err = deltarunner("run", *arguments, engine=engine)
    assert code == CODES[kind], err
    assert_one_message(err, said)
    assert len(err.splitlines()) <= 12, err
    assert "Traceback" not in out
    assert (folder / "mine.py").read_text() == AUTHOR


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize(("engine", "arguments", "kind", "said"), ROWS)
def test_json_option_adds_the_error_as_last_line(
    folder: Path, deltarunner: Command, engine: str, arguments: list[str], kind: str, said: list[str]
) -> None:
    code, out, err = deltarunner("run", *arguments, "--json", engine=engine)
    assert code == CODES[kind], err
    assert_one_message(err, said)
    document = json.loads(out.splitlines()[-1])
    assert (document["error"]["kind"], document["exit_code"]) == (kind, code)
    assert document["error"]["message"] in err


@pytest.mark.parametrize(("arguments", "code", "said"), OTHERS.values(), ids=OTHERS)
def test_other_commands_print_an_error_without_a_traceback(
    deltarunner: Command, arguments: list[str], code: int, said: list[str]
) -> None:
    ended, out, err = deltarunner(*arguments)
    assert ended == code
    assert "Traceback" not in out + err
    for part in said:
        assert part in err
