"""A request that waits for a retry: its episode's clocks are paused, and a paused server does not receive it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import trio.testing
from aiohttp import web
from anyio.lowlevel import checkpoint

from runner.concurrency.clocks import Clock
from runner.engines.gate import AdmissionGate
from runner.engines.http_retries import FailureKind, HttpFailure, Retries, RetryPolicy
from runner.engines.remote.runtime import RemoteAdapters, RemoteRuntime
from runner.engines.remote.vllm import VllmGenerate
from tests.engines.remote.remote_requests import TEXT, asked, read, text_of

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]

WATCHDOG_SECONDS = 600.0


class Unreached:
    """A server that receives no request."""

    url = "http://there"


def runtime_with(retries: Retries) -> RemoteRuntime:
    server: Any = Unreached()
    return RemoteRuntime(
        server,
        VllmGenerate(),
        retries,
        gate=AdmissionGate(1, 100),
        adapters=RemoteAdapters(),
        context=100,
        version="",
        model="scripted",
        controlled=True,
        stream_interval=8,
    )


class OfEpisodes:
    @pytest.fixture
    def anyio_backend(self) -> tuple[str, dict[str, object]]:
        return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


class TestVirtualTime(OfEpisodes):
    async def test_clock_stops_while_a_request_waits_for_its_retry(self) -> None:
        retries = Retries(RetryPolicy())
        busy = HttpFailure(FailureKind.BUSY, "full", retry_after=100.0)
        began = anyio.current_time()
        with Clock(seconds=1.0) as clock:
            assert await runtime_with(retries).wait_to_retry(busy, 1)
            assert anyio.current_time() - began >= 100.0
            await anyio.sleep(0.5)
        assert not clock.fired

    async def test_clock_runs_again_after_the_wait_for_a_retry(self) -> None:
        with Clock(seconds=1.0) as clock:
            assert await runtime_with(Retries(RetryPolicy())).wait_to_retry(HttpFailure(FailureKind.BUSY, "full"), 1)
            await anyio.sleep(2.0)
        assert clock.fired


async def test_retry_waits_until_a_paused_engine_resumes(tmp_path: Path) -> None:
    async def full(_: web.Request) -> web.StreamResponse:
        await engine.pause("keep")
        return web.json_response({}, status=429)

    said: list[str] = []

    async def ask() -> None:
        said.append(text_of(await read(engine)))

    async with asked(tmp_path, troubles=[full]) as (server, engine), anyio.create_task_group() as tasks:
        with anyio.fail_after(WATCHDOG_SECONDS):
            tasks.start_soon(ask)
            while not engine.retries.counts:
                await checkpoint()
            await anyio.wait_all_tasks_blocked()
            await anyio.sleep(0.05)  # longer than the wait before a retry
            assert len(server.bodies) == 1
            await engine.resume()
            while not said:
                await checkpoint()
    assert said == [TEXT]
    assert len(server.bodies) == 2
