"""The format in which every public template writes calls and thoughts: the record is current, the page agrees."""

from __future__ import annotations

from collections import Counter

import pytest

from runner.parsing.learning.learnt_format import FormatVerdict
from runner.tokens.probing.usable import TemplateFault
from runner.tokens.template import TemplateRaised
from runner.tokens.tool_support import missing_tool_property
from tests import sweeps
from tests.conformance import shown, turn_formats
from tests.conformance.corpus import Entry, corpus
from tests.repository import DOCS
from tests.tokens.profiles import profile

ROWS = turn_formats.recorded()


def test_page_is_written_from_the_record() -> None:
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


def test_template_missing_in_another_count_raises_as_documented() -> None:
    formats = {row.template for row in ROWS}
    assert formats - {entry.name for entry in shown.capable()} == {"microsoft-FrogMini-14B-2510"}
    (entry,) = (entry for entry in corpus() if entry.name == "microsoft-FrogMini-14B-2510")
    assert called_with(entry, "a")
    with pytest.raises(TemplateRaised, match="can only concatenate str"):
        called_with(entry, 1)


@pytest.mark.parametrize(
    "name", ["CohereForAI-c4ai-command-r-plus-tool_use", "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use"]
)
def test_template_that_needs_tools_raises_without_them(name: str) -> None:
    assert name in {row.template for row in ROWS}
    (entry,) = (entry for entry in corpus() if entry.name == name)
    assert profile(entry) is TemplateFault.RAISES
    with pytest.raises(TemplateRaised, match="not iterable"):
        entry.renderer().render([{"role": "user", "content": "a"}])


def called_with(entry: Entry, value: str | int) -> str:
    function = {"name": "f", "arguments": {"a": value}}
    call = {"id": "1", "type": "function", "function": function}
    return entry.renderer().render(
        [{"role": "user", "content": "b"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    )


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


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("row", sweeps.part(ROWS, 12), ids=lambda row: row.template)
def test_format_learnt_from_a_template_equals_the_record(row: turn_formats.Row) -> None:
    entry = next(entry for entry in corpus() if entry.name == row.template)
    assert turn_formats.learn(entry) == row


@pytest.mark.whole
def test_record_has_every_template_that_serves_tools() -> None:
    assert [entry.name for entry in turn_formats.capable()] == [row.template for row in ROWS]
