"""Helpers for tests of endpoints: an episode that is served to a client loop, and requests as bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import orjson

from runner import Conversation, Endpoint, Outcome, Trajectory
from runner.testing import assert_exact
from runner.turn_events import TurnProgress
from tests.episode.awkward import misspelling
from tests.playing import Plain, play_all, recording

__all__ = ["RUN", "ImmediateSink", "chat_body", "events_of", "http", "openai_client", "served", "user"]

RUN: Any = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def user(text: str) -> Any:
    return {"role": "user", "content": text}


class ImmediateSink:
    """A sink that calls a function with each event at once."""

    def __init__(self, hear: Callable[[TurnProgress], None]) -> None:
        self.put = hear

    def close(self) -> None:
        pass

    async def forward(self) -> None:
        pass


async def served(
    loop: Callable[[Endpoint], Awaitable[None]],
    says: Any,
    *,
    outcome: Outcome = Outcome.COMPLETED,
    serve: dict[str, Any] | None = None,
    **options: Any,
) -> list[Trajectory]:
    """Return the trajectories of an episode that is served to an external loop, after checking that they are exact."""

    class Served(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            async with self.episode.serve(**serve or {}) as endpoint:
                await loop(endpoint)

    # Verification does not support the vocabulary of this engine.
    is_engine = hasattr(says, "stream")
    engine = says if is_engine else recording(says, template="hermes") if "file" in options else misspelling(says)
    trajectories = await play_all(Served, engine, **options)
    for trajectory in trajectories:
        assert trajectory.outcome is outcome, trajectory.error
        assert_exact(trajectory, engine)
        mask = sum(sum(segment.log.mask()) for segment in trajectory.segments)
        kept = [turn for turn in trajectory.turns if not turn.retried]
        assert mask == sum(turn.end - turn.start for turn in kept), "every sampled id is trained once, in its turn"
    return trajectories


@asynccontextmanager
async def http(endpoint: Endpoint, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an endpoint, which sends the endpoint's key."""
    headers = {"authorization": f"Bearer {endpoint.api_key}"}
    async with httpx.AsyncClient(base_url=endpoint.base_url, headers=headers, timeout=60, **settings) as client:
        yield client


def openai_client(endpoint: Endpoint) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)


def chat_body(messages: list[dict[str, Any]], **further: Any) -> dict[str, Any]:
    return {"model": "any", "messages": messages, **further}


def events_of(text: str) -> list[Any]:
    """Return the data of a stream's events, without the end event."""
    found = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [orjson.loads(each) for each in found if each != "[DONE]"]
