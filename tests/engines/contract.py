"""Entries of the engine contract: one for each engine of ours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from runner.engines.remote.dialect import ServerDialect
from runner.engines.remote.engine import RemoteEngine
from runner.engines.vllm.engine import VllmEngine
from runner.engines.weights import read_folder
from runner.testing import Latency, ScriptedEngine
from runner.testing.engine_pool import PooledEngine
from runner.testing.engine_under_test import ENDLESS_TOKENS, EngineUnderTest, RunContractTest
from runner.tokens.tokenizer import load_tokenizer
from tests.cluster.in_process import HostedHere
from tests.engines.function.functions import engine_over
from tests.engines.lora import adapter_tensors, save_adapter
from tests.engines.remote.loopback import Loopback, serving
from tests.engines.remote.model_folder import byte_model
from tests.engines.remote.model_server import ModelServer

TEXT = "".join(chr(33 + 7 * number % 90) for number in range(ENDLESS_TOKENS + 1))
ContractTest = Callable[[EngineUnderTest], Awaitable[None]]


def scripted(backend: str, **settings: Any) -> Callable[[pytest.FixtureRequest], RunContractTest]:
    async def main(promise: ContractTest) -> None:
        async with ScriptedEngine(TEXT, **{"places": 2, "latency": Latency(between=1), **settings}) as engine:
            await promise(EngineUnderTest(engine, "any folder", "any folder"))

    return lambda _: lambda promise: anyio.run(main, promise, backend=backend)


def vllm(request: pytest.FixtureRequest) -> RunContractTest:
    """The engine in float32, in which greedy ids do not depend on how requests are batched."""
    at_home: PooledEngine = request.getfixturevalue("float32_engine")
    weights: Path = request.getfixturevalue("small_model_folder")
    adapter: Path = request.getfixturevalue("tmp_path") / "adapter"
    shapes = {name: form.shape for name, form in read_folder(weights).forms.items()}
    save_adapter(adapter, adapter_tensors(shapes, seed=1))
    engine: Any = at_home.inner
    assert isinstance(engine, VllmEngine)
    under_test = EngineUnderTest(engine, weights, adapter, round_trip=engine.devices)

    async def settled() -> None:
        # The scheduler counts during steps, and without requests there are no steps.
        await under_test.sample(1)
        await engine.idle()

    async def main(promise: ContractTest) -> None:
        under_test.settled = settled
        await promise(under_test)

    return lambda promise: at_home.home.call(main, promise)


def external_vllm(request: pytest.FixtureRequest) -> RunContractTest:
    """An engine over the same vLLM, in the form of an `AsyncLLM` that another program started."""
    at_home: PooledEngine = request.getfixturevalue("float32_engine")
    owner: Any = at_home.inner

    async def main(promise: ContractTest) -> None:
        async with VllmEngine.over(owner.vllm.llm, template=owner.template, places=2) as engine:
            refused = frozenset({"keep", "sleep", "update_weights", "add_adapter", "remove_adapter"})
            await promise(EngineUnderTest(engine, refused=refused, settled=engine.idle))

    return lambda promise: at_home.home.call(main, promise)


def remote(dialect: ServerDialect, **settings: Any) -> Callable[[pytest.FixtureRequest], RunContractTest]:
    """An engine of a server on this event loop, which has a scripted engine."""

    def prepare(request: pytest.FixtureRequest) -> RunContractTest:
        folder = byte_model(request.getfixturevalue("tmp_path") / "model")

        async def main(promise: ContractTest) -> None:
            # Ids have some time between them, since they are sent over this machine's network.
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
    while server.open or server.engine.stats().open:  # noqa: ASYNC110  # the system reports a closed connection later
        await anyio.sleep(0.001)


def remote_on_vllm(request: pytest.FixtureRequest) -> RunContractTest:
    """An engine of a vLLM server in another process."""
    server: ModelServer = request.getfixturevalue("model_server")

    async def main(promise: ContractTest) -> None:
        async with RemoteEngine(server.url, server.folder, places=2) as engine:
            await promise(remote_under_test(engine, server.until_idle))

    return lambda promise: anyio.run(main, promise)


def remote_under_test(engine: RemoteEngine, settled: Callable[[], Awaitable[None]]) -> EngineUnderTest:
    calls = {"update_weights", "add_adapter", "remove_adapter"}
    if engine.describe()["dialect"] == ServerDialect.SGLANG:
        calls |= {"sleep", "wake"}
    return EngineUnderTest(
        engine,
        "any folder",
        "any folder",
        settled=settled,
        refused=frozenset(calls),
    )


def over_a_function(backend: str) -> Callable[[pytest.FixtureRequest], RunContractTest]:
    """A token engine whose function uses a scripted engine."""

    async def main(promise: ContractTest) -> None:
        async with (
            ScriptedEngine(TEXT, places=2, latency=Latency(between=1)) as inner,
            engine_over(inner) as engine,
        ):
            refused = frozenset({"keep", "sleep", "update_weights", "add_adapter", "remove_adapter"})
            await promise(EngineUnderTest(engine, "any folder", "any folder", refused=refused))

    return lambda _: lambda promise: anyio.run(main, promise, backend=backend)


def hosted(backend: str) -> Callable[[pytest.FixtureRequest], RunContractTest]:
    """A scripted engine that a host owns, as if in another process."""

    async def main(promise: ContractTest) -> None:
        async with HostedHere(ScriptedEngine(TEXT, places=2, latency=Latency(between=1))) as engine:
            refused = frozenset({"pause", "keep", "sleep", "wake", "update_weights", "add_adapter", "remove_adapter"})
            await promise(
                EngineUnderTest(engine, "any folder", "any folder", settled=engine.refresh_stats, refused=refused)
            )

    return lambda _: lambda promise: anyio.run(main, promise, backend=backend)


ENGINES: dict[str, Any] = {
    "scripted": scripted("asyncio"),
    "scripted on trio": scripted("trio"),
    "scripted, finish alone": scripted("asyncio", lone_finish=True),
    "scripted, slow start": scripted("trio", latency=Latency(first=5, between=3)),
    "function": over_a_function("asyncio"),
    "function on trio": over_a_function("trio"),
    "hosted": hosted("asyncio"),
    "remote, vllm's": remote(ServerDialect.VLLM),
    "remote, completions": remote(ServerDialect.COMPLETIONS),
    "remote, sglang's": remote(ServerDialect.SGLANG),
    "remote, sglang's, incremental": remote(ServerDialect.SGLANG, incremental=True),
    "remote, a real one": pytest.param(
        remote_on_vllm, marks=[pytest.mark.engine, pytest.mark.sample_units("unusual engines", 7, unit="remote")]
    ),
    "vllm, external": pytest.param(external_vllm, marks=[pytest.mark.engine("float32_engine"), pytest.mark.whole]),
    "vllm": pytest.param(
        vllm, marks=[pytest.mark.engine("float32_engine"), pytest.mark.sample_units("contract on vLLM", 2)]
    ),
}
