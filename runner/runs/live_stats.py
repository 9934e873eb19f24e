"""Live statistics of a run, for displays."""

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
from runner.quantities import counted
from runner.runs.fleet_stats import FleetStats, fleet_in_words
from runner.runs.player import Attempt, PlayingEngine
from runner.runs.run import Run
from runner.runs.time_left import TimeLeft, TimeLeftEstimator
from runner.trajectory import Outcome
from runner.transcript import shown_line

__all__ = [
    "TEMPLATE_ADVICE",
    "LiveStats",
    "StatsReader",
    "WaitingEpisode",
    "as_time",
    "calls_in_words",
    "in_words",
    "left_in_words",
    "pace_in_words",
    "ranks_in_words",
    "running_in_words",
    "suspect_template",
]

MAX_STEP_SECONDS: Final = 60.0
"""Longest engine step during which the previous pace is still shown."""

PACE_WINDOW_SECONDS: Final = 10.0
"""Length of the time over which the pace is measured. It is long, since one engine step may take several seconds."""

MIN_QUIET_SECONDS: Final = 10.0
"""After this many seconds without new tokens, a display shows that time instead of rates, which would fall slowly."""

TIME_LEFT_INTERVAL_SECONDS: Final = 1.0
"""The interval between estimates of the time left."""

MAX_WAITING_SHOWN: Final = 5
"""Maximum number of waiting episodes that are listed, the longest waits first."""


@dataclass(frozen=True, slots=True)
class WaitingEpisode:
    """An episode in flight that waits for the engine, a tool or other code."""

    id: str

    turns: int

    activity: str
    """A description of the thing that the episode waits for."""

    seconds: float


@dataclass(frozen=True, slots=True)
class LiveStats:
    """Statistics of a run at one moment."""

    total: int | None = None
    """The number of episodes of the run; None if unknown."""

    before: int = 0
    """The number of these episodes that earlier runs of the file played."""

    done: int = 0
    """The number of finished episodes, also failed ones and those of earlier runs, but not cancelled ones."""

    cancelled: int = 0
    """The number of cancelled episodes, which a resumed run plays again."""

    failed: int = 0
    """The number of finished episodes that failed."""

    running: int = 0
    """The number of episodes in flight, including episodes that wait for the engine."""

    in_engine: int | None = None
    """The number of episodes for which the engine samples; None if workers play the episodes."""

    waiting: int = 0
    """The number of turns that wait for a place in the engine."""

    waits_for: str = ""
    """The author's code outside of episodes for which the run waits, such as "tasks()"; "" if there is none."""

    ranks: tuple[int, ...] = ()
    """The number of turns in each data-parallel rank, for an engine with several ranks; empty for other engines."""

    throttled: int = 0
    """The number of requests that servers rejected because of rate limits."""

    let_in: int | None = None
    """The present limit of concurrent requests to message servers; None without such servers."""

    read: float | None = None
    """Recent prompt ids computed per second; None if the engine does not report them."""

    rate: float = 0.0
    """Recent sampled ids per second."""

    began: bool = True
    """True once the engine has read or sampled an id."""

    quiet: float = 0.0
    """Seconds since the engine last reported an id that it read or sampled."""

    reward: float | None = None
    """The mean reward so far; None without rewards."""

    agent: str = ""
    """The agent whose mean reward is `reward`, if several agents are trained; else ""."""

    reward_error: float | None = None
    """The standard error of the mean reward, clustered by task; None with fewer than two tasks."""

    elapsed: float = 0.0
    """Seconds since the run began to play."""

    lag: float = 0.0
    """The lag of the event loop in seconds, 99th percentile."""

    blocker: Blocker | None = None
    """The code that blocks the event loop; None while the loop is fast."""

    fleet: FleetStats | None = None
    """The workers while they play; None without workers."""

    worker_events: tuple[str, ...] = ()
    """Messages about events of workers since the last reading."""

    slowest: tuple[WaitingEpisode, ...] = ()
    """The episodes that have waited longest for one thing."""

    fault: str = ""

    calls: int = 0
    """The number of tool calls so far."""

    malformed: int = 0
    """The number of unreadable tool calls: calls that could not be parsed."""

    left: TimeLeft | None = None
    """The estimated time left; None before it can be estimated."""


class StatsReader:
    """A reader of statistics of a run. Four reads a second are cheap, even with 10,000 episodes or 500 workers."""

    def __init__(self) -> None:
        self._sampled, self._computed = _Pace(), _Pace()
        self._time_left = TimeLeftEstimator()
        self._last_left: TimeLeft | None = None
        self._look_again = 0.0
        self._last_event = ""
        self._counts = (-1, -1)
        self._counted = 0.0
        """The time at which the counts of ids last changed."""

    def read(self, run: Run, *, total: int | None = None, before: int = 0, last_fault: str = "") -> LiveStats:
        """Return the present statistics.

        Args:
            run: the run.
            total: the number of episodes of the run; None if unknown.
            before: the number of these episodes that earlier runs of the file played.
            last_fault: a fault that is shown in place of the last fault of the summary; "" for none.
        """
        summary = run.summary
        stats = [engine.stats() for engine in run.engines]
        lag = run.lag.percentile(99)
        # A blocker is shown only if the loop is late, since the longest call of a fast loop does not matter.
        blockers = run.lag.blockers(1) if lag > LATE_SECONDS else []
        reward = summary.reward
        engine = run.engine if isinstance(run.engine, PlayingEngine) else None
        computed = sum(each.prompt_tokens for each in stats)
        sampled = sum(each.sampled_tokens for each in stats)
        read = self._computed.of(computed)
        waiting = sum(each.waiting for each in stats)
        asking = sum(attempt.activity.endswith(": engine") for attempt in run.in_flight)
        return LiveStats(
            total=total,
            before=before,
            done=summary.episodes - summary.outcomes[Outcome.CANCELLED],
            cancelled=summary.outcomes[Outcome.CANCELLED],
            failed=summary.failed,
            running=len(run.in_flight),
            in_engine=max(0, asking - waiting) if engine is None else None,
            waiting=waiting,
            waits_for=run.waits_for,
            ranks=next((engine.ranks for engine in stats if len(engine.ranks) > 1), ()),
            throttled=sum(engine.throttled for engine in stats),
            let_in=sum(engine.places for engine in stats if engine.places is not None) or None,
            read=read if computed else None,
            rate=self._sampled.of(sampled),
            began=bool(computed or sampled),
            quiet=self._quiet(computed, sampled),
            reward=reward.mean if reward.count else None,
            agent=next(iter(summary.agents)) if len(summary.agents) > 1 else "",
            reward_error=reward.standard_error if reward.tasks > 1 else None,
            elapsed=summary.elapsed,
            left=self._left(run, total),
            lag=lag,
            blocker=blockers[0] if blockers else None,
            fleet=_fleet(engine)
            if engine is not None and not run.over
            else None,  # None after the run, when workers end one by one
            worker_events=self._new_events(engine.events) if engine is not None else (),
            slowest=tuple(
                _stuck(attempt)
                for attempt in heapq.nsmallest(MAX_WAITING_SHOWN, run.in_flight, key=attrgetter("since"))
            ),
            fault=shown_line(last_fault or (summary.faults[-1] if summary.faults else "")),
            calls=summary.calls,
            malformed=summary.malformed_calls,
        )

    def _quiet(self, computed: int, sampled: int) -> float:
        now = time.monotonic()
        if self._counts != (computed, sampled):
            self._counts, self._counted = (computed, sampled), now
        return now - self._counted

    def _new_events(self, events: Sequence[str]) -> tuple[str, ...]:
        # Messages are compared by identity, since two lost workers may have equal messages.
        worker_events = tuple(takewhile(lambda event: event is not self._last_event, reversed(events)))[::-1]
        self._last_event = worker_events[-1] if worker_events else self._last_event
        return worker_events

    def _left(self, run: Run, total: int | None) -> TimeLeft | None:
        summary = run.summary
        if total is not None and summary.episodes >= total:
            return None
        if summary.elapsed >= self._look_again:
            self._look_again = summary.elapsed + TIME_LEFT_INTERVAL_SECONDS
            turns = sum(count * turns for turns, count in summary.episode_turns.items())
            self._last_left = self._time_left.read(
                summary.elapsed,
                finished=summary.episode_turns,
                done_turns=turns - summary.recalled_turns,
                running=[attempt.turns_taken for attempt in run.in_flight],
                left=None if total is None else total - summary.episodes,
            )
        return self._last_left


class _Pace:
    """The recent rate of a growing count, per second."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def of(self, count: int) -> float:
        """Record the count, and return the rate."""
        now = time.monotonic()
        self._samples.append((now, count))
        # The rate is measured over some seconds, since an engine sends ids in steps. During a long step the previous
        # rate is kept.
        samples = self._samples
        while samples[0][0] < now - PACE_WINDOW_SECONDS and (
            samples[1][1] != count or samples[0][0] < now - MAX_STEP_SECONDS
        ):
            samples.popleft()
        since, before = self._samples[0]
        return max(0, count - before) / (now - since) if now > since else 0.0


def _stuck(attempt: Attempt) -> WaitingEpisode:
    waited = anyio.current_time() - attempt.since
    return WaitingEpisode(shown_line(attempt.key.id), attempt.turns_taken, shown_line(attempt.activity), waited)


def _fleet(engine: PlayingEngine) -> FleetStats:
    workers = tuple(engine.workers())
    return FleetStats(
        workers=workers,
        most=engine.most,
        few=len(workers) < engine.least,
        version=engine.weight_version,
        absent=engine.absent(),
    )


def in_words(stats: LiveStats) -> Iterator[str]:
    """Yield the statistics as short phrases."""
    yield f"{stats.done} of {stats.total} episodes" if stats.total else f"{stats.done} episodes"
    yield running_in_words(stats)
    if stats.fleet is not None:
        yield fleet_in_words(stats.fleet)
    if stats.ranks:
        yield ranks_in_words(stats.ranks)
    if stats.throttled:
        yield f"rate-limited {counted(stats.throttled, 'time')}, now {counted(stats.let_in or 0, 'request')} at once"
    yield f"{stats.failed} failed"
    if stats.cancelled:
        yield f"{stats.cancelled} cancelled"
    if stats.malformed:
        yield calls_in_words(stats.calls, stats.malformed)
    yield pace_in_words(stats)
    if stats.reward is not None:
        whose = f"reward of {shown_line(stats.agent)}" if stats.agent else "reward"
        yield f"mean {whose} {stats.reward:.3f}"
    if stats.left is not None and stats.left.seconds:
        yield left_in_words(stats.left)


def running_in_words(stats: LiveStats) -> str:
    """Return the number of episodes in flight, in the engine, and waiting for a place in it, in words."""
    parts = [f"{stats.in_engine} in the engine"] if stats.in_engine is not None and stats.running else []
    parts += [f"{stats.waiting} waiting for a place"] if stats.waiting else []
    parts += [f"waiting for {stats.waits_for}"] if stats.waits_for else []
    return f"{stats.running} running" + (f" ({', '.join(parts)})" if parts else "")


def pace_in_words(stats: LiveStats) -> str:
    """The rates at which the engine reads and samples tokens, or the time since its last tokens."""
    quiet = f"{stats.quiet:.0f} s" if stats.quiet >= MIN_QUIET_SECONDS else ""
    if not stats.began and stats.in_engine:
        return "waiting for the first tokens of the engine" + (f" for {quiet}" if quiet else "")
    if quiet and stats.in_engine:
        return f"no tokens from the engine for {quiet}"
    sampled = f"{stats.rate:,.0f} tokens/s"
    return f"{sampled} sampled" if stats.read is None else f"{stats.read:,.0f} tokens/s read, {sampled} sampled"


def left_in_words(left: TimeLeft) -> str:
    """The time left with its standard error."""
    return f"{as_time(left.seconds)} ± {as_time(left.spread)} left"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """The number of turns in each data-parallel rank, in words."""
    return f"{' + '.join(map(str, ranks))} inside {len(ranks)} ranks"


MIN_UNREADABLE_CALLS: Final = 3
"""Minimum number of unreadable tool calls for `TEMPLATE_ADVICE`, since fewer may be chance."""
MAX_UNREADABLE_SHARE: Final = 0.2
"""Share of unreadable calls above which the template is probably wrong."""

TEMPLATE_ADVICE: Final = (
    "the model seems to write calls in another format than its template: compare the outputs of "
    "`deltarunner check-template` and `deltarunner show`, and give the template that it was trained with (--template)"
)
"""The advice for many unreadable calls."""


def suspect_template(calls: int, malformed: int) -> bool:
    """Return True if so many calls are unreadable that the model was probably trained with another template."""
    return malformed >= MIN_UNREADABLE_CALLS and malformed > calls * MAX_UNREADABLE_SHARE


def calls_in_words(calls: int, malformed: int) -> str:
    """The number of unreadable tool calls among all tool calls, in words."""
    return f"{malformed} of {calls} tool calls could not be read"


def as_time(seconds: float) -> str:
    """Format a duration as minutes and seconds, such as 4:05; from one hour on with hours, such as 1:04:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
