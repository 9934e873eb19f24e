"""State that all episodes of a run share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from uuid import uuid4
from weakref import WeakKeyDictionary

import anyio

from runner.concurrency.threads import Workers
from runner.endpoint.server import EndpointServer
from runner.episode.hooks import Hooks
from runner.episode.key import MAIN
from runner.episode.model import MessageModel, Model
from runner.errors import BadOption
from runner.options import Limits, Sampling
from runner.scoring import Scorer
from runner.tasks import Task

__all__ = ["EnvironmentPart", "Limiter", "RunShared"]

_LIVES: WeakKeyDictionary[object, str] = WeakKeyDictionary()  # a unique id for each runtime of an engine


class Limiter(Protocol):
    """A limit on the number of borrowers that are inside at the same time."""

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        """Wait until the borrower may enter."""

    def release_on_behalf_of(self, borrower: object) -> None:
        """Free the place of the borrower, so that the next borrower may enter."""


@dataclass(frozen=True, slots=True)
class EnvironmentPart:
    """The environment of a task: the run's environment, or the part of a mixture to which the task belongs."""

    environment: Hooks
    """The object that the author constructed."""
    limits: Limits
    """The limits of the environment's episodes before `setup()`, with every field set."""
    scorers: tuple[Scorer, ...]
    """The environment's rewards and metrics, with the run's weights."""
    resources: Any
    prefix: str = ""
    """The prefix that the mixture added to the task's id."""

    def own(self, task: Task) -> Task:
        """Return the task with the id that its own environment set, without the mixture's prefix."""
        return replace(task, id=task.id.removeprefix(self.prefix)) if self.prefix else task


@dataclass(slots=True, kw_only=True)
class RunShared:
    """State of one run that its episodes share. Two runs on one event loop share at most an engine."""

    environment: Hooks
    """The object that the author constructed. Each episode constructs its own object with the same arguments."""
    chat: Model
    other_models: Mapping[str, Model] = field(default_factory=dict)
    """Models of the agents with their own engines. These agents are not trained."""
    sampling: Sampling
    """The run's sampling, in which fields may be unset."""
    limits: Limits
    """The run's limits merged over the limits of the environment's class, with every field set."""
    own_limits: Limits = Limits()
    """The run's limits, in which fields may be unset."""
    scorers: tuple[Scorer, ...]
    """The environment's rewards and metrics, with the run's weights."""
    seed: int
    workers: Workers
    """The threads that run synchronous code."""
    endpoints: EndpointServer = field(default_factory=EndpointServer)
    """HTTP server of the endpoints for agent programs."""
    resources: Any = None
    make_limiter: Callable[[str, int], Limiter] = lambda _, limit: anyio.CapacityLimiter(limit)
    """Function that creates a limiter with a name and a limit. A run on several processes sets another function."""
    _asked: set[str] = field(default_factory=set)
    _reported: set[str] = field(default_factory=set)
    _limiters: dict[str, tuple[int, Limiter]] = field(default_factory=dict)
    # The merged sampling is cached by `counted`, unless the episode or its environment has another sampling.
    # Nearly all episodes share these two values, and merging the layers takes a large part of the time of a turn.
    _sampling: dict[bool, Sampling] = field(default_factory=dict)

    def part_of(self, task: Task) -> EnvironmentPart:
        """Return the environment of a task: the part of a mixture that its id names, or else the whole environment."""
        parts = self.environment.parts()
        name = task.id.partition("/")[0]
        if name not in parts or parts[name] is self.environment:
            return EnvironmentPart(self.environment, self.limits, self.scorers, self.resources)
        part = parts[name]
        limits = self.own_limits.over(part.limits).over(Limits.defaults())
        scorers = tuple(each for each in self.scorers if each.name.startswith(f"{name}."))
        return EnvironmentPart(part, limits, scorers, self.resources and self.resources[name], f"{name}/")

    def chat_of(self, agent: str) -> Model:
        self._asked.add(agent)
        return self.other_models.get(agent, self.chat)

    def weights_of(self, agent: str, sampling: Sampling | None, environment: Sampling) -> list[str]:
        """Return the weights of an untrained agent, as a cache key for its answers.

        Names of new weights and adapters are unique only within one runtime of the engine, from start to stop.

        Args:
            agent: the agent's name.
            sampling: its sampling.
            environment: the environment's sampling.

        Returns:
            The weight version; also an id of the engine's runtime, if an adapter is used or the weights changed since
            the start. An empty list for an engine without versions.
        """
        engine = self.chat_of(agent).engine
        runtime = getattr(engine, "runtime", None)
        if runtime is None:  # the engine is an API, or is in another process
            version = engine.stats().weight_version
            return [version] if version else []
        if not runtime.version:
            return []
        adapter = self.sampling_of(counted=False, conversation=sampling, environment=environment).adapter
        stamp = runtime.adapters.stamp(adapter)
        life = [_LIVES.setdefault(runtime, uuid4().hex)] if stamp or len(runtime.versions) > 1 else []
        return [runtime.version + stamp, *life]

    def record_agent(self, agent: str) -> None:
        """Record an agent that an episode opened in another process."""
        self._asked.add(agent)

    def evaluates(self, agent: str) -> bool:
        """Return True if the agent is evaluated and not trained: it plays on the run's engine, which takes messages."""
        return agent not in self.other_models and isinstance(self.chat, MessageModel)

    def is_new(self, what: str) -> bool:
        """Return True at the first call with this key, so that a message appears once in a run."""
        if what in self._reported:
            return False
        self._reported.add(what)
        return True

    def unused(self) -> list[str]:
        """Return the agents with their own engines that no episode opened; usually their names are misspelt."""
        return sorted(self.other_models.keys() - self._asked)

    def sampling_of(
        self,
        *,
        counted: bool,
        conversation: Sampling | None,
        environment: Sampling,
        episode: Sampling | None = None,
    ) -> Sampling:
        """Return the sampling of a conversation, with every field set.

        The value of a field is from the first source that sets it: the conversation, the episode, the run, the
        environment, the default. The episode and the run are sources only if the agent is trained or evaluated.
        """
        of_the_class = environment is self.environment.sampling or environment == self.environment.sampling
        shared = of_the_class and episode is None
        base = self._sampling.get(counted) if shared else None
        if base is None:
            run = (episode or Sampling()).over(self.sampling) if counted else Sampling()
            base = run.over(environment).over(Sampling.defaults())
        if shared:
            self._sampling[counted] = base
        return base if conversation is None else conversation.over(base)

    def limits_of(self, environment: Limits, part: EnvironmentPart) -> Limits:
        """Return the limits of an episode of this part, with every field set.

        The environment may have assigned some limits in `setup()`.

        Raises:
            BadOption: `setup()` assigned a value that is not a `Limits`, or changed `setup_seconds`.
        """
        if environment is part.environment.limits or environment == part.environment.limits:
            return part.limits
        if not isinstance(environment, Limits):
            raise BadOption(f"self.limits = {environment!r:.60}: give Limits(...).")
        if environment.setup_seconds != part.environment.limits.setup_seconds:
            raise BadOption(
                f"self.limits = Limits(setup_seconds={environment.setup_seconds!r}) in setup(): the clock of setup() "
                f"runs already. Set it in the class, limits = Limits(setup_seconds=...), or give it to the run."
            )
        return self.own_limits.over(environment).over(Limits.defaults())

    @property
    def trains_main(self) -> bool:
        """True if the turns of `main` are trained on."""
        return MAIN not in self.other_models and not self.evaluates(MAIN)

    def limiter(self, name: str, limit: int) -> Limiter:
        """Return the run's limiter of that name, for `Episode.limiter`.

        Raises:
            BadOption: the limit is below 1, or differs from the limit of an earlier call with this name.
        """
        if limit < 1:
            raise BadOption(f"limiter({name!r}, {limit}): give a limit of at least 1.")
        if name not in self._limiters:
            self._limiters[name] = limit, self.make_limiter(name, limit)
        before, limiter = self._limiters[name]
        if before != limit:
            raise BadOption(f"limiter({name!r}, {limit}): an earlier call had the limit {before}; use one limit.")
        return limiter
