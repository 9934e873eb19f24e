"""The server of a run's endpoints: access, refused requests, and harmful input from outside."""

from __future__ import annotations

import logging
import resource
import socket
import sys
from contextlib import AsyncExitStack, ExitStack, suppress
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import orjson
import pytest
from anyio.abc import SocketStream

from runner import BadOption, Conversation, Endpoint
from runner.endpoint import application, server
from runner.testing import ScriptedEngine
from tests.endpoint.serving import RUN, chat_body, http, served, user
from tests.playing import Plain, play_all, until

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.asyncio_alone, pytest.mark.sample_functions(2)]

ASKED = chat_body([user("One.")], tools=[RUN])


def address_of(endpoint: Endpoint) -> tuple[str, int]:
    url = httpx.URL(endpoint.base_url)
    return url.host, url.port or 0


async def raw(endpoint: Endpoint, sent: bytes, *, seconds: float = 20) -> bytes:
    """Send bytes, and return the answer up to the end of the connection."""
    got = b""
    async with await anyio.connect_tcp(*address_of(endpoint)) as stream:
        await stream.send(sent)
        with anyio.move_on_after(seconds):
            try:
                while True:
                    got += await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return got
    raise AssertionError(f"the connection was not closed; {got[:200]!r} came")


async def probed(probe: Any, **options: Any) -> None:
    """Run `probe` on an endpoint, then a turn, which shows that the probe did not end the episode."""

    async def loop(endpoint: Endpoint) -> None:
        await probe(endpoint)
        async with http(endpoint) as client:
            assert (await client.post("/chat/completions", json=ASKED)).status_code == 200

    await served(loop, ScriptedEngine(lambda _: "Done."), **options)


async def test_a_run_listens_on_loopback_and_only_once_an_episode_is_served() -> None:
    async def probe(endpoint: Endpoint) -> None:
        assert address_of(endpoint)[0] == "127.0.0.1"

    await probed(probe)


@pytest.mark.parametrize("form", ["/chat/completions", "/responses", "/messages"])
async def test_a_wrong_key_is_unauthorized_in_every_form(form: str) -> None:
    async def probe(endpoint: Endpoint) -> None:
        host, port = address_of(endpoint)
        async with httpx.AsyncClient() as client:
            for key, path in (("wrong", "/v1"), ("", "/v1"), ("", "/e/wrong/v1"), ("é", "/e/%C3%A9/v1")):
                headers = {b"authorization": f"Bearer {key}".encode()} if key else {}
                answer = await client.post(f"http://{host}:{port}{path}{form}", json=ASKED, headers=headers)
                assert answer.status_code == 401, answer.text
                assert "api_key" in answer.text

    await probed(probe)


async def test_the_key_is_found_in_the_path_and_in_either_header() -> None:
    async def probe(endpoint: Endpoint) -> None:
        host, port = address_of(endpoint)
        root = f"http://{host}:{port}"
        ways: list[tuple[str, dict[str, str]]] = [
            (f"{endpoint.base_url}/models", {}),
            (f"{root}/v1/models", {"authorization": f"Bearer {endpoint.api_key}"}),
            (f"{root}/v1/models", {"x-api-key": endpoint.api_key}),
            (f"{root}/models/{endpoint.model}", {"x-api-key": endpoint.api_key}),
        ]
        async with httpx.AsyncClient() as client:
            for url, headers in ways:
                assert (await client.get(url, headers=headers)).status_code == 200, url

    await probed(probe)


async def test_keys_have_128_bits_and_differ() -> None:
    keys: list[str] = []

    class Served(Plain):
        async def rollout(self, conversation: Any) -> None:
            async with self.episode.serve() as one, self.episode.serve() as other:
                keys.extend([one.api_key, other.api_key])
            await conversation.generate()

    await play_all(Served, ["Done."])
    assert len(set(keys)) == 2
    assert all(len(bytes.fromhex(key)) == 16 for key in keys)


async def test_key_of_an_ended_episode_gets_a_final_400() -> None:
    class Served(Plain):
        async def rollout(self, conversation: Any) -> None:
            async with self.episode.serve() as first:
                pass
            async with self.episode.serve(), httpx.AsyncClient() as client:
                for form in ("chat/completions", "responses", "messages"):
                    answer = await client.post(f"{first.base_url}/{form}", json=ASKED)
                    assert answer.status_code == 400, answer.text
                    assert answer.headers["x-should-retry"] == "false"
                    assert "episode" in answer.text
            await conversation.generate()

    await play_all(Served, ["Done."])


async def test_another_host_is_refused_and_no_origin_is_let_in() -> None:
    async def probe(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            rebound = await client.get("/models", headers={"host": "evil.example"})
            assert rebound.status_code == 421
            preflight = await client.options("/models", headers={"origin": "http://evil.example"})
            listed = await client.get("/models", headers={"origin": "http://evil.example"})
        for answer in (preflight, listed):
            assert not [name for name in answer.headers if name.startswith("access-control")]

    await probed(probe)


async def test_unknown_path_is_404_with_known_paths_and_wrong_method_405() -> None:
    async def probe(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            missing = await client.post("/embeddings", json={})
            assert missing.status_code == 404
            assert "/v1/chat/completions" in missing.text
            assert (await client.get("/chat/completions")).status_code == 405
            assert (await client.post("/models", json={})).status_code == 405
            assert (await client.head(endpoint.root_url)).status_code == 200

    await probed(probe)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"messages": [{}]}'])
async def test_a_malformed_body_is_a_clear_400(body: bytes) -> None:
    async def probe(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            answer = await client.post("/chat/completions", content=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]

    await probed(probe)


async def test_too_large_body_is_refused_with_or_without_its_length(monkeypatch: Any) -> None:
    monkeypatch.setattr(application, "MAX_BODY_BYTES", 2**20)

    async def chunks() -> Any:
        for _ in range(40):
            yield b" " * 2**16

    async def probe(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            for content in (b" " * 2**21, chunks()):
                answer = await client.post("/chat/completions", content=content)
                assert answer.status_code == 413

    await probed(probe)


async def test_a_request_is_in_flight_from_its_head_on() -> None:
    """A body takes memory long before it is complete."""
    body = orjson.dumps(ASKED)

    async def probe(endpoint: Endpoint) -> None:
        async with http(endpoint) as client, await anyio.connect_tcp(*address_of(endpoint)) as slow:
            await slow.send(_head(endpoint, len(body)) + body[:10])
            await until(lambda: endpoint._route.in_flight == 1)
            busy = await client.post("/chat/completions", content=b" " * 2**20 + body)
            assert (busy.status_code, busy.headers["x-should-retry"]) == (429, "true")
            await slow.send(body[10:])
            assert b" 200 " in (await slow.receive()).splitlines()[0]
            await until(lambda: endpoint._route.in_flight == 0)

    await probed(probe, serve={"at_once": 1})


async def test_unfinished_body_at_the_end_is_answered_episode_over() -> None:
    answers: list[bytes] = []

    class Served(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            async with AsyncExitStack() as stack:
                async with self.episode.serve() as endpoint:
                    slow = await stack.enter_async_context(await anyio.connect_tcp(*address_of(endpoint)))
                    await slow.send(_head(endpoint, 100) + b"{")
                    await until(lambda: endpoint._route.in_flight == 1)
                answers.append(await slow.receive())

    await play_all(Served, ScriptedEngine(lambda _: "Done."))
    assert b" 400 " in answers[0].splitlines()[0]
    assert b"episode_over" in answers[0]


def _head(endpoint: Endpoint, length: int) -> bytes:
    host, port = address_of(endpoint)
    where = f"POST /e/{endpoint.api_key}/v1/chat/completions HTTP/1.1\r\nhost: {host}:{port}\r\n"
    return f"{where}content-length: {length}\r\n\r\n".encode()


async def test_a_head_or_a_body_that_does_not_come_in_time_is_closed(monkeypatch: Any) -> None:
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.1)
    monkeypatch.setattr(application, "BODY_SECONDS", 0.1)

    async def probe(endpoint: Endpoint) -> None:
        assert await raw(endpoint, b"POST /v1/chat/completions HT") == b""
        host, port = address_of(endpoint)
        where = f"POST /e/{endpoint.api_key}/v1/chat/completions HTTP/1.1\r\nhost: {host}:{port}\r\n"
        head = f"{where}content-length: 10\r\n\r\n{{"
        assert b" 408 " in (await raw(endpoint, head.encode())).splitlines()[0]

    await probed(probe)


async def test_headers_that_are_too_large_are_closed() -> None:
    async def probe(endpoint: Endpoint) -> None:
        head = b"GET /v1/models HTTP/1.1\r\n" + b"".join(b"x-%d: %b\r\n" % (n, b"y" * 1000) for n in range(100))
        assert b" 200 " not in await raw(endpoint, head + b"\r\n")

    await probed(probe)


async def test_bytes_that_are_not_http_are_answered_400() -> None:
    async def probe(endpoint: Endpoint) -> None:
        assert b" 400 " in (await raw(endpoint, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")).splitlines()[0]

    await probed(probe)


@pytest.mark.parametrize("by_files", [False, True])
async def test_connections_beyond_the_limit_are_closed_and_others_stay(by_files: bool, monkeypatch: Any) -> None:
    if by_files:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 20_000))
    else:
        monkeypatch.setattr(server, "MAX_CONNECTIONS", 20)

    async def probe(endpoint: Endpoint) -> None:
        opened = [await anyio.connect_tcp(*address_of(endpoint)) for _ in range(60)]
        closed: list[bool] = []

        async def until_closed(stream: SocketStream) -> None:
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                await stream.receive()
            closed.append(True)

        async with anyio.create_task_group() as group:
            for stream in opened:
                group.start_soon(until_closed, stream)
            await until(lambda: len(closed) >= 40)
            await anyio.sleep(0.1)
            assert len(closed) == 40
            group.cancel_scope.cancel()
        for stream in opened:
            await stream.aclose()
        await anyio.sleep(0.1)  # their places are free again

    await probed(probe)


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 12_000, reason="needs that many open files")
async def test_ten_thousand_connections_do_not_lock_out_a_key() -> None:
    async def probe(endpoint: Endpoint) -> None:
        async with http(endpoint) as client:
            assert (await client.get("/models")).status_code == 200
            with ExitStack() as stack:
                for number in range(10_000):
                    one = stack.enter_context(socket.socket())
                    one.setblocking(False)
                    with suppress(BlockingIOError):
                        one.connect(address_of(endpoint))
                    if number % 250 == 0:
                        assert (await client.get("/models")).status_code == 200
                        async with http(endpoint) as another:
                            assert (await another.get("/models")).status_code == 200
                answer = await client.post("/chat/completions", json=ASKED)
                assert answer.status_code == 200

    await probed(probe)


async def test_neither_bodies_nor_keys_are_logged(caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    kept: list[str] = []

    async def probe(endpoint: Endpoint) -> None:
        kept.append(endpoint.api_key)
        async with http(endpoint) as client:
            for body in (chat_body([user("a secret word")], tools=[RUN]), {"messages": "a secret word"}):
                await client.post("/chat/completions", json=body)

    with caplog.at_level(logging.DEBUG, logger="uvicorn"):
        await probed(probe)
    printed = capfd.readouterr()
    uvicorn = [record.getMessage() for record in caplog.records if record.name.startswith(("uvicorn", "runner"))]
    for text in (printed.out, printed.err, *uvicorn):
        assert "secret word" not in text
        assert kept[0] not in text


@pytest.mark.parametrize("listen", ["127.0.0.1:99999", 7, "a b:1"])
def test_invalid_listen_address_is_refused(listen: Any) -> None:
    with pytest.raises(BadOption, match="listen="):
        server.parse_listen(listen)


@pytest.mark.parametrize(
    ("listen", "meant"),
    [
        ("127.0.0.1:8000", ("127.0.0.1", 8000)),
        (":0", ("127.0.0.1", 0)),
        ("[::1]:9", ("::1", 9)),
        ("0.0.0.0", ("0.0.0.0", 0)),
    ],
)
def test_addresses_are_read(listen: str, meant: tuple[str, int]) -> None:
    assert server.parse_listen(listen) == meant


async def test_taken_port_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AssertionError, match=f"listen=127.0.0.1:{port}: nothing can listen there"):
            await probed(lambda endpoint: anyio.lowlevel.checkpoint(), listen=f"127.0.0.1:{port}")


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_an_endpoint_on_trio_is_refused_by_name(anyio_backend: str) -> None:
    with pytest.raises(AssertionError, match="works on asyncio alone, and this is trio"):
        await probed(lambda endpoint: anyio.lowlevel.checkpoint())


async def test_endpoint_without_its_library_names_what_to_install(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(AssertionError, match=r"pip install 'deltarunner\[serve\]'"):
        await probed(lambda endpoint: anyio.lowlevel.checkpoint())


async def test_two_runs_at_once_have_a_server_each() -> None:
    ports: list[int] = []

    async def probe(endpoint: Endpoint) -> None:
        ports.append(address_of(endpoint)[1])
        await until(lambda: len(ports) == 2)

    async with anyio.create_task_group() as group:
        group.start_soon(probed, probe)
        group.start_soon(probed, probe)
    assert len(set(ports)) == 2


BOTH = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")


@pytest.mark.parametrize("listen", ["0.0.0.0:0", pytest.param("[::]:0", marks=BOTH)])
async def test_server_on_all_addresses_accepts_numeric_hosts(listen: str) -> None:
    async def probe(endpoint: Endpoint) -> None:
        port = address_of(endpoint)[1]
        async with http(endpoint) as client:
            for host, status in (
                (f"192.0.2.7:{port}", 200),
                (f"[2001:db8::7]:{port}", 200),
                (f"localhost:{port}", 200),
                (f"evil.example:{port}", 421),
                ("", 421),
                ("1.2.3.4.evil.example", 421),
            ):
                assert (await client.get("/models", headers={"host": host})).status_code == status, host

    await probed(probe, listen=listen)
