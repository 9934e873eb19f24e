"""BackgroundPlayer: a thread, an event loop and an engine for synchronous trainers. Death is an error, not a hang."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from textwrap import dedent
from typing import Any

import anyio
import pytest

from runner import (
    BackgroundPlayer,
    BadModel,
    BadOption,
    BadTask,
    BadWeights,
    Concurrency,
    Conversation,
    EngineDead,
    Group,
    Outcome,
    RunStopped,
    RunStuck,
    Task,
)
from runner.concurrency.loop_lag import Blocker
from runner.testing import Fault, Reply, ScriptedEngine, no_leaks
from tests.playing import Plain, recording, tasks
from tests.repository import ROOT

pytestmark = pytest.mark.sample_functions(2)

FIRST, SECOND = tasks(2)


class Waits(Plain):
    """Environment that waits until the test releases it, and then takes another turn."""

    entered = threading.Event()
    release = threading.Event()

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()
        if self.task.prompt == "wait":
            self.entered.set()
            while not self.release.is_set():  # noqa: ASYNC110  # another thread sets it
                await anyio.sleep(0.001)
            conversation.add("And?")
            await conversation.generate()


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """Play once, since the files that the first run of a process keeps open are not a leak of a test."""
    with BackgroundPlayer(Plain, recording("Yes")) as player:
        player.play(FIRST)


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    Waits.entered.clear()
    Waits.release.clear()
    yield
    Waits.release.set()


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[BaseException]]:
    """Call a function in a thread; the list receives its error."""
    errors: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    return thread, errors


def test_groups_come_in_the_order_of_the_tasks() -> None:
    with no_leaks(), BackgroundPlayer(Plain, recording("Yes"), group_size=2) as player:
        given = [*tasks(30), FIRST]
        groups = player.play_groups(given)
        assert player.error is None
    assert [group.task.id for group in groups] == [task.id for task in given]
    assert all(len(group.trajectories) == 2 and group.complete for group in groups)


def test_pulled_groups_are_bounded_by_the_width() -> None:
    taken = []

    def given() -> Iterator[Task]:
        for task in tasks(100):
            taken.append(task)
            yield task

    with BackgroundPlayer(Plain, recording("Yes"), group_size=2, concurrency=Concurrency(episodes=8)) as player:
        groups = player.groups(given())
        next(groups)
        assert len(taken) <= 5  # four in flight or unread, and the one that was read
        rest = list(groups)
        assert len(rest) == 99
        assert [group.task.id for group in player.groups()] == ["t0"]


def test_trainer_that_stops_reading_leaves_nothing_open() -> None:
    engine = recording("Yes")
    with no_leaks(engine), BackgroundPlayer(Plain, engine, concurrency=Concurrency(episodes=4)) as player:
        groups = player.groups(tasks(1000))
        next(groups)
        groups.close()
        next(player.groups(tasks(1000)))  # and one iterator that is never read again
    assert player.player.run.summary.episodes < 100


def test_iteration_is_closed_while_another_thread_waits() -> None:
    class Waits(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            begun.set()
            await anyio.sleep_forever()

    begun = threading.Event()
    engine = recording("Yes")
    with no_leaks(engine), BackgroundPlayer(Waits, engine, group_size=2) as player:
        groups = player.groups(tasks(3))
        read: list[Group] = []
        reader = threading.Thread(target=lambda: read.extend(groups))
        reader.start()
        assert begun.wait(60)
        for _ in range(2):  # the second call does nothing
            groups.close()
        reader.join(60)
        assert not reader.is_alive()
        assert next(groups, None) is None
    assert read == []
    assert player.player.run.summary.outcomes == {"cancelled": 6}


def test_groups_of_uneven_size_are_given_as_they_are() -> None:
    class Uneven(Plain):
        def setup(self) -> None:
            if self.episode.index < len(self.task.id):
                raise OSError("no disk")

    with BackgroundPlayer(Uneven, recording("Yes"), group_size=4) as player:
        groups = player.play_groups([Task(id="a", prompt="?"), Task(id="abc", prompt="?")])
    assert [sum(t.outcome.scored for t in group.trajectories) for group in groups] == [3, 1]
    assert [len(group.trajectories) for group in groups] == [4, 4]


def test_trainer_that_raises_ends_the_thread() -> None:
    calls = []

    def train() -> None:
        with BackgroundPlayer(Waits, recording("Yes")) as player:
            calls.append(in_thread(lambda: player.play_groups([Task(id="long", prompt="wait")])))
            Waits.entered.wait()
            raise ZeroDivisionError

    with no_leaks(), pytest.raises(ZeroDivisionError):
        train()
    ((call, errors),) = calls
    call.join()
    assert not errors or isinstance(errors[0], RunStopped)


def test_trainer_that_dies_without_closing_ends_its_process() -> None:
    code = dedent("""
        from runner import BackgroundPlayer
        from runner.testing import ScriptedEngine
        from tests.playing import Plain, tasks

        player = BackgroundPlayer(Plain, ScriptedEngine("Yes")).start()
        player.play_groups(tasks(3))
        raise ZeroDivisionError
    """)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("ZeroDivisionError")


def test_call_after_close_is_refused_with_the_fix() -> None:
    player = BackgroundPlayer(Plain, recording("Yes"))
    with pytest.raises(RuntimeError, match="has not begun"):
        player.play(FIRST)
    with player:
        assert player.play(FIRST)[0].reward == 1.0
    for call in (lambda: player.play(FIRST), lambda: player.play_groups([FIRST]), lambda: list(player.groups([FIRST]))):
        with pytest.raises(RunStopped, match="the player was closed"):
            call()
    with pytest.raises(RuntimeError, match="only once"):
        player.start()
    player.close()  # a second call does nothing


def test_dead_engine_is_an_error_of_the_trainer() -> None:
    with BackgroundPlayer(Plain, ScriptedEngine("Yes", faults={3: Fault.death(message="no power")})) as player:
        with pytest.raises(EngineDead, match="no power"):
            [player.play_groups(tasks(4)) for _ in range(100)]
        for call in (lambda: player.play(FIRST), lambda: next(player.groups([FIRST]))):
            with pytest.raises(EngineDead, match="no power"):
                call()
        assert isinstance(player.error, EngineDead)


def test_dead_thread_is_an_error_of_a_waiting_call() -> None:
    player = BackgroundPlayer(Waits, recording("Yes")).start()
    call, errors = in_thread(lambda: player.play(Task(id="long", prompt="wait")))
    Waits.entered.wait()

    def die() -> None:
        raise SystemExit(3)

    assert player._loop is not None
    player._loop.call_soon_threadsafe(die)
    call.join()
    assert player._thread is not None
    player._thread.join()
    assert [type(error) for error in errors] == [SystemExit]
    with pytest.raises(SystemExit):
        player.play(FIRST)


def test_blocked_event_loop_is_an_error_of_a_waiting_call() -> None:
    player = BackgroundPlayer(Waits, recording("Yes")).start()
    call, errors = in_thread(lambda: player.play(Task(id="long", prompt="wait")))
    Waits.entered.wait()
    stuck = player.player.run.lag.on_stuck
    assert stuck is not None
    stuck(Blocker("busy (env.py:3)", 60.0, thread=False))  # the watching thread calls it after a minute
    call.join()
    assert isinstance(errors[0], RunStuck)
    assert "busy (env.py:3)" in str(errors[0])
    with pytest.raises(RunStuck):
        player.play(FIRST)
    Waits.release.set()


def test_close_after_a_blocked_loop_was_noticed_ends_the_player() -> None:
    player = BackgroundPlayer(Plain, recording("Yes")).start()
    stuck = player.player.run.lag.on_stuck
    assert stuck is not None
    stuck(Blocker("busy (env.py:3)", 60.0, thread=False))
    player.close(cancel=True)
    assert player._thread is not None
    assert not player._thread.is_alive()


def test_interrupt_during_the_start_ends_the_player() -> None:
    begun = threading.Event()

    class Slow(ScriptedEngine):
        async def __aenter__(self) -> Any:
            begun.set()
            await anyio.sleep_forever()

    class Interrupted(BackgroundPlayer):
        def _run_thread(self, started: Any) -> None:
            threading.Thread(target=lambda: (begun.wait(), started.set_exception(KeyboardInterrupt()))).start()
            super()._run_thread(started)

    player = Interrupted(Plain, Slow("Yes"))
    with no_leaks(), pytest.raises(KeyboardInterrupt):
        player.start()
    assert player._thread is not None
    assert not player._thread.is_alive()


def test_engine_that_does_not_start_is_the_error_of_start() -> None:
    class Broken(ScriptedEngine):
        async def __aenter__(self) -> Any:
            raise BadModel("no such model")

    with no_leaks(), pytest.raises(BadModel, match="no such model"):
        BackgroundPlayer(Plain, Broken("Yes")).start()


def test_bad_task_cancels_the_other_groups_of_the_call() -> None:
    with BackgroundPlayer(Waits, recording("Yes")) as player:
        with pytest.raises(BadTask, match="no id"):
            player.play_groups([Task(id="long", prompt="wait"), Task(id="", prompt="?")])
        assert player.play(FIRST)[0].reward == 1.0
    assert player.player.run.summary.outcomes.get(Outcome.CANCELLED, 0) <= 1


def test_weights_in_mid_episode_are_recorded_by_turn() -> None:
    def played() -> None:
        groups.extend(player.play_groups([Task(id="long", prompt="wait")]))

    groups: list[Group] = []
    with BackgroundPlayer(Waits, recording("Yes")) as player:
        call, errors = in_thread(played)
        Waits.entered.wait()
        assert player.update_weights({}).version == "1"
        Waits.release.set()
        call.join()
        assert not errors
    (trajectory,) = groups[0].trajectories
    versions = [span.version for span in trajectory.segments[0].log.versions]
    assert (versions[0], versions[-1]) == ("scripted", "1")


def test_used_version_is_refused_and_play_continues() -> None:
    with BackgroundPlayer(Plain, recording("Yes")) as player:
        player.update_weights({}, version="7")
        with pytest.raises(BadOption, match="7"):
            player.update_weights({}, version="7")
        assert player.play(FIRST)[0].reward == 1.0


def test_weights_of_another_model_are_refused_and_play_continues() -> None:
    class Picky(ScriptedEngine):
        async def check_update(self, *args: Any, **named: Any) -> Any:
            raise BadWeights("the model has no tensor 'x'")

        async def _check(self, *args: Any, **named: Any) -> Any:
            raise BadWeights("the model has no tensor 'x'")

    with BackgroundPlayer(Plain, Picky("Yes")) as player:
        with pytest.raises(BadWeights, match="no tensor 'x'"):
            player.update_weights({"x": 1})
        assert player.play(FIRST)[0].reward == 1.0


def test_several_threads_may_play_at_once() -> None:
    with BackgroundPlayer(Plain, recording(lambda request: Reply("Yes")), group_size=2) as player:
        threads = [in_thread(lambda: player.play_groups(tasks(20))) for _ in range(4)]
        for thread, _ in threads:
            thread.join()
    assert [errors for _, errors in threads] == [[], [], [], []]
    assert player.player.run.summary.episodes == 4 * 40
