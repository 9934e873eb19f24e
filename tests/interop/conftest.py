"""Tests with packages of other projects run only if these are installed: in the lanes of `make test-interop`."""

from __future__ import annotations

import importlib.util

import pytest

from tests.interop.installing import HOME


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    absent = [item for item in items if _missing(item)]
    config.hook.pytest_deselected(items=absent)
    items[:] = [item for item in items if item not in absent]


def _missing(item: pytest.Item) -> bool:
    servers = [name for marker in item.iter_markers("server") for name in marker.args]
    if any(not (HOME / name / "installed.json").is_file() for name in servers):
        return True
    names = [name for marker in item.iter_markers("package") for name in marker.args]
    return any(not _is_installed(name) for name in names)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package around the module is missing
        return False
