"""The proxy in front of an endpoint damages one request and passes the others on."""

from __future__ import annotations

import httpx
import pytest

from runner import Endpoint
from tests.clients.faults import Trouble, troubled
from tests.endpoint.serving import RUN, chat_body, http, served, user

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]

ASKED = chat_body([user("One.")], tools=[RUN], stream=True)


async def ask(client: httpx.AsyncClient) -> str:
    """Return "whole" for a complete answer, "cut" for a broken connection, else the status."""
    try:
        async with client.stream("POST", "/chat/completions", json=ASKED) as answer:
            text = "".join([part async for part in answer.aiter_text()])
    except httpx.RemoteProtocolError:
        return "cut"
    return "whole" if text.endswith("[DONE]\n\n") else str(answer.status_code)


@pytest.mark.parametrize(
    ("trouble", "comes"),
    [
        (Trouble.FAILS, "500"),
        (Trouble.BUSY, "429"),
        (Trouble.CUT, "cut"),
        (Trouble.LOST_END, "cut"),
        (Trouble.LOST, "cut"),
    ],
    ids=[each.name.lower() for each in Trouble],
)
async def test_one_request_goes_wrong_and_no_other(trouble: Trouble, comes: str) -> None:
    came: list[str] = []

    async def loop(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            came.extend([await ask(client) for _ in range(3)])

    with troubled(trouble, at=1) as proxies:
        await served(loop, ["A long answer indeed."] * 4)
    assert came == ["whole", comes, "whole"]
    assert [proxy.happened for proxy in proxies] == [True]
