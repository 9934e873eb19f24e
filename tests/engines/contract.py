"""What the contract of engines is tried with: an entry for each engine, and how a promise is played on it.

A promise asks for nothing that only one kind of engine could do: greedy turns say the same each time they are asked,
and that is what they are compared with.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from runner.engines.base import Delta, DeltaStream, Engine, GenerationRequest
from runner.engines.remote.dialect import ServerDialect
from runner.engines.remote.engine import RemoteEngine
from runner.engines.state import EngineState
from runner.engines.vllm.engine import VllmEngine
from runner.engines.weights import read_folder
from runner.errors import BadControl
from runner.options import Sampling
from runner.testing import Latency, ScriptedEngine
from runner.testing.engine_pool import EngineAtHome
from runner.tokens.tokenizer import load_tokenizer
from tests.engines import controlling
from tests.engines.lora import adapter_tensors, save_adapter
from tests.engines.remote.loopback import Loopback, serving
from tests.engines.remote.model_folder import byte_model
from tests.engines.remote.model_server import ModelServer

WATCHDOG = 120.0
SHORT = 12  # ids
LONG = 32  # ids: what is asked of the engine meanwhile comes before the last of them
ENDLESS = 900  # ids: nobody waits for the last of them
PROMPT = range(60, 100)  # ids of every vocabulary
TEXT = "".join(chr(33 + 7 * number % 90) for number in range(ENDLESS + 1))


# --- the engines


async def nothing_to_wait_for() -> None:
    """The engine's statistics are those of this moment."""


@dataclass
class UnderTest:
    """An engine, and what the promises must know of it."""

    engine: Engine
    weights: Any = None
    """New weights that fit; the engine says the same with them."""
    adapter: Any = None
    """A LoRA adapter that fits."""
    settled: Callable[[], Awaitable[None]] = nothing_to_wait_for
    """Returns when the engine's statistics know of all that was left."""
    refused: frozenset[str] = frozenset()
    """The calls of a trainer that this engine refuses, by name."""
    round_trip: Callable[[], Awaitable[object]] | None = None
    """Asks the engine something and returns with its answer; None where its devices can be asked for."""
    asked: int = 0

    def request(
        self, max_tokens: int = ENDLESS, *, prompt: Any = PROMPT, adapter: str | None = None, **fields: Any
    ) -> GenerationRequest:
        """A turn of so many ids that come one at a time, unless a stop id ends it."""
        self.asked += 1
        return GenerationRequest(
            name=f"episode/main/{self.asked}",
            prompt=list(prompt),
            sampling=replace(Sampling.defaults(), max_tokens=max_tokens, temperature=0.0, adapter=adapter),
            acts_on_deltas=True,
            **fields,
        )

    async def said(self, max_tokens: int) -> list[int]:
        """What a turn that nobody disturbs says."""
        return (await controlling.ask(self.engine, self.request(max_tokens)))[0]

    async def quiet(self) -> None:
        """Return when what had left the engine was read, and it could have sampled more."""
        for _ in range(20):
            await (self.round_trip or self.engine.devices)()
            await checkpoint()

    async def assert_nothing_open(self) -> None:
        with anyio.fail_after(WATCHDOG):
            await self.settled()
        stats = self.engine.stats()
        assert (stats.open, stats.waiting, stats.live_sessions) == (0, 0, 0)


Test = Callable[["Keep"], None]
Promise = Callable[[UnderTest], Awaitable[None]]
Keep = Callable[[Promise], None]
"""Plays a promise on an engine, on the event loop that it belongs to."""


def scripted(backend: str, **settings: Any) -> Callable[[pytest.FixtureRequest], Keep]:
    async def main(promise: Promise) -> None:
        async with ScriptedEngine(TEXT, **{"places": 2, "latency": Latency(between=1), **settings}) as engine:
            await promise(UnderTest(engine, "any folder", "any folder"))

    return lambda _: lambda promise: anyio.run(main, promise, backend=backend)


def vllm(request: pytest.FixtureRequest) -> Keep:
    """The engine in float32, where greedy ids are the same however requests are batched."""
    at_home: EngineAtHome = request.getfixturevalue("float32_engine")
    weights: Path = request.getfixturevalue("small_model_folder")
    adapter: Path = request.getfixturevalue("tmp_path") / "adapter"
    shapes = {name: form.shape for name, form in read_folder(weights).forms.items()}
    save_adapter(adapter, adapter_tensors(shapes, seed=1))
    engine: Any = at_home.inner
    assert isinstance(engine, VllmEngine)
    under_test = UnderTest(engine, weights, adapter)

    async def settled() -> None:
        # Its scheduler counts as it steps, and where nothing is asked it does not.
        await under_test.said(1)
        await engine.idle()

    async def main(promise: Promise) -> None:
        under_test.settled = settled
        await promise(under_test)

    return lambda promise: at_home.home.call(main, promise)


def remote(dialect: ServerDialect, **settings: Any) -> Callable[[pytest.FixtureRequest], Keep]:
    """A server on this event loop, whose engine is a scripted one."""

    def prepare(request: pytest.FixtureRequest) -> Keep:
        folder = byte_model(request.getfixturevalue("tmp_path") / "model")

        async def main(promise: Promise) -> None:
            # Some time between ids: what is written comes by way of this machine's network.
            engine = ScriptedEngine(
                TEXT, tokenizer=load_tokenizer(folder), places=2, latency=Latency(between=1), tick=0.0005
            )
            async with (
                serving(engine, dialect=dialect, **settings) as server,
                RemoteEngine(server.url, folder, dialect=dialect) as asked,
            ):
                await promise(remote_under_test(asked, partial(until_quiet, server)))

        return lambda promise: anyio.run(main, promise)

    return prepare


async def until_quiet(server: Loopback) -> None:
    while server.open or server.engine.stats().open:  # noqa: ASYNC110  # it is told of a closed connection by the system
        await anyio.sleep(0.001)


def remote_on_vllm(request: pytest.FixtureRequest) -> Keep:
    """A server of vLLM's in a process of its own."""
    server: ModelServer = request.getfixturevalue("model_server")

    async def main(promise: Promise) -> None:
        async with RemoteEngine(server.url, server.folder, places=2) as engine:
            await promise(remote_under_test(engine, server.until_idle))

    return lambda promise: anyio.run(main, promise)


def remote_under_test(engine: RemoteEngine, settled: Callable[[], Awaitable[None]]) -> UnderTest:
    calls = {"update_weights", "add_adapter", "remove_adapter"}
    if engine.describe()["dialect"] == ServerDialect.SGLANG:
        calls |= {"sleep", "wake"}
    return UnderTest(
        engine,
        "any folder",
        "any folder",
        settled=settled,
        refused=frozenset(calls),
        round_trip=engine.health,
    )


ENGINES: dict[str, Any] = {
    "scripted": scripted("asyncio"),
    "scripted on trio": scripted("trio"),
    "scripted, finish alone": scripted("asyncio", lone_finish=True),
    "scripted, slow start": scripted("trio", latency=Latency(first=5, between=3)),
    "remote, vllm's": remote(ServerDialect.VLLM),
    "remote, completions": remote(ServerDialect.COMPLETIONS),
    "remote, sglang's": remote(ServerDialect.SGLANG),
    "remote, sglang's, incremental": remote(ServerDialect.SGLANG, incremental=True),
    "remote, a real one": pytest.param(remote_on_vllm, marks=pytest.mark.engine),
    "vllm": pytest.param(vllm, marks=pytest.mark.engine("float32_engine")),
}


def promised(promise: Promise, *, by: Mapping[str, Callable[[UnderTest], Awaitable[object]]] | None = None) -> Test:
    """A test that every engine keeps a promise, and has nothing open afterwards.

    Args:
        promise: what is promised.
        by: the calls of a trainer that it takes; an engine that refuses one of them refuses it by its name instead, and
            goes on as it was.
    """

    async def main(under_test: UnderTest) -> None:
        refused = [call for name, call in (by or {}).items() if name in under_test.refused]
        with anyio.fail_after(WATCHDOG):
            for call in refused:
                await assert_refused(under_test, call)
            if not refused:
                await promise(under_test)
        await under_test.assert_nothing_open()

    def test(keep: Keep) -> None:
        keep(main)

    test.__name__, test.__qualname__, test.__doc__ = promise.__name__, promise.__qualname__, promise.__doc__
    return test


def controlled(**calls: Callable[[UnderTest], Awaitable[object]]) -> Callable[[Promise], Test]:
    """The same of a promise that takes these calls of a trainer."""
    return partial(promised, by=calls)


async def assert_refused(under_test: UnderTest, call: Callable[[UnderTest], Awaitable[object]]) -> None:
    engine = under_test.engine
    undisturbed = await under_test.said(SHORT)
    with pytest.raises(BadControl):
        await call(under_test)
    assert engine.state is EngineState.RUNNING
    assert await under_test.said(SHORT) == undisturbed


# --- reading


async def drain(stream: DeltaStream, read: list[Delta], at: int = 10**9) -> None:
    """Read until `at` ids have come."""
    async for delta in stream:
        read.append(delta)
        if len(ids_of(read)) >= at:
            return


def ids_of(deltas: list[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def logprobs_of(deltas: list[Delta]) -> list[float]:
    return [logprob for delta in deltas for logprob in delta.logprobs or ()]


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await checkpoint()
