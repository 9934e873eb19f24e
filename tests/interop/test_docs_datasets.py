"""The page on data sets."""

from __future__ import annotations

import re

import pytest

from runner.cli.settings import DATASET_OPTIONS
from runner.interop import ScoreName
from tests.repository import DOCS

PAGE = (DOCS / "datasets.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("number", "printed"), [(0, "0.5\n"), (1, "1.0 ")])
def test_block_of_the_page_prints_its_result(number: int, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    block = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[number]
    exec(compile(block, "datasets.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out.startswith(printed)


def test_page_names_every_score_and_every_option() -> None:
    assert [name for name in ScoreName if f"| `{name}" not in PAGE] == []
    assert [name for name in DATASET_OPTIONS if f"--{name}" not in PAGE] == []
