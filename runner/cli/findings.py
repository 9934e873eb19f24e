"""What `deltarunner check` says of an environment: each finding names the thing and the fix, in one line."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final

from runner.environment.environment import HOOKS, Environment
from runner.environment.task_checks import TaskChecks
from runner.environment.uncalled import uncalled
from runner.episode.key import MAIN
from runner.errors import BadTask
from runner.messages import as_messages
from runner.parsing.carrying import CARRIED_NAME, ambiguities
from runner.parsing.schema_grammar import not_enforced
from runner.scoring import ScorerKind
from runner.store.storable import TaskCheck, tuples_in
from runner.tasks import Task
from runner.tokens.token_diff import first_mismatch
from runner.tokens.tool_forms import unresolved
from runner.tools.modern_schema import modern
from runner.tools.tool import Tool
from runner.trajectory import Outcome, Trajectory

__all__ = [
    "AFTER_OTHERS",
    "AGAIN",
    "IN_GROUPS",
    "TOGETHER",
    "Differences",
    "Finding",
    "Seen",
    "SharedState",
    "of_hooks",
    "of_lifespan",
    "of_tasks",
    "of_tools",
]

_CONTAINERS: Final = (list, dict, set, bytearray)
_PLAIN: Final = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None))
_LONGEST: Final = 10_000
"""A container of more items is compared by its length alone."""

_DEEPEST: Final = 8
"""Containers that are nested deeper are not looked into."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong, or looks so."""

    text: str
    """What is wrong, and what to do about it."""

    fatal: bool = True
    """Whether episodes fail by it, or their results are wrong."""

    of_episode: bool = False
    """Whether several episodes may say the same, each with numbers of its own."""


# --- the class


def of_hooks(environment: Environment[Any]) -> Iterator[Finding]:
    """Tools and rewards whose names mean something else already, and methods that are never called."""
    for text in uncalled(environment):
        yield Finding(text, fatal=False)
    marked = [(tool.attribute, "tool") for tool in environment.method_tools]
    marked += [(scorer.name, str(scorer.kind)) for scorer in environment.scorers]
    for name, kind in marked:
        if name in HOOKS:
            yield Finding(f"@{kind} {name}() is a hook's name: the runner calls it too. Rename the method.")
        elif name in vars(Environment) or name in Environment.__annotations__:
            yield Finding(f"@{kind} {name}() is a name that the runner uses for something else. Rename the method.")


def of_lifespan(environment: Environment[Any], before: Mapping[str, Any]) -> Iterator[Finding]:
    """What `lifespan()` set on the object that plays no episode."""
    if not environment.overrides("lifespan"):
        return
    for name, value in vars(environment).items():
        if name not in before or before[name] is not value:
            yield Finding(
                f"lifespan() sets self.{name}, which episodes do not see: each is played by an object of its own. "
                f"Yield it; episodes find it as self.shared."
            )


def of_tools(tools: Sequence[Tool]) -> Iterator[Finding]:
    """Arguments that some models cannot write, or not so that they are read as they were meant."""
    for tool in tools:
        for name in tool.parameters["properties"]:
            if not CARRIED_NAME.fullmatch(name):
                yield Finding(
                    f"{tool.name}() has an argument {name!r}, which many chat templates write without quotes, so that "
                    "it cannot be read back: rename it, with letters, digits and _.",
                    fatal=False,
                )
        for name, reference in unresolved(tool.parameters):
            yield Finding(
                f"{tool.name}({name}=) refers to {reference!r}, which is not in its schema, so that no model is shown "
                "what to write there: put it into $defs.",
                fatal=False,
            )
    for tool in tools:
        for note in modern(tool.parameters).notes:
            yield Finding(f"{tool.name}(): its schema is not checked whole: {note}.", fatal=False)
        for left in not_enforced(tool.parameters, arguments=True):
            yield Finding(
                f"{tool.name}(): {left} of its schema is not enforced where a call is required or strict, only checked "
                "afterwards.",
                fatal=False,
            )
    for unclear in ambiguities(tools):
        yield Finding(
            f"{unclear} takes strings and other values: many chat templates write strings without quotes (untyped), "
            "and what reads as such a value is never a string. Give the argument one type, or make two of it.",
            fatal=False,
        )


def of_tasks(tasks: Sequence[Any], environment: Environment[Any]) -> Iterator[Finding]:
    """What is wrong with tasks before they are played, and what a run file gives back as something else."""
    checks = TaskChecks(environment, is_kept=True)
    wrong: list[str] = []
    try:
        checks.check_all(tasks)
    except BadTask as error:
        wrong.append(str(error))
    kept = TaskCheck()
    unkept = [task for task in tasks if isinstance(task, Task) and kept.problem(task) is not None]
    if wrong:
        likewise = f" Of {len(tasks)} tasks {len(unkept)} hold such a value." if len(unkept) > 1 else ""
        yield Finding(wrong[0] + likewise)
    tuples = [(task, next(tuples_in(task.info, "info"), None)) for task in tasks if isinstance(task, Task)]
    changed = [(task.id, where) for task, where in tuples if where is not None]
    if changed and not wrong:
        id, where = changed[0]
        yield Finding(
            f"task {id!r}: {where} is a tuple, which a run file gives back as a list (so in {len(changed)} of "
            f"{len(tasks)} tasks): make it a list, or a typed field of a class of your own.",
            fatal=False,
        )


# --- what episodes share


class SharedState:
    """What all episodes of a class see, as it was before any was played: attributes, arguments, module variables."""

    def __init__(self, environment: Environment[Any]) -> None:
        self._environment = environment
        self._before = {name: _frozen(value) for name, value, _ in self._values()}

    def findings(self) -> Iterator[Finding]:
        """What has been changed since, and what could be."""
        for name, value, of_class in self._values():
            if name not in self._before or self._before[name] != _frozen(value):
                yield Finding(
                    f"{name} was changed while episodes were played, and all of them see it: keep it on self, made in "
                    f"__init__() or setup().",
                    fatal=of_class,
                )
            elif of_class and isinstance(value, _CONTAINERS) and "(" not in name:
                yield Finding(
                    f"{name} is a {type(value).__name__} of the class, which all episodes share: "
                    f"make it in __init__ or setup(), or a tuple if nobody changes it.",
                    fatal=False,
                )

    def _values(self) -> Iterator[tuple[str, Any, bool]]:
        """The name, the value, and whether it belongs to the class rather than to its module."""
        cls = type(self._environment)
        bases = cls.__mro__[: cls.__mro__.index(Environment)]
        for base in bases:
            for name, value in vars(base).items():
                if not name.startswith("__") and name not in vars(Environment) and _is_state(value):
                    yield f"{base.__name__}.{name}", value, True
        # A default is made once, when the function is: every call that leaves it out gets the same object.
        yield from _defaults(cls.__init__, cls.__name__)
        for base in bases:
            for name, value in vars(base).items():
                # Of a class method or a static one what it wraps, and of a decorated one the author's own.
                function = inspect.unwrap(getattr(value, "__func__", value))
                if inspect.isfunction(function) and name != "__init__":
                    yield from _defaults(function, f"{base.__name__}.{name}")
        for name, value in self._environment.construction().items():
            if isinstance(value, _CONTAINERS):
                yield f"{cls.__name__}({name}=)", value, True
        for module in filter(None, {base.__module__: sys.modules.get(base.__module__) for base in bases}.values()):
            for name, value in vars(module).items():
                if not name.startswith("__") and _is_state(value):
                    yield f"{module.__name__}.{name}", value, False


def _defaults(function: Callable[..., Any], name: str) -> Iterator[tuple[str, Any, bool]]:
    for parameter in inspect.signature(function).parameters.values():
        if isinstance(parameter.default, _CONTAINERS):
            yield f"{name}({parameter.name}=), a default,", parameter.default, True


def _is_state(value: Any) -> bool:
    return isinstance(value, (*_CONTAINERS, *_PLAIN, count))


def _frozen(value: Any, depth: int = 0) -> Any:
    """What can be compared later: of containers their contents, of any other object which one it is."""
    if isinstance(value, count):
        return repr(value)
    if isinstance(value, _PLAIN) and not isinstance(value, tuple):
        return value
    if depth > _DEEPEST or not isinstance(value, (*_CONTAINERS, tuple)):
        return id(value)
    if len(value) > _LONGEST:
        return len(value)
    if isinstance(value, dict):
        return {key: _frozen(one, depth + 1) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_frozen(one, depth + 1) for one in value]
    return bytes(value) if isinstance(value, bytearray) else frozenset(value)


# --- the same, played again

AGAIN: Final = "when the same was played again: draw from self.episode.rng, and let episodes share nothing"
AFTER_OTHERS: Final = (
    "when they were played after other ones: they share something. Keep state on self, made in __init__() or setup()"
)
IN_GROUPS: Final = (
    "when another one of the group played the same task: draw what makes the world from self.episode.rng, which a "
    "group shares, not from self.episode.seed or index"
)
TOGETHER: Final = (
    "when two calls of one turn ended in another order: asynchronous tools of a turn run together. Mark those that "
    "hang on one another @tool(parallel=False)"
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What one agent of an episode saw and was given."""

    agent: str
    """The agent's name."""
    messages: Sequence[Mapping[str, Any]]
    """The messages of its last segment."""

    given: int
    """How many of the messages stood in the task, with the system message."""

    spoken: int
    """How many of the assistant's messages were sampled; those before them stood in the prompt."""

    rewards: Mapping[str, float | None]
    """The agent's rewards and metrics, by name."""

    outcome: Outcome
    """The outcome of the episode."""

    @classmethod
    def of(cls, trajectory: Trajectory) -> Seen:
        """What a trajectory shows of it."""
        messages, prompt = trajectory.messages, as_messages(trajectory.task.prompt)
        system = [message["role"] == "system" for message in (*messages[:1], *prompt[:1])] == [True, False]
        scores = {**trajectory.rewards, **trajectory.metrics}
        spoken = len(trajectory.turns)
        return cls(trajectory.agent, messages, len(prompt) + system, spoken, scores, trajectory.outcome)


Episodes = Mapping[str, Seen]


@dataclass(frozen=True, slots=True)
class Differences:
    """What was not the same when the same episodes were played twice, by what made the difference."""

    counts: Counter[str]
    """Counts in how many episodes each cause made a difference."""

    examples: Mapping[str, str]
    """For each cause an episode, and what was there the first time and the other time."""

    episodes: int
    """The number of episodes that were compared."""

    @classmethod
    def between(cls, first: Episodes, again: Episodes, environment: Environment[Any]) -> Differences:
        """Compare two plays; where what was said differs, what was earned is not looked at."""
        counts: Counter[str] = Counter()
        examples: dict[str, str] = {}
        names = [name for name in first if name in again]
        for name in names:
            said = _said_differently(first[name], again[name], environment)
            for cause, one, other in [said] if said else _scored_differently(first[name], again[name]):
                counts[cause] += 1
                examples.setdefault(cause, f"in {name.removesuffix(f' {MAIN}')} first {one}, then {other}")
        return cls(counts, examples, len(names))

    @classmethod
    def within_groups(cls, seen: Episodes, environment: Environment[Any]) -> Differences:
        """Compare the two episodes of each group; what a group reward makes of them may differ."""
        groups: tuple[dict[str, Seen], dict[str, Seen]] = {}, {}
        of_groups = {scorer.name for scorer in environment.scorers if scorer.kind == ScorerKind.GROUP_REWARD}
        for name, one in seen.items():
            episode, _, agent = name.rpartition(" ")
            task, _, index = episode.rpartition("#")
            rewards = {name: value for name, value in one.rewards.items() if name not in of_groups}
            groups[int(index)][f"{task} {agent}"] = replace(one, rewards=rewards)
        return cls.between(*groups, environment)

    def without(self, other: Differences) -> Differences:
        """Those that the other ones do not tell of."""
        counts = Counter({cause: number for cause, number in self.counts.items() if cause not in other.counts})
        return Differences(counts, self.examples, self.episodes)

    def findings(self, when: str) -> Iterator[Finding]:
        """One for each cause; `when` ends its sentence: when it was different, and what to do about that."""
        for cause, number in sorted(self.counts.items()):
            yield Finding(f"{cause} in {number} of {self.episodes} episodes {when} ({self.examples[cause]}).")


Difference = tuple[str, str, str]
"""What made a difference, and what was there the first time and the other time."""


def _scored_differently(first: Seen, again: Seen) -> Iterator[Difference]:
    for name in sorted(first.rewards.keys() | again.rewards.keys()):
        one, other = (seen.rewards.get(name) for seen in (first, again))
        if one != other:
            yield f"{name}() gave another value", str(one), str(other)


def _said_differently(first: Seen, again: Seen, environment: Environment[Any]) -> Difference | None:
    """Whose words differ first; None if none do."""
    for index, (one, other) in enumerate(zip(first.messages, again.messages, strict=False)):
        if one != other:
            return (_author(first, index, environment), *_shown_apart(one, other))
    if len(first.messages) != len(again.messages) or first.outcome is not again.outcome:
        one_end, other_end = (f"{len(seen.messages)} messages ({seen.outcome.value})" for seen in (first, again))
        return f"{_loop(environment)} ended it elsewhere", one_end, other_end
    return None


BEFORE: Final = 12
"""Characters that are shown before the first one that differs."""
SHOWN: Final = 60
"""Characters of each of two texts that are shown."""


def _shown_apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str]:
    """Two messages that differ, shortened to where they do."""
    texts = [message.get("content") for message in (one, other)]
    if texts[0] == texts[1]:  # then it is the calls, or who speaks
        texts = [repr({name: value for name, value in each.items() if name != "content"}) for each in (one, other)]
    first, second = map(str, texts)
    is_short = max(len(first), len(second)) <= SHOWN
    start = 0 if is_short else max(0, first_mismatch(first, second) - BEFORE)

    def shown(text: str) -> str:
        end = start + SHOWN
        return f"{'...' if start else ''}{text[start:end]!r}{'...' if end < len(text) else ''}"

    return shown(first), shown(second)


def _author(seen: Seen, index: int, environment: Environment[Any]) -> str:
    messages, spoken = seen.messages, seen.spoken
    role = messages[index]["role"]
    if role == "system":
        return "the system prompt was another one"
    said = [number for number, message in enumerate(messages) if message["role"] == "assistant"][-spoken:]
    if not spoken or not said or index < said[0]:
        return _author_of_prompt(seen, index, environment)
    match role:
        case "tool":
            return f"tool {_tool_of(messages, index)}() gave another result"
        case "assistant":
            return "setup() gave the model other tools"
    return f"{_loop(environment)} gave another answer"


def _author_of_prompt(seen: Seen, index: int, environment: Environment[Any]) -> str:
    if seen.agent != MAIN:
        return f"what agent {seen.agent!r} was asked first was another one"
    if environment.overrides("prompt"):
        return f"prompt(){' or rollout()' if environment.overrides('rollout') else ''} gave another one"
    if index >= seen.given and environment.overrides("rollout"):
        return "rollout() added another message"
    return "tasks() gave another prompt"


def _tool_of(messages: Sequence[Mapping[str, Any]], index: int) -> str:
    answered = messages[index].get("tool_call_id")
    calls = [call for message in messages[:index] for call in message.get("tool_calls", ())]
    return next((call["function"]["name"] for call in reversed(calls) if call["id"] == answered), "of the model")


def _loop(environment: Environment[Any]) -> str:
    return "rollout()" if environment.overrides("rollout") else "step()"
