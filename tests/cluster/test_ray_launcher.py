"""What a launcher makes of Ray's words, and when it leaves a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from runner import BadOption
from runner.cluster import ray_calls, ray_launcher
from runner.cluster.ray_launcher import RayLauncher

pytestmark = pytest.mark.anyio


def test_a_worker_that_ray_ended_for_memory_is_lost_by_that_name() -> None:
    told = (
        "2 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: b2ce) "
        "was 8.07GB used / 23.54GB limit (0.342871)\nOOM kill reason: Memory usage 8647462912B exceeded threshold"
    )
    error: Any = pytest.importorskip("ray.exceptions").OutOfMemoryError
    short = "its machine was short of memory, and Ray ended it"
    assert ray_calls._why(error(told)) == f"{short}: 8.07GB used / 23.54GB limit"
    assert ray_calls._why(error("")) == short


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As much of Ray as a launcher asks, with a cluster of four cores."""
    state = SimpleNamespace(on=False)
    fake = MagicMock()
    fake.is_initialized = lambda: state.on
    fake.init = lambda **_: setattr(state, "on", True)
    fake.shutdown = lambda: setattr(state, "on", False)
    fake.cluster_resources = lambda: {"CPU": 4}
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_launcher, "_ray", lambda: fake)
    monkeypatch.setattr(ray_launcher, "_on_node", lambda place, soft: None)
    return fake


def launcher(cpus: float = 1) -> RayLauncher:
    return RayLauncher("RayEngines", address=None, cpus=cpus, gpus=0, runtime_env=None)


async def test_who_leaves_a_cluster_last_ends_the_connection(ray: Any) -> None:
    first, second = launcher(), launcher()
    await first.open()
    await second.open()
    await first.close()
    assert ray.is_initialized()
    await second.close()
    assert not ray.is_initialized()


async def test_a_connection_that_was_there_before_stays(ray: Any) -> None:
    ray.init()
    only = launcher()
    await only.open()
    await only.close()
    assert ray.is_initialized()


async def test_a_cluster_that_is_too_small_is_left_again(ray: Any) -> None:
    with pytest.raises(BadOption, match="1 workers of 5 CPU each need 5, and the cluster has 4"):
        await launcher(cpus=5).open()
    assert not ray.is_initialized()
