"""A batch of torch tensors on the real engine: the ids and log-probabilities of plain streams, right-padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest
import torch

from runner import VllmEngine
from runner.engines.base import GenerationRequest
from runner.generation import Generation, verify_right_padding
from runner.options import Sampling
from tests.generation.batching import padded, rows_of

pytestmark = pytest.mark.anyio

# The model's next ids are near certain for each text: otherwise, in bfloat16, the other rows of a batch decide near
# ties.
TEXTS = (
    "1, 2, 3, 4, 5, 6, 7, 8, 9,",
    "the cat sat the cat sat the cat sat the cat sat the cat",
    "0, 1, 2, 3, 4, 5, 6, 7,",
)
MAX_NEW_TOKENS = 16
PAD_ID = 0


async def streamed(engine: VllmEngine, ids: list[int]) -> tuple[list[int], list[float]]:
    """Return the ids that a plain stream samples greedily after these ids."""
    sampling = Sampling(max_tokens=MAX_NEW_TOKENS, temperature=0).over(Sampling.defaults())
    request = GenerationRequest(name="plain/main/0", prompt=ids, sampling=sampling, stop_ids=engine.stop_ids)
    async with engine.stream(request) as stream:
        deltas = [delta async for delta in stream]
    sampled = [token_id for delta in deltas for token_id in delta.token_ids]
    return sampled, [logprob for delta in deltas for logprob in delta.logprobs or ()]


def check(output: Any, prompts: Sequence[list[int]], plain: Sequence[tuple[list[int], list[float]]]) -> None:
    assert verify_right_padding(output, PAD_ID) == (True, None)
    assert rows_of(output) == [ids + sampled for ids, (sampled, _) in zip(prompts, plain, strict=True)]
    for row, (ids, (sampled, logprobs)) in enumerate(zip(prompts, plain, strict=True)):
        start, end = len(ids), len(ids) + len(sampled)
        assert output["logprobs"][row, start:end].tolist() == pytest.approx(logprobs, abs=0.3)
        assert not output["logprobs"][row, :start].any()
        assert not output["logprobs"][row, end:].any()


async def test_a_torch_batch_gets_what_plain_streams_get_right_padded(engine: VllmEngine) -> None:
    tokenizer = engine.tokenizer
    prompts = [tokenizer.encode(text) for text in TEXTS]
    plain = [await streamed(engine, ids) for ids in prompts]
    assert all(len(sampled) == MAX_NEW_TOKENS for sampled, _ in plain)
    batch: dict[str, Any] = padded(prompts, kind="torch", pad=PAD_ID)
    stops: dict[str, Any] = {**padded(prompts[:1], kind="torch", pad=PAD_ID), "stop_strings": [[" 11,", "1, 12"]]}
    config = {"max_new_tokens": MAX_NEW_TOKENS, "temperature": 1.0, "seed": 3, "_pad_token_id": PAD_ID}
    async with Generation(engine, config) as generation:
        output: Any = await generation.generate(batch, greedy=True)
        each: dict[int, Any] = {index: one async for index, one in generation.generate_async(batch, greedy=True)}
        stopped: Any = await generation.generate(stops, greedy=True)
        texts = await generation.generate_text({"prompts": list(TEXTS)}, greedy=True)
        async for _ in generation.generate_async(padded(prompts * 8, kind="torch")):
            break
        with anyio.fail_after(300):
            await engine.idle()

    check(output, prompts, plain)
    for index in range(len(TEXTS)):
        check(each[index], prompts[index : index + 1], plain[index : index + 1])
    assert isinstance(output["output_ids"], torch.Tensor)
    assert output["truncated"].all()
    assert texts["texts"] == [tokenizer.decode(sampled) for sampled, _ in plain]
    kept = rows_of(stopped)[0][len(prompts[0]) :]
    assert tokenizer.decode(kept) == " 10, 11,"
    assert kept == plain[0][0][: len(kept)]
    assert stopped["finish_reasons"] == ["stop"]
    spans = [span for (span,) in output["weight_versions"]]
    assert [(span.start, span.end) for span in spans] == [(len(ids), len(ids) + MAX_NEW_TOKENS) for ids in prompts]
    assert {span.version for span in spans} == {engine.weight_version}
