"""Agent programs without any Python code: `deltarunner run --agent`, its environment, and `deltarunner serve`."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest

from runner import BadEnvironment, BadOption, Outcome, RunFile
from runner.cli.run import run_command
from runner.cli.serve import key_lines, serve_command
from runner.cli.settings import RunSettings
from runner.endpoint.client_config import Address, files, pointers
from runner.endpoint.endpoint import Endpoint
from runner.environment.open_episodes import OpenEpisodes
from runner.environment.program import Program
from runner.testing import ScriptedEngine
from tests.endpoint.test_programs import ASKS
from tests.playing import play_all

WRITES = "import sys; open('answer.txt', 'w').write(ask(sys.argv[1]))"


def engine_of(says: Any) -> Any:
    return lambda settings: ScriptedEngine(says)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text(
        "".join(json.dumps({"id": f"t{n}", "prompt": f"Say {n} 'and' {{prompt}}"}) + "\n" for n in range(2))
    )
    (tmp_path / "agent.py").write_text(ASKS + WRITES)
    (tmp_path / "template").mkdir()
    (tmp_path / "template" / "given.txt").write_text("given")
    return tmp_path


def settings(work: Path, **further: Any) -> RunSettings:
    given: dict[str, Any] = {
        "agent": f"{shlex.quote(sys.executable)} {work / 'agent.py'} {{prompt}}",
        "tasks": work / "tasks.jsonl",
        "copy": work / "template",
        "check": f"{shlex.quote(sys.executable)} -c \"assert '1' in open('answer.txt').read(); open('given.txt')\"",
        "file": work / "run.db",
    }
    return RunSettings(**{**given, **further})


def test_agent_command_plays_checks_and_stores(work: Path) -> None:
    def said(model_call: Any) -> str:
        return str(model_call.prompt.rpartition("Say ")[2].partition("<")[0])

    assert run_command(settings(work).with_program(), engine_of(said)) == 0
    with RunFile(work / "run.db") as stored:
        played = {each.id: each for each in stored.trajectories()}
    assert {name: each.reward for name, each in played.items()} == {"t0#0": 0.0, "t1#0": 1.0}
    # A prompt is passed as an argument unchanged: no shell reads it, and no name in it is replaced.
    assert played["t1#0"].turns[0].text.strip() == "1 'and' {prompt}"
    assert {each.outcome for each in played.values()} == {Outcome.COMPLETED}
    assert not (work / "template" / "answer.txt").exists(), "the program worked in a copy"


def test_without_a_check_the_programs_own_code_decides(work: Path) -> None:
    assert run_command(settings(work, check=None).with_program(), engine_of(lambda _: "Done.")) == 0
    with RunFile(work / "run.db") as stored:
        assert [each.reward for each in stored.trajectories()] == [1.0, 1.0]


def test_temporary_files_of_program_and_check_are_deleted(work: Path) -> None:
    note = f"import os, tempfile; open({str(work / 'made')!r}, 'a').write(tempfile.mkstemp()[1] + chr(10))"
    (work / "agent.py").write_text(f"{ASKS}{WRITES}; {note}")
    check = f"{shlex.quote(sys.executable)} -c {shlex.quote(note)}"
    assert run_command(settings(work, check=check).with_program(), engine_of(lambda _: "Done.")) == 0
    made = [Path(line) for line in (work / "made").read_text().splitlines()]
    assert [each.parent.parent.name.partition("-")[0] for each in made] == ["deltarunner"] * 4
    assert not any(each.exists() for each in made)


@pytest.mark.parametrize(
    ("further", "named"),
    [
        ({"agent": None}, "--check needs --agent"),
        ({"agent": None, "check": None, "copy": None}, "give an environment"),
        ({"environment": "calculator"}, "calculator and --agent"),
        ({"tasks": None}, "--tasks"),
    ],
)
def test_options_of_programs_go_together(work: Path, further: Any, named: str) -> None:
    with pytest.raises(BadOption, match=named):
        settings(work, **further).with_program()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"agent": "claude -p"}, r"\{prompt\}"),
        ({"agent": "claude 'oh {prompt}"}, "invalid shell syntax"),
        ({"agent": "claude {prompt}", "copy": "/no/such/folder"}, "not an existing folder"),
        ({"agent": "claude {prompt}", "check": " "}, "give a command"),
        ({"agent": "no-such-agent {prompt}"}, "agent='no-such-agent .*the program 'no-such-agent' is not on PATH"),
        ({"agent": "sh {prompt}", "check": "no-such-check -q"}, "check='no-such-check -q': the program"),
        ({"agent": "inside {prompt}", "wrap": "no-such-sandbox"}, "wrap='no-such-sandbox': the program"),
    ],
)
def test_invalid_command_is_refused_before_anything_runs(given: Any, named: str) -> None:
    with pytest.raises(BadEnvironment, match=named):
        Program(**given)


def test_sandbox_gets_the_working_folder_and_home(work: Path) -> None:
    box = work / "box"
    box.write_text(
        f'#!/bin/sh\nset -e\ntest "$PWD" = "$1"\ntest "$HOME" = "$2"\necho "$3" >> {shlex.quote(str(work / "args"))}\n'
        'shift 3\nexec "$@"\n'
    )
    box.chmod(0o755)
    given = settings(work, wrap=f"{shlex.quote(str(box))} {{folder}} {{home}} in={{folder}},{{prompt}}").with_program()
    assert run_command(given, engine_of(lambda asked: asked.prompt.rpartition("Say ")[2].partition("<")[0])) == 0
    with RunFile(work / "run.db") as stored:
        assert {each.reward for each in stored.trajectories()} == {0.0, 1.0}
    arguments = (work / "args").read_text().splitlines()
    assert len(arguments) == 4, "two programs, and a check for each"
    assert all(each.startswith("in=/") and each.endswith("/work,{prompt}") for each in arguments)


def test_a_command_that_only_its_sandbox_has_is_let_be() -> None:
    assert Program("inside {prompt}", check="inside-too", wrap="env").argv == ["inside", "{prompt}"]


TALKS = ASKS.replace('"tools"', '"of no api"')


@pytest.mark.parametrize(("train", "rewards"), [(None, [None, None]), (True, [0.0, 1.0]), (False, [None, None])])
def test_program_without_tools_is_trained_on_request(
    work: Path, train: bool | None, rewards: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert '"tools"' not in TALKS
    (work / "agent.py").write_text(TALKS + WRITES)
    check = f"{shlex.quote(sys.executable)} -c \"assert '1' in open('answer.txt').read()\""
    given = settings(work, train=train, check=check).with_program()
    assert run_command(given, engine_of(lambda asked: asked.prompt.rpartition("Say ")[2].partition("<")[0])) == 0
    with RunFile(work / "run.db") as stored:
        played = sorted(stored.trajectories(), key=lambda each: each.id)
    assert [each.reward for each in played] == rewards
    assert [bool(each.turns) for each in played] == [bool(train)] * 2
    assert ("no request is trained" in capfd.readouterr().out) is not bool(train)


def test_serve_shows_a_key_for_each_episode_until_ctrl_c(work: Path) -> None:
    """A user starts the program by hand. Its request to the end URL ends the episode, and the next key is shown."""
    shown: list[str] = []
    answers: list[Any] = []
    refused: list[httpx.Response] = []

    def by_hand(base_url: str, end_url: str) -> None:
        body = {"messages": [{"role": "user", "content": "One."}], "tools": [_TOOL]}
        answers.append(httpx.post(f"{base_url}/chat/completions", json=body).json())
        refused.append(httpx.post(f"{base_url}/end", json={"reward": 1}))
        httpx.post(end_url, json={"reward": 0.5})

    def on_key(lines: list[str]) -> None:
        shown.append(lines[0])
        base_url = lines[1].split()[1]
        end_url = next(line for line in lines if line.startswith("  reward ")).split()[4]
        key = base_url.removesuffix("/v1").rpartition("/")[2]
        of_program = [line for line in lines if not line.startswith("  reward ")]
        assert key not in end_url
        assert end_url.split("/")[4] not in "".join(of_program), "the lines for the program contain only its own key"
        if len(shown) <= 2:
            threading.Thread(target=by_hand, args=(base_url, end_url)).start()
        else:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C does

    code = serve_command(RunSettings(file=work / "served.db"), engine_of(lambda _: "Done."), on_key=on_key)
    assert code == 130
    assert shown == ["key-0#0", "key-1#0", "key-2#0"]
    assert [each["choices"][0]["message"]["content"] for each in answers] == ["Done.", "Done."]
    assert [each.status_code for each in refused] == [403, 403]
    with RunFile(work / "served.db") as stored:
        ends = {each.id: (each.outcome, each.reward, len(each.turns)) for each in stored.trajectories()}
    assert ends["key-0#0"] == (Outcome.COMPLETED, 0.5, 1)
    assert ends["key-1#0"] == (Outcome.COMPLETED, 0.5, 1)


_TOOL = {"type": "function", "function": {"name": "run", "description": "", "parameters": {"type": "object"}}}


@pytest.mark.asyncio_alone
@pytest.mark.anyio
async def test_episode_ended_without_a_reward_has_none() -> None:
    class One(OpenEpisodes):
        def tasks(self) -> Any:
            return itertools.islice(super().tasks(), 1)

    def by_hand(base_url: str) -> None:
        body = {"messages": [{"role": "user", "content": "One."}], "tools": [_TOOL]}
        httpx.post(f"{base_url}/chat/completions", json=body)
        httpx.post(f"{base_url}/end")

    def tell(episode: str, endpoint: Endpoint, home: Path) -> None:
        threading.Thread(target=by_hand, args=(endpoint.base_url,)).start()

    (trajectory,) = await play_all(One(tell), ["Done."])
    assert (trajectory.outcome, len(trajectory.turns), trajectory.reward) == (Outcome.COMPLETED, 1, None)


def test_the_lines_of_a_key_are_what_a_shell_takes() -> None:
    address = Address("http://127.0.0.1:1/e/k/v1", "http://127.0.0.1:1/e/k", "k", "a model", 100)
    endpoint = Endpoint.__new__(Endpoint)
    endpoint.base_url, endpoint.root_url, endpoint.context = address.base_url, address.root_url, address.context
    endpoint.api_key, endpoint.model, endpoint.end_url = address.api_key, address.model, "http://127.0.0.1:1/e/r/v1/end"
    endpoint.environ = {"OPENAI_MODEL": "a model", "OPENAI_API_KEY": "k"}
    lines = key_lines("key-0#0", endpoint, Path("/of a key"))
    exported = next(line for line in lines if "export" in line).partition("export ")[2]
    assert dict(each.partition("=")[::2] for each in shlex.split(exported)) == endpoint.environ
    codex = shlex.split(next(line for line in lines if "codex exec" in line).split(maxsplit=1)[1])
    overrides = "\n".join(each for before, each in itertools.pairwise(codex) if before == "-c")
    given, file = (
        tomllib.loads(overrides.replace("=deltarunner", '="deltarunner"')),
        tomllib.loads(_codex_file(address)),
    )
    assert codex[codex.index("-m") + 1] == file.pop("model") == "a model"
    provider, of_file = (each["model_providers"]["deltarunner"] for each in (given, file))
    assert {name: of_file[name] for name in provider} == provider, "as in the settings file that our programs get"
    assert {name for name in file if name.startswith(("model", "tool"))} == set(given)
    assert all(file[name] == value for name, value in given.items() if name != "model_providers")
    named = {line.split()[0]: shlex.split(line)[1:] for line in lines if "of a key" in line}
    assert named["opencode"] == ["OPENCODE_CONFIG=/of a key/.config/opencode/opencode.json", "opencode"]
    assert set(named) == {"opencode", "qwen", "pi"}


def _codex_file(address: Address) -> str:
    return files(address)[".codex/config.toml"]


@pytest.mark.asyncio_alone
@pytest.mark.anyio
async def test_printed_settings_exist_until_the_key_ends(tmp_path: Path) -> None:
    shown: list[Path] = []

    class OneEpisode(OpenEpisodes):
        def tasks(self) -> Any:
            return itertools.islice(super().tasks(), 1)

    def tell(episode: str, endpoint: Endpoint, home: Path) -> None:
        for named in pointers(home).values():
            for place in map(Path, named.values()):
                files = sorted(place.iterdir()) if place.is_dir() else [place]
                assert all(endpoint.base_url in file.read_text() for file in files if file.name != "settings.json")
                shown.extend(files)
        # As from a client that was started by hand.
        threading.Thread(target=httpx.post, args=(f"{endpoint.base_url}/end",)).start()

    trajectories = await play_all(OneEpisode(tell), ["Never said."])
    assert [each.outcome for each in trajectories] == [Outcome.COMPLETED], trajectories[0].error
    assert [each.name for each in shown] == ["opencode.json", "settings.json", "models.json", "settings.json"]
    assert not any(each.exists() for each in shown)
