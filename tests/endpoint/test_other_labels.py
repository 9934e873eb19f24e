"""Clients with different labels that continue the same turn: each has its own thread and its own verdicts."""

from __future__ import annotations

from typing import Any

import pytest

from runner import Endpoint
from tests.endpoint.serving import RUN, chat_body, http, served, user
from tests.playing import recording

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize(
    ("asked", "verdicts"),
    [
        # A label, and the number of the turn that the request continues, from 0. Without a number, the request starts a
        # history.
        (["a", "b 0", "a 0"], ["new", "append", "append"]),
        (["a", "b 0", "a 0", "a 2", "b 1"], ["new", "append", "append", "append", "append"]),
        (["a", "a 0", "b 0"], ["new", "append", "branch"]),
        (["a", "a 0", "a 1", "b 0", "c 1"], ["new", "append", "append", "branch", "branch"]),
        (["a", "b 0", "c 0"], ["new", "append", "branch"]),
        (["a", "b 0", "b 0"], ["new", "append", "branch"]),
        (["a", "a 0", "a 0"], ["new", "append", "rewound"]),
        (["a", "a 0", "b 0", "a 0"], ["new", "append", "branch", "rewound"]),
        (["", " 0", " 0"], ["new", "append", "rewound"]),
    ],
    ids=" then ".join,
)
async def test_verdict_depends_only_on_the_clients_own_thread(asked: Any, verdicts: list[str]) -> None:
    async def loop(endpoint: Endpoint) -> None:
        histories: list[list[Any]] = []
        async with http(endpoint) as client:
            for number, each in enumerate(asked):
                label, _, before = each.partition(" ")
                messages = [*(histories[int(before)] if before else ()), user(f"Question {number}.")]
                headers = {"x-deltarunner-thread": label} if label else {}
                answer = await client.post("/chat/completions", json=chat_body(messages, tools=[RUN]), headers=headers)
                assert answer.status_code == 200, answer.text
                histories.append([*messages, answer.json()["choices"][0]["message"]])

    trajectories = await served(loop, recording(lambda _: "Done.", template="hermes"))
    requests = [request for trajectory in trajectories for request in trajectory.requests]
    assert [each.verdict for each in sorted(requests, key=lambda request: request.number)] == verdicts
