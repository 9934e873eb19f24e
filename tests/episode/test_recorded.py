"""Recordings of agent programs: they contain no word of a program, and each request gets its recorded verdict."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest

from runner import Outcome
from runner.chat_requests import Again, Tolerated, Verdict
from runner.endpoint.client_config import CLIENTS
from runner.episode.client_messages import VOLATILE
from runner.testing import assert_exact
from tests.episode.awkward import misspelling
from tests.episode.recorded import FOLDER, NAMES, recorded, replay, replies
from tests.filler import MARK
from tests.recorded_words import IDENTIFIER, KEPT, STAYS

pytestmark = pytest.mark.anyio

TESTED = {client.name: client.tested for client in CLIENTS}

MAX_RECORDING_BYTES = 64_000

OWN = {
    "form": {"chat", "responses", "anthropic"},
    "ends": {"delivered", "undelivered", "cut"},
    "verdict": {*Verdict},
    "again": {*Again},
    "tolerated": {*Tolerated},
    "cause": {"start", "branch", "again", "retry", "environment", "tools", "foreign", "retold", "edited"},
}
"""The other recorded facts about a request, apart from its verdict."""

TAGS = re.compile(r"<think>|</think>|<tool_call>|</tool_call>")
PLACEHOLDER = re.compile(r"[a-z]+_\$\d+\$(_\d+j?)?")


def strays(value: Any, key: str = "") -> Iterator[str]:
    """Return the parts of a recorded value that are neither filler nor words that may stay in their place."""
    match value:
        case dict():
            for name, each in value.items():
                if not IDENTIFIER.fullmatch(name):
                    yield from strays_of_text(name)
                yield from strays(each, name)
        case list():
            for each in value:
                yield from strays(each, key)
        case str():
            yield from strays_of_string(value, key)


def strays_of_string(text: str, key: str) -> Iterator[str]:
    stays = STAYS.get(key)
    if text in KEPT.get(key, ()) or PLACEHOLDER.fullmatch(text) or (stays is not None and stays.fullmatch(text)):
        return
    if key in ("name", "namespace"):
        if re.search(r"[^\W\d_]", MARK.sub("", text)):
            yield text
    elif key in ("arguments", "x-codex-turn-metadata") and text.startswith("{"):
        yield from strays(json.loads(text))
    else:
        yield from strays_of_text(text)


def strays_of_text(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        volatile = next((mark for mark in VOLATILE if line.startswith(mark)), "")
        if MARK.sub("", line.removeprefix(volatile)).strip():
            yield line


def strays_of_words(says: str) -> Iterator[str]:
    for part in TAGS.split(says):
        yield from strays(json.loads(part)) if part.strip().startswith("{") else strays_of_text(part)


@pytest.mark.parametrize("name", NAMES)
def test_every_text_of_a_recording_of_a_tested_version_is_filler(name: str) -> None:
    read = json.loads((FOLDER / f"{name}.json").read_text())
    assert name == f"{name.partition('.')[0]}.{read.pop('scenario')}"
    assert TESTED[read.pop("client")] == read.pop("version")
    requests = read.pop("requests")
    for request in requests:
        for key, allowed in OWN.items():
            said = request.pop(key)
            assert allowed.issuperset(said if isinstance(said, list) else [said])
    found = chain(strays(read), *(strays_of_words(each.pop("says")) for each in requests), strays(requests))
    assert [*found] == []


@pytest.mark.parametrize(
    "value",
    [
        {"content": "You are an agent."},
        {"content": "«1:2» and «2:3»"},
        {"content": "«1:2».\n# «2:3»"},
        {"You are": 1},
        {"role": "an agent"},
        {"content": "user"},
        {"name": "«1:2»_up"},
        {"arguments": '{"command": "ls"}'},
        {"required": ["You are"]},
        {"id": "call_0123456789ab_0"},
        {"content": "x-anthropic-billing-header: cch=a1;"},
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_word_that_belongs_to_no_wire_form_is_found(value: Any) -> None:
    assert [*strays([value])] != []


def test_a_recording_is_small() -> None:
    assert NAMES
    sizes = {name: (FOLDER / f"{name}.json").stat().st_size for name in NAMES}
    assert {name: size for name, size in sizes.items() if size > MAX_RECORDING_BYTES} == {}


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("name", NAMES)
async def test_every_replayed_request_has_its_recorded_verdict(name: str) -> None:
    requests = recorded(name)
    engine = misspelling(replies(requests), context=1_000_000)
    replayed = await replay(requests, engine)
    assert replayed.found == [request.found for request in requests]
    assert replayed.forms == [request.form for request in requests]
    for trajectory in replayed.trajectories:
        assert (trajectory.outcome, trajectory.error) == (Outcome.COMPLETED, "")
        assert_exact(trajectory, engine)
        kept = sum(turn.end - turn.start for turn in trajectory.turns if not turn.retried)
        assert sum(sum(segment.log.mask()) for segment in trajectory.segments) == kept
