"""OpenEnv servers over the network: a server with the real package runs in the interpreter of its own lane."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runner import BadOption, Limits, Outcome, Run, ScriptedEngine, ServerFailed, Trajectory
from runner.interop import OpenEnv
from runner.testing import call, play_many_async
from tests.interop.installing import HOME

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone, pytest.mark.sample_functions(2)]
real = pytest.mark.server("openenv")


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    program = str(Path(__file__).parent / "openenv_server.py")
    command = [str(HOME / "openenv" / "bin" / "python"), program, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as address:
        yield address


def add(*numbers: Any) -> list[Any]:
    return [[call("act", number=number)] for number in numbers]


async def played(url: str, replies: Any, episodes: int = 1, **options: Any) -> list[Trajectory]:
    limits = options.pop("limits", Limits())
    environment = OpenEnv(url, episodes=episodes, **options)
    return await play_many_async(environment, ScriptedEngine(replies), limits=limits, breaker=1)


@real
async def test_actions_are_a_tool_and_rewards_add_up(url: str) -> None:
    trajectories = await played(url, add(4, 6), episodes=6, instructions="Count.", reset={"start": 0})
    assert len({str(each.messages[0]["content"]) for each in trajectories}) == 6, "each task has its own seed"
    for each in trajectories:
        assert (each.outcome, each.reason, each.reward) == (Outcome.COMPLETED, "done", 10.0), each.error
        assert [m["content"] for m in each.messages if m["role"] == "tool"] == ["it is 4", "it is 10"]
        assert each.metrics["steps"] == 2


@real
async def test_an_environment_that_raises_on_the_server_fails_its_episode(url: str) -> None:
    (each,) = await played(url, add(66))
    assert each.outcome is Outcome.ENV_ERROR
    assert "EXECUTION_ERROR" in each.error
    assert "the counter is broken" in each.error


@real
async def test_nothing_is_asked_after_a_call_that_was_cut(url: str) -> None:
    (each,) = await played(url, add(77, 4), limits=Limits(tool_seconds=0.3))
    assert each.outcome is Outcome.ENV_ERROR
    assert "an earlier call was cut" in each.error


@real
async def test_calls_of_tools_are_tools_of_their_own_with_rewards() -> None:
    with serving("tools") as own:
        replies = [[call("add", number=4)], [call("look")], [call("add", number=66)], [call("add", number=6)]]
        for each in await played(own, replies, episodes=3):
            assert (each.outcome, each.reason, each.reward) == (Outcome.COMPLETED, "done", 10.0), each.error
            results = [str(m["content"]) for m in each.messages if m["role"] == "tool"]
            assert (results[0], results[1], results[3]) == ("it is 4", "still 4", "it is 10")
            assert "the counter is broken" in results[2]
            assert each.metrics["steps"] == 3


@real
async def test_a_failed_call_that_ends_the_episode_ends_it() -> None:
    with serving("tools") as own:
        (each,) = await played(own, [[call("add", number=99)], [call("look")]])
    assert (each.outcome, each.reason, each.reward, len(each.turns)) == (Outcome.COMPLETED, "done", 99.0, 1), each.error
    assert "that was the end" in str(each.messages[-1]["content"])


@real
async def test_an_episode_without_a_free_session_fails_alone() -> None:
    with serving("one") as own:
        trajectories = await played(own, add(77), episodes=2)
    outcomes = {each.outcome: each for each in trajectories}
    assert set(outcomes) == {Outcome.COMPLETED, Outcome.ENV_ERROR}
    assert outcomes[Outcome.COMPLETED].reward == 77
    assert f"OpenEnv server {own} failed (CAPACITY_REACHED)" in outcomes[Outcome.ENV_ERROR].error


@real
async def test_a_server_that_dies_in_a_step_is_named() -> None:
    with serving() as own:
        (each,) = await played(own, add(88))
    assert each.outcome is Outcome.ENV_ERROR
    assert f"OpenEnv server {own} cannot be reached any more" in each.error


async def test_an_openenv_server_that_is_not_there_ends_the_run() -> None:
    with pytest.raises(ServerFailed, match=r"http://127.0.0.1:9 does not send its schema \(ConnectError"):
        async with Run(OpenEnv("http://127.0.0.1:9"), ScriptedEngine("x")):
            pass


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_an_openenv_run_on_trio_is_refused_by_name(anyio_backend: str) -> None:
    with pytest.raises(BadOption, match="OpenEnv works on asyncio alone, and this is trio: run on asyncio"):
        async with Run(OpenEnv("http://127.0.0.1:9"), ScriptedEngine("x")):
            pass


def test_a_url_of_another_kind_is_refused() -> None:
    with pytest.raises(BadOption, match="give the server's URL"):
        OpenEnv("localhost:8000")
