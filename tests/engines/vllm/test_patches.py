"""Table of the patches of vLLM: complete, and each with a test."""

from __future__ import annotations

import re
from pathlib import Path

from runner.engines.vllm import worker

TESTS = Path(__file__).parent.parent.parent
ROW = re.compile(r"^\| `(\w+_patch)` \|.*\| `([\w/]+\.py)` \|$", re.MULTILINE)


def test_every_patch_of_vllm_is_in_the_table_with_its_test() -> None:
    rows = dict(ROW.findall(worker.__doc__ or ""))
    modules = {path.stem for path in Path(worker.__file__).parent.glob("*_patch.py")}
    assert rows.keys() == modules
    missing = [test for test in rows.values() if not (TESTS / test).is_file()]
    assert not missing


def test_table_has_a_condition_for_the_removal_of_each_patch() -> None:
    rows = [line.split("|")[1:-1] for line in (worker.__doc__ or "").splitlines() if line.startswith("| `")]
    assert rows
    assert all(len(row) == 4 and all(cell.strip() for cell in row) for row in rows)
