"""Fixtures that tests share: the demo model, and one real engine for all tests that need one.

A test that takes `engine` plays on the real engine, on asyncio, on the one event loop that owns it. Such tests come
last, behind those that start engines of their own, so that one engine is alive at a time and no other test meets its
event loop; whoever takes `doomed_engine` may kill it and comes after everybody.
"""

import warnings
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from runner.engines.vllm.engine import VllmEngine
from runner.models import demo_model


@pytest.fixture(scope="session")
def demo_model_folder() -> Path:
    """The demo model's folder; converted at its first use."""
    return demo_model(say=print)


@pytest.fixture(scope="session")
async def engine(demo_model_folder: Path, anyio_backend: str) -> AsyncIterator[VllmEngine]:
    """The real engine on the demo model, with places for 16."""
    async with VllmEngine("smollm2-135m", max_num_seqs=16, max_model_len=4096) as engine:
        yield engine


@pytest.fixture
async def doomed_engine(engine: VllmEngine) -> AsyncIterator[VllmEngine]:
    """The same engine, for a test that kills it, or a new one where another test has."""
    if engine.is_alive():
        yield engine
        return
    async with VllmEngine("smollm2-135m", max_num_seqs=16, max_model_len=4096) as another:
        yield another


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    # vLLM leaves its sockets' context to the garbage collector, which comes by in any later test, or after the last.
    config.addinivalue_line("filterwarnings", "ignore:Unclosed context <zmq:ResourceWarning")
    warnings.filterwarnings("ignore", "Unclosed context <zmq", ResourceWarning)


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engine" in metafunc.fixturenames:
        # As a mark, since pytest would parametrise the plugin's own fixture of that name otherwise.
        metafunc.definition.add_marker(pytest.mark.parametrize("anyio_backend", ["asyncio"], scope="session"))


def pytest_itemcollected(item: pytest.Item) -> None:
    # Here, since `-m` selects before the hook below.
    if "engine" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.engine)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    fixtures = getattr(item, "fixturenames", ())
    if "doomed_engine" in fixtures:
        return 3
    if "engine" in fixtures:
        return 2
    return 1 if item.get_closest_marker("engine") else 0
