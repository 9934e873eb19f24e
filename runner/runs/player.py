"""Who plays the episodes of a run: this process, or an engine that has them played where its workers are."""

from __future__ import annotations

import enum
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from runner.engines.base import BaseEngine, Engine
from runner.episode.key import EpisodeKey
from runner.episode.lifecycle import Play
from runner.episode.limits import Ending
from runner.episode.shared import RunShared
from runner.runs.stage import Stage
from runner.tokens.log import TokenLog
from runner.trajectory import Trajectory

__all__ = ["Absence", "Attempt", "FleetWorker", "LocalPlayer", "Player", "PlayingEngine", "Sent"]


class Attempt(Protocol):
    """One attempt at an episode, as the run that asked for it sees it; `Play` is one."""

    key: EpisodeKey
    """The key of the episode: which play of which task it is."""
    faults: list[str]
    """Faults that did not change the outcome, for people."""
    activity: str
    """The thing that it waits for, for people."""
    since: float
    """The time at which it began to wait for that, by the event loop's clock."""

    @property
    def turns_taken(self) -> int:
        """How many turns of `main` there are so far."""

    @property
    def permanent(self) -> bool:
        """Whether it would end the same if it were played again."""

    def cancel(self, ending: Ending | None = None) -> None:
        """Cut it where it stands; it is closed and kept, as partial unless another ending is given."""

    async def run(self) -> list[Trajectory]:
        """Play it, and give the trajectories of its agents, `main` first; cancelled from outside, it closes first."""

    def trajectories(self) -> list[Trajectory]:
        """What there is of it, once `run` was cancelled."""

    def trained_logs(self) -> Iterator[TokenLog]:
        """The token logs so far of the agents that are trained, as far as this process has them."""


class Player(Protocol):
    """Plays episodes."""

    def begin(self, key: EpisodeKey, *, last_try: bool) -> Attempt:
        """An attempt at an episode, which begins when it is run.

        Args:
            key: which play of which task.
            last_try: whether it is not played again if its engine fails once more.
        """

    def tell_width(self, listener: Callable[[int], None]) -> None:
        """Call the listener with the number of episodes that should be in flight, now and whenever that changes."""

    def drain(self) -> None:
        """Take note that no further episode begins."""


@dataclass(frozen=True, slots=True)
class LocalPlayer:
    """Plays episodes on the event loop of the run itself."""

    shared: RunShared
    """The things that all episodes of the run share."""
    width: int
    """The number of episodes that should be in flight."""

    def begin(self, key: EpisodeKey, *, last_try: bool) -> Attempt:
        """An attempt, on this event loop."""
        return Play(self.shared, key)

    def tell_width(self, listener: Callable[[int], None]) -> None:
        """Call the listener, once: the width is what the engine's places say."""
        listener(self.width)

    def drain(self) -> None:
        """Let those who wait for keys of served episodes know that there are no further ones."""
        self.shared.endpoints.draining.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetWorker:
    """A worker of a fleet, as it was when it was last heard."""

    number: int
    """The worker's number, which no other worker of the fleet had or will have."""
    node: str
    """The machine it is on."""
    pid: int
    """The id of its process on that machine."""
    playing: int
    """The number of episodes that it plays now."""
    width: int
    """The number of episodes that it plays at most."""
    version: str
    """The version of its weights."""
    lag: float
    """The lag of its event loop in seconds, 99th percentile."""
    silent: float
    """Seconds since it was last heard."""
    oldest: str
    """The thing that its longest-waiting episode waits for; "" where it plays none."""
    waited: float
    """The seconds for which that episode has waited."""


class Absence(enum.StrEnum):
    """Why fewer workers of a fleet play than there are to be; what is worth knowing most comes first."""

    RESTING = "resting after deaths"
    """Its place is empty: workers died there too often, and the next one may take an hour to be started."""
    LOST = "just lost"
    """It is gone, and the next one is started in a moment."""
    WAITING = "waiting for weights"
    """It has all but the weights of the others, which are nowhere to be read: it plays with the next ones."""
    STARTING = "starting"
    """It has a machine, and its engine starts or is brought to where the others are."""
    UNPLACED = "without a machine"
    """No machine has room for it so far."""


class Sent(Protocol):
    """What a run's episodes are played with, as workers get it; each of them sets it up for itself."""

    @property
    def elsewhere(self) -> Collection[BaseEngine]:
        """The engines that nobody enters here: each worker has one of its own."""

    def engines(self) -> AbstractAsyncContextManager[Mapping[BaseEngine, BaseEngine]]:
        """While the block lasts workers have those; gives what stands here for each.

        Raises:
            BadInput, EngineError: one of them does not start; the message names the worker and why.
        """

    def player(
        self, shared: RunShared, clock: datetime, width: int | None, told: Callable[[str], None]
    ) -> AbstractAsyncContextManager[Player]:
        """What plays the episodes, while the block lasts.

        Args:
            shared: what episodes share in this process.
            clock: the time that chat templates see.
            width: how many episodes are in flight at most; None for as many as the workers take.
            told: called with what happens to workers meanwhile, for people.

        Raises:
            BadInput: a worker cannot play them; the message names the worker and why.
        """


class PlayingEngine(Engine):
    """An engine that plays whole episodes, on workers that have both the model and the environment."""

    engine: Engine
    """The engine of every worker, of which each has its own copy."""
    least: int
    """The number of workers with which it begins to play."""
    most: int
    """The most workers that are started."""

    @property
    @abstractmethod
    def is_deserted(self) -> bool:
        """Whether no worker plays, so that nothing can happen; `health` says whether one may come."""

    @property
    @abstractmethod
    def events(self) -> Sequence[str]:
        """What happened to workers so far, for people: those that were lost, and why."""

    @abstractmethod
    def workers(self) -> list[FleetWorker]:
        """The workers that play, in the order of their numbers, as they were when they were last heard."""

    @abstractmethod
    def absent(self) -> Mapping[Absence, int]:
        """Why the other workers do not play, and of how many that is so."""

    @abstractmethod
    def sent(self, stage: Stage) -> Sent:
        """What a run's episodes are played with, in the form in which workers get it; asked before anything starts.

        Raises:
            BadOption: something of it cannot be sent.
        """
