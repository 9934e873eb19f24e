"""Records of a run on a chat API, tools that read them, and the command line."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from anyio.from_thread import start_blocking_portal
from typer.testing import CliRunner

from runner import (
    Concurrency,
    ConfigurationChanged,
    Conversation,
    Run,
    RunFile,
)
from runner.cli.app import app
from runner.cli.serve import serve_command
from runner.cli.settings import RunSettings
from runner.testing import ScriptedEngine, play
from tests.engines.chat.adding import Adding, adds, played
from tests.engines.chat.api import Says, asking, serving
from tests.playing import Plain, assert_nothing_open, tasks
from tests.verifying import change, verify

pytestmark = pytest.mark.anyio

ASKED = {
    "messages": [{"role": "user", "content": "Yes or no?"}],
    "tools": [{"type": "function", "function": {"name": "run", "description": "", "parameters": {"type": "object"}}}],
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_run_file_has_replies_and_usage(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    async with serving(adds) as api:
        trajectories = await played(Adding, asking(api), file=file)
    with RunFile(file) as run_file:
        assert run_file.header.engine["kind"] == "chat"
        assert run_file.header.engine["server"] == api.url
        assert run_file.header.template == {}
        rows = list(run_file.rows(trained=None))
        assert len(run_file) == 0
        stored = {row.id: run_file.trajectory(row) for row in rows}
    for each in trajectories:
        again = stored[each.id]
        assert (again.messages, again.reward, again.trained) == (each.messages, each.reward, False)
        assert [turn.usage for turn in again.turns] == [turn.usage for turn in each.turns]
        assert [turn.text for turn in again.turns] == [turn.text for turn in each.turns]


async def test_interrupted_run_resumes_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    async with serving(adds) as api:
        async with Run(Adding, asking(api), file=file, concurrency=Concurrency(episodes=1)) as run:
            await anext(run)
        known = len(api.bodies)
        got = await played(Adding, asking(api, places=3), file=file)
        assert 1 <= len(got) <= 3
        assert len(api.bodies) - known <= 2 * len(got)
        with pytest.raises(ConfigurationChanged, match="extra_body"):
            await played(Adding, asking(api, extra_body={"reasoning_effort": "low"}), file=file)
    with RunFile(file) as run_file:
        assert run_file.complete
        assert len(list(run_file.rows(trained=None))) == 4


async def test_verify_checks_turns_of_messages(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    async with serving(adds) as api:
        await played(Adding, asking(api), file=file)
    result = verify(file)
    assert result.exit_code == 0
    assert "4 trajectories of chat APIs" in result.output
    assert "follows from" not in result.output
    change(file, "UPDATE turns SET text = 'forged' WHERE episode = 1 AND number = 1")
    result = verify(file)
    assert result.exit_code == 7
    assert "no message has the content of the turn" in result.output


async def test_verify_checks_the_ids_of_agents_beside_an_api(tmp_path: Path) -> None:
    class Judged(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate()
            judge = self.episode.conversation("judge", prompt="Good?")
            await judge.generate()

    file = tmp_path / "run.db"
    async with serving("Yes") as api:
        await played(Judged, ScriptedEngine("It is 4."), engines={"judge": asking(api)}, file=file)
    result = verify(file)
    assert result.exit_code == 0
    assert "all follow from" in result.output
    assert "1 trajectory of chat APIs" in result.output


async def test_summary_adds_up_usage_and_names_models() -> None:
    reported = {
        "prompt_tokens": 20,
        "completion_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 16},
        "completion_tokens_details": {"reasoning_tokens": 4},
        "cost": 0.25,
    }
    async with serving(Says("Yes", usage=reported)) as api, Run(Plain, asking(api), tasks=tasks(3)) as run:
        async for _ in run:
            pass
    assert run.summary.as_dict()["usage"] == {
        "prompt": 60,
        "completion": 27,
        "cached": 48,
        "reasoning": 12,
        "cost": 0.75,
        "models": {"model-2026-01-01": 3},
    }
    assert run.summary.reward.mean == 1.0
    assert_nothing_open(run.engine)


def test_command_line_evaluates_an_api_and_shows_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DELTARUNNER_API_KEY", "sk-secret-0123456789")
    results: dict[str, Any] = {}

    def on_a_thread(url: str) -> None:
        options = ["-n", "2", "--temperature", "0", "--file", "run.db", "--json"]
        result = CliRunner().invoke(app, ["run", "calculator", "--api-model", "some-model", "--api-url", url, *options])
        results["run"] = result
        results["show"] = CliRunner().invoke(app, ["show", "run.db"])
        results["one"] = CliRunner().invoke(app, ["show", "run.db", "calculator-0"])
        results["export"] = CliRunner().invoke(app, ["export", "run.db", "--format", "jsonl"])
        results["verify"] = CliRunner().invoke(app, ["verify", "run.db"])

    async def main() -> None:
        async with serving("I do not know.", key="sk-secret-0123456789") as api:
            await anyio.to_thread.run_sync(on_a_thread, api.url)

    anyio.run(main)
    assert results["run"].exit_code == 0, results["run"].output
    outcome = json.loads(results["run"].stdout.splitlines()[-1])
    assert (outcome["model"], outcome["summary"]["episodes"]) == ("some-model", 2)
    assert outcome["summary"]["usage"]["completion"] > 0
    assert "answered by" in results["show"].output
    assert "calculator-0#0" in results["show"].output
    assert "I do not know." in results["one"].output
    assert "tokens by the server's count" in results["one"].output
    assert results["export"].exit_code == 2
    assert "nothing to train on" in " ".join(results["export"].output.split())
    assert results["verify"].exit_code == 0


def test_serve_offers_a_chat_engine_to_external_programs(tmp_path: Path) -> None:
    answers: list[Any] = []

    def by_hand(base_url: str, end_url: str) -> None:
        answers.append(httpx.post(f"{base_url}/chat/completions", json=ASKED).json())
        answers.append(httpx.get(f"{base_url}/models").json())
        httpx.post(end_url, json={"reward": 0.5})

    def on_key(lines: list[str]) -> None:
        if answers:
            os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C does
        else:
            end_url = next(line for line in lines if line.startswith("  reward ")).split()[4]
            threading.Thread(target=by_hand, args=(lines[1].split()[1], end_url)).start()

    with start_blocking_portal() as portal, portal.wrap_async_context_manager(serving("Yes")) as api:
        given = RunSettings(
            file=tmp_path / "served.db", api_model="some-model", api_url=api.url, engine_options=["context=4096"]
        )
        assert serve_command(given, on_key=on_key) == 130
    assert answers[0]["choices"][0]["message"]["content"] == "Yes"
    assert answers[1]["data"][0]["id"] == "some-model"
    with RunFile(tmp_path / "served.db") as run_file:
        row = next(iter(run_file.rows(trained=None)))
        assert (row.id, row.reward, row.trained) == ("key-0#0", 0.5, False)
    assert "--api-model" in CliRunner().invoke(app, ["serve", "--help"], terminal_width=200).output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--api-url", "http://127.0.0.1:1/v1"], "give --api-model as well"),
        (["--api-model", "m", "--server", "http://127.0.0.1:1"], "--server and --api-model"),
        (["--api-model", "m", "--template", "hermes"], "--template and --api-model"),
        (["--api-model", "m", "--engine-option", "max_num_seqs=4"], "--engine-option max_num_seqs"),
        (["--api-model", "m", "--api-url", "http://127.0.0.1:1/v1", "--top-k", "4"], "Sampling(top_k=4)"),
    ],
    ids=["no model", "a server too", "a template", "vLLM's option", "top-k"],
)
def test_options_that_do_not_fit_an_api_are_refused_on_command_line(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["run", "calculator", *options])
    assert result.exit_code == 2
    assert words in " ".join(f"{result.output} {result.exception}".split())


def test_the_testing_kit_plays_on_an_api_too() -> None:
    async def main() -> None:
        async with serving("Yes") as api:
            await anyio.to_thread.run_sync(lambda: play(Plain, asking(api)))

    anyio.run(main)
