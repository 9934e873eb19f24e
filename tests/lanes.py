"""Which process of pytest-xdist plays which test: those on a real engine are together in one, and so are timed ones.

Those that start an engine of their own, for themselves, are together as well, so that two engines at most are alive.

The option `--dist loadgroup` is made for this, and with pytest 9.2 and pytest-xdist 3.8 it forgets every group without
a word (pytest-xdist issue 1386), as the process that deals the tests out knows nothing of them but their ids. Here it
reads their groups in a file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = ["scheduler", "tell"]

GROUPS = ("ray", "apart", "engine", "timing")
"""Markers of tests that stay together, the first one that a test has; the largest group is begun first."""


def tell(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Write down the groups, in a process that was given its tests by another one."""
    if hasattr(config, "workerinput"):
        found = {item.nodeid: group for item in items if (group := _group(item))}
        # All of them write the same, so that each may replace what another one wrote, at once and as a whole.
        written = _folder(config) / "groups.json"
        written.write_text(json.dumps(found), encoding="utf-8")
        written.replace(_folder(config).parent / written.name)


def _group(item: pytest.Item) -> str | None:
    marked = next((group for group in GROUPS if item.get_closest_marker(group)), None)
    # The whole sweeps of a file are played once, for all tests that look at them.
    return marked or (str(item.path) if item.get_closest_marker("whole") else None)


def scheduler(config: pytest.Config, log: Any) -> Any:
    """Deals out single tests, and groups as a whole."""
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):  # type: ignore[misc]  # not typed
        groups: dict[str, str] | None = None

        def _split_scope(self, nodeid: str) -> str:
            if self.groups is None:
                self.groups = json.loads((_folder(config) / "groups.json").read_text(encoding="utf-8"))
            return self.groups.get(nodeid, nodeid)

    return Lanes(config, log)


def _folder(config: Any) -> Path:
    """Where this process has its temporary files; those of the others lie in that of the first."""
    folder: Path = config._tmp_path_factory.getbasetemp()
    return folder
