"""MCP servers as tools, by real servers of the SDK: pages, several of them, errors, death, silence."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from runner import BadEnvironment, Environment, Limits, Outcome, ScriptedEngine, Task, Trajectory, reward
from runner.interop import McpDataset, McpServers
from runner.testing import call, play_many_async

pytestmark = [pytest.mark.anyio, pytest.mark.slow]  # each episode starts a server, which imports its SDK

HERE = Path(__file__).parent
SERVER = f"{sys.executable} {HERE / 'mcp_server.py'}"
PAGES = f"{sys.executable} {HERE / 'mcp_pages.py'}"
ROWS = [{"prompt": f"Question {number}?", "answer": "done"} for number in range(3)]


async def played(replies: Any, servers: Any = SERVER, *, rows: Any = ROWS[:1], **options: Any) -> list[Trajectory]:
    limits = options.pop("limits", Limits())
    environment = McpDataset(servers, rows, answer="answer", score="contains", **options)
    return await play_many_async(environment, ScriptedEngine(replies), limits=limits, breaker=1)


def results(trajectory: Trajectory) -> list[str]:
    return [str(each["content"]) for each in trajectory.messages if each["role"] == "tool"]


def children() -> list[psutil.Process]:
    """The server processes of episodes."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended
            command = " ".join(each.cmdline())
            if "mcp_" in command and not command.endswith(" http"):
                found.append(each)
    return found


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server over HTTP."""
    command = [sys.executable, str(HERE / "mcp_server.py"), "http"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/mcp"
        process.terminate()


async def test_tools_of_a_command_answer_calls() -> None:
    (trajectory,) = await played([[call("add", a=2, b=3)], [call("fail")], [call("picture")], "done"])
    assert trajectory.reward == 1, trajectory.error
    added, failed, picture = results(trajectory)
    assert added == "5"
    assert "no such town" in failed
    assert picture == "[image, image/png, 396 bytes]"
    assert children() == []


async def test_tools_of_a_url_answer_calls(url: str) -> None:
    (trajectory,) = await played([[call("add", a=2, b=3)], "done"], url)
    assert (results(trajectory), trajectory.reward) == (["5"], 1)


async def test_all_pages_of_tools_are_read() -> None:
    (trajectory,) = await played([[call("tool_0")], [call("tool_2")], "done"], PAGES)
    assert results(trajectory) == ["called tool_0", "called tool_2"]
    assert [tool["function"]["name"] for tool in trajectory.segments[0].tools] == ["tool_0", "tool_1", "tool_2"]


async def test_a_result_without_the_promised_content_is_an_error_to_read() -> None:
    (trajectory,) = await played([[call("tool_0")], "done"], f"{PAGES} promising")
    (said,) = results(trajectory)
    assert "did not return structured content" in said
    assert trajectory.reward == 1, trajectory.error


async def test_several_servers_play_together(url: str) -> None:
    (trajectory,) = await played([[call("tool_1")], [call("add", a=1, b=1)], "done"], [PAGES, url])
    assert results(trajectory) == ["called tool_1", "2"]


async def test_equal_names_are_refused_or_get_a_prefix(url: str) -> None:
    servers = {"near": SERVER, "far": url}
    (refused,) = await played("done", servers)
    assert refused.outcome is Outcome.ENV_ERROR
    assert "'near' and 'far' both have a tool 'add': give prefix=True" in refused.error
    (trajectory,) = await played([[call("near_add", a=1, b=1)], [call("far_count")], "done"], servers, prefix=True)
    assert results(trajectory)[0] == "2"


async def test_each_episode_has_a_connection_of_its_own_by_default() -> None:
    trajectories = await played([[call("count")], "done"], rows=ROWS)
    assert [results(each) for each in trajectories] == [["1"]] * 3


async def test_one_connection_may_be_shared() -> None:
    trajectories = await played([[call("count")], "done"], rows=ROWS, one_connection=True)
    assert sorted(results(each)[0] for each in trajectories) == ["1", "2", "3"]
    assert children() == []


async def test_a_server_that_dies_fails_its_episode_alone() -> None:
    def reply(model_call: Any) -> Any:
        if "Question 1" in model_call.prompt:
            return [call("die")]
        return "done"

    trajectories = await played(reply, rows=ROWS)
    outcomes = {str(each.task.prompt): each.outcome for each in trajectories}
    assert outcomes["Question 1?"] is Outcome.ENV_ERROR
    assert [outcomes["Question 0?"], outcomes["Question 2?"]] == [Outcome.COMPLETED] * 2
    (error,) = [each.error for each in trajectories if each.error]
    assert "ServerFailed: MCP server '1' is gone" in error
    assert "the disk is on fire" in error
    assert children() == []


async def test_a_silent_server_costs_the_call_and_not_the_episode() -> None:
    (trajectory,) = await played([[call("hang")], [call("add", a=1, b=1)], "done"], limits=Limits(tool_seconds=0.5))
    first, second = results(trajectory)
    assert "longer than 0.5 s" in first
    assert second == "2"
    assert trajectory.reward == 1


async def test_a_late_answer_is_not_that_of_the_next_call() -> None:
    replies = [[call("slow")], [call("slow")], [call("add", a=1, b=1)], "done"]
    (trajectory,) = await played(replies, limits=Limits(tool_seconds=0.3))
    assert results(trajectory)[2] == "2"


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ("no-such-program x", "MCP server '1': 'no-such-program x': the program is not on PATH"),
        ("'open", "invalid shell syntax"),
        ('{"a": ', "not JSON"),
        ([], "give a command or a URL"),
    ],
    ids=["missing", "quotes", "JSON", "none"],
)
def test_a_server_that_cannot_be_started_is_refused(server: Any, said: str) -> None:
    with pytest.raises(BadEnvironment, match=said):
        McpServers(server)


async def test_a_server_that_ends_at_once_or_is_not_there_is_named() -> None:
    gone = f"{sys.executable} -c \"import sys; sys.exit('no licence')\""
    (trajectory,) = await played("done", gone)
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "MCP server '1' cannot be connected" in trajectory.error
    assert "no licence" in trajectory.error
    (trajectory,) = await played("done", "http://127.0.0.1:9/mcp")
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "MCP server '1' cannot be connected" in trajectory.error


async def test_servers_add_tools_to_an_own_environment() -> None:
    class Own(Environment):
        servers = McpServers(SERVER)

        def tasks(self) -> list[Task]:
            return [Task(id="one", prompt="Add.")]

        async def setup(self) -> None:
            self.tools += await self.servers.connect(self.episode.exit_stack)

        @reward
        def right(self) -> bool:
            return "5" in self.episode.text

    (trajectory,) = await play_many_async(Own, ScriptedEngine([[call("add", a=2, b=3)], "It is 5."]))
    assert trajectory.reward == 1
