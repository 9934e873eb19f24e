"""Fixtures of the tests of engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.contract import ENGINES, Keep
from tests.engines.polyglot import polyglot_model


@pytest.fixture(params=list(ENGINES.values()), ids=list(ENGINES))
def keep(request: pytest.FixtureRequest) -> Keep:
    keep: Keep = request.param(request)
    return keep


@pytest.fixture(scope="session")
def polyglot_folder(small_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose vocabulary has the control tokens of every family."""
    return polyglot_model(tmp_path_factory.mktemp("polyglot"), small_model_folder)
