"""Claims of tasks for tests of the run file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runner.store.writer import Claimed, RunWriter
from runner.tasks import Task
from tests.store.building import header


async def claims(path: Path | None, *tasks: Task, repeatable: bool = False, **fields: Any) -> list[Claimed]:
    async with RunWriter(path, header(**fields)) as writer:
        return [writer.claim(task, position, repeatable=repeatable) for position, task in enumerate(tasks)]
