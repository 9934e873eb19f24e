"""What the scripted engine itself costs: a turn, a token, and the loop's lag while 10,000 streams trickle."""

import gc
import time
from collections.abc import Iterator

import anyio
import pytest

from runner.engines.base import GenerationRequest
from runner.options import Sampling
from runner.testing import Latency, ScriptedEngine

TEXT = "[add(a=17, b=25)]"
TURNS = 20
SAMPLING = Sampling.defaults()


@pytest.fixture(autouse=True)
def _collector_settings_of_run() -> Iterator[None]:
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


async def talk(engine: ScriptedEngine, number: int, turns: int) -> None:
    session = engine.session()
    for turn in range(turns):
        request = GenerationRequest(
            name=f"{number}/main/{turn}",
            prompt=[1] * 350,
            sampling=SAMPLING,
            stop_ids=engine.stop_ids,
            seed=number,
            session=session,
        )
        async with engine.stream(request) as stream:
            async for _ in stream:
                pass
    engine.close_session(session)


def microseconds(episodes: int, engine: ScriptedEngine, turns: int = TURNS) -> float:
    async def main() -> float:
        async with engine:
            started = time.process_time()
            async with anyio.create_task_group() as tasks:
                for number in range(episodes):
                    tasks.start_soon(talk, engine, number, turns)
            return (time.process_time() - started) / episodes / turns * 1e6

    return anyio.run(main, backend_options={"use_uvloop": True})


def test_a_turn() -> None:
    for name, engine in {
        "whole": ScriptedEngine(TEXT, chunks="whole"),
        "in groups": ScriptedEngine(TEXT),
        "id by id": ScriptedEngine(TEXT, chunks=1),
    }.items():
        print(f"\na turn of {len(TEXT) + 1} ids, {name}: {microseconds(256, engine):.1f} us")


def test_a_token_that_trickles() -> None:
    for streams in (1_000, 10_000):
        engine = ScriptedEngine(TEXT, chunks=1, latency=Latency(between=1), places=streams)
        cost = microseconds(streams, engine, turns=3) / (len(TEXT) + 1)
        print(f"\na token, {streams} streams, one id a delta, each woken for it: {cost:.2f} us")


def test_lag_while_ten_thousand_streams_trickle() -> None:
    lags: list[float] = []

    async def measure() -> None:
        await anyio.sleep(2.0)  # until all have begun
        while True:
            before = time.perf_counter()
            await anyio.sleep(0.005)
            lags.append(time.perf_counter() - before - 0.005)

    async def main() -> None:
        latency = Latency(between=1, first=8)
        engine = ScriptedEngine("x" * 30, chunks=1, latency=latency, places=10_000, tick=0.25)
        async with engine, anyio.create_task_group() as tasks:
            tasks.start_soon(measure)
            async with anyio.create_task_group() as talking:
                for number in range(10_000):
                    talking.start_soon(talk, engine, number, 1)
            tasks.cancel_scope.cancel()

    anyio.run(main, backend_options={"use_uvloop": True})
    lags.sort()
    quantiles = ", ".join(f"p{q} {lags[int(len(lags) * q / 100)] * 1e3:.1f} ms" for q in (50, 90, 99))
    print(f"\nlag, 10,000 streams of one id each 0.25 s: {quantiles}, most {lags[-1] * 1e3:.1f} ms")
