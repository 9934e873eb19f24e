"""Clocks of requests, on trio's virtual clock: they are paused only while all clients wait."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest
import trio.testing

from runner import Conversation, EpisodeOver, Limits, Outcome
from runner.concurrency.clocks import Clock, ParallelRequest, Waiting
from runner.testing import Fault, Reply
from tests.episode.client_recordings import RUN
from tests.playing import Plain, assert_nothing_open, play_all, recording

pytestmark = pytest.mark.anyio

ASKED: Any = [{"role": "user", "content": "Mend it."}]
STALLS = Reply("It was a long way.", fault=Fault.stall(at=5), chunks=1)


@pytest.fixture
def anyio_backend(clock: trio.testing.MockClock) -> tuple[str, dict[str, object]]:
    return "trio", {"clock": clock}


async def test_clock_stops_only_while_all_requests_wait(clock: trio.testing.MockClock) -> None:
    with Clock(10) as over:
        with ParallelRequest():
            with Waiting():
                clock.jump(100)
                await anyio.lowlevel.checkpoint()
                assert not over.fired, "the only client waits"
            with ParallelRequest(), Waiting():
                clock.jump(4)
                await anyio.lowlevel.checkpoint()
                assert over.scope.deadline < float("inf"), "one of two clients waits, and the other works"
                with Waiting():
                    clock.jump(100)
                    await anyio.lowlevel.checkpoint()
                    assert not over.fired, "both clients wait"
        clock.jump(7)
        await anyio.lowlevel.checkpoint()
    assert over.fired, "the clients worked for 4 and 7 seconds"


async def test_request_from_outside_the_rollout_is_cut_at_seconds(clock: trio.testing.MockClock) -> None:
    class Outside(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            handed.set()
            await anyio.sleep_forever()

    async def outsider() -> None:
        await handed.wait()
        with pytest.raises(EpisodeOver):
            await episodes[0].chat(ASKED, tools=[RUN])

    class Exposing(Outside):
        def setup(self) -> None:
            episodes.append(self.episode)

    handed = anyio.Event()
    episodes: list[Any] = []
    async with anyio.create_task_group() as group:
        group.start_soon(outsider)
        group.start_soon(_let_pass, clock, handed)
        engine = recording([STALLS], template="hermes")
        (trajectory,) = await play_all(Exposing, engine, limits=Limits(seconds=60))
    assert (trajectory.outcome, trajectory.limit) == (Outcome.TIME_LIMIT, "seconds")
    assert trajectory.turns[0].finish == "abort"
    assert_nothing_open(engine)


async def _let_pass(clock: trio.testing.MockClock, handed: anyio.Event) -> None:
    await handed.wait()
    await anyio.wait_all_tasks_blocked()
    clock.jump(61)
