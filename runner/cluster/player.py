"""The player of a fleet: each episode goes to a worker as a whole, and comes back as trajectories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import anyio

from runner.cluster.driver import Driver
from runner.cluster.fleet import Assignment
from runner.cluster.protocol import AttemptResult, PlayingNow, WorkerLost
from runner.cluster.worker_handle import WorkerHandle
from runner.episode.key import EpisodeKey
from runner.episode.limits import Ending
from runner.episode.outcome import silent
from runner.episode.shared import RunShared
from runner.errors import BadOption, BadTask, DeltarunnerError
from runner.tokens.log import TokenLog
from runner.trajectory import Outcome, Trajectory

__all__ = ["FleetPlayer"]

PARTIAL_SECONDS: Final = 10.0
"""Seconds that a worker may take to return the results of a cut episode."""


class FleetPlayer:
    """The player of the episodes of one run on a fleet.

    Args:
        driver: the driver of the fleet.
        run: the driver's number for the run.
        shared: the state of the run in the driver's process.
        width: maximum number of episodes in flight; None for as many as the workers take.
    """

    def __init__(self, driver: Driver, run: int, shared: RunShared, width: int | None) -> None:
        self.driver = driver
        self.run = run
        self.shared = shared
        self.deaths: Counter[tuple[str, int, int]] = Counter()
        """Number of workers that were lost while they played an unfinished episode, by its task id, visit and index."""
        self._width = width
        self._listener: Callable[[int], None] | None = None

    def begin(self, key: EpisodeKey, *, last_try: bool) -> FleetAttempt:
        """Return an attempt at an episode. Its `run` waits for a worker."""
        return FleetAttempt(self, key, last_try=last_try)

    def watch_width(self, listener: Callable[[int], None]) -> None:
        """Call the listener with the maximum number of episodes in flight, now and when workers come or go."""
        self._listener = listener
        self.notify()

    def notify(self) -> None:
        """Call the listener, if there is one, with the current maximum of episodes in flight."""
        if self._listener is not None:
            # At least 1: if there is no worker, one episode begins and waits for a worker, and the run waits with it.
            self._listener(self._width or max(1, self.driver.fleet.width))

    def drain(self) -> None:
        """Notify the workers that no further episode begins."""
        self.driver.drain(self.run)


class FleetAttempt:
    """An attempt at an episode on one of the workers."""

    def __init__(self, player: FleetPlayer, key: EpisodeKey, *, last_try: bool) -> None:
        self.key = key
        self.number = player.driver.attempt_number()
        self.faults: list[str] = []
        self.permanent = False
        self.turns_taken = 0
        self.activity = "a worker"
        self.since = anyio.current_time()
        self._player = player
        self._last_try = last_try
        self._episode = key.task.id, key.visit, key.index
        deaths = player.deaths[self._episode]
        self._assignment = Assignment(group=self._episode[:2], again=deaths > 0, last_chance=last_try and deaths > 0)
        self._handle: WorkerHandle | None = None
        self._waiting = anyio.CancelScope()
        self._ending: Ending | None = None
        self._trajectories: list[Trajectory] | None = None

    def trained_logs(self) -> Iterator[TokenLog]:
        """Return an empty iterator: the logs are on the worker, which checks them."""
        return iter(())

    def trajectories(self) -> list[Trajectory]:
        """Return the trajectories that a worker returned; if there are none, one trajectory without turns."""
        if self._trajectories is None:
            self._trajectories = self._silent(self._ending or Ending(Outcome.CANCELLED))
        return self._trajectories

    def cancel(self, ending: Ending | None = None) -> None:
        """Cut the episode. Its worker closes it and returns the partial trajectories."""
        if self._ending is not None:
            return
        self._ending = ending or Ending(Outcome.CANCELLED)
        if self._handle is None:
            self._waiting.cancel()
        else:
            self._cut(self._handle)

    async def run(self) -> list[Trajectory]:
        """Play the episode, and return its trajectories.

        Raises:
            BadTask: the task cannot be sent to a worker.
            DeltarunnerError: the worker raised this error.
        """
        driver = self._player.driver
        try:
            with self._waiting:
                self._handle = await driver.slot(self._assignment)
            if self._handle is not None:
                await self._play_on(self._handle)
        except WorkerLost as lost:
            assert self._handle is not None, "a worker is lost only after it was assigned"
            # After any failure on a worker, its state is unknown, so the next attempt must use another worker.
            self._handle.dismiss(str(lost))
            await self._handle.gone.wait()
            self._trajectories = self._lost(lost, self._handle)
        finally:
            driver.release_slot(self._assignment)
        return self.trajectories()

    async def _play_on(self, handle: WorkerHandle) -> None:
        if self._ending is not None:  # the attempt was cut before it began
            return
        self._report(handle.name)
        answer = handle.process.send("play", self._player.run, self.number, self._packed_key())
        handle.attempts[self.number] = self
        try:
            self._take(await answer)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + PARTIAL_SECONDS):
                self._cut(handle)
                try:
                    self._take(await answer)
                except (WorkerLost, DeltarunnerError) as error:
                    self.faults.append(str(error))
            raise
        finally:
            del handle.attempts[self.number]

    def _cut(self, handle: WorkerHandle) -> None:
        handle.process.send("cancel", self._player.run, self.number, self._ending)

    def _take(self, played: AttemptResult) -> None:
        for trajectory in played.trajectories:
            trajectory.task = self.key.task
            self._player.shared.record_agent(trajectory.agent)
        self._trajectories = played.trajectories
        self.faults.extend(played.faults)
        self.permanent = played.permanent
        del self._player.deaths[self._episode]

    def _lost(self, lost: WorkerLost, handle: WorkerHandle) -> list[Trajectory]:
        deaths = self._player.deaths
        deaths[self._episode] += 1
        number = deaths.pop(self._episode) if self._last_try else deaths[self._episode]
        workers = "1 worker was" if number == 1 else f"{number} workers were"
        error = f"{workers} lost while playing this episode, the last one {handle.name}: {handle.why or lost}"
        # If the run has already cut the episode, the outcome is the ending that the run gave.
        return self._silent(self._ending or Ending(Outcome.ENGINE_ERROR, error=error))

    def _silent(self, ending: Ending) -> list[Trajectory]:
        return [silent(self._player.shared, self.key, ending)]

    def _packed_key(self) -> bytes:
        try:
            packed: bytes = self._player.driver.launcher.pack(
                self.key, "cannot", "give the task plain values, and construct other objects in setup()"
            )
        except BadOption as error:
            raise BadTask(f"task {self.key.task.id!r} goes to a worker, and {error}") from None
        return packed

    def note_heartbeat(self, playing: PlayingNow | None, since: float) -> None:
        """Record the episode's state from a heartbeat of its worker; see `HeartbeatListener`."""
        assert self._handle is not None, "only an attempt on a worker gets heartbeats"
        if playing is not None:
            self.turns_taken = playing.turns
            self.activity, self.since = f"{playing.activity}, on {self._handle.name}", since
        elif self.since < since:
            self.activity, self.since = self._handle.name, since

    def _report(self, what: str) -> None:
        self.activity, self.since = what, anyio.current_time()
