"""One real engine for many tests: each must leave it unchanged, and a test that does not fails itself."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

import anyio

from runner.engines.base import GenerationRequest
from runner.engines.state import EngineState
from runner.options import Sampling

__all__ = ["as_it_was"]

IDLE_SECONDS = 60.0

_first_words: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
"""Greedy output of each engine before any test used it."""


@asynccontextmanager
async def as_it_was(engine: Any) -> AsyncIterator[None]:
    """Lend a VllmEngine to a test, then assert that it has no requests, no adapters, and its first weights."""
    if engine not in _first_words:
        _first_words[engine] = await _words(engine)
    version = engine.weight_version
    yield
    assert engine.is_alive(), "a test that ends an engine must use the fixture of a doomed engine"
    assert engine.state is EngineState.RUNNING
    with anyio.fail_after(IDLE_SECONDS):
        await engine.idle()
    assert (engine.stats().open, engine.stats().waiting) == (0, 0)
    assert dict(engine.adapters) == {}
    # A version is never used twice, so restored weights are recognized by their greedy output.
    assert engine.weight_version == version or await _words(engine) == _first_words[engine]


async def _words(engine: Any) -> list[int]:
    """Return the greedy output of the model without adapters and caches, so that it is the same each time."""
    await engine.reset_prefix_cache()
    sampling = dataclasses.replace(Sampling.defaults(), max_tokens=8, temperature=0.0)
    request = GenerationRequest(name="as it was", prompt=list(range(1000, 1040)), sampling=sampling)
    async with engine.stream(request) as stream:
        return [token_id async for delta in stream for token_id in delta.token_ids]
