"""The page on JSON schemas says of each keyword what the code does."""

from __future__ import annotations

from tests.parsing.schema_table import IGNORED, PROBES, keywords, table
from tests.repository import DOCS


def test_page_has_the_table_that_trying_gives() -> None:
    page = (DOCS / "json-schemas.md").read_text(encoding="utf-8")
    assert "\n".join(table()) in page


def test_table_has_every_keyword_of_the_dialect() -> None:
    assert keywords() == set(PROBES) | IGNORED
