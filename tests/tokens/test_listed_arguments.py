"""Arguments that a schema lists outside of its own `properties`: the model sees them too, or they are named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner.tokens.shown_arguments import ArgumentPart, unseen_of
from runner.tokens.tool_forms import listed, unresolved
from runner.tokens.tool_support import shows_tools
from runner.tools.external_tools import tools_of
from tests import sweeps
from tests.conformance.corpus import Entry, corpus
from tests.conformance.sweep import is_tool_capable
from tests.tokens.bridging import QUESTION
from tests.tokens.test_shown_arguments import DUMPS, NO_NOTES, RAISES, TYPES, WANTS_NOTES, renderer

STRING: dict[str, Any] = {"type": "string"}
INTEGER: dict[str, Any] = {"type": "integer"}
SIZE: dict[str, Any] = {"type": "string", "enum": ["zqsmallz", "zqlargez"]}
PROMPT: dict[str, Any] = {"zqpromptz": STRING}

ROOTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    # The schema of all arguments, and the words that a prompt must contain.
    "a reference (zod-to-json-schema, FastMCP)": (
        {"$ref": "#/definitions/Args", "definitions": {"Args": {"type": "object", "properties": {"zqsizez": SIZE}}}},
        ["zqsizez", "zqsmallz", "zqlargez"],
    ),
    "a chain of references": (
        {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"properties": {"zqsizez": SIZE}}}},
        ["zqsizez", "zqsmallz"],
    ),
    "allOf (OpenAPI)": (
        {"allOf": [{"properties": {"zqonez": INTEGER}}, {"$ref": "#/$defs/M"}],
         "$defs": {"M": {"properties": {"zqsizez": SIZE}}}},
        ["zqonez", "zqsizez", "zqsmallz"],
    ),
    "alternatives without own properties": (
        {"oneOf": [{"properties": {"zqpagez": STRING}, "required": ["zqpagez"]}, {"properties": {"zqbasez": INTEGER}}]},
        ["zqpagez", "zqbasez"],
    ),
    "alternatives beside own properties": (
        {"properties": PROMPT, "anyOf": [{"properties": {"zqsizez": SIZE}}, {"properties": {"zqbasez": INTEGER}}]},
        ["zqpromptz", "zqsizez", "zqsmallz", "zqbasez"],
    ),
    "alternatives of one name": (
        {"oneOf": [{"properties": {"zqkindz": {"const": f"zqkind{number}z"}}} for number in range(3)]},
        ["zqkindz", "zqkind0z", "zqkind1z", "zqkind2z"],
    ),
    "names that are only required (image tools of MCP)": (
        {"properties": PROMPT, "oneOf": [{"required": ["zqurlz"]}, {"required": ["zqdataz"]}]},
        ["zqpromptz", "zqurlz", "zqdataz"],
    ),
    "required without properties": ({"required": ["zqaz", "zqbz"]}, ["zqaz", "zqbz"]),
    "a condition": (
        {"properties": {"mode": STRING}, "if": {"properties": {"mode": {"const": "file"}}},
         "then": {"properties": {"zqpathz": STRING}}, "else": {"properties": {"zqtextz": STRING}}},
        ["mode", "zqpathz", "zqtextz"],
    ),
    "dependent schemas": (
        {"properties": {"card": INTEGER}, "dependentSchemas": {"card": {"properties": {"zqaddressz": STRING}}}},
        ["card", "zqaddressz"],
    ),
    "more of one argument in allOf": (
        {"properties": {"zqsizez": STRING}, "allOf": [{"properties": {"zqsizez": SIZE}}]},
        ["zqsizez", "zqsmallz"],
    ),
    "booleans for schemas": ({"properties": {"zqanyz": True, "zqsizez": SIZE, "zqnoz": False}}, ["zqanyz", "zqsizez"]),
    "names of keywords": (
        {"properties": {"type": {"$ref": "#/$defs/Size"}, "properties": INTEGER, "required": {"type": "boolean"}},
         "$defs": {"Size": SIZE}},
        ["type", "zqsmallz", "properties", "required"],
    ),
}  # fmt: skip

every_root = pytest.mark.parametrize("name", ROOTS)


def tool_of(name: str) -> Any:
    schema = {"type": "object", **ROOTS[name][0]}
    (tool,) = tools_of([{"type": "function", "function": {"name": "look", "parameters": schema}}])
    return tool.as_openai()


@every_root
@pytest.mark.parametrize("text", [DUMPS, TYPES, RAISES, WANTS_NOTES], ids=["dumps", "types", "raises", "wants notes"])
def test_arguments_of_every_root_are_shown(text: str, name: str) -> None:
    made, tool = renderer(text), tool_of(name)
    assert unseen_of(made.render_tool, tool) == []
    shown = made.render([QUESTION], tools=[tool])
    assert [word for word in ROOTS[name][1] if word not in shown] == []


@pytest.mark.parametrize("entry", sweeps.part(corpus(), 80), ids=lambda each: each.name)
def test_arguments_of_every_root_are_shown_by_public_templates(entry: Entry) -> None:
    written = entry.renderer()
    if not is_tool_capable(entry) or not shows_tools(written):
        return
    made = written.template.renderer(now=written.now, fit_tools=None)
    for name, (_, words) in ROOTS.items():
        tool = tool_of(name)
        shown = made.render([QUESTION], tools=[tool])
        missing = [word for word in words if word not in shown]
        assert not missing or unseen_of(made.render_tool, tool), (name, missing)


def test_an_argument_that_is_listed_nowhere_is_named() -> None:
    made = renderer(TYPES, fit=False)
    for name in ("a reference (zod-to-json-schema, FastMCP)", "names that are only required (image tools of MCP)"):
        names = {each.argument for each in unseen_of(made.render_tool, tool_of(name)) if each.part == ArgumentPart.NAME}
        assert names == {word for word in ROOTS[name][1] if word in ("zqsizez", "zqurlz", "zqdataz")}
    assert unseen_of(renderer(NO_NOTES).render_tool, tool_of("required without properties")) == []


@every_root
def test_schema_of_arguments_is_not_changed_by_listing_them(name: str) -> None:
    parameters = tool_of(name)["function"]["parameters"]
    before = json.dumps(parameters)
    made = listed(parameters)
    assert json.dumps(parameters) == before
    assert listed(made) == made
    assert list(unresolved(parameters)) == []


def test_schema_with_all_arguments_in_properties_stays_as_it_is() -> None:
    parameters = {"type": "object", "properties": PROMPT, "anyOf": [{"required": ["zqpromptz"]}, {"maxProperties": 0}]}
    assert listed(parameters) is parameters
    assert listed({}) == {}
