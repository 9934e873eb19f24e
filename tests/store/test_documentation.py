"""docs/run-file.md is correct: its queries run, and its tables and columns match the file.

`python -m tests.store.test_documentation` writes the tables of the page again.
"""

from __future__ import annotations

import dataclasses
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from runner.engines.message_engine import Usage
from runner.store.columns import Column, Table
from runner.store.export import PARQUET_COLUMNS
from runner.store.reader import EpisodeRow, RunFile
from runner.store.schema import EPISODES, JUNCTION, SEGMENT, TABLES, TIMINGS, TRAJECTORY, TURN, USAGE
from runner.tokens.junction import Junction
from runner.trajectory import Outcome, Segment, Timings, Trajectory, Turn
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
    assert answers["json_extract(call.value,"] == [("add", 6, 0, 0)]


BEGIN = "<!-- The tables, by `python -m tests.store.test_documentation` -->\n"
END = "<!-- The end of the tables -->\n"


def described(table: Table) -> str:
    """Return the description of a table in the form of the page."""
    lines = [f"| `{column.name}` | {column.sql.partition(' ')[0]} | {column.meaning} |" for column in table.columns]
    return "\n".join(
        [f"A row of `{table.name}` is {table.meaning}.", "", "| column | | |", "|---|---|---|", *lines, "\n"]
    )


def page_of_tables(page: str) -> str:
    """Return the page with every table and column of the file."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{''.join(map(described, TABLES))}{END}{after}"


def test_every_table_and_column_is_documented() -> None:
    assert PAGE.read_text() == page_of_tables(PAGE.read_text())
    assert set(PARQUET_COLUMNS) <= set(re.findall(r"\w+", PAGE.read_text()))


def test_tables_of_a_file_match_the_documentation(
    connection: sqlite3.Connection,
) -> None:
    made = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall())
    assert list(made) == [table.name for table in TABLES]
    for table in TABLES:
        columns = [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table.name})")]
        assert columns == [column.name for column in table.columns]
        assert all(f"-- {column.meaning}" in made[table.name] for column in table.columns)


def test_a_summary_has_every_column_of_its_table() -> None:
    columns = [column.attribute or column.name for column in EPISODES.columns]
    assert columns == [field.name for field in dataclasses.fields(EpisodeRow)]  # rows are created by position


@pytest.mark.parametrize(
    ("made", "columns", "deeper"),
    [
        (Trajectory, TRAJECTORY, {"task", "segments", "turns", "requests", "attachments"}),
        (Segment, SEGMENT, {"log", "tools", "origin"}),
        (Turn, TURN, {"agent", "log", "sampling", "constraint", "junction", "timings", "usage"}),
        (Timings, TIMINGS, set()),
        (Junction, JUNCTION, set()),
        (Usage, USAGE, set()),
    ],
)
def test_every_field_of_a_trajectory_has_a_column(made: Any, columns: Sequence[Column], deeper: set[str]) -> None:
    stored = {column.attribute or column.name for column in columns if column.is_field}
    assert stored | deeper == {field.name for field in dataclasses.fields(made)}


def test_the_first_example_of_the_page_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert example is not None
    code = example[1].replace("from runner import RunFile\n", "").replace("runs/calculator-001.db", str(path))
    exec(code, {"RunFile": RunFile})
    assert "a-0-0 a completed 1.0 2 8" in capsys.readouterr().out


if __name__ == "__main__":
    PAGE.write_text(page_of_tables(PAGE.read_text()))
