"""What all episodes of a run share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio

from runner.concurrency.threads import Workers
from runner.episode.model import ChatModel
from runner.errors import BadOption
from runner.options import Limits, Sampling
from runner.scoring import Scorer

if TYPE_CHECKING:
    from runner.environment.environment import Environment

__all__ = ["RunContext"]


@dataclass(slots=True, kw_only=True)
class RunContext:
    """Nothing of it is global: two runs on one loop share an engine at most.

    Attributes:
        environment: the object the author constructed.
        chat: the model that speaks for every agent that is placed nowhere else.
        other_models: the models of agents that are; those agents are not trained.
        sampling: the run's own, with unset fields.
        limits: every field set.
        own_limits: the run's own, with unset fields.
        scorers: with the run's weights.
        seed: the run's.
        workers: its threads.
        shared: what `lifespan()` yielded.
    """

    environment: Environment[Any]
    chat: ChatModel
    other_models: Mapping[str, ChatModel] = field(default_factory=dict)
    sampling: Sampling
    limits: Limits
    scorers: tuple[Scorer, ...]
    seed: int
    workers: Workers
    own_limits: Limits = Limits()
    shared: Any = None
    _asked: set[str] = field(default_factory=set)
    _limiters: dict[str, anyio.CapacityLimiter] = field(default_factory=dict)
    _sampling: dict[bool, Sampling] = field(default_factory=dict)  # without a conversation's own, by `train`

    def chat_of(self, agent: str) -> ChatModel:
        self._asked.add(agent)
        return self.other_models.get(agent, self.chat)

    def unused(self) -> list[str]:
        """Agents that were on an engine of their own that were never opened: a misspelt name, mostly."""
        return sorted(self.other_models.keys() - self._asked)

    def sampling_of(self, *, train: bool, conversation: Sampling | None, environment: Sampling) -> Sampling:
        """Every field set: the conversation's, the run's for trained agents, the environment's, the defaults."""
        of_the_class = environment is self.environment.sampling or environment == self.environment.sampling
        base = self._sampling.get(train) if of_the_class else None
        if base is None:
            run = self.sampling if train else Sampling()
            base = run.over(environment).over(Sampling.defaults())
        if of_the_class:
            self._sampling[train] = base
        return base if conversation is None else conversation.over(base)

    def limits_of(self, environment: Limits) -> Limits:
        """Every field set, by those that an environment gave itself in `setup()`.

        Raises:
            BadOption: they are none, or change what has been used up.
        """
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

    def limiter(self, name: str, limit: int) -> anyio.CapacityLimiter:
        """The run's limiter of that name.

        Raises:
            BadOption: it was made with another limit.
        """
        if limit < 1:
            raise BadOption(f"limiter({name!r}, {limit}): at least one must get in.")
        limiter = self._limiters.get(name)
        if limiter is None:
            limiter = self._limiters[name] = anyio.CapacityLimiter(limit)
        if limiter.total_tokens != limit:
            raise BadOption(
                f"limiter({name!r}, {limit}): it was opened with {limiter.total_tokens} before; use one limit."
            )
        return limiter
