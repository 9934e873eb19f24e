"""Trajectories and headers for tests of the run file."""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from runner.engines.base import FinishReason
from runner.messages import ToolCall
from runner.store.header import Header
from runner.tasks import Task
from runner.tokens.junction import Anchor, Close, Junction, Result, Seam
from runner.tokens.log import Source, TokenLog, VersionSpan
from runner.trajectory import Outcome, Segment, Timings, Trajectory, Turn

CLOCK = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)


def header(**fields: Any) -> Header:
    return Header(**{"environment": "envs.sums:Sums", "clock": CLOCK, "created": CLOCK, **fields})


def played(
    task: Task | str = "sum",
    index: int = 0,
    *,
    agent: str = "main",
    outcome: Outcome = Outcome.COMPLETED,
    reward: float | None = 1.0,
    attempt: int = 0,
    visit: int = 0,
    turns: int = 2,
    trained: bool = True,
) -> Trajectory:
    """Return an episode of `turns` turns, each with 8 prompt or bridge ids and 4 sampled ids."""
    task = Task(id=task, prompt="What is 1 + 1?", answer="2") if isinstance(task, str) else task
    log = TokenLog()
    segment = Segment(log=log, messages=[{"role": "user", "content": "What is 1 + 1?"}])
    trajectory = Trajectory(
        id=f"{task.id}-{visit}-{index}",
        task=task,
        index=index,
        agent=agent,
        seed=index,
        visit=visit,
        attempt=attempt,
        trained=trained,
        segments=[segment],
        outcome=outcome,
        reward=reward if outcome.scored else None,
        rewards={"correct": reward} if outcome.scored else {},
        seconds=1.5,
    )
    for number in range(turns):
        log.append_prompt(range(8), Source.BRIDGE if number else Source.PROMPT)
        start = len(log)
        log.append_sampled([100, 101, 102, 2], [-0.5, -0.25, -1.0, -0.125])
        log.stamp([VersionSpan("v1", 0, 4)], start)
        trajectory.turns.append(_turn(trajectory, number, start))
        segment.messages.append({"role": "assistant", "content": "2"})
    return trajectory


def _turn(trajectory: Trajectory, number: int, start: int) -> Turn:
    junction = Junction(Result.APPENDED, Anchor.STOP, Close.SAMPLED, Seam.SPECIAL, inserted=8)
    return Turn(
        agent=trajectory.agent,
        number=number,
        log=trajectory.segments[0].log,
        start=start,
        end=start + 4,
        text="2",
        tool_calls=[ToolCall("call-1", "add", {"a": 1, "b": 1})],
        finish=FinishReason.STOP,
        stop=2,
        cached_tokens=start - 8,
        junction=junction if number else None,
        timings=Timings(queued=0.1, first_token=0.2, decode=0.3, environment=0.4),
    )


def assert_equal(read: Trajectory, written: Trajectory) -> None:
    """Assert that every field, at every depth, and every bit of the arrays is equal."""
    assert plain(read) == plain(written)
    for turn in read.turns:
        assert turn.log is read.segments[turn.segment].log


def plain(value: Any) -> Any:
    """Return a value that compares by content: dataclasses by their fields, arrays by their bits, NaN as equal."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value), {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, array):
        return value.typecode, value.tobytes()
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return value
