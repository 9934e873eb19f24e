"""play_cancelled finds what a cancelled environment leaves open, and names the place of the cancellation."""

from __future__ import annotations

import socket
from typing import IO, Any

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from runner import BadOption, BadTask, Conversation, Environment, Sampling, ScriptedEngine, Task, Turn, reward, tool
from runner.engines.base import GenerationRequest
from runner.testing import QueuedEngine, call, play_cancelled

pytestmark = pytest.mark.slow


class Opens(Environment):
    """Environment in which close() closes what setup() opened, which is too late for a cancellation between them."""

    def __init__(self) -> None:
        self.is_open = False

    def tasks(self) -> list[Task]:
        return [Task(id="t", prompt="?")]

    async def setup(self) -> None:
        self.is_open = True
        await anyio.lowlevel.checkpoint()

    async def close(self) -> None:
        self.is_open = False

    @tool
    async def wait(self) -> str:
        """Wait."""
        await anyio.lowlevel.checkpoint()
        return "done"

    @reward
    async def spoke(self) -> bool:
        await anyio.lowlevel.checkpoint()
        return True


class Closes(Opens):
    """The same environment with the exit stack, which is unwound after a part of setup() too."""

    async def setup(self) -> None:
        self.episode.exit_stack.push_async_callback(self.shut)
        await super().setup()

    async def close(self) -> None:
        return None

    async def shut(self) -> None:
        self.is_open = False


def is_closed(environment: Opens) -> None:
    if environment.is_open:
        raise AssertionError("it is open")


SAYS: Any = [call("wait"), "It is done"]


def test_leak_after_cancel_in_setup_is_found_with_its_place() -> None:
    with pytest.raises(AssertionError, match="it is open") as caught:
        play_cancelled(Opens, SAYS, check=is_closed)
    (note,) = caught.value.__notes__
    assert "in Opens.setup (" in note
    assert "test_play_cancelled.py:" in note


def test_clean_environment_passes_with_cancels_inside_turns() -> None:
    assert play_cancelled(Closes, SAYS, check=is_closed) > 5


REQUEST = GenerationRequest(name="e/main/0", prompt=[1], sampling=Sampling.defaults())


def test_a_request_that_is_left_in_the_engine_is_found() -> None:
    engine = ScriptedEngine(SAYS)

    class Leaves(Closes):
        async def step(self, turn: Turn) -> None:
            await engine.stream(REQUEST).__aenter__()

    with pytest.raises(AssertionError, match=r"\d requests and 1 sessions are left in the engine"):
        play_cancelled(Leaves, engine)


def test_an_episode_that_fails_undisturbed_proves_nothing() -> None:
    class Broken(Closes):
        async def step(self, turn: Turn) -> None:
            raise ZeroDivisionError

    with pytest.raises(AssertionError, match="the undisturbed episode fails: env_error: ZeroDivisionError"):
        play_cancelled(Broken, "hm")


def test_a_queue_is_refused_and_so_is_what_cannot_be_played() -> None:
    with pytest.raises(BadOption, match=r"a queue of replies is empty after the first play\. Give the replies"):
        play_cancelled(Closes, QueuedEngine().say("x"))
    with pytest.raises(BadTask, match="has the id 'x'"):
        play_cancelled(Closes, SAYS, task="x")


@pytest.mark.anyio
@pytest.mark.both_backends
async def test_play_cancelled_is_refused_inside_an_async_test() -> None:
    with pytest.raises(RuntimeError, match=r"play_cancelled\(\) is for a plain"):
        play_cancelled(Closes, SAYS)


def test_process_and_connection_of_environment_leave_nothing() -> None:
    class Runs(Closes):
        async def setup(self) -> None:
            await super().setup()
            await anyio.run_process(["true"])
            near, far = socket.socketpair()
            far.close()
            stream = await anyio.abc.SocketStream.from_socket(near)
            await stream.aclose()

    assert play_cancelled(Runs, "hm", check=is_closed) > 5


def opened() -> IO[str]:
    return open(__file__)


def test_file_opened_once_for_all_episodes_is_not_a_leak() -> None:
    once: list[IO[str]] = []

    class Opened(Closes):
        async def setup(self) -> None:
            await super().setup()
            if not once:
                once.append(opened())

    assert play_cancelled(Opened, "hm", check=is_closed)
    once[0].close()


@pytest.mark.parametrize("again", [True, False], ids=["for ever", "once"])
def test_a_rollout_that_swallows_cancellations_is_named(again: bool) -> None:
    class Swallows(Closes):
        async def rollout(self, conversation: Conversation) -> None:
            while True:
                try:
                    await conversation.generate()
                    return
                except anyio.get_cancelled_exc_class():
                    if not again:
                        return

    with pytest.raises(AssertionError, match=r"Swallows\.rollout \(.*test_play_cancelled\.py:\d+\) swallowed the"):
        play_cancelled(Swallows, "hm")
