"""Exports: their contents, and no partial files."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from runner.errors import BadOption, StorageFailed
from runner.store import export
from runner.store.export import PARQUET_COLUMNS, export_jsonl, export_parquet
from runner.store.reader import RunFile
from runner.store.trajectory_filter import TrajectoryFilter
from runner.tasks import Task
from runner.tokens.log import Source
from runner.trajectory import Outcome, Segment, Trajectory
from tests.store.building import played
from tests.store.test_reader import write


def given(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of a Parquet file without the keys that it does not have."""
    return {name: value for name, value in message.items() if value is not None}


def forked() -> Trajectory:
    trajectory = played("forked")
    log = Segment(cause="environment").log
    log.append_prompt([1, 2], Source.PROMPT)
    log.append_sampled([3], None)
    trajectory.segments.append(Segment(log=log, cause="environment"))
    return trajectory


@pytest.fixture
def run_file(tmp_path: Path) -> Iterator[RunFile]:
    path = tmp_path / "run.db"
    write(
        path,
        [played("right"), played("right", agent="user", trained=False)],
        [played("failed", outcome=Outcome.ENV_ERROR)],
        [played("silent", turns=0, outcome=Outcome.TIME_LIMIT, reward=None)],
        [forked()],
    )
    with RunFile(path) as opened:
        yield opened


def test_jsonl_has_a_line_for_each_trajectory_that_one_trains_on(run_file: RunFile, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    assert export_jsonl(run_file, target) == 4
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["task"]["id"] for line in lines] == ["right", "failed", "silent", "forked"]
    assert [line["reward"] for line in lines] == [1.0, None, None, 1.0]
    for line, trajectory in zip(lines, run_file.trajectories(), strict=True):
        for segment, original in zip(line["segments"], trajectory.segments, strict=True):
            assert segment["token_ids"] == original.log.ids.tolist()
            assert segment["mask"] == original.log.mask().tolist()
            assert segment["messages"] == original.messages


def test_jsonl_logprobs_are_null_for_ids_not_sampled(run_file: RunFile) -> None:
    stream = io.BytesIO()
    export_jsonl(run_file, stream)
    first, *_, last = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert first["segments"][0]["logprobs"][:12] == [None] * 8 + [-0.5, -0.25, -1.0, -0.125]
    assert last["segments"][1]["logprobs"] == [None, None, None]  # the engine has no log-probabilities


def test_parquet_has_a_row_per_trained_trajectory(run_file: RunFile, tmp_path: Path) -> None:
    target = tmp_path / "out.parquet"
    assert export_parquet(run_file, target) == 4
    rows = parquet.read_table(target).to_pylist()
    assert tuple(rows[0]) == PARQUET_COLUMNS
    assert [row["reward"] for row in rows] == [1.0, None, None, 1.0]
    for row, trajectory in zip(rows, run_file.trajectories(), strict=True):
        assert row["token_ids"] == [segment.log.ids.tolist() for segment in trajectory.segments]
        assert row["mask"] == [segment.log.mask().tolist() for segment in trajectory.segments]
        message_lists = [*row["earlier_messages"], row["messages"]]
        assert [[given(message) for message in one] for one in message_lists] == [
            each.messages for each in trajectory.segments
        ]
    assert rows[0]["logprobs"][0][:12] == [None] * 8 + [-0.5, -0.25, -1.0, -0.125]
    assert rows[0]["weight_versions"][0][:12] == [None] * 8 + ["v1"] * 4
    assert rows[2]["token_ids"] == [[]]
    assert rows[3]["token_ids"][1] == [1, 2, 3]


def test_parquet_keeps_the_header(run_file: RunFile, tmp_path: Path) -> None:
    export_parquet(run_file, tmp_path / "out.parquet")
    metadata = parquet.read_schema(tmp_path / "out.parquet").metadata
    assert metadata[b"deltarunner.header"].decode() == run_file.header.to_json()


def test_parquet_row_groups_have_a_bounded_size(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "MAX_ROW_GROUP_TOKENS", 40)
    export_parquet(run_file, tmp_path / "out.parquet")
    metadata = parquet.read_metadata(tmp_path / "out.parquet")
    assert [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)] == [2, 2]
    assert [row["task_id"] for row in parquet.read_table(tmp_path / "out.parquet").to_pylist()] == [
        "right",
        "failed",
        "silent",
        "forked",
    ]


def test_parquet_columns_can_be_chosen_and_unknown_are_refused(run_file: RunFile, tmp_path: Path) -> None:
    export_parquet(run_file, tmp_path / "out.parquet", columns=["token_ids", "reward"])
    assert parquet.read_schema(tmp_path / "out.parquet").names == ["token_ids", "reward"]
    with pytest.raises(BadOption, match="unknown tokens; the columns are id, "):
        export_parquet(run_file, tmp_path / "out.parquet", columns=["tokens"])


@pytest.mark.parametrize("exporter", [export_jsonl, export_parquet], ids=["jsonl", "parquet"])
def test_an_empty_run_makes_an_empty_export(exporter: export.Exporter, tmp_path: Path) -> None:
    write(tmp_path / "run.db")
    with RunFile(tmp_path / "run.db") as run_file:
        assert exporter(run_file, tmp_path / "out") == 0
    assert (tmp_path / "out").is_file()


@pytest.mark.parametrize("exporter", [export_jsonl, export_parquet], ids=["jsonl", "parquet"])
def test_failed_export_leaves_the_older_file(
    exporter: export.Exporter, run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    target.write_text("an older export")
    good = next(run_file.trajectories())

    def cut(self: RunFile, chosen: TrajectoryFilter) -> Iterator[Trajectory]:
        yield good
        raise StorageFailed("the file is damaged")

    monkeypatch.setattr(RunFile, "trajectories", cut)
    with pytest.raises(StorageFailed, match="damaged"):
        exporter(run_file, target)
    assert target.read_text() == "an older export"
    assert not list(tmp_path.glob(".*partial"))


@pytest.mark.parametrize("exporter", [export_jsonl, export_parquet], ids=["jsonl", "parquet"])
def test_a_target_that_cannot_be_written_is_named(exporter: export.Exporter, run_file: RunFile, tmp_path: Path) -> None:
    for target in (tmp_path / "no" / "folder" / "out", Path("/proc/out"), tmp_path, Path("/dev/full")):
        with pytest.raises(StorageFailed, match=str(target)):
            exporter(run_file, target)


def test_jsonl_is_standard_json_whatever_an_author_returns(tmp_path: Path) -> None:
    odd = played("odd")
    odd.metrics = {"ratio": float("nan"), "huge": float("inf")}
    odder = played(Task("odder", info={"large": 2**70, "half": "\ud83d", "ratio": float("nan")}))
    write(tmp_path / "run.db", [odd], [odder])

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    with RunFile(tmp_path / "run.db") as run_file:
        export_jsonl(run_file, tmp_path / "out.jsonl")
    first, second = (
        json.loads(line, parse_constant=refuse) for line in (tmp_path / "out.jsonl").read_text().splitlines()
    )
    assert first["metrics"] == {"ratio": None, "huge": None}
    assert second["task"]["info"] == {"large": 2**70, "half": "\ud83d", "ratio": None}
