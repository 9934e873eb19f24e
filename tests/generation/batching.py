"""Helpers for tests of batches: padded batches of texts, of both array kinds, and a model that replies in capitals."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Literal

import numpy as np
import torch

from runner.engines.scripted.replies import Replies
from runner.generation import BatchResults, Generation
from runner.testing import ModelCall, ScriptedEngine
from tests.playing import assert_nothing_open

EOS_ID: Final = 257
"""The id that ends a row of the scripted engine's bytes."""

Kind = Literal["torch", "numpy"]


def array(values: Any, kind: Kind = "numpy", dtype: str = "int64") -> Any:
    return np.array(values, dtype=dtype) if kind == "numpy" else torch.tensor(values, dtype=getattr(torch, dtype))


def padded(
    prompts: Sequence[str | Sequence[int]], *, kind: Kind = "numpy", pad: int = 0, width: int = 0, dtype: str = "int64"
) -> dict[str, Any]:
    """Return a right-padded batch of these texts, in bytes, or ids."""
    rows = [list(prompt.encode() if isinstance(prompt, str) else prompt) for prompt in prompts]
    width = max([width, *map(len, rows)])
    ids = [row + [pad] * (width - len(row)) for row in rows]
    lengths = array([len(row) for row in rows], kind)
    return {"input_ids": array(ids, kind, dtype), "input_lengths": lengths}


def loudly(asked: ModelCall) -> str:
    """Reply with the prompt in capitals."""
    return asked.prompt.upper()


@asynccontextmanager
async def generating(
    replies: Replies = loudly, config: Any = None, *, retries: int = 2, **settings: Any
) -> AsyncIterator[tuple[Generation, ScriptedEngine]]:
    """Yield a generation on a scripted engine that records its requests, and check that no request is left."""
    async with ScriptedEngine(replies, record=True, **settings) as engine:
        async with Generation(engine, config, retries=retries) as generation:
            yield generation, engine
        assert_nothing_open(engine)


async def collect(results: BatchResults[Any], into: list[tuple[int, Any]]) -> None:
    """Collect the results before the error that ends them."""
    async for pair in results:
        into.append(pair)  # noqa: PERF401  # the loop ends with an error


def rows_of(output: Any) -> list[list[int]]:
    """Return each row of an output without its padding."""
    lengths = output["unpadded_sequence_lengths"].tolist()
    return [ids[:length] for ids, length in zip(output["output_ids"].tolist(), lengths, strict=True)]


def texts_of(output: Any) -> list[str]:
    """Return the sampled text of each row, without the id that ended it."""
    starts = (output["unpadded_sequence_lengths"] - output["generation_lengths"]).tolist()
    sampled = [row[start:] for row, start in zip(rows_of(output), starts, strict=True)]
    return [bytes(token_id for token_id in row if token_id != EOS_ID).decode() for row in sampled]
