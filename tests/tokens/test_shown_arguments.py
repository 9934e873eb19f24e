"""The prompt shows the fields, values and types of every argument, as the author or as the template can write them."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from runner.tokens.shown_arguments import ArgumentPart, unseen_of
from runner.tokens.template import ChatTemplate, Renderer
from runner.tokens.tool_forms import ToolsForm, current, parameters_in, unresolved
from tests.conformance.argument_kinds import KINDS, kinds
from tests.conformance.corpus import corpus
from tests.tokens.bridging import QUESTION, chatml

NOW = datetime(2026, 1, 1)

DUMPS = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + chatml()
NAMES = (
    "{% for tool in tools or [] %}{{ tool.function.name }}(\n"
    "{% for name, p in tool.function.parameters.properties.items() %}"
    "{{ name }}: {{ p.type }}{% if p.enum %} of {{ p.enum }}{% endif %}"
)
TYPES = NAMES + "  # {{ p.description }}\n{% endfor %})\n{% endfor %}" + chatml()
"""Template that writes the types of arguments and their descriptions, but nothing of nested values."""
NO_NOTES = NAMES + "\n{% endfor %})\n{% endfor %}" + chatml()
"""`TYPES` without descriptions."""
NO_VALUES = NO_NOTES.replace("{% if p.enum %} of {{ p.enum }}{% endif %}", "")
"""`NO_NOTES` without values."""
RAISES = TYPES.replace(": {{ p.type }}", ": {{ p.type + '' }}{{ raise_exception('one type') if p.type is not string }}")
"""`TYPES`, but it raises an error on an argument without a type, or with several types."""
WANTS_NOTES = TYPES.replace("{{ p.description }}", "{{ '' + p.description }}")
"""`TYPES`, but it raises an error on an argument without a description."""


def renderer(text: str, *, fit: bool | None = None) -> Renderer:
    return ChatTemplate(text, name="inline").renderer(now=NOW, fit_tools=fit)


def tool_with(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"given": schema}, "required": ["given"], **more}
    return {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": parameters}}


def shown(made: Renderer, tool: Any) -> str:
    return made.render([QUESTION], tools=[tool])


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_that_writes_schemas_is_given_them_as_they_are(kind: str) -> None:
    made = renderer(DUMPS)
    assert not made.fits_tools
    assert made.shown([kinds()[kind]]) == [kinds()[kind]]
    assert unseen_of(made.render_tool, kinds()[kind]) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [TYPES, RAISES, WANTS_NOTES], ids=["types", "raises", "wants notes"])
def test_a_template_that_writes_types_shows_every_kind_of_argument(text: str, kind: str) -> None:
    made = renderer(text)
    assert made.fits_tools
    assert unseen_of(made.render_tool, kinds()[kind]) == []


def test_fields_values_and_types_of_a_model_stand_in_the_prompt() -> None:
    text = shown(renderer(TYPES), kinds()["nested model"])
    for word in ("name", "unit", "metre", "foot", "period", "begin", "days", "integer", "The first day."):
        assert word in text
    assert "name" not in shown(renderer(TYPES, fit=False), kinds()["nested model"]).partition("# ")[0]


def test_an_optional_argument_is_shown_as_what_it_may_be() -> None:
    assert "given: string" in shown(renderer(TYPES), kinds()["str or null"])
    assert "given: string of ['red', 'blue']" in shown(renderer(TYPES), kinds()["enum or null"])


def test_an_argument_that_a_template_shows_keeps_its_schema() -> None:
    both = tool_with({"type": "string", "enum": ["a", "b"], "description": "One."})
    both["function"]["parameters"]["properties"]["model"] = {"$ref": "#/$defs/M"}
    both["function"]["parameters"]["$defs"] = {"M": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    (made,) = renderer(TYPES).shown([both])
    properties = made["function"]["parameters"]["properties"]
    assert properties["given"] == both["function"]["parameters"]["properties"]["given"]
    assert properties["model"] != both["function"]["parameters"]["properties"]["model"]
    assert "$defs" not in made["function"]["parameters"]


def test_the_authors_schema_stays_as_it_was() -> None:
    before = json.dumps(kinds()["model of models"])
    renderer(TYPES).shown([kinds()["model of models"]])
    assert json.dumps(kinds()["model of models"]) == before


def test_shown_tool_does_not_depend_on_the_tools_beside_it() -> None:
    made = renderer(TYPES)
    several = [kinds()[kind] for kind in ("nested model", "int or str", "str")]
    assert made.shown(several) == [made.shown([tool])[0] for tool in several]
    assert renderer(TYPES).shown(several) == made.shown(several)


def test_field_left_out_by_a_template_without_descriptions_is_named() -> None:
    unseen = unseen_of(renderer(NO_NOTES).render_tool, kinds()["model"])
    assert {(each.part, each.what) for each in unseen} >= {
        (ArgumentPart.FIELD, "given.begin"),
        (ArgumentPart.FIELD, "given.days"),
    }
    assert "the field given.begin" in map(str, unseen)


def test_a_template_that_shows_no_tools_is_given_them_as_they_are() -> None:
    made = renderer(chatml())
    assert not made.fits_tools
    assert {each.part for each in unseen_of(made.render_tool, kinds()["model"])} == {ArgumentPart.NAME}


# --- fields of other keywords, and names that are keywords


OTHER_FIELDS = {
    "patterns": {"type": "object", "patternProperties": {"^x-": {"type": "object", "properties": {"zqin": {}}}}},
    "then": {"type": "object", "if": {"required": ["a"]}, "then": {"properties": {"zqin": {"$ref": "#/$defs/In"}}}},
    "else": {"type": "object", "if": {"required": ["a"]}, "else": {"properties": {"a": {}, "zqin": {}}}},
    "dependent": {"type": "object", "properties": {"a": {}}, "dependentSchemas": {"a": {"properties": {"zqin": {}}}}},
    "contains": {"type": "array", "contains": {"type": "object", "properties": {"zqin": {"type": "integer"}}}},
    "unevaluated": {"type": "object", "unevaluatedProperties": {"type": "object", "properties": {"zqin": {}}}},
}


@pytest.mark.parametrize("kind", OTHER_FIELDS)
def test_fields_of_every_keyword_are_shown(kind: str) -> None:
    tool = tool_with(OTHER_FIELDS[kind], **{"$defs": {"In": {"type": "string", "enum": ["zqin"]}}})
    assert {each.part for each in unseen_of(renderer(TYPES, fit=False).render_tool, tool)} >= {ArgumentPart.FIELD}
    made = renderer(TYPES)
    assert unseen_of(made.render_tool, tool) == []
    assert "zqin" in shown(made, tool)
    assert "$ref" not in shown(made, tool)


@pytest.mark.parametrize("keys", [{"enum": ["zqkey", "zqother"]}, {"$ref": "#/$defs/Key"}, {"const": "zqkey"}], ids=str)
def test_keys_that_a_schema_lists_are_shown(keys: dict[str, Any]) -> None:
    tool = tool_with(
        {"type": "object", "propertyNames": keys, "additionalProperties": {"type": "integer"}},
        **{"$defs": {"Key": {"type": "string", "enum": ["zqkey"]}}},
    )
    unseen = unseen_of(renderer(TYPES, fit=False).render_tool, tool)
    assert "the value 'zqkey' of a key of given" in map(str, unseen)
    assert unseen_of(renderer(TYPES).render_tool, tool) == []
    assert "zqkey" in shown(renderer(TYPES), tool)


@pytest.mark.parametrize(
    "given",
    [
        {"const": {"zqkey": "zqvalue"}},
        {"type": "object", "enum": [{"zqkey": "zqvalue"}, {"zqkey": "zqanother"}]},
        {"type": "array", "items": {"const": ["zqkey", "zqvalue"]}},
        {"anyOf": [{"enum": [["zqkey"], {"zqvalue": [1]}]}, {"type": "integer"}]},
    ],
    ids=["const", "objects", "list in a list", "in a union"],
)
def test_values_that_are_lists_or_objects_are_shown(given: dict[str, Any]) -> None:
    unseen = [str(each) for each in unseen_of(renderer(NO_VALUES, fit=False).render_tool, tool_with(given))]
    assert any(each.startswith(("the value {", "the value [")) for each in unseen), unseen
    assert unseen_of(renderer(TYPES).render_tool, tool_with(given)) == []
    text = shown(renderer(TYPES), tool_with(given))
    assert "zqkey" in text
    assert "zqvalue" in text
    assert unseen_of(renderer(DUMPS).render_tool, tool_with(given)) == []


@pytest.mark.parametrize(
    ("given", "values"), [({"const": True}, 1), ({"enum": [False]}, 1), ({"enum": [True, False]}, 0)]
)
def test_a_single_truth_value_is_shown(given: dict[str, Any], values: int) -> None:
    tool = tool_with({"type": "boolean", **given})
    hides = renderer(NO_VALUES, fit=False)
    assert [each.part for each in unseen_of(hides.render_tool, tool)] == [ArgumentPart.VALUE] * values
    assert unseen_of(renderer(TYPES).render_tool, tool) == []


@pytest.mark.parametrize(
    ("reference", "definition"),
    [
        ("#inner", {"$anchor": "inner"}),
        ("#inner", {"$dynamicAnchor": "inner"}),
        ("#inner", {"$id": "#inner"}),
        ("#/$defs/an%20inner%2Fone", {}),
        ("#/$defs/Other/anyOf/1", {}),
    ],
    ids=["anchor", "dynamic anchor", "id", "escaped", "in a list"],
)
def test_target_of_every_form_of_reference_is_shown(reference: str, definition: dict[str, Any]) -> None:
    inner = {**definition, "type": "object", "properties": {"zqin": {"enum": ["zqvalue"]}}}
    name = "an inner/one" if "%" in reference else "Inner"
    tool = tool_with(
        {"$ref": reference.replace("%2F", "~1")},
        **{"$defs": {name: inner, "Other": {"anyOf": [{"type": "null"}, dict(inner)]}}},
    )
    text = shown(renderer(TYPES), tool)
    assert "zqin" in text
    assert "zqvalue" in text
    assert "$ref" not in text
    assert unseen_of(renderer(TYPES).render_tool, tool) == []
    assert [*unresolved(tool["function"]["parameters"])] == []


IN = {"type": "object", "properties": {"zqin": {"enum": ["zqvalue"]}}}


@pytest.mark.parametrize(
    "given",
    [
        {"type": "array", "items": [{"type": "string"}, IN], "additionalItems": False},
        {"type": "array", "items": [{"type": "string"}], "additionalItems": IN},
        {"$dynamicRef": "#node"},
        {"$recursiveRef": "#/$defs/In"},
        {"type": "object", "properties": {"a": {"type": "string"}}, "dependencies": {"a": IN, "zqin": ["a"]}},
    ],
    ids=["tuple", "rest of a tuple", "dynamic reference", "recursive reference", "dependencies"],
)
def test_parts_in_keywords_of_older_dialects_are_shown(given: dict[str, Any]) -> None:
    tool = tool_with(given, **{"$defs": {"In": {**IN, "$dynamicAnchor": "node"}}})
    text = shown(renderer(TYPES), tool)
    assert "zqin" in text
    assert "zqvalue" in text
    assert unseen_of(renderer(TYPES).render_tool, tool) == []
    assert renderer(DUMPS).shown([tool]) == [tool]
    assert unseen_of(renderer(DUMPS).render_tool, tool) == []


def test_arguments_named_like_keywords_are_ordinary_arguments() -> None:
    properties = {
        name: {"type": "string", "enum": [f"zq{name}"]} for name in ("items", "dependencies", "$recursiveRef")
    }
    tool = tool_with({"type": "object", "properties": properties})
    assert current(tool) is tool
    text = shown(renderer(TYPES), tool)
    assert all(f"zq{name}" in text for name in properties)


@pytest.mark.parametrize("reference", ["#nothing", "#/$defs/Nothing", "#/$defs/Other/anyOf/7", "other.json"])
def test_reference_that_leads_nowhere_is_named(reference: str) -> None:
    tool = tool_with({"$ref": reference}, **{"$defs": {"Other": {"anyOf": [{"type": "null"}]}}})
    assert [*unresolved(tool["function"]["parameters"])] == [("given", reference)]


@pytest.mark.parametrize("keyword", ["additionalProperties", "unevaluatedProperties", "patternProperties"])
def test_arguments_without_names_stand_in_the_description(keyword: str) -> None:
    further = {"$ref": "#/$defs/In"}
    tool = tool_with({"type": "string"}, **{
        keyword: {"^x-": further} if keyword == "patternProperties" else further,
        "$defs": {"In": {"type": "object", "properties": {"zqin": {"type": "integer"}}}},
    })  # fmt: skip
    text = TYPES.replace("{{ tool.function.name }}", "{{ tool.function.name }} {{ tool.function.description }}")
    assert unseen_of(renderer(text).render_tool, tool) == []
    assert "zqin" in shown(renderer(text), tool)
    assert "$ref" not in shown(renderer(text), tool)
    named = [f"the arguments that {keyword} describes"]
    # the template shows no descriptions
    assert [str(each) for each in unseen_of(renderer(TYPES).render_tool, tool)] == named
    assert unseen_of(renderer(DUMPS).render_tool, tool) == []


SKIPS = TYPES.replace(".items() %}", ".items() if name not in ('type', 'properties', 'required') %}")
"""Template that skips arguments with the name of a keyword, as the template of Gemma 4 does."""


def test_skipped_arguments_stand_in_the_description_of_the_tool() -> None:
    properties = {
        "type": {"type": "string", "enum": ["zqopen", "zqclosed"]},
        "properties": {"anyOf": [{"$ref": "#/$defs/In"}, {"type": "null"}]},
        "text": {"type": "string"},
    }
    within = {"$defs": {"In": {"type": "object", "properties": {"zqin": {"type": "integer"}}}}}
    parameters = {"type": "object", "properties": properties, "required": ["type", "text"], **within}
    tool = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": parameters}}
    text = SKIPS.replace("{{ tool.function.name }}", "{{ tool.function.name }} {{ tool.function.description }}")
    made = renderer(text)
    said = made.shown([tool])[0]["function"]["description"]
    assert said.startswith("Look. Further arguments, as JSON schema: {")
    noted = json.loads(said.partition(": ")[2])
    assert noted["required"] == ["type"]
    assert noted["properties"]["type"] == properties["type"]
    assert noted["properties"]["properties"]["properties"] == {"zqin": {"type": "integer"}}
    assert said in shown(made, tool)
    assert unseen_of(made.render_tool, tool) == []
    # Without descriptions of tools there is no fix, so the arguments are named.
    for other in (renderer(SKIPS), renderer(SKIPS, fit=False)):
        unseen = unseen_of(other.render_tool, tool)
        assert {"the name of type", "the name of properties"} <= set(map(str, unseen))


def test_a_field_with_the_name_of_a_keyword_is_looked_for_too() -> None:
    fields = "{% for each, q in (p.properties or {}).items() if each != 'type' %} {{ each }}: {{ q.type }}{% endfor %}"
    nested = TYPES.replace("{% if p.enum %}", fields + "{% if p.enum %}")
    tool = tool_with({"type": "object", "properties": {"type": {"type": "string"}, "size": {"type": "integer"}}})
    assert "the field given.type" in map(str, unseen_of(renderer(nested, fit=False).render_tool, tool))
    assert '"type": {"type": "string"}' in shown(renderer(nested), tool)
    assert "JSON schema" not in shown(
        renderer(nested), tool_with({"type": "object", "properties": {"size": {"type": "integer"}}})
    )


@pytest.mark.parametrize("name", ["google-gemma-4-31B-it", "openai-gpt-oss-120b", "ByteDance-Seed-OSS"])
def test_published_templates_show_arguments_of_all_names(name: str) -> None:
    entry = next(each for each in corpus() if each.name == name)
    written = entry.renderer()
    made = written.template.renderer(now=written.now, fit_tools=None)
    for argument in ("type", "properties", "required", "description", "items", "keys", "name", "enum"):
        parameters = {"type": "object", "properties": {argument: {"type": "string", "enum": [f"zq{argument}z"]}}}
        tool = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": parameters}}
        assert f"zq{argument}z" in shown(made, tool)
        assert unseen_of(made.render_tool, tool) == []


# --- forms


NODE = {"type": "object", "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/Node"}}}


def flat(schema: dict[str, Any], definitions: dict[str, Any] | None = None, form: ToolsForm = ToolsForm.FLAT) -> Any:
    parameters = tool_with(schema, **{"$defs": definitions or {}})["function"]["parameters"]
    return parameters_in(form, parameters)["properties"]["given"]


def test_schema_that_refers_to_itself_is_expanded_once() -> None:
    made = flat({"$ref": "#/$defs/Node"}, {"Node": NODE})
    assert made == {"type": "object", "properties": {"value": {"type": "integer"}, "next": {"type": "object"}}}


def test_many_types_that_refer_to_one_another_stay_of_a_bounded_size() -> None:
    names = [f"T{number}" for number in range(12)]
    inner = {name: {"$ref": f"#/$defs/{name}"} for name in names}
    defs = {name: {"type": "object", "properties": inner} for name in names}
    assert len(json.dumps(flat({"$ref": "#/$defs/T0"}, defs))) < 500_000


SHORT = {"type": "string", "maxLength": 3}
A = {"$ref": "#/$defs/A"}
FLATTENED: list[tuple[dict[str, Any], Any]] = [
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": "string", "nullable": True}),
    ({"type": ["integer", "null"]}, {"type": "integer", "nullable": True}),
    ({"enum": ["a", None]}, {"type": "string", "enum": ["a"], "nullable": True}),
    ({"const": 3}, {"type": "integer", "enum": [3]}),
    ({"enum": [1, "a"]}, {"enum": [1, "a"]}),
    ({"allOf": [A], "description": "d"}, {**SHORT, "description": "d"}),
    (
        {"allOf": [{"properties": {"a": {"type": "string"}}, "required": ["a"]}, {"properties": {"b": {}}}]},
        {"type": "object", "properties": {"a": {"type": "string"}, "b": {}}, "required": ["a"]},
    ),
    ({"oneOf": [{"const": "a"}, {"const": "b"}]}, {"type": "string", "enum": ["a", "b"]}),
    ({"anyOf": [A, {"type": "null"}], "default": None}, {**SHORT, "default": None, "nullable": True}),
    ({**A, "description": "d"}, {**SHORT, "description": "d"}),
    ({"$ref": "https://example.com/s.json"}, {"$ref": "https://example.com/s.json"}),
    (
        {"type": "object", "properties": {"enum": {"const": 1}}},
        {"type": "object", "properties": {"enum": {"type": "integer", "enum": [1]}}},
    ),
    (
        {"type": "array", "items": {"anyOf": [{"type": "null"}, A]}},
        {"type": "array", "items": {**SHORT, "nullable": True}},
    ),
]


@pytest.mark.parametrize(("schema", "made"), FLATTENED)
def test_a_schema_is_flattened(schema: dict[str, Any], made: dict[str, Any]) -> None:
    assert flat(schema, {"A": SHORT}) == made


def test_unions_become_one_schema_in_the_last_form() -> None:
    cat = {
        "type": "object",
        "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
        "required": ["kind"],
    }
    dog = {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]}
    made = flat({"oneOf": [cat, dog]}, form=ToolsForm.MERGED)
    assert made["properties"]["kind"] == {"type": "string", "enum": ["cat", "dog"]}
    assert list(made["properties"]) == ["kind", "lives"]
    assert made["required"] == ["kind"]


def test_references_that_lead_nowhere_are_found() -> None:
    tool = tool_with({"type": "array", "items": {"$ref": "#/$defs/Missing"}})
    assert list(unresolved(tool["function"]["parameters"])) == [("given", "#/$defs/Missing")]
    assert list(unresolved(kinds()["recursive model"]["function"]["parameters"])) == []


@pytest.mark.parametrize("schema", [True, {}, {"type": "object"}, {"enum": []}, {"anyOf": []}, {"type": []}])
def test_schemas_with_little_content_are_shown_without_a_fault(schema: Any) -> None:
    made = renderer(TYPES)
    assert "given" in shown(made, tool_with(schema))
    unseen_of(made.render_tool, tool_with(schema))


def test_typed_tools_and_written_schemas_are_in_one_list_of_kinds() -> None:
    assert len(KINDS) == len(set(KINDS)) == 56


def test_a_template_file_is_read_as_a_run_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "types.jinja"
    file.write_text(TYPES)
    assert ChatTemplate.load(file).renderer(now=NOW, fit_tools=None).fits_tools
