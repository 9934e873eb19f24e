"""Helpers for tests of the remote engine: a server with an engine, and requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.engines.base import Delta, GenerationRequest
from runner.engines.http_retries import RetryPolicy
from runner.engines.remote.engine import RemoteEngine
from runner.engines.scripted.replies import Replies
from runner.options import Sampling
from runner.testing import ScriptedEngine
from runner.tokens.tokenizer import load_tokenizer
from tests.engines.remote.loopback import Loopback, serving
from tests.engines.remote.model_folder import byte_model

QUICK = RetryPolicy(attempts=3, first_seconds=0.001)
TEXT = "A long answer, a letter at a time."

_OF_ENGINE = (
    *("adapters", "places", "context", "latency", "tick", "faults", "record", "seed", "chunks", "logprobs"),
    *("sampling_masks", "routed_experts", "scores"),
)


@asynccontextmanager
async def asked(
    folder: Path, replies: Replies = TEXT, *, engine: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Loopback, RemoteEngine]]:
    """Yield a server with these replies, and an engine that uses it; `engine` are further arguments of the engine."""
    async with serve(folder, replies, **settings) as server, remote(server, folder, **(engine or {})) as asking:
        yield server, asking


@asynccontextmanager
async def serve(folder: Path, replies: Replies = TEXT, **settings: Any) -> AsyncIterator[Loopback]:
    """Serve these replies; settings are for the scripted engine and the server."""
    model = byte_model(folder / "model")
    own = {name: settings.pop(name) for name in _OF_ENGINE if name in settings}
    adapters = own.get("adapters", ())
    engine = ScriptedEngine(replies, tokenizer=load_tokenizer(model), **own)
    async with serving(engine, adapters=adapters, **settings) as server:
        yield server


def remote(server: Loopback, folder: Path, **options: Any) -> RemoteEngine:
    """Return an engine that uses the server, with short waits before retries."""
    return RemoteEngine(server.url, folder / "model", **{"retries": QUICK, "dialect": server.dialect, **options})


def wanted(max_tokens: int = 1000, *, name: str = "episode/main/0", **sampling: Any) -> GenerationRequest:
    """Return a request for a turn, with one id per delta."""
    own = {field: sampling.pop(field) for field in ("constraint", "seed", "stop_ids", "extra") if field in sampling}
    return GenerationRequest(
        name=name,
        prompt=[72, 105],
        sampling=replace(Sampling.defaults(), max_tokens=max_tokens, **sampling),
        acts_on_deltas=True,
        **{"stop_ids": (257,), **own},
    )


async def read(engine: RemoteEngine, request: GenerationRequest | None = None) -> list[Delta]:
    """Return all deltas of a turn, including the deltas that were unread when it failed."""
    stream = engine.stream(request or wanted())
    async with stream:
        return [delta async for delta in stream]


def text_of(deltas: list[Delta]) -> str:
    """Return the text of the deltas, without the stop id."""
    return bytes(token_id for delta in deltas for token_id in delta.token_ids if token_id < 256).decode()
