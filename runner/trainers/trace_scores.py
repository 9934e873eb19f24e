"""Comparison of the log-probabilities of a trace with an engine's scores of the same ids."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from runner import checked
from runner.concurrency.gather import gather
from runner.engines.base import Engine
from runner.errors import BadOption, RequestRejected
from runner.options import Sampling
from runner.trainers.traced_call import TracedCall

__all__ = ["ScoreFinding", "ScoreReport", "score_trace"]

DEFAULT_TOLERANCE_NATS: Final = 0.5
"""Allowed difference between two log-probabilities. An engine in bfloat16 and one in float32 differed by up to 0.34."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreFinding:
    """One call of a trace with log-probabilities that differ from the engine's scores."""

    turn: int
    """Number of the call in the trace, from 0."""
    node_id: str
    """Id of the call in the trace."""
    ids: int
    """Number of sampled ids of the call."""
    places: tuple[int, ...]
    """Indexes of the sampled ids whose log-probabilities differ by more than the tolerance."""
    traced: tuple[float, ...]
    """Log-probabilities of the trace at these places, in nats."""
    scored: tuple[float, ...]
    """Scores of the engine at these places; minus infinity for an id that cannot be sampled."""


@dataclass(slots=True)
class ScoreReport:
    """The comparison of one trace or several traces with an engine's scores."""

    differences: list[float] = field(default_factory=list)
    """Absolute difference of the log-probability of each compared id, in nats."""
    findings: list[ScoreFinding] = field(default_factory=list)
    """The calls with ids whose difference is above the tolerance."""
    unchecked: Counter[str] = field(default_factory=Counter)
    """Number of calls that were not scored, by reason."""

    @property
    def median(self) -> float | None:
        """Median difference, in nats; None if nothing was compared."""
        return float(np.median(self.differences)) if self.differences else None

    @property
    def largest(self) -> float | None:
        """Largest difference, in nats; None if nothing was compared."""
        return max(self.differences, default=None)

    def add(self, other: ScoreReport) -> None:
        """Add the results of another report."""
        self.differences += other.differences
        self.findings += other.findings
        self.unchecked += other.unchecked


async def score_trace(
    calls: Sequence[TracedCall],
    engine: Engine,
    *,
    sampling: Sampling | None = None,
    tolerance: float = DEFAULT_TOLERANCE_NATS,
) -> ScoreReport:
    """Compare the log-probabilities of a trace with the engine's scores, and find the ids that differ.

    At temperature 1 a conversation is scored in one pass, whatever its number of calls. With another sampling each call
    takes one engine step per id. Some calls are counted as unchecked: calls without log-probabilities or without prompt
    ids, calls under a grammar, and calls that the engine refuses.

    Args:
        calls: the calls in order, as `read_traces` returns them.
        engine: an entered engine with the weights that sampled the trace.
        sampling: the sampling of the calls; None for the temperature in each call's metadata, or for 1 if it has none.
        tolerance: the allowed difference of an id, in nats.

    Raises:
        BadOption: the tolerance is not a number above 0, or the sampling cannot be scored.
        BadControl: the engine cannot score ids.
    """
    if not (math.isfinite(tolerance) and tolerance > 0):
        raise BadOption(f"score_trace(tolerance={tolerance!r}): give a number of nats above 0, such as 0.5.")
    report, plain = ScoreReport(), list[int]()
    jobs = []
    for number, call in enumerate(calls):
        if why := _unscorable(call):
            report.unchecked[why] += 1
            continue
        how = sampling if sampling is not None else _sampling_of(call)
        if how is None:
            plain.append(number)
        else:
            jobs.append(partial(_scored, engine, [number], calls, how))
    jobs += [partial(_scored, engine, numbers, calls, None) for numbers in _conversations(calls, plain)]
    for found in await gather(jobs):
        for number, scores in found.items():
            if isinstance(scores, str):
                report.unchecked[scores] += 1
            else:
                _compare(number, calls[number], scores, tolerance, report)
    report.findings.sort(key=lambda finding: finding.turn)
    return report


def _unscorable(call: TracedCall) -> str:
    """Return the reason why a call cannot be compared; "" if it can be compared."""
    if not call.logprobs:
        return "no log-probabilities"
    if not call.prompt_ids:
        return "no prompt ids"
    return "sampled under a grammar, which the trace does not have" if call.metadata.get("constraint") else ""


def _sampling_of(call: TracedCall) -> Sampling | None:
    """Return a sampling with the temperature in the metadata, as deltarunner writes it; None if it is 1 or missing."""
    temperature = call.metadata.get("temperature")
    if not checked.is_number(temperature) or temperature == 1:
        return None
    return Sampling(temperature=temperature)


def _conversations(calls: Sequence[TracedCall], numbers: Sequence[int]) -> list[list[int]]:
    """Group the numbers of calls, so that in a group the ids of each call are a prefix of the next call's prompt."""
    groups: list[list[int]] = []
    for number in numbers:
        before = calls[groups[-1][-1]].ids if groups else ()
        if groups and calls[number].prompt_ids[: len(before)] == before:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


async def _scored(
    engine: Engine, numbers: Sequence[int], calls: Sequence[TracedCall], sampling: Sampling | None
) -> dict[int, list[float] | str]:
    """Return the scores of each call by its number, or the reason why they are missing.

    The ids of each call must be a prefix of the ids of the last call.
    """
    start = len(calls[numbers[0]].prompt_ids)
    try:
        scores = await engine.score(calls[numbers[-1]].ids, start=start, sampling=sampling)
    except RequestRejected as error:
        return dict.fromkeys(numbers, f"the engine refuses the call: {error}")
    found: dict[int, list[float] | str] = {}
    for number in numbers:
        begin = len(calls[number].prompt_ids) - start
        found[number] = scores[begin : begin + len(calls[number].token_ids)]
    return found


def _compare(number: int, call: TracedCall, scores: Sequence[float], tolerance: float, report: ScoreReport) -> None:
    differences = [abs(one - other) for one, other in zip(call.logprobs, scores, strict=True)]
    report.differences += differences
    places = tuple(place for place, difference in enumerate(differences) if not difference <= tolerance)
    if places:
        traced, scored = (tuple(values[place] for place in places) for values in (call.logprobs, scores))
        report.findings.append(
            ScoreFinding(
                turn=number, node_id=call.node_id, ids=len(scores), places=places, traced=traced, scored=scored
            )
        )
