"""docs/run-file.md says what is true: its queries run, its tables and columns are those of the file."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from runner.store.export import PARQUET_COLUMNS
from runner.store.reader import RunFile
from runner.trajectory import Outcome
from tests.repository import DOCS
from tests.store.building import played
from tests.store.test_reader import write

PAGE = DOCS / "run-file.md"
QUERIES = [
    query.strip()
    for block in re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for query in block.split(";")
    if query.strip()
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.db"
    write(path, [played("a")], [played("b", reward=0.0)], [played("c", outcome=Outcome.ENV_ERROR)])
    return path


@pytest.fixture
def connection(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        yield connection


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_of_the_page_answers(query: str, connection: sqlite3.Connection) -> None:
    assert connection.execute(query).fetchall()


def test_the_answers_are_right(connection: sqlite3.Connection) -> None:
    answers = {query.split()[1]: connection.execute(query).fetchall() for query in QUERIES}
    assert answers["outcome,"] == [("completed", 2, 0.5, 2.0, 16), ("env_error", 1, None, 2.0, 8)]
    assert answers["task_id,"] == [("b", 1, 0.0), ("a", 1, 1.0)]
    assert answers["avg(json_extract(rewards,"] == [(0.5,)]
    assert answers["junction_result,"] == [("appended", "special", 3)]
    assert answers["json_extract(call.value,"] == [("add", 6, 0)]


def test_every_column_is_on_the_page(connection: sqlite3.Connection) -> None:
    words = set(re.findall(r"\w+", PAGE.read_text()))
    for table in ("run", "episodes", "tasks", "segments"):
        columns = {name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")}
        assert columns - words <= {"one", "class", "task", "group_scored"}, table
    assert set(PARQUET_COLUMNS) <= words


def test_the_first_example_of_the_page_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert example is not None
    code = example[1].replace("from runner import RunFile\n", "").replace("runs/calculator-001.db", str(path))
    exec(code, {"RunFile": RunFile})
    assert "a-0-0 a completed 1.0 2 8" in capsys.readouterr().out
