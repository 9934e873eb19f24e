"""A source of tasks that fails ends the run with one error, and finished episodes are kept."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runner import BadTask, Outcome, Run, RunFile, ScriptedEngine, Task, Trajectory
from tests.faults.suspects import AsyncPupils, recurses, speak
from tests.playing import Plain, play_all, tasks, until_end

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends]


def exits() -> None:
    sys.exit(3)


def raises() -> None:
    raise OSError("the dataset is gone")


async def asynchronous(deed: Callable[[], Any]) -> AsyncIterator[Task]:
    for number in range(8):
        yield Task(id=str(number), prompt="hello")
    deed()


def synchronous(deed: Callable[[], Any]) -> Iterator[Task]:
    for number in range(8):
        yield Task(id=str(number), prompt="hello")
    deed()


class Hearing:
    """A source whose `finished` fails at its fourth result."""

    def __init__(self, deed: Callable[[], Any]) -> None:
        self.deed = deed
        self.finished_count = 0

    def __iter__(self) -> Iterator[Task]:
        return (Task(id=str(number), prompt="hello") for number in range(8))

    def finished(self, trajectory: Trajectory) -> None:
        self.finished_count += 1
        if self.finished_count == 4:
            self.deed()


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("deed", [raises, exits, recurses])
@pytest.mark.parametrize("source", [synchronous, asynchronous, Hearing])
async def test_failing_source_ends_the_run_and_keeps_finished_episodes(
    tmp_path: Path, source: Callable[[Any], Any], deed: Callable[[], Any]
) -> None:
    file = tmp_path / "run.db"
    run = Run(AsyncPupils(), ScriptedEngine(speak), tasks=source(deed), file=file)
    played: list[Trajectory] = []

    async def read() -> None:
        async with run:
            async for trajectory in run:
                played.append(trajectory)  # noqa: PERF401  # trajectories before the error count

    with pytest.raises(BadTask, match=r"(tasks|finished)\(\).* raised .*test_task_sources|recurs"):
        await read()
    with RunFile(file) as run_file:
        stored = {row.id for row in run_file if row.outcome is Outcome.COMPLETED}
        assert {trajectory.id for trajectory in played if trajectory.outcome is Outcome.COMPLETED} <= stored
        assert stored
        assert not run_file.complete


async def cancelled() -> None:
    waiting = asyncio.create_task(asyncio.sleep(9))
    waiting.cancel()
    await waiting


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_tasks_that_raise_a_cancellation_end_the_run_with_its_reason(anyio_backend: str) -> None:
    class Cut(Plain):
        async def tasks(self) -> AsyncIterator[Task]:  # type: ignore[override]  # asynchronous instead
            yield Task(id="a", prompt="x")
            await cancelled()

    got: list[Trajectory] = []
    with pytest.raises(BadTask, match=r"tasks\(\) cancelled"):
        await until_end(Run(Cut(), ScriptedEngine("Yes")), got)
    assert [trajectory.task.id for trajectory in got] == ["a"]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_source_that_raises_a_cancellation_ends_the_run(anyio_backend: str) -> None:
    class Source(list[Task]):
        async def finished(self, trajectory: Any) -> None:
            await cancelled()

    with pytest.raises(BadTask, match=r"finished\(\) .* cancelled"):
        await play_all(Plain(), "Yes", tasks=Source(tasks(2)))
