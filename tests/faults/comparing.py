"""Trajectories compared by everything but the time they took."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from runner.trajectory import Trajectory
from tests.store.building import plain

TIMES = {"seconds", "waited", "timings"}


def by_place(trajectories: Iterable[Trajectory]) -> dict[tuple[str, int, int, str], Any]:
    """What each agent of each episode did, bit for bit, by (task, visit, index, agent)."""
    made = {}
    for trajectory in trajectories:
        key = trajectory.task.id, trajectory.visit, trajectory.index, trajectory.agent
        assert key not in made, f"{key} came twice"
        made[key] = _timeless(plain(trajectory))
    return made


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _timeless(inner) for name, inner in value.items() if name not in TIMES}
    if isinstance(value, list | tuple):
        return type(value)(_timeless(inner) for inner in value)
    return value
