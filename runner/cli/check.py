"""`deltarunner check`: what is wrong with an environment, found out without a model."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Final

import anyio
from rich.text import Text

from runner.cli.findings import (
    AFTER_OTHERS,
    AGAIN,
    IN_GROUPS,
    TOGETHER,
    Differences,
    Finding,
    Seen,
    SharedState,
    of_hooks,
    of_lifespan,
    of_tasks,
    of_tools,
)
from runner.cli.hanging import HangWatch, where_threads_are
from runner.cli.leftovers import TemporaryFiles, unawaited, watched
from runner.cli.random_model import TURNS, RandomModel
from runner.cli.report import make_console
from runner.cli.slowing import slowed
from runner.cli.values import pairs
from runner.engines.scripted.engine import ScriptedEngine
from runner.engines.scripted.script import ModelCall
from runner.environment.checks import check_playable
from runner.environment.environment import Environment
from runner.environment.loading import construct, find_environment
from runner.environment.task_feed import Tasks, own_tasks
from runner.environment.task_selection import select
from runner.environment.uncalled import uncalled
from runner.episode.conversation import Conversation
from runner.errors import BadEnvironment, DeltarunnerError
from runner.options import Concurrency, Limits
from runner.runs.event_loop import exit_now, on_event_loop
from runner.runs.run import Run
from runner.scoring import Scorer, ScorerKind
from runner.tasks import Task
from runner.tools.tool import Tool
from runner.trajectory import Outcome, Trajectory
from runner.transcript import printable

__all__ = ["check_command"]

CHECKED = (
    "tools: schemas, arguments that some chat templates cannot write, calls of one turn that hang on one another",
    "rewards: those that raise, are not numbers, or differ when the same is played twice or within a group",
    "tasks: ids, and values that a run file cannot keep",
    "episodes: what they share, what they leave open, random numbers without a seed",
    "code: what blocks the event loop or is not awaited; lifespan(), hooks, exit_stack",
)
SECONDS: Final = 30.0
"""The seconds that an episode may take, none of which is a model's."""
TASKS: Final = 1000
"""The tasks that are looked at without being played."""
SECONDS_OF_A_HOOK: Final = 20.0
"""The seconds that one hook may take."""
ONE_AT_A_TIME: Final = Concurrency(episodes=1)


@dataclass(slots=True)
class Played:
    """What came of playing the environment once."""

    seen: dict[str, Seen] = field(default_factory=dict)
    """What each agent of each episode saw and was given, by the names of both."""

    tasks: dict[str, Task] = field(default_factory=dict)
    """The tasks that were played, by id."""

    turns: int = 0
    """The number of turns."""

    tools: dict[str, Tool] = field(default_factory=dict)
    """The tools that could be called, by name."""

    findings: list[Finding] = field(default_factory=list)
    """The faults that were found."""

    was_cut: bool = False
    """Whether the run ended before all was played."""

    hung: bool = False
    """Whether an episode took too long."""

    run: Run | None = None
    """The run, once it has begun."""

    environments: list[Environment[Any]] = field(default_factory=list)
    """The environments that played, kept alive so that nothing they hold is closed by being forgotten."""


def check_command(name: str, settings: tuple[str, ...], *, episodes: int) -> int:
    """Check, print what was found, and return the exit code: that of `BadEnvironment` where something is fatal."""
    begun: list[Checking] = []
    # Also around the author's module and constructor: these may hang too.
    with HangWatch(_say_waiting, partial(_end_hanging, begun)) as watch:
        checked = Checking(find_environment(name), settings, episodes, watch)
        begun.append(checked)
        check_playable(checked.environment)
        findings = _unlike(checked.findings())
    _print(checked, findings)
    return BadEnvironment.exit_code if any(finding.fatal for finding in findings) else 0


def _unlike(findings: Iterable[Finding]) -> list[Finding]:
    unlike: dict[str, Finding] = {}
    for finding in findings:
        unlike.setdefault(_of_any_episode(finding), finding)
    return list(unlike.values())


def _say_waiting(text: str) -> None:
    print(f"check: {text}", file=sys.stderr, flush=True)


def _end_hanging(begun: Sequence[Checking], text: str) -> None:
    """Say what was found so far, and end the process: what hangs in it cannot be ended otherwise."""
    if begun:
        checked = begun[0]
        with suppress(Exception):  # while it is played it may change at any moment
            _print(checked, _unlike([Finding(text), *checked.played.findings]))
        if checked.temporary is not None:
            checked.temporary.cleanup()
    else:
        print(f"check: {text}", file=sys.stderr, flush=True)
    exit_now(BadEnvironment.exit_code)


class Checking:
    """Plays an environment again and again, and looks.

    First all episodes at once, in groups of two; then one at a time in the opposite order; and where something may hang
    on it, once more in that order, or with tools of one turn that end in another one.
    """

    def __init__(
        self, cls: type[Environment[Any]], settings: tuple[str, ...], episodes: int, watch: HangWatch | None = None
    ) -> None:
        self._cls = cls
        self._settings = settings
        self._episodes = episodes
        self.environment = self._made()
        """An environment that is not played: it is looked at."""
        self.first = Played()
        """What came of the first play."""
        self.played = self.first
        """What comes of the play that is under way."""
        self.temporary: TemporaryFiles | None = None
        """The temporary files of what is played."""
        self._watch = watch or HangWatch(_say_waiting, _say_waiting)
        self._watch.progress = self.progress
        self._watch.plays = self.plays

    def plays(self) -> bool:
        """Whether episodes are in flight, each hook of which has a limit."""
        return self.played.run is not None and bool(self.played.run.plays)

    def progress(self) -> object:
        """Another value whenever something has happened."""
        played, run = self.played, self.played.run
        activities = {(play.key.id, play.activity, play.turns_taken) for play in run.plays} if run is not None else ()
        return id(played), len(played.environments), len(played.seen), len(played.findings), frozenset(activities)

    def findings(self) -> list[Finding]:
        """Everything that is wrong, what is wrong for certain in the class itself first."""
        self.temporary = TemporaryFiles()
        with self.temporary as temporary, unawaited() as forgotten:
            found = [*of_hooks(self.environment), *self._of_plays(temporary)]
        return [*found, *of_tasks(self._known_tasks(), self.environment), *of_tools(self.known_tools()), *forgotten]

    def _known_tasks(self) -> list[Any]:
        """The tasks that were played, and more of them where they can be looked at without playing."""
        environment = self._made()
        with suppress(Exception, SystemExit):  # told of where they are played
            source = own_tasks(environment)
            alone = not environment.overrides("lifespan") and not hasattr(source, "finished")
            if isinstance(source, Iterable) and alone:
                return list(islice(source, TASKS))
        return list(self.first.tasks.values())

    def known_tools(self) -> list[Tool]:
        """The tools of the class, and those that were there in an episode."""
        return list({**{tool.name: tool for tool in self.environment.bound_tools()}, **self.first.tools}.values())

    def _of_plays(self, temporary: TemporaryFiles) -> Iterator[Finding]:
        self.first, shared = self._play(Concurrency(episodes=self._episodes), group_size=2)
        if self.first.hung:  # and would again, each episode for as long
            yield from self.first.findings
            return
        of_the_first_time = list(temporary.findings())  # as with all that is opened only once
        again, shared_again = self._play(ONE_AT_A_TIME, is_watched=True)
        yield from _without_repeats([*shared, *shared_again])
        yield from self.first.findings
        yield from again.findings
        if of_the_first_time:
            yield from temporary.findings()
        if not self.first.was_cut and not again.was_cut:
            yield from self._of_differences(again)

    def _of_differences(self, again: Played) -> Iterator[Finding]:
        # Played at once and one by one, in opposite orders: what differs comes from outside of the episode.
        differences = Differences.between(self.first.seen, again.seen, self.environment)
        if differences.counts:
            third, _ = self._play(ONE_AT_A_TIME)
            unlike = Differences.between(again.seen, third.seen, self.environment)
            yield from differences.findings(AGAIN if unlike.counts else AFTER_OTHERS)
        in_groups = Differences.within_groups(self.first.seen, self.environment)
        yield from in_groups.without(differences).findings(IN_GROUPS)
        if not differences.counts and any(tool.is_async and tool.parallel for tool in self.first.tools.values()):
            in_order, _ = self._play(ONE_AT_A_TIME, later_first=False)
            overtaken, _ = self._play(ONE_AT_A_TIME, later_first=True)
            yield from Differences.between(in_order.seen, overtaken.seen, self.environment).findings(TOGETHER)

    def _made(self) -> Environment[Any]:
        return construct(self._cls, pairs(self._settings, "--set"))

    def _play(
        self,
        concurrency: Concurrency,
        *,
        group_size: int = 1,
        is_watched: bool = False,
        later_first: bool | None = None,
    ) -> tuple[Played, list[Finding]]:
        """What came of it, and what episodes share.

        Args:
            concurrency: of several episodes at once the first one is played first, of one at a time the last one.
            group_size: 1 is 2 all the same where there are group rewards: with one there is nothing to compare.
            is_watched: look at the event loop, and at what is left.
            later_first: call two tools in a turn, of which the first ends first, or the second one.
        """
        environment, played = self._made(), Played()
        self.played = played
        shared = SharedState(environment)
        _keep(environment, played.environments)
        model = RandomModel(partial(_tools, played.environments, later_first), together=later_first is not None)
        has_group_rewards = any(scorer.kind == ScorerKind.GROUP_REWARD for scorer in environment.scorers)
        tasks = select(own_tasks(environment), environment.task_class(), most=self._episodes)
        run = partial(
            Run,
            environment,
            # With a template that carries every call: what others cannot is found in the tools themselves.
            ScriptedEngine(model, template="hermes", context=1 << 20),
            tasks=_backwards(tasks) if concurrency is ONE_AT_A_TIME else tasks,
            group_size=2 if has_group_rewards else group_size,
            limits=_limits(environment),
            concurrency=concurrency,
            breaker=1,
        )
        play = partial(_play, run, played, self._watch)
        if is_watched:
            played.findings += watched(play, played.environments)
        else:
            on_event_loop(play)
        played.tools = model.known
        return played, list(shared.findings())


def _keep(environment: Environment[Any], played: list[Environment[Any]]) -> None:
    """Keep every environment that plays an episode."""
    make = environment.fresh

    def fresh() -> Environment[Any]:
        played.append(make())
        return played[-1]

    environment.fresh = fresh  # type: ignore[method-assign]  # of this one object


def _of_any_episode(finding: Finding) -> str:
    """What findings have in common that say the same of several episodes: all but their numbers and addresses."""
    if not finding.of_episode:
        return finding.text
    text, _, where = finding.text.partition(" (in ")
    return re.sub(r"0x[0-9a-f]+|\d+", "", re.sub(r"task '[^']*'", "task", text)) + where


def _tools(environments: Sequence[Environment[Any]], later_first: bool | None, call: ModelCall) -> Sequence[Tool]:
    """What the agent that is asked may call now; where calls run together, one of them is held back."""
    for environment in reversed(environments):
        if environment.episode.id == call.episode:
            conversation: Conversation = environment.episode.conversations[call.agent]
            if later_first is not None and call.turn == 0:
                conversation.tools[:] = slowed(conversation.tools, later_first=later_first)
            return conversation.tools
    return ()  # whoever speaks in a group reward


def _without_repeats(findings: Iterable[Finding]) -> Iterator[Finding]:
    """All findings but that an object could be changed where it is reported that it was."""
    found = list(findings)
    changed = {finding.text.partition(" was changed")[0] for finding in found if " was changed" in finding.text}
    yield from (f for f in found if " was changed" in f.text or f.text.partition(" is a ")[0] not in changed)


# --- playing


def _backwards(tasks: Tasks) -> Tasks:
    """The last one first, so that what an episode leaves behind meets another one; a source keeps its own order."""
    if isinstance(tasks, AsyncIterable) or hasattr(tasks, "finished") or not isinstance(tasks, Iterable):
        return tasks

    def last_first() -> Iterator[Any]:
        yield from reversed(list(tasks))

    return last_first()


def _limits(environment: Environment[Any]) -> Limits:
    """Limits in which nothing that is played goes on for ever; stricter ones of the environment's own hold."""
    own = environment.limits.over(Limits.defaults())
    fields = ("seconds", "setup_seconds", "step_seconds", "tool_seconds", "reward_seconds", "close_seconds")
    # A hook's own limit is over first, since it can be named.
    allowed = {name: SECONDS if name == "seconds" else SECONDS_OF_A_HOOK for name in fields}
    shorter: dict[str, Any] = {name: min(getattr(own, name) or most, most) for name, most in allowed.items()}
    return Limits(turns=min(TURNS, own.turns or TURNS), **shorter)


async def _play(make_run: Callable[[], Run], played: Played, watch: HangWatch) -> None:
    async with anyio.create_task_group() as watching:
        watching.start_soon(watch.mark)
        await _play_to_its_end(make_run, played, watch)
        watching.cancel_scope.cancel()


async def _play_to_its_end(make_run: Callable[[], Run], played: Played, watch: HangWatch) -> None:
    run = played.run = make_run()
    before = dict(vars(run.environment))
    try:
        async with run:
            played.findings += of_lifespan(run.environment, before)
            async for trajectory in run:
                _note(played, trajectory, watch.places.get(f"episode {trajectory.id}", ""))
    except DeltarunnerError as error:
        played.was_cut = True
        played.findings.append(Finding(str(error)))
    if not played.seen and not played.findings:
        played.findings.append(Finding("tasks() gives no task."))
    faults = [fault for fault in run.summary.faults if fault not in set(uncalled(run.environment))]  # told already
    played.findings += map(_of_fault, faults)
    played.hung = played.hung or any("TooSlow" in fault for fault in faults)


def _note(played: Played, trajectory: Trajectory, place: str) -> None:
    played.turns += len(trajectory.turns)
    played.seen[f"{trajectory.id} {trajectory.agent}"] = Seen.of(trajectory)
    played.tasks.setdefault(trajectory.task.id, trajectory.task)
    hung = trajectory.outcome is Outcome.TIME_LIMIT or trajectory.limit.endswith("seconds")
    places = where_threads_are() or ([place] if place and hung else [])
    where = f" (last seen in {', '.join(places)})" if places else ""
    played.hung = played.hung or hung
    if trajectory.outcome.failed:
        text = f"{trajectory.outcome.value}: {trajectory.error}{where if hung else ''}"
        played.findings.append(Finding(text, of_episode=True))
    elif trajectory.outcome is Outcome.TIME_LIMIT:
        text = f"an episode of {TURNS} turns or less took longer than {SECONDS:g} s, with an engine that takes none"
        played.findings.append(Finding(f"{text}{where}", fatal=False))


def _of_fault(fault: str) -> Finding:
    # What a group reward does is told with its task, everything else with its episode.
    if fault.startswith(ScorerKind.GROUP_REWARD):
        return Finding(fault, of_episode=True)
    text = fault.partition(": ")[2] or fault
    return Finding(text, fatal=text.startswith(f"{ScorerKind.REWARD} "), of_episode=True)


# --- for people


def _print(checked: Checking, findings: Sequence[Finding]) -> None:
    console = make_console()
    environment, played = checked.environment, checked.first
    tools = [f"{tool.name}({', '.join(tool.parameters.get('properties', {}))})" for tool in checked.known_tools()]
    scorers = [f"{s.name} ({s.kind.replace('_', ' ')}{_weight(s)})" for s in environment.scorers]
    counts = Counter(seen.outcome for seen in played.seen.values())
    outcomes = ", ".join(f"{outcome.value} {count}" for outcome, count in counts.items())
    rows = (
        ("tools", ", ".join(tools) or "none"),
        ("scores", ", ".join(scorers)),
        ("played", f"in groups of two, on a scripted engine: {outcomes or 'nothing'}; {played.turns} turns"),
        *zip(("checked", *[""] * len(CHECKED)), CHECKED, strict=False),
    )
    for label, text in rows:
        console.print(Text.assemble((f"{label:9}", "dim"), text), soft_wrap=True)
    for finding in findings:
        kind, style = ("error", "bold red") if finding.fatal else ("warning", "yellow")
        console.print(Text.assemble((f"{kind:9}", style), printable(finding.text)), soft_wrap=True)
    if not findings:
        console.print("ok", style="bold green")


def _weight(scorer: Scorer) -> str:
    return "" if scorer.kind == ScorerKind.METRIC else f", weight {scorer.weight:g}"
