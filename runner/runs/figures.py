"""The figures of a run while it plays, for whoever shows them."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter
from typing import Final

import anyio

from runner.concurrency.loop_lag import LATE_SECONDS, Blocker
from runner.runs.fleet_figures import FleetFigures, fleet_in_words
from runner.runs.player import Attempt, PlayingEngine
from runner.runs.run import Run
from runner.transcript import shown_line

__all__ = [
    "WRITES_OTHERWISE",
    "Figures",
    "Gauge",
    "Stuck",
    "as_time",
    "calls_in_words",
    "in_words",
    "ranks_in_words",
    "writes_otherwise",
]

RATE_SECONDS: Final = 5.0
"""The seconds over which the pace is measured."""

SLOWEST: Final = 5
"""So many episodes that have waited longest are told of."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """An episode and what it waits for."""

    id: str
    """The episode's id."""

    turns: int
    """The number of turns that it has had."""

    activity: str
    """The thing that it waits for."""

    seconds: float
    """The seconds for which it has waited."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What is to be seen of a run at one moment."""

    total: int | None = None
    """How many episodes the run is to have, or None where nobody knows."""

    before: int = 0
    """How many of them earlier runs of the same file played."""

    done: int = 0
    """How many were played so far, failed ones and those of earlier runs included."""

    failed: int = 0
    """How many of those failed."""

    running: int = 0
    """Episodes in flight, those that wait for the engine included."""

    waiting: int = 0
    """Turns that wait for a place in the engine."""

    ranks: tuple[int, ...] = ()
    """Turns inside each data-parallel rank of an engine that has several; empty where none has."""

    throttled: int = 0
    """How often servers said that they were asked too much."""

    let_in: int | None = None
    """Requests that servers of messages are asked at once just now; None where there is none."""

    rate: float = 0.0
    """Sampled ids a second, of late."""

    reward: float | None = None
    """The mean reward so far, or None."""

    agent: str = ""
    """Whose reward that is, where several agents are trained, else ""."""

    reward_error: float | None = None
    """The standard error of the mean reward, or None."""

    elapsed: float = 0.0
    """Seconds of playing."""

    lag: float = 0.0
    """The lag of the event loop in seconds, 99th percentile."""

    blocker: Blocker | None = None
    """Whose code makes the loop late, where it is."""

    fleet: FleetFigures | None = None
    """The workers, where the engine has workers, and while they play."""

    news: tuple[str, ...] = ()
    """What happened to workers since the figures were read last."""

    slowest: tuple[Stuck, ...] = ()
    """The episodes that have waited longest for one thing."""

    fault: str = ""
    """The last thing that went wrong."""

    calls: int = 0
    """Tool calls so far."""

    malformed: int = 0
    """How many of them could not be read."""

    @property
    def remaining(self) -> float | None:
        """Seconds left at the pace so far; None where that cannot be told."""
        played = self.done - self.before
        if self.total is None or played <= 0:
            return None
        return max(0, self.total - self.done) * self.elapsed / played


class Gauge:
    """Reads the figures of a run; cheap enough for four times a second with ten thousand episodes, or 500 workers."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self._last_event = ""

    def read(self, run: Run, *, total: int | None = None, before: int = 0, last_fault: str = "") -> Figures:
        """The figures now; what else is given is known to whoever shows them, and none of the run's."""
        summary = run.summary
        stats = [engine.stats() for engine in run.engines]
        lag = run.lag.percentile(99)
        # Only of a loop that is late: whose code ran longest is no news while it was fast.
        blockers = run.lag.blockers(1) if lag > LATE_SECONDS else []
        reward = summary.reward
        engine = run.engine if isinstance(run.engine, PlayingEngine) else None
        return Figures(
            total=total,
            before=before,
            done=summary.episodes,
            failed=summary.failed,
            running=len(run.plays),
            waiting=sum(engine.waiting for engine in stats),
            ranks=next((engine.ranks for engine in stats if len(engine.ranks) > 1), ()),
            throttled=sum(engine.throttled for engine in stats),
            let_in=sum(engine.places for engine in stats if engine.places is not None) or None,
            rate=self._rate(sum(engine.sampled_tokens for engine in stats)),
            reward=reward.mean if reward.count else None,
            agent=next(iter(summary.agents)) if len(summary.agents) > 1 else "",
            reward_error=reward.standard_error if reward.count > 1 else None,
            elapsed=summary.elapsed,
            lag=lag,
            blocker=blockers[0] if blockers else None,
            fleet=_fleet(engine) if engine is not None and not run.over else None,  # then they end, one by one
            news=self._news(engine.events) if engine is not None else (),
            slowest=tuple(_stuck(play) for play in heapq.nsmallest(SLOWEST, run.plays, key=attrgetter("since"))),
            fault=shown_line(last_fault or (summary.faults[-1] if summary.faults else "")),
            calls=summary.calls,
            malformed=summary.malformed_calls,
        )

    def _news(self, events: Sequence[str]) -> tuple[str, ...]:
        # The very object: two workers may be lost in the same words.
        news = tuple(takewhile(lambda event: event is not self._last_event, reversed(events)))[::-1]
        self._last_event = news[-1] if news else self._last_event
        return news

    def _rate(self, sampled: int) -> float:
        now = time.monotonic()
        self._samples.append((now, sampled))
        # Over some seconds: an engine sends its ids in steps, and the pace of one step would jump.
        while self._samples[0][0] < now - RATE_SECONDS:
            self._samples.popleft()
        since, before = self._samples[0]
        return (sampled - before) / (now - since) if now > since else 0.0


def _stuck(play: Attempt) -> Stuck:
    waited = anyio.current_time() - play.since
    return Stuck(shown_line(play.key.id), play.turns_taken, shown_line(play.activity), waited)


def _fleet(engine: PlayingEngine) -> FleetFigures:
    workers = tuple(engine.workers())
    return FleetFigures(
        workers=workers,
        most=engine.most,
        few=len(workers) < engine.least,
        version=engine.weight_version,
        absent=engine.absent(),
    )


def in_words(figures: Figures) -> Iterator[str]:
    """The figures in words."""
    yield f"{figures.done} of {figures.total} episodes" if figures.total else f"{figures.done} episodes"
    yield f"{figures.running} running"
    if figures.fleet is not None:
        yield fleet_in_words(figures.fleet)
    if figures.waiting:
        yield f"{figures.waiting} waiting for the engine"
    if figures.ranks:
        yield ranks_in_words(figures.ranks)
    if figures.throttled:
        yield f"asked too much {figures.throttled} times, now {figures.let_in} requests at once"
    yield f"{figures.failed} failed"
    if figures.malformed:
        yield calls_in_words(figures.calls, figures.malformed)
    yield f"{figures.rate:.0f} tokens/s"
    if figures.reward is not None:
        whose = f"reward of {shown_line(figures.agent)}" if figures.agent else "reward"
        yield f"mean {whose} {figures.reward:.3f}"
    if figures.remaining:
        yield f"{as_time(figures.remaining)} left"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """How many turns are inside each rank."""
    return f"{' + '.join(map(str, ranks))} inside {len(ranks)} ranks"


SUSPECT_CALLS: Final = 3
"""With fewer unreadable calls nothing is suspected: any share of a handful of calls may be chance."""
SUSPECT_SHARE: Final = 0.2
"""The share of unreadable calls above which the model is suspected to write otherwise than its template."""

WRITES_OTHERWISE: Final = (
    "the model seems to write calls otherwise than its template: compare check-template with show, and give the "
    "template that it was trained with (--template)"
)
"""What to do about many calls that cannot be read."""


def writes_otherwise(calls: int, malformed: int) -> bool:
    """So many calls cannot be read that the model may have been trained with another template: some slip in any run."""
    return malformed >= SUSPECT_CALLS and malformed > calls * SUSPECT_SHARE


def calls_in_words(calls: int, malformed: int) -> str:
    """How many calls could not be read."""
    return f"{malformed} of {calls} tool calls could not be read"


def as_time(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
