"""Runs whose episodes are served: they use all places, and are saved, resumed, verified and exported as usual."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from typer.testing import CliRunner

from runner import Concurrency, Conversation, Run, RunFile, Task
from runner.cli.app import app
from runner.engines.scripted.script import Latency
from runner.testing import ScriptedEngine
from tests.endpoint.serving import RUN, chat_body, http, user
from tests.faults.comparing import stored
from tests.playing import Plain
from tests.verifying import verify

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.asyncio_alone]

EPISODE_COUNT = 12


class Agents(Plain):
    """Environment whose client asks for a title, and then plays an agent and two sub-agents with equal prompts."""

    def tasks(self) -> list[Task]:
        return [Task(id=f"t{number}", prompt=f"Mend {number}.") for number in range(EPISODE_COUNT)]

    async def rollout(self, conversation: Conversation) -> None:
        async with self.episode.serve() as endpoint, http(endpoint) as client:
            await self.ask(client, [user(f"A title for {self.task.prompt}")], label="title", tools=[])
            history = [user(str(self.task.prompt))]
            await self.talk(client, history, label="lead")
            for label in ("one", "two"):
                await self.talk(client, [user("Look around.")], label)
            history.append(user("And now?"))
            await self.talk(client, history, label="lead")

    async def talk(self, client: httpx.AsyncClient, history: list[Any], label: str) -> None:
        while True:
            message = await self.ask(client, history, label=label, tools=[RUN])
            history.append(message)
            if not message.get("tool_calls"):
                return
            call = message["tool_calls"][0]
            given = json.loads(call["function"]["arguments"])["command"]
            history.append({"role": "tool", "tool_call_id": call["id"], "content": f"{given} by {label}"})

    async def ask(self, client: httpx.AsyncClient, history: list[Any], *, label: str, tools: list[Any]) -> Any:
        headers = {"x-session-id": label}
        answer = await client.post("/chat/completions", json=chat_body(history, tools=tools), headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]


def engine() -> ScriptedEngine:
    def says(call: Any) -> str:
        results = call.prompt.count(" by ")
        if results < 2 and "A title for" not in call.prompt:
            arguments = json.dumps({"command": f"look {results}"})
            return f'<tool_call>\n{{"name": "run", "arguments": {arguments}}}\n</tool_call>'
        return f"Said after {len(call.prompt)}."

    latency = Latency(first=2, jitter=3)
    return ScriptedEngine(says, template="hermes", tick=0.0001, latency=latency, places=40)


async def play(file: Path, *, width: int = 8, until: int = EPISODE_COUNT) -> None:
    finished = 0
    async with Run(Agents(), engine(), file=file, seed=3, concurrency=Concurrency(episodes=width)) as run:
        async for trajectory in run:
            finished += trajectory.agent == "main"
            if finished == until < EPISODE_COUNT:
                return


def resumed_as(kept: dict[Any, Any]) -> dict[Any, Any]:
    """Return the trajectories with attempt 0: only the attempt shows that an episode was interrupted."""
    return {key: {**fields, "attempt": 0} for key, (_, fields) in kept.items()}


def names(file: Path) -> dict[str, set[str]]:
    with RunFile(file) as run_file:
        rows = list(run_file.rows(trained=None))
    return {id: {row.agent for row in rows if row.id == id} for id in {row.id for row in rows}}


async def test_results_of_episodes_do_not_depend_on_concurrency(tmp_path: Path) -> None:
    for width in (1, 8, 64):
        await play(tmp_path / f"{width}.db", width=width)
    narrow, middle, wide = (stored(tmp_path / f"{width}.db") for width in (1, 8, 64))
    assert len(narrow) == 4 * EPISODE_COUNT
    assert narrow == middle == wide


async def test_title_requests_and_sub_agents_never_become_main(tmp_path: Path) -> None:
    await play(tmp_path / "run.db")
    assert set(map(frozenset, names(tmp_path / "run.db").values())) == {frozenset({"main", "title", "one", "two"})}
    with RunFile(tmp_path / "run.db") as run_file:
        rows = list(run_file.rows(trained=None))
        assert {row.agent for row in rows if not row.trained} == {"title"}
        of_sub_agents = [each for each in run_file.trajectories() if each.agent in ("one", "two")]
    for trajectory in of_sub_agents:
        results = [each for each in trajectory.segments[-1].messages if each["role"] == "tool"]
        assert [each["content"] for each in results] == [f"look {n} by {trajectory.agent}" for n in range(2)]


async def test_a_run_is_resumed_verified_and_exported_like_any_other(tmp_path: Path) -> None:
    file, whole = tmp_path / "run.db", tmp_path / "whole.db"
    await play(file, until=EPISODE_COUNT // 3)
    before = {id for id, agents in names(file).items() if "main" in agents}
    assert EPISODE_COUNT // 3 <= len(before) < EPISODE_COUNT
    await play(file)
    await play(whole)
    assert resumed_as(stored(file)) == resumed_as(stored(whole))
    verified = await anyio.to_thread.run_sync(verify, file)
    assert verified.exit_code == 0, verified.output
    out = tmp_path / "run.jsonl"
    exported = await anyio.to_thread.run_sync(CliRunner().invoke, app, ["export", str(file), "-o", str(out)])
    assert exported.exit_code == 0, exported.output
    lines = [json.loads(line) for line in (await anyio.Path(out).read_text()).splitlines()]
    assert sorted(line["agent"] for line in lines) == sorted(["main", "one", "two"] * EPISODE_COUNT), (
        "the trained trajectories"
    )
