"""JSON schemas from other programs at an endpoint: what they contain is enforced, or reported as not enforced."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from runner import Endpoint, Outcome
from runner.testing import call
from tests.endpoint.serving import openai_client, served, user

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]  # an endpoint works on asyncio alone

ODD: Any = {
    "type": "OBJECT",
    "properties": {
        "point": {"type": "array", "items": [{"type": "float"}, {"type": "number"}]},
        "word": {"type": "string", "pattern": r"^[\p{L}]+$", "nullable": True},
    },
    "required": None,
}
TOOLS: Any = [{"type": "function", "function": {"name": "odd", "description": "Odd.", "parameters": ODD}}]


def form_of(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


async def test_tool_of_another_dialect_refuses_no_request() -> None:
    async def loop(endpoint: Endpoint) -> None:
        async with openai_client(endpoint) as client:
            for choice in ("auto", "required"):
                said = await client.chat.completions.create(
                    model="m", messages=[user(f"Call it, {choice}.")], tools=TOOLS, tool_choice=choice
                )
                assert said.choices[0].message.tool_calls

    trajectories = await served(loop, lambda _: [call("odd", point=[1.5, 2])])
    assert all(trajectory.outcome is Outcome.COMPLETED for trajectory in trajectories)


async def test_tool_that_nothing_fits_refuses_no_request() -> None:
    bad: Any = {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}
    tools: Any = [{"type": "function", "function": {"name": "bad", "parameters": bad}}, *TOOLS]

    async def loop(endpoint: Endpoint) -> None:
        async with openai_client(endpoint) as client:
            await client.chat.completions.create(
                model="m", messages=[user("Call it.")], tools=tools, tool_choice="required"
            )
            with pytest.raises(openai.BadRequestError, match="no value fits its argument 'a'"):
                await client.chat.completions.create(
                    model="m", messages=[user("Call it.")], tools=tools[:1], tool_choice="required"
                )

    (trajectory,) = await served(loop, [call("odd", point=[1.5, 2])])
    assert [each.name for turn in trajectory.turns for each in turn.tool_calls] == ["odd"]


async def test_unenforced_schema_keywords_are_recorded_with_the_request() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["b"]}

    async def loop(endpoint: Endpoint) -> None:
        async with openai_client(endpoint) as client:
            await client.chat.completions.create(model="m", messages=[user("Name.")], response_format=form_of(schema))

    (trajectory,) = await served(loop, ['{"b": 1}'], serve={"train": True})
    (request,) = trajectory.requests
    assert request.not_granted["schema"] == ["uniqueItems of a"]
    (turn,) = trajectory.turns
    assert turn.constraint is not None
    assert '"\\"b\\""' in turn.constraint.value


async def test_schema_that_nothing_fits_costs_its_request_alone() -> None:
    impossible = {"type": "object", "properties": {"a": False}, "required": ["a"]}

    async def loop(endpoint: Endpoint) -> None:
        async with openai_client(endpoint) as client:
            with pytest.raises(openai.BadRequestError, match="has a schema that allows nothing"):
                await client.chat.completions.create(
                    model="m", messages=[user("Name.")], response_format=form_of(impossible)
                )
            await client.chat.completions.create(model="m", messages=[user("Name.")])

    (trajectory,) = await served(loop, ["Done."], serve={"train": True})
    assert len(trajectory.turns) == 1
