"""Cost of a weight proof compared with an update, and ids per second of `score`."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import anyio
import psutil

from runner import Sampling, VllmEngine
from runner.models import demo_model
from runner.training import weight_proof
from tests.benchmarks.figures import Figure, main

ROUND_COUNT = 3
SEQUENCE_COUNT = 4
PROOF_LENGTH = 256
SAMPLED_TOKENS = 16
LARGE: dict[str, Any] | None = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
"""Sizes of Llama 3.2 1B, measured with random weights and the demo model's vocabulary. None skips it."""
LARGE_ROUND_COUNT = 2
LARGE_PROOF_LENGTH = 64
LARGE_SEQUENCE_COUNT = 2
LARGE_SAMPLED_TOKENS = 8
"""Sampled ids of the large model, fewer than for the demo model: two cores compute some ten of its ids a second."""
LARGE_BYTES = 12 * 2**30
"""Bytes of free memory for the large model: trainer, engine, and, during a load, a second model and a weight copy."""


def measure() -> Iterator[Figure]:
    """Measure on the real engine: the demo model in float32, and a model of 1 billion parameters in bfloat16."""
    yield from anyio.run(_measured)


async def _measured() -> list[Figure]:
    import torch
    from transformers import AutoModelForCausalLM

    demo = demo_model()
    figures = await _figures("demo model", demo, AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32))
    if LARGE is None:
        return figures
    if (free := psutil.virtual_memory().available) < LARGE_BYTES:
        print(f"1B shape left out: {free / 2**30:.0f} GiB of memory are free, it needs {LARGE_BYTES / 2**30:.0f}")
        return figures
    return figures + await _large_figures(demo)


async def _large_figures(demo: Path) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        model = _large(Path(folder), demo)
        sizes = {
            "rounds": LARGE_ROUND_COUNT,
            "sequences": LARGE_SEQUENCE_COUNT,
            "length": LARGE_PROOF_LENGTH,
            "sampled": LARGE_SAMPLED_TOKENS,
        }
        return await _figures("1B shape", Path(folder), model, **sizes)


def _large(folder: Path, demo: Path) -> Any:
    """Create a model with the sizes of `LARGE` and random weights, in bfloat16, saved in `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

    assert LARGE is not None
    torch.manual_seed(0)
    vocabulary = AutoConfig.from_pretrained(demo).vocab_size
    config = LlamaConfig(**LARGE, vocab_size=vocabulary, tie_word_embeddings=True, max_position_embeddings=2048)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(folder)
    for path in demo.iterdir():
        if path.suffix != ".safetensors" and path.name not in ("config.json", "generation_config.json"):
            shutil.copy(path, folder / path.name)
    return model


async def _figures(
    name: str,
    folder: Path,
    model: Any,
    *,
    rounds: int | None = None,
    sequences: int | None = None,
    length: int = PROOF_LENGTH,
    sampled: int | None = None,
) -> list[Figure]:
    rounds, sequences, sampled = rounds or ROUND_COUNT, sequences or SEQUENCE_COUNT, sampled or SAMPLED_TOKENS
    tensors, dtype = model.state_dict(), str(model.dtype).removeprefix("torch.")
    async with VllmEngine(folder, template="hermes", dtype=dtype, max_model_len=1024) as engine:
        proof = weight_proof(model, engine.tokenizer, size=length)
        await engine.prove(proof)
        alone, proven, made = list[float](), list[float](), list[float]()
        for _ in range(rounds):  # in turns, so that load on the machine affects both alike
            alone.append(await _seconds(engine.update_weights(tensors)))
            proven.append(await _seconds(engine.update_weights(tensors, proof=proof)))
            began = time.perf_counter()
            weight_proof(model, engine.tokenizer, size=length)
            made.append(time.perf_counter() - began)
        figures = [
            Figure(f"an update by state dict, {name} in {dtype}", "s", tuple(alone)),
            Figure(f"  with a proof of {length} ids", "s", tuple(proven)),
            Figure("  to make that proof", "s", tuple(made)),
        ]
        ids = list(proof.ids)
        for way, sampling, scored in (
            ("scored in one pass", None, length),
            ("scored as sampled, at a temperature", Sampling(temperature=0.7), sampled + 1),
        ):
            rates = [await _ids_per_second(engine, ids[:scored], sampling, sequences) for _ in range(rounds)]
            figures.append(Figure(f"  {way}: {sequences} sequences of {scored} ids", "ids/s", tuple(rates)))
    for figure in figures:  # printed here, in case the rest takes too long
        print(f"{figure.name}: {figure.median:.3g} {figure.unit}", file=sys.stderr, flush=True)
    return figures


async def _ids_per_second(engine: VllmEngine, ids: list[int], sampling: Sampling | None, sequences: int) -> float:
    async def score(number: int) -> None:
        await engine.score([number, *ids[1:]], sampling=sampling)

    began = time.perf_counter()
    async with anyio.create_task_group() as group:
        for number in range(sequences):
            group.start_soon(score, number + 1)
    return sequences * (len(ids) - 1) / (time.perf_counter() - began)


async def _seconds(call: Awaitable[Any]) -> float:
    began = time.perf_counter()
    await call
    return time.perf_counter() - began


if __name__ == "__main__":
    main(measure)
