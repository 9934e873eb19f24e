"""The blocks of docs/engines.md run. Clients of other projects are stand-ins with the fields of their sources."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from runner import Environment, Outcome, Run, Task, reward
from tests.engines.engine_requests import STOP
from tests.engines.remote.model_folder import byte_model
from tests.repository import DOCS
from tests.testing.inner import PLAIN

pytest_plugins = ["pytester"]

PAGE = (DOCS / "engines.md").read_text(encoding="utf-8")
BLOCKS: list[str] = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
SAID = [*b"Hello.", STOP]
LOGPROBS = [-0.5] * len(SAID)


def block(name: str) -> str:
    return next(text for text in BLOCKS if name in text)


def names_of(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(text, "engines.md", "exec"), names)
    return names


def test_the_first_block_plays() -> None:
    assert "engine" in names_of(BLOCKS[0])


def test_the_contract_of_the_page_is_played_on_its_engine(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_letters=block("TestLetters"))
    result = pytester.runpytest_inprocess(*PLAIN, "-W", "error")
    outcomes = result.parseoutcomes()
    assert set(outcomes) == {"passed"}
    assert outcomes["passed"] > 20


# --- clients of other projects


@dataclass
class VerlOutput:
    """Stand-in for `TokenOutput` in verl/workers/rollout/replica.py."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class VerlClient:
    """Stand-in for `AsyncLLMServerManager` in verl/experimental/agent_loop/agent_loop.py."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> VerlOutput:
        self.asked.append({"session": request_id, "prompt": prompt_ids, **sampling_params})
        return VerlOutput(SAID, LOGPROBS, "completed", {"global_steps": 7})


class SkyrlClient:
    """Stand-in for `InferenceEngineInterface` in SkyRL: batches in and out."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def generate(self, input_batch: dict[str, Any]) -> dict[str, Any]:
        (prompt,), (session,) = input_batch["prompt_token_ids"], input_batch["session_ids"]
        self.asked.append({"session": session, "prompt": prompt, **input_batch["sampling_params"]})
        return {"response_ids": [SAID], "response_logprobs": [LOGPROBS], "stop_reasons": ["stop"]}


class TinkerClient:
    """Stand-in for `SamplingClient` of tinker."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def sample(self, prompt: Any, *, num_samples: int, sampling_params: Any) -> Any:
        assert num_samples == 1
        params = vars(sampling_params)
        self.asked.append({"prompt": prompt, "stop_token_ids": params["stop"], **params})
        sequence = SimpleNamespace(tokens=SAID, logprobs=LOGPROBS, stop_reason="stop")
        return SimpleNamespace(sequences=[sequence])


class Greeting(Environment):
    def tasks(self) -> list[Task]:
        return [Task(id="0", prompt="Say hello.")]

    @reward
    def greeted(self) -> bool:
        return self.episode.text == "Hello."


@pytest.mark.anyio
@pytest.mark.parametrize("project", ["verl", "skyrl", "tinker"])
async def test_a_run_plays_on_a_stand_in_of_the_client(
    project: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tinker = ModuleType("tinker")
    vars(tinker).update(SamplingParams=SimpleNamespace, ModelInput=SimpleNamespace(from_ints=list))
    monkeypatch.setitem(sys.modules, "tinker", tinker)
    client: Any = {"verl": VerlClient, "skyrl": SkyrlClient, "tinker": TinkerClient}[project]()
    make = names_of(block(f"def {project}_engine"))[f"{project}_engine"]
    given = (lambda: (client, "7")) if project == "tinker" else client
    engine = make(given, model=byte_model(tmp_path / "model"), context=2000)
    async with Run(Greeting, engine, seed=3) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 1), trajectory.error
    (asked,) = client.asked
    assert asked["max_tokens"] == 1024
    assert asked["stop_token_ids"] == [STOP]
    assert list(trajectory.segments[0].log.ids) == [*asked["prompt"], *SAID]
    if project != "skyrl":
        assert [span.version for span in trajectory.segments[0].log.versions] == ["7"]
