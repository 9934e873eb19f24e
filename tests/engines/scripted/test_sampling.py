"""Sampling of a scripted engine: lengths and most likely ids; fields that need logits have no effect."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runner.engines.base import FinishReason, GenerationRequest
from runner.errors import RequestRejected
from runner.testing import Reply, ScriptedEngine
from tests.engines.engine_requests import END, STOP, Said, request, say

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends]


def sampled(*, stop_ids: tuple[int, ...] = (STOP,), max_tokens: int = 1000, **fields: Any) -> GenerationRequest:
    asked = request(max_tokens=max_tokens, stop_ids=stop_ids)
    return replace(asked, sampling=replace(asked.sampling, **fields))


async def answer(reply: Any, asked: GenerationRequest, **settings: Any) -> Said:
    async with ScriptedEngine(reply, **settings) as engine:
        return await say(engine, asked)


@pytest.mark.parametrize(
    ("least", "text"), [(0, "abc"), (3, "abc"), (4, "abca"), (8, "abcabcab")], ids=lambda value: str(value)
)
async def test_a_reply_that_is_too_short_is_said_again_up_to_min_tokens(least: int, text: str) -> None:
    said = await answer("abc", sampled(min_tokens=least))
    assert (said.text, said.end) == (text + END, (FinishReason.STOP, STOP))


async def test_a_stop_id_inside_a_reply_does_not_come_before_min_tokens() -> None:
    said = await answer(Reply(ids=[97, STOP, 98]), sampled(min_tokens=3))
    assert said.ids == [97, 97, 97, STOP]


async def test_max_tokens_cut_a_repeated_reply() -> None:
    said = await answer("abc", sampled(min_tokens=5, max_tokens=5))
    assert (said.text, said.end) == ("abcab", (FinishReason.LENGTH, None))


async def test_a_turn_that_was_cut_stays_as_it_stands() -> None:
    said = await answer(Reply("abc", finish="length"), sampled(min_tokens=5))
    assert (said.text, said.end) == ("abc", (FinishReason.LENGTH, None))


async def test_reply_without_ids_cannot_be_repeated_up_to_min_tokens() -> None:
    with pytest.raises(RequestRejected, match=r"min_tokens=2\).* has no ids to repeat.*Give it text"):
        await answer("", sampled(min_tokens=2))


async def test_a_reply_that_ignores_its_eos_is_said_again_up_to_max_tokens() -> None:
    said = await answer("abc", sampled(ignore_eos=True, stop_ids=(), max_tokens=10))
    assert (said.text, said.end) == (f"abc{END}abc{END}ab", (FinishReason.LENGTH, None))


async def test_a_stop_id_that_is_asked_for_ends_a_turn_that_ignores_its_eos() -> None:
    said = await answer("abc", sampled(ignore_eos=True, stop_ids=(99,)))
    assert (said.text, said.end) == ("abc", (FinishReason.STOP, 99))
    own = await answer("abc", sampled(ignore_eos=True, stop_ids=(STOP,)))
    assert (own.text, own.end) == (f"abc{END}", (FinishReason.STOP, STOP))


async def test_options_that_need_logits_do_not_change_the_reply() -> None:
    penalties: dict[str, Any] = {"repetition_penalty": 2.0, "presence_penalty": 2.0, "frequency_penalty": 2.0}
    plain = await answer("abc", sampled())
    said = await answer("abc", sampled(logit_bias={97: -100}, bad_words=("abc",), temperature=0.0, **penalties))
    assert (said.ids, said.logprobs, said.end) == (plain.ids, plain.logprobs, plain.end)


def tops(said: Said) -> tuple[Any, Any]:
    ids = [row for delta in said.deltas if delta.top for row in delta.top.id_rows().tolist()]
    return ids, [row for delta in said.deltas if delta.top for row in delta.top.logprob_rows().tolist()]


@pytest.mark.parametrize("chunks", [None, "whole", 3], ids=str)
async def test_synthetic_top_ids_fit_the_given_log_probabilities(chunks: Any) -> None:
    said = await answer("a longer answer", sampled(logprobs=4), chunks=chunks)
    ids, logprobs = tops(said)
    assert np.shape(ids) == np.shape(logprobs) == (len(said.ids), 4)
    assert (np.diff(logprobs, axis=1) <= 0).all()
    assert (np.exp(logprobs).sum(axis=1) < 1 + 1e-6).all()
    for token_id, logprob, row, values in zip(said.ids, said.logprobs, ids, logprobs, strict=True):
        assert len(set(row)) == 4
        if token_id in row:
            assert values[row.index(token_id)] == pytest.approx(logprob)
        else:
            assert logprob <= values[-1]


async def test_most_likely_ids_are_read_from_the_reply() -> None:
    rows = [{52: -0.1, 50: -2.5, 51: -math.inf}, {50: -0.2, 52: -3.0, 51: -2.0}]
    reply = Reply(ids=[52, 50], logprobs=[-0.1, -0.2], top_logprobs=rows)
    ids, logprobs = tops(await answer(reply, sampled(logprobs=2)))
    assert ids[:2] == [[52, 50], [50, 51]]
    assert logprobs[:2] == [pytest.approx([-0.1, -2.5]), pytest.approx([-0.2, -2.0])]
    assert len(ids) == 3  # the reply has no row for the stop id, so its row is invented


async def test_reply_with_too_few_most_likely_ids_is_refused() -> None:
    reply = Reply(ids=[52], top_logprobs=[{52: -0.1}])
    with pytest.raises(RequestRejected, match=r"\(logprobs=2\) asks for 2 most likely.* have 1\. Ask for fewer"):
        await answer(reply, sampled(logprobs=2))


async def test_most_likely_ids_are_absent_unless_requested() -> None:
    assert all(delta.top is None for delta in (await answer("abc", sampled())).deltas)
    none = await answer("abc", sampled(logprobs=3), logprobs=False)
    assert all(delta.top is None and delta.logprobs is None for delta in none.deltas)
