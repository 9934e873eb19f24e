"""Several environments in one run, with weights."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

from runner.checked import is_number
from runner.concurrency.threads import Workers
from runner.engines.base import BaseEngine
from runner.environment.checks import as_environment, check_playable
from runner.environment.environment import Environment
from runner.environment.lifespan import lifespan_of
from runner.environment.task_feed import environment_tasks
from runner.environment.task_files import read_tasks
from runner.errors import BadEnvironment, BadOption, BadTask
from runner.options import Limits
from runner.store.json_values import class_name
from runner.tasks import Task
from runner.trajectory import Trajectory

__all__ = ["Mixture", "MixturePart"]

MixturePart: TypeAlias = (
    Environment[Any] | type[Environment[Any]] | tuple[Environment[Any] | type[Environment[Any]], float]
)
"""An environment of a mixture, or a pair of an environment and its weight; the weight is 1 by default."""

LIFESPAN_THREADS = 8
"""Number of threads for the synchronous `lifespan()` methods of the environments."""


class Mixture(Environment):
    """Several environments in one run. Each keeps its own tools, limits, sampling, rewards and groups.

    The ids of tasks begin with the environment's name and a slash. The names of rewards and metrics begin with the
    environment's name and a dot. The tasks are taken in proportion to the weights. When one environment has no more
    tasks, the others continue.
    """

    def __init__(self, environments: Mapping[str, MixturePart]) -> None:
        """Choose the environments.

        Args:
            environments: environments, or pairs of an environment and its weight, by name.

        Raises:
            BadOption: a name or a weight is invalid, or two environments have different engines for one agent.
            BadEnvironment: an environment cannot be played, or is itself a mixture.
        """
        checked: Any = environments
        if not isinstance(checked, Mapping) or not checked:
            raise BadOption(f"Mixture({checked!r:.60}): give a dict of names and environments.")
        self._parts: dict[str, Environment[Any]] = {}
        self._weights: dict[str, float] = {}
        engines: dict[str, BaseEngine] = {}
        for name, part in environments.items():
            _check_name(name)
            given, weight = part if isinstance(part, tuple) else (part, 1.0)
            if not is_number(weight) or not 0 < weight < float("inf"):
                raise BadOption(f"Mixture: the weight of {name!r} is {weight!r:.60}: give a number above 0.")
            self._weights[name] = float(weight)
            environment = self._parts[name] = as_environment(given)
            if isinstance(environment, Mixture):
                raise BadEnvironment(f"Mixture: {name!r} is a mixture itself: give its environments instead.")
            check_playable(environment)
            for agent, engine in environment.engines.items():
                if engines.setdefault(agent, engine) is not engine:
                    raise BadOption(
                        f"Mixture: {name!r} has another engine for the agent {agent!r} than an earlier environment: "
                        "give both the same engine."
                    )
        self.engines = engines
        self.scorers = tuple(
            dataclasses.replace(scorer, name=f"{name}.{scorer.name}")
            for name, environment in self._parts.items()
            for scorer in environment.scorers
        )

    def parts(self) -> Mapping[str, Environment[Any]]:
        return self._parts

    def overrides(self, hook: str) -> bool:
        """Return True for `setup`, which the mixture defines, and for hooks that one of its environments defines."""
        return hook == "setup" or any(part.overrides(hook) for part in self._parts.values())

    def construction(self) -> dict[str, Any]:
        """The class, weight and arguments of each environment, as NAME, NAME.weight and NAME.ARGUMENT."""
        described: dict[str, Any] = {}
        for name, part in self._parts.items():
            described[name] = class_name(type(part))
            described[f"{name}.weight"] = self._weights[name]
            described |= {f"{name}.{argument}": value for argument, value in part.construction().items()}
        return described

    def tasks(self) -> Iterable[Task]:
        """The tasks of all environments, in proportion to the weights.

        Raises:
            BadEnvironment: the `tasks()` of an environment is async.
            BadTask: `tasks()` of an environment fails or returns something other than tasks, or its task file cannot be
                read.
        """
        sources: dict[str, Any] = {}
        for name, part in self._parts.items():
            source: Any = environment_tasks(part)
            if isinstance(source, str | Path):
                source = read_tasks(Path(source), part.task_class())
            if not isinstance(source, Iterable):
                raise BadEnvironment(f"Mixture: tasks() of {name!r} is async: return a list, or yield in a `def`.")
            sources[name] = source
        if any(hasattr(source, "finished") for source in sources.values()):
            return _ListeningTasks(sources, self._weights)
        return _interleaved(sources, self._weights)

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[dict[str, Any]]:
        """The resources of each environment, by name."""
        workers = Workers(LIFESPAN_THREADS)
        try:
            async with AsyncExitStack() as stack:
                resources = {}
                for name, part in self._parts.items():
                    entered = lifespan_of(part, workers, close_seconds=_close_seconds(part))
                    resources[name] = await stack.enter_async_context(entered)
                yield resources
        finally:
            workers.close()

    def setup(self) -> None:
        """Raise BadTask. A task whose id begins with the name of an environment is set up by that environment."""
        names = ", ".join(f"{name}/" for name in self._parts)
        raise BadTask(f"task {self.task.id!r}: the id must begin with the name of an environment: {names}.")


class _ListeningTasks:
    """Interleaved tasks of several sources, some of which receive results."""

    def __init__(self, sources: Mapping[str, Any], weights: Mapping[str, float]) -> None:
        self._sources = sources
        self._weights = weights

    def __iter__(self) -> Iterator[Task]:
        return _interleaved(self._sources, self._weights)

    def finished(self, trajectory: Trajectory) -> Any:
        """Send a result to the source of its task. Return what the source returns, or None if it takes no results."""
        source: Any = self._sources.get(trajectory.task.id.partition("/")[0])
        return source.finished(trajectory) if hasattr(source, "finished") else None


def _interleaved(sources: Mapping[str, Iterable[Any]], weights: Mapping[str, float]) -> Iterator[Task]:
    """The tasks of all sources. The next task is from the source with the fewest tasks relative to its weight."""
    left = {name: iter(source) for name, source in sources.items()}
    taken = dict.fromkeys(left, 0)
    while left:
        name = min(left, key=lambda name: (taken[name] + 1) / weights[name])
        task = next(left[name], None)
        if task is None:
            del left[name]
            continue
        if not isinstance(task, Task):
            raise BadTask(f"tasks() of {name!r} returned {task!r:.60}, which is not a Task: return Task objects.")
        taken[name] += 1
        yield dataclasses.replace(task, id=f"{name}/{task.id}")


def _close_seconds(part: Environment[Any]) -> float | None:
    return part.limits.over(Limits.defaults()).close_seconds


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name or "/" in name or "." in name:
        raise BadOption(f"Mixture: the name {name!r:.60} is not usable: give a string without a slash or dot.")
