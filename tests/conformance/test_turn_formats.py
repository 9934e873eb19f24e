"""The format in which every public template writes calls and thoughts: the record is current, the page agrees."""

from __future__ import annotations

from collections import Counter

import pytest

from runner.parsing.learning.learnt_format import FormatVerdict
from runner.tokens.tool_support import missing_tool_property
from tests import sweeps
from tests.conformance import turn_formats
from tests.conformance.corpus import corpus
from tests.repository import DOCS

ROWS = turn_formats.recorded()


def test_the_page_is_what_the_record_says() -> None:
    assert (DOCS / "tool-formats.md").read_text(encoding="utf-8") == turn_formats.page(ROWS)


def test_354_templates_can_be_used_with_tools_and_be_made_to_call_one() -> None:
    usable = [row for row in ROWS if row.verdict != FormatVerdict.REFUSED]
    assert len(usable) >= 354
    assert sum(row.enforced for row in usable) >= 354


def test_the_page_of_models_has_the_counts_of_the_record() -> None:
    entries = {entry.name: len(entry.models) for entry in corpus()}
    usable = [row for row in ROWS if row.verdict != FormatVerdict.REFUSED]
    everything, used = (sum(entries[row.template] for row in rows) for rows in (ROWS, usable))
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    assert f"Of {len(ROWS)} public templates ({everything:,} models)" in page
    assert f"**{len(usable)} ({used:,} models) can be used**" in page


@pytest.mark.whole
def test_model_page_counts_templates_without_tools_by_reason() -> None:
    templates, models = Counter[str](), Counter[str]()
    for entry in corpus():
        missing = missing_tool_property(entry.renderer())
        if missing is not None:
            templates[missing] += 1
            models[missing] += len(entry.models)
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    for named, count in templates.items():
        assert f"(`{named}`) | {count} / {models[named]:,} |" in page


@pytest.mark.cases_in_turns(3)
@pytest.mark.parametrize("row", sweeps.part(ROWS, 12), ids=lambda row: row.template)
def test_format_learnt_from_a_template_equals_the_record(row: turn_formats.Row) -> None:
    entry = next(entry for entry in corpus() if entry.name == row.template)
    assert turn_formats.learn(entry) == row


@pytest.mark.whole
def test_record_has_every_template_that_serves_tools() -> None:
    assert [entry.name for entry in turn_formats.capable()] == [row.template for row in ROWS]
