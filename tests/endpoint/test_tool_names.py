"""Names of tools that providers and MCP servers allow: the model sees each name unchanged, and calls the tool by it."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from runner import Endpoint
from runner.parsing.roundtrip import supports_name
from runner.parsing.turn_format import TurnFormat
from runner.testing import call
from runner.tools.tool import Tool
from tests.endpoint.serving import chat_body, http, openai_client, served, user
from tests.parsing.enforced import accepts, every_class, form_of, required, written
from tests.parsing.families import FAMILIES, family
from tests.parsing.test_roundtrip import turn
from tests.playing import recording

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]

ALLOWED = [
    "mcp__github__" + "create_or_update_a_file_of_a_repository_with_a_message" * 2,
    "a" * 65,
    "b" * 128,
    "c" * 200,
    "1password_read",
    "7-zip",
    "123",
    "-dash",
    "files.read",
    "files/read",
    "ns:tool",
    "a@b",
    "größe_lesen",
    "読む",
]
UNUSUAL = ["read a file", "read(file)", 'read"file"', "read<file>", "a=b", "a,b", "a\\b", "d" * 257, "a\nb", "a\0b"]
PARAMETERS: Any = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


def chat_tool(name: str) -> Any:
    return {"type": "function", "function": {"name": name, "description": "Do it.", "parameters": PARAMETERS}}


def our_tool(name: str) -> Tool:
    made = Tool(lambda **given: str(given), name="tool", description="Do it.", parameters=PARAMETERS)
    made.name = name
    return made


def by_name(name: str) -> Any:
    return recording([call(name, command="ls"), "Done."], template="hermes")


@pytest.mark.parametrize("name", [each for each in ALLOWED if len(each) <= 128])
def test_an_author_may_give_a_tool_an_allowed_name(name: str) -> None:
    assert Tool(lambda **given: str(given), name=name, description="Do it.", parameters=PARAMETERS).name == name


@every_class
def test_an_allowed_name_is_read_and_enforced_in_every_format(name: str) -> None:
    form = form_of(name)
    for each in ALLOWED:
        made = our_tool(each)
        assert supports_name(turn(form), made), each
        assert accepts(required(form, [made]), written(form, (each, {"command": "ls"}))), each


@pytest.mark.parametrize("name", FAMILIES)
def test_an_allowed_name_is_read_in_every_family(name: str) -> None:
    form: TurnFormat = family(name).form
    assert [each for each in ALLOWED if not supports_name(form, our_tool(each))] == []


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize("stream", [False, True])
async def test_openais_client_gets_an_allowed_name_as_it_gave_it(name: str, stream: bool) -> None:
    async def loop(endpoint: Endpoint) -> None:
        messages: list[Any] = [user("One.")]
        choice: Any = {"type": "function", "function": {"name": name}}
        asked: Any = {"model": "any", "messages": messages, "tools": [chat_tool(name)], "tool_choice": choice}
        async with openai_client(endpoint) as client:
            if stream:
                async with client.chat.completions.stream(**asked) as events:
                    message = (await events.get_final_completion()).choices[0].message
            else:
                message = (await client.chat.completions.create(**asked)).choices[0].message
            (made,) = message.tool_calls or []
            assert (made.type, made.function.name) == ("function", name)
            messages += [message.model_dump(exclude_none=True, exclude={"parsed"})]
            messages += [{"role": "tool", "tool_call_id": made.id, "content": "a file"}]
            done = await client.chat.completions.create(model="any", messages=messages, tools=asked["tools"])
            assert done.choices[0].message.content == "Done."

    (trajectory,) = await served(loop, by_name(name))
    assert [each.verdict for each in trajectory.requests] == ["new", "append"]


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("name", ALLOWED)
async def test_anthropics_client_gets_an_allowed_name_as_it_gave_it(name: str) -> None:
    async def loop(endpoint: Endpoint) -> None:
        tool: Any = {"name": name, "description": "Do it.", "input_schema": PARAMETERS}
        client = anthropic.AsyncAnthropic(base_url=endpoint.root_url, api_key=endpoint.api_key, max_retries=0)
        async with client:
            message = await client.messages.create(
                model="any", max_tokens=500, tools=[tool], messages=[user("One.")], tool_choice={"type": "any"}
            )
        (block,) = message.content
        assert (block.type, getattr(block, "name", "")) == ("tool_use", name)

    await served(loop, by_name(name))


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("name", ALLOWED)
async def test_a_responses_client_gets_an_allowed_name_as_it_gave_it(name: str) -> None:
    async def loop(endpoint: Endpoint) -> None:
        tool: Any = {"type": "function", "name": name, "parameters": PARAMETERS, "strict": False}
        async with openai_client(endpoint) as client:
            response = await client.responses.create(model="any", tools=[tool], input="One.")
        (item,) = response.output
        assert (item.type, getattr(item, "name", "")) == ("function_call", name)

    await served(loop, by_name(name))


@pytest.mark.parametrize("template", ["hermes", "pythonic"])
async def test_tool_name_that_cannot_be_written_leaves_out_that_tool(template: str) -> None:
    async def loop(endpoint: Endpoint) -> None:
        body = chat_body([user("One.")], tools=[chat_tool(name) for name in [*UNUSUAL, "run"]])
        async with http(endpoint) as client:
            answer = await client.post("/chat/completions", json=body)
        assert answer.status_code == 200, answer.text

    engine = recording([call("run", command="ls")], template=template)
    (trajectory,) = await served(loop, engine)
    shown = [tool["function"]["name"] for tool in trajectory.segments[0].tools]
    left_out = trajectory.requests[0].not_granted["tools"]
    assert sorted([*shown, *left_out]) == sorted([*UNUSUAL, "run"])
    assert "run" in shown
    assert {"d" * 257, "a\nb", "a\0b"} <= set(left_out)
    assert ("read a file" in shown) == (template == "hermes"), (
        "JSON can contain this name, but a call in Python's syntax cannot"
    )


async def test_a_required_tool_that_was_left_out_is_refused_by_name() -> None:
    async def loop(endpoint: Endpoint) -> None:
        choice = {"type": "function", "function": {"name": "read a file"}}
        tools = [chat_tool("read a file"), chat_tool("run")]
        async with http(endpoint) as client:
            answer = await client.post(
                "/chat/completions", json=chat_body([user("One.")], tools=tools, tool_choice=choice)
            )
            assert answer.status_code == 400
            assert "'read a file'" in answer.json()["error"]["message"]
            await client.post("/chat/completions", json=chat_body([user("One.")], tools=tools))

    await served(loop, recording(["Done."], template="pythonic"))
