"""Context variables that one hook sets: later hooks, synchronous or asynchronous, read them and may reset them."""

from __future__ import annotations

import decimal
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import pytest

from runner import Environment, Limits, Outcome, Task, reward, tool
from runner.testing import ScriptedEngine, call, play_many_async
from tests.playing import tasks

pytestmark = pytest.mark.anyio

WHO: ContextVar[str] = ContextVar("who", default="unset")


class Says(Environment):
    """Environment that sets a variable in `setup()`, and resets it in `close()`."""

    def tasks(self) -> list[Task]:
        return tasks(3)

    def setup(self) -> None:
        self.token = WHO.set(self.task.id)

    @tool
    def look(self) -> str:
        """Look."""
        return WHO.get()

    @tool
    async def peek(self) -> str:
        """Peek."""
        return WHO.get()

    @reward
    def kept(self) -> bool:
        return WHO.get() == self.task.id

    def close(self) -> None:
        WHO.reset(self.token)


class Asks(Says):
    async def setup(self) -> None:  # type: ignore[override]  # a hook may be synchronous or asynchronous
        self.token = WHO.set(self.task.id)

    async def close(self) -> None:  # type: ignore[override]  # as above
        WHO.reset(self.token)


async def results(environment: type[Environment], **options: Any) -> list[list[Any]]:
    engine = ScriptedEngine([call("look"), call("peek"), "done"])
    played = await play_many_async(environment, engine, **options)  # an error in close() fails the test
    assert [each.outcome for each in played] == [Outcome.COMPLETED] * 3, [each.error for each in played]
    assert [each.reward for each in played] == [1, 1, 1]
    return [[message["content"] for message in each.messages if message["role"] == "tool"] for each in played]


@pytest.mark.parametrize("environment", [Says, Asks])
async def test_variable_of_setup_is_seen_and_reset_by_others(environment: type[Environment]) -> None:
    assert await results(environment) == [["t0", "t0"], ["t1", "t1"], ["t2", "t2"]]
    assert WHO.get() == "unset"


async def test_later_hook_changes_what_an_earlier_one_set() -> None:
    class Changes(Says):
        @tool
        async def peek(self) -> str:
            """Peek."""
            WHO.set("async")
            return "-"

        @reward
        def kept(self) -> bool:
            return WHO.get() == "async"

    assert await results(Changes) == [["t0", "-"], ["t1", "-"], ["t2", "-"]]


class Returns(Says):
    """Environment whose `look()` resets the variable in a thread, and whose `peek()` resets it in the task."""

    def setup(self) -> None:
        self.token = WHO.set("set")

    @tool
    def look(self) -> str:
        """Look."""
        WHO.reset(self.token)
        return WHO.get()

    @reward
    def kept(self) -> bool:
        return WHO.get() == "unset"

    def close(self) -> None: ...


async def test_variable_that_a_sync_hook_resets_is_reset_in_the_task() -> None:
    assert await results(Returns) == [["unset", "unset"]] * 3


async def test_variable_that_an_async_hook_resets_is_reset_in_threads() -> None:
    class Waits(Returns):
        async def setup(self) -> None:  # type: ignore[override]  # a hook may be synchronous or asynchronous
            self.token = WHO.set("set")

        @tool
        def look(self) -> str:
            """Look."""
            return WHO.get()

        @tool
        async def peek(self) -> str:
            """Peek."""
            WHO.reset(self.token)
            return WHO.get()

    assert await results(Waits) == [["set", "unset"]] * 3


async def test_variable_is_set_and_reset_many_times() -> None:
    class Again(Returns):
        def setup(self) -> None:
            self.token = WHO.set("first")
            WHO.reset(self.token)

        @tool
        def look(self) -> str:
            """Look."""
            self.token = WHO.set("second")
            return WHO.get()

        @reward
        def kept(self) -> bool:
            WHO.reset(self.token)
            self.token = WHO.set("third")
            WHO.reset(self.token)
            return WHO.get() == "unset"

        async def close(self) -> None:  # type: ignore[override]  # as above
            assert WHO.get() == "unset"

    assert await results(Again) == [["second", "second"]] * 3


async def test_local_context_of_decimal_lasts_until_close() -> None:
    class Exact(Says):
        def setup(self) -> None:
            self.context = decimal.localcontext(prec=4 + int(self.task.id[1:]))
            self.context.__enter__()

        @tool
        def look(self) -> str:
            """Look."""
            return str(decimal.getcontext().prec)

        @tool
        async def peek(self) -> str:
            """Peek."""
            return str(decimal.getcontext().prec)

        @reward
        def kept(self) -> bool:
            return decimal.getcontext().prec == 4 + int(self.task.id[1:])

        def close(self) -> None:
            self.context.__exit__(None, None, None)

    assert await results(Exact) == [["4", "4"], ["5", "5"], ["6", "6"]]
    assert decimal.getcontext().prec == 28


async def test_token_reset_in_another_kind_of_hook_fails_with_the_fix() -> None:
    class Crosses(Says):
        @reward
        async def kept(self) -> bool:  # type: ignore[override]  # a reward may be synchronous or asynchronous
            WHO.reset(self.token)
            return True

        def close(self) -> None: ...

    played = await play_many_async(Crosses, ScriptedEngine("done"))
    assert all("Reset a context variable in a method of the kind that set it" in each.error for each in played)


async def test_variables_after_an_abandoned_call_are_the_tasks() -> None:
    seen: list[str] = []

    class Sticks(Says):
        @tool
        def look(self) -> str:
            """Look."""
            WHO.set("stuck")
            time.sleep(1)
            return "late"

        def close(self) -> None:
            seen.append(WHO.get())

    played = await play_many_async(Sticks, ScriptedEngine([call("look"), "done"]), limits=Limits(tool_seconds=0.2))
    assert [each.outcome for each in played] == [Outcome.ENV_ERROR] * 3
    assert sorted(seen) == ["t0", "t1", "t2"]


async def test_database_of_another_thread_fails_with_the_fix() -> None:
    class Queries(Says):
        def setup(self) -> None:
            with ThreadPoolExecutor(1) as other:
                self.database = other.submit(sqlite3.connect, ":memory:").result()
            self.database.execute("select 1")

        def close(self) -> None: ...

    played = await play_many_async(Queries, ScriptedEngine("done"))
    assert all("open the SQLite connection with check_same_thread=False" in each.error for each in played)
