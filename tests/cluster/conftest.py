"""The cluster of Ray that tests with the marker `ray` share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.ray_cluster import Standing, require_ray, standing


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a short name, since Ray's sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="dr-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Standing]:
    """A cluster, and after all tests nothing of it."""
    require_ray()
    folder = Path(tempfile.mkdtemp(prefix="dr-", dir="/tmp"))
    with standing(folder) as cluster:
        yield cluster
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(shared_cluster: Standing, monkeypatch: pytest.MonkeyPatch) -> Standing:
    """The same, as the one that a run takes which names none."""
    monkeypatch.setenv("RAY_ADDRESS", shared_cluster.address)
    return shared_cluster


@pytest.fixture
def small_cluster(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Standing]:
    """A cluster with room for one worker, of this test alone."""
    require_ray()
    with standing(short_folder, cpus=1) as cluster:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
