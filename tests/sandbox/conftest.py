"""Sandboxes for tests: real containers, or a skip with the reason."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from runner import Sandbox, SandboxOptions
from runner.sandbox.containers import ENGINE_VARIABLE, Containers, default_provider
from tests.sandbox.engines import IMAGE_FOLDER, containers_of, engine_or_reason


@pytest.fixture(scope="session")
def engine() -> str:
    """The command of a working container engine."""
    command, reason = engine_or_reason()
    if not command:
        pytest.skip(reason)
    return command


@pytest.fixture
def default_engine(engine: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The same command, as the default of this process. Afterwards none of its containers is left."""
    before = containers_of(engine)
    monkeypatch.setenv(ENGINE_VARIABLE, engine)
    default_provider.cache_clear()
    yield engine
    default_provider.cache_clear()
    assert containers_of(engine) <= before


@pytest.fixture(scope="module")
async def box(engine: str) -> AsyncIterator[Sandbox]:
    """One sandbox for all tests of a module."""
    options = SandboxOptions(
        image=IMAGE_FOLDER, memory_mb=64, processes=24, tmpfs={"/small": "4m"}, env={"COLOUR": "green"}
    )
    async with Containers(engine).open(options) as opened:
        yield opened
