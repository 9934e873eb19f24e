"""Episodes in tests: `play` and `play_many` return their trajectories, with every token checked."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import anyio
import anyio.to_thread
from anyio.from_thread import BlockingPortal
from typing_extensions import Unpack

from runner.engines.base import BaseEngine, Engine
from runner.engines.scripted.engine import ScriptedEngine
from runner.engines.scripted.replies import Replies
from runner.engines.scripted.script import Reply
from runner.environment.checks import as_environment
from runner.environment.environment import Environment
from runner.environment.task_feed import Tasks, environment_tasks
from runner.environment.task_files import read_tasks
from runner.environment.task_selection import select
from runner.episode.key import MAIN
from runner.errors import BadOption, BadTask, DeltarunnerError
from runner.options import Concurrency
from runner.runs.event_loop import on_event_loop
from runner.runs.options import RunKeywords
from runner.runs.run import Run
from runner.store.reader import RunFile
from runner.tasks import Task
from runner.testing.assertions import assert_exact
from runner.testing.failure_report import endings
from runner.testing.leaks import recording_unfinished_tasks
from runner.testing.queued_engine import CheckedEngine, QueuedEngine, ReplySource, show_reply
from runner.testing.virtual_clock import VirtualClock
from runner.testing.watchdog import LoopWatchdog
from runner.trajectory import Trajectory

__all__ = [
    "ACTIVE_WATCHDOGS",
    "RECENT_EPISODES",
    "EngineOrReplies",
    "play",
    "play_async",
    "play_many",
    "play_many_async",
]

# Pytest leaves out the frames of this module and shows the line of the test, where the fix belongs.
__tracebackhide__ = True

T = TypeVar("T")

EnvironmentOrClass: TypeAlias = Environment[Any] | type[Environment[Any]]
"""An environment, or its class if the class needs no arguments."""

EngineOrReplies: TypeAlias = BaseEngine | Replies | Sequence[ReplySource]
"""An engine, or the replies of a scripted engine."""

RECENT_EPISODES: Final[deque[tuple[Trajectory, BaseEngine]]] = deque(maxlen=16)
"""The last episodes of the current test, for failure reports; the plugin clears it after each test."""

ACTIVE_WATCHDOGS: Final[list[LoopWatchdog]] = []
"""Watchdogs of the event loops of the current test, added by the plugin."""


_ASYNC_NAMES: Final = {
    "play": "play_async",
    "play_many": "play_many_async",
    "play_cancelled": "cancel_everywhere",
}


def play(
    environment: EnvironmentOrClass,
    engine: EngineOrReplies,
    *,
    task: Task | str | None = None,
    agent: str = MAIN,
    clock: VirtualClock | None = None,
    **options: Unpack[RunKeywords],
) -> Trajectory:
    """Play one episode to its end, in a plain `def test_...`.

    The trajectory is checked with `assert_exact`. A failed episode is returned like any other: see its `outcome` and
    `error`.

    Args:
        environment: the environment, or its class.
        engine: an engine; or replies: a list, used once and in order (`[]` for none), a text or a function for every
            turn of `main`, or a dict of these by agent.
        task: the task or its id; by default the first one.
        agent: the agent whose trajectory is returned, if several are trained; `play_many(..., tasks=1)` returns all.
        clock: a virtual clock, on which limits of minutes end immediately.
        options: the fields of `RunOptions` by name, except `tasks`.

    Returns:
        The trajectory of the agent.

    Raises:
        AssertionError: replies were missing or left over, the trajectory is not exact, or the environment's code raised
            an error that does not fail an episode. Examples are errors in a metric, a group reward or `close()`.
        BadInput: an argument cannot be used; the message names the fix.
        RuntimeError: the caller is on an event loop. Use `play_async` there.
    """
    return run_sync("play", partial(play_async, environment, engine, task=task, agent=agent, **options), engine, clock)


def play_many(
    environment: EnvironmentOrClass,
    engine: EngineOrReplies,
    *,
    tasks: int | Tasks | None = None,
    clock: VirtualClock | None = None,
    **options: Unpack[RunKeywords],
) -> list[Trajectory]:
    """Play many episodes concurrently, in a plain `def test_...`.

    Args:
        environment: the environment, or its class.
        engine: as for `play`, but every conversation reads a list of replies from its beginning. An engine with a
            queue of replies plays one episode after another, unless `concurrency` is given.
        tasks: number of the environment's tasks to play, or other tasks; by default all of its tasks.
        clock: a virtual clock.
        options: the fields of `RunOptions`, by name; `group_size=4` plays each task four times.

    Returns:
        All trained trajectories, including failed ones, in the order of tasks, indices and agents. With an async source
        or a source that receives results, in the order in which they finish.

    Raises:
        AssertionError: replies were missing or left over, a trajectory is not exact, or the environment's code raised
            an error that does not fail an episode. Examples are errors in a metric, a group reward or `close()`.
        BadInput: an argument cannot be used; the message names the fix.
        RuntimeError: the caller is on an event loop. Use `play_many_async` there.
    """
    return run_sync("play_many", partial(play_many_async, environment, engine, tasks=tasks, **options), engine, clock)


async def play_async(
    environment: EnvironmentOrClass,
    engine: EngineOrReplies,
    *,
    task: Task | str | None = None,
    agent: str = MAIN,
    **options: Unpack[RunKeywords],
) -> Trajectory:
    """`play` for an `async def` test."""
    try:
        return await _play_one(environment, engine, task, agent, options)
    except (AssertionError, DeltarunnerError) as error:
        # The traceback inside the test kit is dropped, because the message names the fix.
        raise error.with_traceback(None) from error.__cause__


def choose_task(environment: EnvironmentOrClass, task: Task | str | None) -> Task:
    """The given task, the environment's task with this id, or its first one.

    Raises:
        BadTask: the environment has no task, or its `tasks()` is asynchronous.
        BadOption: `environment` is not an environment, or `task` is neither a task nor an id.
    """
    if isinstance(task, Task):
        return task
    chosen = _select_tasks(environment, 1, task)
    if not isinstance(chosen, Iterable) or isinstance(chosen, str | Path):
        raise BadTask("tasks() is async: give the task itself, task=Task(...).")
    for first in chosen:
        return first
    raise BadTask("the environment has no task. Give one: task=Task(id='one', prompt='...').")


async def _play_one(
    environment: EnvironmentOrClass, engine: EngineOrReplies, task: Task | str | None, agent: str, options: RunKeywords
) -> Trajectory:
    if options.get("group_size", 1) != 1:
        raise BadOption(f"play(group_size={options['group_size']!r}): play() plays one episode; use play_many().")
    speaker = _queued_engine(engine)
    chosen = [task] if isinstance(task, Task) else _select_tasks(environment, 1, task)
    trajectories = await _play_on_home_loop(environment, speaker, chosen, options)
    if not trajectories and options.get("file"):
        raise BadOption(
            f"play(file={str(options['file'])!r}): the file already contains this episode. Give another file, or none."
        )
    if isinstance(speaker, QueuedEngine) and speaker is not engine:
        _require_no_leftovers(speaker.leftovers(), trajectories)
    if not trajectories:
        raise BadTask("play(): the environment has no task. Give one: play(..., task=Task(id='one', prompt='...')).")
    return _of_agent(trajectories, agent)


def _of_agent(trajectories: Sequence[Trajectory], agent: str) -> Trajectory:
    """The trajectory of an agent; the first trajectory if the agent is `main` and is not trained.

    Raises:
        BadOption: the agent is not trained, or does not exist.
    """
    for trajectory in trajectories:
        if trajectory.agent == agent:
            return trajectory
    if agent == MAIN:
        return trajectories[0]
    agents = ", ".join(repr(trajectory.agent) for trajectory in trajectories)
    raise BadOption(f"play(agent={agent!r}): no trained agent of that name; the trained agents are {agents}.")


async def play_many_async(
    environment: EnvironmentOrClass,
    engine: EngineOrReplies,
    *,
    tasks: int | Tasks | None = None,
    **options: Unpack[RunKeywords],
) -> list[Trajectory]:
    """`play_many` for an `async def` test."""
    try:
        return await _play_many(environment, engine, tasks, options)
    except (AssertionError, DeltarunnerError) as error:
        raise error.with_traceback(None) from error.__cause__


async def _play_many(
    environment: EnvironmentOrClass, engine: EngineOrReplies, tasks: int | Tasks | None, options: RunKeywords
) -> list[Trajectory]:
    speaker = engine_for(engine)
    if isinstance(speaker, QueuedEngine) and speaker is engine:
        options.setdefault("concurrency", Concurrency(episodes=1))
    if isinstance(tasks, bool) or (isinstance(tasks, int) and tasks < 1):
        raise BadOption(f"play_many(tasks={tasks!r}): give a number of at least 1, or a list of tasks.")
    chosen = _select_tasks(environment, tasks, None) if isinstance(tasks, int | None) else tasks
    order: dict[str, int] = {}
    trajectories = await _play_on_home_loop(environment, speaker, _recording_order(chosen, order), options)
    if speaker is not engine:
        _require_no_leftovers(_unused_replies(engine, speaker), trajectories)
    if isinstance(chosen, str | Path):  # the run has the path, since it checks the whole file first
        order = {task.id: number for number, task in enumerate(read_tasks(Path(chosen), environment.task_class()))}
    if not order:  # an async source, and a source that receives results, have no fixed order
        return trajectories
    return sorted(trajectories, key=lambda t: (order[t.task.id], t.visit, t.index, t.agent != MAIN, t.agent))


async def _play_on_home_loop(
    environment: EnvironmentOrClass, engine: BaseEngine, tasks: Tasks, options: RunKeywords
) -> list[Trajectory]:
    """Play on the event loop of the engine, which may be another one than the caller's."""
    home: BlockingPortal | None = getattr(engine, "home", None)
    if home is None:
        return await _on_this_loop(environment, engine, tasks, options)
    future = home.start_task_soon(_on_this_loop, environment, engine, tasks, options)
    try:
        return await anyio.to_thread.run_sync(future.result, abandon_on_cancel=True)
    except BaseException:
        future.cancel()
        raise


async def _on_this_loop(
    environment: EnvironmentOrClass, engine: BaseEngine, tasks: Tasks, options: RunKeywords
) -> list[Trajectory]:
    for name in options.keys() - RunKeywords.__annotations__.keys():
        raise BadOption(f"play({name}=): unknown option; the options are {', '.join(RunKeywords.__annotations__)}.")
    # Failed episodes do not stop the run, because a test may expect them.
    settings: dict[str, Any] = {"breaker": 1, **options, "tasks": tasks}
    async with AsyncExitStack() as watched:
        for watchdog in ACTIVE_WATCHDOGS:
            await watched.enter_async_context(watchdog)
        async with Run(environment, engine, **settings) as run:
            trajectories = [trajectory async for trajectory in run]
    RECENT_EPISODES.extend((trajectory, engine) for trajectory in trajectories)
    if isinstance(engine, CheckedEngine):
        engine.check()
    for trajectory in trajectories:
        assert_exact(trajectory, engine if isinstance(engine, Engine) else None)
    _check_nothing_raised(run.summary.faults)
    return trajectories


_AUTHOR_FAULT: Final = re.compile(r"(.*?: )?(group_reward |metric |reward |close\(\): |exit_stack: )")
"""Beginning of the text of an author's error that neither ends the run nor fails an episode."""


def _check_nothing_raised(faults: Iterable[str]) -> None:
    raised = list(dict.fromkeys(fault for fault in faults if _AUTHOR_FAULT.match(fault)))
    if raised:
        more = f"\nand {len(raised) - MAX_FAULTS} more" if len(raised) > MAX_FAULTS else ""
        raise AssertionError(
            "the environment's code raised errors that do not fail an episode; correct the code:\n"
            + "\n".join(raised[:MAX_FAULTS])
            + more
        )


MAX_FAULTS: Final = 5
"""Maximum number of errors of an author's code in one message."""


def run_sync(name: str, function: Callable[[], Awaitable[T]], engine: Any, clock: VirtualClock | None) -> T:
    """Run an asynchronous function from synchronous code, on a new event loop or a virtual clock.

    Raises:
        RuntimeError: the caller is on an event loop.
        BadOption: `clock` is not a virtual clock, or `engine` is a real engine, which needs real time.
    """
    if _on_an_event_loop():
        raise RuntimeError(
            f"{name}() is for a plain `def test_...`, but was called on an event loop: "
            f"write `await {_ASYNC_NAMES[name]}(...)` here."
        )
    if not isinstance(clock, VirtualClock | None):
        raise BadOption(f"{name}(clock={clock!r:.60}): give the fixture `virtual_clock`, or VirtualClock().")
    if clock is not None and getattr(engine, "home", None) is not None:
        raise BadOption(
            f"{name}(clock=): a real engine needs real time. Use a scripted engine, or leave out the clock."
        )

    # The name of this function is the name of the task. The name of a partial would contain all arguments.
    async def watched() -> T:
        return await recording_unfinished_tasks(function)

    try:
        return on_event_loop(watched) if clock is None else clock.run(watched)
    except (AssertionError, DeltarunnerError) as error:
        raise error.with_traceback(None) from error.__cause__


def _on_an_event_loop() -> bool:
    try:
        anyio.get_current_task()
    except anyio.NoEventLoopError:
        return False
    return True


# --- engines


def _queued_engine(given: EngineOrReplies) -> BaseEngine:
    """An engine for one episode, in which each reply of a list is used once.

    Raises:
        BadOption: the value is neither an engine nor replies.
    """
    if isinstance(given, BaseEngine | type) or not isinstance(given, list | tuple | Mapping):
        return engine_for(given)
    queued = QueuedEngine()
    queued.add_advice, queued.drop_advice = "Add one to what play() is given", "give play() fewer"
    by_agent: Any = given if isinstance(given, Mapping) else {MAIN: given}
    for agent, own in by_agent.items():
        if not isinstance(own, list | tuple):
            if not own:
                raise BadOption(f"play({{{agent!r}: {own!r}}}): give its replies; [] stands for none.")
            queued.always(own, agent=agent)
        elif own:
            queued.say(*own, agent=agent)
    return queued


def engine_for(given: EngineOrReplies) -> BaseEngine:
    """The given engine, or a scripted engine whose conversations each read a list of replies from its beginning.

    Raises:
        BadOption: the value is neither an engine nor replies.
    """
    match given:
        case BaseEngine():
            return given
        case str() | Reply():
            return QueuedEngine().always(given)
        case [] | ():
            return _queued_engine([])
        case list() | tuple() | Mapping() | Path() | RunFile():
            return ScriptedEngine(given, record=True)
    if callable(given) and not isinstance(given, type):
        return QueuedEngine().always(given)
    name = given.__name__ if isinstance(given, type) else f"{given!r:.60}"
    raise BadOption(
        f"play(..., {name}): give an engine, such as the fixture `scripted_engine`, or replies: a string, a list "
        "of replies, a function, or a dict of these by agent."
    )


def _require_no_leftovers(leftovers: str, trajectories: Sequence[Trajectory]) -> None:
    if leftovers:
        raise AssertionError(f"{leftovers}\n{endings(trajectories)}".rstrip())


def _unused_replies(replies: Any, engine: BaseEngine) -> str:
    """A message about replies of a list that no conversation reached, or ""."""
    if not isinstance(engine, ScriptedEngine) or not isinstance(replies, list | tuple | Mapping):
        return ""
    used: dict[str, int] = {}
    for call in engine.calls:
        conversation, _, number = call.name.rpartition("/")
        agent = conversation.rpartition("/")[2]
        used[agent] = max(used.get(agent, 0), int(number) + 1)
    by_agent: Any = replies if isinstance(replies, Mapping) else {None: replies}
    for agent, own in by_agent.items():
        most = max(used.values(), default=0) if agent is None else used.get(agent, 0)
        if isinstance(own, list | tuple) and most < len(own):
            whose = "" if agent is None else f" for {agent}"
            return (
                f"{len(own)} replies were given{whose}, but no episode used more than {most}; the first unused "
                f"one is {show_reply(own[most])}. Remove it, or find out why every episode ended before."
            )
    return ""


# --- tasks


def _select_tasks(environment: EnvironmentOrClass, most: int | None, only: str | None) -> Tasks:
    if not isinstance(only, str | None):
        raise BadOption(f"play(task={only!r:.60}): give a Task, or the id of one of the environment's tasks.")
    is_class = isinstance(environment, type) and issubclass(environment, Environment)
    if not is_class and not isinstance(environment, Environment):
        raise BadOption(f"play({environment!r:.60}, ...): give an environment, such as Calculator or Calculator(3).")
    made = as_environment(environment)
    return select(environment_tasks(made), made.task_class(), most=None if only else most, only=only)


def _recording_order(tasks: Tasks, order: dict[str, int]) -> Tasks:
    """Return the tasks, and record in `order` the position of each id: at once for a list, else as tasks are read.

    A path, an async source, or a source that receives results is returned without a record.
    """
    if not isinstance(tasks, Iterable) or isinstance(tasks, str | Path) or hasattr(tasks, "finished"):
        return tasks
    if isinstance(tasks, Sequence):
        order.update((getattr(task, "id", ""), number) for number, task in enumerate(tasks))
        return tasks

    def given() -> Iterable[Task]:
        for number, task in enumerate(tasks):
            order.setdefault(getattr(task, "id", ""), number)
            yield task

    return given()
