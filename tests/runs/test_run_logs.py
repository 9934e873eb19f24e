"""Log records of a run: its options, its file, its engines, failures with their causes, and its end."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runner import BadOption, Limits, Outcome, Run, Sampling, StorageFailed, TooManyFailures, group_reward
from runner.cli.check_weights import check_weights_command
from runner.cli.run import run_command
from runner.cli.serve import serve_trainer
from runner.cli.settings import SERVED, RunSettings, ServeSettings
from runner.cli.verify_trace import ScoreOptions, verify_trace_command
from runner.logs import LEVELS, log_to_file, logger_for
from runner.testing import Fault, ScriptedEngine
from tests.playing import Plain, play_all, recording, tasks, until_end

AUTHOR = """
from runner import Environment, Task, reward

class Greeting(Environment):
    def tasks(self):
        return [Task(id="a", prompt="hi"), Task(id="b", prompt="hi")]

    @reward
    def good(self):
        return 1.0
"""


class Judged(Plain):
    """Environment with a judge that is unavailable."""

    async def step(self, turn: Any) -> None:
        raise ConnectionError("503")


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="deltarunner")
    return caplog


def lines(caplog: pytest.LogCaptureFixture, least: int = logging.DEBUG) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= least]


def line_with(caplog: pytest.LogCaptureFixture, *parts: str) -> str:
    (found,) = [line for line in lines(caplog) if all(part in line for part in parts)]
    return found


@pytest.mark.anyio
async def test_start_logs_options_without_secrets(records: pytest.LogCaptureFixture) -> None:
    judge = ScriptedEngine("never")
    options = {"api_key": "sk-secret", "nested": {1: [{"password": "sk-secret"}]}, "enable_thinking": False}
    await play_all(
        Plain, "Yes", tasks=tasks(1), seed=7, engines={"judge": judge}, template_options=options,
        sampling=Sampling(temperature=0.5, logit_bias={65: -100}), limits=Limits(turns=3),
    )  # fmt: skip
    start = line_with(records, "run of", "Plain")
    for part in (
        "seed=7",
        "'judge': '<ScriptedEngine>'",
        "'enable_thinking': False",
        "'temperature': 0.5",
        "'turns': 3",
    ):
        assert part in start
    assert "sk-secret" not in records.text
    assert {record.name for record in records.records} == {"deltarunner.runs"}


@pytest.mark.anyio
async def test_engines_log_their_entry(records: pytest.LogCaptureFixture) -> None:
    await play_all(Plain, "Yes")
    assert "engine ScriptedEngine entered after" in line_with(records, "entered")
    records.clear()
    async with recording("Yes") as engine, Run(Plain, engine) as run:
        assert len([trajectory async for trajectory in run]) == 1
    assert line_with(records, "already running")


@pytest.mark.anyio
async def test_engine_failing_to_start_logs_the_cause(records: pytest.LogCaptureFixture) -> None:
    class Broken(ScriptedEngine):
        async def __aenter__(self) -> Any:
            raise BadOption("no such device")

    with pytest.raises(BadOption, match="no such device"):
        async with Run(Plain, Broken("hi")):
            pass
    failed, refused = lines(records, logging.ERROR)
    assert failed.startswith("engine Broken failed to start after")
    assert failed.endswith("no such device")
    assert refused == "the run does not start: BadOption: no such device"


@pytest.mark.anyio
async def test_new_and_resumed_files_are_logged(records: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    await play_all(Plain, "Yes", tasks=tasks(2), file=file)
    assert f"run file {file}: new" in lines(records)
    header = line_with(records, "header: {")
    assert '"seed":0' in header
    assert '"fingerprint"' in header
    assert '"text"' not in header
    records.clear()
    await play_all(Plain, "Yes", tasks=tasks(3), file=file)
    assert f"run file {file}: resumed" in lines(records)
    assert "2 episodes recalled from the run file" in lines(records)
    records.clear()
    await play_all(Plain, "Yes")
    assert "no run file" in lines(records)


@pytest.mark.anyio
async def test_repeated_attempts_log_the_cause(records: pytest.LogCaptureFixture) -> None:
    engine = recording("Yes", faults={0: Fault.error(0, "flaky")})
    (played,) = await play_all(Plain, engine, retries=1)
    assert (played.outcome, played.attempt) == (Outcome.COMPLETED, 1)
    repeated = line_with(records, "is repeated")
    assert played.id in repeated
    assert "attempt 0" in repeated
    assert "flaky" in repeated


@pytest.mark.anyio
async def test_failed_episodes_log_outcome_and_cause(records: pytest.LogCaptureFixture) -> None:
    (played,) = await play_all(Judged, "Yes", breaker=1)
    (failed,) = [record for record in records.records if " failed (" in record.getMessage()]
    assert failed.levelno == logging.WARNING
    assert played.id in failed.getMessage()
    assert "env_error" in failed.getMessage()
    assert "503" in failed.getMessage()


@pytest.mark.anyio
async def test_limits_log_name_and_episode(records: pytest.LogCaptureFixture) -> None:
    class Endless(Plain):
        async def step(self, turn: Any) -> str:
            return "more"

    (played,) = await play_all(Endless, lambda turn: "Yes", limits=Limits(turns=2))
    assert played.limit == "turns"
    assert played.id in line_with(records, "limit turns")


@pytest.mark.anyio
async def test_faults_of_hooks_and_scorers_are_logged(records: pytest.LogCaptureFixture) -> None:
    class Faulty(Plain):
        def close(self) -> None:
            raise OSError("cannot close")

        @group_reward
        def compared(self, group: Any) -> list[float]:
            raise ValueError("cannot compare")

    async with Run(Faulty, recording("Yes")) as run:
        assert len([trajectory async for trajectory in run]) == 1
    warned = lines(records, logging.WARNING)
    assert [line for line in warned if "cannot close" in line]
    assert [line for line in warned if "cannot compare" in line]
    assert warned == list(run.summary.faults)


@pytest.mark.anyio
async def test_early_end_logs_its_reason_once(records: pytest.LogCaptureFixture) -> None:
    run = Run(Judged, recording(lambda turn: "Yes"), tasks=tasks(64), breaker=0.5)
    with pytest.raises(TooManyFailures):
        await until_end(run, [])
    (reason,) = lines(records, logging.ERROR)
    assert reason.startswith("the run ends early: TooManyFailures: ")
    assert line_with(records, "no further episode begins")


@pytest.mark.anyio
async def test_end_logs_outcomes_and_counts(records: pytest.LogCaptureFixture) -> None:
    await play_all(Plain, "Yes", tasks=tasks(3))
    end = line_with(records, "the run is over after")
    assert "3 episodes (3 completed), 0 attempts repeated" in end


@pytest.mark.anyio
async def test_cancelled_runs_log_episodes_in_flight(records: pytest.LogCaptureFixture) -> None:
    async with Run(Plain, recording(lambda turn: "Yes"), tasks=tasks(20)) as run:
        async for _ in run:
            run.cancel()
            break
    assert [line for line in lines(records) if "no further episode begins" in line]


def test_nothing_is_printed_without_a_handler() -> None:
    program = (
        "from runner import ScriptedEngine\n"
        "from runner.environment.loading import find_environment\n"
        "from runner.runs.event_loop import run\n"
        "run(find_environment('calculator'), ScriptedEngine(lambda turn: 1 / 0), quiet=True, retries=0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert "deltarunner.runs" not in done.stdout + done.stderr
    assert "the run is over" not in done.stdout + done.stderr


def test_warnings_about_results_are_on_stderr_without_a_handler() -> None:
    def stderr(setup: str) -> str:
        program = f"import logging; from runner.logs import logger_for, warn_always; {setup}\n"
        program += "warn_always(logger_for('engines'), 'the weights %r did not arrive', '2')"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
        return done.stderr

    assert stderr("") == "deltarunner: the weights '2' did not arrive\n"
    assert stderr("logging.getLogger().addHandler(logging.FileHandler('/dev/null'))") == ""


# --- the log file


@pytest.mark.parametrize("level", LEVELS)
def test_log_file_holds_its_level_and_above(level: str, tmp_path: Path) -> None:
    file = tmp_path / "run.log"
    with log_to_file(file, level):
        for each in LEVELS:
            logger_for("tests").log(logging.getLevelName(each.upper()), "at %s", each)
    written = [line.split(" ", 2)[2] for line in file.read_text().splitlines()]
    assert written == [f"{each.upper()} deltarunner.tests: at {each}" for each in LEVELS[LEVELS.index(level) :]]


def test_log_file_is_closed_and_level_restored(tmp_path: Path) -> None:
    root = logging.getLogger("deltarunner")
    before = root.level, list(root.handlers)
    with pytest.raises(KeyError), log_to_file(tmp_path / "run.log", "debug"):
        raise KeyError
    assert (root.level, list(root.handlers)) == before
    logger_for("tests").error("after the end")
    assert not (tmp_path / "run.log").exists()


def test_log_file_hides_keys_also_in_errors(tmp_path: Path) -> None:
    file = tmp_path / "run.log"
    with log_to_file(file, "error", secrets=["sk-1", ""]):
        try:
            raise ValueError("refused: sk-1")
        except ValueError:
            logger_for("tests").exception("half a pair \ud800 and sk-1")
    text = file.read_text()
    assert "sk-1" not in text
    assert "refused: ***" in text
    assert "half a pair \\ud800 and ***" in text


def command(folder: Path, **options: Any) -> str:
    settings = RunSettings(environment="logged_greeting.py:Greeting", file=folder / "run.db", **options)
    assert run_command(settings, lambda _: ScriptedEngine(lambda turn: "hi")) == 0
    return (folder / "run.log").read_text()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "logged_greeting.py").write_text(AUTHOR)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("logged_greeting", None)


@pytest.mark.parametrize("debug", [False, True])
def test_log_level_writes_records_to_the_log(folder: Path, debug: bool) -> None:
    text = command(folder, log_level="info", debug=debug)
    assert "INFO deltarunner.runs: run of logged_greeting:Greeting with" in text
    assert "INFO deltarunner.runs: the run is over after" in text
    assert "DEBUG" not in text
    assert "resumed" in command(folder, log_level="debug", debug=debug)


def test_without_log_level_the_log_has_no_records(folder: Path) -> None:
    assert "deltarunner.runs" not in command(folder)


def test_log_level_of_another_name_is_refused(folder: Path) -> None:
    with pytest.raises(BadOption, match="--log-level loud: give debug, info, warning or error"):
        command(folder, log_level="loud")
    assert not (folder / "run.db").exists()


def test_serve_has_log_level_too() -> None:
    assert "log_level" in SERVED


def test_every_command_with_an_engine_refuses_an_unknown_level(folder: Path) -> None:
    greeting = ServeSettings(environment="logged_greeting.py:Greeting", protocol="verifiers", log_level="loud")
    scores = ScoreOptions(log_level="loud")
    commands: list[Callable[[], int]] = [
        lambda: serve_trainer(greeting),
        lambda: check_weights_command("m", tiny=True, ways=(), options=(), as_json=False, log_level="loud"),
        lambda: verify_trace_command(folder / "a.json", model="m", score=True, score_options=scores),
    ]
    for refused in commands:
        with pytest.raises(BadOption, match="--log-level loud: give debug, info, warning or error"):
            refused()
    assert not (folder / "runs").exists()


def test_server_for_verifiers_writes_its_records(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def log_and_leave(coroutine: Any) -> None:
        coroutine.close()
        logger_for("trainers").info("a client of verifiers")

    monkeypatch.setattr(asyncio, "run", log_and_leave)
    settings = ServeSettings(environment="logged_greeting.py:Greeting", protocol="verifiers", log_level="info")
    assert serve_trainer(settings) == 0
    assert "INFO deltarunner.trainers: a client of verifiers" in (folder / "runs" / "Greeting.log").read_text()


def test_log_that_cannot_be_written_is_refused(folder: Path) -> None:
    (folder / "run.log").mkdir()
    with pytest.raises(StorageFailed, match="cannot be written"):
        command(folder, log_level="info")


def test_half_a_surrogate_pair_is_escaped_for_every_handler(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "deltarunner"):
        logger_for("runs").info("task %s, 100%%", "caf\u00e9 \ud800")
    assert caplog.messages == ["task caf\u00e9 \\ud800, 100%"]
