"""`engine.score`: log-probabilities of given ids, equal to the recorded ones, with every engine that supports it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from runner import BadControl, BadOption, Sampling
from runner.engines.base import Engine, GenerationRequest
from runner.engines.remote.dialect import ServerDialect
from runner.engines.remote.engine import RemoteEngine
from runner.engines.weights import read_folder
from runner.errors import RequestRejected
from runner.options import Constraint, ConstraintKind
from runner.testing import ScriptedEngine, force
from runner.testing.engine_pool import PooledEngine
from tests.cluster.in_process import HostedHere
from tests.engines.function.functions import engine_over
from tests.engines.lora import adapter_tensors, save_adapter
from tests.engines.remote.loopback import serving
from tests.engines.remote.model_folder import byte_model

pytestmark = [pytest.mark.anyio, pytest.mark.sample_functions(2)]

PROMPT = "The capital of France is"
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
TOLERANCE_NATS = 1e-4  # float32: a prompt in one pass compared with steps of one id

SAMPLINGS = {
    "temperature": Sampling(temperature=0.7),
    "greedy": Sampling(temperature=0.0),
    "everything": Sampling(
        temperature=1.3, top_p=0.9, top_k=50, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={262: 2.0}
    ),
}
CONSTRAINTS = {
    "schema": Constraint(ConstraintKind.JSON, SCHEMA),
    "regex": Constraint(ConstraintKind.REGEX, "[a-z ]{5,40}[.]"),
}


async def sampled(
    engine: Engine, sampling: Sampling, constraint: Constraint | None = None, seed: int = 3
) -> tuple[list[int], list[int], list[float]]:
    """Return a prompt, and the ids of a turn with their log-probabilities."""
    prompt = engine.tokenizer.encode(PROMPT)
    how = replace(sampling.over(Sampling.defaults()), max_tokens=24)
    wanted = GenerationRequest(name="a/main/0", prompt=prompt, sampling=how, constraint=constraint, seed=seed)
    ids, logprobs = list[int](), list[float]()
    async with engine.stream(wanted) as deltas:
        async for delta in deltas:
            ids += delta.token_ids
            logprobs += delta.logprobs or ()
    return prompt, ids, logprobs


async def prompt_scores(engine: Engine, ids: Sequence[int], temperature: float) -> Sequence[float]:
    """Return vLLM's log-probabilities of a prompt, in a request that samples at this temperature."""
    how = replace(Sampling.defaults(), max_tokens=1, temperature=temperature)
    async with engine.stream(GenerationRequest(name="score", prompt=ids, sampling=how, scores_prompt=True)) as deltas:
        assert [delta async for delta in deltas]
    assert deltas.prompt_logprobs is not None
    return deltas.prompt_logprobs


# --- the real engine


@pytest.mark.engine
def test_unpatched_prompt_scores_leave_the_temperature_out(float32_engine: PooledEngine) -> None:
    async def main() -> None:
        ids = float32_engine.tokenizer.encode(f"{PROMPT} Paris, of course")
        plain, cooler = [await prompt_scores(float32_engine.inner, ids, each) for each in (1.0, 0.5)]
        assert cooler == pytest.approx(plain, abs=TOLERANCE_NATS), "vLLM has fixed it: remove the patch"

    float32_engine.home.call(main)


@pytest.mark.engine
def test_scores_are_the_log_probabilities_of_sampling(float32_engine: PooledEngine) -> None:
    async def main() -> None:
        prompt, ids, logprobs = await sampled(float32_engine, Sampling())
        assert await float32_engine.score([*prompt, *ids], start=len(prompt)) == pytest.approx(
            logprobs, abs=TOLERANCE_NATS
        )

    float32_engine.home.call(main)


@pytest.mark.sample_cases(3)
@pytest.mark.engine
@pytest.mark.parametrize("name", SAMPLINGS)
def test_scores_as_sampled_include_the_sampling(name: str, float32_engine: PooledEngine) -> None:
    async def main() -> None:
        how = SAMPLINGS[name]
        prompt, ids, logprobs = await sampled(float32_engine, how)
        scores = await float32_engine.score([*prompt, *ids], start=len(prompt), sampling=how)
        assert scores == pytest.approx(logprobs, abs=TOLERANCE_NATS)
        plain = await float32_engine.score([*prompt, *ids], start=len(prompt))
        assert name == "greedy" or plain != pytest.approx(logprobs, abs=0.05), "the sampling changes the scores"

    float32_engine.home.call(main)


@pytest.mark.engine
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_scores_under_a_grammar_include_its_mask(name: str, float32_engine: PooledEngine) -> None:
    async def main() -> None:
        grammar, how = CONSTRAINTS[name], Sampling(temperature=0.8)
        prompt, ids, logprobs = await sampled(float32_engine, how, grammar)
        given = [*prompt, *ids]
        scores = await float32_engine.score(given, start=len(prompt), sampling=how, constraint=grammar)
        assert scores == pytest.approx(logprobs, abs=TOLERANCE_NATS)

    float32_engine.home.call(main)


@pytest.mark.engine
def test_ids_that_a_grammar_refuses_have_no_probability(float32_engine: PooledEngine) -> None:
    async def main() -> None:
        encode = float32_engine.tokenizer.encode
        prompt, refused = encode(PROMPT), encode(" Paris, of course")
        grammar = CONSTRAINTS["schema"]
        scores = await float32_engine.score([*prompt, *refused], start=len(prompt), constraint=grammar)
        assert scores == [-math.inf] * len(refused)
        assert float32_engine.is_alive()

    float32_engine.home.call(main)


@pytest.mark.engine
def test_many_sequences_are_scored_beside_turns_and_leave_nothing(float32_engine: PooledEngine) -> None:
    async def main() -> None:
        encode = float32_engine.tokenizer.encode
        texts = [encode(f"{number} {PROMPT}, and number {number * 7} is not.") for number in range(24)]
        alone = [await float32_engine.score(ids) for ids in texts]
        together: dict[int, list[float]] = {}

        async def score(number: int) -> None:
            how = SAMPLINGS["temperature"] if number % 5 == 4 else None
            together[number] = await float32_engine.score(texts[number], sampling=how)

        async with anyio.create_task_group() as group:
            group.start_soon(sampled, float32_engine, Sampling())
            for number in range(len(texts)):
                group.start_soon(score, number)
        for number, scores in enumerate(alone):
            assert len(together[number]) == len(texts[number]) - 1
            if number % 5 != 4:
                assert together[number] == pytest.approx(scores, abs=TOLERANCE_NATS)
        await float32_engine.inner.idle()  # type: ignore[attr-defined]  # a method of the real engine
        assert float32_engine.stats().open == 0

    float32_engine.home.call(main)


@pytest.mark.engine
def test_scores_with_an_adapter_are_those_of_sampling_with_it(
    float32_engine: PooledEngine, small_model_folder: Path, tmp_path: Path
) -> None:
    shapes = {name: form.shape for name, form in read_folder(small_model_folder).forms.items()}
    save_adapter(tmp_path, adapter_tensors(shapes, seed=1))

    async def main() -> None:
        await float32_engine.add_adapter("poet", tmp_path)
        with_it = Sampling(adapter="poet")
        prompt, ids, logprobs = await sampled(float32_engine, with_it)
        given, found = [*prompt, *ids], dict[str | None, list[float]]()

        async def score(adapter: str | None) -> None:
            how = None if adapter is None else Sampling(adapter=adapter)
            found[adapter] = await float32_engine.score(given, start=len(prompt), sampling=how)

        async with anyio.create_task_group() as group:
            for adapter in ("poet", None):
                group.start_soon(score, adapter)
        assert found["poet"] == pytest.approx(logprobs, abs=TOLERANCE_NATS)
        assert found[None] != pytest.approx(logprobs, abs=0.05), "the adapter changes the scores"
        assert await float32_engine.score(
            given, start=len(prompt), sampling=Sampling(adapter="poet", temperature=1.0)
        ) == pytest.approx(logprobs, abs=TOLERANCE_NATS)
        await float32_engine.remove_adapter("poet")

    float32_engine.home.call(main)


@pytest.mark.engine
def test_a_cancelled_score_leaves_nothing(float32_engine: PooledEngine) -> None:
    async def main() -> None:
        ids = float32_engine.tokenizer.encode(PROMPT * 40)
        with anyio.move_on_after(0.01):
            await float32_engine.score(ids)
        await float32_engine.inner.idle()  # type: ignore[attr-defined]  # a method of the real engine
        assert float32_engine.stats().open == 0
        assert len(await float32_engine.score(ids)) == len(ids) - 1

    float32_engine.home.call(main)


@pytest.mark.engine
@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("end", ["cancelled", "cut"])
def test_scores_in_flight_survive_what_ends_requests(end: str, float32_engine: PooledEngine) -> None:
    """A cancelled caller, or a pause that cuts requests, ends a request before its scores are computed."""

    async def main() -> None:
        texts = [float32_engine.tokenizer.encode(f"{number} {PROMPT}" * 40)[:160] for number in range(8)]
        compared = texts[: 1 if end == "cancelled" else None]
        expected = [await float32_engine.score(ids) for ids in compared]
        as_sampled = await float32_engine.score(texts[0][:40], start=8, sampling=SAMPLINGS["temperature"])
        found: dict[int, list[float]] = {}

        async def score(number: int) -> None:
            if number == len(texts):
                found[number] = await float32_engine.score(texts[0][:40], start=8, sampling=SAMPLINGS["temperature"])
            else:
                found[number] = await float32_engine.score(texts[number])

        async with anyio.create_task_group() as group:
            for number in range(len(texts) + 1):
                group.start_soon(score, number)
            while not found:  # noqa: ASYNC110  # until the first scores are computed and others are in flight
                await anyio.sleep(0.001)
            if end == "cancelled":
                group.cancel_scope.cancel()
            else:
                await float32_engine.pause(mode="abort")
                await float32_engine.resume()
        assert float32_engine.is_alive()
        assert len(found) == len(texts) + 1 or end == "cancelled"
        if end == "cancelled":
            assert await float32_engine.score(texts[0]) == pytest.approx(expected[0], abs=TOLERANCE_NATS)
            return
        for number, scores in enumerate([*expected, as_sampled]):
            assert found[number] == pytest.approx(scores, abs=TOLERANCE_NATS)

    float32_engine.home.call(main)


# --- bad input


@pytest.mark.parametrize(
    ("ids", "start", "said"),
    [
        ([], 1, "0 ids; give two or more"),
        ([5], 1, "1 ids; give two or more"),
        ([5, "a"], 1, "give token ids, whole numbers"),
        ([5, 1.5], 1, "give token ids, whole numbers"),
        ([5, -1], 1, "the id -1 does not exist; the model's ids are 0 to"),
        ([5, 10**9], 1, "the id 1000000000 does not exist; the model's ids are 0 to"),
        ([5, 6], 0, "score(start=0): give 1 to 1"),
        ([5, 6], 2, "score(start=2): give 1 to 1"),
        ([5, 6], True, "score(start=True): give 1 to 1"),
    ],
)
async def test_ids_that_cannot_be_scored_are_named(ids: Any, start: Any, said: str) -> None:
    async with ScriptedEngine("Yes") as engine:
        with pytest.raises(BadOption) as raised:
            await engine.score(ids, start=start)
    assert said in str(raised.value)


async def test_a_schema_in_the_sampling_is_refused_by_name() -> None:
    async with ScriptedEngine("Yes") as engine:
        with pytest.raises(BadOption, match=r"Sampling\(regex=\.\.\.\)\): give the grammar as constraint=Constraint\("):
            await engine.score([1, 2], sampling=Sampling(regex="a+"))


async def test_a_sequence_past_the_context_is_refused() -> None:
    async with ScriptedEngine("Yes", context=8) as engine:
        with pytest.raises(RequestRejected, match="the prompt has 9 ids; give 1 to 7"):
            await engine.score(range(9))


async def test_an_engine_over_a_function_cannot_score() -> None:
    async with ScriptedEngine("Yes") as inner, engine_over(inner) as engine:
        with pytest.raises(BadControl, match="TokenEngine has no log-probabilities of given ids"):
            await engine.score([1, 2])


# --- the scripted engine


async def test_scripted_scores_are_stable_and_use_no_reply() -> None:
    async with ScriptedEngine(["one", "two"]) as engine:
        first = await engine.score([1, 2, 3, 2, 3])
        assert first == await engine.score([1, 2, 3, 2, 3])
        assert first[1] == first[3] < 0, "drawn for each pair of adjacent ids"
        assert await engine.score([1, 2, 3, 2, 3], start=3) == first[2:]
        _, ids, _ = await sampled(engine, Sampling())
        assert engine.tokenizer.decode(ids).startswith("one")


async def test_a_scripted_engine_scores_by_a_function() -> None:
    async with ScriptedEngine("Yes", scores=lambda ids: [-float(each) for each in ids[1:]]) as engine:
        assert await engine.score([1, 2, 3]) == [-2.0, -3.0]
    async with ScriptedEngine("Yes", scores=lambda ids: [-1.0]) as engine:
        with pytest.raises(RequestRejected, match=r"ScriptedEngine\(scores=\) returned 1 values for 3 ids"):
            await engine.score([1, 2, 3])


# --- engines around engines


async def test_a_forced_engine_scores_given_ids_and_not_its_script() -> None:
    async with ScriptedEngine("Yes", scores=lambda ids: [-float(each) for each in ids[1:]]) as inner:
        assert await force(inner, [[7, 8]]).score([1, 2, 3], start=2) == [-3.0]


@pytest.mark.asyncio_alone
async def test_an_engine_in_another_process_scores_as_it_does_at_home() -> None:
    engine = ScriptedEngine("Yes", scores=lambda ids: [-float(each) for each in ids[1:]])
    async with HostedHere(engine) as hosted:
        assert await hosted.score([1, 2, 3], start=2) == [-3.0]
        as_sampled = await hosted.score([1, 2, 3], sampling=Sampling(temperature=0.5))
        assert len(as_sampled) == 2
        with pytest.raises(BadOption, match="the id -1 does not exist"):
            await hosted.score([1, -1])


# --- servers


@pytest.mark.asyncio_alone
@pytest.mark.parametrize("dialect", list(ServerDialect))
async def test_a_server_scores_in_every_dialect(dialect: ServerDialect, tmp_path: Path) -> None:
    folder = byte_model(tmp_path / "model")
    scripted = ScriptedEngine("Yes", scores=lambda ids: [-each / 8 for each in ids[1:]])
    async with (
        serving(scripted, dialect=dialect) as server,
        RemoteEngine(server.url, folder, dialect=dialect) as engine,
    ):
        assert await engine.score([65, 66, 72], start=2) == [-9.0]
        with pytest.raises(BadControl, match="a server scores only at temperature 1"):
            await engine.score([65, 66], sampling=Sampling(temperature=0.5))
        assert engine.stats().open == 0
