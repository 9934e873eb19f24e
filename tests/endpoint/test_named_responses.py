"""Earlier responses and items that a request names only by their ids: they are the sampled turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import anyio.to_thread
import httpx
import openai
import pytest

from runner import Endpoint
from runner.chat_requests import Tolerated
from runner.testing import Reply, call
from tests.endpoint.serving import http, openai_client, served, user
from tests.verifying import verify

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.asyncio_alone]

RUN: Any = {
    "type": "function",
    "name": "run",
    "description": "Run a command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
SAYS = [
    Reply("<think>\nHm.\n</think>\n\nI look.", calls=[call("run", command="ls"), call("run", command="pwd")]),
    Reply("And again.", calls=[call("run", command="cat")]),
    "Done.",
    "Gladly.",
]


def results(output: Any) -> list[Any]:
    made = [item for item in output if item["type"] == "function_call"]
    return [
        {"type": "function_call_output", "call_id": each["call_id"], "output": f"result of {each['arguments']}"}
        for each in made
    ]


async def respond(client: httpx.AsyncClient, items: Any, **further: Any) -> dict[str, Any]:
    answer = await client.post("/responses", json={"model": "any", "input": items, "tools": [RUN], **further})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def verdicts(trajectories: Any) -> list[str]:
    (trajectory,) = trajectories
    assert trajectory.reward is not None
    return [request.verdict.value for request in trajectory.requests]


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("store", [True, None, False])
@pytest.mark.parametrize("instructions", ["always", "never", "changed"])
async def test_request_with_previous_response_id_continues_that_response(
    store: bool | None, instructions: str, tmp_path: Path
) -> None:
    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            previous, items = None, [user("Mend it.")]
            for number in range(4):
                own = {"always": "You mend.", "never": None, "changed": f"You mend, {number}."}[instructions]
                answer = await respond(client, items, previous_response_id=previous, store=store, instructions=own)
                assert answer["previous_response_id"] == previous
                previous, items = answer["id"], results(answer["output"]) or [user("And?")]

    path = tmp_path / "run.db"
    trajectories = await served(loop, SAYS, file=path)
    later = "edited" if instructions == "changed" else "append"
    assert verdicts(trajectories) == ["new", later, later, later]
    assert all(Tolerated.REFERENCE in each.tolerated for each in trajectories[0].requests[1:])
    checked = await anyio.to_thread.run_sync(verify, path)
    assert checked.exit_code == 0, checked.output


async def test_second_continuation_of_one_response_is_a_rewind() -> None:
    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            first = await respond(client, "Mend it.")
            for text in ("a", "b"):
                answered = [{**each, "output": text} for each in results(first["output"])]
                await respond(client, answered, previous_response_id=first["id"])

    trajectories = await served(loop, [SAYS[0], "One.", "Two."])
    assert verdicts(trajectories) == ["new", "append", "rewound"]


@pytest.mark.parametrize("which", ["all", "reasoning", "message", "function_call", "calls in full", "again and again"])
async def test_items_that_are_named_by_their_ids_are_those_of_the_turn(which: str) -> None:
    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            items: list[Any] = [user("Mend it.")]
            for _ in range(3):
                output = (await respond(client, items))["output"]
                for item in output:
                    refers = which in ("all", "again and again", item["type"])
                    refers |= which == "calls in full" and item["type"] != "function_call"
                    items.append({"type": "item_reference", "id": item["id"]} if refers else item)
                if which == "again and again":
                    items.append(items[-1])
                items += results(output)

    trajectories = await served(loop, SAYS[:3])
    assert verdicts(trajectories) == ["new", "append", "append"]
    assert [segment.cause for segment in trajectories[0].segments] == ["start"]
    assert Tolerated.REFERENCE in trajectories[0].requests[1].tolerated


@pytest.mark.parametrize("given", ["rs_000000000000", "msg_68a1f0c9b4d08190a1b2c3d4e5f60718", "x", "item_1"])
async def test_an_item_that_is_not_known_is_answered_by_404_and_its_id(given: str) -> None:
    async def loop(endpoint: Endpoint) -> None:
        items: Any = [user("Mend it."), {"type": "item_reference", "id": given}, user("And?")]
        async with openai_client(endpoint) as client:
            for stream in (False, True):
                with pytest.raises(openai.NotFoundError, match=f"Item with id '{given}' not found"):
                    await client.responses.create(model="any", input=items, stream=stream)
            await client.responses.create(model="any", input="Mend it.", tools=[RUN])

    assert verdicts(await served(loop, ["Done."])) == ["new"]


@pytest.mark.parametrize("given", ["resp_000000000000", "resp_68a1f0c9b4d08190a1b2c3d4e5f60718", "x"])
async def test_a_response_that_is_not_known_is_answered_as_openai_answers(given: str) -> None:
    async def loop(endpoint: Endpoint) -> None:
        async with openai_client(endpoint) as client:
            with pytest.raises(openai.BadRequestError, match=f"response with id '{given}' not found") as error:
                await client.responses.create(model="any", input="And?", previous_response_id=given)
            assert error.value.code == "previous_response_not_found"
            with pytest.raises(openai.BadRequestError, match="conversation: no conversation is kept"):
                await client.responses.create(model="any", input="And?", conversation="conv_1")
            await client.responses.create(model="any", input="Mend it.", tools=[RUN])

    assert verdicts(await served(loop, ["Done."])) == ["new"]


async def test_anthropic_thread_is_refused_by_a_known_code() -> None:
    async def loop(endpoint: Endpoint) -> None:
        @anthropic.beta_async_tool
        async def run(command: str) -> str:
            """Run a command.

            Args:
                command: The command.
            """
            return f"result of {command}"

        messages: Any = [{"role": "user", "content": "Mend it."}]
        settings: Any = {"base_url": endpoint.root_url, "api_key": endpoint.api_key, "max_retries": 0}
        async with anthropic.AsyncAnthropic(**settings) as client:
            runner = client.beta.messages.tool_runner(model="any", max_tokens=500, tools=[run], messages=messages)
            message = await runner.until_done()
        assert [block.text for block in message.content if block.type == "text"] == ["Done."]
        async with http(endpoint) as plain:
            body = {"model": "any", "max_tokens": 9, "messages": messages, "thread": {"type": "create"}}
            answer = await plain.post("/messages", json=body)
            assert answer.status_code == 400
            assert json.loads(answer.text)["error"]["details"] == {"error_code": "thread_unsupported_request"}

    trajectories = await served(loop, SAYS[:3])
    assert verdicts(trajectories) == ["new", "append", "append"]
