"""Our own endpoint as a chat API: a run with a scripted engine serves it while the test sends requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from runner import Conversation, Endpoint, Limits, Run, Trajectory
from runner.engines.chat.engine import ChatEngine
from runner.testing import ScriptedEngine
from tests.playing import Plain

__all__ = ["asking_endpoint", "endpoint_of"]


@asynccontextmanager
async def endpoint_of(says: Any, served: list[Trajectory] | None = None, **settings: Any) -> AsyncIterator[Endpoint]:
    """Yield an endpoint with these replies. Its trajectories are in `served` afterwards."""
    ready, over = anyio.Event(), anyio.Event()
    endpoints: list[Endpoint] = []

    class Served(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            async with self.episode.serve() as endpoint:
                endpoints.append(endpoint)
                ready.set()
                await over.wait()

    async def serve() -> None:
        engine = ScriptedEngine(says, template="hermes", **settings)
        async with Run(Served, engine, limits=Limits(seconds=None)) as run:
            async for trajectory in run:
                if served is not None:
                    served.append(trajectory)

    async with anyio.create_task_group() as group:
        group.start_soon(serve)
        await ready.wait()
        try:
            yield endpoints[0]
        finally:
            over.set()


def asking_endpoint(endpoint: Endpoint, **options: Any) -> ChatEngine:
    return ChatEngine("model", base_url=endpoint.base_url, api_key=endpoint.api_key, **options)
