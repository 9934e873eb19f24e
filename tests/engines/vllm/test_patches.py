"""Table of the patches of vLLM: complete, and each with a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from runner.engines.vllm import worker

TESTS = Path(__file__).parent.parent.parent
ENTRY_POINTS = {"grammar_patch.patch_engine_core", "spin_wait_patch.patch_waiting_processes"}  # these call a patch
ROW = re.compile(r"^\| `([\w.]+)` \|.*\| `([\w/]+\.py)` \|$", re.MULTILINE)


def test_every_patch_of_vllm_is_in_the_table_with_its_test() -> None:
    rows = dict(ROW.findall(worker.__doc__ or ""))
    patches = {
        f"{path.stem}.{statement.name}"
        for path in Path(worker.__file__).parent.glob("*.py")
        for statement in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(statement, ast.FunctionDef) and statement.name.startswith("patch_")
    }
    assert rows.keys() == patches - ENTRY_POINTS
    missing = [test for test in rows.values() if not (TESTS / test).is_file()]
    assert not missing


def test_table_has_a_version_and_a_condition_for_each_patch() -> None:
    rows = [line.split("|")[1:-1] for line in (worker.__doc__ or "").splitlines() if line.startswith("| `")]
    assert rows
    assert all(len(row) == 5 and all(cell.strip() for cell in row) for row in rows)
    assert not [row for row in rows if not re.fullmatch(r" (vLLM|xgrammar) \d+(\.\d+)+ ", row[2])]
