"""The command line: its output, its files, and its exit codes."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import runner.errors
from runner import BadOption, RunFile, Sampling, ScriptedEngine, TooManyFailures
from runner.cli.app import EPILOG, app
from runner.cli.name_values import parse_limits, parse_logit_bias, parse_pairs, parse_value
from runner.cli.run import run_command
from runner.cli.settings import RunSettings
from runner.engines.base import Engine
from runner.engines.scripted.script import call
from runner.errors import DeltarunnerError
from runner.report.header_view import command_again
from tests.repository import DOCS, ROOT

pytestmark = pytest.mark.sample_functions(2)

REPLIES = [call("add", a=1, b=2), call("answer", value=12)]

AUTHOR = '''
import contextlib, random
from runner import Environment, Task, reward, tool

class Greeting(Environment):
    """Says hello."""
    def __init__(self, count: int = 4):
        self.count = count
    def tasks(self):
        return [Task(id=f"t-{n}", prompt="hello") for n in range(self.count)]
    @reward
    def polite(self):
        print("printed by the environment")
        return self.episode.text == "hi"

class Failing(Greeting):
    def setup(self):
        raise ValueError(f"no luck with {self.task.id}")

class Unlucky(Greeting):
    def setup(self):
        raise ValueError("no luck")

class Rewardless(Environment):
    def tasks(self):
        return [Task(id="1", prompt="hello")]

class Sharing(Greeting):
    seen = []

class Setting(Greeting):
    @contextlib.contextmanager
    def lifespan(self):
        self.index = {}
        yield {}

class Lucky(Greeting):
    @reward
    def luck(self):
        return random.random()

class Wordy(Greeting):
    @reward
    def word(self):
        return "a word"

class Hooked(Greeting):
    @tool
    def close(self) -> None:
        """Close."""

class Entering(Greeting):
    @tool
    async def look(self, what: str) -> str:
        """Look."""
        await self.episode.exit_stack.enter_async_context(contextlib.nullcontext())
        return what

class Typed(Greeting):
    @tool
    def many(self, a: int, b: list[str], c: dict[str, float], d: bool, e: str | None, f: float = 0.5) -> str:
        """Take much."""
        assert isinstance(a, int) and isinstance(b, list) and isinstance(c, dict) and isinstance(d, bool)
        return "fine"
'''


def scripted(replies: Any = "hi") -> Callable[[RunSettings], Engine]:
    return lambda settings: ScriptedEngine(replies)


def play(environment: str, replies: Any = "hi", **options: Any) -> int:
    return run_command(RunSettings(environment=environment, **options), scripted(replies))


def in_a_process(**options: Any) -> subprocess.CompletedProcess[str]:
    """The command line in another process, in which `print` writes to the descriptors that are sent to the log."""
    script = """
import json, sys
from runner import ScriptedEngine
from runner.cli.app import exit_code_of
from runner.cli.run import run_command
from runner.cli.settings import RunSettings

settings = RunSettings(**json.loads(sys.argv[1]))
sys.exit(exit_code_of(lambda: run_command(settings, lambda _: ScriptedEngine("hi"))))
"""
    command = [sys.executable, "-c", script, json.dumps(options)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def deltarunner(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


# --- run


def test_a_run_prints_its_files_summary_and_what_to_type_next(folder: Path) -> None:
    done = in_a_process(environment="mine.py:Greeting")
    assert (done.returncode, done.stderr) == (0, "")
    for expected in (
        "log   runs/Greeting.log",
        "file  runs/Greeting-001.db",
        "1.000 ± 0.000  (4 episodes of 4 tasks)",
        "completed 4 of 4",
    ):
        assert expected in done.stdout
    assert re.search(r"show runs/Greeting-001\.db t-\d#0  ", done.stdout)
    assert re.search(r"deltarunner new NAME +a project for an environment of your own\n", done.stdout)
    assert "printed by the environment" not in done.stdout
    assert "printed by the environment" in (folder / "runs" / "Greeting.log").read_text()
    with RunFile(folder / "runs" / "Greeting-001.db") as run_file:
        assert (len(run_file), run_file.complete) == (4, True)


def test_the_same_command_after_a_complete_run_plays_a_new_one(folder: Path) -> None:
    for number in (1, 2):
        assert play("mine.py:Greeting") == 0
        assert (folder / "runs" / f"Greeting-00{number}.db").is_file()


def test_named_file_is_resumed_and_a_changed_seed_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = folder / "mine.db"
    assert play("mine.py:Greeting", file=file, episodes=2) == 0
    assert play("mine.py:Greeting", file=file, episodes=3) == 0
    out = capfd.readouterr().out
    assert ": resuming, 2 episodes done" in out
    assert "3, 1 of them in 0:0" in out
    with RunFile(file) as run_file:
        assert len(run_file) == 3
    with pytest.raises(DeltarunnerError, match="seed: 0 -> 1"):
        play("mine.py:Greeting", file=file, seed=1)


def test_changed_code_of_the_environment_is_named_on_resume(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = folder / "mine.db"
    assert play("mine.py:Greeting", file=file, episodes=2) == 0
    assert play("mine.py:Greeting", file=file, episodes=3) == 0
    assert "changed:" not in capfd.readouterr().out
    source = folder / "mine.py"
    source.write_text(source.read_text().replace('== "hi"', '== "hello"'))
    assert play("mine.py:Greeting", file=file, episodes=4) == 0
    assert "changed: code.mine: " in capfd.readouterr().out


def test_json_is_one_line_on_stdout_and_everything_else_is_on_stderr(folder: Path) -> None:
    done = in_a_process(environment="mine.py:Greeting", json=True, show=1)
    document = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert (document["file"], document["exit_code"], done.returncode) == ("runs/Greeting-001.db", 0, 0)
    assert document["summary"]["reward"] == {"mean": 1.0, "standard_error": 0.0, "count": 4, "tasks": 4}
    assert "t-0#0" in done.stderr


def test_json_contains_the_error_of_a_failed_run(folder: Path) -> None:
    done = in_a_process(environment="mine.py:Failing", json=True)
    document = json.loads(done.stdout)
    assert document["exit_code"] == done.returncode == 10
    assert document["error"]["kind"] == "TooManyFailures"
    assert document["summary"]["failed"] == 4
    assert "Traceback" not in done.stderr


def test_run_of_only_failures_names_the_last_error(folder: Path) -> None:
    with pytest.raises(TooManyFailures, match=r"no episode of 4 .* no luck with t-3 \(in setup, .*mine.py"):
        play("mine.py:Failing", concurrency=1)


def test_transcripts_are_shown_in_the_order_of_their_tasks(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert play("calculator", REPLIES, episodes=12, show=3) == 0
    out = capfd.readouterr().out
    shown = [line.split()[0] for line in out.splitlines() if line.startswith("calculator-") and "reward" in line]
    assert shown == ["calculator-0#0", "calculator-1#0", "calculator-2#0"]
    assert "sampled    [add(a=1, b=2)]<|im_end|>" in out
    assert "tool       3" in out


def test_one_task_is_shown_to_the_last_token_and_not_kept(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert play("mine.py:Greeting", task="t-2", group_size=3, index=1) == 0
    out = capfd.readouterr().out
    assert "t-2#1" in out
    assert "template   <|im_start|>user⏎" in out
    assert re.search(r"^episodes +1 in", out, re.MULTILINE)
    assert not list(folder.rglob("*.db"))


def test_one_episode_of_a_group_has_the_seed_that_it_has_in_the_run(folder: Path) -> None:
    assert play("mine.py:Greeting", group_size=3, file=folder / "all.db") == 0
    assert play("mine.py:Greeting", group_size=3, task="t-2", index=1, file=folder / "one.db") == 0
    with RunFile(folder / "all.db") as everything, RunFile(folder / "one.db") as one:
        (alone,) = one
        assert alone.seed == everything.trajectory("t-2#1").seed


def test_debug_removes_time_limits_and_keeps_output_on_terminal(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert play("mine.py:Greeting", debug=True) == 0
    assert "printed by the environment" in capfd.readouterr().out
    with RunFile(folder / "runs" / "Greeting-001.db") as run_file:
        assert {value for name, value in run_file.header.limits.items() if name.endswith("seconds")} == {None}
        assert run_file.header.concurrency["episodes"] == 1


def test_tasks_may_come_from_a_file(folder: Path) -> None:
    (folder / "tasks.jsonl").write_text('{"id": "a", "prompt": "hello"}\n{"id": "b", "prompt": "hello"}\n')
    assert play("mine.py:Greeting", tasks=folder / "tasks.jsonl") == 0
    with RunFile(folder / "runs" / "Greeting-001.db") as run_file:
        assert {row.id for row in run_file} == {"a#0", "b#0"}


def test_unknown_command_is_refused_with_the_known_ones(folder: Path) -> None:
    output = " ".join(re.sub(r"[│╭╮╰╯─]", " ", deltarunner("frobnicate").output).split())
    known = "run, serve, list, show, export, compare, report, view, label, verify, verify-trace, "
    known += "check-template, check-weights, new, check"
    assert f"No such command 'frobnicate'. The commands are {known}." in output
    assert "Did you mean 'show'?" in deltarunner("shoe").output


def test_version_option_prints_the_version() -> None:
    said = deltarunner("--version")
    assert (said.exit_code, said.output) == (0, f"deltarunner {runner.__version__}\n")


def test_a_read_only_folder_is_named(folder: Path) -> None:
    (folder / "runs").write_text("a file where the folder should be")
    with pytest.raises(DeltarunnerError, match=r"runs/Greeting\.log cannot be written") as caught:
        play("mine.py:Greeting")
    assert caught.value.exit_code == 8


def test_command_line_imports_no_heavy_package() -> None:
    script = "import sys, runner.cli.app; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert {"torch", "transformers", "vllm", "anyio", "pyarrow", "tokenizers"}.isdisjoint(done.stdout.split())


# --- the other commands


def test_list_names_the_bundled_environments() -> None:
    result = deltarunner("list")
    assert result.exit_code == 0
    for name in ("calculator", "guess_number", "reasoning"):
        assert name in result.output


@pytest.fixture
def run_file(folder: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """A run of two calculator episodes, on the scripted engine."""
    file = folder / "run.db"
    assert play("calculator", REPLIES, file=file, episodes=2) == 0
    capfd.readouterr()
    return str(file)


def test_show_lists_the_episodes_of_a_file(run_file: str) -> None:
    result = deltarunner("show", run_file, "-n", "1")
    assert "complete" in result.output
    assert re.search(r"calculator-\d#0  completed   0.000      2", result.output)
    assert "and 1 more" in result.output
    assert "2 appended (anchor stop, close sampled, seam special)" in result.output


def test_transcript_without_colours_labels_each_passage(run_file: str) -> None:
    lines = deltarunner("show", run_file, "calculator-0").output.splitlines()
    bridge = lines.index("template   ⏎<|im_start|>tool⏎", 20)
    assert lines[bridge - 2] == "sampled    [add(a=1, b=2)]<|im_end|>"
    assert "sampled 16 · finish stop 257" in lines[bridge - 1]
    assert lines[bridge + 1 : bridge + 4] == [
        "tool       3",
        "template   <|im_end|>⏎<|im_start|>assistant⏎",
        "sampled    [answer(value=12)]<|im_end|>",
    ]
    assert "21 bridged (appended, anchor stop, close sampled, seam special)" in lines[bridge + 4]


def test_show_prints_the_ids_of_every_passage(run_file: str) -> None:
    with RunFile(run_file) as stored:
        ids = stored.trajectory("calculator-1#0").segments[0].log.ids
    lines = deltarunner("show", run_file, "calculator-1#0", "--tokens").output.splitlines()
    printed = [int(token) for line in lines if line.startswith("ids ") for token in line.split()[1:]]
    assert printed == list(ids)


def test_show_without_the_vocabulary_shows_the_messages(run_file: str) -> None:
    import sqlite3

    with sqlite3.connect(run_file) as connection:
        connection.execute("UPDATE run SET header = replace(header, '\"scripted\"', '\"elsewhere\"')")
    output = deltarunner("show", run_file, "calculator-0#0").output
    assert "sampled    [add(a=1, b=2)]\n" in output
    assert "template " not in output
    assert "is not here: only messages are shown" in output


def test_show_of_an_unknown_episode_names_one_that_is_there(run_file: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "runner.cli.app", "show", run_file, "nowhere"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7
    assert "the episode 'nowhere' does not exist; an existing id is, for example, 'calculator-0#0'" in done.stderr


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_export_writes_beside_the_file(run_file: str, format: str) -> None:
    result = deltarunner("export", run_file, "--format", format)
    assert result.exit_code == 0
    assert "2 trajectories" in result.output
    target = Path(run_file).with_suffix(f".{format}")
    if format == "jsonl":
        ids = {json.loads(line)["id"] for line in target.read_text().splitlines()}
    else:
        import pyarrow.parquet as parquet

        ids = set(parquet.read_table(target).column("id").to_pylist())
    assert ids == {"calculator-0#0", "calculator-1#0"}


@pytest.mark.parametrize("name", ["calculator", "guess_number", "mine.py:Greeting", "mine.py:Typed"])
def test_check_prints_its_checks_and_ok(folder: Path, name: str) -> None:
    result = deltarunner("check", name)
    assert result.exit_code == 0, result.output
    assert result.output.endswith("ok\n")
    assert "checked  tools: schemas, " in result.output
    assert "         rewards: errors, " in result.output


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("Unlucky", 3, "error    env_error: ValueError: no luck (in setup,"),
        ("Sharing", 0, "warning  Sharing.seen is a list of the class, which all episodes share"),
        ("Setting", 3, "error    lifespan() sets self.index, but each episode has its own"),
        ("Lucky", 3, "error    luck() returned another value in 4 of 4 episodes when the same episode was repeated"),
        ("Wordy", 3, "word returned 'a word'; return a number"),
        ("Hooked", 3, "error    @tool close() is a hook's name"),
        ("Entering", 3, "episode.exit_stack can be entered in setup() only"),
    ],
)
def test_check_finds_what_is_wrong(folder: Path, name: str, code: int, message: str) -> None:
    result = deltarunner("check", f"mine.py:{name}")
    assert result.exit_code == code, result.output
    assert message in result.output


# --- name=value


def test_pairs_are_split_at_the_first_equals_sign() -> None:
    assert parse_pairs(["a=1", "b=x=y", "c="], "--set") == {"a": "1", "b": "x=y", "c": ""}
    with pytest.raises(BadOption, match="--set a is given twice"):
        parse_pairs(["a=1", "a=2"], "--set")


@pytest.mark.parametrize(
    ("text", "value"),
    [("8", 8), ("0.5", 0.5), ("False", False), ("none", None), ('{"a": [1]}', {"a": [1]}), ("bfloat16", "bfloat16")],
)
def test_values_are_json_or_text(text: str, value: object) -> None:
    assert parse_value(text) == value


def test_a_limit_may_be_lifted() -> None:
    assert parse_limits(["turns=3", "seconds=none"]).given() == {"turns": 3, "seconds": None}


SAMPLING = [
    *("--min-tokens", "2", "--repetition-penalty", "1.5", "--presence-penalty", "0.5", "--frequency-penalty", "-0.5"),
    *("--logit-bias", "7=1.5", "--logit-bias", "8=-100", "--bad-word", "moon", "--bad-word", "the sun"),
    *("--ignore-eos", "--logprobs", "5", "--max-tokens", "12"),
]


def test_sampling_options_reach_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.cli.run.run_command", lambda settings: run_command(settings, scripted("hi")))
    result = deltarunner("run", "mine.py:Greeting", "-n", "1", "--file", "run.db", *SAMPLING)
    assert result.exit_code == 0, result.output
    with RunFile(folder / "run.db") as run_file:
        (trajectory,) = run_file.trajectories()
        header = run_file.header.sampling
        again = shlex.split(command_again(run_file.header))[1:]
    given: dict[str, Any] = {
        "min_tokens": 2,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {7: 1.5, 8: -100},
        "bad_words": ("moon", "the sun"),
        "ignore_eos": True,
        "logprobs": 5,
        "max_tokens": 12,
    }
    (turn,) = trajectory.turns
    assert turn.sampling == Sampling(**given).over(Sampling.defaults())
    assert (turn.finish, turn.top_ids.shape) == ("length", (12, 5))
    assert header == {**given, "logit_bias": {"7": 1.5, "8": -100}, "bad_words": ["moon", "the sun"]}

    # The command of the report has the same options.
    assert deltarunner(*again, "-n", "1", "--file", "again.db").exit_code == 0
    with RunFile(folder / "again.db") as run_file:
        assert run_file.header.sampling == header


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["the=1"], "--logit-bias the: write a token id"),
        (["-1=1"], "--logit-bias -1: write a token id"),
        (["7"], "--logit-bias 7: write --logit-bias name=value"),
        (["7=1", "7=2"], "--logit-bias 7 is given twice"),
    ],
    ids=str,
)
def test_a_bias_that_cannot_be_read_is_refused(given: list[str], said: str) -> None:
    with pytest.raises(BadOption, match=re.escape(said)):
        parse_logit_bias(given)


# --- the pages


def test_every_exit_code_is_in_the_page_and_in_the_help() -> None:
    page = (DOCS / "command-line.md").read_text()
    errors = [error for error in vars(runner.errors).values() if isinstance(error, type)]
    codes = {error.exit_code for error in errors if issubclass(error, DeltarunnerError)}
    epilog = " ".join(EPILOG.split())
    for code in codes:
        assert f"| {code} |" in page
        assert f"· {code} " in epilog


def test_every_option_of_run_is_in_the_page() -> None:
    page = (DOCS / "command-line.md").read_text()
    options = set(re.findall(r"--[a-z-]+", deltarunner("run", "--help").output)) - {"--help"}
    assert {option for option in options if option not in page} == set()


def test_the_environment_of_the_readme_is_short_and_right(folder: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len([line for line in blocks[0].splitlines() if line.strip()]) < 20
    (folder / "weather.py").write_text(blocks[0])
    result = deltarunner("check", "weather.py:Weather")
    assert result.exit_code == 0, result.output
    says = [call("weather", city="Oslo"), "Sunny, rainy or foggy."]
    assert play("weather.py:Weather", says, file=folder / "weather.db") == 0
    with RunFile(folder / "weather.db") as run_file:
        assert [row.reward for row in run_file] == [1.0] * 4


def test_the_readme_names_only_pages_that_are_there() -> None:
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert len(links) > 3
    for link in links:
        assert (ROOT / link).exists(), link
