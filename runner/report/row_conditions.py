"""Functions that select, sort and average the episodes of a run file by fields, and compare results with thresholds."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from runner.errors import BadOption, BelowThreshold
from runner.estimates import Mean
from runner.report.comparison import task_field, task_fields
from runner.scoring import Scorer, ScorerKind
from runner.store.reader import EpisodeRow, RunFile

__all__ = [
    "check_known",
    "check_threshold_names",
    "check_thresholds",
    "means_by",
    "number_of",
    "parse_threshold",
    "require_thresholds",
    "row_condition",
    "row_value",
    "sorted_rows",
    "where_name",
]

_OPERATORS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "==": operator.eq,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
    "~": lambda value, part: str(part).lower() in str(value).lower(),
}
_CONDITION: Final = re.compile(r"\s*([^<>=!~\s]+)\s*(<=|>=|!=|==|=|<|>|~)\s*(.*?)\s*", re.DOTALL)
_FIELDS: Final = tuple(
    each.name for each in fields(EpisodeRow) if each.name not in ("key", "rewards", "metrics", "superseded")
)

_THRESHOLD_TOLERANCE: Final = 1e-9  # a mean of 4/5 may be one bit below 0.8


def row_value(row: EpisodeRow, name: str) -> Any:
    """The value of a row's field, reward or metric with this name.

    Raises:
        KeyError: the row has no value of this name.
    """
    if name in _FIELDS:
        return getattr(row, name)
    for scores in (row.rewards, row.metrics):
        if name in scores:
            return scores[name]
    raise KeyError(name)


def row_condition(text: str) -> Callable[[EpisodeRow], bool]:
    """The condition `FIELD OPERATOR VALUE` as a function of a row.

    Examples are `reward < 0.5`, `error ~ timeout` and `outcome = env_error`. A row without the field does not match,
    since only other episodes may have this reward or metric. A row whose field is None matches only `FIELD = none`.

    The returned function raises BadOption if the field is a number, but VALUE is neither a number nor `none`. The
    operator `~` takes any VALUE.

    Raises:
        BadOption: the text has another form.
    """
    match = _CONDITION.fullmatch(text)
    if match is None or not match[3]:
        raise BadOption(f"--where {text!r}: give FIELD OPERATOR VALUE, such as 'reward < 0.5' or 'error ~ timeout'.")
    name, sign, written = match[1], match[2], match[3].strip("\"'")
    compare = _OPERATORS[sign]
    number = number_of(written)

    def holds(row: EpisodeRow) -> bool:
        try:
            value = row_value(row, name)
        except KeyError:
            return False
        if value is None or (written == "none" and number is None and not isinstance(value, str)):
            return value is None and written == "none" and sign in ("=", "==")
        if sign == "~":
            return compare(value, written)
        if isinstance(value, str):
            return compare(value, written)
        if number is None:
            raise BadOption(f"--where {text!r}: {name} is a number, and {written!r:.60} is not: give a number.")
        return compare(value, number)

    return holds


def number_of(text: str) -> float | None:
    """The number that a text stands for; true is 1 and false is 0. None if the text is not a number."""
    try:
        return float({"true": "1", "false": "0"}.get(text.lower(), text))
    except ValueError:
        return None


def check_known(names: Iterable[str], run_file: RunFile, option: str) -> None:
    """Refuse names that are neither a field of a row nor the name of a reward or metric.

    Raises:
        BadOption: a name is unknown; the message lists the known ones.
    """
    scores = [*run_file.score_names("rewards"), *run_file.score_names("metrics")]
    for name in names:
        if name not in _FIELDS and name not in scores:
            raise BadOption(f"{option} {name}: unknown; give one of {', '.join([*_FIELDS, *scores])}.")


def where_name(text: str) -> str:
    """The field of a condition; the text itself if it is not a condition."""
    match = _CONDITION.fullmatch(text)
    return match[1] if match else text


def sorted_rows(rows: Iterable[EpisodeRow], name: str) -> list[EpisodeRow]:
    """Return the rows sorted by a field, a reward or a metric: lowest first; with `-name`, highest first.

    Rows without a value come last.
    """
    down, name = name.startswith("-"), name.removeprefix("-")
    known: list[tuple[Any, EpisodeRow]] = []
    missing: list[EpisodeRow] = []
    for row in rows:
        try:
            value = row_value(row, name)
        except KeyError:
            value = None
        if value is None or (isinstance(value, float) and math.isnan(value)):
            missing.append(row)
        else:
            known.append((value, row))
    known.sort(key=lambda pair: pair[0], reverse=down)
    return [*(row for _, row in known), *missing]


def means_by(run_file: RunFile, rows: Iterable[EpisodeRow], name: str) -> dict[str, tuple[Mean, Mean]]:
    """The mean reward, and the mean share of failed episodes, for each value of a field of the tasks.

    Raises:
        BadOption: no task has the field.
    """
    values: dict[str, str | None] = {}
    means: dict[str, tuple[Mean, Mean]] = {}
    for row in rows:
        if row.task_id not in values:
            values[row.task_id] = task_field(run_file, row.task_id, name)
        value = values[row.task_id]
        if value is None:
            continue
        reward, failed = means.setdefault(value, (Mean(), Mean()))
        reward.add(row.reward, row.task_id)
        failed.add(float(row.outcome.failed), row.task_id)
    if not means:
        known = task_fields(run_file, next(iter(values))) if values else []
        fix = f"; give one of {', '.join(known)}" if known else ""
        raise BadOption(f"--by {name}: no task of these episodes has this field{fix}.")
    return dict(sorted(means.items()))


def parse_threshold(text: str) -> tuple[str, float]:
    """The name and the number of NAME=NUMBER.

    Raises:
        BadOption: the text has another form.
    """
    name, _, written = text.rpartition("=")
    number = number_of(written)
    if not name or number is None or not math.isfinite(number):
        raise BadOption(f"--fail-under {text!r}: give NAME=NUMBER, such as reward=0.8.")
    return name, number


def check_threshold_names(thresholds: Sequence[str], scorers: Sequence[Scorer], group_size: int) -> None:
    """Refuse thresholds of results that a run cannot have, before the run begins.

    Args:
        thresholds: texts of the form NAME=NUMBER.
        scorers: the scorers of the environment; a metric that returns a dict names its values only in the run.
        group_size: the number of episodes of a task.

    Raises:
        BadOption: a threshold has another form, or no result can have its name.
    """
    sizes = [1 << power for power in range(group_size.bit_length())]
    known = ["reward", *(scorer.name for scorer in scorers), *(f"pass{sign}{k}" for sign in "@^" for k in sizes)]
    open_names = tuple(f"{scorer.name}." for scorer in scorers if scorer.kind is ScorerKind.METRIC)
    for text in thresholds:
        name, _ = parse_threshold(text)
        if name not in known and not name.startswith(open_names):
            more = f", and {open_names[0]}KEY if that metric returns a dict" if open_names else ""
            names = f"{', '.join(known)}{more}"
            raise BadOption(f"--fail-under {text!r}: this run has no such result; give one of {names}.")


def check_thresholds(summary: Mapping[str, Any], thresholds: Sequence[str], *, lenient: bool = False) -> list[str]:
    """The thresholds that a summary does not reach, in words; empty if it reaches all.

    Args:
        summary: `Summary.as_dict()`.
        thresholds: texts of the form NAME=NUMBER; NAME is `reward`, a reward, a metric, `pass@k` or `pass^k`.
        lenient: True to treat a name that the summary does not have as a result without a value.

    Raises:
        BadOption: a threshold has another form, or its name is unknown.
    """
    known: dict[str, float | None] = {
        **{name: mean["mean"] for part in ("metrics", "rewards") for name, mean in summary[part].items()},
        "reward": summary["reward"]["mean"],
        **{f"pass@{k}": value for k, value in summary["pass_at"].items()},
        **{f"pass^{k}": value for k, value in summary["pass_all"].items()},
    }
    missed = []
    for text in thresholds:
        name, number = parse_threshold(text)
        if name not in known and not lenient:
            raise BadOption(f"--fail-under {text!r}: unknown; give one of {', '.join(known)}.")
        value = known.get(name)
        if value is None:
            missed.append(f"{name} has no value, and the threshold is {number:g} (--fail-under)")
        elif not value >= number - _THRESHOLD_TOLERANCE:
            missed.append(f"{name} is {value:.4g}, below {number:g} (--fail-under)")
    return missed


def require_thresholds(summary: Mapping[str, Any], thresholds: Sequence[str]) -> None:
    """Check the thresholds of a finished run. Their names were checked before the run.

    Raises:
        BelowThreshold: a result does not reach its threshold, or has no value.
    """
    if missed := check_thresholds(summary, thresholds, lenient=True):
        raise BelowThreshold("; ".join(missed))
