"""The Ray cluster that tests with the marker `ray` share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.listening import HTTP2, listening
from tests.cluster.ray_cluster import Standing, require_ray, standing
from tests.cluster.ray_double import ray_double


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a short name, since Ray's sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="dr-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Standing]:
    """A shared cluster, which is removed after all tests."""
    require_ray()
    folder = Path(tempfile.mkdtemp(prefix="dr-", dir="/tmp"))
    with standing(folder) as cluster:
        yield cluster
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(shared_cluster: Standing, monkeypatch: pytest.MonkeyPatch) -> Standing:
    """The shared cluster, as the cluster of runs that name none."""
    monkeypatch.setenv("RAY_ADDRESS", shared_cluster.address)
    return shared_cluster


@pytest.fixture
def small_cluster(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Standing]:
    """A cluster with room for one worker, for one test."""
    require_ray()
    with standing(short_folder, cpus=1) as cluster:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The part of Ray that a launcher calls, with a cluster of four cores on one machine."""
    return ray_double(monkeypatch)


@pytest.fixture
def listener() -> Iterator[str]:
    """The address of an HTTP/2 server, as Ray's head is one."""
    with listening(HTTP2) as address:
        yield address
