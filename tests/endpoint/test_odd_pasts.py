"""Histories with content that is not text: a note replaces it in every format, and the request is answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from runner import Endpoint
from runner.chat_requests import Tolerated
from runner.messages import MAX_NOTE_LENGTH, note_of
from runner.testing import Reply, call
from tests.endpoint.serving import RUN, http, served
from tests.verifying import verify

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.asyncio_alone, pytest.mark.sample_functions(2)]

DATA = "iVBORw0KGgo" * 400
SECRET = "sEcReT" * 20
TEXT = {"type": "text", "text": "Look."}
ANTHROPIC_RUN = {"name": "run", "description": "Run a command.", "input_schema": RUN["function"]["parameters"]}
RESPONSES_RUN = {"type": "function", **RUN["function"]}


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def image(kind: str = "image") -> dict[str, Any]:
    return {"type": kind, "source": {"type": "base64", "media_type": "image/png", "data": DATA}}


DOCUMENT = {
    "type": "document",
    "title": "notes.pdf",
    "source": {"type": "base64", "media_type": "application/pdf", "data": DATA},
}
PLAIN_DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "zqplainz"}}
SEARCHED = {
    "type": "web_search_tool_result",
    "tool_use_id": "srvtoolu_1",
    "content": [
        {"type": "web_search_result", "title": "zqtitlez", "url": "https://a.example", "encrypted_content": SECRET}
    ],
}
SEARCHES = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "zqqueryz"}}
ODD_BLOCKS: dict[str, Any] = {
    "image": image(),
    "document": DOCUMENT,
    "plain document": PLAIN_DOCUMENT,
    "tool_reference": {"type": "tool_reference", "tool_name": "zqtoolz"},
    "search_result": {"type": "search_result", "title": "zqtitlez", "source": "https://a", "content": [TEXT]},
    "server_tool_use": SEARCHES,
    "web_search_tool_result": SEARCHED,
    "code_execution": {"type": "bash_code_execution_tool_result", "content": {"type": "x", "stdout": "zqstdoutz"}},
    "mcp_tool_use": {"type": "mcp_tool_use", "id": "m", "name": "zqtoolz", "server_name": "s", "input": {}},
    "container_upload": {"type": "container_upload", "file_id": "file_1"},
    "compaction": {"type": "compaction", "content": "zqsummaryz"},
    "unknown": {"type": "zqnewz", "anything": [1, {"deep": [None, "zqdeepz"]}]},
}
ODD_PARTS: dict[str, Any] = {
    "image_url": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}"}},
    "input_audio": {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}},
    "file": {"type": "file", "file": {"file_data": DATA, "filename": "zqnamez.pdf"}},
    "refusal": {"type": "refusal", "refusal": "zqrefusalz"},
    "thinking": {"type": "thinking", "thinking": [TEXT]},
    "video_url": {"type": "video_url", "video_url": {"url": "https://a.example/v.mp4"}},
    "unknown": {"type": "zqnewz", "x": 1},
}
ODD_ITEMS: dict[str, Any] = {
    "web_search_call": {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "zqqz"}},
    "file_search_call": {"type": "file_search_call", "id": "fs_1", "queries": ["zqqz"], "results": None},
    "code_interpreter_call": {"type": "code_interpreter_call", "id": "ci_1", "code": "print()", "outputs": []},
    "image_generation_call": {"type": "image_generation_call", "id": "ig_1", "result": DATA},
    "mcp_call": {"type": "mcp_call", "id": "mcp_1", "name": "zqtoolz", "arguments": "{}", "output": "zqoutputz"},
    "mcp_list_tools": {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "s", "tools": []},
    "local_shell_call": {"type": "local_shell_call", "id": "ls_1", "call_id": "c", "action": {"command": ["ls"]}},
    "local_shell_call_output": {"type": "local_shell_call_output", "id": "ls_2", "output": "zqoutputz"},
    "computer_call_output": {"type": "computer_call_output", "call_id": "c", "output": image("computer_screenshot")},
    "compaction": {"type": "compaction", "id": "cmp_1", "encrypted_content": SECRET},
    "unknown": {"type": "zqnewz", "x": 1},
}
CUT = ['{"command": "l', "[1]", "5", "null", "", "ls -l", '{"command": "ls"} and more', '"text"']


async def asked(path: str, body: Any, tmp_path: Path, *, says: Any = ("Done.",)) -> Any:
    """The trajectory of two requests. The second request adds an answer and a question to the history of the first."""

    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            for _ in range(2):
                answer = await client.post(path, json=body)
                assert answer.status_code == 200, answer.text

    file = tmp_path / "run.db"
    trajectories = await served(loop, [*says, *says], file=file)
    checked = await anyio.to_thread.run_sync(verify, file)
    assert checked.exit_code == 0, checked.output
    (trajectory,) = trajectories
    contents = "".join(message["content"] for message in trajectory.messages)
    assert DATA not in contents
    assert SECRET not in contents
    return trajectory


def messages_body(*messages: Any) -> dict[str, Any]:
    return {"model": "any", "max_tokens": 100, "tools": [ANTHROPIC_RUN], "messages": list(messages)}


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("name", ODD_BLOCKS)
@pytest.mark.parametrize("where", ["user", "assistant", "tool_result", "last tool_result"])
async def test_an_odd_block_of_the_past_is_a_note_in_messages(name: str, where: str, tmp_path: Path) -> None:
    block = ODD_BLOCKS[name]
    use = {"type": "tool_use", "id": "toolu_1", "name": "run", "input": {"command": "ls"}}
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a file"}
    if "tool_result" in where:
        result["content"] = [TEXT, block]
    messages = [
        user([TEXT, block] if where == "user" else [TEXT]),
        {"role": "assistant", "content": [TEXT, *([block] if where == "assistant" else []), use]},
        user([result]),
    ]
    if where != "last tool_result":
        messages += [{"role": "assistant", "content": [TEXT]}, user([TEXT])]
    trajectory = await asked("/messages", messages_body(*messages), tmp_path)
    assert Tolerated.NOT_TEXT in trajectory.requests[0].tolerated
    assert note_of(block) in "".join(each["content"] for each in trajectory.messages)


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("name", ODD_PARTS)
@pytest.mark.parametrize("where", ["user", "assistant", "tool", "last tool"])
async def test_an_odd_part_of_the_past_is_a_note_in_chat(name: str, where: str, tmp_path: Path) -> None:
    part = ODD_PARTS[name]
    function = {"name": "run", "arguments": "{}"}
    calls = [{"id": "c", "type": "function", "function": function}]
    odd = [TEXT, part]
    messages = [
        user(odd if where == "user" else "Look."),
        {"role": "assistant", "content": odd if where == "assistant" else None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": odd if "tool" in where else "a file"},
    ]
    if where != "last tool":
        messages += [{"role": "assistant", "content": "So."}, user("And?")]
    body = {"model": "any", "messages": messages, "tools": [RUN]}
    trajectory = await asked("/chat/completions", body, tmp_path)
    assert Tolerated.NOT_TEXT in trajectory.requests[0].tolerated


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("name", ODD_ITEMS)
async def test_an_odd_item_of_the_past_is_a_note_in_responses(name: str, tmp_path: Path) -> None:
    body = {"model": "any", "tools": [RESPONSES_RUN], "input": [user("Look."), ODD_ITEMS[name], user("And?")]}
    trajectory = await asked("/responses", body, tmp_path)
    assert Tolerated.NOT_TEXT in trajectory.requests[0].tolerated


@pytest.mark.parametrize("where", ["user", "output", "last output"])
async def test_an_image_of_the_past_is_a_note_in_responses(where: str, tmp_path: Path) -> None:
    picture = {"type": "input_image", "image_url": f"data:image/png;base64,{DATA}"}
    words = {"type": "input_text", "text": "Look."}
    items: list[Any] = [
        {"role": "user", "content": [words, picture] if where == "user" else [words]},
        {"type": "function_call", "call_id": "c", "name": "run", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [words, picture] if "output" in where else "a file"},
    ]
    if where != "last output":
        items.append(user("And?"))
    body = {"model": "any", "tools": [RESPONSES_RUN], "input": items}
    trajectory = await asked("/responses", body, tmp_path)
    assert Tolerated.NOT_TEXT in trajectory.requests[0].tolerated


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("arguments", CUT)
@pytest.mark.parametrize("form", ["chat", "responses", "messages"])
async def test_earlier_arguments_that_are_not_an_object_are_accepted(form: str, arguments: str, tmp_path: Path) -> None:
    function = {"name": "run", "arguments": arguments}
    call_item = {"type": "function_call", "call_id": "c", **function}
    use = {"type": "tool_use", "id": "c", "name": "run", "input": arguments}
    bodies: dict[str, Any] = {
        "/chat/completions": {
            "messages": [
                user("Look."),
                {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
                {"role": "tool", "tool_call_id": "c", "content": "wrong"},
            ],
            "tools": [RUN],
        },
        "/responses": {
            "input": [user("Look."), call_item, {"type": "function_call_output", "call_id": "c", "output": "wrong"}],
            "tools": [RESPONSES_RUN],
        },
        "/messages": messages_body(
            user("Look."),
            {"role": "assistant", "content": [use]},
            user([{"type": "tool_result", "tool_use_id": "c", "content": "wrong"}]),
        ),
    }
    path = {"chat": "/chat/completions", "responses": "/responses", "messages": "/messages"}[form]
    trajectory = await asked(path, bodies[path], tmp_path)
    (made,) = trajectory.messages[1]["tool_calls"]
    assert made["function"]["arguments"] == ({"unparsed": arguments} if arguments.strip() else {})


async def test_image_is_refused_last_and_a_note_earlier() -> None:
    """A client that keeps the image in its history is answered from the next message on."""

    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            forms: Any = {
                "/chat/completions": ("messages", ODD_PARTS["image_url"], {}),
                "/messages": ("messages", image(), {"max_tokens": 9}),
                "/responses": ("input", {"type": "input_image", "image_url": "x"}, {}),
            }
            for path, (name, part, more) in forms.items():
                asks = {"role": "user", "content": [part]}
                answer = await client.post(path, json={"model": "any", name: [asks], **more})
                assert answer.status_code == 400
                assert "text" in answer.json()["error"]["message"]
                answer = await client.post(path, json={"model": "any", name: [asks, user("Never mind.")], **more})
                assert answer.status_code == 200, answer.text

    await served(loop, lambda _: "Done.", serve={"train": True})


async def test_our_own_call_with_cut_arguments_is_that_of_its_turn() -> None:
    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            body: dict[str, Any] = {"model": "any", "messages": [user("Look.")], "tools": [RUN]}
            message = (await client.post("/chat/completions", json=body)).json()["choices"][0]["message"]
            (made,) = message["tool_calls"]
            made["function"]["arguments"] = made["function"]["arguments"][:9]
            body["messages"] += [message, {"role": "tool", "tool_call_id": made["id"], "content": "a file"}]
            assert (await client.post("/chat/completions", json=body)).status_code == 200

    (trajectory,) = await served(loop, [Reply("I look.", calls=[call("run", command="ls -l")]), "Done."])
    assert [each.verdict for each in trajectory.requests] == ["new", "append"]
    assert Tolerated.ARGUMENTS_CUT in trajectory.requests[1].tolerated


def test_a_note_is_short_and_has_no_data() -> None:
    parts: list[Any] = [*ODD_BLOCKS.values(), *ODD_PARTS.values(), *ODD_ITEMS.values()]
    for part in parts:
        note = note_of(part)
        assert DATA[:50] not in note
        assert SECRET[:50] not in note
    deep: Any = {"type": "x"}
    for _ in range(500):
        deep = {"type": "x", "more": deep, "words": ["word"] * 5_000}
    assert len(note_of(deep)) < MAX_NOTE_LENGTH + 100
