"""Requests of an engine with several ranks: the rank of each request, and the effect of a rank's death on others."""

from __future__ import annotations

from typing import Any

import pytest

from runner.engines.base import FinishReason
from runner.engines.gate import AdmissionGate
from runner.errors import EngineDead
from tests.engines.vllm.test_runtime import Collector, Llm, engine_of, request

pytestmark = pytest.mark.anyio


class Routing(Llm):
    """Client that records the rank of each request."""

    def __init__(self) -> None:
        super().__init__()
        self.routed: list[dict[str, Any]] = []

    async def add_request(self, *given: Any, **named: Any) -> Collector:
        self.routed.append(named)
        return await super().add_request(*given, **named)


@pytest.mark.parametrize(
    ("ranks", "routed"),
    [(1, [{}, {}, {}]), (2, [{"data_parallel_rank": 0}, {"data_parallel_rank": 1}, {"data_parallel_rank": 0}])],
)
async def test_a_request_names_its_sessions_rank_where_there_are_several(
    ranks: int, routed: list[dict[str, int]]
) -> None:
    llm = Routing()
    engine = engine_of(llm)
    engine.vllm.gate = AdmissionGate(4, 10_000, ranks=ranks)
    sessions = [engine.session(), engine.session()]
    for turn, session in enumerate([*sessions, sessions[0]]):
        async with engine.stream(request(session=session)) as stream:
            llm.collectors[turn].send(1, finish="length")
            await anext(stream)
    assert llm.routed == [{"lora_request": None, **each} for each in routed]
    assert engine.stats().ranks == (0,) * ranks


@pytest.mark.parametrize("late", [[], [3]], ids=["nothing", "an id"])
async def test_abort_by_vllm_after_a_rank_died_raises_that_death(late: list[int]) -> None:
    llm = Llm()
    engine = engine_of(llm)
    (core,) = engine.vllm.process.cores
    stream = engine.stream(request())
    async with stream:
        llm.collectors[0].send(1, 2)
        assert list((await anext(stream)).token_ids) == [1, 2]
        vars(core).update(exitcode=-9, name="EngineCore_DP1")
        llm.collectors[0].send(*late, finish="abort")
        if late:
            assert list((await anext(stream)).token_ids) == late, "the sampled ids are kept"
        with pytest.raises(EngineDead, match=r"the process of its data-parallel rank 1 was ended by SIGKILL"):
            await anext(stream)
    assert stream.finish is not None
    assert stream.finish.reason is FinishReason.ERROR
    assert not engine.is_alive()


async def test_abort_by_vllm_of_a_living_engine_ends_as_an_abort() -> None:
    llm = Llm()
    engine = engine_of(llm)
    stream = engine.stream(request())
    async with stream:
        llm.collectors[0].send(3, finish="abort")
        assert [list(delta.token_ids) async for delta in stream] == [[3]]
    assert stream.finish is not None
    assert stream.finish.reason is FinishReason.ABORT
    assert engine.is_alive()
