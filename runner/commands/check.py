"""`deltarunner check`: what is wrong with an environment, found out without a model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import anyio
from rich.text import Text

from runner.commands.babbler import TURNS, Babbler
from runner.commands.findings import Differences, Finding, Seen, SharedState, of_hooks, of_lifespan
from runner.commands.report import make_console
from runner.commands.selection import own_tasks, select
from runner.commands.values import pairs
from runner.edge import on_event_loop
from runner.engines.scripted import ScriptedEngine
from runner.environment import Environment, check_playable
from runner.environments import construct, find_environment
from runner.errors import BadEnvironment, DeltarunnerError
from runner.options import Concurrency, Limits
from runner.runs import Run
from runner.scoring import Scorer, ScorerKind
from runner.sources import Tasks
from runner.testing.leaks import UNCLOSED, Leaked, no_leaks
from runner.testing.watchdog import LoopWatchdog
from runner.trajectory import Outcome, Trajectory
from runner.transcript import printable

__all__ = ["check_command"]

CHECKED = (
    "tool schemas, rewards that raise, are no numbers, or differ when the same is played twice, "
    "random numbers without a seed, what episodes share, what blocks the event loop, what is left open, "
    "lifespan(), hooks, exit_stack"
)
SECONDS = 30.0
LISTED: Final = 3
"""So many of the same kind are named; of the rest there is a number."""


@dataclass(slots=True)
class Played:
    """What came of playing the environment once.

    Attributes:
        seen: what each agent of each episode saw and was given, by name.
        turns: of all episodes.
        findings: what went wrong.
        environments: that played, kept alive so that nothing they hold is closed by being forgotten.
    """

    seen: dict[str, Seen] = field(default_factory=dict)
    turns: int = 0
    findings: list[Finding] = field(default_factory=list)
    environments: list[Environment[Any]] = field(default_factory=list)


def check_command(name: str, settings: tuple[str, ...], *, episodes: int) -> int:
    """Check, print what was found, and return the exit code: that of `BadEnvironment` where something is fatal.

    Raises:
        BadInput: the environment cannot be found or constructed.
    """
    checked = Checking(find_environment(name), settings, episodes)
    check_playable(checked.environment)
    unlike: dict[str, Finding] = {}
    for finding in checked.findings():
        unlike.setdefault(_of_any_episode(finding), finding)
    findings = list(unlike.values())
    _print(checked.environment, findings, checked.first)
    return BadEnvironment.exit_code if any(finding.fatal for finding in findings) else 0


class Checking:
    """Plays an environment twice, all episodes at once and then one at a time in the opposite order, and looks.

    Attributes:
        environment: one that is not played; it is looked at.
        first: what came of the first play.
    """

    def __init__(self, cls: type[Environment[Any]], settings: tuple[str, ...], episodes: int) -> None:
        self._cls = cls
        self._settings = settings
        self._episodes = episodes
        self.environment = self._made()
        self.first = Played()

    def findings(self) -> Iterator[Finding]:
        """Everything that is wrong, what is wrong for certain in the class itself first."""
        yield from of_hooks(self.environment)
        all_at_once = Concurrency(episodes=self._episodes)
        self.first, shared = self._play(all_at_once)
        again, shared_again = self._play(Concurrency(episodes=1), backwards=True, watched=True)
        yield from _without_repeats([*shared, *shared_again])
        yield from self.first.findings
        yield from again.findings
        differences = Differences.between(self.first.seen, again.seen, self.environment)
        if differences.counts:
            third, _ = self._play(Concurrency(episodes=1), backwards=True)
            unlike = Differences.between(again.seen, third.seen, self.environment)
            yield from differences.findings(by_order=not unlike.counts)

    def _made(self) -> Environment[Any]:
        return construct(self._cls, pairs(self._settings, "--set"))

    def _play(
        self, concurrency: Concurrency, *, backwards: bool = False, watched: bool = False
    ) -> tuple[Played, list[Finding]]:
        """What came of it, and what episodes share."""
        environment, played = self._made(), Played()
        shared = SharedState(environment)
        _keep(environment, played.environments)
        play = partial(_play, partial(_run, environment, self._episodes, concurrency, backwards), played)
        if watched:
            played.findings += _watched(play, played.environments)
        else:
            on_event_loop(play)
        return played, list(shared.findings())


def _keep(environment: Environment[Any], played: list[Environment[Any]]) -> None:
    """Keep every environment that plays an episode."""
    make = environment.fresh

    def fresh() -> Environment[Any]:
        played.append(make())
        return played[-1]

    environment.fresh = fresh  # type: ignore[method-assign]  # of this one object


def _of_any_episode(finding: Finding) -> str:
    """What findings have in common that say the same of several episodes."""
    return re.sub(r"task '[^']*'", "task", finding.text)


def _without_repeats(findings: Iterable[Finding]) -> Iterator[Finding]:
    """What is known to have been changed is not also told to be changeable."""
    found = list(findings)
    changed = {finding.text.partition(" was changed")[0] for finding in found if " was changed" in finding.text}
    yield from (f for f in found if " was changed" in f.text or f.text.partition(" is a ")[0] not in changed)


# --- playing


def _run(environment: Environment[Any], episodes: int, concurrency: Concurrency, backwards: bool) -> Run:
    tasks = select(own_tasks(environment), environment.task_class(), most=episodes)
    return Run(
        environment,
        ScriptedEngine(Babbler(environment.bound_tools()), context=1 << 20),
        tasks=_backwards(tasks) if backwards else tasks,
        group_size=2 if _has_group_rewards(environment) else 1,  # with one there is nothing to compare
        limits=Limits(turns=min(TURNS, environment.limits.turns or TURNS), seconds=SECONDS),
        concurrency=concurrency,
        breaker=1,
    )


def _backwards(tasks: Tasks) -> Tasks:
    """The last one first, so that what an episode leaves behind meets another one; a source keeps its own order."""
    if isinstance(tasks, AsyncIterable) or hasattr(tasks, "finished") or not isinstance(tasks, Iterable):
        return tasks

    def last_first() -> Iterator[Any]:
        yield from reversed(list(tasks))

    return last_first()


async def _play(make_run: Callable[[], Run], played: Played) -> None:
    run = make_run()
    before = dict(vars(run.environment))
    try:
        async with run:
            played.findings += of_lifespan(run.environment, before)
            async for trajectory in run:
                _note(played, trajectory)
    except DeltarunnerError as error:
        played.findings.append(Finding(str(error)))
    if not played.seen and not played.findings:
        played.findings.append(Finding("tasks() gives no task."))
    played.findings += map(_of_fault, run.summary.faults)


def _note(played: Played, trajectory: Trajectory) -> None:
    played.turns += len(trajectory.turns)
    played.seen[f"{trajectory.id} {trajectory.agent}"] = Seen.of(trajectory)
    if trajectory.outcome.failed:
        played.findings.append(Finding(f"{trajectory.outcome.value}: {trajectory.error}"))
    elif trajectory.outcome is Outcome.TIME_LIMIT:
        text = f"an episode of {TURNS} turns or less took longer than {SECONDS:g} s, with an engine that takes none"
        played.findings.append(Finding(text, fatal=False))


def _of_fault(fault: str) -> Finding:
    # What a group reward does is told with its task, everything else with its episode.
    if fault.startswith(ScorerKind.GROUP_REWARD):
        return Finding(fault)
    text = fault.partition(": ")[2] or fault
    return Finding(text, fatal=text.startswith(f"{ScorerKind.REWARD} "))


def _has_group_rewards(environment: Environment[Any]) -> bool:
    return any(scorer.kind == ScorerKind.GROUP_REWARD for scorer in environment.scorers)


# --- what holds up the loop, and what is left open


def _watched(play: Callable[[], Awaitable[None]], environments: Sequence[Environment[Any]]) -> list[Finding]:
    """Play once more, when what is loaded and opened only once has been: what is left now is left by every episode."""
    watchdog = LoopWatchdog()
    tasks: set[str] = set()

    async def watched() -> None:
        before = set(anyio.get_running_tasks())
        async with watchdog:
            await play()
        tasks.update(_of_coroutine(task) for task in anyio.get_running_tasks() if task not in before)

    leaks: tuple[str, ...] = ()
    on_event_loop(_nothing)  # the first event loop of a process opens a pipe for all that follow
    try:
        with no_leaks():
            on_event_loop(watched)
    except Leaked as leaked:
        leaks = leaked.leaks
    return [
        *(Finding(complaint) for complaint in watchdog.complaints()),
        *_of_leaks(leaks, environments),
        *(_left(f"a task of {name}()") for name in tasks),
    ]


async def _nothing() -> None:
    """Wait for nothing."""


def _of_coroutine(task: anyio.TaskInfo) -> str:
    return str(getattr(task.coro, "__qualname__", task.name))


def _of_leaks(leaks: Sequence[str], environments: Sequence[Environment[Any]]) -> Iterator[Finding]:
    """By attribute where one holds it; what each episode left is told once, and of many things the first few."""
    yield from (_unclosed(leak.removeprefix(UNCLOSED)) for leak in leaks if leak.startswith(UNCLOSED))
    named: dict[str, str] = {}
    for leak in (leak for leak in leaks if not leak.startswith(UNCLOSED)):
        held = next((name for one in environments for name, value in vars(one).items() if _holds(value, leak)), "")
        plain = _plain(leak)
        named.setdefault(held or plain, f"self.{held} ({plain})" if held else plain)
    for what in list(named.values())[:LISTED]:
        yield _left(what)
    if len(named) > LISTED:
        yield _left(f"{len(named) - LISTED} more of them")


def _plain(leak: str) -> str:
    """A leak without the numbers that differ from one episode to the next."""
    leak = re.sub(r"^file \d+ \((.*)\)$", r"file \1", leak)
    return re.sub(r"-\d+( \(.*\))?('?) \(\d+\)$", r"\1\2", leak)


def _holds(value: Any, leak: str) -> bool:
    """An attribute's value is the file or the thread that was left, or a pool that has the thread."""
    kind, _, rest = leak.partition(" ")
    if kind == "file":
        try:
            return bool(value.fileno() == int(rest.partition(" ")[0]))
        except Exception:  # no file, or a closed one; an author's object may do anything
            return False
    threads = getattr(value, "_threads", None) or (value,)
    return any(f"({getattr(thread, 'ident', None)})" in rest for thread in threads)


def _unclosed(what: str) -> Finding:
    return Finding(f"{UNCLOSED}{what}. Close it, or open it with `with`.", fatal=False)


def _left(what: str) -> Finding:
    return Finding(
        f"still open after close(): {what}. Close it in close(), or open it in setup() with self.episode.exit_stack."
    )


# --- for people


def _print(environment: Environment[Any], findings: Sequence[Finding], played: Played) -> None:
    console = make_console()
    tools = [f"{tool.name}({', '.join(tool.parameters.get('properties', {}))})" for tool in environment.bound_tools()]
    scorers = [f"{s.name} ({s.kind.replace('_', ' ')}{_weight(s)})" for s in environment.scorers]
    counts = Counter(seen.outcome for seen in played.seen.values())
    outcomes = ", ".join(f"{outcome.value} {count}" for outcome, count in counts.items())
    rows = (
        ("tools", ", ".join(tools) or "none"),
        ("scores", ", ".join(scorers)),
        ("played", f"twice, on a scripted engine: {outcomes or 'nothing'}; {played.turns} turns"),
        ("checked", CHECKED),
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
