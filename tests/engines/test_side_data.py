"""Sampling masks and routed experts of every engine: in deltas, in turns, from servers, and refused by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner import BadOption, Conversation, Outcome, Sampling, TokenEngine, TokenOutput, TokenSampling, Trajectory
from runner.engines.base import Delta
from runner.engines.remote.dialect import ServerDialect
from runner.engines.scripted.side_data import MAX_SYNTHETIC_IDS
from runner.engines.vllm import stream as vllm_stream
from runner.testing import Reply, ScriptedEngine, play_async
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.side_data import RoutedExperts, SamplingMasks
from tests.engines.remote.remote_requests import asked, read, wanted
from tests.histories import Twice
from tests.playing import Plain

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]

TRUNCATED = Sampling(top_p=0.9, top_k=3)
LAYERS, TOP = 2, 3


def scripted(*replies: Any, **settings: Any) -> ScriptedEngine:
    return ScriptedEngine(
        list(replies) or ["one", "two"], **{"sampling_masks": True, "routed_experts": (LAYERS, TOP), **settings}
    )


def masks_of(deltas: Sequence[Delta]) -> list[list[int]]:
    return [row for each in deltas if each.side is not None and each.side.masks for row in each.side.masks.rows()]


def experts_of(deltas: Sequence[Delta]) -> list[RoutedExperts]:
    return [each.side.experts for each in deltas if each.side is not None and each.side.experts is not None]


def assert_covered(trajectory: Trajectory) -> None:
    """Assert that each id has a mask that contains it, and that a segment's experts cover all ids but the last."""
    for turn in trajectory.turns:
        assert turn.sampling_masks is not None
        assert len(turn.sampling_masks) == len(turn.token_ids)
        assert all(one in row for one, row in zip(turn.token_ids, turn.sampling_masks.rows(), strict=True))
    for number, segment in enumerate(trajectory.segments):
        parts = [turn.routed_experts for turn in trajectory.turns if turn.segment == number]
        places = [place for part in parts if part is not None for place in range(part.start, part.end)]
        assert places == list(range(len(places)))
        assert len(places) >= len(segment.log) - 1


async def test_turns_have_masks_and_experts_of_their_own_ids() -> None:
    trajectory = await play_async(Twice(), scripted(), sampling=TRUNCATED)
    assert_covered(trajectory)
    first, second = (turn.routed_experts for turn in trajectory.turns)
    assert first is not None
    assert second is not None
    assert (first.start, second.start) == (0, first.end)
    assert first.numbers().shape == (first.end, LAYERS, TOP)


@pytest.mark.parametrize("chunks", [1, 2, "random"])
async def test_masks_are_the_same_in_any_deltas(chunks: Any) -> None:
    whole = await play_async(Twice(), scripted(), sampling=TRUNCATED)
    parts = await play_async(Twice(), scripted(chunks=chunks, lone_finish=True), sampling=TRUNCATED)
    for one, other in zip(whole.turns, parts.turns, strict=True):
        assert one.sampling_masks == other.sampling_masks
        assert one.routed_experts == other.routed_experts


async def test_stop_string_cuts_masks_and_experts_with_its_ids() -> None:
    stopping = Sampling(top_k=3, stop=("STOP",))
    trajectory = await play_async(Plain(), scripted("one STOP two three", chunks=3), sampling=stopping)
    (turn,) = trajectory.turns
    assert turn.dropped
    assert turn.sampling_masks is not None
    assert len(turn.sampling_masks) == len(turn.token_ids)
    if turn.routed_experts is not None:
        assert turn.routed_experts.end <= turn.end


async def test_rewritten_history_has_experts_of_its_own() -> None:
    class Rewritten(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate()
            conversation.replace([{"role": "user", "content": "Again."}])
            await conversation.generate()

    trajectory = await play_async(Rewritten(), scripted(), sampling=TRUNCATED)
    assert len(trajectory.segments) == 2
    assert_covered(trajectory)


async def test_engine_without_side_data_returns_none() -> None:
    trajectory = await play_async(Twice(), ScriptedEngine(["one", "two"]), sampling=TRUNCATED)
    assert [turn.sampling_masks for turn in trajectory.turns] == [None, None]
    assert [turn.routed_experts for turn in trajectory.turns] == [None, None]
    assert trajectory.segments[0].log.side_data == {}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0)])
async def test_turn_without_truncation_has_no_masks(sampling: Sampling) -> None:
    trajectory = await play_async(Plain(), scripted(routed_experts=None), sampling=sampling)
    assert trajectory.turns[0].sampling_masks is None


async def test_masks_of_a_reply_are_given_and_checked() -> None:
    given = Reply(ids=[70, 80], sampling_masks=[[70, 71], [80]], finish="length")
    trajectory = await play_async(Plain(), scripted(given), sampling=TRUNCATED)
    masks = trajectory.turns[0].sampling_masks
    assert masks is not None
    assert masks.rows() == [[70, 71], [80]]
    wrong = Reply(ids=[70], sampling_masks=[[71]], finish="length")
    failed = await play_async(Plain(), scripted(wrong), sampling=TRUNCATED)
    assert failed.outcome is Outcome.ENGINE_ERROR
    assert "lacks its sampled id 70" in failed.error


def test_invalid_experts_of_a_scripted_engine_are_refused() -> None:
    with pytest.raises(BadOption, match=r"routed_experts=\(2, 0\)"):
        ScriptedEngine("x", routed_experts=(2, 0))


# --- servers


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("dialect", [ServerDialect.VLLM, ServerDialect.SGLANG])
async def test_side_data_comes_from_servers(tmp_path: Path, dialect: ServerDialect, incremental: bool) -> None:
    settings = {"sampling_masks": True, "routed_experts": (LAYERS, TOP), "dialect": dialect, "incremental": incremental}
    options = {"sampling_masks": True, "routed_experts": TOP}
    async with asked(tmp_path, "Yes.", engine=options, **settings) as (server, engine):
        deltas = await read(engine, wanted(top_p=0.9, top_k=5))
    ids = [token_id for delta in deltas for token_id in delta.token_ids]
    masks = masks_of(deltas)
    assert [row[0] for row in masks] == ids
    assert {len(row) for row in masks} == {MAX_SYNTHETIC_IDS}
    (experts,) = experts_of(deltas)
    assert experts.numbers().shape == (2 + len(ids) - 1, LAYERS, TOP)
    requested = server.bodies[0].keys() & {"return_sampling_mask", "return_routed_experts"}
    assert len(requested) == (2 if dialect is ServerDialect.SGLANG else 0)


async def test_raw_server_has_exact_log_probabilities_with_masks(tmp_path: Path) -> None:
    sglang: dict[str, Any] = {"dialect": ServerDialect.SGLANG, "sampling_masks": True, "raw": True}
    async with asked(tmp_path, "Yes.", engine={"sampling_masks": True}, **sglang) as (_, engine):
        deltas = await read(engine, wanted(top_p=0.9, top_k=5))
        plain = await read(engine, wanted(top_p=0.9))  # SGLang returns no masks without a top_k
    assert all(delta.logprobs is not None for delta in deltas)
    assert all(delta.logprobs is None for delta in plain if delta.token_ids)


async def test_log_probabilities_of_all_possible_ids_are_read() -> None:
    from runner.engines.remote.sglang import _masked_logprobs

    assert _masked_logprobs([[-0.5, -1.0], -0.25], [[7, 8], [9]], [8, 9]) == [-1.0, -0.25]


# --- vLLM's own records


async def test_side_data_of_vllm_is_read_from_its_own_records() -> None:
    outputs = pytest.importorskip("vllm.outputs")
    experts = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    own = outputs.CompletionOutput(
        0, "", [7, 8], None, None, experts, sampling_mask=outputs.SamplingMask([[7, 9], [8]])
    )
    side = vllm_stream._side(own)
    assert side is not None
    assert side.masks == SamplingMasks.of([[7, 9], [8]])
    assert side.experts is not None
    assert side.experts.numbers().tolist() == experts.tolist()
    assert vllm_stream._side(outputs.CompletionOutput(0, "", [7], None, None)) is None


# --- token functions


def function(**fields: Any) -> TokenEngine:
    async def generate(prompt: list[int], sampling: TokenSampling, *, session: str) -> TokenOutput:
        given = {name: value(prompt) if callable(value) else value for name, value in fields.items()}
        return TokenOutput([70, 71], [-0.5, -0.5], "abort", **given)

    return TokenEngine(generate, tokenizer=ByteTokenizer(), template="hermes", context=500, takes=["top_k", "top_p"])


def routed(prompt: list[int]) -> Any:
    return np.zeros((len(prompt) + 1, 1, 2), np.int64)


async def test_token_function_may_return_side_data() -> None:
    engine = function(sampling_masks=[[70, 1], [71]], routed_experts=routed)
    trajectory = await play_async(Plain(), engine, sampling=Sampling(top_k=2))
    assert_covered(trajectory)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"sampling_masks": [[70]]}, "sampling_masks of 1 positions of 2"),
        ({"sampling_masks": [[70], [70]]}, "a sampling mask without its sampled id 71"),
        ({"routed_experts": [1, 2]}, r"routed experts of shape \(2,\)"),
        ({"routed_experts": np.zeros((1, 1, 1), int)}, "routed_experts of 1 positions"),
        ({"routed_experts": np.full((3, 1, 1), 40_000)}, "routed experts from 40000"),
    ],
)
async def test_invalid_side_data_is_refused_by_field(fields: dict[str, Any], fault: str) -> None:
    trajectory = await play_async(Plain(), function(**fields), sampling=Sampling(top_k=2))
    assert trajectory.outcome is Outcome.ENGINE_ERROR
    assert re.search(fault, trajectory.error), trajectory.error
