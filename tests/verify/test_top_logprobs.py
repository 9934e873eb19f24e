"""Changes of most likely ids and side data in a run file are found."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import anyio
import pytest

from runner import Run, Sampling
from runner.testing import ScriptedEngine
from tests.histories import Twice
from tests.verifying import change, verdict


async def play(path: Path) -> None:
    async with Run(Twice, ScriptedEngine(["abc", "def"]), file=path, sampling=Sampling(logprobs=2)) as run:
        async for _trajectory in run:
            pass


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("most likely") / "run.db"
    anyio.run(play, path)
    return path


@pytest.fixture
def path(played: Path, tmp_path: Path) -> Path:
    """A copy of the file, which a test may change."""
    return Path(shutil.copy(played, tmp_path / "run.db"))


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def test_the_file_that_is_changed_below_is_as_its_run_left_it(path: Path) -> None:
    assert (verdict(path)["verified"], verdict(path)["differing"]) == (1, 0)


FIRST = "position = 0"
CHANGES = {
    "not sorted": (f"UPDATE top_logprobs SET logprobs = ? WHERE {FIRST}", floats(*[-2.0, -1.0] * 4), "contradict"),
    "more than 1 together": (f"UPDATE top_logprobs SET logprobs = ? WHERE {FIRST}", floats(*[-0.1] * 8), "contradict"),
    "no number": (f"UPDATE top_logprobs SET logprobs = ? WHERE {FIRST}", floats(*[float("nan")] * 8), "contradict"),
    "another value of the sampled id": (
        f"UPDATE top_logprobs SET ids = ?, logprobs = x'{floats(*[-8.0, -9.0] * 4).hex()}' WHERE {FIRST}",
        struct.pack("<8i", *[value for letter in (97, 98, 99, 257) for value in (letter, 5)]),
        "contradict",
    ),
    "gone": (f"DELETE FROM top_logprobs WHERE {FIRST} AND ? = ''", "", "differs from the requested number"),
    "cut short": (f"UPDATE top_logprobs SET logprobs = ? WHERE {FIRST}", b"", "are damaged"),
    "of another number": ("UPDATE top_logprobs SET count = ?", 4, "are damaged"),
    "of no turn": (
        "INSERT INTO top_logprobs SELECT episode, position + ?, count, ids, logprobs FROM top_logprobs",
        70,
        "most likely ids that belong to no turn",
    ),
    "of a turn that asked for none": (
        "UPDATE samplings SET sampling = json_set(sampling, '$.logprobs', ?)",
        0,
        "options request none, or another number",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_of_top_logprobs_is_found(path: Path, name: str) -> None:
    statement, value, said = CHANGES[name]
    change(path, statement, value)
    report = verdict(path)
    assert said in report["difference"]["explanation"]


def test_a_turn_that_ended_before_its_least_length_is_found(path: Path) -> None:
    change(path, "UPDATE samplings SET sampling = json_set(sampling, '$.min_tokens', ?)", 50)
    assert "before it had min_tokens ids" in verdict(path)["difference"]["explanation"]


def test_a_turn_that_was_ended_by_the_eos_that_it_ignores_is_found(path: Path) -> None:
    change(path, "UPDATE samplings SET sampling = json_set(sampling, '$.ignore_eos', json('true')) WHERE ? = 0", 0)
    assert "stop is not among the requested stops" in verdict(path)["difference"]["explanation"]


# --- sampling masks and routed experts


async def play_masked(path: Path) -> None:
    engine = ScriptedEngine(["abc", "def"], sampling_masks=True, routed_experts=(1, 2))
    async with Run(Twice, engine, file=path, sampling=Sampling(top_p=0.9)) as run:
        async for _trajectory in run:
            pass


@pytest.fixture
def masked(tmp_path: Path) -> Path:
    path = tmp_path / "masked.db"
    anyio.run(play_masked, path)
    return path


SIDE_CHANGES = {
    "other masks": (f"UPDATE side_data SET mask_ids = ? WHERE {FIRST}", struct.pack("<16i", *[5] * 16), "is not among"),
    "masks cut short": (f"UPDATE side_data SET mask_ids = ? WHERE {FIRST}", b"", "are damaged"),
    "experts cut short": (f"UPDATE side_data SET experts = ? WHERE {FIRST}", b"abc", "are damaged"),
    "of no turn": (
        "INSERT INTO side_data SELECT episode, position + ?, mask_counts, mask_ids, first, layers, top, experts "
        "FROM side_data",
        70,
        "side data that belong to no turn",
    ),
}


def test_side_data_as_the_run_left_it_is_verified(masked: Path) -> None:
    assert (verdict(masked)["verified"], verdict(masked)["differing"]) == (1, 0)


@pytest.mark.parametrize("name", SIDE_CHANGES)
def test_changed_side_data_is_found(masked: Path, name: str) -> None:
    statement, value, said = SIDE_CHANGES[name]
    change(masked, statement, value)
    assert said in verdict(masked)["difference"]["explanation"]
