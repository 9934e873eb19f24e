"""Verification builds the shown schemas of tools again, also for a template that needed rewritten schemas."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

from runner import Conversation, Environment, Run, RunFile, Task, reward, tool
from runner.errors import DeltarunnerError
from runner.options import Concurrency
from runner.testing import ScriptedEngine, call
from runner.tokens.template import ChatTemplate
from tests.conformance.corpus import VARIABLES, corpus
from tests.verifying import change, verdict, verify

pytestmark = pytest.mark.slow


@pytest.fixture
def anyio_backend() -> str:
    """Asyncio only, since the event loop changes no prompt."""
    return "asyncio"


class Unit(enum.StrEnum):
    METRE = "metre"
    FOOT = "foot"


class Period(BaseModel):
    begin: str = Field(description="The first day.")
    days: int = Field(1, ge=1, le=31)


class Trip(Environment):
    def tasks(self) -> list[Task]:
        return [Task(id=f"t{number}", prompt="Book it.") for number in range(3)]

    @tool
    def book(self, period: Period | None, unit: Unit = Unit.METRE) -> str:
        """Book a trip."""
        return f"{period.days if period else 0} {unit}"

    @reward
    def booked(self) -> bool:
        return True

    async def rollout(self, conversation: Conversation) -> None:
        for _ in range(2):
            turn = await conversation.generate()
            conversation.add(*await conversation.call_tools(turn))
        await conversation.generate()


REPLIES: list[Any] = [
    [call("book", period={"begin": "Monday", "days": 99})],
    [call("book", period={"begin": "Monday", "days": 3}, unit="foot")],
    "Done.",
]
NAMES = ("unsloth-gpt-oss-20b", "google-gemma-4-31B-it", "ByteDance-Seed-OSS")


def template(name: str) -> ChatTemplate:
    text = next(entry.text for entry in corpus() if entry.name == name)
    return ChatTemplate(text, name=name, variables=VARIABLES)


async def play(path: Path, name: str, *, most: int = 3) -> None:
    async with Run(
        Trip, ScriptedEngine(REPLIES, template=template(name)), file=path, concurrency=Concurrency(episodes=1)
    ) as run:
        async for trajectory in run:
            assert trajectory.outcome.scored, trajectory.error
            most -= 1
            if not most:
                break


@pytest.mark.anyio
@pytest.mark.parametrize("name", NAMES)
async def test_a_run_shows_what_to_write_and_its_file_is_verified(tmp_path: Path, name: str) -> None:
    path = tmp_path / "run.db"
    await play(path, name)
    assert verify(path).exit_code == 0, verify(path).output
    with RunFile(path) as run_file:
        trajectory = run_file.trajectory("t0#0")
        assert run_file.header.template["fits_tools"] is True
    text = bytes(each for each in trajectory.segments[0].log.ids[: trajectory.turns[0].start] if each < 256).decode()
    for word in ("begin", "days", "metre", "foot"):
        assert word in text
    # The author's own schema is stored, and calls are validated with it.
    properties = trajectory.segments[0].tools[0]["function"]["parameters"]["properties"]
    assert properties["period"]["anyOf"][0] == {"$ref": "#/$defs/Period"}
    results = [message["content"] for message in trajectory.segments[-1].messages if message["role"] == "tool"]
    assert "31" in results[0]
    assert results[1] == "3 foot"


@pytest.mark.anyio
async def test_a_resumed_run_shows_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    await play(path, NAMES[0], most=1)
    await play(path, NAMES[0])
    assert verdict(path)["verified"]
    with RunFile(path) as run_file:
        starts = {
            tuple(
                run_file.trajectory(f"t{number}#0")
                .segments[0]
                .log.ids[: run_file.trajectory(f"t{number}#0").turns[0].start]
            )
            for number in range(3)
        }
    assert len(starts) == 1


@pytest.mark.anyio
async def test_file_of_schemas_as_written_is_verified_and_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    await play(path, NAMES[0], most=1)
    with RunFile(path) as run_file:
        header = json.loads(run_file.header.to_json())
    del header["template"]["fits_tools"]
    change(path, "UPDATE run SET header = ?", json.dumps(header))
    assert not verdict(path)["verified"]  # its prompts were built from other schemas than the changed header contains
    with pytest.raises(DeltarunnerError, match="fits_tools"):
        await play(path, NAMES[0])
