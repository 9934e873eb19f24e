"""Mistakes planted in an environment, or in the runner's calls to it: the kit finds and names each of them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import threading
import time
from array import array
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from runner import Conversation, Environment, Message, Outcome, Task, Trajectory, Turn, reward, tool
from runner.episode import conversation as conversations
from runner.episode import turn as turns
from runner.episode.lifecycle import EpisodeRunner
from runner.episode.tool_calls import answer_calls
from runner.episode.turn_tree import TurnNode
from runner.testing import (
    AwkwardTokenizer,
    Leaked,
    LoopWatchdog,
    QueuedEngine,
    assert_exact,
    call,
    check_environment,
    no_leaks,
    play,
    play_async,
    play_cancelled,
    play_many,
)
from runner.tokens.log import Source, TokenLog
from tests.testing.inner import run

pytestmark = [pytest.mark.slow, pytest.mark.sample_functions(2)]

pytest_plugins = ["pytester"]

SAYS: Any = [[call("add", a=1, b=2), call("add", a=3, b=4)], "It is 3 and 7", "Yes"]


class Adds(Environment):
    """The environment on which all mistakes are based, without a mistake."""

    def __init__(self) -> None:
        self.sums: list[int] = []

    def tasks(self) -> list[Task]:
        return [Task(id=f"t-{number}", prompt=f"Add {number}.") for number in range(4)]

    @tool
    async def add(self, a: int, b: int) -> int:
        """Add."""
        await anyio.lowlevel.checkpoint()
        self.sums.append(a + b)
        return a + b

    async def rollout(self, conversation: Conversation) -> None:
        while True:
            turn = await conversation.generate()
            reply = await self.episode.answer(turn)
            if reply is None:
                return
            conversation.add(self.sent(reply))

    def sent(self, reply: list[Message]) -> list[Message]:
        """The prompt of the model."""
        return reply

    def step(self, turn: Turn) -> str | None:
        return "Sure?" if turn.number < 2 else None

    @reward
    def added(self) -> bool:
        return bool(self.sums)


def in_awkward_ids() -> QueuedEngine:
    return QueuedEngine(tokenizer=AwkwardTokenizer()).say(*SAYS)


def found(cls: type[Environment], *, fatal: bool = True) -> str:
    return "\n".join(finding.text for finding in check_environment(cls) if finding.fatal is fatal)


@pytest.mark.anyio
async def test_episode_without_a_mistake_passes_every_check() -> None:
    engine = in_awkward_ids()
    with no_leaks(engine):
        async with LoopWatchdog() as watchdog:
            trajectory = await play_async(Adds, engine)
    watchdog.check()
    assert_exact(trajectory, engine)
    assert trajectory.reward == 1


def test_repeated_episodes_without_a_mistake_pass_every_check() -> None:
    assert play_cancelled(Adds, SAYS) > 10
    assert {trajectory.reward for trajectory in play_many(Adds, SAYS)} == {1}
    assert found(Adds) == found(Adds, fatal=False) == ""


# --- in the runner


def test_mask_that_is_off_by_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = TokenLog.mask
    monkeypatch.setattr(TokenLog, "mask", lambda log: array("b", [0, *mask(log)[:-1]]))
    with pytest.raises(AssertionError, match=r"t-0#0 main: the loss mask .* at \[\d+, .*\n  ids before: .*assistant"):
        play(Adds, SAYS)


def test_sources_that_are_off_by_one_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    append = TokenLog.append_sampled

    def one_early(log: TokenLog, ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        append(log, ids, logprobs)
        log.sources[len(log) - len(ids) - 1] = Source.SAMPLED
        log.sources[-1] = Source.BRIDGE

    monkeypatch.setattr(TokenLog, "append_sampled", one_early)
    with pytest.raises(AssertionError, match="t-0#0: an id that was not sampled has log-probability -"):
        play(Adds, SAYS)


def test_lost_sampled_id_raises_with_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    append = TokenLog.append_sampled

    def without_the_first(log: TokenLog, ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        append(log, ids[1:], logprobs if logprobs is None else logprobs[1:])

    monkeypatch.setattr(TokenLog, "append_sampled", without_the_first)
    with pytest.raises(AssertionError, match=r"t-0#0 main turn 0: "):
        play(Adds, SAYS)


def test_prompt_rendered_again_raises_with_both_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = in_awkward_ids()
    request = turns._request

    def rendered_again(*arguments: Any, **options: Any) -> Any:
        made = request(*arguments, **options)
        prompt = made.generation.prompt
        # the mistake
        prompt[:] = array("i", engine.tokenizer.encode(engine.tokenizer.decode(prompt)))  # type: ignore[index]
        return made

    monkeypatch.setattr(turns, "_request", rendered_again)
    with pytest.raises(
        AssertionError, match=r"t-0#0 main turn \d: the engine received another prompt\n  sent: .*\n  kept: "
    ):
        play(Adds, engine)


def test_answers_in_the_order_of_finished_tools_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def last_first(*arguments: Any, **options: Any) -> list[Message]:
        return (await answer_calls(*arguments, **options))[::-1]

    monkeypatch.setattr(conversations, "answer_calls", last_first)
    with pytest.raises(AssertionError, match=r"calls \['call_0', 'call_1'\] .* answered by \['call_1', 'call_0'\]"):
        play(Adds, SAYS)


def test_reward_of_zero_for_a_failed_episode_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(Adds):
        def step(self, turn: Turn) -> str | None:
            raise ZeroDivisionError

    made = EpisodeRunner._trajectory

    def never_none(play: EpisodeRunner, *arguments: Any) -> Trajectory:
        trajectory = made(play, *arguments)
        trajectory.reward = trajectory.reward or 0.0
        return trajectory

    assert play(Fails, "It is 3").outcome is Outcome.ENV_ERROR
    monkeypatch.setattr(EpisodeRunner, "_trajectory", never_none)
    with pytest.raises(AssertionError, match=r"t-0#0 main: a reward of 0\.0, but env_error, 1 turns, trained"):
        play(Fails, "It is 3")


def test_log_probabilities_that_are_shifted_by_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    append = TokenLog.append_sampled
    before = [-1.0]

    def one_late(log: TokenLog, ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        assert logprobs is not None
        append(log, ids, [*before, *logprobs[:-1]])
        before[:] = logprobs[-1:]

    monkeypatch.setattr(TokenLog, "append_sampled", one_late)
    with pytest.raises(
        AssertionError, match=r"t-0#0 main turn 0: the log-probability of its id 0 is -1, but the engine returned -"
    ):
        play(Adds, SAYS)


def test_turn_whose_text_differs_from_its_ids_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = turns._parse

    async def in_capitals(spot: Any, node: TurnNode, sampled: Any) -> None:
        await parse(spot, node, sampled)
        node.turn.text = node.turn.text.upper()

    monkeypatch.setattr(turns, "_parse", in_capitals)
    with pytest.raises(
        AssertionError, match="t-0#0 main turn 1: 'IT IS 3 AND 7' is not what was sampled: 'It is 3 and 7"
    ):
        play(Adds, SAYS)


# --- in an environment: the model's prompt


def test_dropped_tool_result_is_found() -> None:
    class Drops(Adds):
        def sent(self, reply: list[Message]) -> list[Message]:
            return reply[:1]

    with pytest.raises(
        AssertionError, match=r"calls \['call_0', 'call_1'\] of message 1 were answered by \['call_0'\]"
    ):
        play(Drops, SAYS)


def test_call_that_is_answered_twice_is_found() -> None:
    class Repeats(Adds):
        def sent(self, reply: list[Message]) -> list[Message]:
            return [reply[0], *reply]

    with pytest.raises(AssertionError, match=r"were answered by \['call_0', 'call_0', 'call_1'\]"):
        play(Repeats, SAYS)


# --- in an environment: shared state and randomness


def test_state_that_leaks_between_episodes_is_found() -> None:
    class Remembers(Adds):
        seen: list[str] = []  # noqa: RUF012  # the mistake

        async def setup(self) -> None:  # on the event loop, so that the order is fixed
            self.is_new = not self.seen
            self.seen.append(self.task.id)

        @reward
        def new(self) -> bool:
            return self.is_new

    text = found(Remembers)
    assert "Remembers.seen was changed during play, and all episodes share it: keep it on self" in text
    assert "new() returned another value in 1 of 4 episodes when played after other episodes: they share" in text


def test_random_numbers_without_a_seed_are_found() -> None:
    class Throws(Adds):
        @tool
        def throw(self) -> float:
            """Throw a die."""
            return random.random()

    assert "tool throw() returned another result in 4 of 4 episodes when the same episode was repeated: draw" in found(
        Throws
    )


# --- in an environment: the event loop, cancellation, and open resources


class Blocks(Adds):
    @tool
    async def add(self, a: int, b: int) -> int:
        """Add."""
        time.sleep(0.3)  # noqa: ASYNC251  # the mistake
        return a + b


@pytest.mark.anyio
async def test_tool_that_blocks_the_event_loop_is_found() -> None:
    async with LoopWatchdog() as watchdog:
        await play_async(Blocks, SAYS)
    with pytest.raises(
        AssertionError, match=r"was blocked for .* in Blocks\.add \(.*test_mutations\.py:\d+\): it blocks"
    ):
        watchdog.check()


def test_tool_that_swallows_its_cancellation_is_found() -> None:
    class Pays(Adds):
        @tool
        async def add(self, a: int, b: int) -> int:
            """Add."""
            with contextlib.suppress(BaseException):
                await anyio.lowlevel.checkpoint()
            return a + b

    with pytest.raises(
        AssertionError,
        match=r"cancelled in .*Pays\.add \(.*, but the scenario continued: Pays\.add \(.*test_mutations\.py:\d+\) "
        r"swallowed the cancellation\. Clean up in `finally`, or raise it again\.",
    ):
        play_cancelled(Pays, [call("add", a=1, b=2), *SAYS[1:]])


def test_rollout_that_swallows_its_cancellation_is_found() -> None:
    class Retries(Adds):
        async def rollout(self, conversation: Conversation) -> None:
            with contextlib.suppress(BaseException):
                await super().rollout(conversation)

    with pytest.raises(AssertionError, match=r"but the scenario continued: Retries\.rollout \(.* swallowed the"):
        play_cancelled(Retries, SAYS)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # raised in plays of `check` that do not look for leaks
def test_file_that_only_the_garbage_collector_closes_is_found() -> None:
    class Reads(Adds):
        @tool
        def read(self) -> str:
            """Read."""
            return open(__file__).read(10)  # the mistake

    unclosed = r"closed by the garbage collector alone: file <_io\.TextIOWrapper name='.*test_mutations\.py'"
    with pytest.raises(Leaked, match=f"leaked: {unclosed}"), no_leaks():
        play(Reads, [call("read"), "It is read", "Yes"])
    assert re.search(unclosed, found(Reads, fatal=False))


def test_file_that_is_left_open_is_found() -> None:
    with contextlib.ExitStack() as opened:

        class LeavesFile(Adds):
            def setup(self) -> None:
                self.log = open(__file__)  # noqa: SIM115  # the mistake
                opened.callback(self.log.close)

        assert_is_found_open(LeavesFile)


def assert_is_found_open(cls: type[Environment]) -> None:
    with pytest.raises(Leaked, match=r"leaked: file \d+ \(.*test_mutations\.py\)"):
        play_cancelled(cls, SAYS)
    assert "still open after close(): self.log (file" in found(cls)


def test_thread_that_is_left_running_is_found() -> None:
    over = threading.Event()

    class LeavesThread(Adds):
        def setup(self) -> None:
            threading.Thread(target=over.wait, name=f"ticker of {self.task.id}").start()

    with pytest.raises(Leaked, match="thread 'ticker of t-0'"), no_leaks(settle=0.1):
        play(LeavesThread, SAYS)
    over.set()


class LeavesTask(Adds):
    async def setup(self) -> None:
        self.beating = asyncio.create_task(self.beat(), name="heart")

    async def beat(self) -> None:
        await anyio.sleep(60)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.anyio
async def test_task_that_is_left_running_is_found() -> None:
    with pytest.raises(Leaked, match="leaked: task 'heart'"), no_leaks():
        await play_async(LeavesTask, SAYS)
    for task in asyncio.all_tasks():
        if task.get_name() == "heart":
            task.cancel()


LEAVE_TASKS = """
import anyio, asyncio
from tests.testing.test_mutations import SAYS, Adds, LeavesTask

class Anonymous(LeavesTask):
    async def setup(self):
        self.beating = asyncio.create_task(self.beat())

class Cancels(LeavesTask):
    async def close(self):
        self.beating.cancel()

def test_named(no_leaks):
    play(LeavesTask, SAYS)

def test_unnamed(no_leaks):
    play(Anonymous, SAYS)

@pytest.mark.parametrize("environment", [Adds, Cancels])
def test_none(no_leaks, environment):
    play(environment, SAYS)
"""


def test_task_that_the_end_of_a_plain_test_cuts_is_found(pytester: pytest.Pytester) -> None:
    result = run(pytester, LEAVE_TASKS)
    result.assert_outcomes(passed=4, errors=2)
    result.stdout.fnmatch_lines(["leaked: task 'heart' of LeavesTask.beat()"])
    result.stdout.re_match_lines([r"leaked: task 'Task-\d+' of LeavesTask\.beat\(\)"])


def test_a_task_that_is_left_running_is_named_by_check() -> None:
    assert "still open after close(): a task of LeavesTask.beat(). Close it in close()" in found(LeavesTask)


def test_resource_closed_only_on_success_fails_the_check() -> None:
    class ClosesLate(Adds):
        is_open = False

        async def rollout(self, conversation: Conversation) -> None:
            self.is_open = True
            await super().rollout(conversation)
            self.is_open = False

    def check(environment: ClosesLate) -> None:
        if environment.is_open:
            raise AssertionError("it is open")

    with pytest.raises(AssertionError, match="it is open") as caught:
        play_cancelled(ClosesLate, SAYS, check=check)
    assert "cancelled at suspension point " in caught.value.__notes__[0]
