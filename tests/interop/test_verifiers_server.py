"""verifiers' own client in another process plays with `deltarunner serve ENV --as verifiers`, as prime-rl does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from runner.trainers.trace_check import TraceModel, verify_trace
from runner.trainers.trace_files import read_traces
from tests.repository import DOCS
from tests.trainers.verifiers_process import model_server, served

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone, pytest.mark.package("verifiers.v1.serve"), pytest.mark.slow]


async def test_own_client_plays_and_its_traces_are_exact(demo_model_folder: Path, tmp_path: Path) -> None:
    page = (DOCS / "trainers.md").read_text(encoding="utf-8")
    client = [sys.executable, str(Path(__file__).parent / "verifiers_client.py")]

    def play(address: str, url: str) -> dict[str, Any]:
        (taskset,) = re.findall(r"```python\n(import verifiers.*?)```", page, flags=re.DOTALL)
        (tmp_path / "weather_tasks.py").write_text(taskset)
        command = [*client, address, f"{url}/v1", "demo", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    async with model_server(demo_model_folder) as url:
        with served(tmp_path, demo_model_folder) as address:
            said = await anyio.to_thread.run_sync(play, address, url)
    assert (said["ok"], said["rewards"], said["turns"]) == ([True] * 8, [1.0] * 8, [2] * 8)
    assert said["prompts"] == [f"Add {n}." for n in range(8)]
    assert (said["aligned"], said["trainable"]) == ([True] * 8, [True] * 8)
    assert said["trained"] == said["output_tokens"]
    assert all(said["trained"])
    assert said["failed"]["ok"] is False
    assert "no disk" in said["failed"]["errors"][0]
    assert ["type train" in said["refused"][0], "has no prompt" in said["refused"][1]] == [True, True]
    assert said["healthy"]
    assert said["own"] == [f"What is the weather in {city}?" for city in ("Oslo", "Rome", "Lima", "Cairo")]
    assert said["again"] == ["t0@1#0", "t0@2#0", "t0@3#0"]
    assert len(set(said["ids"])) == len(said["ids"]) == 11
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in said["records"]))
    model = TraceModel.of(demo_model_folder, template="pythonic")
    found = [verify_trace(trace.calls, model) for trace in read_traces(path, vocabulary=model.tokenizer.size)]
    assert [(report.calls, report.findings, dict(report.unchecked)) for report in found] == [(2, [], {})] * 8
