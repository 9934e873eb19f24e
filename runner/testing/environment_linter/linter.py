"""The environment linter: it plays an environment several times with a random model, and compares the plays."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import AsyncIterable, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from typing import Any, Final

import anyio

from runner.engines.scripted.engine import ScriptedEngine
from runner.engines.scripted.script import ModelCall
from runner.environment.checks import as_environment, check_playable
from runner.environment.environment import Environment
from runner.environment.task_feed import Tasks, environment_tasks
from runner.environment.task_selection import select
from runner.environment.uncalled_methods import uncalled_methods
from runner.episode.conversation import Conversation
from runner.errors import BadOption, DeltarunnerError
from runner.options import Concurrency, Limits
from runner.runs.event_loop import on_event_loop
from runner.runs.run import Run
from runner.scoring import ScorerKind
from runner.tasks import Task
from runner.testing.environment_linter.findings import (
    AFTER_OTHER_EPISODES,
    IN_ANOTHER_ORDER,
    ON_REPEAT,
    WITHIN_GROUP,
    AgentRecord,
    Differences,
    Finding,
    SharedState,
    hook_findings,
    lifespan_findings,
    task_findings,
    tool_findings,
)
from runner.testing.environment_linter.hang_watch import HangWatch, busy_thread_places
from runner.testing.environment_linter.leak_checks import TemporaryFiles, play_watched, unawaited_coroutines
from runner.testing.environment_linter.random_values import MAX_TURNS, RandomModel
from runner.tools.tool import Tool, with_call
from runner.trajectory import Outcome, Trajectory

__all__ = ["EnvironmentCheck", "check_environment", "distinct"]


EPISODE_SECONDS: Final = 30.0
"""Time limit of an episode. The scripted engine takes no time."""
HOOK_SECONDS: Final = 20.0
"""Time limit of one hook."""
MAX_TASKS: Final = 1000
"""Maximum number of tasks that are checked without being played."""
ONE_AT_A_TIME: Final = Concurrency(episodes=1)


def check_environment(
    environment: Environment[Any] | type[Environment[Any]], *, episodes: int = 4, tasks: Tasks | None = None
) -> list[Finding]:
    """Check an environment without a model, as `deltarunner check` does, in a plain `def test_...`.

    The environment is played several times on a scripted engine whose replies are random, with several episodes at
    once and one at a time. A test asserts that nothing is found: `assert not check_environment(Game)`.

    Args:
        environment: the environment, or its class.
        episodes: the number of tasks to play, at least 1.
        tasks: tasks in place of the environment's own: a list, or the path of a JSONL file.

    Returns:
        The findings; those that make episodes fail or results wrong are `fatal`.

    Raises:
        BadEnvironment: the environment has no reward or cannot be constructed.
        BadOption: `episodes` is not a whole number of 1 or more.
        BadTask: `tasks` is a path, but not of an existing file.
    """
    if isinstance(episodes, bool) or not isinstance(episodes, int) or episodes < 1:
        raise BadOption(f"check_environment(episodes={episodes!r:.60}): give a whole number, at least 1.")
    made = as_environment(environment)
    check_playable(made)
    return distinct(EnvironmentCheck(made.fresh, episodes, tasks=tasks).findings())


def distinct(findings: Iterable[Finding]) -> list[Finding]:
    """The findings without repetitions: several episodes may produce the same finding with different numbers."""
    found: dict[str, Finding] = {}
    for finding in findings:
        found.setdefault(_text_without_numbers(finding), finding)
    return list(found.values())


def _text_without_numbers(finding: Finding) -> str:
    if not finding.of_episode:
        return finding.text
    text, _, place = finding.text.partition(" (in ")
    return re.sub(r"0x[0-9a-f]+|\d+", "", re.sub(r"task '[^']*'", "task", text)) + place


@dataclass(slots=True)
class PlayResult:
    """Result of playing the environment once."""

    records: dict[str, AgentRecord] = field(default_factory=dict)
    """The record of each agent of each episode. A key is the id of the episode, a space, and the agent."""

    tasks: dict[str, Task] = field(default_factory=dict)

    turns: int = 0
    tools: dict[str, Tool] = field(default_factory=dict)
    """The tools that could be called, by name."""

    findings: list[Finding] = field(default_factory=list)

    cut_short: bool = False
    """True if the run ended before all episodes were played."""

    hung: bool = False
    """True if an episode reached a time limit."""

    run: Run | None = None
    """The run; None until it is made."""

    environments: list[Environment[Any]] = field(default_factory=list)
    """The environment objects that played, kept so that garbage collection closes nothing that they hold."""


class EnvironmentCheck:
    """A check that plays an environment several times and compares the plays.

    1. The tasks are played in groups of two, several episodes at once.
    2. The same tasks are played again, one episode at a time, in reverse order.
    3. If these plays differ, step 2 is repeated. If not, and tools of one turn may run concurrently, two plays with
       delayed tools follow.

    Args:
        make: a function that constructs the environment.
        episodes: the number of tasks to play.
        watch: the watch for code that hangs, entered by the caller; by default one that is not entered.
        tasks: tasks in place of the environment's own.
    """

    def __init__(
        self,
        make: Callable[[], Environment[Any]],
        episodes: int,
        watch: HangWatch | None = None,
        *,
        tasks: Tasks | None = None,
    ) -> None:
        self._make = make
        self._tasks = tasks
        self._episodes = episodes
        self.environment = make()
        """An environment object that does not play."""
        self.first = PlayResult()
        self.current = self.first
        """The result of the play in progress."""
        self.temporary: TemporaryFiles | None = None
        """The folder of temporary files of the played code."""
        self._watch = watch or HangWatch(_print_to_stderr, _print_to_stderr)
        self._watch.progress = self.progress
        self._watch.is_playing = self.is_playing

    def is_playing(self) -> bool:
        """Return True while episodes are in flight.

        The limit without progress is then shorter, since each hook of an episode has its own time limit.
        """
        return self.current.run is not None and bool(self.current.run.in_flight)

    def progress(self) -> object:
        """A value that changes with every event of the run."""
        current, run = self.current, self.current.run
        activities = (
            {(attempt.key.id, attempt.activity, attempt.turns_taken) for attempt in run.in_flight}
            if run is not None
            else ()
        )
        counts = len(current.environments), len(current.records), len(current.findings)
        return id(current), *counts, frozenset(activities)

    def findings(self) -> list[Finding]:
        """All findings. Findings in the class itself come first."""
        self.temporary = TemporaryFiles()
        with self.temporary as temporary, unawaited_coroutines() as unawaited:
            found = [*hook_findings(self.environment), *self._play_findings(temporary)]
        return [
            *found,
            *task_findings(self._known_tasks(), self.environment),
            *tool_findings(self.known_tools()),
            *unawaited,
        ]

    def _known_tasks(self) -> list[Any]:
        """Up to `MAX_TASKS` tasks if they can be read without a run, else the played ones."""
        environment = self._make()
        with suppress(Exception, SystemExit):  # the play reports the same error
            source = self._selected(environment)
            alone = not environment.overrides("lifespan") and not hasattr(source, "finished")
            if isinstance(source, Iterable) and alone:
                return list(islice(source, MAX_TASKS))
        return list(self.first.tasks.values())

    def _selected(self, environment: Environment[Any], most: int | None = None) -> Tasks:
        source = environment_tasks(environment) if self._tasks is None else self._tasks
        return select(source, environment.task_class(), most=most)

    def known_tools(self) -> list[Tool]:
        """The tools of the class, and the tools that episodes added."""
        return list({**{tool.name: tool for tool in self.environment.bound_tools()}, **self.first.tools}.values())

    def _play_findings(self, temporary: TemporaryFiles) -> Iterator[Finding]:
        self.first, shared = self._play(Concurrency(episodes=self._episodes), group_size=2)
        if self.first.hung:  # in another play, each episode would hang again until its limit
            yield from self.first.findings
            return
        left_by_first_play = list(temporary.findings())  # files that may be opened once for all episodes
        again, shared_again = self._play(ONE_AT_A_TIME, is_watched=True)
        yield from _without_repeats([*shared, *shared_again])
        yield from self.first.findings
        yield from again.findings
        if left_by_first_play:
            yield from temporary.findings()
        if not self.first.cut_short and not again.cut_short:
            yield from self._difference_findings(again)

    def _difference_findings(self, again: PlayResult) -> Iterator[Finding]:
        # The two plays had opposite orders, so a difference between them comes from outside of the episode.
        differences = Differences.between(self.first.records, again.records, self.environment)
        if differences.counts:
            third, _ = self._play(ONE_AT_A_TIME)
            on_repeat = Differences.between(again.records, third.records, self.environment)
            yield from differences.findings(ON_REPEAT if on_repeat.counts else AFTER_OTHER_EPISODES)
        in_groups = Differences.within_groups(self.first.records, self.environment)
        yield from in_groups.without(differences).findings(WITHIN_GROUP)
        if not differences.counts and any(tool.is_async and tool.parallel for tool in self.first.tools.values()):
            in_order, _ = self._play(ONE_AT_A_TIME, later_first=False)
            overtaken, _ = self._play(ONE_AT_A_TIME, later_first=True)
            found = Differences.between(in_order.records, overtaken.records, self.environment)
            yield from found.findings(IN_ANOTHER_ORDER)

    def _play(
        self,
        concurrency: Concurrency,
        *,
        group_size: int = 1,
        is_watched: bool = False,
        later_first: bool | None = None,
    ) -> tuple[PlayResult, list[Finding]]:
        """Play once; return the result, and findings about state that episodes share.

        Args:
            concurrency: with several episodes at once, tasks are played in order; one at a time, in reverse order.
            group_size: raised to 2 if there are group rewards, which need something to compare.
            is_watched: also check the event loop and leaks.
            later_first: None for one call in a turn; else make two asynchronous calls in a turn, and delay the first
                call (True) or the second (False).
        """
        environment, result = self._make(), PlayResult()
        self.current = result
        shared = SharedState(environment)
        _record_environments(environment, result.environments)
        model = RandomModel(
            partial(_callable_tools, result.environments, later_first), two_calls=later_first is not None
        )
        has_group_rewards = any(scorer.kind == ScorerKind.GROUP_REWARD for scorer in environment.scorers)
        tasks = self._selected(environment, self._episodes)
        make_run = partial(
            Run,
            environment,
            # This template can write every call. `tool_findings` reports calls that other templates cannot write.
            ScriptedEngine(model, template="hermes", context=1 << 20),
            tasks=_last_first(tasks) if concurrency is ONE_AT_A_TIME else tasks,
            group_size=2 if has_group_rewards else group_size,
            limits=_strict_limits(environment),
            concurrency=concurrency,
            breaker=1,
        )
        play = partial(_play, make_run, result, self._watch)
        if is_watched:
            result.findings += play_watched(play, result.environments)
        else:
            on_event_loop(play)
        result.tools = model.known_tools
        return result, list(shared.findings())


def _print_to_stderr(text: str) -> None:
    print(f"check: {text}", file=sys.stderr, flush=True)


def _record_environments(environment: Environment[Any], played: list[Environment[Any]]) -> None:
    """Append every environment object that plays an episode to `played`."""
    make = environment.fresh

    def fresh() -> Environment[Any]:
        played.append(make())
        return played[-1]

    environment.fresh = fresh  # type: ignore[method-assign]  # replaced on this object only


def _callable_tools(
    environments: Sequence[Environment[Any]], later_first: bool | None, call: ModelCall
) -> Sequence[Tool]:
    """The tools that the agent of this call may use, delayed from its first turn on unless `later_first` is None."""
    for environment in reversed(environments):
        if environment.episode.id == call.episode:
            conversation: Conversation = environment.episode.conversations[call.agent]
            if later_first is not None and call.turn == 0:
                conversation.tools[:] = with_delays(conversation.tools, later_first=later_first)
            return conversation.tools
    return ()  # a judge in a group reward has no conversation


def _without_repeats(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Drop "X could be changed" where another finding reports that X was changed."""
    found = list(findings)
    changed = {finding.text.partition(" was changed")[0] for finding in found if " was changed" in finding.text}
    yield from (f for f in found if " was changed" in f.text or f.text.partition(" is a ")[0] not in changed)


# --- playing


def _last_first(tasks: Tasks) -> Tasks:
    """The tasks in reverse order; async sources, and sources that receive results, are returned unchanged."""
    if isinstance(tasks, AsyncIterable) or hasattr(tasks, "finished") or not isinstance(tasks, Iterable):
        return tasks

    def last_first() -> Iterator[Any]:
        yield from reversed(list(tasks))

    return last_first()


def _strict_limits(environment: Environment[Any]) -> Limits:
    """Limits with which every episode ends; stricter limits of the environment remain in force."""
    own = environment.limits.over(Limits.defaults())
    fields = ("seconds", "setup_seconds", "step_seconds", "tool_seconds", "reward_seconds", "close_seconds")
    # The limit of a hook is reached first, because its error names the hook.
    allowed = {name: EPISODE_SECONDS if name == "seconds" else HOOK_SECONDS for name in fields}
    shorter: dict[str, Any] = {name: min(getattr(own, name) or most, most) for name, most in allowed.items()}
    return Limits(turns=min(MAX_TURNS, own.turns or MAX_TURNS), **shorter)


async def _play(make_run: Callable[[], Run], result: PlayResult, watch: HangWatch) -> None:
    async with anyio.create_task_group() as watching:
        watching.start_soon(watch.mark)
        await _play_run(make_run, result, watch)
        watching.cancel_scope.cancel()


async def _play_run(make_run: Callable[[], Run], result: PlayResult, watch: HangWatch) -> None:
    run = result.run = make_run()
    before = dict(vars(run.environment))
    try:
        async with run:
            result.findings += lifespan_findings(run.environment, before)
            async for trajectory in run:
                _add_trajectory(result, trajectory, watch)
    except DeltarunnerError as error:
        result.cut_short = True
        result.findings.append(Finding(str(error)))
    if not result.records and not result.findings:
        result.findings.append(Finding("tasks() returns no task."))
    already_found = set(uncalled_methods(run.environment))
    faults = [fault for fault in run.summary.faults if fault not in already_found]
    result.findings += map(_fault_finding, faults)
    result.hung = result.hung or any("TooSlow" in fault for fault in faults)


def _add_trajectory(result: PlayResult, trajectory: Trajectory, watch: HangWatch) -> None:
    task = f"episode {trajectory.id}"
    place = watch.places.get(task, "")
    result.turns += len(trajectory.turns)
    result.records[f"{trajectory.id} {trajectory.agent}"] = AgentRecord.of(trajectory)
    result.tasks.setdefault(trajectory.task.id, trajectory.task)
    hung = trajectory.outcome is Outcome.TIME_LIMIT or trajectory.limit.endswith("seconds")
    places = busy_thread_places() or ([place] if place and hung else [])
    where = f" (last seen in {', '.join(places)})" if places else ""
    result.hung = result.hung or hung
    if trajectory.outcome.failed:
        text = f"{trajectory.outcome.value}: {trajectory.error}{where if hung else ''}"
        result.findings.append(Finding(text, of_episode=True))
    elif trajectory.outcome is Outcome.TIME_LIMIT:
        # While a program sends requests, the runner waits for it in one place, which is not a hang.
        stuck = watch.waited(task) >= HOOK_SECONDS and not trajectory.requests
        text = (
            f"an episode of at most {MAX_TURNS} turns took longer than {EPISODE_SECONDS:g} s, although the scripted "
            "engine takes no time"
        )
        if stuck:
            text = f"an await did not end within {HOOK_SECONDS:g} s, and the episode had to be cut"
        result.findings.append(Finding(f"{text}{where}", fatal=stuck))


def _fault_finding(fault: str) -> Finding:
    # Faults of group rewards begin with the reward, all others with the episode.
    if fault.startswith(ScorerKind.GROUP_REWARD):
        return Finding(fault, of_episode=True)
    text = fault.partition(": ")[2] or fault
    return Finding(text, fatal=text.startswith(f"{ScorerKind.REWARD} "), of_episode=True)


_PASS_COUNT: Final = 20
"""Number of additional passes of the event loop after each await of a delayed call."""


def with_delays(tools: list[Tool], *, later_first: bool) -> list[Tool]:
    """Return the tools with a delay in every second concurrent call.

    Of two calls, the later one is delayed, or the earlier one with `later_first`. Calls still start in order, and run
    without a delay up to their first await.
    """
    number = count(int(later_first))
    return [_with_delay(tool, number) if tool.is_async and tool.parallel else tool for tool in tools]


def _with_delay(tool: Tool, number: count[int]) -> Tool:
    call = tool.call

    async def called(**arguments: Any) -> Any:
        return await _drive_delayed(call(**arguments), passes=next(number) % 2 * _PASS_COUNT)

    return with_call(tool, called)


@types.coroutine
def _drive_delayed(coroutine: Coroutine[Any, Any, Any], *, passes: int) -> Generator[Any, Any, Any]:
    """Run the coroutine as its task would, with extra passes of the event loop after each of its awaits."""
    resume: Callable[[], Any] = partial(coroutine.send, None)
    while True:
        try:
            awaited = resume()
        except StopIteration as stop:
            return stop.value
        try:
            value = yield awaited
            for _ in range(passes):
                yield None
            resume = partial(coroutine.send, value)
        except BaseException as error:  # this may be a cancellation, which the coroutine must receive
            resume = partial(coroutine.throw, error)
