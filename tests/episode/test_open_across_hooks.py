"""Blocks that one hook opens and another closes, or none closes: they work, or only their episode fails."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import anyio
import pytest

from runner import Limits, Outcome, Turn, tool
from runner.options import Concurrency
from runner.testing import call
from tests.episode.opening import ADDRESS, OPENED, SERVER, Loops, Opens, assert_unharmed, children, played

# On trio, only the tests below the headline for trio run.
pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone, pytest.mark.sample_cases(3)]


@pytest.fixture(scope="module", autouse=True)
def serve_http() -> Any:
    with subprocess.Popen(
        [sys.executable, SERVER, "http"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        ADDRESS["url"] = f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
        yield
        process.terminate()


@pytest.mark.parametrize("what", OPENED)
async def test_block_opened_in_setup_may_be_closed_in_close(what: str) -> None:
    trajectories, run = await played(Opens(what, "setup", "close"))
    assert_unharmed(trajectories)
    assert not run.summary.faults


WHERE = [
    ("setup", "first"),
    ("setup", "step"),
    ("setup", "reward"),
    ("prompt", "close"),
    ("prompt", "first"),
    ("first", "second"),
    ("first", "reward"),
    ("first", "close"),
    ("second", "step"),
    ("step", "reward"),
    ("step", "close"),
    ("rollout", "first"),
    ("rollout", "reward"),
    ("rollout", "close"),
    ("reward", "close"),
]
QUICK = ["asyncio_group", "asyncio_timeout", "anyio_group", "anyio_scope", "database_pool"]


@pytest.mark.parametrize(("opens", "closes"), WHERE)
@pytest.mark.parametrize("what", QUICK)
async def test_block_opened_in_any_hook_may_be_closed_in_a_later_one(what: str, opens: str, closes: str) -> None:
    trajectories, run = await played(Loops(what, opens, closes))
    assert_unharmed(trajectories)
    assert not run.summary.faults


@pytest.mark.slow
@pytest.mark.parametrize(("opens", "closes"), [("first", "second"), ("rollout", "close"), ("setup", "reward")])
@pytest.mark.parametrize("what", ["mcp_stdio", "mcp_http", "websocket", "http_client", "aiohttp_session", "program"])
async def test_real_clients_too_may_be_closed_by_a_later_hook(what: str, opens: str, closes: str) -> None:
    trajectories, run = await played(Loops(what, opens, closes))
    assert_unharmed(trajectories)
    assert not run.summary.faults


CUT = [
    *((what, opens) for what in QUICK for opens in ("setup", "first", "rollout")),
    *((what, "setup") for what in ("mcp_stdio", "mcp_http", "websocket")),
]


@pytest.mark.parametrize(("what", "opens"), CUT)
async def test_block_open_at_the_time_limit_may_be_closed_in_close(what: str, opens: str) -> None:
    trajectories, run = await played(Loops(what, opens, "close", waits=True), limits=Limits(seconds=0.5))
    assert_unharmed(trajectories, Outcome.TIME_LIMIT)
    assert not run.summary.faults


@pytest.mark.parametrize(("what", "opens"), CUT)
async def test_block_open_in_a_cancelled_run_may_be_closed_in_close(what: str, opens: str) -> None:
    closed: list[str] = []

    class Cut(Loops):
        async def step(self, turn: Turn) -> None:
            if self.task.id == "t1":
                scope.cancel()
                await anyio.sleep_forever()

        async def close(self) -> None:
            await self.stack.aclose()  # its tasks were cancelled with the run
            closed.append(self.task.id)

    with anyio.CancelScope() as scope:
        await played(Cut(what, opens, "close"), concurrency=Concurrency(episodes=1))
    assert scope.cancelled_caught
    assert "t1" in closed
    assert children() == []


@pytest.mark.parametrize("opens", ["setup", "first"])
@pytest.mark.parametrize("what", OPENED)
async def test_block_that_no_hook_closes_is_closed_and_reported(what: str, opens: str) -> None:
    trajectories, run = await played(Opens(what, opens, "never"))
    assert_unharmed(trajectories)
    (fault,) = run.summary.faults
    assert fault.startswith("t1#0: self.stack was opened in a hook and never closed; close it in close()")


async def test_block_that_cannot_be_closed_fails_its_episode_alone() -> None:
    class Hides(Opens):
        async def setup(self) -> None:
            if self.task.id == "t1":
                group = await anyio.create_task_group().__aenter__()
                group.start_soon(anyio.sleep_forever)
                self.hidden = [group]

    trajectories, run = await played(Hides("anyio_group", "setup", "never"))
    assert [each.outcome for each in trajectories] == [Outcome.COMPLETED, Outcome.ENV_ERROR, Outcome.COMPLETED]
    assert "opened in a hook and never closed" in trajectories[1].error
    assert "self.episode.exit_stack" in trajectories[1].error
    assert not run.summary.faults


class Crosses(Opens):
    """Environment that closes the outer one of two groups first."""

    async def setup(self) -> None:
        if self.task.id == "t1":
            self.outer = await anyio.create_task_group().__aenter__()
            self.inner = await anyio.create_task_group().__aenter__()

    async def close(self) -> None:
        if self.task.id == "t1":
            await self.outer.__aexit__(None, None, None)


async def test_groups_closed_out_of_order_fail_their_episode_alone() -> None:
    trajectories, _ = await played(Crosses("anyio_group", "never", "never"))
    assert [each.outcome for each in trajectories] == [Outcome.COMPLETED, Outcome.ENV_ERROR, Outcome.COMPLETED]
    assert "in reverse order of opening" in trajectories[1].error
    assert "close(): RuntimeError" in trajectories[1].error


async def test_group_shared_by_episodes_names_lifespan() -> None:
    shared: list[Any] = []

    class Shares(Opens):
        async def setup(self) -> None:
            if self.task.id == "t0":
                shared.append(await anyio.create_task_group().__aenter__())

        async def close(self) -> None:
            if self.task.id == "t2":
                await shared[0].__aexit__(None, None, None)

    trajectories, run = await played(Shares("anyio_group", "never", "never"))
    assert [each.outcome for each in trajectories][1:] == [Outcome.COMPLETED] * 2
    said = [*run.summary.faults, *(each.error for each in trajectories)]
    assert any("open what several episodes share in lifespan()" in each for each in said), said


async def test_group_opened_beside_other_tools_fails_its_episode() -> None:
    together = [[call("first"), call("second")], "Done"]

    class Closes(Opens):
        async def close(self) -> None:
            await self.stack.aclose()

    trajectories, run = await played(Closes("anyio_group", "first", "close"), together)
    assert [each.outcome for each in trajectories][::2] == [Outcome.COMPLETED] * 2
    reported = trajectories[1].error + " ".join(run.summary.faults)
    assert "a tool that runs in parallel with other tools" in reported


# only one task may read from these
@pytest.mark.parametrize("what", [what for what in OPENED if what not in ("websocket", "program")])
async def test_tools_side_by_side_may_use_what_setup_opened(what: str) -> None:
    together = [[call("first"), call("second")], "Done"]
    trajectories, run = await played(Opens(what, "setup", "close"), together)
    assert_unharmed(trajectories)
    assert not run.summary.faults


async def test_a_tool_that_is_cut_leaves_open_what_another_one_opened() -> None:
    class Slow(Opens):
        @tool(seconds=0.2)
        async def second(self) -> str:
            """The second tool."""
            await anyio.sleep_forever()
            return "never"

    trajectories, run = await played(Slow("anyio_group", "first", "close"))
    assert_unharmed(trajectories)
    assert not run.summary.faults
    assert [message["content"] for message in trajectories[1].messages if message["role"] == "tool"] == [
        "done",
        "second took longer than 0.2 s.",
    ]


async def test_a_shield_in_a_tool_holds_until_it_is_left() -> None:
    ended: list[str] = []

    class Shielded(Opens):
        @tool(seconds=0.1)
        async def first(self) -> str:
            """The first tool."""
            try:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0.3)
                    ended.append("shielded")
                await anyio.sleep_forever()
                return "never"
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0.1)
                    ended.append("cleaned up")

    trajectories, _ = await played(Shielded("anyio_group", "never", "never"), concurrency=Concurrency(episodes=1))
    assert_unharmed(trajectories)
    assert ended == ["shielded", "cleaned up"] * 3


async def test_a_group_whose_task_dies_fails_its_episode_alone() -> None:
    class Dies(Opens):
        async def setup(self) -> None:
            if self.task.id == "t1":
                self.group = await self.stack.enter_async_context(anyio.create_task_group())
                self.group.start_soon(self.die)

        async def die(self) -> None:
            raise OSError("the server went away")

        async def step(self, turn: Turn) -> None:
            if self.task.id == "t1":
                await anyio.sleep_forever()

        async def close(self) -> None:
            await self.stack.aclose()

    trajectories, _ = await played(Dies("anyio_group", "never", "never"))
    assert [each.outcome for each in trajectories] == [Outcome.COMPLETED, Outcome.ENV_ERROR, Outcome.COMPLETED]
    assert "the server went away" in trajectories[1].error


# --- on trio, in which scopes must not overlap


ON_ANY_LOOP = [
    "anyio_group",
    "anyio_scope",
    "mcp_stdio",
    "mcp_http",
    "mcp_client",
    "http_client",
    "program",
]
"""Kinds that need no asyncio. The others are `asyncio`'s own, `aiohttp`, `websockets` and a pool like `asyncpg`'s."""
ON_TRIO = pytest.mark.parametrize("anyio_backend", ["trio"])


@ON_TRIO
# raised by httpx2
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("opens", ["setup", "prompt"])
@pytest.mark.parametrize("what", ON_ANY_LOOP)
async def test_on_trio_close_may_close_what_setup_opened(what: str, opens: str) -> None:
    trajectories, run = await played(Opens(what, opens, "close"))
    assert_unharmed(trajectories)
    assert not run.summary.faults


@ON_TRIO
@pytest.mark.parametrize("what", ["anyio_group", "mcp_stdio"])
async def test_on_trio_block_that_no_hook_closes_is_closed_and_reported(what: str) -> None:
    trajectories, run = await played(Opens(what, "setup", "never"))
    assert_unharmed(trajectories)
    (fault,) = run.summary.faults
    assert fault.startswith("t1#0: self.stack was opened in a hook and never closed")


@ON_TRIO
@pytest.mark.parametrize(("opens", "closes"), [("setup", "reward"), ("first", "second"), ("rollout", "close")])
async def test_on_trio_block_that_cannot_be_closed_fails_its_episode(opens: str, closes: str) -> None:
    class NeverUses(Loops):
        async def at(self, hook: str) -> None:  # a group that is closed out of order is unusable
            self.use = None
            await super().at(hook)

    trajectories, _ = await played(NeverUses("anyio_group", opens, closes))
    assert [each.outcome for each in trajectories][::2] == [Outcome.COMPLETED] * 2
    assert trajectories[1].outcome is Outcome.ENV_ERROR
    assert "self.episode.exit_stack" in trajectories[1].error


@ON_TRIO
async def test_on_trio_groups_closed_out_of_order_name_the_fix() -> None:
    trajectories, run = await played(Crosses("anyio_group", "never", "never"))
    assert [each.outcome for each in trajectories][::2] == [Outcome.COMPLETED] * 2
    said = trajectories[1].error + " ".join(run.summary.faults)
    assert "misnesting detected!: a task group or a cancel scope is open; close it in close()" in said, said


@ON_TRIO
@pytest.mark.parametrize("does", ["waits", "dies", "cancels"])
@pytest.mark.parametrize("opens", ["setup", "rollout", "first", "reward"])
async def test_on_trio_a_hidden_group_fails_its_episode_alone(opens: str, does: str) -> None:
    class Hides(Loops):
        async def at(self, hook: str) -> None:
            if self.task.id == "t1" and hook == opens:
                group = await anyio.create_task_group().__aenter__()
                group.start_soon(self.die if does == "dies" else anyio.sleep_forever)
                if does == "cancels":
                    group.cancel_scope.cancel()
                self.hidden = [group]

        async def die(self) -> None:
            raise OSError("the server went away")

    trajectories, run = await played(Hides("anyio_group", "never", "never"))
    assert [each.outcome for each in trajectories] == [Outcome.COMPLETED, Outcome.ENV_ERROR, Outcome.COMPLETED]
    assert "opened in a hook and never closed" in trajectories[1].error + " ".join(run.summary.faults)


@ON_TRIO
async def test_on_trio_a_cancelled_run_closes_what_setup_opened() -> None:
    closed: list[str] = []

    class Cut(Opens):
        async def step(self, turn: Turn) -> None:
            if self.task.id == "t1":
                scope.cancel()
                await anyio.sleep_forever()

        async def close(self) -> None:
            await self.stack.aclose()
            closed.append(self.task.id)

    with anyio.CancelScope() as scope:
        await played(Cut("mcp_stdio", "setup", "close"))
    assert scope.cancelled_caught
    assert "t1" in closed
    assert children() == []
