"""Scheduler of pytest-xdist that plays a group of tests in one process.

The tests on one real engine are a group, and so are the timed tests. Tests that start engines of their own, or play on
Ray, are a group as well: so two processes have engines at most, and the machine has memory for them.

The option `--dist loadgroup` is made for this. With pytest 9.2 and pytest-xdist 3.8 it silently drops every group
(pytest-xdist issue 1386), since the process that deals out the tests has only their ids. This scheduler reads the
groups from a file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = ["scheduler", "write_groups"]

GROUPS = ("ray", "apart", "engine", "timing")
"""Markers of tests that stay together. The first marker that a test has is its group."""

BEGIN_FIRST = ("engine", "apart")
"""The groups that take longest, whatever their number of tests. The first process plays the tests that share an engine.
"""


def write_groups(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Write the groups to a file, in a process that gets its tests from another process."""
    if hasattr(config, "workerinput"):
        found = {item.nodeid: group for item in items if (group := _group(item))}
        # Every process writes the same content, so each may replace the file of another, in one step.
        written = _folder(config) / "groups.json"
        written.write_text(json.dumps(found), encoding="utf-8")
        written.replace(_folder(config).parent / written.name)


def _group(item: pytest.Item) -> str | None:
    marked = next((group for group in GROUPS if item.get_closest_marker(group)), None)
    # The whole sweeps of a file are played once, for all tests that read their results.
    return marked or (str(item.path) if item.get_closest_marker("whole") else None)


def scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler that deals out single tests, and groups as a whole."""
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):  # type: ignore[misc]  # not typed
        groups: dict[str, str] | None = None

        def _split_scope(self, nodeid: str) -> str:
            if self.groups is None:
                self.groups = json.loads((_folder(config) / "groups.json").read_text(encoding="utf-8"))
            return self.groups.get(nodeid, nodeid)

        def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
            if lacking := set(self.collection or ()) - set(collection):
                # The run would wait for these tests for ever.
                pytest.exit(
                    f"{node.gateway.id} takes the place of a process that ended and does not find {min(lacking)}: "
                    f"were files changed during the run?",
                    returncode=pytest.ExitCode.INTERNAL_ERROR,
                )
            self.registered_collections[node] = list(collection)

        def _assign_work_unit(self, node: Any) -> None:
            for group in reversed(BEGIN_FIRST):
                if group in self.workqueue:
                    self.workqueue.move_to_end(group, last=False)
            super()._assign_work_unit(node)

        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            nodeid = self.registered_collections[node][item_index]
            group = self.assigned_work[node][self._split_scope(nodeid)]
            group[nodeid] = True
            if all(group.values()):
                # Entries that stay are counted at every test, and are dealt out again if the process ends early.
                del self.assigned_work[node][self._split_scope(nodeid)]
            self._reschedule(node)

        def remove_node(self, node: Any) -> str | None:
            """Give the tests of a process that ended to other processes, except for the test that ended it."""
            left: dict[str, dict[str, bool]] = self.assigned_work.pop(node)
            waiting = ((group, nodeid) for group in left.values() for nodeid, done in group.items() if not done)
            ended_by = None
            if (ending := next(waiting, None)) is not None:
                group, ended_by = ending
                group[ended_by] = True  # it failed, and would end the next process too
            self.workqueue.update({scope: group for scope, group in left.items() if not all(group.values())})
            for other in self.assigned_work:
                self._reschedule(other)
            return ended_by

        def _reschedule(self, node: Any) -> None:
            if node not in self.registered_collections:  # a replacement that has not collected its tests yet
                return
            super()._reschedule(node)
            # A process begins a test when it has the next one, so a process with one test gets another.
            while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                self._assign_work_unit(node)

    return Lanes(config, log)


def _folder(config: Any) -> Path:
    """The folder of this process's temporary files. It lies in the folder of the first process."""
    folder: Path = config._tmp_path_factory.getbasetemp()
    return folder
