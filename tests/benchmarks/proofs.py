"""Cost of a weight proof beside an update, and ids per second of `score`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any

import anyio

from runner import Sampling, VllmEngine
from runner.models import demo_model
from runner.training import weight_proof
from tests.benchmarks.figures import Figure, main

ROUNDS = 5
SEQUENCES = 32
LENGTH = 256
SAMPLED = 32


def measure() -> Iterator[Figure]:
    """On the real engine and the demo model, in float32."""
    yield from anyio.run(_measured)


async def _measured() -> list[Figure]:
    return [figure async for figure in _figures()]


async def _figures() -> AsyncIterator[Figure]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.float32)
    tensors = model.state_dict()
    async with VllmEngine("smollm2-135m", dtype="float32", max_model_len=1024) as engine:
        proof = weight_proof(model, engine.tokenizer, size=LENGTH)
        await engine.prove(proof)
        alone, proven, made = list[float](), list[float](), list[float]()
        for _ in range(ROUNDS):  # in turns, so that both see the same machine
            alone.append(await _seconds(engine.update_weights(tensors)))
            proven.append(await _seconds(engine.update_weights(tensors, proof=proof)))
            began = time.perf_counter()
            weight_proof(model, engine.tokenizer, size=LENGTH)
            made.append(time.perf_counter() - began)
        yield Figure("an update by state dict, demo model", "s", tuple(alone))
        yield Figure(f"  with a proof of {LENGTH} ids", "s", tuple(proven))
        yield Figure("  to make that proof", "s", tuple(made))
        ids = list(proof.ids)
        for name, sampling, length in (
            ("scored in one pass", None, LENGTH),
            ("scored as sampled, at a temperature", Sampling(temperature=0.7), SAMPLED + 1),
        ):
            rates = [await _ids_per_second(engine, ids[:length], sampling) for _ in range(ROUNDS)]
            yield Figure(f"{name}: {SEQUENCES} sequences of {length} ids", "ids/s", tuple(rates))


async def _ids_per_second(engine: VllmEngine, ids: list[int], sampling: Sampling | None) -> float:
    async def score(number: int) -> None:
        await engine.score([number, *ids[1:]], sampling=sampling)

    began = time.perf_counter()
    async with anyio.create_task_group() as group:
        for number in range(SEQUENCES):
            group.start_soon(score, number + 1)
    return SEQUENCES * (len(ids) - 1) / (time.perf_counter() - began)


async def _seconds(call: Awaitable[Any]) -> float:
    began = time.perf_counter()
    await call
    return time.perf_counter() - began


if __name__ == "__main__":
    main(measure)
