"""`deltarunner serve ENV --as verifiers` as a process, and a scripted server with vLLM's protocol."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from runner import ScriptedEngine
from runner.engines.scripted.script import Answer, ModelCall
from runner.testing import call
from runner.tokens.tokenizer import load_tokenizer
from tests.engines.remote.loopback import serving
from tests.repository import ROOT

__all__ = ["model_server", "served"]

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
def served(folder: Path, model: Path) -> Iterator[str]:
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


@asynccontextmanager
async def model_server(model: Path) -> AsyncIterator[str]:
    """Yield the address of a server that first calls the tool and then answers, with the model's vocabulary."""

    def reply(asked: ModelCall) -> Answer:
        return "3" if asked.prompt.count("<|im_start|>assistant") > 1 else [call("add", a=1, b=2)]

    engine = ScriptedEngine(reply, tokenizer=load_tokenizer(model), template="pythonic")
    async with serving(engine, name="demo") as loopback:
        yield loopback.url
