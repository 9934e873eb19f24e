"""The templates of the corpus, grouped by the learnt format of their turns. One template of each group is played."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runner.parsing.learning.learnt_format import learn_format
from runner.parsing.turn_format import TurnFormat
from tests.conformance.corpus import Entry
from tests.conformance.sweep import spread
from tests.conformance.turn_formats import capable

__all__ = ["Group", "grouped", "learnt", "turn_of"]


@dataclass(frozen=True, slots=True)
class Group:
    """Templates with equal formats."""

    entry: Entry
    """The template that most models use."""
    templates: int
    models: int


def learnt(processes: int = 2) -> list[tuple[Entry, TurnFormat]]:
    """Learnt formats of all templates that can serve an environment with tools."""
    return list(zip(capable(), spread(turn_of, capable(), processes), strict=True))


def turn_of(entry: Entry) -> TurnFormat:
    """The learnt format of one template."""
    return learn_format(entry.renderer()).format


def grouped(turns: Sequence[tuple[Entry, TurnFormat]], key: Callable[[TurnFormat], str]) -> list[Group]:
    """Groups of equal keys, by their templates' names. Templates with the key "" are left out."""
    groups: dict[str, list[Entry]] = {}
    for entry, form in turns:
        if key(form):
            groups.setdefault(key(form), []).append(entry)
    return sorted((Group(*_counted(entries)) for entries in groups.values()), key=lambda group: group.entry.name)


def _counted(entries: Sequence[Entry]) -> tuple[Entry, int, int]:
    most = max(entries, key=lambda entry: len(entry.models))
    return most, len(entries), sum(len(entry.models) for entry in entries)
