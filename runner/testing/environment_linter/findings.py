"""Findings of the environment linter. Each names the mistake and the fix on one line."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final

from runner.environment.environment import HOOKS, Environment
from runner.environment.task_checks import TaskChecks
from runner.environment.uncalled_methods import uncalled_methods
from runner.episode.key import MAIN
from runner.errors import BadTask
from runner.messages import as_messages
from runner.parsing.roundtrip import ambiguities
from runner.parsing.schema_grammar import not_enforced
from runner.scoring import ScorerKind
from runner.store.storable import TaskCheck, tuples_in
from runner.tasks import Task
from runner.tokens.token_diff import first_mismatch
from runner.tokens.tool_forms import unresolved
from runner.tools.modern_schema import modern
from runner.tools.schema_faults import uncallable
from runner.tools.tool import Tool
from runner.trajectory import Outcome, Trajectory

__all__ = [
    "AFTER_OTHER_EPISODES",
    "IN_ANOTHER_ORDER",
    "ON_REPEAT",
    "WITHIN_GROUP",
    "AgentRecord",
    "Differences",
    "Finding",
    "SharedState",
    "hook_findings",
    "lifespan_findings",
    "task_findings",
    "tool_findings",
]

_CONTAINERS: Final = (list, dict, set, bytearray)
_PLAIN: Final = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None))
_MAX_COMPARED_ITEMS: Final = 10_000
"""Containers with more items are compared only by length."""

_MAX_DEPTH: Final = 8
"""Containers nested more deeply are not compared by content."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A mistake, or a suspicion of one."""

    text: str
    """The mistake and the fix."""

    fatal: bool = True
    """True if the mistake makes episodes fail or results wrong."""

    of_episode: bool = False
    """True if several episodes may produce the same finding with different numbers."""


# --- the class


def hook_findings(environment: Environment[Any]) -> Iterator[Finding]:
    """Tools and rewards with reserved names, and methods that are never called."""
    for text in uncalled_methods(environment):
        yield Finding(text, fatal=False)
    marked = [(tool.attribute, "tool") for tool in environment.method_tools]
    marked += [(scorer.name, str(scorer.kind)) for scorer in environment.scorers]
    for name, kind in marked:
        if name in HOOKS:
            yield Finding(f"@{kind} {name}() is a hook's name: the runner calls it too. Rename the method.")
        elif name in vars(Environment) or name in Environment.__annotations__:
            yield Finding(f"@{kind} {name}() is a name that the runner uses for something else. Rename the method.")


def lifespan_findings(environment: Environment[Any], before: Mapping[str, Any]) -> Iterator[Finding]:
    """A finding for each attribute that `lifespan()` set on its environment object, which no episode uses."""
    if not environment.overrides("lifespan"):
        return
    for name, value in vars(environment).items():
        if name not in before or before[name] is not value:
            yield Finding(
                f"lifespan() sets self.{name}, but each episode has its own environment object, without this "
                f"attribute. Yield the value instead; episodes find it as self.shared."
            )


def tool_findings(tools: Sequence[Tool]) -> Iterator[Finding]:
    """Arguments that some models cannot write or that may be misread, and parts of schemas that are not enforced."""
    for tool in tools:
        for name, reference in unresolved(tool.parameters):
            yield Finding(
                f"{tool.name}({name}=) refers to {reference!r}, which is not in its schema, so the model is not shown "
                "what to write there: put it into $defs.",
                fatal=False,
            )
    for tool in tools:
        for note in modern(tool.parameters).notes:
            yield Finding(f"{tool.name}(): its schema is not checked completely: {note}.", fatal=False)
        for left in not_enforced(tool.parameters, arguments=True):
            yield Finding(
                f"{tool.name}(): {left} of its schema is not enforced where a call is required or strict, only checked "
                "afterwards.",
                fatal=False,
            )
    for text in uncallable(tools):
        yield Finding(text, fatal=False)
    for unclear in ambiguities(tools):
        yield Finding(
            f"{unclear} takes strings and other values. Many chat templates write strings without quotes (untyped), "
            "so a text that looks like such a value is not read as a string. Give it one type, or split it in two.",
            fatal=False,
        )


def task_findings(tasks: Sequence[Any], environment: Environment[Any]) -> Iterator[Finding]:
    """Tasks that cannot be played, and values that a run file returns changed."""
    checks = TaskChecks(environment, is_kept=True)
    wrong: list[str] = []
    try:
        checks.check_all(tasks)
    except BadTask as error:
        wrong.append(str(error))
    kept = TaskCheck()
    unkept = [task for task in tasks if isinstance(task, Task) and kept.problem(task) is not None]
    if wrong:
        likewise = f" {len(unkept)} of {len(tasks)} tasks have such a value." if len(unkept) > 1 else ""
        yield Finding(wrong[0] + likewise)
    tuples = [(task, next(tuples_in(task.info, "info"), None)) for task in tasks if isinstance(task, Task)]
    changed = [(task.id, where) for task, where in tuples if where is not None]
    if changed and not wrong:
        id, where = changed[0]
        yield Finding(
            f"task {id!r}: {where} is a tuple, which a run file returns as a list (in {len(changed)} of "
            f"{len(tasks)} tasks): make it a list, or a typed field of a subclass of Task.",
            fatal=False,
        )


# --- what episodes share


class SharedState:
    """State that all episodes share, as it was before the first one: attributes, arguments, module variables."""

    def __init__(self, environment: Environment[Any]) -> None:
        self._environment = environment
        self._before = {name: _snapshot(value) for name, value, _ in self._values()}

    def findings(self) -> Iterator[Finding]:
        """Shared values that changed since the first episode, and shared values that could change."""
        for name, value, of_class in self._values():
            if name not in self._before or self._before[name] != _snapshot(value):
                yield Finding(
                    f"{name} was changed during play, and all episodes share it: keep it on self and create it in "
                    f"__init__() or setup().",
                    fatal=of_class,
                )
            elif of_class and isinstance(value, _CONTAINERS) and "(" not in name:
                yield Finding(
                    f"{name} is a {type(value).__name__} of the class, which all episodes share: "
                    f"create it in __init__() or setup(), or make it a tuple if nothing changes it.",
                    fatal=False,
                )

    def _values(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield (name, value, of_class) of each shared value; `of_class` is False only for variables of a module."""
        cls = type(self._environment)
        bases = cls.__mro__[: cls.__mro__.index(Environment)]
        for base in bases:
            for name, value in vars(base).items():
                if not name.startswith("__") and name not in vars(Environment) and _is_state(value):
                    yield f"{base.__name__}.{name}", value, True
        yield from _all_defaults(cls, bases)
        for name, value in self._environment.construction().items():
            if isinstance(value, _CONTAINERS):
                yield f"{cls.__name__}({name}=)", value, True
        for module in filter(None, {base.__module__: sys.modules.get(base.__module__) for base in bases}.values()):
            for name, value in vars(module).items():
                if not name.startswith("__") and _is_state(value):
                    yield f"{module.__name__}.{name}", value, False


def _all_defaults(cls: type, bases: Iterable[type]) -> Iterator[tuple[str, Any, bool]]:
    # Defaults are created once: every call without the argument gets the same object.
    yield from _defaults(cls.__init__, cls.__name__)  # type: ignore[misc]  # the constructor of this class
    for base in bases:
        for name, value in vars(base).items():
            # Unwrap class methods, static methods and decorated functions.
            function = inspect.unwrap(getattr(value, "__func__", value))
            if inspect.isfunction(function) and name != "__init__":
                yield from _defaults(function, f"{base.__name__}.{name}")


def _defaults(function: Callable[..., Any], name: str) -> Iterator[tuple[str, Any, bool]]:
    for parameter in inspect.signature(function).parameters.values():
        if isinstance(parameter.default, _CONTAINERS):
            yield f"{name}({parameter.name}=), a default,", parameter.default, True


def _is_state(value: Any) -> bool:
    return isinstance(value, (*_CONTAINERS, *_PLAIN, count))


def _snapshot(value: Any, depth: int = 0) -> Any:
    """Return a form of `value` that can be compared later.

    For a plain value, this is the value itself; for a container, its contents, or only its length if it is large; for
    any other object, its `id()`.
    """
    if isinstance(value, count):
        return repr(value)
    if isinstance(value, _PLAIN) and not isinstance(value, tuple):
        return value
    if depth > _MAX_DEPTH or not isinstance(value, (*_CONTAINERS, tuple)):
        return id(value)
    if len(value) > _MAX_COMPARED_ITEMS:
        return len(value)
    if isinstance(value, dict):
        return {key: _snapshot(one, depth + 1) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_snapshot(one, depth + 1) for one in value]
    return bytes(value) if isinstance(value, bytearray) else frozenset(value)


# --- differences between plays

ON_REPEAT: Final = "when the same episode was repeated: draw from self.episode.rng, and share nothing between episodes"
AFTER_OTHER_EPISODES: Final = (
    "when played after other episodes: they share state. Keep it on self and create it in __init__() or setup()"
)
WITHIN_GROUP: Final = (
    "when another episode of the group played the same task: draw the initial state from self.episode.rng, which a "
    "group shares, not from self.episode.seed or index"
)
IN_ANOTHER_ORDER: Final = (
    "when two calls of one turn ended in another order: asynchronous tools of a turn run concurrently. Mark tools that "
    "depend on each other with @tool(parallel=False)"
)


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """Messages, scores and outcome of one agent of an episode."""

    agent: str

    messages: Sequence[Mapping[str, Any]]
    """The messages of the agent's last segment."""

    task_messages: int
    """Number of leading messages that come from the task, the system message included."""

    sampled_messages: int
    """Number of sampled assistant messages; earlier assistant messages are part of the prompt."""

    rewards: Mapping[str, float | None]
    """Rewards and metrics, by name."""

    outcome: Outcome

    @classmethod
    def of(cls, trajectory: Trajectory) -> AgentRecord:
        """Return the record of the agent of a trajectory."""
        messages, prompt = trajectory.messages, as_messages(trajectory.task.prompt)
        system = [message["role"] == "system" for message in (*messages[:1], *prompt[:1])] == [True, False]
        scores = {**trajectory.rewards, **trajectory.metrics}
        spoken = len(trajectory.turns)
        return cls(trajectory.agent, messages, len(prompt) + system, spoken, scores, trajectory.outcome)


AgentRecords = Mapping[str, AgentRecord]


@dataclass(frozen=True, slots=True)
class Differences:
    """Differences between two plays of the same episodes, by cause."""

    counts: Counter[str]
    """Number of episodes that differ, by cause."""

    examples: Mapping[str, str]
    """An example for each cause: the episode, and both values."""

    episodes: int

    @classmethod
    def between(cls, first: AgentRecords, again: AgentRecords, environment: Environment[Any]) -> Differences:
        """Compare two plays. Scores are compared only if the messages and the outcome are equal."""
        counts: Counter[str] = Counter()
        examples: dict[str, str] = {}
        names = [name for name in first if name in again]
        for name in names:
            said = _first_message_difference(first[name], again[name], environment)
            for cause, one, other in [said] if said else _score_differences(first[name], again[name]):
                counts[cause] += 1
                examples.setdefault(cause, f"in {name.removesuffix(f' {MAIN}')} first {one}, then {other}")
        return cls(counts, examples, len(names))

    @classmethod
    def within_groups(cls, seen: AgentRecords, environment: Environment[Any]) -> Differences:
        """Compare the two episodes of each group, without their group rewards, which may differ."""
        groups: tuple[dict[str, AgentRecord], dict[str, AgentRecord]] = {}, {}
        of_groups = {scorer.name for scorer in environment.scorers if scorer.kind == ScorerKind.GROUP_REWARD}
        for name, one in seen.items():
            episode, _, agent = name.rpartition(" ")
            task, _, index = episode.rpartition("#")
            rewards = {name: value for name, value in one.rewards.items() if name not in of_groups}
            groups[int(index)][f"{task} {agent}"] = replace(one, rewards=rewards)
        return cls.between(*groups, environment)

    def without(self, other: Differences) -> Differences:
        """The differences without the causes in `other`."""
        counts = Counter({cause: number for cause, number in self.counts.items() if cause not in other.counts})
        return Differences(counts, self.examples, self.episodes)

    def findings(self, when: str) -> Iterator[Finding]:
        """A finding for each cause; its text contains `when`, which is the condition of the difference and the fix."""
        for cause, number in sorted(self.counts.items()):
            yield Finding(f"{cause} in {number} of {self.episodes} episodes {when} ({self.examples[cause]}).")


Difference = tuple[str, str, str]
"""(cause, first value, other value)."""


def _score_differences(first: AgentRecord, again: AgentRecord) -> Iterator[Difference]:
    for name in sorted(first.rewards.keys() | again.rewards.keys()):
        one, other = (seen.rewards.get(name) for seen in (first, again))
        if one != other:
            yield f"{name}() returned another value", str(one), str(other)


def _first_message_difference(
    first: AgentRecord, again: AgentRecord, environment: Environment[Any]
) -> Difference | None:
    """Cause and excerpts of the first difference in messages or outcome; None if there is none."""
    for index, (one, other) in enumerate(zip(first.messages, again.messages, strict=False)):
        if one != other:
            return (_author(first, index, environment), *_excerpts(one, other))
    if len(first.messages) != len(again.messages) or first.outcome is not again.outcome:
        one_end, other_end = (f"{len(seen.messages)} messages ({seen.outcome.value})" for seen in (first, again))
        return f"{_loop(environment)} ended the episode at another point", one_end, other_end
    return None


CONTEXT_CHARS: Final = 12
"""Number of characters shown before the first difference of two long texts."""
MAX_EXCERPT_CHARS: Final = 60
"""Maximum number of characters shown of each of two texts."""


def _excerpts(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str]:
    """Excerpts of two messages around their first difference."""
    texts = [message.get("content") for message in (one, other)]
    if texts[0] == texts[1]:  # the calls or the roles differ
        texts = [repr({name: value for name, value in each.items() if name != "content"}) for each in (one, other)]
    first, second = map(str, texts)
    is_short = max(len(first), len(second)) <= MAX_EXCERPT_CHARS
    start = 0 if is_short else max(0, first_mismatch(first, second) - CONTEXT_CHARS)

    def shown(text: str) -> str:
        end = start + MAX_EXCERPT_CHARS
        return f"{'...' if start else ''}{text[start:end]!r}{'...' if end < len(text) else ''}"

    return shown(first), shown(second)


def _author(seen: AgentRecord, index: int, environment: Environment[Any]) -> str:
    messages, spoken = seen.messages, seen.sampled_messages
    role = messages[index]["role"]
    if role == "system":
        return "the system prompt differed"
    said = [number for number, message in enumerate(messages) if message["role"] == "assistant"][-spoken:]
    if not spoken or not said or index < said[0]:
        return _author_of_prompt(seen, index, environment)
    match role:
        case "tool":
            return f"tool {_tool_of(messages, index)}() returned another result"
        case "assistant":
            return "setup() offered other tools to the model"
    return f"{_loop(environment)} returned another reply"


def _author_of_prompt(seen: AgentRecord, index: int, environment: Environment[Any]) -> str:
    if seen.agent != MAIN:
        return f"the first message to agent {seen.agent!r} differed"
    if environment.overrides("prompt"):
        return f"prompt(){' or rollout()' if environment.overrides('rollout') else ''} returned another prompt"
    if index >= seen.task_messages and environment.overrides("rollout"):
        return "rollout() added another message"
    return "tasks() returned another prompt"


def _tool_of(messages: Sequence[Mapping[str, Any]], index: int) -> str:
    answered = messages[index].get("tool_call_id")
    calls = [call for message in messages[:index] for call in message.get("tool_calls", ())]
    return next((call["function"]["name"] for call in reversed(calls) if call["id"] == answered), "of the model")


def _loop(environment: Environment[Any]) -> str:
    return "rollout()" if environment.overrides("rollout") else "step()"
