"""The run file for tests of damaged files."""

from __future__ import annotations

import shutil
from pathlib import Path

import anyio
import pytest

from tests.verifying import play


@pytest.fixture(scope="package")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of three episodes of three agents."""
    path = tmp_path_factory.mktemp("verify") / "run.db"
    anyio.run(play, path, "pythonic")
    return path


@pytest.fixture
def path(played: Path, tmp_path: Path) -> Path:
    """A copy of the file, which a test may damage."""
    return Path(shutil.copy(played, tmp_path / "run.db"))
