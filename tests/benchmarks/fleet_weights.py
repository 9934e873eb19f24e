"""Update of the weights of two workers with real engines during episodes: time of the call, and of each pause."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio

from runner import RayEngines, Run, VllmEngine
from runner.models import demo_model
from runner.runs.event_loop import on_event_loop
from tests.benchmarks.figures import Figure, main
from tests.cluster.ray_games import TalksLong
from tests.engines.small_model import small_model

ROUND_COUNT = 5
LAYERS: int | None = None
"""Number of layers of the demo model that are used. All of its layers are 270 MB."""
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}


def measure() -> Iterator[Figure]:
    """A state dict through Ray's object store into two engines."""
    with TemporaryDirectory() as folder:
        model = demo_model() if LAYERS is None else small_model(Path(folder), demo_model(), layers=LAYERS)
        size = (model / "model.safetensors").stat().st_size / 1e6
        seconds, pauses, loads = zip(*on_event_loop(_updates, model), strict=True)
    yield Figure(f"two workers take {size:.0f} MB of weights, in total", "s", seconds, under=1.5)
    yield Figure("of that, the longest that turns were paused before loading", "s", pauses)
    yield Figure("and while they were loaded", "s", loads)
    paused = tuple(pause + load for pause, load in zip(pauses, loads, strict=True))
    yield Figure("longest pause of an engine", "s", paused, under=0.5)


async def _updates(model: Path) -> list[tuple[float, float, float]]:
    from safetensors.torch import load_file

    weights: dict[str, Any] = load_file(model / "model.safetensors")
    inner = VllmEngine(str(model), max_num_seqs=4, max_model_len=512)
    measured = []
    async with (
        RayEngines(inner, workers=2, gpus=0, runtime_env={"env_vars": ON_CPU}) as engine,
        Run(TalksLong, engine, group_size=8) as run,
        anyio.create_task_group() as group,
    ):
        # A trainer also has a batch before its first update, and the first steps of an engine take seconds.
        await anext(run)
        group.start_soon(_drop, run)
        for _ in range(ROUND_COUNT):
            began = time.perf_counter()
            update = await engine.update_weights(weights, mode="keep")
            measured.append((time.perf_counter() - began, update.pause_seconds, update.load_seconds))
            await anyio.sleep(0.5)
        group.cancel_scope.cancel()
    return measured


async def _drop(run: Run) -> None:
    async for _ in run:
        pass


if __name__ == "__main__":
    main(measure)
