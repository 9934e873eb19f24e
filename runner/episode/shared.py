"""What all episodes of a run share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import anyio

from runner.concurrency.threads import Workers
from runner.endpoint.server import EndpointServer
from runner.episode.hooks import Hooks
from runner.episode.key import MAIN
from runner.episode.model import MessageModel, Model
from runner.errors import BadOption
from runner.options import Limits, Sampling
from runner.scoring import Scorer

__all__ = ["Limiter", "RunShared"]


class Limiter(Protocol):
    """Lets so many in at once."""

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        """Wait until the borrower is let in."""

    def release_on_behalf_of(self, borrower: object) -> None:
        """Let the next one in."""


@dataclass(slots=True, kw_only=True)
class RunShared:
    """What the episodes of one run share. Nothing of it is global: two runs on one loop share an engine at most."""

    environment: Hooks
    """The object that the author constructed; it plays no episode itself."""
    chat: Model
    """The model that speaks for every agent without one of its own."""
    other_models: Mapping[str, Model] = field(default_factory=dict)
    """The models of agents on engines of their own; those agents are not trained."""
    sampling: Sampling
    """The run's sampling, with unset fields."""
    limits: Limits
    """The run's limits over those of the environment's class, every field set."""
    own_limits: Limits = Limits()
    """The run's limits, with unset fields."""
    scorers: tuple[Scorer, ...]
    """The environment's rewards and metrics, with the run's weights."""
    seed: int
    """The run's seed."""
    workers: Workers
    """The threads in which the run's synchronous code is called."""
    endpoints: EndpointServer = field(default_factory=EndpointServer)
    """Serves episodes to agent programs."""
    resources: Any = None
    """What `lifespan()` yielded."""
    make_limiter: Callable[[str, int], Limiter] = lambda _, limit: anyio.CapacityLimiter(limit)
    """Makes a limiter of this name, which lets so many in; another one where several processes play the run."""
    _asked: set[str] = field(default_factory=set)
    _told: set[str] = field(default_factory=set)
    _limiters: dict[str, tuple[int, Limiter]] = field(default_factory=dict)
    # By `counted`, for conversations without sampling of their own. Nearly all episodes ask for one of these two, and
    # merging the layers for each of them costs a good part of a turn.
    _sampling: dict[bool, Sampling] = field(default_factory=dict)

    def chat_of(self, agent: str) -> Model:
        """The model that speaks for an agent."""
        self._asked.add(agent)
        return self.other_models.get(agent, self.chat)

    def heard_of(self, agent: str) -> None:
        """Take note that an agent was there, in an episode that was played elsewhere."""
        self._asked.add(agent)

    def evaluates(self, agent: str) -> bool:
        """Whether the run evaluates this agent: it speaks through a server of messages and has no engine of its own."""
        return agent not in self.other_models and isinstance(self.chat, MessageModel)

    def is_new(self, what: str) -> bool:
        """Whether nobody asked this before: for what is said once a run."""
        if what in self._told:
            return False
        self._told.add(what)
        return True

    def unused(self) -> list[str]:
        """Agents with engines of their own that no episode opened: a misspelt name, mostly."""
        return sorted(self.other_models.keys() - self._asked)

    def sampling_of(self, *, counted: bool, conversation: Sampling | None, environment: Sampling) -> Sampling:
        """The sampling of a conversation, every field set.

        A field is the conversation's; else the run's, which is meant for agents that are trained or evaluated; else the
        environment's; else the default.
        """
        of_the_class = environment is self.environment.sampling or environment == self.environment.sampling
        base = self._sampling.get(counted) if of_the_class else None
        if base is None:
            run = self.sampling if counted else Sampling()
            base = run.over(environment).over(Sampling.defaults())
        if of_the_class:
            self._sampling[counted] = base
        return base if conversation is None else conversation.over(base)

    def limits_of(self, environment: Limits) -> Limits:
        """The limits of an episode, every field set, when its environment may have assigned some in `setup()`."""
        if environment is self.environment.limits or environment == self.environment.limits:
            return self.limits
        if not isinstance(environment, Limits):
            raise BadOption(f"self.limits = {environment!r:.60}: give Limits(...).")
        if environment.setup_seconds != self.environment.limits.setup_seconds:
            raise BadOption(
                f"self.limits = Limits(setup_seconds={environment.setup_seconds!r}) in setup(): that clock runs "
                f"already. Give it in the class, limits = Limits(setup_seconds=...), or to the run."
            )
        return self.own_limits.over(environment).over(Limits.defaults())

    @property
    def trains_main(self) -> bool:
        """Whether what `main` says is trained on."""
        return MAIN not in self.other_models and not self.evaluates(MAIN)

    def limiter(self, name: str, limit: int) -> Limiter:
        """The run's limiter of that name, for `Episode.limiter`."""
        if limit < 1:
            raise BadOption(f"limiter({name!r}, {limit}): at least one must get in.")
        if name not in self._limiters:
            self._limiters[name] = limit, self.make_limiter(name, limit)
        before, limiter = self._limiters[name]
        if before != limit:
            raise BadOption(f"limiter({name!r}, {limit}): it was opened with {before} before; use one limit.")
        return limiter
