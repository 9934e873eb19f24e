"""Sandboxes: cost of a turn with a command compared with a plain tool, sandboxes a minute, and the event loop's lag."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import anyio

from runner import Containers, Environment, Limits, SandboxOptions, ScriptedEngine, Task, reward, tool
from runner.interop import Terminal
from runner.sandbox.containers import ENGINE_VARIABLE
from runner.testing import call, play_many
from tests.benchmarks.figures import Figure, main
from tests.sandbox.engines import IMAGE_FOLDER, engine_or_reason

ROUND_COUNT = 2
CALL_COUNT = 4
MAX_OPEN_SANDBOXES = 4
"""Sandboxes that are opened at once."""
SANDBOX_COUNT = 8
LAG_SANDBOX_COUNT = 32
COMMAND_COUNT = 1
"""Commands in each sandbox while the lag is measured."""


class Plain(Environment):
    """Environment with the same turns, and a tool that does nothing."""

    limits = Limits(turns=50)

    @tool
    async def bash(self, command: str) -> str:
        """Return at once."""
        return "x"

    @reward
    async def done(self) -> bool:
        return True


def measure() -> Iterator[Figure]:
    """Sandboxes: a command compared with a plain tool, sandboxes a minute, and the loop's lag with 32 sandboxes."""
    engine, reason = engine_or_reason()
    if not engine:
        print(reason)
        return
    os.environ[ENGINE_VARIABLE] = engine
    anyio.run(partial(_opened, Containers(engine), 1))  # builds the image
    yield Figure(
        f"{CALL_COUNT + 1} turns with a plain tool, an episode",
        "ms",
        tuple(_played(Plain()) for _ in range(ROUND_COUNT)),
    )
    with_sandbox = tuple(_played(Terminal(str(IMAGE_FOLDER), "true", memory_mb=64)) for _ in range(ROUND_COUNT))
    yield Figure(f"{CALL_COUNT + 1} turns with a command in a sandbox, its creation and removal", "ms", with_sandbox)
    times = anyio.run(_exec_milliseconds, Containers(engine))
    yield Figure("exec of true in a sandbox, one after the other", "ms", times)
    rates = []
    for _ in range(ROUND_COUNT):
        began = time.perf_counter()
        anyio.run(_opened, Containers(engine), SANDBOX_COUNT)
        rates.append(SANDBOX_COUNT * 60 / (time.perf_counter() - began))
    yield Figure(f"sandboxes opened, used once and removed, {MAX_OPEN_SANDBOXES} at once", "a minute", tuple(rates))
    lags = sorted(anyio.run(_lags, Containers(engine)))
    for name, share in (("median", 0.5), ("99 %", 0.99), ("longest", 1)):
        value = lags[min(len(lags) - 1, int(share * len(lags)))]
        yield Figure(f"lag of the loop with {LAG_SANDBOX_COUNT} sandboxes, {name}", "ms", (value,))


def _played(environment: Environment) -> float:
    replies: Any = [*([call("bash", command="true")] for _ in range(CALL_COUNT)), "done"]
    began = time.perf_counter()
    (trajectory,) = play_many(environment, ScriptedEngine(replies), tasks=[Task(id="one", prompt="Do it.")])
    if trajectory.reward != 1:
        raise AssertionError(f"{trajectory.outcome.value}: {trajectory.error}")
    return (time.perf_counter() - began) * 1e3


async def _opened(provider: Containers, count: int) -> None:
    limiter = anyio.CapacityLimiter(MAX_OPEN_SANDBOXES)

    async def one() -> None:
        async with limiter, provider.open(SandboxOptions(image=IMAGE_FOLDER, memory_mb=64)) as sandbox:
            await sandbox.exec(["true"])

    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(one)


async def _exec_milliseconds(provider: Containers) -> tuple[float, ...]:
    times = []
    async with provider.open(SandboxOptions(image=IMAGE_FOLDER, memory_mb=64)) as sandbox:
        for _ in range(10):
            began = time.perf_counter()
            await sandbox.exec(["true"])
            times.append((time.perf_counter() - began) * 1e3)
    return tuple(times)


async def _lags(provider: Containers) -> list[float]:
    """Lag of a timer that fires every 5 ms, while all sandboxes are opened, used and removed."""
    lags: list[float] = []

    async def watch() -> None:
        while True:
            began = time.perf_counter()
            await anyio.sleep(0.005)
            lags.append((time.perf_counter() - began - 0.005) * 1e3)

    async def one() -> None:
        async with provider.open(SandboxOptions(image=IMAGE_FOLDER, memory_mb=64)) as sandbox:
            for _ in range(COMMAND_COUNT):
                await sandbox.exec(["sh", "-c", "seq 20000"])

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        async with anyio.create_task_group() as boxes:
            for _ in range(LAG_SANDBOX_COUNT):
                boxes.start_soon(one)
        group.cancel_scope.cancel()
    return lags


if __name__ == "__main__":
    main(measure)
