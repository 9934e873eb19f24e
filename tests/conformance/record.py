"""The record: the results of every case, with a line for each template. Each part of the sweep is compared with it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tests import sweeps
from tests.conformance.corpus import Entry, corpus
from tests.conformance.sweep import Outcome, Verdict, play, spread
from tests.tokens.profiles import traits

__all__ = ["HISTORY_DEPENDENT", "Recorded", "chosen", "fresh", "read", "rows_of", "write"]

FILE = Path(__file__).with_name("record.txt")

HISTORY_DEPENDENT = (
    "Bielik-11B-v3.0-Instruct",  # one block of results for all messages of a kind
    "Cohere2MoE",  # counts calls
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",  # counts tool rounds
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",  # opens its block of results once
)
LETTERS = {
    Verdict.EXACT: "e",
    Verdict.WRONG: "W",
    Verdict.REFUSED: "r",
    Verdict.NO_EXACT_BRIDGE: "n",
    Verdict.NOT_APPLICABLE: "-",
}


@dataclass(frozen=True, slots=True)
class Recorded:
    """The record of a template."""

    name: str
    traits: str
    """A digest of the template's profile."""
    verdicts: str
    """A letter for each case, in playing order."""
    reasons: str
    """A digest of the reasons, case by case: anchors of bridges, and properties that refusals name."""


def fresh(entry: Entry) -> Recorded:
    """Play a template, and return its new record."""
    return _recorded(entry.name, traits(entry), play(entry))


def _recorded(name: str, profile: str, outcomes: Iterable[Outcome]) -> Recorded:
    judgements = [outcome.judgement for outcome in outcomes]
    verdicts = "".join(LETTERS[judgement.verdict] for judgement in judgements)
    reasons = "\n".join(f"{judgement.detail}: {judgement.refusal}" for judgement in judgements)
    return Recorded(name, _digest(profile), verdicts, _digest(reasons))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def chosen() -> list[str]:
    """The names of some templates: one of each group with equal verdicts, all that depend on the history, and a sample.

    The sweep's seed chooses them. A whole sweep plays all templates once for all tests, so here it chooses only the
    history-dependent ones.
    """
    record = read()
    if sweeps.whole():
        return list(HISTORY_DEPENDENT)
    alike: dict[str, list[str]] = {}
    for name, of_it in record.items():
        alike.setdefault(of_it.verdicts, []).append(name)
    return sorted({
        *HISTORY_DEPENDENT,
        *(sweeps.part(names, len(names))[0] for names in alike.values()),
        *sweeps.part(sorted(record), 32),
    })  # fmt: skip


def read() -> Mapping[str, Recorded]:
    """Return the records by the names of the templates."""
    lines = (line.split() for line in FILE.read_text(encoding="utf-8").splitlines())
    return {name: Recorded(name, *kept) for name, *kept in lines}


def rows_of(outcomes: Iterable[Outcome], *, processes: int) -> list[Recorded]:
    """Return the records of a whole sweep."""
    by_name = {name: list(of_it) for name, of_it in groupby(outcomes, key=lambda outcome: outcome.template)}
    profiles = spread(traits, corpus(), processes)
    return [_recorded(entry.name, of_it, by_name[entry.name]) for entry, of_it in zip(corpus(), profiles, strict=True)]


def write(rows: Iterable[Recorded]) -> None:
    """Replace the record."""
    FILE.write_text(
        "".join(f"{row.name} {row.traits} {row.verdicts} {row.reasons}\n" for row in rows), encoding="utf-8"
    )
