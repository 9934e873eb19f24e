"""`deltarunner check`: what is wrong with an environment, found out without a model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from runner.commands.report import make_console
from runner.commands.selection import own_tasks, select
from runner.commands.values import pairs
from runner.edge import on_event_loop
from runner.engines.script import ModelCall, Reply
from runner.engines.scripted import ScriptedEngine
from runner.environment import HOOKS, Environment, check_playable
from runner.environments import construct, find_environment
from runner.errors import BadEnvironment, DeltarunnerError
from runner.messages import ToolCall
from runner.options import Concurrency, Limits
from runner.runs import Run
from runner.schema import JsonSchema
from runner.scoring import Scorer, ScorerKind
from runner.tools import Tool
from runner.trajectory import Outcome, Trajectory
from runner.transcript import printable

__all__ = ["Finding", "check_command"]

CHECKED = (
    "tool schemas, rewards that raise, are no numbers, or differ when the same is played twice, "
    "class attributes that episodes share, lifespan(), hooks, exit_stack"
)
TURNS = 8
SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, or looks so.

    Attributes:
        text: what, and what to do about it.
        fatal: episodes fail, or their results are wrong.
    """

    text: str
    fatal: bool = True


@dataclass(slots=True)
class Played:
    """What came of playing the environment once.

    Attributes:
        rewards: of each episode by name, with the outcome.
        outcomes: how many ended how.
        turns: of all episodes.
        findings: what went wrong.
    """

    rewards: dict[str, Mapping[str, float | None]] = field(default_factory=dict)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    turns: int = 0
    findings: list[Finding] = field(default_factory=list)


def check_command(name: str, settings: tuple[str, ...], *, episodes: int) -> int:
    """Check, print what was found, and return the exit code: that of `BadEnvironment` where something is fatal.

    Raises:
        BadInput: the environment cannot be found or constructed.
    """
    cls = find_environment(name)
    environment = construct(cls, pairs(settings, "--set"))
    check_playable(environment)
    findings = list(dict.fromkeys([*_of_class(cls), *_of_hooks(environment)]))
    first, again = on_event_loop(_play_twice, cls, settings, episodes)
    findings = list(dict.fromkeys([*findings, *first.findings, *again.findings, *_differences(first, again)]))
    _print(environment, findings, first)
    return BadEnvironment.exit_code if any(finding.fatal for finding in findings) else 0


# --- the class


def _of_class(cls: type[Environment[Any]]) -> Iterator[Finding]:
    for base in cls.__mro__[: cls.__mro__.index(Environment)]:
        for name, value in vars(base).items():
            if isinstance(value, list | dict | set | bytearray) and not name.startswith("__"):
                yield Finding(
                    f"{base.__name__}.{name} is a {type(value).__name__} of the class, which all episodes share: "
                    f"make it in __init__ or setup(), or a tuple if nobody changes it.",
                    fatal=False,
                )


def _of_hooks(environment: Environment[Any]) -> Iterator[Finding]:
    for spec in environment.tool_specs:
        if spec.attribute in HOOKS:
            yield Finding(f"@tool {spec.attribute}() is a hook's name: the runner calls it too. Rename the method.")


# --- playing


async def _play_twice(cls: type[Environment[Any]], settings: tuple[str, ...], episodes: int) -> tuple[Played, Played]:
    """All episodes at once, and then one at a time: whatever they share shows."""
    first = await _play(construct(cls, pairs(settings, "--set")), episodes, Concurrency(episodes=episodes))
    return first, await _play(construct(cls, pairs(settings, "--set")), episodes, Concurrency(episodes=1))


async def _play(environment: Environment[Any], episodes: int, concurrency: Concurrency) -> Played:
    played = Played()
    before = dict(vars(environment))
    run = Run(
        environment,
        ScriptedEngine(Babbler(environment.bound_tools()), context=1 << 20),
        tasks=select(own_tasks(environment), environment.task_class(), most=episodes),
        group_size=2 if _has_group_rewards(environment) else 1,  # with one there is nothing to compare
        limits=Limits(turns=min(TURNS, environment.limits.turns or TURNS), seconds=SECONDS),
        concurrency=concurrency,
        breaker=1,
    )
    try:
        async with run:
            played.findings += _of_lifespan(environment, before)
            async for trajectory in run:
                _note(played, trajectory)
    except DeltarunnerError as error:
        played.findings.append(Finding(str(error)))
    if not played.outcomes and not played.findings:
        played.findings.append(Finding("tasks() gives no task."))
    played.findings += map(_of_fault, run.summary.faults)
    return played


def _of_lifespan(environment: Environment[Any], before: Mapping[str, Any]) -> Iterator[Finding]:
    if not environment.overrides("lifespan"):
        return
    for name, value in vars(environment).items():
        if name not in before or before[name] is not value:
            yield Finding(
                f"lifespan() sets self.{name}, which episodes do not see: each is played by an object of its own. "
                f"Yield it; episodes find it as self.shared."
            )


def _note(played: Played, trajectory: Trajectory) -> None:
    played.outcomes[trajectory.outcome] += 1
    played.turns += len(trajectory.turns)
    played.rewards[f"{trajectory.id} {trajectory.agent}"] = {**trajectory.rewards, **trajectory.metrics}
    if trajectory.outcome.failed:
        played.findings.append(Finding(f"{trajectory.outcome.value}: {trajectory.error}"))
    elif trajectory.outcome is Outcome.TIME_LIMIT:
        text = f"an episode of {TURNS} turns or less took longer than {SECONDS:g} s, with an engine that takes none"
        played.findings.append(Finding(text, fatal=False))


def _differences(first: Played, again: Played) -> Iterator[Finding]:
    different = Counter(
        name
        for episode, rewards in first.rewards.items()
        for name, value in rewards.items()
        if episode in again.rewards and again.rewards[episode].get(name) != value
    )
    for name, count in different.items():
        yield Finding(
            f"{name}() gave another value in {count} of {len(first.rewards)} episodes when the same was played again: "
            f"draw from self.episode.rng, and let episodes share nothing."
        )


def _of_fault(fault: str) -> Finding:
    # What a group reward does is told with its task, everything else with its episode.
    if fault.startswith(ScorerKind.GROUP_REWARD):
        return Finding(fault)
    return Finding(fault.partition(": ")[2] or fault, fatal=False)


def _has_group_rewards(environment: Environment[Any]) -> bool:
    return any(scorer.kind == ScorerKind.GROUP_REWARD for scorer in environment.scorers)


class Babbler:
    """Plays the model: calls the tools in turn with arguments that fit, and says something in between."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = tools

    def __call__(self, call: ModelCall) -> Reply:
        rng = call.rng
        if self._tools and call.turn < TURNS - 1:
            # Every tool has its turn, from episode to episode another one first.
            tool = self._tools[(call.turn + random.Random(call.episode).randrange(len(self._tools))) % len(self._tools)]
            return Reply(calls=(ToolCall("", tool.name, _arguments(tool.parameters, rng)),))
        return Reply(rng.choice(("42", "7", "yes", "I do not know.", "hello")))


def _arguments(schema: JsonSchema, rng: random.Random) -> dict[str, Any]:
    definitions, properties = schema.get("$defs", {}), schema.get("properties", {})
    needed = [name for name in schema.get("required", ()) if name in properties]
    return {name: _value(properties[name], definitions, rng) for name in needed}


def _value(schema: Mapping[str, Any], definitions: Mapping[str, Any], rng: random.Random) -> Any:
    """A value that fits the schema, or nearly: bounds and patterns are not looked at."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return _value(schema[key][0], definitions, rng)
    match schema.get("type"):
        case "integer":
            return rng.randint(schema.get("minimum", 1), schema.get("maximum", 9))
        case "number":
            return round(rng.uniform(schema.get("minimum", 0), schema.get("maximum", 9)), 2)
        case "boolean":
            return rng.random() < 0.5
        case "array":
            return [_value(schema.get("items", {"type": "string"}), definitions, rng)]
        case "object":
            return _arguments({**schema, "$defs": definitions}, rng)
        case "null":
            return None
    return rng.choice(("a", "word", "2"))


# --- for people


def _print(environment: Environment[Any], findings: Sequence[Finding], played: Played) -> None:
    console = make_console()
    tools = [f"{tool.name}({', '.join(tool.parameters.get('properties', {}))})" for tool in environment.bound_tools()]
    scorers = [f"{s.name} ({s.kind.replace('_', ' ')}{_weight(s)})" for s in environment.scorers]
    outcomes = ", ".join(f"{outcome.value} {count}" for outcome, count in played.outcomes.items())
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
