"""One engine for several processes. If a process dies, the requests that it had are free for the others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup

from runner import DeltarunnerError, EngineDead, Sampling
from runner.cluster.engine_client import HostedEngine
from runner.cluster.engine_host import SILENT_SECONDS, STATS_SECONDS, SentRequest
from runner.engines.base import DeltaStream, GenerationRequest, Session
from runner.testing import Latency, ScriptedEngine, VirtualClock
from tests.cluster.in_process import Answer, HostedHere, InProcessWorker

LET_GO = SILENT_SECONDS + 3 * STATS_SECONDS


class Line:
    """The connection from a guest to the host. After a cut the host receives nothing, as from a dead process.

    Messages that were sent during the cut arrive when the connection continues.
    """

    def __init__(self, process: InProcessWorker, group: TaskGroup) -> None:
        self.is_cut = False
        self._process = process
        self._group = group
        self._held: list[tuple[Answer, str, tuple[Any, ...]]] = []

    def send(self, call: str, *arguments: Any) -> Awaitable[Any]:
        if not self.is_cut:
            return self._process.send(call, *arguments)
        answer = Answer()
        self._held.append((answer, call, arguments))
        return answer

    def release(self) -> None:
        self.is_cut = False
        for held in self._held:
            self._group.start_soon(self._pass_on, *held)

    async def _pass_on(self, answer: Answer, call: str, arguments: tuple[Any, ...]) -> None:
        try:
            answer.succeed(await self._process.send(call, *arguments))
        except DeltarunnerError as error:
            answer.fail(error)

    def kill(self) -> None: ...


class Guest(HostedEngine):
    """The engine of a guest that is connected to a host."""

    def __init__(self, owner: HostedHere) -> None:
        super().__init__()
        self.line = Line(owner.process, owner.process._launcher.group)

    async def _reach(self, exit_stack: AsyncExitStack) -> Line:
        return self.line


def asks(session: Session | None = None, max_tokens: int = 4) -> GenerationRequest:
    sampling = replace(Sampling.defaults(), max_tokens=max_tokens, temperature=0.0)
    return GenerationRequest(name="e/main/0", prompt=list(range(60, 70)), sampling=sampling, session=session)


def shared(play: Callable[[HostedHere, Guest], Awaitable[None]], **settings: Any) -> None:
    """Play with an owner of an engine that samples an id a second, and with a guest."""

    async def main() -> None:
        engine = ScriptedEngine("word " * 2000, latency=Latency(between=1), tick=1.0, **settings)
        async with HostedHere(engine) as owner, Guest(owner) as guest:
            await play(owner, guest)

    VirtualClock().run(main)


async def said(stream: DeltaStream) -> list[int]:
    async with stream:
        return [token for delta in [each async for each in stream] for token in delta.token_ids]


@asynccontextmanager
async def begun(engine: HostedEngine, session: Session) -> AsyncIterator[None]:
    """Return a session with one turn, which is still open, and a stream of it that has begun."""
    async with engine.stream(asks(session, 4000)) as stream:
        await anext(aiter(stream))
        yield


def test_resources_of_a_dead_process_of_a_shared_engine_are_freed() -> None:
    async def play(owner: HostedHere, guest: Guest) -> None:
        engine: Any = owner.host.engine
        async with begun(guest, guest.session()):
            guest.line.is_cut = True
            with anyio.move_on_after(SILENT_SECONDS / 2):
                await said(owner.stream(asks(owner.session())))
                raise AssertionError("there was a place")
            assert (engine.stats().open, engine.stats().live_sessions) == (1, 1)
            await anyio.sleep(SILENT_SECONDS)
            assert (engine.stats().open, engine.stats().live_sessions) == (0, 0)
            assert len(owner.host._clients) == 1
            assert len(await said(owner.stream(asks(owner.session())))) == 4
            assert engine.stats().live_sessions == 1

    shared(play, places=1)


def test_a_process_that_lives_is_not_let_go_however_little_it_asks() -> None:
    async def play(owner: HostedHere, guest: Guest) -> None:
        session = guest.session()
        await said(guest.stream(asks(session)))
        await anyio.sleep(5 * LET_GO)
        assert guest.is_alive()
        assert owner.host.engine.stats().live_sessions == 1

    shared(play)


def test_processes_stay_registered_after_the_host_was_blocked() -> None:
    async def play(owner: HostedHere, guest: Guest) -> None:
        owner.process.held_in["stats"] = anyio.Event()
        await anyio.sleep(5 * LET_GO)
        owner.process.held_in["stats"].set()
        await anyio.sleep(3)
        assert len(owner.host._clients) == 2
        assert guest.is_alive()

    shared(play)


def test_removed_process_that_comes_back_gets_engine_dead() -> None:
    async def play(owner: HostedHere, guest: Guest) -> None:
        async with guest.stream(asks(guest.session(), 4000)) as stream:
            guest.line.is_cut = True
            await anyio.sleep(LET_GO)
            guest.line.release()
            with pytest.raises(
                EngineDead, match=f"^the engine got no request from this client for {SILENT_SECONDS:g} s, and closed"
            ):
                [each async for each in stream]
        assert not guest.is_alive()
        assert len(owner.host._clients) == 1

    shared(play)


def test_process_that_leaves_gets_an_empty_answer_to_its_wait() -> None:
    async def play(owner: HostedHere, guest: Guest) -> None:
        host = owner.host
        await host.greet("third")
        answer = owner.process.send("event", "third")
        await anyio.sleep(1)
        await host.leave("third")
        with anyio.fail_after(1):
            assert await answer == []

    shared(play)


def test_late_calls_of_a_process_that_left_do_not_register_it() -> None:
    async def play(owner: HostedHere, guest: Guest) -> None:
        host = owner.host
        before = set(host._clients)
        await host.greet("third")
        await host.leave("third")
        await host.cut("third", 1)
        await host.close_session("third", 1)
        await host.stream("third", 2, SentRequest(asks(), session=3, late=False, beside=None))
        with pytest.raises(EngineDead):
            await host.event("third")
        with pytest.raises(EngineDead):
            await host.stats("third")
        assert set(host._clients) == before
        assert host.engine.stats().live_sessions == 0

    shared(play)


def test_cut_before_its_stream_works_and_a_late_one_is_forgotten() -> None:
    async def play(owner: HostedHere, guest: Guest) -> None:
        host = owner.host
        name = guest._name
        (client,) = (client for known, client in host._clients.items() if known == name)
        await host.cut(name, 7)
        with anyio.fail_after(1):
            await host.stream(name, 7, SentRequest(asks(max_tokens=4000), session=None, late=False, beside=None))
        assert not client.cut
        await host.cut(name, 7)
        assert client.cut
        await anyio.sleep(LET_GO)
        assert not client.cut

    shared(play)
