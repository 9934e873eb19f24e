"""`deltarunner run dataset`: options and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal
from typer.testing import CliRunner

from runner import RunFile, ScriptedEngine
from runner.cli import run
from runner.cli.app import app
from runner.testing import ModelCall
from tests.engines.chat.served import endpoint_of

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def deltarunner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The command line on a scripted engine: its exit code, and its output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(run.run_command, "__defaults__", (lambda settings: ScriptedEngine("It is 4."),))
    rows = [{"question": f"{n} + {n}?", "gold": 2 * n, "kind": "even" if n % 2 == 0 else "odd"} for n in range(6)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def call(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, arguments)
        below = capfd.readouterr()
        return done.exit_code, " ".join((done.output + below.out + below.err).split())

    return call


DATASET = ("run", "dataset", "--tasks", "sums.jsonl", "--prompt", "{question}", "--answer", "{gold}")


def test_a_data_set_plays_from_the_command_line(deltarunner: Command) -> None:
    code, said = deltarunner(*DATASET, "--score", "number", "--id", "{kind}-{gold}", "--file", "sums.db")
    assert code == 0, said
    with RunFile(Path("sums.db")) as stored:
        assert {row.id.partition("#")[0]: row.reward for row in stored} == {
            f"{'odd' if n % 2 else 'even'}-{2 * n}": float(n == 2) for n in range(6)
        }
        assert stored.header.arguments["score"] == "number"


def test_rows_are_selected_from_the_command_line(deltarunner: Command) -> None:
    chosen = ("--where", "kind=even", "--where", "gold>0", "--shuffle", "3", "--skip", "0", "--take", "1")
    code, said = deltarunner(*DATASET, "--score", "contains", *chosen, "--system", "Be short.", "--file", "sums.db")
    assert code == 0, said
    with RunFile(Path("sums.db")) as stored:
        (trajectory,) = stored.trajectories()
    assert trajectory.task.answer in ("4", "8")
    assert trajectory.messages[0]["content"] == "Be short."


def test_the_same_command_again_resumes_a_data_set(deltarunner: Command) -> None:
    assert deltarunner(*DATASET, "--score", "number", "-n", "2", "--file", "sums.db")[0] == 0
    code, said = deltarunner(*DATASET, "--score", "number", "--file", "sums.db")
    assert code == 0
    assert "resuming, 2 episodes done" in said


def test_a_judge_scores_from_the_command_line_and_keeps_it(
    deltarunner: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def says(call: ModelCall) -> str:
        return "Score: 0.5" if "You grade replies" in call.prompt else "It is 4."

    monkeypatch.setattr(run.run_command, "__defaults__", (lambda settings: ScriptedEngine(says),))
    Path("rubric.txt").write_text("1 if it is short, 0 if not.")
    judged = (*DATASET[:-2], "--score", "judge:@rubric.txt", "--cache", "scores.jsonl")
    for file, calls in (("a.db", 6), ("b.db", 0)):
        code, said = deltarunner(*judged, "--file", file)
        assert code == 0, said
        with RunFile(Path(file)) as stored:
            rows = [row for row in stored if row.agent == "main"]
        assert [row.reward for row in rows] == [0.5] * 6
        assert sum(row.metrics["judged.calls"] for row in rows) == calls


def test_an_agent_plays_on_another_engine(deltarunner: Command) -> None:
    judged = (*DATASET[:-2], "--score", "judge:1 if it is short.", "-n", "1", "--file", "sums.db")
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(endpoint_of("Score: 0.25")) as api:
        other = f"judge=api:small@{api.base_url}"
        code, said = deltarunner(*judged, "--engine", other, "--api-key", api.api_key)
    assert code == 0, said
    with RunFile(Path("sums.db")) as stored:
        assert stored.header.engines["judge"]["model"] == "small"
        assert [row.reward for row in stored if row.agent == "main"] == [0.25]


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (("run", "dataset"), 2, "dataset: give the file with --tasks: deltarunner run dataset --tasks FILE"),
        ((*DATASET, "--score", "judge:"), 2, "give a rubric, such as judge:'1 if it is polite"),
        ((*DATASET, "--score", "judge:@gone.txt"), 2, "the rubric cannot be read"),
        ((*DATASET, "--score", "number", "--cache", "x"), 2, "a cache keeps the scores of a judge"),
        ((*DATASET, "--engine", "judge=gpt-5"), 2, "--engine judge=gpt-5: give api:gpt-5 for a chat API"),
        ((*DATASET, "--engine", "judge=api:"), 2, "name the model: api:MODEL"),
        (("run", "calculator", "--prompt", "x"), 2, "--prompt is an option of the environment `dataset`"),
        (("run", "dataset", "calculator", "--prompt", "x"), 2, "--prompt with several environments: name one"),
        (("run", "dataset", "calculator", "--tasks", "x"), 2, "give the file to one, such as --set dataset.tasks=FILE"),
        ((*DATASET, "--score", "fuzzy"), 2, "score='fuzzy': give exact, contains, number"),
        ((*DATASET, "--where", "gold"), 2, "--where 'gold': write a field"),
        ((*DATASET, "--score", "number", "--id", "kind"), 4, "row 3 has the same id 'even' as row 1"),
        (("run", "dataset", "--tasks", "gone.csv", "--answer", "a"), 4, "the data set 'gone.csv' does not exist"),
        (("run", "dataset", "--tasks", "sums.jsonl", "--answer", "gold"), 4, "row 1 has no field 'prompt'"),
    ],
    ids=[
        "no tasks",
        "no rubric",
        "no file",
        "no judge",
        "no kind",
        "no model",
        "other environment",
        "several environments",
        "tasks of several",
        "score",
        "where",
        "ids",
        "file",
        "field",
    ],
)
def test_bad_options_of_a_data_set_are_refused(
    deltarunner: Command, arguments: tuple[str, ...], code: int, expected: str
) -> None:
    got, said = deltarunner(*arguments)
    assert (got, expected in said) == (code, True), said


def test_check_accepts_a_data_set(deltarunner: Command) -> None:
    settings = ("tasks=sums.jsonl", "prompt={question}", "answer={gold}", "score=number")
    code, said = deltarunner("check", "dataset", *(part for each in settings for part in ("--set", each)))
    assert code == 0, said
