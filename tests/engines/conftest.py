"""Fixtures of the tests of engines."""

from __future__ import annotations

import pytest

from tests.engines.contract import ENGINES, Keep


@pytest.fixture(params=list(ENGINES.values()), ids=list(ENGINES))
def keep(request: pytest.FixtureRequest) -> Keep:
    keep: Keep = request.param(request)
    return keep
