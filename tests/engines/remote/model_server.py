"""A real vLLM server in another process, on a free port of this machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import anyio

from tests.repository import ROOT

__all__ = ["ModelServer", "model_server"]

START_SECONDS = 240.0
END_SECONDS = 30.0
_OPEN = re.compile(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class ModelServer:
    """A running server."""

    url: str
    folder: Path
    """The folder of its model."""

    async def open_requests(self) -> int:
        """Return the number of requests that its scheduler counts."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/metrics") as answer:
            return sum(int(float(count)) for count in _OPEN.findall(await answer.text()))

    async def until_idle(self) -> None:
        """Wait until its scheduler has no request."""
        while await self.open_requests():  # noqa: ASYNC110  # it sends no notification
            await anyio.sleep(0.05)


@contextmanager
def model_server(folder: Path, log: Path, *arguments: str) -> Iterator[ModelServer]:
    """Yield a server of the model in a folder, in float32, with all options that our clients use."""
    port = _free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enable-scale-out", "--enable-prompt-tokens-details"]
    command += ["--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8", "--enforce-eager"]
    command += ["--block-size", "32", "--max-num-batched-tokens", "512", *arguments]
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"}
    server = ModelServer(f"http://127.0.0.1:{port}", folder)
    with log.open("wb") as output, subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process:
        try:
            _wait_for(server, process, log)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_for(server: ModelServer, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"no server came up:\n{log.read_text(errors='replace')[-3000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
