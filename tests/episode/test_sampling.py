"""The fields of Sampling in an episode: the end of a turn, the tokens that follow it, and its most likely ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from runner import BadOption, Conversation, Limits, Outcome, Run, RunFile, Sampling
from runner.engines.base import FinishReason
from runner.testing import Fault, Latency, Reply, ScriptedEngine, assert_exact
from tests.histories import Twice
from tests.playing import Plain, play, recording, talked
from tests.verifying import verdict

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends]


async def said(engine: ScriptedEngine, **fields: Any) -> Any:
    async def talk(conversation: Conversation) -> None:
        await conversation.generate(sampling=Sampling(**fields))

    return (await talked(talk, engine)).turns[0]


# --- the end of a turn


async def test_turn_that_ignores_its_eos_is_cut_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    engine = ScriptedEngine(["abc", "def"], record=True)
    async with Run(Twice, engine, file=path, sampling=Sampling(ignore_eos=True, max_tokens=10)) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    assert_exact(trajectory, engine)
    first, second = trajectory.turns
    assert [call.stop_ids for call in engine.calls] == [(), ()]
    assert (first.finish, first.stop, len(first.token_ids)) == (FinishReason.LENGTH, "max_tokens", 10)
    assert first.text == "abc<|im_end|>abc<|im_end|>ab"
    assert second.prompt_ids[: first.end] == first.log.ids[: first.end]
    assert (trajectory.outcome, trajectory.limit) == (Outcome.TOKEN_LIMIT, "max_tokens")
    assert verdict(path)["differing"] == 0


@pytest.mark.parametrize("length", range(2, 10))
async def test_a_turn_that_is_cut_anywhere_past_its_eos_verifies(length: int, tmp_path: Path) -> None:
    path, sampling = tmp_path / "run.db", Sampling(ignore_eos=True, max_tokens=length)
    async with Run(Twice, ScriptedEngine(["abc", "def"]), file=path, sampling=sampling) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    assert [len(turn.token_ids) for turn in trajectory.turns] == [length, length]
    assert verdict(path)["differing"] == 0


async def test_stop_ids_of_the_author_end_a_turn_that_ignores_its_eos() -> None:
    turn = await said(recording("abc!"), ignore_eos=True, stop_ids=(ord("!"),))
    assert (turn.text, turn.finish, turn.stop) == ("abc", FinishReason.STOP, ord("!"))


@pytest.mark.parametrize("chunks", [1, 3, "whole"], ids=str)
@pytest.mark.parametrize(
    ("least", "text"),
    [(0, "one "), (6, "one "), (7, "one END two "), (15, "one END two END three")],
    ids=["at once", "the last id counts", "one is passed over", "all are"],
)
async def test_a_stop_string_counts_once_more_than_min_tokens_were_sampled(least: int, text: str, chunks: Any) -> None:
    engine = recording("one END two END three", chunks=chunks)
    assert (await said(engine, stop=("END",), min_tokens=least)).text == text


async def test_stop_string_that_spans_min_tokens_counts() -> None:
    assert (await said(recording("one END two"), stop=("END",), min_tokens=5)).text == "one "
    assert (await said(recording("one ENDEND two"), stop=("END", "D"), min_tokens=7)).text == "one END"


async def test_a_context_that_has_less_room_than_min_tokens_cuts_the_turn() -> None:
    trajectory = await play(Plain, recording("Yes", context=60), sampling=Sampling(min_tokens=500))
    (turn,) = trajectory.turns
    assert (trajectory.outcome, turn.finish, turn.end) == (Outcome.CONTEXT_LIMIT, FinishReason.CONTEXT, 60)
    assert turn.sampling is not None
    assert turn.sampling.min_tokens == 500


async def test_a_limit_of_tokens_below_min_tokens_cuts_the_turn() -> None:
    trajectory = await play(Plain, recording("Yes"), sampling=Sampling(min_tokens=20), limits=Limits(tokens=8))
    assert (trajectory.outcome, trajectory.limit, trajectory.sampled) == (Outcome.TOKEN_LIMIT, "tokens", 8)


# --- layers


async def test_every_sampling_field_reaches_the_engine() -> None:
    class Layers(Plain):
        sampling = Sampling(min_tokens=1, bad_words=("moon",), logit_bias={7: 1.0}, presence_penalty=1)

        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate(sampling=Sampling(logit_bias={8: 2.0}, frequency_penalty=0.5))

    engine = recording("Yes")
    trajectory = await play(Layers, engine, sampling=Sampling(logprobs=2, repetition_penalty=1.2, presence_penalty=0.5))
    expected = Sampling(
        min_tokens=1,
        bad_words=("moon",),
        logit_bias={8: 2.0},
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        logprobs=2,
    ).over(Sampling.defaults())
    assert engine.calls[0].sampling == trajectory.turns[0].sampling == expected


async def test_id_outside_the_vocabulary_is_refused_in_a_turn() -> None:
    engine = recording("Yes")
    size = engine.tokenizer.size

    async def talk(conversation: Conversation) -> None:
        with pytest.raises(BadOption, match=rf"logit_bias=\{{{size}: .*0 to {size - 1}"):
            await conversation.generate(sampling=Sampling(logit_bias={size: 1.0}))
        await conversation.generate(sampling=Sampling(logit_bias={size - 1: 1.0}))

    assert (await talked(talk, engine)).outcome is Outcome.COMPLETED


async def test_id_outside_the_vocabulary_is_refused_before_a_run() -> None:
    engine = recording("Yes")
    with pytest.raises(BadOption, match=r"logit_bias=\{5000: "):
        async with Run(Plain, engine, sampling=Sampling(logit_bias={5000: 1.0})):
            pytest.fail("the run began")
    assert engine.calls == []


# --- the most likely ids


async def test_a_turn_keeps_the_most_likely_ids_of_each_of_its_ids() -> None:
    rows = [{52: -0.1, 50: -2.5}, {50: -0.2, 52: -3.0}]
    turn = await said(recording(Reply(ids=[52, 50], logprobs=[-0.1, -0.2], top_logprobs=rows)), logprobs=2)
    assert turn.top_ids.shape == turn.top_logprobs.shape == (3, 2)
    assert (turn.top_ids.dtype, turn.top_logprobs.dtype) == (np.int32, np.float32)
    assert turn.top_ids[:2].tolist() == [[52, 50], [50, 52]]
    assert turn.top_logprobs[1].tolist() == pytest.approx([-0.2, -3.0])


@pytest.mark.parametrize("none", [0, None], ids=str)
async def test_turn_without_likeliest_ids_has_arrays_without_columns(none: Any) -> None:
    turn = await said(recording("Yes"), logprobs=none)
    assert turn.top_ids.shape == turn.top_logprobs.shape == (len(turn.token_ids), 0)
    assert turn.log.top_logprobs == {}


async def test_turns_of_a_conversation_keep_their_own_numbers_of_top_ids() -> None:
    async def talk(conversation: Conversation) -> None:
        for count in (3, 0, 5):
            await conversation.generate(sampling=Sampling(logprobs=count))
            conversation.add("And?")

    turns = (await talked(talk, recording("Yes"))).turns
    assert [turn.top_ids.shape for turn in turns] == [(4, 3), (4, 0), (4, 5)]


@pytest.mark.parametrize("chunks", [1, 4, "whole"], ids=str)
async def test_ids_past_a_stop_string_have_no_most_likely_ids(chunks: Any) -> None:
    turn = await said(recording("one END two", chunks=chunks), stop=("END",), logprobs=2)
    assert turn.top_ids.shape == (7, 2)


async def test_failed_turn_keeps_the_likeliest_ids_of_its_sampled_ids() -> None:
    engine = recording(Reply("a longer answer", fault=Fault.error(at=5)))
    trajectory = await play(Plain, engine, sampling=Sampling(logprobs=2), retries=0, breaker=1)
    assert trajectory.outcome is Outcome.ENGINE_ERROR
    assert trajectory.turns[0].top_ids.shape == (5, 2)


async def test_restarted_turn_keeps_the_values_of_its_last_try() -> None:
    engine = recording("a longer answer", latency=Latency(between=1))

    async def talk(conversation: Conversation) -> None:
        async def cut() -> None:
            while not engine.runtime.requests or engine.stats().sampled_tokens < 4:
                await anyio.lowlevel.checkpoint()
            await engine.pause("abort")
            await engine.resume()

        async with anyio.create_task_group() as group:
            group.start_soon(cut)
            await conversation.generate(sampling=Sampling(logprobs=2))

    (turn,) = (await talked(talk, engine)).turns
    assert turn.resampled > 0
    assert turn.top_ids.shape == (len("a longer answer") + 1, 2)


async def test_turn_cut_before_its_first_id_has_no_values(tmp_path: Path) -> None:
    path, engine = tmp_path / "run.db", recording("abc", latency=Latency(first=3))

    class Impatient(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(self.cancel, scope)
                    await conversation.generate()
            await conversation.generate()

        async def cancel(self, scope: anyio.CancelScope) -> None:
            while not engine.runtime.requests:
                await anyio.lowlevel.checkpoint()
            scope.cancel()

    async with Run(Impatient, engine, file=path, sampling=Sampling(logprobs=2)) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    cut, whole = trajectory.turns
    assert (cut.start, cut.end) == (whole.start, whole.start)
    assert (cut.top_ids.shape, whole.top_ids.shape) == ((0, 0), (4, 2))
    with RunFile(path) as run_file:
        (read,) = run_file.trajectories()
    assert [turn.top_ids.shape for turn in read.turns] == [(0, 0), (4, 2)]
    assert verdict(path)["differing"] == 0
