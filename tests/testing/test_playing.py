"""play() in a plain test: its results, and the error for each mistake."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from runner import BadOption, BadTask, Conversation, Environment, Limits, Outcome, Sampling, Task, Turn, reward
from runner.engines.scripted.script import ModelCall
from runner.testing import (
    Fault,
    QueuedEngine,
    Reply,
    ScriptedEngine,
    call,
    play,
    play_async,
    play_many,
    play_many_async,
    record,
)
from tests.testing.inner import run

pytest_plugins = ["pytester"]


class Sums(Environment):
    """Environment that sends one number per turn, until the model says stop."""

    def __init__(self) -> None:
        self.total = 0

    def tasks(self) -> list[Task]:
        return [Task(id=name, prompt=f"{name}?", answer="3") for name in ("b", "a", "c")]

    def step(self, turn: Turn) -> str | None:
        if not turn.text.isdigit():
            return None
        self.total += int(turn.text)
        return f"{self.total}."

    @reward
    def correct(self) -> Any:  # synchronous or asynchronous
        return self.total == int(self.task.answer)


def test_a_list_is_said_in_order_and_the_trajectory_comes_back() -> None:
    trajectory = play(Sums, ["1", "2", "stop"])
    assert (trajectory.task.id, trajectory.outcome, trajectory.reward) == ("b", Outcome.COMPLETED, 1)
    assert [message["content"] for message in trajectory.messages] == ["b?", "1", "1.", "2", "3.", "stop"]


def test_one_text_or_function_answers_every_turn() -> None:
    assert play(Sums, "1", limits=Limits(turns=4)).outcome is Outcome.TURN_LIMIT

    def model(asked: ModelCall) -> str:
        return "1" if asked.turn < 3 else "stop"

    assert play(Sums, model).reward == 1


def test_a_list_may_hold_calls_ids_full_replies_and_functions() -> None:
    ids = [ord("1")]
    trajectory = play(Sums, [ids, Reply("1"), lambda asked: str(asked.turn - 1), "stop"])
    assert [turn.text for turn in trajectory.turns] == ["1", "1", "1", "stop"]


def test_the_task_is_chosen_by_id_or_given() -> None:
    assert play(Sums, "stop", task="c").task.id == "c"
    own = Task(id="own", prompt="?", answer="0")
    assert play(Sums, "stop", task=own).reward == 1


def test_tasks_may_come_from_async_code_or_a_file(tmp_path: Path) -> None:
    class Later(Sums):
        async def tasks(self) -> AsyncIterator[Task]:  # type: ignore[override]  # asynchronous instead
            for name in ("b", "a"):
                yield Task(id=name, prompt="?", answer="0")

    assert play(Later, "stop", task="a").reward == 1
    assert {trajectory.task.id for trajectory in play_many(Later, "stop")} == {"a", "b"}
    (tmp_path / "tasks.jsonl").write_text('{"id": "z", "prompt": "?", "answer": "0"}\n')
    assert [trajectory.task.id for trajectory in play_many(Sums, "stop", tasks=tmp_path / "tasks.jsonl")] == ["z"]


def test_file_that_has_the_episode_already_is_refused(tmp_path: Path) -> None:
    assert play(Sums, "stop", file=tmp_path / "run.db").text == "stop"
    with pytest.raises(BadOption, match=r"the file already contains this episode\. Give another file"):
        play(Sums, "stop", file=tmp_path / "run.db")


def test_environment_without_tasks_names_the_fix() -> None:
    class Empty(Sums):
        def tasks(self) -> list[Task]:
            return []

    with pytest.raises(BadTask, match=r"the environment has no task\. Give one: play\(\.\.\., task=Task"):
        play(Empty, "stop")


def test_a_dict_speaks_for_each_agent() -> None:
    class Judged(Sums):
        @reward
        async def correct(self) -> bool:
            judge = self.episode.conversation("judge", prompt="Right?")
            return (await judge.generate()).text == "Yes"

    assert play(Judged, {"main": ["1", "stop"], "judge": "Yes"}).reward == 1
    with pytest.raises(AssertionError, match=r"no reply is left.*for agent 'judge'"):
        play(Judged, ["1", "stop"])


def test_a_failed_episode_comes_back_as_any_other() -> None:
    class Broken(Sums):
        def step(self, turn: Turn) -> None:
            raise ZeroDivisionError("mine")

    trajectory = play(Broken, "1")
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "ZeroDivisionError: mine" in trajectory.error


def test_replies_that_are_left_over_are_listed() -> None:
    with pytest.raises(AssertionError, match=r"^2 replies were never used:\n  main: '5'\n  main: f\(a=1\)\n"):
        play(Sums, ["stop", "5", call("f", a=1)])


class Ends(Sums):
    def step(self, turn: Turn) -> str | None:
        if turn.text == "break":
            raise ZeroDivisionError("mine")
        return super().step(turn)


@pytest.mark.parametrize(
    ("says", "limits", "ending"),
    [
        (["break", "5"], None, r"b#0 ended env_error: ZeroDivisionError: mine \(in step, .*:\d+\)"),
        (["1", "1", "5"], Limits(turns=2), r"b#0 ended turn_limit \(turns\)"),
        (["stop", "5"], None, "b#0 ended completed"),
    ],
    ids=["env_error", "turn_limit", "completed"],
)
@pytest.mark.parametrize("play_function", [play, partial(play_many, tasks=1)], ids=["play", "play_many"])
def test_unused_replies_are_reported_with_the_ending(
    play_function: Callable[..., object], says: list[str], limits: Limits | None, ending: str
) -> None:
    with pytest.raises(AssertionError, match=ending):
        play_function(Ends, says, limits=limits)


def test_endings_of_many_episodes_are_counted() -> None:
    with pytest.raises(AssertionError, match=r"3 episodes ended env_error: ZeroDivisionError: mine"):
        play_many(Ends, ["break", "5"])


def test_fixture_reports_unused_replies_with_the_ending(pytester: pytest.Pytester) -> None:
    result = run(
        pytester, "def test_it(scripted_engine):\n    play(Calculator, scripted_engine.say('42', 'more'), task='6')"
    )
    result.stdout.fnmatch_lines(["*1 reply was never used:*", "*6#0 ended completed*"])


def test_empty_reply_list_fits_only_an_environment_without_calls() -> None:
    class Silent(Sums):
        async def rollout(self, conversation: Conversation) -> None:
            self.total = 3

    for play_function in (play, play_many):
        assert play_function(Silent, [])
    with pytest.raises(AssertionError, match=r"no reply is left for this call \(0 used so far\)"):
        play(Sums, [])


def test_each_of_several_trained_agents_can_be_had() -> None:
    class Two(Sums):
        async def rollout(self, conversation: Conversation) -> None:
            other = self.episode.conversation("other", prompt="And you?", train=True)
            await conversation.generate()
            await other.generate()

    says = {"main": ["1"], "other": ["2"]}
    assert [play(Two, says, agent=agent).text for agent in ("main", "other")] == ["1", "2"]
    assert {t.agent: t.text for t in play_many(Two, says, tasks=1)} == {"main": "1", "other": "2"}
    with pytest.raises(
        BadOption, match=r"play\(agent='third'\): no trained agent of that name; the trained agents are 'main', 'other'"
    ):
        play(Two, says, agent="third")


def test_missing_reply_shows_the_request() -> None:
    with pytest.raises(
        AssertionError,
        match=r"^b#0/main/1: .*no reply is left for this call \(1 used so far\)\. Add one .*1\..*assistant",
    ):
        play(Sums, ["1"])


def test_retry_after_engine_failure_uses_the_next_reply() -> None:
    assert play(Sums, [Reply("1", fault=Fault.error(at=1)), "3", "stop"]).reward == 1


def test_play_many_returns_trajectories_by_task_and_index() -> None:
    played = play_many(Sums, ["1", "2", "stop"], group_size=2)
    assert [trajectory.id for trajectory in played] == ["b#0", "b#1", "a#0", "a#1", "c#0", "c#1"]
    assert {trajectory.reward for trajectory in played} == {1}


def test_play_many_returns_trajectories_in_the_order_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(f'{{"id": "{name}", "prompt": "?", "answer": "3"}}\n' for name in ("last", "first")))

    def model(asked: ModelCall) -> str:
        return "1" if asked.episode == "last#0" and asked.turn < 20 else "stop"

    for tasks in (file, str(file)):
        played = play_many(Sums, model, tasks=tasks)
        assert [(trajectory.task.id, len(trajectory.turns)) for trajectory in played] == [("last", 21), ("first", 1)]


def test_play_many_plays_the_given_number_of_tasks() -> None:
    assert [trajectory.task.id for trajectory in play_many(Sums, "stop", tasks=2)] == ["b", "a"]


def test_play_many_with_one_queue_plays_one_after_another() -> None:
    engine = QueuedEngine().say("3", "stop", "stop", "1", "stop")
    assert [trajectory.reward for trajectory in play_many(Sums, engine)] == [1, 0, 0]


def test_play_many_names_a_reply_that_no_episode_used() -> None:
    with pytest.raises(AssertionError, match=r"3 replies were given, but no episode used more than 2; .*'more'"):
        play_many(Sums, ["1", "stop", "more"])
    with pytest.raises(AssertionError, match=r"2 replies were given for judge, but no episode used more than 0"):
        play_many(Sums, {"main": "stop", "judge": ["a", "b"]})


def test_an_engine_of_ones_own_is_left_alone() -> None:
    engine = ScriptedEngine(["stop", "never said"], record=True)
    assert play(Sums, engine, sampling=Sampling(max_tokens=2)).outcome is Outcome.TOKEN_LIMIT
    assert len(engine.calls) == 1


@pytest.mark.anyio
async def test_plain_functions_in_a_loop_name_their_async_forms() -> None:
    assert (await play_async(Sums, ["3", "stop"])).reward == 1
    assert len(await play_many_async(Sums, "stop")) == 3
    for play_function in (play, play_many):
        with pytest.raises(
            RuntimeError, match=rf"{play_function.__name__}\(\) is for a plain .* `await {play_function.__name__}_async"
        ):
            play_function(Sums, "stop")


ANY: Any = play  # mistakes that a type checker would find
MISTAKES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no environment": (lambda: ANY(int, "x"), BadOption, r"play\(<class 'int'>, ...\): give an environment"),
    "an engine's class": (lambda: ANY(Sums, ScriptedEngine), BadOption, "ScriptedEngine.: give an engine"),
    "a number": (lambda: ANY(Sums, 5), BadOption, r"play\(\.\.\., 5\): give an engine, .* or replies"),
    "nothing of an agent": (lambda: ANY(Sums, {"main": None}), BadOption, "'main': None}.: give its replies"),
    "no such agent": (
        lambda: play(Sums, "x", agent="judge"),
        BadOption,
        "agent='judge'.: .* the trained agents are 'main'",
    ),
    "a number among replies": (lambda: ANY(Sums, ["1", 5]), BadOption, "5 is not a reply: give a string"),
    "a function's number": (lambda: ANY(Sums, lambda asked: 5), AssertionError, "lambda.* returned 5 .int.: return a"),
    "a function's error": (lambda: ANY(Sums, lambda asked: 1 / 0), AssertionError, "raised ZeroDivisionError"),
    "no such task": (
        lambda: play(Sums, "x", task="d"),
        BadTask,
        "None of 3 tasks has the id 'd'; the first ids are 'b'",
    ),
    "a task's number": (lambda: ANY(Sums, "x", task=3), BadOption, "give a Task, or the id"),
    "a group": (lambda: play(Sums, "x", group_size=2), BadOption, "play_many"),
    "no tasks": (lambda: play_many(Sums, "x", tasks=0), BadOption, "at least 1"),
    "another clock": (lambda: ANY(Sums, "x", clock=5), BadOption, "virtual_clock"),
    "limits": (lambda: ANY(Sums, "x", limits={}), BadOption, "give Limits"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message_at_the_line_that_made_it(name: str) -> None:
    mistake, kind, message = MISTAKES[name]
    with pytest.raises(kind, match=message) as caught:
        mistake()
    shown = [entry for entry in caught.traceback.filter(caught) if "/runner/" in str(entry.path)]
    assert not shown


def test_a_failing_test_shows_what_was_played(pytester: pytest.Pytester) -> None:
    result = run(
        pytester, "def test_it():\n    assert play(Calculator, [call('multiply', a=6, b=7), '43']).reward == 1"
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*Episodes played*", "6#0  completed  reward 0 *", "sampled*multiply(a=6, b=7)*", "tool*42"]
    )


def test_a_passing_test_keeps_nothing(pytester: pytest.Pytester) -> None:
    test = """
from runner.testing.playing import RECENT_EPISODES

def test_first():
    play(Calculator, "42")
    assert RECENT_EPISODES

def test_second():
    assert not RECENT_EPISODES
"""
    run(pytester, test).assert_outcomes(passed=2)


def test_an_engine_that_was_entered_on_another_event_loop_is_refused() -> None:
    engine = QueuedEngine().always("42")
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(engine):
        with pytest.raises(
            BadOption, match="this QueuedEngine was entered on another event loop, and works only there"
        ):
            play(Sums, engine)
        with pytest.raises(BadOption, match="this RecordingEngine was entered on another event loop"):
            play(Sums, record(engine))


def test_session_engine_on_function_loop_is_refused(pytester: pytest.Pytester) -> None:
    test = """
@pytest.fixture(scope="module")
def shared():
    from anyio.from_thread import start_blocking_portal
    engine = QueuedEngine().always("42")
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(engine):
        yield engine

@pytest.mark.anyio
async def test_async(shared):
    await play_async(Calculator, shared)
"""
    result = run(pytester, test)
    result.stdout.fnmatch_lines(["*BadOption: this QueuedEngine was entered on another event loop*`real_engine`*"])
    assert not [line for line in result.outlines if "sharing.py" in line]
