"""The recording of a program equals the requests that it sends today."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.clients.recording import SCENARIOS
from tests.episode.recorded import FOLDER, NAMES, Found, recorded

pytestmark = pytest.mark.anyio


def programs() -> list[Any]:
    return [
        pytest.param(name, marks=pytest.mark.client(scenario.program.client))
        for name, scenario in SCENARIOS.items()
        if name.endswith(".tools")
    ]


def shape(body: Mapping[str, Any]) -> Any:
    """The keys of a request, of its messages or items, and of their parts."""
    messages = body.get("messages") or body["input"]
    return sorted(body), [
        (
            message.get("role"),
            message.get("type"),
            sorted(message),
            [sorted(part) for part in message["content"]] if isinstance(message.get("content"), list) else [],
        )
        for message in messages
    ]


@pytest.mark.parametrize("name", programs())
async def test_program_sends_the_recorded_requests(name: str, tmp_path: Path) -> None:
    played, sent = await SCENARIOS[name].play(tmp_path)
    known = recorded(name)
    assert [shape(each.body) for each in sent] == [shape(each.body) for each in known], played.in_words()
    found = [Found(each.verdict, each.again, frozenset(each.tolerated), each.parent, each.cause) for each in sent]
    assert found == [each.found for each in known], played.in_words()


def test_every_scenario_has_a_recording() -> None:
    assert sorted(SCENARIOS) == NAMES, f"python -m tests.clients.recording writes the missing recordings in {FOLDER}"
