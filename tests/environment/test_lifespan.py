"""Resources that a run gets from the environment object, synchronously or asynchronously: opening and closing them."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, closing, contextmanager
from typing import Any

import anyio
import pytest

from runner import BadEnvironment, Limits, Outcome, Run, run
from runner.testing import ScriptedEngine
from tests.playing import Plain, play, recording

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends]


class Shares(Plain):
    """Environment whose lifespan calls the given functions when it opens and closes."""

    def __init__(self, enter: Callable[[], Any], leave: Callable[[], Any]) -> None:
        self.enter = enter
        self.leave = leave

    @contextmanager
    def lifespan(self) -> Iterator[None]:
        self.enter()
        yield
        self.leave()


class SharesAsynchronously(Shares):
    @asynccontextmanager
    # a lifespan may be synchronous or asynchronous
    async def lifespan(self) -> AsyncIterator[None]:  # type: ignore[override]
        async with anyio.create_task_group():  # a client of a service has one too
            self.enter()
            yield
            self.leave()


COLOURS = pytest.mark.parametrize("kind", [Shares, SharesAsynchronously], ids=["sync", "async"])


def fails() -> None:
    raise OSError("the service is gone")


@COLOURS
@pytest.mark.parametrize("exits", [fails, lambda: exit(3)], ids=["error", "exit"])
def test_lifespan_error_is_named_at_start_and_end(kind: type[Shares], exits: Callable[[], None]) -> None:
    for environment, way in ((kind(exits, int), ""), (kind(int, exits), ", at its end")):
        with pytest.raises(
            BadEnvironment, match=r"^lifespan\(\) raised (OSError: the service|SystemExit: 3)"
        ) as caught:
            run(environment, ScriptedEngine("Yes"), quiet=True)
        assert str(caught.value).endswith(way)
        assert "test_lifespan.py" in str(caught.value)


@COLOURS
async def test_an_error_inside_a_run_comes_out_of_its_lifespan_as_it_was(kind: type[Shares]) -> None:
    error = ValueError("of the loop over the run")
    with pytest.raises(ValueError, match="of the loop over the run") as caught:
        async with Run(kind(int, int), recording("Yes")):
            raise error
    assert caught.value is error


async def test_sync_lifespan_runs_in_one_reserved_thread() -> None:
    where: dict[str, int] = {}

    class Notes(Plain):
        def lifespan(self) -> AbstractContextManager[None]:
            where["made"] = threading.get_ident()
            return self.opened()

        @contextmanager
        def opened(self) -> Iterator[None]:
            where["entered"] = threading.get_ident()
            yield
            where["left"] = threading.get_ident()

        def setup(self) -> None:
            where["setup"] = threading.get_ident()

    await play(Notes, "Yes")
    assert where["made"] == where["entered"] == where["left"]
    assert where["made"] not in (where["setup"], threading.get_ident())


async def test_lifespan_opens_and_closes_thread_bound_resources() -> None:
    class Database(Plain):
        shared: sqlite3.Connection

        def lifespan(self) -> AbstractContextManager[sqlite3.Connection]:
            return closing(sqlite3.connect(":memory:"))

    async with Run(Database, recording("Yes")) as run:
        assert [t.outcome async for t in run] == [Outcome.COMPLETED]
    with pytest.raises(sqlite3.ProgrammingError):
        run._begun.shared.resources.total_changes  # noqa: B018  # the attribute raises


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_a_lifespan_that_does_not_end_is_named_after_close_seconds(
    anyio_backend: str, colour: str, release: threading.Event
) -> None:
    class Hangs(Plain):
        @contextmanager
        def lifespan(self) -> Iterator[None]:
            yield
            release.wait()

    class HangsAsynchronously(Plain):
        @asynccontextmanager
        async def lifespan(self) -> AsyncIterator[None]:
            async with anyio.create_task_group():
                yield
                await anyio.sleep_forever()

    environment = Hangs if colour == "sync" else HangsAsynchronously
    played = []
    with pytest.raises(BadEnvironment, match=r"lifespan\(\) took longer than 0.2 s to end"):
        async with Run(environment, recording("Yes"), limits=Limits(close_seconds=0.2)) as run:
            played += [t.outcome async for t in run]
    assert played == [Outcome.COMPLETED]


@COLOURS
async def test_a_lifespan_is_left_in_peace_where_the_run_is_cancelled(kind: type[Shares]) -> None:
    left: list[str] = []

    class Patient(Plain):
        @asynccontextmanager
        async def lifespan(self) -> AsyncIterator[None]:
            try:
                yield
            finally:
                await anyio.lowlevel.checkpoint()
                left.append("left")

    class PatientInAThread(Plain):
        @contextmanager
        def lifespan(self) -> Iterator[None]:
            try:
                yield
            finally:
                left.append("left")

    environment = PatientInAThread if kind is Shares else Patient
    with anyio.CancelScope() as scope:
        async with Run(environment, recording("Yes")):
            scope.cancel()
            await anyio.sleep_forever()
    assert left == ["left"]


async def test_a_lifespan_needs_no_decorator_of_either_colour() -> None:
    seen: list[str] = []

    class Synchronous(Plain):
        def lifespan(self) -> Iterator[str]:
            seen.append("opened")
            yield "here"
            seen.append("closed")

        def setup(self) -> None:
            seen.append(self.shared)

    class Asynchronous(Synchronous):
        # a lifespan may be synchronous or asynchronous
        async def lifespan(self) -> AsyncIterator[str]:  # type: ignore[override]
            seen.append("opened")
            async with anyio.create_task_group():
                yield "here"
            seen.append("closed")

    for kind in (Synchronous, Asynchronous):
        assert (await play(kind, "Yes")).outcome is Outcome.COMPLETED
        assert seen == ["opened", "here", "closed"]
        seen.clear()


async def test_lifespan_that_is_not_a_context_manager_is_refused() -> None:
    class Returns(Plain):
        def lifespan(self) -> Any:
            return {"a": 1}

    with pytest.raises(
        BadEnvironment, match=r"lifespan\(\) returned \{'a': 1\}, which is not a context manager: `yield`"
    ):
        await play(Returns, "Yes")
