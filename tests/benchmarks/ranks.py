"""Two data-parallel ranks in one engine: share of late prompts in the cache, with our pinning and with vLLM's choice.

Both play the same episodes. The result is a count, not a time, so it is the same on any machine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio

from runner import Concurrency, Conversation, Environment, Run, Sampling, Task, VllmEngine, reward
from runner.models import demo_model
from runner.runs.event_loop import on_event_loop
from tests.benchmarks.figures import Figure, main
from tests.engines.small_model import small_model

EPISODE_COUNT = 24
TURN_COUNT = 6
PLACE_COUNT = 8
WORDS = "Tell me of the river, the mill, the town and the road that goes there. " * 12


class Talk(Environment):
    """Environment with many turns, each with a text to read."""

    def tasks(self) -> list[Task]:
        return [Task(id=str(number), prompt=f"Story {number}. {WORDS}") for number in range(EPISODE_COUNT)]

    async def rollout(self, conversation: Conversation) -> None:
        for turn in range(TURN_COUNT):
            await conversation.generate(sampling=Sampling(max_tokens=24, stop_ids=()))
            # Episodes continue in another order than they paused, as they do after tools.
            await anyio.sleep(0.01 * (int(self.task.id) * 7 % 5))
            conversation.add(f"And then, in chapter {turn}? Say it in other words than before, please.")

    @reward
    def spoke(self) -> bool:
        return True


def measure() -> Iterator[Figure]:
    """Share of the prompts' ids that the cache of two ranks had, and the number of late turns that changed rank."""
    with tempfile.TemporaryDirectory() as folder:
        model = small_model(Path(folder), demo_model(), layers=2)
        for way, (cached, moved) in on_event_loop(_both, model).items():
            yield Figure(f"ids of prompts in the cache of two ranks, {way}", "%", (cached,))
            yield Figure(f"late turns on another rank than the one before, {way}", "%", (moved,))


async def _both(model: Path) -> dict[str, tuple[float, float]]:
    async with VllmEngine(model, template="pythonic", data_parallel_size=2, max_num_seqs=PLACE_COUNT) as engine:
        pinned = await _played(engine)
        llm = engine.vllm.llm
        llm.add_request = _anywhere(llm.add_request)
        return {"each episode on its own": pinned, "as vLLM chooses": await _played(engine)}


def _anywhere(add_request: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def add(*given: Any, data_parallel_rank: int | None, **named: Any) -> Any:
        return await add_request(*given, **named)

    return add


async def _played(engine: VllmEngine) -> tuple[float, float]:
    await engine.reset_prefix_cache()
    before = engine.stats()
    client = engine.vllm.llm.engine_core
    choose, ranks = client.get_core_engine_for_request, dict[str, list[bytes]]()

    def watch(request: Any) -> bytes:
        chosen: bytes = choose(request)
        ranks.setdefault(request.external_req_id.partition("/")[0], []).append(chosen)
        return chosen

    client.get_core_engine_for_request = watch
    try:
        async with Run(Talk, engine, concurrency=Concurrency(episodes=EPISODE_COUNT)) as run:
            async for _ in run:
                pass
        await engine.idle()
    finally:
        client.get_core_engine_for_request = choose
    after = engine.stats()
    cached = (after.prefix_hits - before.prefix_hits) / (after.prefix_queries - before.prefix_queries)
    late = [turn != earlier for turns in ranks.values() for earlier, turn in pairwise(turns)]
    return 100 * cached, 100 * sum(late) / len(late)


if __name__ == "__main__":
    main(measure)
