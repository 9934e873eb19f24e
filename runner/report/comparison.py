"""Comparison of run files task by task: differences with intervals, paired tests, and the tasks that flipped."""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from runner.errors import BadOption
from runner.estimates import MIN_SOLVED_REWARD
from runner.report.paired import Decision, MetricDifference, holm, paired_difference
from runner.store.columns import encode_text
from runner.store.json_values import decode_json, encode_json
from runner.store.reader import EpisodeRow, RunFile

__all__ = ["FlippedTask", "RunComparison", "compare", "task_field", "task_fields"]

MAX_VALUE_CHARS: Final = 80
MAX_NAMED_TASKS: Final = 5
"""Maximum number of tasks that a note names; the others are counted."""
FAILED: Final = "failed"
"""The name of a metric: the share of failed episodes."""
STRICT: Final = "solved (failed episodes count as not solved)"
"""The name of a metric: the share of solved episodes among the scored and the failed episodes."""


@dataclass(frozen=True, slots=True)
class FlippedTask:
    """A task that is solved in more than half of the scored episodes of one file, but not of the other file."""

    task_id: str
    first: float | None
    """The share of solved episodes among the scored ones in the first file; None if all its episodes failed."""
    second: float | None
    """The same share in the second file."""
    episodes: tuple[str, str]
    """The id of an example episode in each file. The episode is solved only if the task is solved in that file."""

    @property
    def lost(self) -> bool:
        """True if the share of solved episodes is lower in the second file; None counts as 0."""
        return (self.second or 0) < (self.first or 0)


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Two run files, compared task by task."""

    first: str
    """The path of the first file, A."""
    second: str
    """The path of the second file, B."""
    differences: tuple[MetricDifference, ...]
    """The differences over all tasks, metric by metric; the reward is first."""
    slices: tuple[MetricDifference, ...]
    """The differences for each value of a task's field, metric by metric."""
    flipped: tuple[FlippedTask, ...]
    """The flipped tasks, lost ones first."""
    configuration: tuple[tuple[str, str, str], ...]
    """(field, value in A, value in B) of each difference in settings, weight versions and agents."""
    notes: tuple[str, ...]
    """Limits of the comparison, in words."""

    @property
    def better(self) -> str:
        """The better file, "A" or "B".

        "" if the rewards do not decide, or if they decide differently once failed episodes count as not solved.
        """
        main, strict = self._main, self._named(STRICT)
        if main is None or (strict is not None and strict.decision is not main.decision):
            return ""
        return {Decision.HIGHER: "B", Decision.LOWER: "A"}.get(main.decision, "")

    @property
    def verdict(self) -> str:
        """The result in one or two sentences."""
        main, strict = self._main, self._named(STRICT)
        if main is None and any(each.metric.startswith("reward ") for each in self.differences):
            return "not decisive: the scorers or their weights differ; see each reward by itself"
        if main is None:
            return "not decisive: no task has a score in both files"
        if strict is not None and strict.decision is not main.decision:
            return (
                f"not decisive, as it depends on the failed episodes. Without them: {main.words}. "
                f"Counted as not solved: {strict.words}"
            )
        if not self.better:
            return main.words
        interval = "" if main.low is None or main.high is None else f" (95% interval {main.low:.3g} to {main.high:.3g})"
        return (
            f"{self.better} is better: the {main.metric} of B is {main.decision.value} by {abs(main.difference):.3g}"
            f"{interval}, which is decisive"
        )

    @property
    def _main(self) -> MetricDifference | None:
        return self._named("reward") or self._named("solved")

    def _named(self, metric: str) -> MetricDifference | None:
        return next((each for each in self.differences if each.metric == metric), None)

    def as_dict(self) -> dict[str, Any]:

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
            "flipped": [{**asdict(each), "lost": each.lost} for each in self.flipped],
            "configuration": [list(each) for each in self.configuration],
            "notes": list(self.notes),
        }


def compare(first: str | Path | RunFile, second: str | Path | RunFile, *, by: str | None = None) -> RunComparison:
    """Compare two run files over the tasks that both have.

    Args:
        first: the first file, A: the baseline.
        second: the second file, B.
        by: a field of the tasks, such as `level`; all metrics are also compared for each of its values.

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
        self.episodes: dict[str, list[tuple[str, bool | None]]] = defaultdict(list)
        """(id, True if solved) of the episodes of each task; (id, None) for an episode that failed or has no reward."""
        self.names: dict[str, set[str]] = defaultdict(set)
        """The names of the rewards by task."""
        self.cut_short = False
        seen: set[tuple[str, int]] = set()
        rows = list(run_file.rows(trained=None))
        trained = {(row.id, row.attempt) for row in rows if row.trained}
        for row in rows:
            key = (row.id, row.attempt)
            if key in seen or (key in trained and not row.trained):
                continue  # the scores of an episode are the scores of its first trained agent
            seen.add(key)
            self._add(row)

    def _add(self, row: EpisodeRow) -> None:
        if row.outcome.cut_short:
            self.cut_short = True
            return
        failed = row.outcome.failed
        scored = row.reward is not None and not failed
        solved = scored and row.reward is not None and row.reward >= MIN_SOLVED_REWARD
        self.episodes[row.task_id].append((row.id, solved if scored else None))
        figures: dict[str, float | None] = {FAILED: failed, STRICT: solved if scored or failed else None}
        if not failed:
            self.names[row.task_id] |= row.rewards.keys()
            figures |= {
                "reward": row.reward,
                "solved": solved if scored else None,
                **{f"reward {name}": value for name, value in row.rewards.items()},
                **{f"metric {name}": value for name, value in row.metrics.items()},
                "turns": row.turns,
                "sampled": row.sampled,
                "seconds": row.seconds,
            }
        for name, value in figures.items():
            if value is not None and math.isfinite(value):
                self.values[name][row.task_id].append(float(value))

    def failed(self, tasks: Sequence[str]) -> int:
        return sum(int(sum(self.values[FAILED][task])) for task in tasks)

    def only_failed(self, tasks: Sequence[str]) -> list[str]:
        return [task for task in tasks if min(self.values[FAILED][task]) == 1]

    def scorers(self, tasks: Sequence[str]) -> set[str]:
        """The names of the rewards of these tasks."""
        return set().union(*(self.names.get(task, set()) for task in tasks))


def _compare(first: RunFile, second: RunFile, by: str | None) -> RunComparison:
    scores = (_Scores(first), _Scores(second))
    common = [task for task in scores[0].episodes if task in scores[1].episodes]
    if not common:
        raise BadOption(_nothing_in_common(first, second, scores))
    scored = [task for task in common if all(each.names.get(task) for each in scores)]
    alike = scores[0].scorers(scored) == scores[1].scorers(scored) and first.header.weights == second.header.weights
    # Rewards of different scorers do not have a common scale.
    left_out = set() if alike else {"reward", "solved", STRICT}
    if not any(each.failed(common) for each in scores):
        left_out |= {FAILED, STRICT}
    names = [name for name in scores[0].values if name in scores[1].values and name not in left_out]
    names.sort(key=_rank)
    differences = [made for name in names if (made := _difference(name, scores, common)) is not None]
    return RunComparison(
        first=str(first.path),
        second=str(second.path),
        differences=tuple(differences),
        slices=() if by is None else tuple(_slices(by, names, scores, common, first)),
        flipped=tuple(_flipped(scores, common)) if alike else (),
        configuration=tuple(_configuration(first, second)),
        notes=tuple(_notes(first, second, scores, common, scored)),
    )


def _rank(name: str) -> int:
    kinds = ("reward", "solved", STRICT, FAILED, "reward ", "metric ")
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
        raise BadOption(f"--by {by}: no task has this field; give one of {', '.join(task_fields(run_file, tasks[0]))}.")
    for name in names:
        made = (_difference(name, scores, some, slice=value) for value, some in sorted(groups.items()))
        yield from holm([each for each in made if each is not None])


def task_field(run_file: RunFile, task_id: str, name: str) -> str | None:
    """The value of a task's field, or of an entry of its `info`, as text; None if the task has no such value."""
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


def task_fields(run_file: RunFile, task_id: str) -> list[str]:
    """The sorted names for `--by`: a task's fields except `prompt` and `info`, and the entries of its `info`."""
    fields = _task(run_file, task_id)
    return sorted({*fields, *(fields.get("info") or {})} - {"info", "prompt"})


def _flipped(scores: tuple[_Scores, _Scores], tasks: Sequence[str]) -> list[FlippedTask]:
    flipped = []
    for task in tasks:
        first, second = (_solved_share(each, task) for each in scores)
        # If a task has episodes that did not fail, but no reward, it is unknown whether the task was solved.
        unknown = any(
            share is None and not each.only_failed([task]) for share, each in zip((first, second), scores, strict=True)
        )
        if not unknown and _is_solved(first) != _is_solved(second):
            examples = _example(scores[0], task, first), _example(scores[1], task, second)
            flipped.append(FlippedTask(task, first, second, examples))
    return sorted(flipped, key=lambda each: (each.second or 0) - (each.first or 0))


def _solved_share(scores: _Scores, task: str) -> float | None:
    values = scores.values["solved"].get(task)
    return _mean(values) if values else None


def _is_solved(share: float | None) -> bool:
    return share is not None and share > 0.5


def _example(scores: _Scores, task: str, share: float | None) -> str:
    """The id of an episode that shows the result of a task.

    The episode is solved if `share`, the share of solved episodes, is above one half; otherwise it is not. If `share`
    is None, the episode failed or has no reward.
    """
    wanted = None if share is None else _is_solved(share)
    return next(id for id, solved in scores.episodes[task] if solved is wanted)


def _nothing_in_common(first: RunFile, second: RunFile, scores: tuple[_Scores, _Scores]) -> str:
    def some(file: RunFile, each: _Scores) -> str:
        return f"{file.path} has {', '.join(map(repr, list(each.episodes)[:3])) or 'no finished episodes'}"

    return (
        f"the files have no task in common: {some(first, scores[0])}, and {some(second, scores[1])}. "
        f"Play the same tasks in both."
    )


def _notes(
    first: RunFile, second: RunFile, scores: tuple[_Scores, _Scores], common: Sequence[str], scored: Sequence[str]
) -> Iterator[str]:
    for name, file, each in zip("AB", (first, second), scores, strict=True):
        only = len(each.episodes) - len(common)
        if only:
            yield f"{_counted(only, 'task is', 'tasks are')} only in {name} and left out."
        yield from _failures(name, each, common)
        if each.cut_short or not file.complete:
            yield f"{name} is not complete: only its episodes so far are compared."
    parts = [", ".join(sorted(each.scorers(scored))) for each in scores]
    if parts[0] != parts[1]:
        yield f"The scorers differ (A: {parts[0]}; B: {parts[1]}): only the rewards that both have are compared."
    elif first.header.weights != second.header.weights:
        yield "The weights of the rewards differ: each reward is compared by itself, and not their sum."
    if first.header.environment != second.header.environment:
        yield "The environments differ."
    if max(len(each.episodes[task]) for each in scores for task in common) == 1:
        yield (
            "Each task was played once, with one seed: the interval holds for other tasks of this kind, and a task "
            "that flipped may be noise of sampling. Play each task several times (--group-size 4)."
        )


def _failures(name: str, scores: _Scores, tasks: Sequence[str]) -> Iterator[str]:
    failed, total = scores.failed(tasks), sum(len(scores.episodes[task]) for task in tasks)
    lost = scores.only_failed(tasks)
    if failed == total:
        yield f"No episode of {name} has a score: all {failed:,} failed."
    elif failed:
        yield (
            f"{failed:,} of {total:,} episodes of {name} failed and have no reward. "
            f'They are counted in "{FAILED}" and "{STRICT}".'
        )
    if lost and failed < total:
        named = ", ".join(lost[:MAX_NAMED_TASKS]) + (", ..." if len(lost) > MAX_NAMED_TASKS else "")
        yield f"{_counted(len(lost), 'task has', 'tasks have')} only failed episodes in {name}: {named}."


def _counted(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"


def _configuration(first: RunFile, second: RunFile) -> Iterator[tuple[str, str, str]]:
    skipped = ("created", "clock", "format", "template.text", "template.turns", "engine.template", "concurrency")
    for change in first.header.changes(second.header):
        if not change.path.startswith(skipped):
            yield change.path, _shown(change.old), _shown(change.new)
    versions = [_weight_versions(file) for file in (first, second)]
    if versions[0] != versions[1]:
        yield "weight versions", *map(_names, versions)  # type: ignore[misc]  # mypy cannot count the starred values
    agents = [_agents(file) for file in (first, second)]
    if agents[0] != agents[1]:
        yield "agents", *map(_names, agents)  # type: ignore[misc]  # mypy cannot count the starred values


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
