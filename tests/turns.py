"""Sampling of tests: a seed chooses some of the marked tests, and whole sweeps play all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests import sweeps

__all__ = ["of_others"]


def of_others(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that only other seeds choose, by the markers `cases_in_turns` and `in_turns`."""
    cases: dict[tuple[Path, str, int], list[pytest.Item]] = {}
    units: dict[tuple[str, int], dict[str, list[pytest.Item]]] = {}
    for item in items:
        function: str = getattr(item, "originalname", item.name)
        if mark := item.get_closest_marker("cases_in_turns"):
            cases.setdefault((item.path, function, mark.args[0]), []).append(item)
        if mark := item.get_closest_marker("in_turns"):
            name, one_in = (*mark.args, 0)[:2]
            # without the checkout's folder, so that all checkouts choose the same
            of_file = item.nodeid.partition("::")[0]
            unit = mark.kwargs.get("unit") or f"{of_file} {function if mark in item.own_markers else ''}"
            units.setdefault((name, one_in), {}).setdefault(unit, []).append(item)
    others = set()
    for (*_, one_in), of_test in cases.items():
        others |= _others([[case] for case in of_test], one_in)
    for (_, one_in), of_name in units.items():
        others |= _others([of_name[unit] for unit in sorted(of_name)], one_in)
    return others


def _others(units: Sequence[list[pytest.Item]], one_in: int) -> set[pytest.Item]:
    now = sweeps.part(units, min(one_in, len(units)) or len(units))
    return {item for unit in units if unit not in now for item in unit}
