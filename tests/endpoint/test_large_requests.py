"""Large requests: other requests are not blocked, the work stops when the client leaves, and sizes are limited."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import anyio
import httpx
import orjson
import pytest

from runner import Endpoint
from runner.endpoint.application import MAX_BYTES_READ_ON_LOOP
from runner.endpoint.refusals import Refused
from runner.endpoint.request_body import MAX_CALLS, MAX_TOOL_BYTES, MAX_TOOLS, MAX_VALUES, decode_body
from runner.episode import chat_service
from runner.episode.client_messages import MessageReader
from runner.errors import BadMessage
from runner.messages import AnsweredCalls, CallIndex, Message, check_answers
from runner.tools.external_tools import tool_of
from tests.endpoint.serving import RUN, chat_body, http, served, user
from tests.playing import recording, until

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]

PARAMETERS: Any = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(6)}, "required": ["p0"]}
SMALL = chat_body([user("Small.")], tools=[RUN])


def chat_tools(count: int) -> list[Any]:
    return [
        {"type": "function", "function": {"name": f"tool_{n}", "description": "Do it.", "parameters": PARAMETERS}}
        for n in range(count)
    ]


def calling(count: int, at_once: int) -> list[Any]:
    """Return a history of this many calls, with their results."""
    messages: list[Any] = [user("One.")]
    for first in range(0, count, at_once):
        ids = [f"c{number}" for number in range(first, min(first + at_once, count))]
        function = {"name": "run", "arguments": json.dumps({"command": "ls"})}
        calls = [{"id": each, "type": "function", "function": function} for each in ids]
        messages += [{"role": "assistant", "content": "", "tool_calls": calls}]
        messages += [{"role": "tool", "tool_call_id": each, "content": "a file"} for each in ids]
    return [*messages, user("Large.")]


def responses_of(messages: list[Any], tools: list[Any]) -> dict[str, Any]:
    items: list[Any] = []
    for message in messages:
        if message["role"] == "tool":
            answered = message["tool_call_id"]
            items += [{"type": "function_call_output", "call_id": answered, "output": message["content"]}]
        for call in message.get("tool_calls", ()):
            items += [{"type": "function_call", "call_id": call["id"], **call["function"]}]
        if message["role"] == "user":
            items += [message]
    return {"model": "any", "input": items, "tools": [{"type": "function", **tool["function"]} for tool in tools]}


def anthropic_of(messages: list[Any], tools: list[Any]) -> dict[str, Any]:
    converted: list[Any] = []
    for message in messages:
        if message["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            if converted[-1]["role"] == "user":
                converted[-1]["content"].append(block)
            else:
                converted += [{"role": "user", "content": [block]}]
        elif message["role"] == "user":
            converted += [{"role": "user", "content": [{"type": "text", "text": message["content"]}]}]
        else:
            blocks = [
                {"type": "tool_use", "id": call["id"], "name": "run", "input": {"command": "ls"}}
                for call in message["tool_calls"]
            ]
            converted += [{"role": "assistant", "content": blocks}]
    functions = [tool["function"] for tool in tools]
    named = [{"name": each["name"], "input_schema": each["parameters"]} for each in functions]
    return {"model": "any", "max_tokens": 50, "messages": converted, "tools": named}


LARGE: Mapping[str, tuple[list[Any], list[Any]]] = {
    "1,000 tools": ([user("Large.")], chat_tools(1_000)),
    "4,000 calls in turns": (calling(4_000, 2), [RUN]),
    "4,000 calls at once": (calling(4_000, 4_000), [RUN]),
}
PATHS = ("/chat/completions", "/responses", "/messages", "/messages/count_tokens")


def body_of(path: str, name: str) -> dict[str, Any]:
    messages, tools = LARGE[name]
    if path == "/chat/completions":
        return chat_body(messages, tools=tools)
    return responses_of(messages, tools) if path == "/responses" else anthropic_of(messages, tools)


# --- other requests are not blocked


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("path", PATHS)
async def test_a_request_that_comes_after_a_large_one_is_answered_before_it(path: str, name: str) -> None:
    answered: list[str] = []

    async def loop(endpoint: Endpoint) -> None:
        raw = orjson.dumps(body_of(path, name))
        assert len(raw) > MAX_BYTES_READ_ON_LOOP

        async def ask(what: str, path: str, raw: bytes) -> None:
            answer = await client.post(path, content=raw)
            assert answer.status_code == 200, answer.text
            answered.append(what)

        async with http(endpoint) as client:
            # A first request imports and learns, so that neither measured request pays for this.
            assert (
                await client.post("/chat/completions", json=chat_body([user("First.")], tools=[RUN]))
            ).status_code == 200
            async with anyio.create_task_group() as group:
                group.start_soon(ask, "large", path, raw)
                await until(lambda: endpoint._route.in_flight > 0)
                group.start_soon(ask, "small", "/chat/completions", orjson.dumps(SMALL))

    engine = recording(lambda _: "Done.", template="hermes", context=10_000_000)
    await served(loop, engine, serve={"train": False})
    assert answered == ["small", "large"]


# --- work for a disconnected client ends


@pytest.mark.parametrize("path", PATHS)
async def test_tools_of_a_client_that_has_left_are_looked_at_no_further(path: str, monkeypatch: Any) -> None:
    made: list[int] = []
    make = tool_of

    def counted(index: int, tool: Any) -> Any:
        made.append(index)
        return make(index, tool)

    async def loop(endpoint: Endpoint) -> None:
        monkeypatch.setattr(chat_service, "tool_of", counted)
        raw = orjson.dumps(body_of(path, "1,000 tools"))
        async with http(endpoint) as client, anyio.create_task_group() as group:
            group.start_soon(_post, client, path, raw)
            await until(lambda: len(made) > 5)
            group.cancel_scope.cancel()
        await until(lambda: endpoint._route.in_flight == 0)
        at_its_end = len(made)
        async with http(endpoint) as client:
            assert (await client.post("/chat/completions", json=SMALL)).status_code == 200
        assert at_its_end <= len(made) < 1_000

    await served(loop, recording(lambda _: "Done.", template="hermes", context=10_000_000), serve={"train": False})


@pytest.mark.parametrize("path", PATHS)
async def test_messages_of_a_client_that_has_left_are_read_no_further(path: str, monkeypatch: Any) -> None:
    read: list[int] = []
    read_one = MessageReader._read

    def counted(self: MessageReader, index: int, message: Any) -> Any:
        read.append(index)
        return read_one(self, index, message)

    async def loop(endpoint: Endpoint) -> None:
        monkeypatch.setattr(MessageReader, "_read", counted)
        monkeypatch.setattr(chat_service, "LOOP_SLICE_SECONDS", 0.0)
        raw = orjson.dumps(body_of(path, "4,000 calls in turns"))
        async with http(endpoint) as client, anyio.create_task_group() as group:
            group.start_soon(_post, client, path, raw)
            await until(lambda: len(read) > 5)
            group.cancel_scope.cancel()
        await until(lambda: endpoint._route.in_flight == 0)
        assert len(read) < 4_000

    await served(loop, recording(lambda _: "Done.", template="hermes", context=10_000_000), serve={"train": False})


async def _post(client: httpx.AsyncClient, path: str, raw: bytes) -> None:
    await client.post(path, content=raw)


# --- limits


def too_large(path: str, what: str) -> tuple[dict[str, Any], str]:
    described = {"name": "run", "description": "x" * MAX_TOOL_BYTES, "parameters": PARAMETERS}
    match what:
        case "tools":
            messages, tools, said = [user("One.")], chat_tools(MAX_TOOLS + 1), f"request has {MAX_TOOLS + 1:,} tools"
        case "calls":
            messages, tools, said = calling(MAX_CALLS + 1, MAX_CALLS + 1), [RUN], f"{MAX_CALLS + 1:,} calls of tools"
            messages = [*messages[:2], user("One.")]
        case _:
            messages, tools = [user("One.")], [{"type": "function", "function": described}]
            said = "tools[0]: this tool has"
    if path == "/chat/completions":
        return chat_body(messages, tools=tools), said
    made = responses_of(messages, tools) if path == "/responses" else anthropic_of(messages, tools)
    for tool in made["tools"]:
        if what == "bytes":
            tool["description"] = described["description"]
    return made, said


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("what", ["tools", "calls", "bytes"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_request_of_too_much_is_refused_by_its_number(path: str, what: str) -> None:
    body, said = too_large(path, what)
    if (path, what) == ("/responses", "calls"):
        said = "input: the list has 10,003 items"

    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            refused = await client.post(path, json=body)
            assert (refused.status_code, refused.headers["x-should-retry"]) == (400, "false")
            assert said in refused.json()["error"]["message"]
            assert (await client.post("/chat/completions", json=SMALL)).status_code == 200

    await served(loop, recording(lambda _: "Done.", template="hermes"), serve={"train": False})


@pytest.mark.parametrize(
    "raw",
    [
        orjson.dumps({"x": [1] * (MAX_VALUES + 1)}),
        orjson.dumps({"x": [{}] * (MAX_VALUES + 1)}),
        orjson.dumps({"x": [[]] * (MAX_VALUES + 1)}),
        orjson.dumps({"x": {str(number): number for number in range(MAX_VALUES + 1)}}),
        orjson.dumps({"x": ["a"] * (2 * MAX_VALUES + 2)}),
        orjson.dumps({"x": ['\\"'] * (MAX_VALUES + 1)}),
        b'{"x": ' + b"[" * (MAX_VALUES + 1) + b"]" * (MAX_VALUES + 1) + b"}",
        b'{"x": ' + b"[" * (MAX_VALUES + 1),
    ],
    ids=["numbers", "objects", "lists", "members", "strings", "quotes", "nested", "unclosed"],
)
def test_a_body_of_too_many_values_is_refused_before_it_is_read(raw: bytes, monkeypatch: Any) -> None:
    def never(_: bytes) -> Any:
        raise AssertionError("it was read")

    monkeypatch.setattr(orjson, "loads", never)
    with pytest.raises(Refused, match="values, more than 500,000"):
        decode_body(raw)


def test_a_text_that_looks_like_many_values_is_read() -> None:
    text = 'a, {"b": [1, 2]}, \\" \\\\ {[,' * MAX_VALUES
    assert decode_body(orjson.dumps({"x": text, "y": [text, "\\"]}))["x"] == text


# --- the time for a history grows only with its length


class Id(str):
    """An id that counts its comparisons."""

    compared = 0
    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Id.compared += 1
        return str.__eq__(self, other)


def history(ids: list[str], answers: list[str]) -> list[Message]:
    function: Any = {"name": "run", "arguments": {}}
    calls: list[Any] = [{"id": each, "type": "function", "function": function} for each in ids]
    spoken: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    return [spoken, *({"role": "tool", "content": "", "tool_call_id": each} for each in answers)]  # type: ignore[list-item]


@pytest.mark.parametrize("order", ["as called", "backwards", "unknown"])
def test_results_of_many_calls_are_matched_with_few_comparisons(order: str) -> None:
    count = 1_000
    ids = [f"c{number}" for number in range(count)]
    answers = {"as called": ids, "backwards": ids[::-1], "unknown": [f"x{number}" for number in range(count)]}[order]
    messages = history([Id(each) for each in ids], [Id(each) for each in answers])
    Id.compared = 0
    answered = AnsweredCalls()
    found = [answered.by(index, message) for index, message in enumerate(messages)]
    if order == "unknown":
        assert set(found) == {None}
    else:
        check_answers(messages)
        assert found[1:] == [CallIndex(0, ids.index(each)) for each in answers]
    assert Id.compared <= 20 * count


def test_calls_of_one_id_are_answered_in_their_order() -> None:
    answered = AnsweredCalls()
    found = [answered.by(index, each) for index, each in enumerate(history(["a", "b", "a"], ["a", "a", "b", "a"]))]
    assert found[1:] == [CallIndex(0, 0), CallIndex(0, 2), CallIndex(0, 1), CallIndex(0, 2)]
    copied = answered.copied()
    assert copied.by(9, {"role": "tool", "content": "", "tool_call_id": "b"}) == CallIndex(0, 1)


def test_a_result_of_no_call_is_refused_after_many_that_are_right() -> None:
    with pytest.raises(BadMessage, match="'x'"):
        check_answers(history(["a", "b"], ["b", "a", "x"]))
