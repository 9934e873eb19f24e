"""Compares run files task by task: differences with intervals, paired tests, and the tasks that flipped."""

from __future__ import annotations

import enum
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from runner.errors import BadOption
from runner.estimates import MIN_SOLVED_REWARD, student_t_p_value, student_t_quantile
from runner.store.columns import encode_text
from runner.store.json_values import decode_json, encode_json
from runner.store.reader import EpisodeRow, RunFile

__all__ = ["Decision", "FlippedTask", "MetricDifference", "RunComparison", "compare", "paired_difference"]

CONFIDENCE_SHARE: Final = 0.95
NORMAL_POWER_FACTOR: Final = (1.959964 + 0.841621) ** 2
"""(z of the confidence + z of the power) squared."""
MAX_MORE_TASKS: Final = 1_000_000
MAX_EXACT_TASKS: Final = 12
"""Most tasks for which the exact test is computed; with more of them its smallest p-value is below 0.0003."""
MIN_DECISIVE_TASKS: Final = 6
"""The smallest number of tasks that can be decisive in the exact test: 2 / 2**6 < 0.05."""
MAX_VALUE_CHARS: Final = 80


class Decision(enum.StrEnum):
    """The result of a comparison of one metric."""

    HIGHER = "higher"
    """The second file is higher."""
    LOWER = "lower"
    """The second file is lower."""
    UNDECIDED = "not decisive"
    """The data does not decide."""


@dataclass(frozen=True, slots=True)
class MetricDifference:
    """The difference of one metric between two files, over the tasks that both have."""

    metric: str
    """"reward", "solved", "reward NAME", "metric NAME", "turns", "sampled" or "seconds"."""
    slice: str
    """The value of the task's field, or "" for all tasks."""
    tasks: int
    """Number of tasks with values in both files."""
    episodes: tuple[int, int]
    """Number of episodes of these tasks in each file."""
    first: float
    """The mean over the tasks in the first file; each task counts the same."""
    second: float
    """The same in the second file."""
    difference: float
    """`second - first`."""
    low: float | None
    """The lower end of the 95% interval of the difference; None below two tasks."""
    high: float | None
    """Its upper end."""
    p_value: float | None
    """The two-sided p-value of the paired t test, and with up to 12 tasks that of the exact sign-flip test if it is
    larger; in slices, adjusted by Holm's method. None below two tasks."""
    more_tasks: int | None
    """The number of further tasks that would show a difference of this size, with a probability of 80%; None if the
    result is decisive, or no number is known."""

    @property
    def decision(self) -> Decision:
        """The result: decisive below a p-value of 0.05."""
        if self.p_value is None or self.p_value >= 1 - CONFIDENCE_SHARE:
            return Decision.UNDECIDED
        return Decision.HIGHER if self.difference > 0 else Decision.LOWER

    @property
    def words(self) -> str:
        """The result in one sentence."""
        if self.decision is not Decision.UNDECIDED:
            return f"decisive: B is {self.decision.value} by {abs(self.difference):.3g}"
        if self.p_value is None:
            return "not decisive: an interval needs two tasks"
        if self.difference == 0:
            return "not decisive: no difference was seen"
        if self.more_tasks is None:
            return "not decisive: the difference is too small for any practical number of tasks"
        return f"not decisive: about {self.more_tasks:,} more tasks would decide, if the difference stays the same"


@dataclass(frozen=True, slots=True)
class FlippedTask:
    """A task that is solved more often than not in one file and not in the other."""

    task_id: str
    first: float
    """The share of solved episodes in the first file."""
    second: float
    episodes: tuple[str, str]
    """The ids of an episode in each file."""

    @property
    def lost(self) -> bool:
        """True if the second file lost the task."""
        return self.second < self.first


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Two run files, compared task by task."""

    first: str
    """The path of the first file, A."""
    second: str
    """The path of the second file, B."""
    differences: tuple[MetricDifference, ...]
    """All tasks, metric by metric; the reward is first."""
    slices: tuple[MetricDifference, ...]
    """The reward by the value of a task's field."""
    flipped: tuple[FlippedTask, ...]
    """The flipped tasks, lost ones first."""
    configuration: tuple[tuple[str, str, str], ...]
    """(field, value in A, value in B) of everything in the headers that differs."""
    notes: tuple[str, ...]
    """Limits of the comparison, in words."""

    @property
    def better(self) -> str:
        """The better file, "A" or "B"; "" if the rewards do not decide."""
        decision = next((each.decision for each in self.differences if each.metric in ("reward", "solved")), None)
        return {Decision.HIGHER: "B", Decision.LOWER: "A"}.get(decision, "") if decision is not None else ""

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        main = next((each for each in self.differences if each.metric in ("reward", "solved")), None)
        if main is None:
            return "not decisive: the files share no score"
        return f"{self.better} is better: {main.words}" if self.better else main.words

    def as_dict(self) -> dict[str, Any]:
        """The comparison as JSON values."""

        def row(each: MetricDifference) -> dict[str, Any]:
            names = list(MetricDifference.__dataclass_fields__)
            return {**{name: getattr(each, name) for name in names}, "decision": each.decision.value}

        return {
            "first": self.first,
            "second": self.second,
            "verdict": self.verdict,
            "better": self.better or None,
            "differences": [row(each) for each in self.differences],
            "slices": [row(each) for each in self.slices],
            "flipped": [{"task_id": each.task_id, "first": each.first, "second": each.second} for each in self.flipped],
            "configuration": [list(each) for each in self.configuration],
            "notes": list(self.notes),
        }


def paired_difference(
    metric: str, pairs: Sequence[tuple[float, float]], *, slice: str = "", episodes: tuple[int, int] = (0, 0)
) -> MetricDifference:
    """The difference of means over tasks, with the interval and the p-value of the paired t test.

    Each pair has the means of one task in both files. The episodes of a task are one observation, so the interval is
    clustered by task, however many episodes each has.

    Args:
        metric: the name of the metric.
        pairs: (mean in the first file, mean in the second file) of each task; at least one.
        slice: the name of the slice, or "".
        episodes: the number of episodes in each file.
    """
    count = len(pairs)
    changes = [second - first for first, second in pairs]
    mean = math.fsum(changes) / count
    first, second = (math.fsum(pair[side] for pair in pairs) / count for side in (0, 1))
    low = high = p_value = more = None
    if count > 1:
        error = _standard_error(changes, mean)
        half = student_t_quantile(CONFIDENCE_SHARE, count - 1) * error
        low, high = mean - half, mean + half
        p_value = student_t_p_value(mean / error, count - 1) if error else (1.0 if mean == 0 else 0.0)
        p_value = max(p_value, _exact_p_value(changes))
        if p_value >= 1 - CONFIDENCE_SHARE:
            more = _more_tasks(count, mean, error)
    return MetricDifference(metric, slice, count, episodes, first, second, mean, low, high, p_value, more)


def _standard_error(changes: Sequence[float], mean: float) -> float:
    count = len(changes)
    # hypot scales, so that values up to the largest float do not overflow.
    return math.hypot(*(change - mean for change in changes)) / math.sqrt(count - 1) / math.sqrt(count)


def _exact_p_value(changes: Sequence[float]) -> float:
    """The share of all choices of signs with a mean as far from 0 as the given one; 0 for many changes.

    The t test takes equal changes of two or three tasks for certain; this one does not.
    """
    if len(changes) > MAX_EXACT_TASKS:
        return 0.0
    largest = max(map(abs, changes)) or 1.0
    scaled = [change / largest for change in changes]
    bound = abs(math.fsum(scaled)) - 1e-9
    signs = itertools.product((1, -1), repeat=len(scaled) - 1)
    sums = [scaled[0] + math.fsum(map(operator.mul, each, scaled[1:])) for each in signs]
    return sum(abs(each) >= bound for each in sums) / len(sums)


def _more_tasks(count: int, mean: float, error: float) -> int | None:
    """The number of further tasks that would decide with a probability of 80%; None if no number is known."""
    if not mean or not math.isfinite(error):
        return None
    needed = max(MIN_DECISIVE_TASKS, NORMAL_POWER_FACTOR * count * (error / mean) ** 2)
    return max(1, math.ceil(needed) - count) if needed < MAX_MORE_TASKS else None


def compare(first: str | Path | RunFile, second: str | Path | RunFile, *, by: str | None = None) -> RunComparison:
    """Compare two run files over the tasks that both have.

    Args:
        first: the first file, A: the baseline.
        second: the second file, B.
        by: a field of the tasks, such as `level`; the reward is also compared for each of its values.

    Raises:
        BadOption: the files have no task in common, or no task has the field.
        RunFileError: a file cannot be read.
    """
    with ExitStack() as opened:
        files = [each if isinstance(each, RunFile) else opened.enter_context(RunFile(each)) for each in (first, second)]
        return _compare(files[0], files[1], by)


class _Scores:
    """The values of one file by metric and task."""

    def __init__(self, run_file: RunFile) -> None:
        self.values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.tasks: dict[str, str] = {}
        """The id of the first episode of each task."""
        self.failed = self.cut_short = self.repeated = 0
        seen: set[tuple[str, int]] = set()
        self.names: set[str] = set()
        rows = list(run_file.rows(trained=None))
        trained = {(row.id, row.attempt) for row in rows if row.trained}
        for row in rows:
            key = (row.id, row.attempt)
            if key in seen or (key in trained and not row.trained):
                continue  # the scores of an episode are those of its first trained agent
            seen.add(key)
            self._add(row)
        counts = [len(self.values["episode"][task]) for task in self.values["episode"]]
        self.most = max(counts, default=0)

    def _add(self, row: EpisodeRow) -> None:
        if row.outcome.cut_short:
            self.cut_short += 1
            return
        self.tasks.setdefault(row.task_id, row.id)
        self.values["episode"][row.task_id].append(1.0)
        if row.outcome.failed:
            self.failed += 1
            return
        self.names |= row.rewards.keys()
        figures: dict[str, float | None] = {
            "reward": row.reward,
            "solved": None if row.reward is None else float(row.reward >= MIN_SOLVED_REWARD),
            **{f"reward {name}": value for name, value in row.rewards.items()},
            **{f"metric {name}": value for name, value in row.metrics.items()},
            "turns": row.turns,
            "sampled": row.sampled,
            "seconds": row.seconds,
        }
        for name, value in figures.items():
            if value is not None and math.isfinite(value):
                self.values[name][row.task_id].append(float(value))


def _compare(first: RunFile, second: RunFile, by: str | None) -> RunComparison:
    scores = (_Scores(first), _Scores(second))
    common = [task for task in scores[0].tasks if task in scores[1].tasks]
    if not common:
        raise BadOption(_nothing_in_common(first, second, scores))
    notes = list(_notes(first, second, scores, common))
    alike = scores[0].names == scores[1].names and first.header.weights == second.header.weights
    # Rewards of different scorers have no common scale.
    left_out = () if alike else ("reward", "solved")
    names = [name for name in scores[0].values if name in scores[1].values and name not in ("episode", *left_out)]
    names.sort(key=_rank)
    differences = [made for name in names if (made := _difference(name, scores, common)) is not None]
    return RunComparison(
        first=str(first.path),
        second=str(second.path),
        differences=tuple(differences),
        slices=() if by is None else tuple(_slices(by, names, scores, common, first)),
        flipped=() if left_out else tuple(_flipped(scores, common)),
        configuration=tuple(_configuration(first, second)),
        notes=tuple(notes),
    )


def _rank(name: str) -> int:
    kinds = ("reward", "solved", "reward ", "metric ")
    return next((rank for rank, kind in enumerate(kinds) if name == kind or (kind[-1] == " " and kind in name)), 9)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _difference(
    name: str, scores: tuple[_Scores, _Scores], tasks: Sequence[str], *, slice: str = ""
) -> MetricDifference | None:
    both = [[each.values[name].get(task, []) for each in scores] for task in tasks]
    both = [pair for pair in both if all(pair)]
    if not both:
        return None
    episodes = (sum(len(pair[0]) for pair in both), sum(len(pair[1]) for pair in both))
    return paired_difference(name, [(_mean(pair[0]), _mean(pair[1])) for pair in both], slice=slice, episodes=episodes)


def _slices(
    by: str, names: Sequence[str], scores: tuple[_Scores, _Scores], tasks: Sequence[str], run_file: RunFile
) -> Iterator[MetricDifference]:
    groups: dict[str, list[str]] = defaultdict(list)
    for task in tasks:
        value = task_field(run_file, task, by)
        if value is not None:
            groups[value].append(task)
    if not groups:
        raise BadOption(f"--by {by}: no task has this field; fields are {', '.join(_fields(run_file, tasks[0]))}.")
    made = [
        each
        for value, some in sorted(groups.items())
        for name in names[:1]
        if (each := _difference(name, scores, some, slice=value)) is not None
    ]
    yield from _holm(made)


def _holm(differences: Sequence[MetricDifference]) -> Iterator[MetricDifference]:
    """The differences with p-values adjusted for their number, by Holm's method."""
    known = sorted((each.p_value, place) for place, each in enumerate(differences) if each.p_value is not None)
    adjusted: dict[int, float] = {}
    largest = 0.0
    for rank, (p_value, place) in enumerate(known):
        largest = max(largest, min(1.0, p_value * (len(known) - rank)))
        adjusted[place] = largest
    for place, each in enumerate(differences):
        yield _adjusted(each, adjusted[place]) if place in adjusted else each


def _adjusted(each: MetricDifference, p_value: float) -> MetricDifference:
    """The difference with another p-value, and the number of tasks that belongs to it."""
    more = each.more_tasks
    if more is None and p_value >= 1 - CONFIDENCE_SHARE and each.high is not None:
        error = (each.high - each.difference) / student_t_quantile(CONFIDENCE_SHARE, each.tasks - 1)
        more = _more_tasks(each.tasks, each.difference, error)
    return replace(each, p_value=p_value, more_tasks=more)


def task_field(run_file: RunFile, task_id: str, name: str) -> str | None:
    """The value of a task's field, or of an entry of its `info`, as text; None if it has none."""
    fields = _task(run_file, task_id)
    info = fields.get("info") or {}
    value = fields[name] if name in fields and name != "info" else info.get(name)
    if value is None:
        return None
    return value if isinstance(value, str) else encode_json(value)


def _task(run_file: RunFile, task_id: str) -> dict[str, Any]:
    rows = run_file.select("SELECT task FROM tasks WHERE id = ? ORDER BY visit LIMIT 1", encode_text(task_id))
    fields: dict[str, Any] = decode_json(rows[0]["task"]) if rows else {}
    return fields


def _fields(run_file: RunFile, task_id: str) -> list[str]:
    fields = _task(run_file, task_id)
    return sorted({*fields, *(fields.get("info") or {})} - {"info", "prompt"})


def _flipped(scores: tuple[_Scores, _Scores], tasks: Sequence[str]) -> list[FlippedTask]:
    flipped = []
    for task in tasks:
        values = [each.values["solved"].get(task, []) for each in scores]
        if not all(values):
            continue
        first, second = _mean(values[0]), _mean(values[1])
        if (first > 0.5) != (second > 0.5):
            flipped.append(FlippedTask(task, first, second, (scores[0].tasks[task], scores[1].tasks[task])))
    return sorted(flipped, key=lambda each: each.second - each.first)


def _nothing_in_common(first: RunFile, second: RunFile, scores: tuple[_Scores, _Scores]) -> str:
    def some(file: RunFile, each: _Scores) -> str:
        return f"{file.path} has {', '.join(map(repr, list(each.tasks)[:3])) or 'no finished episodes'}"

    return (
        f"the files have no task in common: {some(first, scores[0])}, and {some(second, scores[1])}. "
        f"Play the same tasks in both."
    )


def _notes(first: RunFile, second: RunFile, scores: tuple[_Scores, _Scores], common: Sequence[str]) -> Iterator[str]:
    for name, file, each in zip("AB", (first, second), scores, strict=True):
        only = len(each.tasks) - len(common)
        if only:
            yield f"{only} tasks are only in {name} and are left out."
        if each.failed:
            yield f"{each.failed} failed episodes of {name} have no score and are left out."
        if each.cut_short or not file.complete:
            yield f"{name} is not complete: what it has so far is compared."
    if scores[0].names != scores[1].names:
        parts = [", ".join(sorted(each.names)) or "none" for each in scores]
        yield f"The scorers differ (A: {parts[0]}; B: {parts[1]}): only the rewards that both have are compared."
    elif first.header.weights != second.header.weights:
        yield "The weights of the rewards differ: each reward is compared by itself, and not their sum."
    if first.header.environment != second.header.environment:
        yield "The environments differ."
    if max(each.most for each in scores) == 1:
        yield (
            "Each task was played once, with one seed: the interval holds for other tasks of this kind, and a task "
            "that flipped may be noise of sampling. Play each task several times (--group-size 4)."
        )


def _configuration(first: RunFile, second: RunFile) -> Iterator[tuple[str, str, str]]:
    skipped = ("created", "clock", "format", "template.text", "template.turns", "engine.template", "concurrency")
    for change in first.header.changes(second.header):
        if not change.path.startswith(skipped):
            yield change.path, _shown(change.old), _shown(change.new)
    versions = [_weight_versions(file) for file in (first, second)]
    if versions[0] != versions[1]:
        yield "weight versions", *map(_names, versions)  # type: ignore[misc]  # a starred tuple
    agents = [_agents(file) for file in (first, second)]
    if agents[0] != agents[1]:
        yield "agents", *map(_names, agents)  # type: ignore[misc]  # a starred tuple


def _weight_versions(run_file: RunFile) -> list[str]:
    rows = run_file.select("SELECT DISTINCT versions FROM segments")
    return sorted({version for row in rows for version, _, _ in decode_json(row["versions"])})


def _agents(run_file: RunFile) -> list[str]:
    return sorted({row.agent for row in run_file.rows(trained=None)})


def _names(names: Sequence[str]) -> str:
    return _shown(", ".join(names) or "none")


def _shown(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return "(not set)"
    text = value if isinstance(value, str) else encode_json(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."
