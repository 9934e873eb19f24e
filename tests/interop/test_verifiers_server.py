"""verifiers' own client plays with `deltarunner serve ENV --as verifiers`, a process of its own; so prime-rl does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from runner import ScriptedEngine
from runner.engines.scripted.script import Answer, ModelCall
from runner.testing import call
from runner.tokens.tokenizer import load_tokenizer
from runner.trainers.trace_check import TraceModel, verify_trace
from runner.trainers.trace_files import read_traces
from tests.engines.remote.loopback import serving
from tests.repository import ROOT

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone, pytest.mark.package("verifiers.v1.serve"), pytest.mark.slow]

ENVIRONMENT = '''
import asyncio
from runner import Environment, reward, tool

class Sums(Environment):
    async def setup(self):
        if self.task.prompt[-1]["content"] == "wait":
            await asyncio.sleep(3600)
        if self.task.prompt[-1]["content"] == "fail":
            raise OSError("no disk")

    @tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    @reward
    def right(self):
        return self.episode.text == self.task.answer
'''


@contextmanager
def server(folder: Path, model: Path) -> Iterator[str]:
    (folder / "sums.py").write_text(ENVIRONMENT)
    command = [sys.executable, "-m", "runner.cli.app", "serve", "sums.py:Sums", "--as", "verifiers"]
    command += ["--bind", "tcp://127.0.0.1:0", "--model", str(model), "--template", "pythonic"]
    given = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, env=given) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"tcp://\S+:\d+", process.stdout.readline())
            assert found is not None
            yield found.group()
        finally:
            process.terminate()


@pytest.fixture
async def engine_url(demo_model_folder: Path) -> AsyncIterator[str]:
    """A server of vLLM's protocol that says what a script says, with the vocabulary of the demo model."""

    def reply(asked: ModelCall) -> Answer:
        return "3" if asked.prompt.count("<|im_start|>assistant") > 1 else [call("add", a=1, b=2)]

    engine = ScriptedEngine(reply, tokenizer=load_tokenizer(demo_model_folder), template="pythonic")
    async with serving(engine, name="demo") as loopback:
        yield loopback.url


async def test_own_client_plays_and_its_traces_are_exact(
    engine_url: str, demo_model_folder: Path, tmp_path: Path
) -> None:
    client = [sys.executable, str(Path(__file__).parent / "verifiers_client.py")]

    def play(address: str) -> dict[str, Any]:
        command = [*client, address, f"{engine_url}/v1", "demo"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    with server(tmp_path, demo_model_folder) as address:
        said = await anyio.to_thread.run_sync(play, address)
    assert (said["ok"], said["rewards"], said["turns"]) == ([True] * 8, [1.0] * 8, [2] * 8)
    assert said["prompts"] == [f"Add {n}." for n in range(8)]
    assert (said["aligned"], said["trainable"]) == ([True] * 8, [True] * 8)
    assert said["trained"] == said["output_tokens"]
    assert all(said["trained"])
    assert said["failed"]["ok"] is False
    assert "no disk" in said["failed"]["errors"][0]
    assert ["type train" in said["refused"][0], "has no prompt" in said["refused"][1]] == [True, True]
    assert said["healthy"]
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in said["records"]))
    model = TraceModel.of(demo_model_folder, template="pythonic")
    found = [verify_trace(trace.calls, model) for trace in read_traces(path, vocabulary=model.tokenizer.size)]
    assert [(report.calls, report.findings, dict(report.unchecked)) for report in found] == [(2, [], {})] * 8
