"""The nested columns of a Parquet export, and its filters."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as parquet
import pytest
from typer.testing import CliRunner

from runner import Run, RunFile, Task
from runner.cli.app import app
from runner.errors import BadOption
from runner.quantities import counted
from runner.store.export import export_jsonl, export_parquet
from runner.store.trajectory_filter import TrajectoryFilter
from runner.testing import ScriptedEngine
from runner.trajectory import Outcome
from tests.faults.crowd import Crowd, engine
from tests.store.building import played
from tests.store.test_reader import write
from tests.verifying import play as play_wandering


def exported(run_file: Path, **options: Any) -> pa.Table:
    target = run_file.with_suffix(".parquet")
    with RunFile(run_file) as opened:
        export_parquet(opened, target, **options)
    return parquet.read_table(target)


def as_given(value: Any) -> Any:
    """Return messages as they were before they became rows of structs."""
    if isinstance(value, list):
        return [as_given(each) for each in value]
    made = {name: each for name, each in value.items() if each is not None and name != "extra"}
    for call in made.get("tool_calls", ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return made | json.loads(value["extra"] or "{}")


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of groups of four episodes with two trained agents, tools, metrics and group rewards."""
    path = tmp_path_factory.mktemp("crowd") / "run.db"

    async def play() -> None:
        async with Run(Crowd(3), engine(), group_size=4, file=path) as run:
            async for _ in run:
                pass

    anyio.run(play)
    return path


@pytest.fixture(scope="module")
def wandering(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of episodes with calls, unreadable calls, thoughts, and several segments."""
    path = tmp_path_factory.mktemp("wandering") / "run.db"
    anyio.run(play_wandering, path, "pythonic")
    return path


def test_messages_come_back_whole_from_lists_of_structs(wandering: Path, crowd: Path) -> None:
    for path in (wandering, crowd):
        rows = exported(path).to_pylist()
        with RunFile(path) as run_file:
            for row, trajectory in zip(rows, run_file.trajectories(), strict=True):
                assert as_given(row["messages"]) == trajectory.messages
                assert as_given(row["earlier_messages"]) == [each.messages for each in trajectory.segments[:-1]]
                assert json.loads(row["tools"] or "[]") == list(trajectory.segments[-1].tools)
    types = exported(wandering).schema
    assert types.field("messages").type.value_type.field("role").type == pa.string()
    call = types.field("messages").type.value_type.field("tool_calls").type.value_type
    assert [field.name for field in call] == ["id", "type", "function"]
    assert any(row["earlier_messages"] for row in exported(wandering).to_pylist())


def test_scores_are_structs_with_a_field_for_each_name(crowd: Path) -> None:
    table = exported(crowd)
    assert [field.name for field in table.schema.field("rewards").type] == ["luck", "rank", "wrote"]
    assert [field.name for field in table.schema.field("metrics").type] == ["length"]
    flat = table.flatten()
    assert {"rewards.luck", "metrics.length"} <= set(flat.column_names)
    with RunFile(crowd) as run_file:
        rows = list(run_file)
    assert table.column("rewards").to_pylist() == [dict(sorted(row.rewards.items())) for row in rows]
    assert compute.mean(flat.column("metrics.length")).as_py() == pytest.approx(
        math.fsum(row.metrics["length"] for row in rows) / len(rows)
    )


def test_sampling_is_a_list_of_structs(crowd: Path) -> None:
    rows: list[Any] = exported(crowd).column("sampling").to_pylist()
    with RunFile(crowd) as run_file:
        for row, trajectory in zip(rows, run_file.trajectories(), strict=True):
            assert len(row) == len(trajectory.turns)
            for one, turn in zip(row, trajectory.turns, strict=True):
                assert turn.sampling is not None
                assert one["temperature"] == turn.sampling.temperature
                assert one["max_tokens"] == turn.sampling.max_tokens
                assert one["stop"] == list(turn.sampling.stop)


@dataclass(frozen=True)
class Case(Task):
    level: int = 0


def test_task_is_a_struct_whose_free_fields_are_json(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    case = Case("a", prompt=[system, {"role": "user", "content": "Hi"}], answer="4", info={"n": [1]}, level=3)  # type: ignore[list-item]  # a message
    path = tmp_path / "run.db"
    write(path, [played(case)], [played(Task("b", "Hello"))])
    exported_tasks: list[Any] = exported(path).column("task").to_pylist()
    assert [as_given(task["prompt"]) for task in exported_tasks] == [
        list(case.prompt),
        [{"role": "user", "content": "Hello"}],
    ]
    assert (exported_tasks[0]["id"], exported_tasks[0]["answer"]) == ("a", "4")
    assert [json.loads(task["info"]) for task in exported_tasks] == [{"n": [1], "level": 3}, {}]


def test_texts_that_arrow_cannot_hold_are_written_all_the_same(tmp_path: Path) -> None:
    odd = played(Task("a", "half \ud83d of it", info={"half": "\ud83d", "nan": math.nan, "large": 2**80}))
    odd.segments[0].messages.append({"role": "user", "content": "half \ud83d of it"})
    odd.metrics = {"nan": math.nan}
    path = tmp_path / "run.db"
    write(path, [odd])
    (row,) = exported(path).to_pylist()
    assert row["messages"][-1]["content"] == row["task"]["prompt"][0]["content"] == "half \ufffd of it"
    assert json.loads(row["task"]["info"]) == {"half": "\ud83d", "nan": None, "large": 2**80}
    assert math.isnan(row["metrics"]["nan"])


def test_message_keys_beyond_openais_are_in_extra(tmp_path: Path) -> None:
    trajectory = played()
    message: Any = {"role": "user", "content": "x", "seen": [1, {"a": None}], "name": 5}
    trajectory.segments[0].messages.append(message)
    path = tmp_path / "run.db"
    write(path, [trajectory])
    (row,) = exported(path).to_pylist()
    assert as_given(row["messages"][-1]) == message


def test_columns_without_any_value_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    write(path, [played(outcome=Outcome.ENV_ERROR, turns=0)])
    (row,) = exported(path).to_pylist()
    assert (row["rewards"], row["metrics"], row["tools"], row["sampling"]) == (None, None, None, [])
    write(tmp_path / "empty.db")
    assert exported(tmp_path / "empty.db").num_rows == 0


# --- filters


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    path = tmp_path / "run.db"
    write(
        path,
        [played("a", reward=0.0), played("a", agent="black", reward=1.0), played("a", agent="user", trained=False)],
        [played("a", index=1, reward=0.5, outcome=Outcome.TURN_LIMIT)],
        [played("b", outcome=Outcome.ENV_ERROR)],
        [played("c's", reward=-1.0), played("c's", agent="black", reward=2.0)],
    )
    return path


CHOICES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({}, [], ["a-0-0/main", "a-0-0/black", "a-0-1/main", "b-0-0/main", "c's-0-0/main", "c's-0-0/black"]),
    ({"outcomes": ["turn_limit"]}, ["--outcome", "turn_limit"], ["a-0-1/main"]),
    (
        {"outcomes": ["turn_limit", "env_error"]},
        ["--outcome", "turn_limit", "--outcome", "env_error"],
        ["a-0-1/main", "b-0-0/main"],
    ),
    ({"agents": ["black"]}, ["--agent", "black"], ["a-0-0/black", "c's-0-0/black"]),
    ({"min_reward": 0.5}, ["--min-reward", "0.5"], ["a-0-0/black", "a-0-1/main", "c's-0-0/black"]),
    ({"min_reward": 0}, ["--min-reward", "0"], ["a-0-0/main", "a-0-0/black", "a-0-1/main", "c's-0-0/black"]),
    ({"tasks": ["c's"]}, ["--task", "c's"], ["c's-0-0/main", "c's-0-0/black"]),
    ({"most": 2}, ["-n", "2"], ["a-0-0/main", "a-0-0/black"]),
    (
        {"agents": ["main"], "outcomes": ["completed"], "min_reward": -1, "most": 5},
        ["--agent", "main", "--outcome", "completed", "--min-reward", "-1", "-n", "5"],
        ["a-0-0/main", "c's-0-0/main"],
    ),
    ({"min_reward": 9}, ["--min-reward", "9"], []),
]


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize(("chosen", "options", "expected"), CHOICES, ids=lambda value: str(value)[:40])
def test_filters_choose_the_same_in_every_form(
    mixed: Path, chosen: dict[str, Any], options: list[str], expected: list[str]
) -> None:
    table = exported(mixed, chosen=TrajectoryFilter(**chosen)).to_pylist()
    assert [f"{row['id']}/{row['agent']}" for row in table] == expected
    lines = mixed.with_suffix(".jsonl")
    with RunFile(mixed) as run_file:
        assert export_jsonl(run_file, lines, chosen=TrajectoryFilter(**chosen)) == len(expected)
    assert [f"{row['id']}/{row['agent']}" for row in map(json.loads, lines.read_text().splitlines())] == expected
    for form in ("jsonl", "parquet"):
        target = mixed.with_name(f"by-command.{form}")
        done = CliRunner().invoke(app, ["export", str(mixed), "--format", form, "-o", str(target), *options])
        assert (done.exit_code, counted(len(expected), "trajectory") in done.output) == (0, True), done.output
    assert parquet.read_table(target).column("id").to_pylist() == [each.partition("/")[0] for each in expected]
    assert target.with_suffix(".jsonl").read_text() == lines.read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--outcome", "complete"], "it does not exist; outcomes are completed, turn_limit"),
        (["--agent", "user"], "no trained trajectory has the agent 'user'; agents are 'main', 'black'"),
        (["--agent", "unknown"], "no trained trajectory has the agent 'unknown'"),
        (["--task", "d"], "no trained trajectory has the task 'd'; tasks are 'a', 'b'"),
        (["--min-reward", "nan"], "give a finite number"),
    ],
)
def test_invalid_filter_is_refused_by_name(mixed: Path, options: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["export", str(mixed), *options], env={"COLUMNS": "300"})
    assert (done.exit_code, said in done.output) == (2, True), done.output
    assert not mixed.with_suffix(".jsonl").exists()


def test_most_of_none_is_refused() -> None:
    with pytest.raises(BadOption, match="at least 1"):
        TrajectoryFilter(most=0)


def test_rewards_that_are_none_stay_none_in_their_struct(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    first, second = played("a"), played("b")
    first.rewards, second.rewards = {"correct": None, "style": 0.5}, {"correct": 1.0}
    write(path, [first], [second])
    assert exported(path).column("rewards").to_pylist() == [
        {"correct": None, "style": 0.5},
        {"correct": 1.0, "style": None},
    ]


def test_scripted_engine_is_named_in_the_metadata(crowd: Path) -> None:
    header = json.loads(exported(crowd).schema.metadata[b"deltarunner.header"])
    assert (header["group_size"], header["engine"]["kind"]) == (4, ScriptedEngine("x").describe()["kind"])
