"""The packer of a run file: shared rows are added once, and again after a failed transaction."""

from __future__ import annotations

from runner.store.batch import Packer, StatementBatch
from runner.store.schema import EPISODES, TASKS
from tests.store.building import played


def added(packer: Packer, index: int) -> StatementBatch:
    batch = StatementBatch()
    packer.add(batch, played(index=index), superseded=False)
    return batch


def test_task_is_added_again_after_a_failed_transaction() -> None:
    packer = Packer(next_key=1, launch=1, resumed=False)
    assert TASKS in added(packer, 0).rows
    assert TASKS not in (second := added(packer, 1)).rows
    assert EPISODES in second.rows
    packer.forget()
    assert TASKS in added(packer, 2).rows
