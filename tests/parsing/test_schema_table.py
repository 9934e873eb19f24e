"""The page on JSON schemas describes each keyword as the code handles it."""

from __future__ import annotations

from tests.parsing.schema_table import IGNORED, PROBES, keywords, table
from tests.repository import DOCS


def test_page_has_the_measured_table() -> None:
    page = (DOCS / "json-schemas.md").read_text(encoding="utf-8")
    assert "\n".join(table()) in page


def test_table_has_every_keyword_of_the_dialect() -> None:
    assert keywords() == set(PROBES) | IGNORED
