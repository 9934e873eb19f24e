"""Tasks selected by number or by id, of sources of every kind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from runner import BadTask, Task
from runner.environment.task_selection import select

pytestmark = pytest.mark.anyio

IDS = ["a", "b", "c", "d"]


def listed() -> list[Task]:
    return [Task(id=id, prompt="?") for id in IDS]


def generated() -> Iterator[Task]:
    yield from listed()


async def asynchronous() -> AsyncIterator[Task]:
    for task in listed():
        yield task


async def ids_of(chosen: Any) -> list[str]:
    if hasattr(chosen, "__aiter__"):
        return [task.id async for task in chosen]
    return [task.id for task in chosen]


@pytest.mark.parametrize("source", [listed, generated, asynchronous])
async def test_tasks_are_selected_by_number_or_by_id(source: Callable[[], Any]) -> None:
    assert await ids_of(select(source(), Task)) == IDS
    assert await ids_of(select(source(), Task, most=2)) == ["a", "b"]
    assert await ids_of(select(source(), Task, most=0)) == []
    assert await ids_of(select(source(), Task, only="c")) == ["c"]


@pytest.mark.parametrize("source", [listed, generated, asynchronous])
async def test_a_missing_task_is_named_with_the_first_ids(source: Callable[[], Any]) -> None:
    with pytest.raises(BadTask, match=r"None of 4 tasks has the id 'x'; the first ids are 'a', 'b', 'c'\."):
        await ids_of(select(source(), Task, only="x"))


async def test_a_missing_task_of_no_tasks_is_named() -> None:
    with pytest.raises(BadTask, match=r"There are no tasks, so none has the id 'x'\."):
        await ids_of(select([], Task, only="x"))
