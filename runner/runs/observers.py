"""Observers of a run: each receives the run's events in a separate thread, so that no observer delays the run."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from runner.concurrency.user_code import describe_error
from runner.logs import logger_for
from runner.quantities import counted
from runner.runs.groups import OpenGroup, by_agent
from runner.runs.summary import Summary
from runner.trajectory import Group, Trajectory, Turn

__all__ = ["ObserverThreads", "RunObserver"]

log = logger_for("runs")

MAX_WAITING_EVENTS: Final = 10_000
"""Maximum number of events that wait for an observer. Further events are dropped and counted."""

END_SECONDS: Final = 5.0
"""Longest wait for all observers at the end of a run."""


class RunObserver:
    """A receiver of the events of a run. A subclass overrides the methods that it needs.

        class Rewards(RunObserver):
            def episode(self, trajectories):
                print(trajectories[0].id, trajectories[0].reward)

        run(environment, engine, observers=[Rewards()])

    Methods are called one after the other, in a thread of the observer. They may block, and must not change their
    arguments. An observer that raises, is slow or never returns changes nothing in the run: its error and the number of
    dropped events are faults in the summary.
    """

    def started(self, about: Mapping[str, Any]) -> None:
        """Receive the beginning of the run; `about` has environment, engine, group_size, seed and file."""

    def turn(self, trajectory: Trajectory, turn: Turn) -> None:
        """Receive a turn; called for each turn when its episode has ended, before `episode`."""

    def episode(self, trajectories: Sequence[Trajectory]) -> None:
        """Receive the trajectories of an episode, `main` first, after the episode was stored in the run file."""

    def group(self, group: Group) -> None:
        """Receive a group after its last episode has ended; called for `main` and for each trained agent."""

    def weights(self, version: str) -> None:
        """Receive the version of new weights of an engine of the run."""

    def ended(self, summary: Summary) -> None:
        """Receive the summary after the end of the run."""


@dataclass(eq=False, slots=True)
class _ObserverThread:
    observer: RunObserver
    events: queue.Queue[Callable[[RunObserver], None] | None] = field(
        default_factory=lambda: queue.Queue(MAX_WAITING_EVENTS)
    )
    thread: threading.Thread | None = None
    dropped: int = 0
    failures: int = 0
    first_error: str = ""

    def run(self) -> None:
        while (event := self.events.get()) is not None:
            try:
                event(self.observer)
            except BaseException as error:  # this includes SystemExit, which must not end the process
                self.failures += 1
                self.first_error = self.first_error or describe_error(error)

    def send(self, event: Callable[[RunObserver], None] | None) -> None:
        try:
            self.events.put_nowait(event)
        except queue.Full:
            self.dropped += 1


class ObserverThreads:
    """Threads of the observers of a run. The run sends events without waiting for an observer.

    Args:
        observers: the observers, each with a thread.
        group_size: the number of episodes of each task.
        seed: the seed of the run.
    """

    def __init__(self, observers: Sequence[RunObserver], *, group_size: int, seed: int) -> None:
        self._watched = [_ObserverThread(observer) for observer in observers]
        self._group_size, self._seed = group_size, seed
        self._open: dict[tuple[str, int], OpenGroup] = {}

    def start(self, about: Mapping[str, Any]) -> None:
        """Start the threads and announce the run."""
        for watched in self._watched:
            # The thread is a daemon, since an observer that never returns must not block the end of the process.
            watched.thread = threading.Thread(target=watched.run, name="deltarunner observer", daemon=True)
            watched.thread.start()
        self._send(lambda observer: observer.started(about))

    def episode(self, trajectories: Sequence[Trajectory], missing: int) -> None:
        """Announce a scored episode with its turns, and its groups after their last episode.

        Args:
            trajectories: the trajectories of its agents.
            missing: the number of the group's episodes that this run plays.
        """
        if not self._watched:
            return

        def announce(observer: RunObserver) -> None:
            for trajectory in trajectories:
                for turn in trajectory.turns:
                    observer.turn(trajectory, turn)
            observer.episode(trajectories)

        self._send(announce)
        key = trajectories[0].task.id, trajectories[0].visit
        group = self._open.setdefault(key, OpenGroup(missing))
        group.trajectories.extend(trajectories)
        group.played += 1
        if group.played >= missing:
            members = self._open.pop(key).trajectories
            for each in by_agent(members, seed=self._seed, group_size=self._group_size):
                # `each=each` binds the current group, since the next round assigns another one.
                self._send(lambda observer, each=each: observer.group(each))  # type: ignore[misc]  # see above

    def weights(self, version: str) -> None:
        """Announce the version of new weights."""
        self._send(lambda observer: observer.weights(version))

    def end(self, summary: Summary) -> list[str]:
        """Announce the end, wait up to `END_SECONDS` for the threads, and return messages about faults.

        This call blocks, so call it in a thread.
        """
        self._send(lambda observer: observer.ended(summary))
        deadline = time.monotonic() + END_SECONDS
        faults = []
        for watched in self._watched:
            assert watched.thread is not None, "started with the run"
            watched.send(None)
            watched.thread.join(max(0.0, deadline - time.monotonic()))
            name = f"observer {type(watched.observer).__name__}"
            if watched.thread.is_alive():
                waiting = counted(watched.events.qsize(), "waiting event")
                faults.append(f"{name} has not returned after {END_SECONDS:g} s, with {waiting}")
            if watched.failures:
                faults.append(f"{name} raised {counted(watched.failures, 'time')}, first: {watched.first_error}")
            if watched.dropped:
                faults.append(f"{name} was too slow and missed {counted(watched.dropped, 'event')}")
        return faults

    def _send(self, event: Callable[[RunObserver], None]) -> None:
        for watched in self._watched:
            watched.send(event)
