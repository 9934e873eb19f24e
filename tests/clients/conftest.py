"""Selection of tests with agent programs: only `make test-clients` plays them, if their program is installed."""

from __future__ import annotations

import pytest

from tests.clients.installing import CLIENTS


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    with_client = [item for item in items if item.get_closest_marker("client")]
    if not config.option.clients:
        config.hook.pytest_deselected(items=with_client)
        items[:] = [item for item in items if item not in with_client]


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("client")
    if marker is not None and (missing := CLIENTS[marker.args[0]].missing):
        pytest.skip(missing)
