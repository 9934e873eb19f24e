"""A stand-in for APIs of messages: Chat Completions over HTTP on this machine, with the streams and faults of servers.

Its chunks are the chunks in OpenAI's documentation, and a test compares them with the types of OpenAI's own client. It
imitates only the wire format: the test sets the text.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from aiohttp import web

from runner.engines.chat.engine import ChatEngine
from runner.engines.http_retries import RetryPolicy
from runner.engines.message_engine import MessagePiece, MessageRequest, MessageStream
from runner.options import Sampling
from tests.engines.troubles import Trouble

__all__ = ["QUICK", "Api", "Says", "asked", "asking", "error", "hear", "refuses", "serving", "wanted"]

QUICK = RetryPolicy(attempts=4, first_seconds=0.001, longest_seconds=0.01)


@dataclass(frozen=True)
class Says:
    """The answer to one request."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """Names and arguments, as text."""
    finish: str | None = None
    """Finish reason; None to derive it."""
    stop: str | None = None
    """The stop string that vLLM's servers name."""
    usage: dict[str, Any] | None = field(default_factory=lambda: {"prompt_tokens": 7, "completion_tokens": 3})
    reasoning_field: str = "reasoning_content"
    cut_after: int | None = None
    """Number of chunks after which the connection is closed."""
    hold_after: int | None = None
    """Number of chunks after which the stream pauses until `Api.released` is set."""
    garbage_after: int | None = None
    """Number of chunks after which a line that is not a chunk is sent."""
    error_after: int | None = None
    """Number of chunks after which the server reports an error."""
    error: dict[str, Any] = field(default_factory=lambda: {"message": "it broke", "type": "server_error", "code": 500})
    chunked: int = 4
    """Letters in a chunk."""


@dataclass
class Api:
    """A server, and the requests that it received."""

    says: Callable[[dict[str, Any]], Says]
    troubles: list[Trouble] = field(default_factory=list)
    """Faults, one for each request, in order."""
    key: str | None = None
    model: str = "model-2026-01-01"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    open: int = 0
    """Requests that are being answered."""
    most_open: int = 0
    models_status: int = 404
    """Status of the response to a request for the list of models."""
    url: str = ""
    released: anyio.Event = field(default_factory=anyio.Event)
    begun: anyio.Event = field(default_factory=anyio.Event)
    """Set when an answer pauses."""

    async def models(self, _: web.Request) -> web.StreamResponse:
        return web.json_response(error("no list of models"), status=self.models_status)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.headers.append(request.headers)
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            sent = request.headers.get("Authorization", "").removeprefix("Bearer ")
            return web.json_response(error(f"Incorrect API key provided: {sent}.", "invalid_api_key"), status=401)
        body = await request.json()
        self.bodies.append(body)
        if self.troubles and (response := await self.troubles.pop(0)(request)) is not None:
            return response
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            return await self._stream(request, body)
        finally:
            self.open -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        said = self.says(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, chunk in enumerate(self.chunks(said, body)):
            if number == said.cut_after:
                assert request.transport is not None
                request.transport.close()
                return response
            if number == said.hold_after:
                self.begun.set()
                await self.released.wait()
            if number == said.garbage_after:
                await response.write(b"data: {not json\n\n")
            if number == said.error_after:
                await response.write(b"data: %b\n\n" % json.dumps({"error": said.error}).encode())
            await response.write(b"data: %b\n\n" % json.dumps(chunk).encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def chunks(self, said: Says, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Return the answer as chunks."""
        base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": self.model}
        base["system_fingerprint"] = "fp_1"

        def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
            choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
            if finish is not None and said.stop is not None:
                choice["stop_reason"] = said.stop
            return {**base, "choices": [choice], "usage": None}

        def cut(text: str) -> Iterator[str]:
            return (text[at : at + said.chunked] for at in range(0, len(text), said.chunked))

        yield chunk({"role": "assistant", "content": ""})
        for piece in cut(said.reasoning):
            yield chunk({said.reasoning_field: piece})
        for piece in cut(said.text):
            yield chunk({"content": piece})
        for index, (name, arguments) in enumerate(said.calls):
            head = {"index": index, "id": f"call_{index}", "type": "function"}
            yield chunk({"tool_calls": [{**head, "function": {"name": name, "arguments": ""}}]})
            for piece in cut(arguments):
                yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        yield chunk({}, said.finish or ("tool_calls" if said.calls else "stop"))
        if said.usage is not None and body.get("stream_options"):
            total = said.usage.get("prompt_tokens", 0) + said.usage.get("completion_tokens", 0)
            yield {**base, "choices": [], "usage": {"total_tokens": total, **said.usage}}


def error(message: str, code: str | None = None, kind: str = "invalid_request_error") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def refuses(status: int, message: str = "no", code: str | None = None, **headers: str) -> Trouble:
    """Return a fault that answers one request with an error."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}

    async def trouble(_: web.Request) -> web.StreamResponse:
        return web.json_response(error(message, code), status=status, headers=sent)

    return trouble


@asynccontextmanager
async def serving(says: str | Says | Callable[[dict[str, Any]], Says], **settings: Any) -> AsyncIterator[Api]:
    """Serve an API that answers every request with this, or with the result of a function of its body."""
    said = Says(says) if isinstance(says, str) else says
    api = Api((lambda _: said) if isinstance(said, Says) else said, **settings)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", api.answer)
    app.router.add_get("/v1/models", api.models)
    runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = runner.addresses[0]
    api.url = f"http://{address[0]}:{address[1]}/v1"
    try:
        yield api
    finally:
        api.released.set()
        await runner.cleanup()


def asking(api: Api, **options: Any) -> ChatEngine:
    """Return an engine that uses the API, with short waits before retries."""
    return ChatEngine("model", **{"base_url": api.url, "retries": QUICK, "api_key": api.key, **options})


@asynccontextmanager
async def asked(
    says: str | Says | Callable[[dict[str, Any]], Says], *, engine: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Api, ChatEngine]]:
    """Yield an API and an engine that uses it; `engine` are further arguments of the engine."""
    async with serving(says, **settings) as api, asking(api, **(engine or {})) as chat:
        yield api, chat


def wanted(**options: Any) -> MessageRequest:
    """Return a request for a turn. Options that are not fields of a request are fields of its sampling."""
    own = {name: options.pop(name) for name in ("messages", "tools", "tool_choice", "seed") if name in options}
    messages: Any = [{"role": "user", "content": "Hello?"}]
    sampling = Sampling(**options).over(Sampling.defaults())
    return MessageRequest(name="episode/main/0", sampling=sampling, **{"messages": messages, "seed": 5, **own})


async def hear(engine: ChatEngine, request: MessageRequest | None = None) -> tuple[list[MessagePiece], MessageStream]:
    """Return the pieces of a turn, and its stream."""
    async with engine.stream(request or wanted()) as stream:
        pieces = [piece async for piece in stream]
    return pieces, stream
