"""Players of episodes: this process, or an engine whose workers play them."""

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
from runner.episode.lifecycle import EpisodeRunner
from runner.episode.limits import Ending
from runner.episode.shared import RunShared
from runner.runs.run_setup import RunSetup
from runner.tokens.log import TokenLog
from runner.trajectory import Trajectory

__all__ = ["Attempt", "EpisodePlayer", "FleetWorker", "IdleReason", "LocalPlayer", "PlayingEngine", "WorkerSetup"]


class Attempt(Protocol):
    """One attempt at an episode; `EpisodeRunner` plays it in this process."""

    key: EpisodeKey
    """The task, index, visit and attempt number."""
    faults: list[str]
    """Messages about faults that did not change the outcome."""
    activity: str
    """A description of what the attempt waits for."""
    since: float
    """Time at which the wait began, in the event loop's time."""

    @property
    def turns_taken(self) -> int:
        """The number of turns of `main` so far."""

    @property
    def permanent(self) -> bool:
        """True if another attempt would fail in the same way."""

    def cancel(self, ending: Ending | None = None) -> None:
        """End the attempt now. It is closed, and kept as partial unless another ending is given."""

    async def run(self) -> list[Trajectory]:
        """Play the attempt and return the trajectories of its agents, `main` first.

        If this call is cancelled, the attempt is closed before the call ends.
        """

    def trajectories(self) -> list[Trajectory]:
        """The trajectories so far, after `run` was cancelled."""

    def trained_logs(self) -> Iterator[TokenLog]:
        """The token logs of trained agents so far; empty if another process has them."""


class EpisodePlayer(Protocol):
    """A player of the episodes of a run."""

    def begin(self, key: EpisodeKey, *, last_try: bool) -> Attempt:
        """Return an attempt at an episode; it begins when `run` is called.

        Args:
            key: the task, index, visit and attempt number.
            last_try: True if the episode is not repeated after an engine failure of this attempt.
        """

    def watch_width(self, listener: Callable[[int], None]) -> None:
        """Call the listener with the wanted number of episodes in flight, now and at each change."""

    def drain(self) -> None:
        """Prepare for the end of the run: the caller begins no further episode."""


@dataclass(frozen=True, slots=True)
class LocalPlayer:
    """A player of episodes on the event loop of the run."""

    shared: RunShared
    """The objects that all episodes of the run share."""
    width: int
    """The wanted number of episodes in flight."""

    def begin(self, key: EpisodeKey, *, last_try: bool) -> Attempt:
        """Return an attempt on this event loop."""
        return EpisodeRunner(self.shared, key)

    def watch_width(self, listener: Callable[[int], None]) -> None:
        """Call the listener once: the width is constant."""
        listener(self.width)

    def drain(self) -> None:
        """End every `Endpoint.wait` of the run, since no further episode begins."""
        self.shared.endpoints.draining.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetWorker:
    """A worker of a fleet, as of its last heartbeat."""

    number: int
    """The worker's number, never reused within the fleet."""
    node: str
    """The name of its machine."""
    pid: int
    """The id of its process on that machine."""
    playing: int
    """The number of its episodes in flight."""
    width: int
    """Maximum number of episodes that it plays at once."""
    version: str
    """The version of its weights."""
    lag: float
    """The lag of its event loop in seconds, 99th percentile."""
    silent: float
    """Seconds since its last heartbeat."""
    oldest: str
    """A description of what its episode with the longest wait waits for; "" without episodes."""
    waited: float
    """The seconds for which the episode of `oldest` has waited; 0 without episodes."""


class IdleReason(enum.StrEnum):
    """Reasons why a worker of a fleet does not play, the most important first."""

    RESTING = "paused after losses"
    """Its slot stays empty for up to an hour, since workers in this slot died too often."""
    LOST = "lost, being replaced"
    """It died; its replacement starts soon."""
    WAITING = "waiting for weights"
    """It lacks the current weights, which cannot be read anywhere. It plays after the next update."""
    STARTING = "starting"
    """Its engine starts, or is being updated to the state of the others."""
    UNPLACED = "without a machine"
    """No machine has room for it yet."""


class WorkerSetup(Protocol):
    """A run in the form in which workers receive it; each worker sets the run up."""

    @property
    def worker_engines(self) -> Collection[BaseEngine]:
        """The engines that exist only on workers; each worker has a copy of each engine."""

    def engines(self) -> AbstractAsyncContextManager[Mapping[BaseEngine, BaseEngine]]:
        """Enter `worker_engines` on the workers; the block receives a placeholder for each engine.

        Raises:
            BadInput, EngineError: an engine does not start; the message names the worker and the cause.
        """

    def player(
        self, shared: RunShared, clock: datetime, width: int | None, report: Callable[[str], None]
    ) -> AbstractAsyncContextManager[EpisodePlayer]:
        """The player of the episodes while the block lasts.

        Args:
            shared: the objects that episodes share in this process.
            clock: the time that is passed to chat templates.
            width: maximum number of episodes in flight; None for the capacity of the workers.
            report: a function that receives messages about events of workers.

        Raises:
            BadInput: a worker cannot play the episodes; the message names the worker and the cause.
        """


class PlayingEngine(Engine):
    """An engine that plays whole episodes on workers with both model and environment."""

    engine: Engine
    """The engine of the workers; each worker has a copy."""
    least: int
    """The number of workers that the run needs to begin."""
    most: int
    """Maximum number of workers."""

    @property
    @abstractmethod
    def is_deserted(self) -> bool:
        """True if no worker is playing. `health` raises if no worker can start."""

    @property
    @abstractmethod
    def events(self) -> Sequence[str]:
        """Messages about events of workers so far, such as losses with their causes."""

    @abstractmethod
    def workers(self) -> list[FleetWorker]:
        """The playing workers as of their last heartbeats, ordered by number."""

    @abstractmethod
    def absent(self) -> Mapping[IdleReason, int]:
        """The number of workers that do not play, by the reason."""

    @abstractmethod
    def sent(self, setup: RunSetup) -> WorkerSetup:
        """Return the run in the form that workers receive; called before anything starts.

        Raises:
            BadOption: a part of the run cannot be sent.
        """
