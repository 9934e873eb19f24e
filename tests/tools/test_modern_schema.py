"""Schemas of other dialects and without a dialect are converted, and unchecked keywords are named."""

from __future__ import annotations

from typing import Any

import pytest

from runner import Conversation, Environment, Task, Tool, reward
from runner.errors import WrongArguments
from runner.options import Sampling
from runner.parsing.call_grammar import constraint, not_enforced
from runner.testing import ScriptedEngine, call
from runner.tools.ecma_patterns import BadPattern, python_pattern
from runner.tools.external_tools import tools_of
from runner.tools.modern_schema import modern
from tests.parsing.enforced import accepts, form_of, required, written
from tests.playing import play


def tool_of(schema: Any) -> Tool:
    (tool,) = tools_of([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    return tool


def notes_of(schema: Any) -> list[str]:
    return [str(note) for note in modern(schema).notes]


def taking(schema: Any, *, required: bool = True) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"] if required else []}


# schema, valid arguments, invalid arguments, words of the notes
OTHER_DIALECTS: dict[str, tuple[Any, list[Any], list[Any], list[str]]] = {
    "tuple of draft 7": (
        taking({"type": "array", "items": [{"type": "integer"}, {"type": "string"}], "additionalItems": False}),
        [{"a": [1, "x"]}, {"a": [1]}],
        [{"a": ["x"]}, {"a": [1, "x", 2]}],
        [],
    ),
    "additionalItems": (
        taking({"type": "array", "items": [{"type": "integer"}], "additionalItems": {"type": "boolean"}}),
        [{"a": [1, True, False]}],
        [{"a": [1, 2]}],
        [],
    ),
    "exclusive bound of draft 4": (
        taking({"type": "integer", "minimum": 1, "exclusiveMinimum": True, "maximum": 3, "exclusiveMaximum": False}),
        [{"a": 2}, {"a": 3}],
        [{"a": 1}, {"a": 4}],
        [],
    ),
    "exclusive bound without one": (
        taking({"type": "integer", "exclusiveMinimum": True}),
        [{"a": 0}],
        [{"a": "0"}],
        [],
    ),
    "required is null": (
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": None},
        [{}],
        [{"a": 1}],
        [],
    ),
    "properties are null": ({"type": "object", "properties": None}, [{}], [], []),
    "a property is null": (taking(None), [{"a": 1}], [{}], []),
    "type is null": ({"type": None, "properties": {"a": {"type": "string"}}}, [{"a": "x"}], [{"a": 1}], []),
    "type of a language": (taking({"type": "float"}), [{"a": 1.5}], [{"a": "1.5"}], ["type of a ('float'", "'number'"]),
    "type in capitals": ({"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}, [{"a": "x"}], [{"a": 1}], []),
    "unknown type": (taking({"type": "quaternion"}), [{"a": 1}, {"a": "x"}], [{}], ["type of a ('quaternion'"]),
    "any type": (taking({"type": "any"}), [{"a": 1}, {"a": "x"}], [{}], []),
    "definitions": (
        {**taking({"$ref": "#/definitions/x"}), "definitions": {"x": {"type": "integer"}}},
        [{"a": 1}],
        [{"a": "1"}],
        [],
    ),
    "id of draft 4": (
        {**taking({"$ref": "#/definitions/x"}), "id": "http://x.org/s#", "definitions": {"x": {"type": "integer"}}},
        [{"a": 1}],
        [{"a": "1"}],
        [],
    ),
    "reference by $id": (
        {
            **taking({"$ref": "item.json"}),
            "$id": "http://x.org/s.json",
            "$defs": {"x": {"$id": "item.json", "type": "null"}},
        },
        [{"a": None}],
        [{"a": 1}],
        [],
    ),
    "reference by anchor": (
        {**taking({"$ref": "#here"}), "$defs": {"x": {"$anchor": "here", "const": 1}}},
        [{"a": 1}],
        [{"a": 2}],
        [],
    ),
    "reference to nothing": (
        taking({"$ref": "#/$defs/NO"}),
        [{"a": 1}],
        [{}],
        ["$ref of a ('#/$defs/NO' has no target"],
    ),
    "reference to elsewhere": (taking({"$ref": "https://x.org/y.json"}), [{"a": 1}], [{}], ["$ref of a ("]),
    "reference to itself": (
        {**taking({"$ref": "#/$defs/x"}), "$defs": {"x": {"$ref": "#/$defs/x"}}},
        [{"a": 1}],
        [{}],
        ["refers to itself"],
    ),
    "pattern of Unicode letters in a class": (
        taking({"type": "string", "pattern": r"^[\p{L} ]+$"}),
        [{"a": "é"}],
        [{"a": 1}],
        ["pattern of a (Python has no \\p{L}"],
    ),
    "pattern of Unicode letters": (taking({"type": "string", "pattern": r"^\p{L}+$"}), [{"a": "éa"}], [{"a": "1"}], []),
    "pattern with a named group": (
        taking({"type": "string", "pattern": r"^(?<x>[0-9])\k<x>$"}),
        [{"a": "11"}],
        [{"a": "12"}],
        [],
    ),
    "invalid pattern": (taking({"type": "string", "pattern": "["}), [{"a": "x"}], [{"a": 1}], ["pattern of a ("]),
    "pattern of a name": (
        {"type": "object", "properties": {}, "patternProperties": {r"^\p{Lu}": {"type": "integer"}}},
        [{}],
        [],
        ["patternProperties of the whole"],
    ),
    "required at a property": (
        {"type": "object", "properties": {"a": {"type": "string", "required": True}}},
        [{"a": "x"}],
        [{}],
        [],
    ),
    "nullable": (
        taking({"type": "string", "nullable": True, "enum": ["x"]}),
        [{"a": None}, {"a": "x"}],
        [{"a": "y"}],
        [],
    ),
    "nullable reference": (
        {**taking({"$ref": "#/$defs/x", "nullable": True}), "$defs": {"x": {"const": 1}}},
        [{"a": None}, {"a": 1}],
        [{"a": 2}],
        [],
    ),
    "unknown format": (taking({"type": "string", "format": "colour"}), [{"a": "x"}], [{"a": 1}], []),
    "dependencies": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependencies": {"a": ["b"]}},
        [{}, {"b": 1}, {"a": 1, "b": 2}],
        [{"a": 1}],
        [],
    ),
    "bound that is a text": (
        taking({"type": "integer", "minimum": "1"}),
        [{"a": 0}],
        [{"a": "0"}],
        ["minimum of a ('1' is not a number)"],
    ),
    "length that is negative": (
        taking({"type": "string", "minLength": -1}),
        [{"a": ""}],
        [{"a": 1}],
        ["minLength of a"],
    ),
    "enum that is not a list": (taking({"enum": "x"}), [{"a": 1}], [{}], ["enum of a"]),
    "enum of nothing": (taking({"enum": []}), [{"a": 1}, {"a": "x"}], [{}], ["enum of a (it lists no value)"]),
    "numbers that a string lists": (
        taking({"type": "string", "enum": [1, 2.5]}),
        [{"a": "1"}, {"a": "2.5"}],
        [{"a": 1}, {"a": "3"}],
        ["enum of a (no value is of type 'string', read as '1', '2.5')"],
    ),
    "integers in quotes": (
        taking({"type": ["integer", "null"], "enum": ["1", "2", None]}),
        [{"a": 2}, {"a": None}],
        [{"a": "2"}, {"a": 3}],
        ["read as 1, 2, None)"],
    ),
    "values of the items at a list": (
        taking({"type": "array", "items": {"type": "string"}, "enum": ["x", "y"]}),
        [{"a": ["x", "y"]}, {"a": []}],
        [{"a": ["z"]}, {"a": "x"}],
        ["enum of a (no value is a list, read as values of the items)"],
    ),
    "constant of another type": (
        taking({"type": "boolean", "const": "x"}),
        [{"a": True}, {"a": False}],
        [{"a": "x"}],
        ["const of a (no value is of type 'boolean')"],
    ),
    "anyOf of nothing": (taking({"anyOf": []}), [{"a": 1}], [{}], ["anyOf of a"]),
    "property that is a word": (taking("string"), [{"a": 1}], [{}], ["schema of a ('string' is not a schema)"]),
    "properties that are a list": ({"type": "object", "properties": ["a"]}, [{}], [], ["properties of the whole"]),
    "arguments that are a text": ({"type": "string"}, [{}], [], []),
}

each_dialect = pytest.mark.parametrize("name", OTHER_DIALECTS)


@each_dialect
def test_schema_of_another_dialect_is_converted(name: str) -> None:
    schema, right, wrong, words = OTHER_DIALECTS[name]
    tool = tool_of(schema)
    for arguments in right:
        assert tool.arguments(arguments) == arguments
    for arguments in wrong:
        with pytest.raises(WrongArguments):
            tool.arguments(arguments)
    notes = notes_of(schema)
    assert len(notes) == bool(words)
    assert all(word in notes[0] for word in words)


@pytest.mark.parametrize("keyword", ["not", "if"])
def test_condition_that_nothing_fits_is_kept(keyword: str) -> None:
    schema = {keyword: {"enum": []}, "then": False}
    assert (modern(schema).schema, notes_of(schema)) == (schema, [])


@each_dialect
@pytest.mark.parametrize("form", ["JSON object", "raw strings", "own notation", "name and JSON"])
def test_schema_of_another_dialect_is_enforced(name: str, form: str) -> None:
    schema, right, wrong, _ = OTHER_DIALECTS[name]
    tool = tool_of(schema)
    enforced = required(form_of(form), [tool])
    for arguments in right:
        assert accepts(enforced, written(form_of(form), ("f", arguments))), arguments
    assert constraint(form_of(form), [tool], "auto") is not None
    if form == "JSON object" and not not_enforced(form_of(form), tool):
        for arguments in wrong:
            assert not accepts(enforced, written(form_of(form), ("f", arguments))), arguments


@pytest.mark.anyio
@each_dialect
async def test_tool_of_another_dialect_is_playable(name: str) -> None:
    schema, right, _, _ = OTHER_DIALECTS[name]

    class Plays(Environment):
        tool_choice = "required"

        def tasks(self) -> list[Task]:
            return [Task(id="t", prompt="Call it.")]

        def setup(self) -> None:
            given = schema if isinstance(schema.get("type"), str) and schema["type"].lower() == "object" else taking({})
            self.given: list[Any] = []
            self.tools.append(Tool(self.given.append, name="f", description="Call.", parameters=given, raw=True))

        async def rollout(self, conversation: Conversation) -> None:
            await self.episode.answer(await conversation.generate())

        @reward
        def called(self) -> int:
            return len(self.given)

    trajectory = await play(Plays, ScriptedEngine([call("f", **right[0])]))
    assert trajectory.outcome.scored, trajectory.error


def test_pattern_is_translated_from_ecma_script() -> None:
    assert python_pattern(r"^\d$").search("٣") is None
    assert python_pattern("^a$").search("a\n") is None
    assert python_pattern(r"\u{1F600}").search("😀")
    assert python_pattern(r"^[^]$").search("\n")
    with pytest.raises(BadPattern, match=r"Python has no \\p\{Greek\}"):
        python_pattern(r"\p{Greek}")


def test_shown_schema_stays_as_it_was_given() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "float", "default": None, "minimum": 1}}, "x-order": ["a"]}
    assert tool_of(schema).parameters == schema
    assert Sampling(schema=schema).schema == schema


def test_names_that_are_only_required_are_arguments() -> None:
    def take(**given: Any) -> str:
        return str(given)

    def take_named(prompt: str, url: str = "", data: str = "") -> str:
        return f"{prompt}{url}{data}"

    parameters = {
        "type": "object",
        "properties": {"prompt": {"type": "string"}},
        "required": ["prompt"],
        "oneOf": [{"required": ["url"]}, {"required": ["data"]}],
    }
    for function in (take, take_named):
        made = Tool(function, name="n", description="d", parameters=parameters)
        assert made.arguments({"prompt": "a", "url": "b"}) == {"prompt": "a", "url": "b"}
        with pytest.raises(WrongArguments):
            made.arguments({"prompt": "a"})
    with pytest.raises(WrongArguments, match="other"):
        made.arguments({"prompt": "a", "url": "b", "other": 1})
