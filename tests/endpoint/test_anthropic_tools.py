"""Tools that Anthropic's clients name by their type alone: tools that the client runs are shown, others are noted."""

from __future__ import annotations

import typing
from typing import Any

import anthropic
import pytest
from anthropic.types import beta as types
from jsonschema import Draft202012Validator

from runner import Endpoint
from runner.endpoint.anthropic_messages import AnthropicMessages
from runner.endpoint.anthropic_tools import known_function
from runner.testing import call
from runner.tools.external_tools import tools_of
from tests.endpoint.serving import served, user
from tests.playing import recording

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]

EDITS = "str_replace_based_edit_tool"
TYPED: dict[str, tuple[str, dict[str, Any]]] = {
    "bash_20241022": ("bash", {"command": "ls"}),
    "bash_20250124": ("bash", {"restart": True}),
    "text_editor_20241022": ("str_replace_editor", {"command": "undo_edit", "path": "/a"}),
    "text_editor_20250124": (
        "str_replace_editor",
        {"command": "insert", "path": "/a", "insert_line": 1, "new_str": "b"},
    ),
    "text_editor_20250429": (EDITS, {"command": "str_replace", "path": "/a", "old_str": "a", "new_str": "b"}),
    "text_editor_20250728": (EDITS, {"command": "insert", "path": "/a", "insert_line": 0, "insert_text": "b"}),
    "memory_20250818": ("memory", {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"}),
}
NOTED = [
    {"type": "computer_20250124", "name": "computer", "display_width_px": 800, "display_height_px": 600},
    {"type": "web_search_20250305", "name": "web_search"},
    {"type": "web_fetch_20250910", "name": "web_fetch"},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "bash", "name": "bash"},
    {"type": "bash_99", "name": "bash"},
]


def asked(*tools: Any) -> Any:
    body = {"model": "any", "max_tokens": 50, "messages": [user("One.")], "tools": list(tools)}
    return AnthropicMessages().read(body, {}).chat_call


@pytest.mark.parametrize("kind", TYPED)
def test_a_tool_that_the_client_runs_is_shown_with_its_schema(kind: str) -> None:
    name, arguments = TYPED[kind]
    found = asked({"type": kind, "name": name})
    (tool,) = tools_of(found.tools)
    assert (tool.name, found.not_granted) == (name, {})
    assert tool.description
    Draft202012Validator.check_schema(tool.parameters)
    assert tool.arguments(arguments) == arguments
    wrongs: list[dict[str, Any]] = [{"command": "fly", "path": "/a"}, {"path": 1, "command": "view"}]
    for wrong in [{"command": 1}] if kind.startswith("bash") else wrongs:
        assert not Draft202012Validator(tool.parameters).is_valid(wrong)


@pytest.mark.parametrize("version", ["20250429", "20250728"])
def test_newer_editors_insert_by_another_field_and_undo_nothing(version: str) -> None:
    properties = (known_function({"type": f"text_editor_{version}"}) or {})["parameters"]["properties"]
    assert "undo_edit" not in properties["command"]["enum"]
    assert "insert_text" in properties


def test_schema_of_memory_has_every_field_of_the_client() -> None:
    known = known_function({"type": "memory_20250818"}) or {}
    properties = known["parameters"]["properties"]
    commands = typing.get_args(typing.get_args(types.BetaMemoryTool20250818Command)[0])
    fields = {name: field for each in commands for name, field in each.model_fields.items()}
    assert set(fields) == set(properties)
    names = {typing.get_args(each.model_fields["command"].annotation)[0] for each in commands}
    assert names == set(properties["command"]["enum"])


def test_character_limit_is_part_of_the_tool_description() -> None:
    known = known_function({"type": "text_editor_20250728", "name": EDITS, "max_characters": 5_000}) or {}
    assert "5000 characters" in known["description"]


@pytest.mark.parametrize("tool", NOTED, ids=lambda tool: tool["type"])
def test_typed_tool_that_is_not_supported_is_noted_by_name(tool: Any) -> None:
    found = asked(tool)
    assert found.tools == []
    assert found.not_granted == {"tools": [tool["name"]]}


def test_a_typed_tool_with_a_schema_of_its_own_keeps_it() -> None:
    schema = {"type": "object", "properties": {"cmd": {"type": "string"}}}
    (tool,) = asked({"type": "bash_20250124", "name": "bash", "input_schema": schema}).tools
    assert tool["function"]["parameters"] == schema


@pytest.mark.parametrize("kind", TYPED)
async def test_anthropics_client_calls_a_typed_tool_and_continues_the_ids(kind: str) -> None:
    name, arguments = TYPED[kind]

    async def loop(endpoint: Endpoint) -> None:
        messages: list[Any] = [user("One.")]
        tools: Any = [{"type": kind, "name": name}]
        async with anthropic.AsyncAnthropic(base_url=endpoint.root_url, api_key=endpoint.api_key) as client:
            for _ in range(2):
                answer = await client.beta.messages.create(
                    model="any", max_tokens=500, messages=messages, tools=tools, betas=["context-management-2025-06-27"]
                )
                (block,) = (each for each in answer.content if each.type == "tool_use")
                assert (block.name, block.input) == (name, arguments)
                messages += [{"role": "assistant", "content": [each.model_dump() for each in answer.content]}]
                result = {"type": "tool_result", "tool_use_id": block.id, "content": "done"}
                messages += [{"role": "user", "content": [result]}]

    (trajectory,) = await served(loop, recording([call(name, **arguments)] * 2, template="hermes"))
    assert [each.verdict for each in trajectory.requests] == ["new", "append"]
