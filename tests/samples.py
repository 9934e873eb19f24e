"""The sample of the tests: a seed chooses some of the marked tests, and whole sweeps play all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests import sweeps

__all__ = ["outside"]


def outside(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that this seed leaves out, by the markers that begin with `sample_`."""
    cases: dict[tuple[Path, str, int], list[pytest.Item]] = {}
    units: dict[tuple[str, int], dict[str, list[pytest.Item]]] = {}
    for item in items:
        function: str = getattr(item, "originalname", item.name)
        if mark := item.get_closest_marker("sample_cases"):
            cases.setdefault((item.path, function, mark.args[0]), []).append(item)
        # without the checkout's folder, so that all checkouts choose the same
        of_file = item.nodeid.partition("::")[0]
        if mark := item.get_closest_marker("sample_functions"):
            units.setdefault((of_file, mark.args[0]), {}).setdefault(function, []).append(item)
        if mark := item.get_closest_marker("sample_units"):
            name, one_in = (*mark.args, 0)[:2]
            unit = mark.kwargs.get("unit") or f"{of_file} {function if mark in item.own_markers else ''}"
            units.setdefault((name, one_in), {}).setdefault(unit, []).append(item)
    left_out = set()
    for (*_, one_in), of_test in cases.items():
        left_out |= _left_out([[case] for case in of_test], one_in)
    for (_, one_in), of_name in units.items():
        left_out |= _left_out([of_name[unit] for unit in sorted(of_name)], one_in)
    return left_out


def _left_out(units: Sequence[list[pytest.Item]], one_in: int) -> set[pytest.Item]:
    sample = sweeps.part(units, min(one_in, len(units)) or len(units))
    return {item for unit in units if unit not in sample for item in unit}
