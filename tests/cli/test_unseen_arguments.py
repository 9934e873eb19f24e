"""Parts of an argument that a template leaves out: check-template, check and the faults of a run name them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from runner import Run, Tool
from runner.cli.app import app
from runner.testing import ScriptedEngine
from runner.testing.environment_linter.findings import tool_findings
from runner.tokens.template import ChatTemplate
from tests.tokens.test_shown_arguments import NO_NOTES, TYPES
from tests.verify.test_shown_schemas import Trip

pytestmark = pytest.mark.slow

HERMES = ChatTemplate.load("hermes").text


def with_tools_by(text: str) -> str:
    """Return `hermes` with the tool format of another template."""
    tools = text.partition("{% for m in messages %}")[0]
    return tools + "{% set tools = none %}\n" + HERMES


def checked(tmp_path: Path, text: str, *options: str) -> Result:
    file = tmp_path / "own.jinja"
    file.write_text(text)
    return CliRunner().invoke(app, ["check-template", str(file), *options])


def test_check_template_reports_fitted_schemas(tmp_path: Path) -> None:
    result = checked(tmp_path, with_tools_by(TYPES))
    assert "fitted" in result.output
    assert "is not shown" not in result.output
    document = json.loads(checked(tmp_path, with_tools_by(TYPES), "--json").output)
    assert document["arguments"] == {"fitted": True, "unseen": []}


def test_check_template_reports_schemas_that_stay_as_written(tmp_path: Path) -> None:
    assert "as they are" in checked(tmp_path, HERMES).output


def test_check_template_names_what_is_not_shown(tmp_path: Path) -> None:
    result = checked(tmp_path, with_tools_by(NO_NOTES))
    assert "arguments: the model is not shown the field model.name" in result.output
    assert "the model has to guess it" in result.output


@pytest.mark.anyio
async def test_a_run_names_what_its_template_does_not_show() -> None:
    template = ChatTemplate(with_tools_by(NO_NOTES), name="own")
    async with Run(Trip, ScriptedEngine("Done.", template=template)) as run:
        faults = list(run.summary.faults)
    (fault,) = [fault for fault in faults if "does not show the model" in fault]
    assert "the field period.begin, for book()" in fault


@pytest.mark.anyio
async def test_run_whose_template_shows_everything_reports_nothing() -> None:
    for text in (HERMES, with_tools_by(TYPES)):
        async with Run(Trip, ScriptedEngine("Done.", template=ChatTemplate(text, name="own"))) as run:
            assert not [fault for fault in run.summary.faults if "does not show" in fault]


def test_check_names_a_reference_that_leads_nowhere() -> None:
    properties = {"given": {"$ref": "#/$defs/Missing"}, "known": {"$ref": "#/$defs/Known"}}
    schema = {"type": "object", "properties": properties, "$defs": {"Known": {"type": "string"}}}
    tool = Tool(lambda given, known: None, name="look", description="Look.", parameters=schema)
    found = [finding.text for finding in tool_findings([tool]) if "refers to" in finding.text]
    assert found == [
        "look(given=) refers to '#/$defs/Missing', which is not in its schema, so the model is not shown what to write "
        "there: put it into $defs."
    ]


def test_check_names_a_tool_that_nothing_fits() -> None:
    schema = {"type": "object", "properties": {"given": {"minimum": 2, "maximum": 1, "type": "integer"}}}
    free = Tool(lambda given: None, name="free", description="Look.", parameters=schema)
    held = Tool(lambda given: None, name="held", description="Look.", parameters={**schema, "required": ["given"]})
    (text,) = [finding.text for finding in tool_findings([free, held])]
    assert text.startswith("no call of the tool 'held' passes its check: no object fits its schema")
