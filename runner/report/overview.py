"""The first screen of a report: results, notable episodes, and changes over the time of the run."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple

from runner.estimates import student_t_p_value, student_t_quantile
from runner.report.charts import Chart, histogram, over_time
from runner.report.header_view import command_again, model_name, run_settings
from runner.report.paired import clustered_difference
from runner.report.prices import Cost, Price, costs_of
from runner.store.header import Header
from runner.store.json_values import decode_json
from runner.store.reader import EpisodeRow, RunFile

__all__ = ["Failure", "Overview", "Score", "interval_of", "overview_of", "staleness_of"]

MAX_SHOWN_ITEMS: Final = 8
"""Maximum number of entries of a list on the first screen; the others are counted."""
CONFIDENCE_SHARE: Final = 0.95
MIN_DRIFT_EPISODES: Final = 10
"""Minimum number of episodes in a third of a run; with fewer, no drift is reported."""
MIN_DRIFT_TASKS: Final = 5
"""Minimum number of tasks in a third of a run; with fewer, episodes are not clustered by task."""
MAX_DRIFT_P_VALUE: Final = 0.0027
"""Largest p-value of a drift that is reported: the p-value of three standard errors over many tasks."""


@dataclass(frozen=True, slots=True)
class Score:
    """A mean with its interval."""

    name: str
    mean: float | None
    half_width: float | None
    """Half of the 95% interval, clustered by task; None with fewer than two tasks."""
    count: int
    tasks: int | None


@dataclass(slots=True)
class Failure:
    """Failed episodes with the same outcome, kind of error and place."""

    outcome: str
    kind: str
    """The type of the error, or the limit that was reached."""
    place: str
    """The place in the author's code, as FILE:LINE; "" if the error has none."""
    example: str
    """The complete text of the first error."""
    episodes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything on the first screen of a report."""

    title: str
    environment: str
    model: str
    complete: bool
    command: str
    settings: list[tuple[str, str]]
    summary: Mapping[str, Any]
    """`RunFile.summary()`."""
    scores: list[Score]
    failures: list[Failure]
    limits: list[tuple[str, int]]
    """The limits that ended episodes, with the number of episodes."""
    groups: Mapping[str, Any]
    """Groups with and without spread of their rewards, and the groups with the largest spread."""
    extremes: list[tuple[str, list[EpisodeRow]]]
    """The longest and the slowest episodes, and the episodes with the most segments."""
    causes: list[tuple[str, int]]
    """The causes of segments except "start", with the number of segments."""
    tools: list[tuple[str, int, int, int]]
    """(name, calls, calls that could not be read, calls that failed)."""
    versions: list[tuple[str, int]]
    """(weight version, number of ids that it sampled)."""
    charts: list[Chart]
    drift: list[str]
    """Changes between the first and the last third of the run, in words."""
    costs: list[Cost]
    """The cost of each model; empty without a table of prices."""


def overview_of(run_file: RunFile, prices: Mapping[str, Price] | None = None) -> Overview:
    """Compute the first screen of a run file. Only a few numbers of each episode are kept in memory."""
    header = run_file.header
    summary = run_file.summary()
    rows = _Rows(header)
    for row in run_file.rows(trained=None):
        rows.add(row)
    return Overview(
        title=f"{header.environment} on {model_name(header)}",
        environment=header.environment,
        model=model_name(header),
        complete=run_file.complete,
        command=command_again(header, summary["episodes"] if run_file.complete else None),
        settings=list(run_settings(header)),
        summary=summary,
        scores=list(_scores(summary)),
        failures=sorted(rows.failures.values(), key=lambda each: -len(each.episodes)),
        limits=rows.limits.most_common(),
        groups=rows.spread(),
        extremes=list(rows.extremes()),
        causes=_causes(run_file),
        tools=_tools(run_file),
        versions=_versions(run_file),
        charts=[*rows.charts(), *_staleness_charts(run_file)],
        drift=list(rows.drift()),
        costs=[] if prices is None else costs_of(run_file, prices),
    )


def interval_of(mean: Mapping[str, Any]) -> float | None:
    """Half of the 95% interval of a mean of a summary; None without a standard error or with fewer than two tasks."""
    error, tasks = mean["standard_error"], mean.get("tasks")
    if error is None or not tasks or tasks < 2:
        return None
    return float(error * student_t_quantile(CONFIDENCE_SHARE, tasks - 1))


def _scores(summary: Mapping[str, Any]) -> Iterator[Score]:
    agents = summary["agents"] if len(summary["agents"]) > 1 else {}
    named = {
        "reward": summary["reward"],
        **{f"reward of {agent}": mean for agent, mean in agents.items()},
        **{f"reward {name}": mean for name, mean in summary["rewards"].items()},
        **{f"metric {name}": mean for name, mean in summary["metrics"].items()},
    }
    for name, mean in named.items():
        yield Score(name, mean["mean"], interval_of(mean), mean["count"], mean.get("tasks"))


_PLACE: Final = re.compile(r"\((?:raised )?in ([^()]*:\d+)")


def _failure_key(row: EpisodeRow) -> tuple[str, str, str]:
    kind = re.split(r"[:(]", row.error, maxsplit=1)[0].strip()[:120]
    places = _PLACE.findall(row.error)
    return row.outcome.value, row.limit or kind or "no error text", places[-1] if places else ""


_EXTREMES: Final = {"longest": "sampled", "slowest": "seconds", "most segments": "segments"}
"""The name of each list of extreme episodes, with the attribute of a row by which the list is sorted."""


class _Point(NamedTuple):
    task_id: str
    begun: float
    """The approximate beginning, by which episodes are ordered. If they were ordered by their end, short episodes would
    come first.
    """
    committed: float
    reward: float | None
    sampled: int
    seconds: float


class _Rows:
    """Figures that are computed from the rows of episodes."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self.failures: dict[tuple[str, str, str], Failure] = {}
        self.limits: Counter[str] = Counter()
        self._rewards: dict[tuple[str, int, str], list[float]] = defaultdict(list)
        self._points: list[_Point] = []
        self._largest: dict[str, list[EpisodeRow]] = defaultdict(list)
        self._ended: set[tuple[str, int]] = set()

    def add(self, row: EpisodeRow) -> None:
        first = (row.id, row.attempt) not in self._ended
        if first:
            self._ended.add((row.id, row.attempt))
            if row.outcome.failed:
                key = _failure_key(row)
                self.failures.setdefault(key, Failure(*key, example=row.error)).episodes.append(row.id)
            elif row.limit:
                self.limits[row.limit] += 1
        if row.trained or first:
            self._points.append(
                _Point(row.task_id, row.committed - row.seconds, row.committed, row.reward, row.sampled, row.seconds)
            )
        if row.reward is not None and row.trained:
            self._rewards[row.task_id, row.visit, row.agent].append(row.reward)
        for name, column in _EXTREMES.items():
            kept = self._largest[name]
            if column != "segments" or row.segments > 1:
                kept.append(row)
            if len(kept) > 8 * MAX_SHOWN_ITEMS:
                self._largest[name] = self._top(name)

    def _top(self, name: str) -> list[EpisodeRow]:
        """The rows with the largest values in a list of `_EXTREMES`, one row of each episode."""
        by = attrgetter(_EXTREMES[name])
        largest = {
            row.id: row for row in sorted(self._largest[name], key=by)
        }  # the last row of an id is its largest one
        return sorted(largest.values(), key=by, reverse=True)[:MAX_SHOWN_ITEMS]

    def extremes(self) -> Iterator[tuple[str, list[EpisodeRow]]]:
        for name in _EXTREMES:
            if self._largest[name]:
                yield name, self._top(name)

    def spread(self) -> dict[str, Any]:
        """Count the groups with and without spread of rewards, and list the groups with the largest spread.

        A trainer cannot learn from groups without spread.
        """
        several = {key: rewards for key, rewards in self._rewards.items() if len(rewards) > 1}
        ranges = {key: max(rewards) - min(rewards) for key, rewards in several.items()}
        largest = sorted(ranges, key=lambda key: -ranges[key])[:MAX_SHOWN_ITEMS]
        return {
            "several": len(several),
            "spread": sum(each > 0 for each in ranges.values()),
            "flat": sum(each == 0 for each in ranges.values()),
            "all_zero": sum(max(rewards) == min(rewards) == 0 for rewards in several.values()),
            "largest": [(key[0], several[key]) for key in largest if ranges[key] > 0],
        }

    def charts(self) -> Iterator[Chart]:
        rewards = [point.reward for point in self._points if point.reward is not None]
        if rewards:
            yield histogram("Rewards", rewards, unit="reward")
        if self._points:
            yield histogram("Lengths", [point.sampled for point in self._points], unit="sampled ids")
            yield histogram("Durations", [point.seconds for point in self._points], unit="seconds")
        if len(self._points) >= 10:
            ordered = sorted(self._points, key=attrgetter("begun"))
            yield over_time("Reward over the run", [point.reward for point in ordered], unit="reward")
            yield over_time("Length over the run", [point.sampled for point in ordered], unit="sampled ids")
            rates = _rates(sorted((point.committed, point.sampled) for point in ordered))
            if rates:
                yield over_time("Sampled ids a second", rates, unit="ids/s", bins=len(rates))

    def drift(self) -> Iterator[str]:
        ordered = sorted(self._points, key=attrgetter("begun"))
        third = len(ordered) // 3
        if third < MIN_DRIFT_EPISODES:
            return
        for name, column in (("reward", "reward"), ("sampled ids", "sampled")):
            first, last = (
                [(point.task_id, float(value)) for point in part if (value := getattr(point, column)) is not None]
                for part in (ordered[:third], ordered[-third:])
            )
            if first and last:
                yield from _change(name, first, last)


def _change(name: str, first: Sequence[tuple[str, float]], last: Sequence[tuple[str, float]]) -> Iterator[str]:
    """Yield a sentence if the means of the first and the last third of the run differ by more than chance.

    Episodes are clustered by task. This needs enough tasks. With few tasks, episodes are compared individually if each
    task is in both thirds; otherwise the thirds may differ only by their tasks.
    """
    tasks = [{task for task, _ in part} for part in (first, last)]
    if min(map(len, tasks)) < MIN_DRIFT_TASKS:
        if tasks[0] != tasks[1]:
            return
        first, last = (
            [(f"{side} {number}", value) for number, (_, value) in enumerate(part)]
            for side, part in enumerate((first, last))
        )
    difference, error, clusters = clustered_difference(first, last)
    if difference and (not error or student_t_p_value(difference / error, clusters - 1) < MAX_DRIFT_P_VALUE):
        means = [math.fsum(value / len(part) for _, value in part) for part in (first, last)]
        yield f"{name}: {means[0]:.3g} in the first third of the episodes, {means[1]:.3g} in the last"


def _rates(points: Sequence[tuple[float, int]], bins: int = 40) -> list[float]:
    """Sampled ids per second in equal parts of the time of the run; empty for less than a second."""
    begin, end = points[0][0], points[-1][0]
    if end - begin < 1:
        return []
    width = (end - begin) / bins
    sums = [0.0] * bins
    for time, sampled in points:
        sums[min(bins - 1, int((time - begin) / width))] += sampled
    return [each / width for each in sums]


def staleness_of(run_file: RunFile) -> list[int]:
    """The staleness of each trajectory in the order of commits; empty without weight updates.

    The staleness is the number of weight updates between the oldest weights that sampled an id of the trajectory, and
    the commit of the trajectory. A trajectory without sampled ids is left out.
    """
    updates = [row for row in run_file.weights() if row.engine == 0]
    if not updates:
        return []
    numbers = {row.version: number for number, row in enumerate(updates, 1)}  # the starting weights are 0
    times = [row.time for row in updates]
    statement = f"SELECT episode, committed, versions FROM segments {_CURRENT.format('segments')} ORDER BY episode"
    values = []
    for _, segments in groupby(run_file.select(statement), key=lambda row: row["episode"]):
        rows = list(segments)
        sampled_by = [numbers.get(version, 0) for row in rows for version, _, _ in decode_json(row["versions"])]
        if sampled_by:
            values.append(max(0, bisect_right(times, rows[0]["committed"]) - min(sampled_by)))
    return values


def _staleness_charts(run_file: RunFile) -> Iterator[Chart]:
    values = staleness_of(run_file)
    if values:
        yield histogram("Staleness", values, unit="weight updates")
    if len(values) >= 10:
        yield over_time("Staleness over the run", values, unit="weight updates")


_CURRENT: Final = "JOIN episodes ON episodes.key = {0}.episode WHERE NOT episodes.superseded"


def _causes(run_file: RunFile) -> list[tuple[str, int]]:
    statement = f"SELECT cause, count(*) FROM segments {_CURRENT.format('segments')} GROUP BY cause ORDER BY 2 DESC"
    return [(cause, count) for cause, count in run_file.select(statement) if cause != "start"]


def _tools(run_file: RunFile) -> list[tuple[str, int, int, int]]:
    calls: Counter[str] = Counter()
    unreadable: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    statement = (
        f"SELECT tool_calls, count(*) FROM turns {_CURRENT.format('turns')} AND tool_calls != '[]' GROUP BY tool_calls"
    )
    for text, count in run_file.select(statement):
        for call in decode_json(text):
            name = call["name"] or "(no name)"
            calls[name] += count
            unreadable[name] += count if call["error"] is not None else 0
            failed[name] += count if call.get("failed") else 0
    return [(name, count, unreadable[name], failed[name]) for name, count in calls.most_common()]


def _versions(run_file: RunFile) -> list[tuple[str, int]]:
    ids: Counter[str] = Counter()
    statement = f"SELECT versions, count(*) FROM segments {_CURRENT.format('segments')} GROUP BY versions"
    for text, count in run_file.select(statement):
        for version, start, end in decode_json(text):
            ids[version] += count * (end - start)
    return list(ids.items())
