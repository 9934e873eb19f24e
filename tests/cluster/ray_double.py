"""Stand-in for the part of Ray that a launcher calls, without processes, for tests of connections and launchers."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from runner.cluster.ray import connection, engines
from runner.cluster.ray import launcher as launching
from runner.cluster.ray.launcher import RayLauncher

__all__ = ["has_machines", "launcher", "ray_double"]


def ray_double(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand-in for the part of Ray that a launcher calls, with a cluster of four cores on one machine."""
    state = SimpleNamespace(on=False, sessions=0)
    fake = MagicMock()
    has_machines(fake, {"CPU": 4})
    fake.is_initialized = lambda: state.on

    def init(**settings: Any) -> None:
        state.on = True
        state.sessions += 1
        fake.settings = settings

    fake.init = init
    fake.get_runtime_context().get_job_id = lambda: f"{state.sessions:08x}"
    fake.shutdown = lambda: setattr(state, "on", False)
    monkeypatch.setattr(engines, "require_ray", lambda *_: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(launching, "ray_module", lambda: fake)
    monkeypatch.setattr(connection, "ray_module", lambda: fake)
    monkeypatch.setattr(connection, "admit", lambda address: None)
    monkeypatch.setattr(connection, "_require_head", lambda who, address: None)
    fake.get_runtime_context().runtime_env = {}
    fake.cloudpickle.dumps = pickle.dumps
    monkeypatch.setattr(launching, "_on_this_node", lambda: None)  # the real Ray would start, and end this process
    return fake


def has_machines(fake: Any, *machines: dict[str, float], dead: tuple[dict[str, float], ...] = ()) -> None:
    """Set the machines of the cluster to node-0, node-1, and so on. Dead machines stay in the list."""
    fake.cluster_resources = lambda: {
        name: sum(machine.get(name, 0) for machine in machines) for machine in machines for name in machine
    }
    fake.nodes = lambda: [
        {"Alive": machine in machines, "NodeManagerHostname": f"node-{number}", "Resources": machine}
        for number, machine in enumerate((*machines, *dead))
    ]


def launcher(
    cpus: float = 1, gpus: float = 0, address: str | None = None, runtime_env: dict[str, Any] | None = None
) -> RayLauncher:
    return RayLauncher("RayEngines", address=address, cpus=cpus, gpus=gpus, runtime_env=runtime_env)
