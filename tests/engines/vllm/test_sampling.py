"""The fields of Sampling on the real engine: each has its effect, and the most likely ids belong to the sampled ids."""

import collections
import dataclasses
import itertools
import math
import re
from array import array
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from runner import BadOption, Conversation, Run, RunFile, Sampling
from runner.engines.base import Finish, FinishReason, GenerationRequest
from runner.engines.vllm.engine import VllmEngine
from runner.options import Constraint, ConstraintKind
from runner.testing import assert_exact
from runner.tokens.log import TokenLog
from runner.tokens.top_logprobs import TopLogprobs
from runner.training import GrammarMasks, TrainingBatch
from runner.trajectory import Turn
from tests.playing import Plain
from tests.verifying import verdict

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.sample_functions(2)]

EOS_ID = 2
TURN_TOKENS = 12

_names = itertools.count()


@dataclasses.dataclass
class Said:
    """Result of a request."""

    ids: list[int]
    logprobs: list[float]
    top: TopLogprobs | None
    finish: Finish


async def ask(
    engine: VllmEngine, text: str = "Once upon a time", constraint: Constraint | None = None, **fields: Any
) -> Said:
    sampling = dataclasses.replace(Sampling.defaults(), **{"max_tokens": TURN_TOKENS, "temperature": 0.0, **fields})
    request = GenerationRequest(
        name=f"sampling {next(_names)}",
        prompt=engine.tokenizer.encode(text),
        sampling=sampling,
        stop_ids=sampling.all_stop_ids(engine.stop_ids),
        seed=7,
        constraint=constraint,
    )
    ids: list[int] = []
    logprobs: list[float] = []
    top = TopLogprobs(sampling.logprobs) if sampling.logprobs else None
    async with engine.stream(request) as deltas:
        async for delta in deltas:
            ids.extend(delta.token_ids)
            logprobs.extend(delta.logprobs or ())
            assert (delta.top is None) == (top is None)
            if delta.top is not None and top is not None:
                assert len(delta.top) == len(delta.token_ids)
                top.extend(delta.top)
    assert deltas.finish is not None
    return Said(ids, logprobs, top, deltas.finish)


async def test_a_bias_forces_an_id_or_keeps_it_out(engine: VllmEngine) -> None:
    free = (await ask(engine)).ids
    assert (await ask(engine, logit_bias={1234: 100.0})).ids == [1234] * TURN_TOKENS
    assert free[0] not in (await ask(engine, logit_bias={free[0]: -100})).ids


async def test_turn_that_ignores_its_eos_continues_to_max_tokens(engine: VllmEngine) -> None:
    stopped = await ask(engine, logit_bias={EOS_ID: 100})
    assert (stopped.ids, stopped.finish.reason, stopped.finish.stop) == ([EOS_ID], FinishReason.STOP, EOS_ID)
    ignored = await ask(engine, logit_bias={EOS_ID: 100}, ignore_eos=True)
    assert (ignored.ids, ignored.finish.reason, ignored.finish.stop) == (
        [EOS_ID] * TURN_TOKENS,
        FinishReason.LENGTH,
        None,
    )
    own = await ask(engine, logit_bias={EOS_ID: 100}, ignore_eos=True, stop_ids=(EOS_ID,))
    assert (own.ids, own.finish.stop) == ([EOS_ID], EOS_ID)


async def test_no_stop_id_is_sampled_before_min_tokens(engine: VllmEngine) -> None:
    said = await ask(engine, logit_bias={EOS_ID: 100, 28: 50}, min_tokens=5, stop_ids=(28,))
    assert len(said.ids) == 6
    assert not {EOS_ID, 28} & set(said.ids[:5])
    assert (said.ids[5], said.finish.stop) == (EOS_ID, EOS_ID)


async def test_bad_words_are_never_sampled_at_start_or_after_space(engine: VllmEngine) -> None:
    text = engine.tokenizer.decode((await ask(engine)).ids)
    words = tuple(dict.fromkeys(word for word in re.findall(r" (\w+)", text)))
    assert len(words) > 3
    said = engine.tokenizer.decode((await ask(engine, bad_words=words)).ids)
    assert [word for word in words if re.search(rf"(^| ){word}\b", said)] == []


Q = Constraint(ConstraintKind.REGEX, "q")


async def test_constraint_of_only_bad_words_fails_by_name(engine: VllmEngine) -> None:
    cases: list[dict[str, Any]] = [{}, {"temperature": 1.0, "logprobs": 2}]
    for fields in cases:
        said = await ask(engine, constraint=Q, bad_words=("q",), **fields)
        assert (said.ids, said.logprobs, said.finish.reason) == ([], [], FinishReason.ERROR)
        assert "no id could be sampled: bad_words" in str(said.finish.stop)
    assert engine.tokenizer.decode((await ask(engine, constraint=Q)).ids[:1]) == "q"


async def test_a_constraint_holds_up_to_the_eos_that_a_turn_ignores(engine: VllmEngine) -> None:
    said = await ask(engine, constraint=Q, ignore_eos=True)
    assert engine.tokenizer.decode(said.ids[:1]) == "q"
    assert (said.ids[1], len(said.ids), said.finish.reason) == (EOS_ID, TURN_TOKENS, FinishReason.LENGTH)
    turn = Turn("main", 0, TokenLog(ids=array("i", said.ids)), 0, TURN_TOKENS, constraint=Q)
    masks = GrammarMasks.of_engine(engine).masks_of(turn)
    assert masks is not None
    assert (masks.allowed[:2].tolist(), masks.index[2:].tolist()) == ([1, 1], [-1] * (TURN_TOKENS - 2))


async def test_constraint_end_ends_the_turn_before_min_tokens(engine: VllmEngine) -> None:
    said = await ask(engine, constraint=Q, min_tokens=5)
    assert engine.tokenizer.decode(said.ids[:1]) == "q"
    assert (said.ids[1:], said.finish.stop) == ([EOS_ID], EOS_ID)


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1.5}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}], ids=str
)
async def test_a_penalty_lets_less_be_repeated(engine: VllmEngine, penalty: dict[str, Any]) -> None:
    text = "one two one two one two one two"
    free = await ask(engine, text, max_tokens=24, ignore_eos=True)
    less = await ask(engine, text, max_tokens=24, ignore_eos=True, **penalty)
    most = [max(collections.Counter(said.ids).values()) for said in (free, less)]
    assert most[1] < most[0]


async def test_top_ids_are_sorted_and_contain_the_greedy_id(
    engine: VllmEngine,
) -> None:
    said = await ask(engine, logprobs=5)
    assert said.top is not None
    ids, logprobs = said.top.id_rows(), said.top.logprob_rows()
    assert ids.shape == logprobs.shape == (TURN_TOKENS, 5)
    assert ids[:, 0].tolist() == said.ids
    assert np.allclose(logprobs[:, 0], said.logprobs, atol=1e-6)
    assert (np.diff(logprobs, axis=1) <= 0).all()
    sums = np.exp(logprobs).sum(axis=1)
    assert (sums < 1).all()
    assert (sums > 0.05).all()


async def test_likeliest_ids_are_of_the_distribution_sampled_from(engine: VllmEngine) -> None:
    said = await ask(engine, logprobs=20, temperature=1.0, top_k=3)
    assert said.top is not None
    for token_id, logprob, ids, values in zip(
        said.ids, said.logprobs, said.top.id_rows().tolist(), said.top.logprob_rows().tolist(), strict=True
    ):
        assert dict(zip(ids, values, strict=True))[token_id] == pytest.approx(logprob)
        assert np.exp(values).sum() == pytest.approx(1, abs=1e-4)
        assert values.count(-np.inf) > 10  # more than three are left, since several are equally likely


async def test_recorded_log_probabilities_are_those_after_bias_and_penalty(engine: VllmEngine) -> None:
    async def first(**fields: Any) -> dict[int, float]:
        top = (await ask(engine, "one two one two one two one", max_tokens=1, logprobs=20, **fields)).top
        assert top is not None
        return dict(zip(top.ids, top.logprobs, strict=True))

    (two,) = engine.tokenizer.encode(" two")
    free = await first()
    other = next(token_id for token_id in free if token_id not in engine.tokenizer.encode("one two one two one"))
    biased = await first(logit_bias={other: 1.5})
    assert biased[other] - biased[two] == pytest.approx(free[other] - free[two] + 1.5, abs=0.05)
    penalised = await first(presence_penalty=2.0)  # the turn has no id yet, so nothing is penalised
    assert penalised[other] - penalised[two] == pytest.approx(free[other] - free[two], abs=0.05)
    repeated = await first(repetition_penalty=1.3)  # the prompt contains this id
    assert repeated.get(two, -math.inf) < free[two] - 0.5


async def test_each_request_of_a_batch_has_its_own_number_of_top_ids(engine: VllmEngine) -> None:
    counts = [0, 3, 20, 1, 0, 7]
    said: dict[int, Said] = {}

    async def one(number: int, count: int) -> None:
        said[number] = await ask(engine, logprobs=count, max_tokens=24, ignore_eos=True)

    async with anyio.create_task_group() as tasks:
        for number, count in enumerate(counts):
            tasks.start_soon(one, number, count)
    for number, count in enumerate(counts):
        assert len(said[number].ids) == len(said[number].logprobs) == 24
        top = said[number].top
        assert (None if top is None else (len(top), top.count)) == ((24, count) if count else None)


class Asks(Plain):
    """Environment with two turns: one continues after its EOS, and one records its most likely ids."""

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate(sampling=Sampling(ignore_eos=True, logit_bias={EOS_ID: 12.0}))
        conversation.add("And then?")
        await conversation.generate(sampling=Sampling(logprobs=4, min_tokens=3, stop=("e",)))


async def test_run_keeps_top_ids_exactly_and_verifies(engine: VllmEngine, tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    async with Run(Asks, engine, file=path, sampling=Sampling(max_tokens=TURN_TOKENS, logprobs=2)) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    assert_exact(trajectory, engine)
    first, second = trajectory.turns
    assert (first.finish, first.stop, len(first.token_ids)) == (FinishReason.LENGTH, "max_tokens", TURN_TOKENS)
    assert (first.top_ids.shape, second.top_ids.shape) == ((TURN_TOKENS, 2), (len(second.token_ids), 4))
    assert len(second.token_ids) > 3
    with RunFile(path) as run_file:
        (read,) = run_file.trajectories()
    for before, after in zip(trajectory.turns, read.turns, strict=True):
        assert (before.top_ids == after.top_ids).all()
        assert (before.top_logprobs == after.top_logprobs).all()
        assert before.sampling == after.sampling
    assert verdict(path)["differing"] == 0
    batch = TrainingBatch.padded([read], pad_id=0)
    assert batch.inexact_reason == "logit_bias of 1 (1 turn); min_tokens=3 (1 turn)"


async def test_an_id_that_the_model_has_not_is_refused_before_the_run_plays(engine: VllmEngine) -> None:
    with pytest.raises(BadOption, match=rf"logit_bias=\{{{engine.vocabulary}: .*0 to {engine.vocabulary - 1}"):
        async with Run(Plain, engine, sampling=Sampling(logit_bias={engine.vocabulary: 1.0})):
            pytest.fail("the run began")
