"""Observers: their events arrive off the hot path, and an observer that raises, blocks or hangs harms nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from runner import BadOption, Conversation, Group, Run, RunFile, RunObserver, Summary, Trajectory, Turn
from runner.runs import observers
from tests.playing import Plain, play_all, recording, talking, tasks, twice

pytestmark = pytest.mark.anyio


class Keeps(RunObserver):
    """Observer that keeps the events as text."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.threads: set[int] = set()

    def note(self, event: str) -> None:
        self.events.append(event)
        self.threads.add(threading.get_ident())

    def started(self, about: Mapping[str, Any]) -> None:
        self.note(f"started {about['engine']} {about['group_size']}")

    def turn(self, trajectory: Trajectory, turn: Turn) -> None:
        self.note(f"turn {trajectory.id} {turn.number}")

    def episode(self, trajectories: Sequence[Trajectory]) -> None:
        self.note(f"episode {trajectories[0].id} {trajectories[0].reward}")

    def group(self, group: Group) -> None:
        self.note(f"group {group.task.id} {len(group.trajectories)}")

    def weights(self, version: str) -> None:
        self.note(f"weights {version}")

    def ended(self, summary: Summary) -> None:
        self.note(f"ended {summary.episodes}")


async def test_observer_receives_every_event_in_order() -> None:
    kept = Keeps()
    await play_all(talking(twice), recording(lambda _: "Yes"), tasks=tasks(2), group_size=2, observers=[kept])
    assert kept.events[0] == "started ScriptedEngine 2"
    assert kept.events[-1] == "ended 4"
    for task in ("t0", "t1"):
        for index in range(2):
            place = kept.events.index(f"episode {task}#{index} 1.0")
            assert kept.events[place - 2 : place] == [f"turn {task}#{index} {number}" for number in range(2)]
        assert kept.events.count(f"group {task} 2") == 1
    assert len(kept.threads) == 1
    assert threading.get_ident() not in kept.threads


async def test_observer_receives_new_weights() -> None:
    kept, engine, updated = Keeps(), recording("Yes"), anyio.Event()

    class Waits(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            if self.task.id != "t1":
                await updated.wait()
            await conversation.generate()

    async with Run(Waits, engine, tasks=tasks(3), observers=[kept]) as run:
        await anext(run)
        await engine.update_weights({})
        updated.set()
        async for _ in run:
            pass
    assert "weights 1" in kept.events


class Raises(Keeps):
    def episode(self, trajectories: Sequence[Trajectory]) -> None:
        raise OSError("no network")

    def started(self, about: Mapping[str, Any]) -> None:
        raise SystemExit(3)


async def test_observer_that_raises_is_a_fault_and_no_more() -> None:
    kept = Keeps()
    async with Run(Plain, recording("Yes"), tasks=tasks(3), observers=[Raises(), kept]) as run:
        played = [trajectory.reward async for trajectory in run]
    assert played == [1.0] * 3
    (fault,) = run.summary.faults
    assert fault.startswith("observer Raises raised 4 times, first: SystemExit")
    assert kept.events[-1] == "ended 3"


class Hangs(RunObserver):
    def __init__(self) -> None:
        self.free = threading.Event()

    def started(self, about: Mapping[str, Any]) -> None:
        self.free.wait()


async def test_observer_that_never_returns_delays_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "END_SECONDS", 0.05)
    hangs = Hangs()
    with anyio.fail_after(60):
        async with Run(Plain, recording("Yes"), tasks=tasks(50), observers=[hangs]) as run:
            played = [trajectory.reward async for trajectory in run]
    hangs.free.set()
    assert played == [1.0] * 50
    (fault,) = run.summary.faults
    assert fault.startswith("observer Hangs has not returned after 0.05 s")


async def test_events_of_a_slow_observer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "END_SECONDS", 0.05)
    monkeypatch.setattr(observers, "MAX_WAITING_EVENTS", 10)
    hangs = Hangs()
    async with Run(Plain, recording("Yes"), tasks=tasks(50), observers=[hangs]) as run:
        async for _ in run:
            pass
    hangs.free.set()
    assert any("was too slow and missed" in fault for fault in run.summary.faults)


async def test_observed_run_has_the_same_results(tmp_path: Path) -> None:
    rewards = []
    for number, given in enumerate(([], [Keeps()])):
        await play_all(Plain, "Yes", tasks=tasks(5), group_size=2, observers=given, file=tmp_path / f"{number}.db")
        with RunFile(tmp_path / f"{number}.db") as stored:
            rewards.append(sorted((t.id, t.seed, t.reward) for t in stored.trajectories()))
    assert rewards[0] == rewards[1]


def test_class_in_place_of_an_observer_is_refused() -> None:
    with pytest.raises(BadOption, match="objects of classes that derive from RunObserver"):
        Run(Plain, recording("Yes"), observers=[Keeps])  # type: ignore[list-item]  # wrong on purpose


def test_observer_that_never_returns_does_not_keep_the_process() -> None:
    script = (
        "import threading\n"
        "from runner import Environment, RunObserver, Task, reward, run\n"
        "from runner.runs import observers\n"
        "from runner.testing import ScriptedEngine\n"
        "observers.END_SECONDS = 0.05\n"
        "class Hangs(RunObserver):\n"
        "    def started(self, about): threading.Event().wait()\n"
        "class Plain(Environment):\n"
        "    def tasks(self): return [Task(id='t', prompt='?')]\n"
        "    @reward\n"
        "    def right(self): return 1.0\n"
        "summary = run(Plain, ScriptedEngine('Yes'), observers=[Hangs()])\n"
        "print(summary.reward.mean, len(summary.faults))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "1.0 1\n"), done.stderr
