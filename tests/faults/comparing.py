"""Comparison of trajectories in everything except their durations."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runner import RunFile
from runner.trajectory import Trajectory
from tests.store.building import plain

TIMES = {"seconds", "align_seconds", "waited", "timings"}


def by_key(trajectories: Iterable[Trajectory]) -> dict[tuple[str, int, int, str], Any]:
    """Return the results of each agent of each episode, bit for bit, by (task, visit, index, agent)."""
    made = {}
    for trajectory in trajectories:
        key = trajectory.task.id, trajectory.visit, trajectory.index, trajectory.agent
        assert key not in made, f"{key} occurs twice"
        made[key] = _timeless(plain(trajectory))
    return made


def differing(one: dict[Any, Any], other: dict[Any, Any]) -> dict[Any, Any]:
    """Return the differing fields of two such collections with both values: a short part of possibly megabytes."""
    missing: tuple[Any, dict[str, Any]] = ("not there", {})
    found = {}
    for key in one.keys() | other.keys():
        (kind, fields), (other_kind, others) = one.get(key, missing), other.get(key, missing)
        values = {name: (fields.get(name), others.get(name)) for name in fields.keys() | others.keys()}
        unequal = {name: pair for name, pair in values.items() if pair[0] != pair[1]}
        if unequal or kind != other_kind:
            found[key] = unequal
    return found


def stored(file: Path) -> dict[tuple[str, int, int, str], Any]:
    """Return the rows of each agent in a run file, including untrained agents, but without retried attempts."""
    with RunFile(file) as run_file:
        return by_key([run_file.trajectory(row) for row in run_file.rows(trained=None)])


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _timeless(inner) for name, inner in value.items() if name not in TIMES}
    if isinstance(value, list | tuple):
        return type(value)(_timeless(inner) for inner in value)
    return value
