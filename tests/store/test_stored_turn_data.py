"""Top log-probabilities and side data in a run file: read back exactly, loaded only on use, and exported."""

from __future__ import annotations

import io
import json
import sqlite3
from array import array
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from runner import RunFileError, Sampling
from runner.store import stored_turn_data
from runner.store.database import open_reader
from runner.store.export import export_jsonl, export_parquet
from runner.store.reader import RunFile
from runner.testing import ScriptedEngine
from runner.tokens.side_data import RoutedExperts, SamplingMasks, SideData
from runner.tokens.top_logprobs import TopLogprobs
from runner.trajectory import Trajectory
from tests.playing import Plain, play
from tests.store.building import played
from tests.store.test_reader import write

INFINITE = float("inf")


def asked(*counts: int) -> Trajectory:
    """Return an episode whose turns requested this number of most likely ids for each of their 4 ids."""
    trajectory = played("asked", turns=len(counts))
    for turn, count in zip(trajectory.turns, counts, strict=True):
        turn.sampling = Sampling(logprobs=count, logit_bias={7: 0.5}, bad_words=("moon",)).over(Sampling.defaults())
        if count:
            ids = array("i", range(4 * count))
            logprobs = array("f", [-0.5 * number - 0.5 for number in range(4 * count - 1)] + [-INFINITE])
            turn.log.append_top(turn.start, TopLogprobs(count, ids, logprobs))
    return trajectory


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.db"
    write(path, [asked(2, 0, 3)])
    return path


def read(path: Path) -> Trajectory:
    with RunFile(path) as run_file:
        (trajectory,) = run_file.trajectories()
    return trajectory


def test_top_logprobs_come_back_unchanged(path: Path) -> None:
    written = asked(2, 0, 3)
    for before, after in zip(written.turns, read(path).turns, strict=True):
        assert after.top_ids.shape == before.top_ids.shape
        assert after.top_ids.tobytes() == before.top_ids.tobytes()
        assert after.top_logprobs.tobytes() == before.top_logprobs.tobytes()
        assert after.sampling == before.sampling  # its biases again have integer keys
    assert read(path).segments[0].log.top_logprobs == written.segments[0].log.top_logprobs


def test_top_logprobs_are_read_on_first_use(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []

    def counted(path: Path) -> sqlite3.Connection:
        opened.append(path)
        return open_reader(path)

    monkeypatch.setattr(stored_turn_data, "open_reader", counted)
    trajectory = read(path)
    assert len(trajectory.turns[0].logprobs) == 4
    assert opened == []
    for turn in trajectory.turns:
        assert turn.top_ids.shape[0] == 4
    assert opened == [path]  # opened once for all turns of the segment


def test_run_file_deleted_after_the_read_is_named(path: Path) -> None:
    trajectory = read(path)
    path.unlink()
    with pytest.raises(RunFileError, match=r"the run file .*run\.db does not exist"):
        _ = trajectory.turns[0].top_ids


def test_damage_is_named(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE top_logprobs SET logprobs = x'00000000'")
    with pytest.raises(
        RunFileError, match=r"top log-probabilities of a turn are damaged: 32 and 4 bytes for 4 positions of 2"
    ):
        _ = read(path).turns[0].top_ids


def test_run_without_likeliest_ids_stores_none(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    write(path, [played("plain")])
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM top_logprobs").fetchone() == (0,)
    assert read(path).segments[0].log.top_logprobs == {}


def test_jsonl_has_the_likeliest_ids_of_each_turn(path: Path) -> None:
    stream = io.BytesIO()
    with RunFile(path) as run_file:
        export_jsonl(run_file, stream)
    first, second, third = json.loads(stream.getvalue())["turns"]
    assert first["top_ids"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert first["top_logprobs"] == [[-0.5, -1.0], [-1.5, -2.0], [-2.5, -3.0], [-3.5, None]]
    assert (second["top_ids"], second["top_logprobs"]) == (None, None)
    assert [len(row) for row in third["top_logprobs"]] == [3] * 4


def test_parquet_has_a_list_of_likeliest_ids_for_each_id(path: Path, tmp_path: Path) -> None:
    with RunFile(path) as run_file:
        export_parquet(run_file, tmp_path / "out.parquet")
    (row,) = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    ids: list[Any] = row["top_ids"][0]
    logprobs = row["top_logprobs"][0]
    assert len(ids) == len(logprobs) == len(row["token_ids"][0]) == 36
    assert ids[:8] == [None] * 8
    assert ids[8:12] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert logprobs[11] == [-3.5, -INFINITE]
    assert ids[12:32] == [None] * 20  # the second turn lies in this range
    assert [len(each) for each in ids[32:]] == [3] * 4


def test_exports_have_how_each_turn_was_sampled(path: Path, tmp_path: Path) -> None:
    stream = io.BytesIO()
    with RunFile(path) as run_file:
        export_jsonl(run_file, stream)
        export_parquet(run_file, tmp_path / "out.parquet")
    exported = [turn["sampling"] for turn in json.loads(stream.getvalue())["turns"]]
    (row,) = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    for sampling, each in zip(row["sampling"], exported, strict=True):
        assert json.loads(sampling.pop("logit_bias")) == each["logit_bias"]
        given = {name: value for name, value in sampling.items() if value is not None}
        assert given == {name: value for name, value in each.items() if name != "logit_bias" and value is not None}
    assert [each["logprobs"] for each in exported] == [2, 0, 3]
    for each in exported:
        assert (each["logit_bias"], each["bad_words"]) == ({"7": 0.5}, ["moon"])
        assert each.keys() >= {
            "min_tokens",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "ignore_eos",
        }


@pytest.mark.anyio
async def test_recorded_run_replays_its_top_logprobs(tmp_path: Path) -> None:
    path, sampling = tmp_path / "run.db", Sampling(logprobs=3)
    before = await play(Plain, ScriptedEngine("Yes", seed=1, record=True), file=path, sampling=sampling)
    again = await play(Plain, ScriptedEngine(path, seed=2, record=True), sampling=sampling)
    assert again.turns[0].top_ids.tolist() == before.turns[0].top_ids.tolist()
    assert again.turns[0].top_logprobs.tolist() == before.turns[0].top_logprobs.tolist()
    fewer = await play(Plain, ScriptedEngine(path, seed=2, record=True), sampling=Sampling(logprobs=2))
    assert fewer.turns[0].top_ids.tolist() == before.turns[0].top_ids[:, :2].tolist()


# --- sampling masks and routed experts


def with_side_data() -> Trajectory:
    """Return an episode of three turns of 4 ids: the first has both kinds, the second none, the third only masks."""
    trajectory = played("side", turns=3)
    first, _, third = trajectory.turns
    rows = [[token_id, token_id + 1][: 1 + place % 2] for place, token_id in enumerate(first.token_ids)]
    experts = RoutedExperts(0, 2, 3, array("h", range(6 * (first.end - 1))))
    first.log.append_side(first.start, SideData(SamplingMasks.of(rows), experts))
    third.log.append_side(third.start, SideData(SamplingMasks.of([[token_id] for token_id in third.token_ids])))
    return trajectory


@pytest.fixture
def side_path(tmp_path: Path) -> Path:
    path = tmp_path / "run.db"
    write(path, [with_side_data(), played("plain")])
    return path


def read_first(path: Path) -> Trajectory:
    with RunFile(path) as run_file:
        return next(iter(run_file.trajectories()))


def test_side_data_comes_back_unchanged(side_path: Path) -> None:
    written = with_side_data()
    for before, after in zip(written.turns, read_first(side_path).turns, strict=True):
        assert after.sampling_masks == before.sampling_masks
        assert after.routed_experts == before.routed_experts
    with RunFile(side_path) as run_file:
        _, plain = run_file.trajectories()
    assert plain.segments[0].log.side_data == {}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("mask_counts = x'00000000'", "4 bytes of counts and 24 of ids for 4 positions"),
        ("mask_ids = x'00000000'", "16 bytes of counts and 4 of ids for 4 positions"),
        ("experts = x'0000'", "2 bytes of experts from position 0, in 2 layers of 3"),
        ("layers = 0", "in 0 layers of 3"),
        ("first = 900", "of experts from position 900"),
    ],
)
def test_damaged_side_data_is_named(side_path: Path, change: str, fault: str) -> None:
    with closing(sqlite3.connect(side_path)) as connection, connection:
        connection.execute(f"UPDATE side_data SET {change} WHERE position = 0")
    with pytest.raises(RunFileError, match=f"sampling masks or routed experts of a turn are damaged: .*{fault}"):
        _ = read_first(side_path).turns[0].sampling_masks


def test_exports_have_side_data_for_each_id(side_path: Path, tmp_path: Path) -> None:
    stream = io.BytesIO()
    with RunFile(side_path) as run_file:
        export_jsonl(run_file, stream)
        export_parquet(run_file, tmp_path / "out.parquet")
    first, second, third = json.loads(stream.getvalue().splitlines()[0])["turns"]
    (turn, _, last) = with_side_data().turns
    assert turn.sampling_masks is not None
    assert turn.routed_experts is not None
    assert last.sampling_masks is not None
    assert first["sampling_masks"] == turn.sampling_masks.rows()
    assert first["routed_experts"] == {"first": 0, "experts": turn.routed_experts.numbers().tolist()}
    assert (second["sampling_masks"], third["routed_experts"]) == (None, None)
    row, plain = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    masks = row["sampling_masks"][0]
    assert masks[turn.start : turn.end] == turn.sampling_masks.rows()
    assert masks[: turn.start] == [None] * turn.start
    assert masks[last.start : last.end] == last.sampling_masks.rows()
    experts = row["routed_experts"][0]
    assert experts[: turn.end - 1] == turn.routed_experts.numbers().reshape(turn.end - 1, 6).tolist()
    assert set(map(str, experts[turn.end - 1 :])) == {"None"}
    assert {str(each) for each in plain["sampling_masks"][0]} == {"None"}
