"""How every public template writes calls and thoughts: the record holds, and the page says what it says."""

from __future__ import annotations

import pytest

from runner.parsing.learning.turn import Verdict
from tests import sweeps
from tests.conformance import turn_formats
from tests.conformance.corpus import corpus
from tests.repository import DOCS

ROWS = turn_formats.recorded()


def test_the_page_is_what_the_record_says() -> None:
    assert (DOCS / "tool-formats.md").read_text(encoding="utf-8") == turn_formats.page(ROWS)


def test_353_templates_can_be_used_with_tools_and_355_be_made_to_call_one() -> None:
    usable = [row for row in ROWS if row.verdict != Verdict.REFUSED]
    assert len(usable) >= 353
    assert sum(row.enforced for row in usable) >= 355


@pytest.mark.parametrize("row", sweeps.part(ROWS, 12), ids=lambda row: row.template)
def test_what_is_learnt_of_a_template_is_what_the_record_says(row: turn_formats.Row) -> None:
    entry = next(entry for entry in corpus() if entry.name == row.template)
    assert turn_formats.learn(entry) == row


@pytest.mark.whole
def test_the_record_has_every_template_that_can_serve_an_environment_with_tools() -> None:
    assert [entry.name for entry in turn_formats.capable()] == [row.template for row in ROWS]
