"""Scoring: rewards, metrics and group rewards of an environment, and their weighted sum."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

from runner.checked import is_number
from runner.class_bodies import refuse_duplicate
from runner.errors import BadEnvironment, BadOption

__all__ = ["Score", "Scorer", "ScorerKind", "collect_scorers", "group_reward", "metric", "reward", "weighted_sum"]

Function = TypeVar("Function", bound=Callable[..., Any])

_MARK = "__deltarunner_scorer__"


class ScorerKind(enum.StrEnum):
    """The three kinds of scorers. The value of each is the name of its decorator."""

    REWARD = "reward"
    """Added to the trajectory's reward when the episode ends."""
    METRIC = "metric"
    """Recorded, but not part of the reward."""
    GROUP_REWARD = "group_reward"
    """Added to the rewards of a group's trajectories after all episodes of the group have been played."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scorer:
    """A method that computes a score."""

    name: str
    """The method's name, under which its score is recorded."""
    kind: ScorerKind
    """The use of the score: as a reward, a metric or a group reward."""
    weight: float = 1.0
    """The factor in the weighted sum; not used for a metric."""

    @property
    def method(self) -> str:
        """The name of the method. In a mixture, the name of the scorer also contains the name of its environment."""
        return self.name.rpartition(".")[2]


Score = float | None
"""A reward as a method returns it; a bool counts as 0 or 1, None means unknown."""


@overload
def reward(function: Function, /) -> Function: ...
@overload
def reward(*, weight: float = 1.0) -> Callable[[Function], Function]: ...
def reward(function: Any = None, /, *, weight: float = 1.0) -> Any:
    """Mark a method as a reward: `() -> float | bool | None | {agent: float}`, sync or async.

    The keys of a dict are names of trained agents. For several scores use several rewards, or a metric.

    Args:
        function: the method.
        weight: factor in the trajectory's reward, which is the weighted sum of its rewards.

    Raises:
        BadOption: the weight is not a finite number.
        BadEnvironment: `function` is not a function, or its class has two decorated methods of this name.
    """
    return _mark(function, ScorerKind.REWARD, weight)


def metric(function: Function, /) -> Function:
    """Mark a method as a metric: `() -> float | bool | None | {name: float}`, sync or async.

    A metric is not part of the reward. The values of a dict are separate metrics: if `scores` returns
    `{"style": 0.5}`, the metric is `scores.style`.

    Raises:
        BadEnvironment: `function` is not a function, or its class has two decorated methods of this name.
    """
    return _mark(function, ScorerKind.METRIC, 1.0)  # type: ignore[no-any-return]  # `_mark` returns the given function


@overload
def group_reward(function: Function, /) -> Function: ...
@overload
def group_reward(*, weight: float = 1.0) -> Callable[[Function], Function]: ...
def group_reward(function: Any = None, /, *, weight: float = 1.0) -> Any:
    """Mark a method as a group reward: `(group: Group) -> one float per trajectory`.

    The runner calls it on the environment object of the run, after the last episode of the group is committed.

    Raises:
        BadOption: the weight is not a finite number.
        BadEnvironment: `function` is not a function, or its class has two decorated methods of this name.
    """
    return _mark(function, ScorerKind.GROUP_REWARD, weight)


def _mark(function: Any, kind: ScorerKind, weight: float) -> Any:
    if (function is not None or kind == ScorerKind.METRIC) and not inspect.isfunction(function):
        advice = "a metric has no weight" if kind == ScorerKind.METRIC else f"give a weight as @{kind}(weight=...)"
        raise BadEnvironment(f"@{kind} decorates a method, not {function!r:.40}; {advice}.")
    _check_weight(f"@{kind}(weight={weight!r})", weight)

    def decorate(method: Function) -> Function:
        refuse_duplicate(method, kind.value)
        setattr(method, _MARK, Scorer(method.__name__, kind, float(weight)))
        return method

    return decorate if function is None else decorate(function)


def _check_weight(where: str, weight: Any) -> None:
    if not is_number(weight) or not math.isfinite(weight):
        raise BadOption(f"{where}: give a finite number.")


def collect_scorers(cls: type) -> tuple[Scorer, ...]:
    """The scorers of a class in the order they are written, base classes first.

    Raises:
        BadEnvironment: a scorer has a wrong signature, or is overridden by a method without a decorator.
    """
    found: dict[str, Scorer] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            scorer = getattr(value, _MARK, None)
            if scorer is not None:
                # Scorers have the attribute's name, since several methods created by one function have the same name.
                found[name] = dataclasses.replace(scorer, name=name)
                _check_signature(base, found[name], value)
            elif name in found:
                # The override could be a reward or a helper, so the author must decide.
                if value is not None:
                    kind = found[name].kind
                    raise BadEnvironment(
                        f"{base.__name__}.{name} overrides a {kind}: decorate it with @{kind}, or write {name} = None."
                    )
                del found[name]
    return tuple(found.values())


def _check_signature(cls: type, scorer: Scorer, function: Callable[..., Any]) -> None:
    arguments = ("self", "group") if scorer.kind == ScorerKind.GROUP_REWARD else ("self",)
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        where = f"{cls.__name__}.{scorer.name}"
        raise BadEnvironment(
            f"{where}: a {scorer.kind} is called as {scorer.name}({', '.join(arguments)}); change its parameters."
        ) from None


def with_weights(scorers: tuple[Scorer, ...], weights: Mapping[str, float]) -> tuple[Scorer, ...]:
    """The scorers with a run's own weights.

    Raises:
        BadOption: a name is not a reward, or a weight is not a finite number.
    """
    names = [scorer.name for scorer in scorers if scorer.kind != ScorerKind.METRIC]
    for name, weight in weights.items():
        if name not in names:
            raise BadOption(
                f"weights: {name!r} is not a reward of this environment; its rewards: {', '.join(names) or 'none'}."
            )
        _check_weight(f"weights={{{name!r}: {weight!r}}}", weight)
    return tuple(dataclasses.replace(s, weight=float(weights.get(s.name, s.weight))) for s in scorers)


def as_score(value: Any, name: str, kind: str = "reward") -> Score:
    """The value that a scorer of this kind returned, as a float; None stays None.

    Raises:
        TypeError: the value is neither a number, a bool nor None.
        ValueError: the value is not finite.
    """
    if value is None:
        return None
    try:
        number = float(value)  # this also converts a bool, and a number of numpy or torch
    except (TypeError, ValueError):
        raise TypeError(f"{name} returned {value!r:.80}; return a number, a bool or None") from None
    if isinstance(value, str):
        raise TypeError(f"{name} returned the string {value!r:.80}; return a number, a bool or None")
    if not math.isfinite(number):
        raise ValueError(f"{name} returned {number}; a {kind} is a finite number, or None if unknown")
    return number


def as_metrics(value: Any, name: str) -> dict[str, float]:
    """The values that a metric returned, by name; `name.key` for the values of a dict; None is left out.

    Raises:
        TypeError: a value is neither a number, a bool nor None, or a key is empty or not a string.
        ValueError: a value is not finite.
    """
    several = {name: value}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) and key for key in value):
            raise TypeError(f"{name} returned keys that are empty or not strings: {list(value)!r:.80}; return names")
        several = {f"{name}.{key}": number for key, number in value.items()}
    scores = {key: as_score(number, key, "metric") for key, number in several.items()}
    return {key: score for key, score in scores.items() if score is not None}


def scores_by_agent(value: Any, name: str, trained: Sequence[str]) -> dict[str, Score]:
    """The value that a reward returned for each trained agent: the same for all, or one per key of a dict.

    Raises:
        TypeError: a value is neither a number, a bool nor None.
        ValueError: a value is not finite, or a key is not the name of a trained agent.
    """
    by_agent = value if isinstance(value, Mapping) else dict.fromkeys(trained, value)
    for agent in by_agent:
        if agent not in trained:
            raise ValueError(
                f"{name} rewards {agent!r}, which is not a trained agent; these are trained: {', '.join(trained)}. For "
                f"several scores write a @reward for each, or return one number here and write a @metric that returns "
                f"the dict"
            )
    return {agent: as_score(score, name) for agent, score in by_agent.items()}


def weighted_sum(rewards: Mapping[str, Score], scorers: tuple[Scorer, ...]) -> Score:
    """The weighted sum of the rewards; None without rewards, or if a reward is unknown."""
    weights = {scorer.name: scorer.weight for scorer in scorers}
    if not rewards or any(value is None for value in rewards.values()):
        return None
    # The sum of `fsum` does not depend on the order of the rewards.
    return math.fsum(weights[name] * value for name, value in rewards.items() if value is not None)
