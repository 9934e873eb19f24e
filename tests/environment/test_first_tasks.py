"""`lifespan()` and the first task of a generator are checked before an engine starts and a run file is created."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self

import anyio
import pytest

from runner import BadEnvironment, BadTask, Concurrency, Run, ScriptedEngine, Task, Trajectory
from tests.playing import Plain, until_end

ONE = Concurrency(episodes=1)


class NeverStarted(ScriptedEngine):
    """An engine that must not be entered."""

    async def __aenter__(self) -> Self:
        raise AssertionError("the engine was started")


class Lists(Plain):
    def __init__(self, given: Callable[[], Any]) -> None:
        self.given = given

    def tasks(self) -> Any:
        return self.given()


def wrong() -> list[Task]:
    return [Task("a", "hello"), Task("b", "hello", info={"seen": {"x"}})]


SAID = r"task 'b': info\['seen'\] is of type set, which a run file cannot keep: give a list, sorted\(value\)"


class Shares(Lists):
    """Environment whose tasks need something that its lifespan opens."""

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        self.opened = True
        yield
        self.opened = False


def gone() -> None:
    raise OSError("the service is gone")


class FailsToOpen(Shares):
    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        gone()
        yield


class FailsToOpenInAThread(Shares):
    @contextmanager
    def lifespan(self) -> Iterator[None]:  # type: ignore[override]  # a lifespan may be synchronous or asynchronous
        gone()
        yield


@pytest.mark.anyio
@pytest.mark.both_backends
@pytest.mark.parametrize("kind", [FailsToOpen, FailsToOpenInAThread])
async def test_lifespan_that_raises_is_refused_before_the_engine(tmp_path: Path, kind: type[Lists]) -> None:
    run_file = tmp_path / "run.db"
    with pytest.raises(BadEnvironment, match=r"lifespan\(\) raised OSError: the service is gone"):
        await until_end(Run(kind(wrong), NeverStarted("Yes"), file=run_file), [])
    assert not run_file.exists()


@pytest.mark.anyio
@pytest.mark.both_backends
@pytest.mark.parametrize("kind", [Lists, Shares])
@pytest.mark.parametrize("number", [0, 1])
async def test_only_the_first_task_of_a_generator_is_taken_ahead(
    tmp_path: Path, kind: type[Lists], number: int
) -> None:
    taken = []

    async def later() -> AsyncIterator[Task]:
        for task in wrong()[1 - number :]:
            taken.append(task.id)
            yield task

    def generated() -> Iterator[Task]:
        for task in wrong()[1 - number :]:
            taken.append(task.id)
            yield task

    for source in (later, generated):
        taken.clear()
        engine, got = ScriptedEngine("Yes") if number else NeverStarted("Yes"), list[Trajectory]()
        run = Run(kind(source), engine, file=tmp_path / f"{source.__name__}.db", concurrency=ONE)
        with pytest.raises(BadTask, match=SAID):
            await until_end(run, got)
        assert (taken, [each.task.id for each in got]) == (["a", "b"], ["a"]) if number else (["b"], [])


@pytest.mark.anyio
@pytest.mark.both_backends
@pytest.mark.parametrize("played", [2, 1])
async def test_async_tasks_may_keep_a_task_group_open(played: int) -> None:
    ended = []

    async def server() -> AsyncIterator[Task]:
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep_forever)
            try:
                for name in ("a", "b"):
                    yield Task(name, "hello")
            finally:
                ended.append(anyio.get_current_task().name)
                group.cancel_scope.cancel()

    async with Run(Lists(server), ScriptedEngine("Yes"), concurrency=ONE) as run:
        got = [(await anext(run)).task.id for _ in range(played)]
        run.drain()
    assert (got, ended) == (["a", "b"][:played], ["tasks()"])


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_a_group_of_async_tasks_that_fails_ends_the_run() -> None:
    async def dies() -> None:
        raise OSError("the server went away")

    async def server() -> AsyncIterator[Task]:
        async with anyio.create_task_group() as group:
            yield Task("a", "hello")
            group.start_soon(dies)
            yield Task("b", "hello")
            await anyio.sleep_forever()

    with pytest.raises(BadTask, match="the server went away"):
        await until_end(Run(Lists(server), ScriptedEngine("Yes"), concurrency=ONE), [])


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_tasks_that_come_late_do_not_hold_up_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    playing = anyio.Event()

    async def waits() -> AsyncIterator[Task]:
        await playing.wait()
        yield Task("a", "hello")

    async with Run(Plain, ScriptedEngine("Yes"), tasks=waits()) as run:
        playing.set()
        assert [trajectory.task.id async for trajectory in run] == ["a"]
    playing = anyio.Event()
    monkeypatch.setattr("runner.runs.start.LOOK_AHEAD_SECONDS", 0.05)
    async with Run(Lists(waits), ScriptedEngine("Yes")) as run:
        playing.set()
        assert [trajectory.task.id async for trajectory in run] == ["a"]
