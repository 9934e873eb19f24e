"""trackio and Weights & Biases, with the real packages and without a network: their records of a run."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from runner import Conversation, Run
from runner.trainers.observers import TrackioObserver, WandbObserver
from tests.playing import Plain, recording, tasks, twice

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of these packages


async def observed(observer: Any) -> list[str]:
    engine, updated = recording("Yes"), anyio.Event()

    class UpdatedAfterTheFirst(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            if self.task.id != tasks(1)[0].id:
                await updated.wait()
            await twice(conversation)

    async with Run(UpdatedAfterTheFirst, engine, tasks=tasks(3), group_size=2, observers=[observer]) as run:
        await anext(run)
        await engine.update_weights({})
        updated.set()
        async for _ in run:
            pass
    return list(run.summary.faults)


@pytest.mark.package("trackio")
async def test_trackio_has_a_row_for_each_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    observer = TrackioObserver("sums", name="one")
    assert await observed(observer) == []
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("sums", "one")
    assert len(rows) == 3
    assert [row["reward"] for row in rows] == [1.0] * 3
    assert [row["turns"] for row in rows] == [2.0] * 3
    assert (rows[-1]["episodes"], rows[-1]["outcomes/completed"], rows[-1]["weight_updates"]) == (6, 6, 1)


def records(data: bytes) -> Iterator[bytes]:
    """The records of wandb's file, in LevelDB's log format after a header of seven bytes."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block is too short for a record's header
            at += 32768 - at % 32768
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts, at = parts + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield parts
            parts = b""


def kept_in(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of the history and the summary in wandb's file."""
    from wandb.proto import wandb_internal_pb2

    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.history.item:
            rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item})
        summary |= {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.summary.update}
    return rows, summary


@pytest.mark.package("wandb")
async def test_wandb_has_rows_and_the_summary_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    observer = WandbObserver(mode="offline", dir=str(tmp_path), project="sums")
    assert await observed(observer) == []
    import wandb

    (path,) = Path(tmp_path).rglob("*.wandb")  # noqa: ASYNC240  # no other task waits
    rows, summary = kept_in(path)
    with anyio.fail_after(60):
        while "episodes" not in summary:  # a process of wandb writes the file
            await anyio.sleep(0.05)
            rows, summary = kept_in(path)
    assert wandb.run is None
    assert [row["reward"] for row in rows] == [1.0] * 3
    assert (rows[-1]["episodes"], rows[-1]["weight_updates"]) == (6, 1)
    assert summary["episodes"] == 6
