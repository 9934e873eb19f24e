"""Stamps: which weights sampled which ids of a request, where we keep the account and not the engine."""

from __future__ import annotations

from itertools import pairwise

from runner.engines.adapters import AdapterVersion
from runner.tokens.log import VersionSpan

__all__ = ["Stamps"]


class Stamps:
    """The weight versions of one request's ids: the weights change while it is sampled, its adapter does not."""

    __slots__ = ("_adapter", "_marks")

    def __init__(self, version: str, adapter: AdapterVersion | None = None) -> None:
        self._marks = [(version, 0)]
        self._adapter = "" if adapter is None else f"+{adapter.label}"

    def named(self, version: str) -> str:
        """A version of the weights with the adapter on them, as "7+poet@2"."""
        return version + self._adapter

    def mark(self, version: str, sampled: int) -> None:
        """The weights were exchanged when so many ids had been sampled."""
        self._marks.append((version, sampled))

    def spans(self, length: int) -> tuple[VersionSpan, ...]:
        """The versions of the first `length` ids, in order; a version that sampled nothing is not among them."""
        if len(self._marks) == 1:  # as nearly always
            return (VersionSpan(self.named(self._marks[0][0]), 0, length),) if length else ()
        ends = [*((version, min(start, length)) for version, start in self._marks), ("", length)]
        return tuple(
            VersionSpan(self.named(version), start, end) for (version, start), (_, end) in pairwise(ends) if start < end
        )
