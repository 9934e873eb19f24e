"""Tasks: an episode may change its own copy."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner import Environment, Group, Outcome, Run, RunFile, Task, Turn, group_reward, reward
from runner.engines.scripted.script import Fault
from runner.tasks import deep_copy
from runner.testing import Reply
from tests.playing import play_all, recording

pytestmark = pytest.mark.anyio


@dataclass
class Hand:
    """Values of a player. They are not frozen."""

    cards: list[int]


@dataclass(frozen=True)
class Deal(Task):
    """A task with fields that can be changed."""

    deck: list[int] = field(default_factory=list)
    hand: Hand = field(default_factory=lambda: Hand([1]))
    grid: Any = None


def deal() -> Deal:
    deck = [1, 2, 3]
    info = {"deck": deck, "same": deck, "deep": [({"seen": set()},)], "queue": deque([1]), "log": bytearray(b"a")}
    messages = [{"role": "user", "content": "Draw."}]
    return Deal(id="deal", prompt=messages, info=info, deck=[7, 8, 9], grid=np.zeros(2))  # type: ignore[arg-type]


def state(task: Any) -> str:
    """Return everything in a task."""
    return f"{task!r}"


class Spends(Environment[Deal]):
    """Environment whose episode changes the values of its task."""

    def __init__(self, given: Deal) -> None:
        self.given = given

    def tasks(self) -> list[Deal]:
        return [self.given]

    def setup(self) -> None:
        info: Any = self.task.info
        self.found = state(self.task)
        info["deck"].pop()
        info["new"] = 1
        info["deep"][0][0]["seen"].add(self.episode.index)
        info["queue"].append(2)
        info["log"].extend(b"b")
        self.task.deck.clear()
        self.task.hand.cards.append(2)
        self.task.grid[0] = 1
        prompt: Any = self.task.prompt
        prompt[0]["content"] = "Draw one."

    def prompt(self) -> Any:
        return self.task.prompt

    def step(self, turn: Turn) -> None:
        info: Any = self.task.info
        assert info["deck"] is info["same"]
        assert info["deck"] == [1, 2]

    @reward
    def alike(self) -> bool:
        return self.found == state(deal())

    @group_reward
    def untouched(self, group: Group) -> list[float]:
        return [float(state(group.task) == state(deal()))] * len(group.trajectories)


async def test_episode_gets_its_own_task_and_the_group_the_original() -> None:
    given = deal()
    played = await play_all(Spends(given), "Yes", group_size=3)
    assert [(t.outcome, t.rewards) for t in played] == [(Outcome.COMPLETED, {"alike": 1.0, "untouched": 1.0})] * 3
    assert all(t.task is given for t in played)
    assert played[0].segments[0].messages[0]["content"] == "Draw one."
    assert state(given) == state(deal())


async def test_run_file_and_replayed_episode_have_the_original_task(tmp_path: Path) -> None:
    class Draws(Environment):
        def setup(self) -> None:
            self.found = self.task.info["deck"].copy()
            self.task.info["deck"].pop()

        @reward
        def alike(self) -> bool:
            return bool(self.found == [1, 2, 3])

    file = tmp_path / "run.db"
    fails = Reply("No", fault=Fault.error(at=1))
    given = [Task(id="deal", prompt="Draw.", info={"deck": [1, 2, 3]})]
    replies: Iterator[Any] = iter([fails, fails, "Yes"])
    async with Run(Draws, recording(lambda turn: next(replies)), tasks=given, file=file) as run:
        (trajectory,) = [t async for t in run]
    assert (trajectory.attempt, trajectory.reward) == (2, 1.0)
    with RunFile(file) as run_file:
        assert [t.task.info for t in run_file.trajectories()] == [{"deck": [1, 2, 3]}]


def test_copy_shares_only_objects_that_cannot_be_copied() -> None:
    lock = threading.Lock()
    loop: list[Any] = [lock]
    loop.append(loop)
    task = Task(id="a", prompt="b", info={"lock": lock, "tuple": (lock, []), "loop": loop})
    own: Any = deep_copy(task)
    assert own == Task(id="a", prompt="b", info=own.info)
    assert own.info["lock"] is own.info["tuple"][0] is own.info["loop"][0] is lock
    assert own.info["tuple"][1] is not task.info["tuple"][1]
    assert own.info["loop"] is not loop
    assert own.info["loop"][1] is own.info["loop"]


class World:
    """Values in a class of the author: some can be copied, and two cannot."""

    def __init__(self) -> None:
        self.deck = [1, 2, 3]
        self.lock = threading.Lock()
        self.cards = (card for card in self.deck)


def test_object_with_uncopyable_parts_is_copied_without_them() -> None:
    world = World()
    copied = deep_copy({"world": world, "same": world})
    assert copied["world"] is copied["same"]
    assert copied["world"] is not world
    assert copied["world"].lock is world.lock
    assert copied["world"].cards is world.cards
    copied["world"].deck.pop()
    assert (world.deck, copied["world"].deck) == ([1, 2, 3], [1, 2])


def test_an_object_whose_class_refuses_to_be_copied_is_shared_whole() -> None:
    class Refusing:
        def __init__(self) -> None:
            self.deck = [1]

        def __deepcopy__(self, memo: object) -> object:
            raise TypeError("no copies")

    refusing = Refusing()
    copied = deep_copy([refusing, refusing])
    assert copied[0] is copied[1] is refusing
    assert refusing.deck == [1]
