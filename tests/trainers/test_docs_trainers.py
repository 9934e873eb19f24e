"""The page about trainers: its code runs."""

from __future__ import annotations

import re

from tests.repository import ROOT

PAGE = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
BLOCKS: list[str] = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


def test_code_of_the_page_runs_where_no_trainer_is_needed() -> None:
    players, rows, trl, observers = BLOCKS
    names: dict[str, object] = {}
    exec(players, names)
    exec(rows, names)
    exec(observers, names)
    compile(trl, "trainers.md", "exec")


def test_script_beside_the_environment_is_short() -> None:
    code = [line for line in BLOCKS[2].splitlines() if line.strip() and not re.match(r"from|import", line)]
    assert len(code) <= 15
