"""Connections to an endpoint: heads that do not end, pipelined requests, and unusual HTTP."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack, suppress
from typing import Any

import anyio
import httpx
import orjson
import pytest
from anyio.abc import SocketStream

from runner import Endpoint
from runner.endpoint import server
from runner.testing import Latency, ScriptedEngine
from tests.endpoint.serving import RUN, chat_body, served, user
from tests.endpoint.test_server import address_of, probed, raw
from tests.playing import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.asyncio_alone]

BODY = orjson.dumps(chat_body([user("One.")], tools=[RUN]))
CLOSE = "connection: close\r\n"


def head(endpoint: Endpoint, method: str, path: str, *fields: str, version: str = "1.1") -> bytes:
    host, port = address_of(endpoint)
    lines = [f"{method} {path} HTTP/{version}", f"host: {host}:{port}", *fields, "", ""]
    return "\r\n".join(lines).encode("latin-1")


def ask(endpoint: Endpoint, *fields: str, version: str = "1.1") -> bytes:
    path = f"/e/{endpoint.api_key}/v1/chat/completions"
    return head(endpoint, "POST", path, f"content-length: {len(BODY)}", *fields, version=version) + BODY


def models(endpoint: Endpoint, *fields: str, method: str = "GET") -> bytes:
    return head(endpoint, method, f"/e/{endpoint.api_key}/v1/models", *fields)


def statuses(answers: bytes) -> list[int]:
    return [int(each) for each in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers)]


async def test_late_headers_of_a_kept_connection_close_it(monkeypatch: Any) -> None:
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.1)

    async def probe(endpoint: Endpoint) -> None:
        assert statuses(await raw(endpoint, models(endpoint) + b"GET /v1/mod")) == [200]

    await probed(probe)


@pytest.mark.parametrize("begun", [b"GET /", b"GET / HTTP/1.1\r\nx: ", b"GET / HTTP/1.1\r\n"])
async def test_a_head_that_never_ends_is_closed_before_it_fills_the_memory(begun: bytes) -> None:
    more = b"x: y\r\n" * 3_000 if begun.endswith(b"\r\n") else b"a" * 18_000

    async def probe(endpoint: Endpoint) -> None:
        async with await anyio.connect_tcp(*address_of(endpoint)) as stream:
            with anyio.fail_after(10), pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
                await _send_all([begun, *[more] * 10_000], stream)

    await probed(probe)


async def _send_all(parts: list[bytes], stream: SocketStream) -> None:
    for part in parts:
        await stream.send(part)


async def test_pipelined_requests_are_answered_in_order() -> None:
    async def probe(endpoint: Endpoint) -> None:
        missing = head(endpoint, "GET", f"/e/{endpoint.api_key}/v1/nothing")
        got = await raw(endpoint, ask(endpoint) * 3 + models(endpoint) + missing)
        assert statuses(got) == [200, 200, 200, 200, 404]

    await probed(probe)


async def test_chunked_bodies_and_expect_continue_are_accepted() -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\nx: y\r\n\r\n"

    async def probe(endpoint: Endpoint) -> None:
        path = f"/e/{endpoint.api_key}/v1/chat/completions"
        chunked = head(endpoint, "POST", path, "transfer-encoding: chunked", "connection: close") + chunks
        assert statuses(await raw(endpoint, chunked)) == [200]
        assert statuses(await raw(endpoint, ask(endpoint, "expect: 100-continue", "connection: close"))) == [100, 200]
        assert statuses(await raw(endpoint, ask(endpoint, version="1.0"))) == [200]

    await probed(probe)


async def test_request_with_header_bytes_that_are_not_text_is_answered() -> None:
    async def probe(endpoint: Endpoint) -> None:
        odd = ["x-session-id: \x85\xff\x9b31m\xe9", "user-agent: \xff\xfe", "connection: close"]
        assert statuses(await raw(endpoint, ask(endpoint, *odd))) == [200]

    await probed(probe)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ("HEAD /v1/models", 401),
        ("OPTIONS *", 401),
        ("CONNECT somewhere:1", 400),
        ("GET /" + "a" * 60_000, 401),
        ("GET /%2e%2e/%00/%ff/e//v1", 401),
        ("GET http://[::", 400),
        ("BREW /", 400),
    ],
)
async def test_absurd_requests_have_a_status(sent: str, status: int) -> None:
    async def probe(endpoint: Endpoint) -> None:
        method, _, path = sent.partition(" ")
        assert statuses(await raw(endpoint, head(endpoint, method, path, "connection: close"))) == [status]

    await probed(probe)


async def test_a_request_without_a_host_or_with_two_is_refused() -> None:
    async def probe(endpoint: Endpoint) -> None:
        assert statuses(await raw(endpoint, b"GET /v1/models HTTP/1.0\r\n\r\n")) == [421]
        assert statuses(await raw(endpoint, models(endpoint, "host: evil.example", "connection: close"))) == [421]

    await probed(probe)


# --- connections without a key


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n", b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"])
async def test_connections_without_a_key_do_not_lock_out_a_valid_key(sent: bytes, monkeypatch: Any) -> None:
    """There are twice as many connections as allowed, and they hold their places as long as they can."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 20)

    async def probe(endpoint: Endpoint) -> None:
        async with AsyncExitStack() as stack, httpx.AsyncClient() as client:
            for number in range(40):
                stream = await stack.enter_async_context(await anyio.connect_tcp(*address_of(endpoint)))
                with suppress(anyio.BrokenResourceError):
                    await stream.send(sent.replace(b"x\r\n", b"%b:%d\r\n" % (b"127.0.0.1", address_of(endpoint)[1])))
                if number >= 20:
                    assert (await client.get(f"{endpoint.base_url}/models")).status_code == 200
            async with httpx.AsyncClient() as another:
                assert (await another.get(f"{endpoint.base_url}/models")).status_code == 200

    await probed(probe)


async def _asked(stream: SocketStream, sent: bytes) -> bytes:
    await stream.send(sent)
    return await stream.receive()


async def test_only_idle_connections_are_closed_for_others(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    engine = ScriptedEngine(["A long answer.", "Done."], chunks=1, tick=0.001, latency=Latency(first=1, between=20))

    async def loop(endpoint: Endpoint) -> None:
        answers: list[bytes] = []

        async def streamed() -> None:
            answers.append(await raw(endpoint, ask(endpoint, CLOSE.strip())))

        async with anyio.create_task_group() as group, AsyncExitStack() as stack:
            group.start_soon(streamed)
            await until(lambda: engine.stats().sampled_tokens > 0)
            await engine.pause(mode="keep")
            answered = [await anyio.connect_tcp(*address_of(endpoint)) for _ in range(2)]
            for stream in answered:
                stack.push_async_callback(stream.aclose)
                await stream.send(models(endpoint))
                assert statuses(await stream.receive()) == [200]
            # All places are taken: each new connection takes the place of the connection that has been idle longest.
            for stream in answered:
                assert statuses(await raw(endpoint, models(endpoint, CLOSE.strip()))) == [200]
                with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                    await _asked(stream, models(endpoint))
                stack.push_async_callback((another := await anyio.connect_tcp(*address_of(endpoint))).aclose)
                await another.send(models(endpoint))
                assert statuses(await another.receive()) == [200]
            await engine.resume()
        assert statuses(answers[0]) == [200]
        assert b"A long answer." in answers[0]

    await served(loop, engine)
