"""MCP servers as tools, with real servers of the SDK: pages, several servers, errors, death and silence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from runner import BadEnvironment, Environment, Limits, Outcome, ScriptedEngine, ServerFailed, Task, Trajectory, reward
from runner.interop import McpDataset, McpServers
from runner.testing import call, play_many_async

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,  # each episode starts a server, which imports its SDK
    pytest.mark.sample_functions(2),
]

HERE = Path(__file__).parent
SERVER = f"{sys.executable} {HERE / 'mcp_server.py'}"
PAGES = f"{sys.executable} {HERE / 'mcp_pages.py'}"
ROWS = [{"prompt": f"Question {number}?", "answer": "done"} for number in range(3)]


async def played(replies: Any, servers: Any = SERVER, *, rows: Any = ROWS[:1], **options: Any) -> list[Trajectory]:
    limits = options.pop("limits", Limits())
    options.setdefault("one_connection", True)  # each further process imports the SDK
    environment = McpDataset(servers, rows, answer="answer", score="contains", **options)
    return await play_many_async(environment, ScriptedEngine(replies), limits=limits, breaker=1)


def results(trajectory: Trajectory) -> list[str]:
    return [str(each["content"]) for each in trajectory.messages if each["role"] == "tool"]


def children() -> list[psutil.Process]:
    """The server processes of episodes."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # the process has ended
            command = " ".join(each.cmdline())
            if "mcp_" in command and " http" not in command:  # a server over HTTP may have a key in its arguments
                found.append(each)
    return found


@pytest.fixture(scope="module", params=[""])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server over HTTP. The parameter is the key that it requires."""
    yield from http_server(request)


@pytest.fixture(params=[""])
def own_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server over HTTP for one test."""
    yield from http_server(request)


def http_server(request: pytest.FixtureRequest) -> Iterator[str]:
    command = [sys.executable, str(HERE / "mcp_server.py"), "http", *([request.param] if request.param else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/mcp"
        process.terminate()


async def test_tools_of_a_command_answer_calls() -> None:
    replies = [[call("add", a=2, b=3)], [call("fail")], [call("picture")], "done"]
    (trajectory,) = await played(replies, one_connection=False)
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
    with pytest.raises(BadEnvironment, match="'near' and 'far' both have a tool 'add': give prefix=True"):
        await played("done", servers)
    (trajectory,) = await played([[call("near_add", a=1, b=1)], [call("far_count")], "done"], servers, prefix=True)
    assert results(trajectory)[0] == "2"


@pytest.mark.whole
async def test_each_episode_has_a_connection_of_its_own_by_default() -> None:
    trajectories = await played([[call("count")], "done"], rows=ROWS, one_connection=False)
    assert [results(each) for each in trajectories] == [["1"]] * 3


async def test_one_connection_may_be_shared() -> None:
    trajectories = await played([[call("count")], "done"], rows=ROWS)
    assert sorted(results(each)[0] for each in trajectories) == ["1", "2", "3"]
    assert children() == []


async def test_a_server_that_dies_fails_its_episode_alone() -> None:
    def reply(model_call: Any) -> Any:
        if "Question 1" in model_call.prompt:
            return [call("die")]
        return "done"

    trajectories = await played(reply, rows=ROWS, one_connection=False)
    outcomes = {str(each.task.prompt): each.outcome for each in trajectories}
    assert outcomes["Question 1?"] is Outcome.ENV_ERROR
    assert [outcomes["Question 0?"], outcomes["Question 2?"]] == [Outcome.COMPLETED] * 2
    (error,) = [each.error for each in trajectories if each.error]
    assert "ServerFailed: MCP server '1' cannot be reached any more" in error
    assert "the disk is on fire" in error
    assert children() == []


async def test_a_server_over_http_that_dies_is_named(own_url: str) -> None:
    (trajectory,) = await played([[call("die")], "done"], {"far": own_url}, one_connection=False)
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "ServerFailed: MCP server 'far' cannot be reached any more" in trajectory.error


async def test_a_shared_server_over_http_that_dies_is_named(own_url: str) -> None:
    with pytest.raises(BadEnvironment, match="MCP server 'far' cannot be reached any more"):
        await played([[call("die")], "done"], {"far": own_url})


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
        ("no-such-program x", "MCP server '1': 'no-such-program x': the program 'no-such-program' is not on PATH"),
        ("'open", "invalid shell syntax"),
        ('{"a": ', "not JSON"),
        ([], "give a command or a URL"),
        ([3], "MCP server '1': 3: give a command or a URL"),
        ({"a": {"command": "no-such-program"}}, "MCP server 'a': the program 'no-such-program' is not on PATH"),
        ({"a": {"command": "python", "args": "x.py"}}, "args is of type str; it must be a list"),
        ({"a": {"url": "http://x", "headers": "Bearer abc"}}, "'a': headers is of type str; it must be an object"),
        ({"a": {"command": "python", "header": {}}}, "'header' is unknown: give command, args, env, cwd, type, or url"),
        ({"a": {"url": "http://x/sse", "type": "sse"}}, "give a command, or the url of a server of streamable HTTP"),
        ({"a": {"url": "http://x", "headers": {"Key": "${NO_SUCH}"}}}, "headers needs the variable NO_SUCH"),
    ],
    ids=["missing", "quotes", "JSON", "none", "number", "program", "args", "headers", "field", "sse", "variable"],
)
def test_a_server_that_cannot_be_started_is_refused(server: Any, said: str) -> None:
    with pytest.raises(BadEnvironment, match=said):
        McpServers(server)


async def test_a_server_that_does_not_start_ends_the_run_by_name() -> None:
    gone = f"{sys.executable} -c \"import sys; sys.exit('no licence')\""
    with pytest.raises(ServerFailed, match=r"MCP server '1' cannot be reached .*no licence"):
        await played("done", gone)
    with pytest.raises(ServerFailed, match="MCP server '1' cannot be reached"):
        await played("done", "http://127.0.0.1:9/mcp")


async def test_a_server_that_starts_once_fails_each_episode(tmp_path: Path) -> None:
    once = f"test -e {tmp_path}/was && echo no licence >&2 && exit 1; touch {tmp_path}/was; exec {SERVER}"
    (trajectory,) = await played("done", {"one": {"command": "sh", "args": ["-c", once]}}, one_connection=False)
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "MCP server 'one' cannot be reached" in trajectory.error
    assert "no licence" in trajectory.error


@pytest.mark.parametrize("given", ["JSON", *(pytest.param(each, marks=pytest.mark.whole) for each in ("dict", "file"))])
async def test_servers_are_read_from_a_client_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    script = str(HERE / "mcp_server.py")
    one = {"command": sys.executable, "args": [script], "env": {"KEY": "${TOKEN}"}, "type": "stdio"}
    servers: Any = {"mcpServers": {"one": one}}
    if given != "dict":
        servers = json.dumps(servers)
    if given == "file":
        (tmp_path / "mcp.json").write_text(servers)
        servers = str(tmp_path / "mcp.json")
    (trajectory,) = await played([[call("variable", name="KEY"), call("variable", name="TOKEN")], "done"], servers)
    assert results(trajectory) == ["secret", "unset"]


@pytest.mark.parametrize("url", ["abc"], indirect=True)
async def test_a_server_over_http_gets_its_headers(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "abc")
    server = {"url": url, "headers": {"Authorization": "Bearer ${TOKEN}"}}
    (trajectory,) = await played([[call("add", a=2, b=3)], "done"], {"one": server})
    assert results(trajectory) == ["5"]
    with pytest.raises(ServerFailed, match="cannot be reached"):
        await played("done", url)


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
