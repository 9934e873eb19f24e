"""docs/batch-generation.md: its blocks run, and its tables contain every key, field and call."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

from runner import ScriptedEngine
from runner.generation import (
    BatchResults,
    Generation,
    GenerationConfig,
    GenerationDatumSpec,
    GenerationOutputSpec,
    TextDatumSpec,
    TextOutputSpec,
)
from tests.generation.batching import generating, padded, rows_of
from tests.repository import DOCS

PAGE = (DOCS / "batch-generation.md").read_text(encoding="utf-8")
FIRST, THREAD, READING, PHASES = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


def names_of(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(block, "batch-generation.md", "exec"), names)
    return names


def test_the_first_block_generates() -> None:
    output = names_of(FIRST)["output"]
    assert rows_of(output) == [[*b"HiA short "], [*b"Hey?A short "]]
    assert torch.is_tensor(output["logprobs"])


def test_a_trainer_without_an_event_loop_generates() -> None:
    outputs = names_of(THREAD)["train"]([padded(["Hi"]), padded(["a", "b"])])
    assert [rows_of(output) for output in outputs] == [[[*b"HiA short "]], [[*b"aA short "], [*b"bA short "]]]


@pytest.mark.anyio
async def test_results_are_read_as_each_finishes() -> None:
    names = names_of(READING)
    async with generating() as (generation, engine):
        said = {index async for index, _ in names["rewards"](generation, padded(["a", "b"]), len)}
        first = await names["first_good_one"](generation, padded(["a", "b"]), lambda ids: ids[0] == ord("b"))
    assert (said, first) == ({0, 1}, 1)
    assert len(engine.calls) == 4


@pytest.mark.anyio
async def test_a_step_of_training_changes_the_weights() -> None:
    config = {"colocated": {"enabled": True}}
    async with ScriptedEngine("yes") as engine, Generation(engine, config) as generation:
        for _ in range(2):
            await names_of(PHASES)["step"](engine, generation, padded(["a"]), lambda output: output)
        assert engine.weight_version == "2"
        assert (await generation.generate(padded(["a"])))["weight_versions"][0][0].version == "2"


def test_every_key_field_and_call_is_on_the_page() -> None:
    specs = (GenerationConfig, GenerationDatumSpec, GenerationOutputSpec, TextDatumSpec, TextOutputSpec)
    fields = {name for spec in specs for name in spec.__annotations__} - {"backend"}
    calls = [name for kind in (Generation, BatchResults) for name in vars(kind) if not name.startswith("_")]
    options = [name for name in inspect.signature(Generation).parameters if name not in ("engine", "config")]
    assert {"generate", "generate_text_async", "aclose", "prepare_for_generation"} <= set(calls)
    assert [name for name in (*fields, *calls, *options) if not re.search(rf"`[^`]*\b{name}\b[^`]*`", PAGE)] == []
