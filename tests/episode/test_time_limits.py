"""Time limits, on trio's virtual clock: the clock is paused until a test moves it."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import anyio.from_thread
import pytest
import trio.testing

from runner import Conversation, FinishReason, Limits, Outcome, Run, Trajectory, Turn, metric, reward, tool
from runner.options import Concurrency
from runner.testing import Latency, Reply, ScriptedEngine, VirtualClock, call
from runner.tokens.template import Renderer
from tests.playing import Plain, play, play_all, recording, tasks

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend(clock: trio.testing.MockClock) -> tuple[str, dict[str, object]]:
    return "trio", {"clock": clock}


class Timed(Plain):
    """An environment that moves the clock itself."""

    def __init__(self, clock: trio.testing.MockClock, release: threading.Event | None = None) -> None:
        self.clock = clock
        self.release = release

    @reward
    async def correct(self) -> bool:  # synchronous code would run in a thread, which takes real time
        return True

    async def passes(self, seconds: float) -> None:
        """Let this number of seconds pass while this code works."""
        self.clock.jump(seconds)
        await anyio.lowlevel.checkpoint()

    def hangs(self, seconds: float) -> None:
        """Let this number of seconds pass in a worker thread, and do not return."""
        assert self.release is not None
        anyio.from_thread.run_sync(self.clock.jump, seconds)
        self.release.wait()


async def test_seconds_cut_the_play_where_it_stands_and_it_is_scored(clock: trio.testing.MockClock) -> None:
    class Slow(Timed):
        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate()
            await self.passes(601)
            raise AssertionError("the play continued")

    trajectory = await play(Slow(clock), "Yes")
    assert (trajectory.outcome, trajectory.limit, trajectory.reward) == (Outcome.TIME_LIMIT, "seconds", 1.0)


async def test_a_half_written_turn_is_kept_as_aborted(clock: trio.testing.MockClock) -> None:
    class Interrupted(Timed):
        async def rollout(self, conversation: Conversation) -> None:
            async with anyio.create_task_group() as group:
                group.start_soon(self.wait_for_words, conversation)
                await conversation.generate()

        async def wait_for_words(self, conversation: Conversation) -> None:
            while engine.stats().sampled_tokens < 4:
                await anyio.lowlevel.checkpoint()
            clock.jump(601)

    engine = recording([Reply("123456789" * 20, latency=Latency(between=1))], chunks=1)
    trajectory = await play(Interrupted(clock), engine, limits=Limits(stall_seconds=None))
    (turn,) = trajectory.turns
    assert (trajectory.outcome, trajectory.limit) == (Outcome.TIME_LIMIT, "seconds")
    assert turn.finish is FinishReason.ABORT
    assert 4 <= len(turn.token_ids) < 180
    assert ("123456789" * 20).startswith(turn.text)
    assert turn.text
    assert trajectory.reward == 1.0


async def test_session_of_setup_is_open_for_scoring_after_a_time_limit(
    clock: trio.testing.MockClock,
) -> None:
    class WithSession(Timed):
        async def setup(self) -> None:
            self.group = await self.episode.exit_stack.enter_async_context(anyio.create_task_group())
            self.asked = anyio.Event()
            self.answered = anyio.Event()
            self.group.start_soon(self.serve)

        async def serve(self) -> None:
            await self.asked.wait()
            self.answered.set()

        async def step(self, turn: Turn) -> None:
            await self.passes(601)

        @reward
        async def correct(self) -> bool:
            self.asked.set()
            await self.answered.wait()
            return True

    trajectory = await play(WithSession(clock), "Yes", limits=Limits(step_seconds=None))
    assert (trajectory.outcome, trajectory.reward, trajectory.error) == (Outcome.TIME_LIMIT, 1.0, "")


async def test_tool_that_takes_too_long_is_reported_to_the_model(clock: trio.testing.MockClock) -> None:
    class Searches(Timed):
        @tool
        async def search(self) -> str:
            """Search."""
            await self.passes(121)
            return "found"

        @tool(seconds=30)
        async def look(self) -> str:
            """Look."""
            await self.passes(31)
            return "seen"

        @tool(seconds=None)
        async def ponder(self) -> str:
            """Take as long as it takes."""
            await self.passes(200)
            return "thought"

    replies = [call("search"), call("look"), call("ponder"), "Nothing"]
    trajectory = await play(Searches(clock), replies)
    results = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert results == ["search took longer than 120 s.", "look took longer than 30 s.", "thought"]
    assert (trajectory.outcome, trajectory.text) == (Outcome.COMPLETED, "Nothing")


async def test_one_slow_tool_of_a_turn_does_not_take_the_others_results(clock: trio.testing.MockClock) -> None:
    class Two(Timed):
        @tool(seconds=30)
        async def slow(self) -> str:
            """Slow."""
            await anyio.sleep(1)  # the other call works during this second
            return "late"

        @tool(seconds=None)
        async def quick(self) -> str:
            """Quick."""
            await anyio.wait_all_tasks_blocked()
            await self.passes(31)
            return "here"

    trajectory = await play(Two(clock), [[call("slow"), call("quick")], "Done"])
    results = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert results in (["slow took longer than 30 s.", "here"], ["late", "here"])
    assert trajectory.outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    ("hook", "seconds", "limit"),
    [("tool", 121, "tool_seconds"), ("step", 121, "step_seconds"), ("tool_play", 601, "seconds")],
)
async def test_a_clock_that_abandons_a_sync_call_is_env_error_and_unscored(
    clock: trio.testing.MockClock, release: threading.Event, hook: str, seconds: float, limit: str
) -> None:
    class Hangs(Timed):
        @tool
        def hang(self) -> None:
            """Hang."""
            self.hangs(seconds)

        def step(self, turn: Turn) -> None:
            self.hangs(seconds)

    replies = "Yes" if hook == "step" else [call("hang"), "Never"]
    limits = Limits(tool_seconds=None) if hook == "tool_play" else Limits()
    trajectory = await play(Hangs(clock, release), replies, limits=limits)
    assert (trajectory.outcome, trajectory.limit, trajectory.reward) == (Outcome.ENV_ERROR, limit, None)
    assert "its thread still runs and may change the environment" in trajectory.error


async def test_setup_seconds_is_env_error_and_what_was_opened_is_unwound(clock: trio.testing.MockClock) -> None:
    seen: list[str] = []

    class SlowSetup(Timed):
        async def setup(self) -> None:
            self.episode.exit_stack.callback(seen.append, "unwound")
            await self.passes(301)

        def close(self) -> None:
            seen.append("closed")

    trajectory = await play(SlowSetup(clock), "Yes")
    assert (trajectory.outcome, trajectory.limit, trajectory.reward) == (Outcome.ENV_ERROR, "setup_seconds", None)
    assert "setup took longer than 300 s" in trajectory.error
    assert seen == ["unwound"]


async def test_prompt_counts_as_setup_and_is_closed(clock: trio.testing.MockClock) -> None:
    seen: list[str] = []

    class SlowPrompt(Timed):
        async def prompt(self) -> str:
            await self.passes(301)
            return "late"

        async def close(self) -> None:
            await anyio.lowlevel.checkpoint()
            seen.append("closed")

    trajectory = await play(SlowPrompt(clock), "Yes")
    assert (trajectory.outcome, trajectory.limit) == (Outcome.ENV_ERROR, "setup_seconds")
    assert seen == ["closed"]


async def test_setup_time_does_not_count_towards_seconds(clock: trio.testing.MockClock) -> None:
    class Prepares(Timed):
        async def setup(self) -> None:
            await self.passes(200)

        async def step(self, turn: Turn) -> str | None:
            await self.passes(100)
            return "more" if len(self.episode.turns) < 5 else None

    trajectory = await play(Prepares(clock), lambda turn: "Yes")
    assert (trajectory.outcome, len(trajectory.turns)) == (Outcome.COMPLETED, 5)
    trajectory = await play(Prepares(clock), lambda turn: "Yes", limits=Limits(seconds=450))
    assert (trajectory.outcome, len(trajectory.turns)) == (Outcome.TIME_LIMIT, 5)


async def test_step_seconds_is_env_error(clock: trio.testing.MockClock) -> None:
    class SlowStep(Timed):
        async def step(self, turn: Turn) -> None:
            await self.passes(121)

    trajectory = await play(SlowStep(clock), "Yes")
    assert (trajectory.outcome, trajectory.limit, trajectory.reward) == (Outcome.ENV_ERROR, "step_seconds", None)
    assert "step() took longer than 120 s" in trajectory.error


async def test_reward_seconds_is_env_error_and_closed(clock: trio.testing.MockClock) -> None:
    seen: list[str] = []

    class SlowReward(Timed):
        @reward
        async def correct(self) -> bool:
            await self.passes(301)
            return True

        async def close(self) -> None:
            await anyio.lowlevel.checkpoint()
            seen.append("closed")

    trajectory = await play(SlowReward(clock), "Yes")
    assert (trajectory.outcome, trajectory.limit, trajectory.reward) == (Outcome.ENV_ERROR, "reward_seconds", None)
    assert seen == ["closed"]


async def test_close_seconds_is_reported_and_the_reward_stays(clock: trio.testing.MockClock) -> None:
    class SlowClose(Timed):
        async def close(self) -> None:
            await self.passes(31)

    async with Run(SlowClose(clock), recording("Yes")) as run:
        (trajectory,) = [t async for t in run]
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 1.0)
    assert list(run.summary.faults) == ["t0#0: close(): TooSlow: close() took longer than 30 s"]


async def test_waiting_in_a_limiter_stops_every_clock(clock: trio.testing.MockClock) -> None:
    came: list[str] = []
    order: list[str] = []
    scored: list[str] = []

    class Shares(Timed):
        @tool
        async def use(self) -> str:
            """Use what is shared."""
            came.append(self.task.id)
            async with self.episode.limiter("sandbox", 1):
                order.append(self.task.id)
                while len(came) < 8 or len(scored) < len(order) - 1:  # until the others wait here or have ended
                    await anyio.lowlevel.checkpoint()
                await self.passes(100)
            return "used"

        @reward
        async def correct(self) -> bool:
            scored.append(self.task.id)
            return True

    played = await play_all(Shares(clock), [call("use"), "Done"], tasks=tasks(8), limits=Limits(seconds=150))
    assert [t.outcome for t in played] == [Outcome.COMPLETED] * 8  # the last one waited for 700 s
    assert sorted(order) == [f"t{n}" for n in range(8)]
    assert all("took longer" not in message["content"] for t in played for message in t.messages)


async def test_waiting_for_a_place_in_the_engine_stops_every_clock(clock: trio.testing.MockClock) -> None:
    async def speak(turn: object) -> str:
        clock.jump(100)
        await anyio.lowlevel.checkpoint()
        return "Yes"

    engine = recording(speak, places=1)
    limits = Limits(seconds=150, stall_seconds=None)
    played = await play_all(Timed(clock), engine, tasks=tasks(6), limits=limits, concurrency=Concurrency(episodes=6))
    assert [t.outcome for t in played] == [Outcome.COMPLETED] * 6
    assert max(t.waited for t in played) >= 400


async def test_an_engine_that_sends_nothing_is_engine_error(clock: trio.testing.MockClock) -> None:
    from runner.testing import Fault

    class Watches(Timed):
        async def rollout(self, conversation: Conversation) -> None:
            async with anyio.create_task_group() as group:
                group.start_soon(self.wait)
                await conversation.generate()

        async def wait(self) -> None:
            await anyio.wait_all_tasks_blocked()
            clock.jump(121)

    trajectory = await play(Watches(clock), [Reply("Yes", fault=Fault.stall(2))], retries=0)
    assert trajectory.outcome is Outcome.ENGINE_ERROR
    assert "sent nothing for 120 s" in trajectory.error
    assert [len(turn.token_ids) for turn in trajectory.turns] == [2]


async def test_none_lifts_a_limit(clock: trio.testing.MockClock) -> None:
    class Patient(Timed):
        async def step(self, turn: Turn) -> None:
            await self.passes(1_000_000)

        @metric
        def moved(self) -> float:
            return 1

    trajectory = await play(Patient(clock), "Yes", limits=Limits(seconds=None, step_seconds=None))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 1.0)


async def test_limits_of_the_run_override_the_class_by_field(clock: trio.testing.MockClock) -> None:
    class Own(Timed):
        limits = Limits(seconds=50, step_seconds=None)

        async def step(self, turn: Turn) -> None:
            await self.passes(200)

    assert (await play(Own(clock), "Yes")).outcome is Outcome.TIME_LIMIT
    assert (await play(Own(clock), "Yes", limits=Limits(seconds=300))).outcome is Outcome.COMPLETED


async def test_clocks_stop_while_a_template_is_rendered(
    clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    render, loop, elsewhere = Renderer.render, threading.get_ident(), 0

    def slowly(self: Renderer, messages: Any, **options: Any) -> str:
        nonlocal elsewhere
        if threading.get_ident() != loop:
            elsewhere += 1
            if elsewhere == 1:
                anyio.from_thread.run_sync(clock.jump, 200)
        return render(self, messages, **options)

    class Replies(Timed):
        async def step(self, turn: Turn) -> str | None:
            return "And?" if turn.number == 0 else None

    monkeypatch.setattr(Renderer, "render", slowly)
    trajectory = await play(Replies(clock), ["Yes", "Done"], limits=Limits(seconds=150))
    assert (trajectory.outcome, len(trajectory.turns)) == (Outcome.COMPLETED, 2)
    assert elsewhere > 0


# --- an agent's turn inside a hook; here time passes by itself when all tasks wait


class Asks(Plain):
    """Environment in which another agent takes a turn of 100 seconds inside a hook. The hook limit is 5 seconds."""

    limits = Limits(setup_seconds=5, step_seconds=5, tool_seconds=5, reward_seconds=5, close_seconds=5)

    def __init__(self, hook: str, seconds: float = 0) -> None:
        self.hook = hook
        self.seconds = seconds

    async def ask(self, hook: str) -> str:
        """Take the agent's turn, and then work for some seconds."""
        if hook != self.hook:
            return "Continue."
        other = self.episode.conversation("other", prompt="What do you say?")
        said = (await other.generate()).text
        await anyio.sleep(self.seconds)
        return said

    async def setup(self) -> None:
        await self.ask("setup")

    async def prompt(self) -> str:
        return await self.ask("prompt")

    @tool
    async def hand_off(self) -> str:
        """Ask another agent."""
        return await self.ask("tool")

    @tool
    def hand_off_from_a_thread(self) -> str:
        """Ask another agent."""
        return anyio.from_thread.run(self.ask, "sync tool")

    async def step(self, turn: Turn) -> None:
        await self.ask("step")

    @reward
    async def correct(self) -> bool:
        await self.ask("reward")
        return True

    async def close(self) -> None:
        await self.ask("close")


SLOW = Reply("Well", latency=Latency(first=100))  # for an engine with ticks of one second
HOOKS = {
    "setup": "setup_seconds",
    "prompt": "setup_seconds",
    "tool": "tool_seconds",
    "sync tool": "tool_seconds",
    "step": "step_seconds",
    "reward": "reward_seconds",
    "close": "close_seconds",
}


def asking(environment: Asks, **options: Any) -> tuple[Trajectory, list[str]]:
    """Return the outcome and the faults of an episode whose other agent is slow."""
    called = {"tool": "hand_off", "sync tool": "hand_off_from_a_thread"}.get(environment.hook)
    engine = ScriptedEngine({"main": [call(called), "Done"] if called else ["Done"], "other": SLOW}, tick=1.0)

    async def played() -> tuple[Trajectory, list[str]]:
        async with Run(environment, engine, tasks=tasks(1), **options) as run:
            (trajectory,) = [t async for t in run]
        return trajectory, list(run.summary.faults)

    return VirtualClock().run(played)


@pytest.mark.slow
@pytest.mark.parametrize("hook", HOOKS)
def test_clock_of_a_hook_stops_while_an_agent_is_sampled(hook: str) -> None:
    trajectory, faults = asking(Asks(hook))
    assert (trajectory.outcome, trajectory.error, trajectory.reward) == (Outcome.COMPLETED, "", 1.0)
    assert faults == []
    assert all("took longer" not in message["content"] for message in trajectory.messages)
    assert trajectory.seconds > 100


@pytest.mark.slow
@pytest.mark.parametrize("hook", HOOKS)
def test_clock_of_a_hook_resumes_after_an_agent_was_sampled(hook: str) -> None:
    trajectory, faults = asking(Asks(hook, seconds=6))
    timeouts = [message["content"] for message in trajectory.messages if "took longer than 5 s" in message["content"]]
    if hook == "tool":
        assert timeouts
    elif hook == "close":
        assert "took longer than 5 s" in faults[0]
    else:
        assert (trajectory.outcome, trajectory.limit) == (Outcome.ENV_ERROR, HOOKS[hook])


@pytest.mark.parametrize("hook", ["tool", "step"])
def test_the_seconds_of_a_play_count_what_its_agents_sample(hook: str) -> None:
    trajectory, _ = asking(Asks(hook), limits=Limits(seconds=50))
    assert (trajectory.outcome, trajectory.limit, trajectory.reward) == (Outcome.TIME_LIMIT, "seconds", 1.0)
