"""Has the episodes of a run played by a fleet: each goes to a worker as a whole, and comes back as trajectories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import anyio

from runner.cluster.driver import Driver
from runner.cluster.fleet import Ticket
from runner.cluster.hand import Hand
from runner.cluster.words import Played, PlayingNow, WorkerLost
from runner.episode.key import EpisodeKey
from runner.episode.limits import Ending
from runner.episode.outcome import silent
from runner.episode.shared import RunShared
from runner.errors import BadOption, BadTask, DeltarunnerError
from runner.tokens.log import TokenLog
from runner.trajectory import Outcome, Trajectory

__all__ = ["FleetPlayer"]

PARTIAL_SECONDS: Final = 10.0
"""How long a worker may take to hand over what there is of an episode that was cut."""


class FleetPlayer:
    """Plays the episodes of one run on a fleet.

    Args:
        driver: has the workers.
        run: the driver's number for the run.
        shared: what the driver has of it.
        width: how many episodes are in flight at most; None for as many as the workers take.
    """

    def __init__(self, driver: Driver, run: int, shared: RunShared, width: int | None) -> None:
        self.driver = driver
        self.run = run
        self.shared = shared
        self.deaths: Counter[tuple[str, int, int]] = Counter()
        """How many workers were lost under each episode that is not over, by task, visit and index."""
        self._width = width
        self._listener: Callable[[int], None] | None = None

    def begin(self, key: EpisodeKey, *, last_try: bool) -> FleetAttempt:
        """An attempt at an episode, which waits for a worker when it is run."""
        return FleetAttempt(self, key, last_try=last_try)

    def watch_width(self, listener: Callable[[int], None]) -> None:
        """Call the listener with as many episodes as all workers together take, whenever workers come or go."""
        self._listener = listener
        self.tell()

    def tell(self) -> None:
        """Call the listener now."""
        if self._listener is not None:
            # Never none: an episode that is asked for while no worker is there waits for one, and so does the run.
            self._listener(self._width or max(1, self.driver.fleet.width))

    def drain(self) -> None:
        """Take note that no further episode begins."""
        self.driver.drain(self.run)


class FleetAttempt:
    """An attempt at an episode on some worker."""

    def __init__(self, player: FleetPlayer, key: EpisodeKey, *, last_try: bool) -> None:
        self.key = key
        self.number = player.driver.attempt_number()
        """Names the attempt to its worker."""
        self.faults: list[str] = []
        self.permanent = False
        self.turns_taken = 0
        self.activity = "a worker"
        self.since = anyio.current_time()
        self._player = player
        self._last_try = last_try
        self._episode = key.task.id, key.visit, key.index
        deaths = player.deaths[self._episode]
        self._ticket = Ticket(group=self._episode[:2], again=deaths > 0, last_chance=last_try and deaths > 0)
        self._hand: Hand | None = None
        self._waiting = anyio.CancelScope()
        self._ending: Ending | None = None
        self._trajectories: list[Trajectory] | None = None

    def trained_logs(self) -> Iterator[TokenLog]:
        """None: they are where the episode is played, and its worker looks at them."""
        return iter(())

    def trajectories(self) -> list[Trajectory]:
        """What there is of it."""
        if self._trajectories is None:
            self._trajectories = self._silent(self._ending or Ending(Outcome.CANCELLED))
        return self._trajectories

    def cancel(self, ending: Ending | None = None) -> None:
        """Cut it where it stands; its worker closes it and sends what there is."""
        if self._ending is not None:
            return
        self._ending = ending or Ending(Outcome.CANCELLED)
        if self._hand is None:
            self._waiting.cancel()
        else:
            self._cut(self._hand)

    async def run(self) -> list[Trajectory]:
        """Have it played, and give its trajectories."""
        driver = self._player.driver
        try:
            with self._waiting:
                self._hand = await driver.seat(self._ticket)
            if self._hand is not None:
                await self._play_on(self._hand)
        except WorkerLost as lost:
            assert self._hand is not None, "it was there"
            # Whatever failed there, it is not to be relied on; and the next attempt must not be sent to it.
            self._hand.dismiss(str(lost))
            await self._hand.gone.wait()
            self._trajectories = self._lost(lost, self._hand)
        finally:
            driver.done(self._ticket)
        return self.trajectories()

    async def _play_on(self, hand: Hand) -> None:
        if self._ending is not None:  # it was cut before it began
            return
        self._report(hand.name)
        answer = hand.process.send("play", self._player.run, self.number, self._packed_key())
        hand.attempts[self.number] = self
        try:
            self._take(await answer)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + PARTIAL_SECONDS):
                self._cut(hand)
                try:
                    self._take(await answer)
                except (WorkerLost, DeltarunnerError) as error:
                    self.faults.append(str(error))
            raise
        finally:
            del hand.attempts[self.number]

    def _cut(self, hand: Hand) -> None:
        hand.process.send("cancel", self._player.run, self.number, self._ending)

    def _take(self, played: Played) -> None:
        for trajectory in played.trajectories:
            trajectory.task = self.key.task
            self._player.shared.heard_of(trajectory.agent)
        self._trajectories = played.trajectories
        self.faults.extend(played.faults)
        self.permanent = played.permanent
        del self._player.deaths[self._episode]

    def _lost(self, lost: WorkerLost, hand: Hand) -> list[Trajectory]:
        deaths = self._player.deaths
        deaths[self._episode] += 1
        number = deaths.pop(self._episode) if self._last_try else deaths[self._episode]
        workers = "1 worker was" if number == 1 else f"{number} workers were"
        error = f"{workers} lost while playing it, the last one {hand.name}: {hand.why or lost}"
        # One that the run itself ended is what it was ended as.
        return self._silent(self._ending or Ending(Outcome.ENGINE_ERROR, error=error))

    def _silent(self, ending: Ending) -> list[Trajectory]:
        return [silent(self._player.shared, self.key, ending)]

    def _packed_key(self) -> bytes:
        try:
            packed: bytes = self._player.driver.launcher.pack(
                self.key, "cannot", "give it plain values, and make the rest of them in setup()"
            )
        except BadOption as error:
            raise BadTask(f"task {self.key.task.id!r} goes to a worker, and {error}") from None
        return packed

    def hear(self, playing: PlayingNow | None, since: float) -> None:
        """Take note of what its worker says of it."""
        assert self._hand is not None, "it is told of what is played"
        if playing is not None:
            self.turns_taken = playing.turns
            self.activity, self.since = f"{playing.activity}, on {self._hand.name}", since
        elif self.since < since:
            self.activity, self.since = self._hand.name, since

    def _report(self, what: str) -> None:
        self.activity, self.since = what, anyio.current_time()
