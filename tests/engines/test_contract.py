"""The contract of engines, which is a part of the kit, for each of our engines, and the effects of an engine's end.

The effects on streams are tested only on engines that may be ended here. For the vLLM engine, which many tests share,
they are tested elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
from anyio.lowlevel import checkpoint

from runner.engines.base import Engine, FinishReason
from runner.engines.remote.engine import RemoteEngine
from runner.engines.vllm.engine import VllmEngine
from runner.errors import EngineDead
from runner.testing import Latency, Reply, ScriptedEngine
from runner.testing.engine_contract import EngineContract
from runner.testing.engine_under_test import EngineUnderTest, RunContractTest, drain, ids_of, wait_until
from tests.engines.contract import ENGINES, TEXT


class TestOurEngines(EngineContract):
    """The whole contract, for each engine."""

    @pytest.fixture(params=list(ENGINES.values()), ids=list(ENGINES))
    def run_test(self, request: pytest.FixtureRequest) -> RunContractTest:
        run_test: RunContractTest = request.param(request)
        return run_test


# --- before the engine is entered, and its end


@pytest.mark.anyio
@pytest.mark.parametrize(
    "make",
    [
        lambda: ScriptedEngine(TEXT),
        lambda: VllmEngine("never loaded"),
        lambda: RemoteEngine("http://127.0.0.1:1", "never loaded"),
    ],
    ids=["scripted", "vllm", "remote"],
)
async def test_an_engine_that_is_not_running_answers_nothing(make: Callable[[], Engine]) -> None:
    engine = make()
    asked = EngineUnderTest(engine)
    assert not engine.is_alive()
    with pytest.raises(EngineDead, match="not running"):
        await engine.health()
    with pytest.raises(EngineDead, match="not running"):
        await engine.stream(asked.request()).__aenter__()


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_close_ends_requests_inside_and_at_the_gate() -> None:
    asked = EngineUnderTest(ScriptedEngine(TEXT, latency=Latency(between=1), places=1))
    errors: list[str] = []

    async def read() -> None:
        try:
            async with asked.engine.stream(asked.request()) as stream:
                await drain(stream, [])
        except EngineDead as error:
            errors.append(str(error))

    async with anyio.create_task_group() as tasks, asked.engine as engine:
        tasks.start_soon(read)
        tasks.start_soon(read)
        await wait_until(lambda: (engine.stats().open, engine.stats().waiting) == (1, 1))
    assert len(errors) == 2
    assert not engine.is_alive()
    await asked.assert_nothing_open()


# --- settings of the scripted engine alone


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_ids_that_wait_for_others_to_make_a_delta_are_in_the_rest() -> None:
    """vLLM does the same at a stream interval above 1: its last output contains sampled ids that were not sent."""
    reply = Reply(ids=range(48, 60), chunks=(1, 8))
    async with ScriptedEngine(reply, latency=Latency(between=1)) as engine:
        asked = EngineUnderTest(engine)
        stream = engine.stream(asked.request())
        async with stream:
            first = await anext(stream)
            for _ in range(4):
                await checkpoint()
        assert list(first.token_ids) == [48]
        assert 1 <= len(ids_of(stream.rest)) < 8
        assert ids_of(stream.rest) == list(range(49, 49 + len(ids_of(stream.rest))))
        assert stream.finish is not None
        assert stream.finish.reason is FinishReason.ABORT
        await asked.assert_nothing_open()
