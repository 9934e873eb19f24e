"""Trajectories return unchanged from a file."""

from __future__ import annotations

import enum
import math
import tempfile
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.engines.base import FinishReason
from runner.engines.message_engine import Usage
from runner.errors import RunFileError
from runner.messages import ToolCall
from runner.options import Constraint, ConstraintKind
from runner.store.json_values import decode_json, encode_json
from runner.store.packing import pack, source_spans, unpack
from runner.store.reader import RunFile
from runner.store.stored_tasks import TaskDecoder, encode_task
from runner.store.writer import RunWriter
from runner.tasks import Task
from runner.tokens.junction import Anchor, Close, Junction, Result, Seam
from runner.tokens.log import Source, TokenLog, VersionSpan
from runner.trajectory import Outcome, Segment, Timings, Trajectory, Turn
from tests import sweeps
from tests.store.building import assert_equal, header, plain, played

# Half surrogate pairs, NUL and control characters are included, since tools may return any text.
texts = st.text(st.characters(), max_size=20)
names = st.text(min_size=1, max_size=8)
seconds = st.floats(0, 1e6)
counts = st.integers(0, 2**31)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | texts
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
objects = st.dictionaries(texts, values, max_size=3)


@st.composite
def token_logs(draw: st.DrawFn) -> TokenLog:
    log = TokenLog()
    ids = st.lists(st.integers(0, 2**31 - 1), max_size=12)
    for source in draw(st.lists(st.sampled_from(Source), max_size=6)):
        added = draw(ids)
        if source not in (Source.SAMPLED, Source.RETRIED):
            log.append_prompt(added, source)
            continue
        logprobs = st.lists(st.floats(-100, 0, width=32), min_size=len(added), max_size=len(added))
        log.append_sampled(added, draw(st.none() | logprobs))
        log.stamp([VersionSpan(draw(texts), 0, len(added))], len(log) - len(added))
        if source is Source.RETRIED:
            log.take_back(len(log) - len(added))
    return log


messages = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": texts})
segments = st.builds(
    Segment,
    token_logs(),
    st.lists(messages, max_size=3),
    st.sampled_from(["start", "environment"]),
    counts,
    st.lists(objects, max_size=2),
)
tool_calls = st.builds(ToolCall, texts, texts, objects, st.none() | texts)
constraints = st.builds(Constraint, st.sampled_from(ConstraintKind), st.text(max_size=20))
usages = st.builds(
    Usage,
    prompt_tokens=st.none() | counts,
    completion_tokens=st.none() | counts,
    cached_tokens=st.none() | counts,
    reasoning_tokens=st.none() | counts,
    cost=st.none() | seconds,
    model=texts,
    fingerprint=texts,
)
junctions = st.builds(
    Junction,
    *map(st.sampled_from, (Result, Anchor, Close, Seam)),
    inserted=counts,
    dropped=counts,
    cause=st.text(max_size=8),
)
tasks = st.builds(Task, names, texts | st.lists(messages, min_size=1, max_size=2) | st.just(()), texts, objects)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    parts = draw(st.lists(segments, max_size=3))
    agent = draw(names)
    return draw(
        st.builds(
            Trajectory,
            id=names,
            task=tasks,
            index=counts,
            agent=st.just(agent),
            seed=st.integers(0, 2**63 - 1),
            visit=counts,
            attempt=counts,
            trained=st.booleans(),
            segments=st.just(parts),
            turns=st.lists(turns(parts, agent), max_size=3) if parts else st.just([]),
            outcome=st.sampled_from(Outcome),
            limit=st.sampled_from(["", "turns", "max_tokens"]),
            limit_agent=texts,
            reason=texts,
            error=texts,
            reward=st.none() | st.floats(allow_nan=False),
            rewards=st.dictionaries(names, st.none() | st.floats(), max_size=3),
            metrics=st.dictionaries(names, st.floats(), max_size=3),
            seconds=seconds,
            waited=seconds,
        )
    )


@st.composite
def turns(draw: st.DrawFn, parts: list[Segment], agent: str) -> Turn:
    segment = draw(st.integers(0, len(parts) - 1))
    return draw(
        st.builds(
            Turn,
            agent=st.just(agent),
            number=counts,
            log=st.just(parts[segment].log),
            start=counts,
            end=counts,
            text=texts,
            reasoning=texts,
            tool_calls=st.lists(tool_calls, max_size=3),
            finish=st.sampled_from(FinishReason),
            stop=st.none() | st.integers(0, 2**31) | texts,
            segment=st.just(segment),
            seed=st.none() | st.integers(0, 2**63 - 1),
            constraint=st.none() | constraints,
            cached_tokens=st.none() | counts,
            junction=st.none() | junctions,
            usage=st.none() | usages,
            timings=st.builds(Timings, seconds, seconds, seconds, seconds),
            dropped=counts,
            thinking=st.booleans(),
            tool_choice=st.sampled_from(["auto", "required", "none", "add"]),
            reward=st.floats(allow_nan=False),
        )
    )


def stored(trajectory: Trajectory, path: Path) -> Trajectory:
    async def write() -> None:
        async with RunWriter(path, header()) as writer:
            await writer.commit_episode([trajectory])

    anyio.run(write)
    with RunFile(path) as run_file:
        (row,) = run_file.rows(trained=None)
        return run_file.trajectory(row)


@settings(max_examples=sweeps.times(60, 20), suppress_health_check=[HealthCheck.too_slow])
@given(trajectories())
def test_any_trajectory_read_back_equals_the_one_written(trajectory: Trajectory) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert_equal(stored(trajectory, Path(folder) / "run.db"), trajectory)


def test_a_played_trajectory_read_back_equals_the_one_written(tmp_path: Path) -> None:
    trajectory = played(turns=3)
    assert_equal(stored(trajectory, tmp_path / "run.db"), trajectory)


@given(values)
def test_json_comes_back_as_it_was(value: Any) -> None:
    assert plain(decode_json(encode_json(value))) == plain(value)


def test_arrays_are_little_endian_on_every_machine() -> None:
    assert pack(array("i", [1, -2])) == b"\x01\x00\x00\x00\xfe\xff\xff\xff"
    assert pack(array("f", [1.0])) == b"\x00\x00\x80\x3f"
    assert unpack("i", pack(array("i", [7, 2**31 - 1]))) == array("i", [7, 2**31 - 1])


def test_sources_are_grouped_into_runs_of_equal_values() -> None:
    assert list(source_spans(array("b", [0, 0, 2, 2, 2, 1, 2]))) == [(0, 2), (2, 3), (1, 1), (2, 1)]
    assert list(source_spans(array("b"))) == []
    assert list(source_spans(array("b", [10, 10]))) == [(10, 2)]  # a regular expression would read 10 as a newline


class Level(enum.Enum):
    EASY = "easy"
    HARD = "hard"


@dataclass(frozen=True)
class Part:
    name: str
    size: int


@dataclass(frozen=True)
class Case(Task):
    level: Level = Level.EASY
    parts: tuple[Part, ...] = ()
    words: frozenset[str] = frozenset()
    limits: Mapping[str, float] | None = None


def test_a_typed_task_comes_back_as_its_class() -> None:
    case = Case("c", "Hello", "1", {"a": [1]}, Level.HARD, (Part("x", 1),), frozenset({"b", "a"}), {"m": 0.5})
    assert TaskDecoder(Case)(encode_task(case)) == case


def test_without_its_class_a_task_keeps_its_fields_under_info() -> None:
    case = Case("c", "Hello", "1", {"a": [1]}, Level.HARD, (Part("x", 1),))
    task = TaskDecoder()(encode_task(case))
    assert type(task) is Task
    assert task.info == {"a": [1], "level": "hard", "parts": [{"name": "x", "size": 1}], "words": [], "limits": None}


def test_a_task_of_another_class_is_refused_by_field() -> None:
    with pytest.raises(RunFileError, match=r"task 'c'.*level"):
        TaskDecoder(Case)(encode_json({"id": "c", "prompt": [], "answer": "", "info": {}, "level": "medium"}))


def test_value_without_json_form_has_the_same_text_everywhere() -> None:
    class Thing:
        pass

    assert encode_json(Thing()) == encode_json(Thing())
    assert " at 0x" not in encode_json(Thing())


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ({2: "a", None: "b", True: 2**70}, {"2": "a", "null": "b", "true": 2**70}),
        ({(1, 2): math.inf}, {"(1, 2)": math.inf}),
        ({Level.HARD: 2**70}, {"hard": 2**70}),
        ({"when": datetime(2026, 1, 1, tzinfo=UTC), "n": 1}, {"when": "2026-01-01T00:00:00+00:00", "n": 1}),
        ({"set": {"b", "a"}, "bytes": b"x", "path": Path("a")}, {"set": ["a", "b"], "bytes": "x", "path": "a"}),
        (Part("x", 2**70), {"name": "x", "size": 2**70}),
    ],
    ids=["keys", "tuple keys", "enum keys", "datetime", "sets", "dataclass"],
)
def test_value_without_json_form_becomes_text(value: object, read: object) -> None:
    assert decode_json(encode_json(value)) == read
