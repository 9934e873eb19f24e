"""An engine over an `AsyncLLM` of another program: the same turns, and refusals of calls that would change it."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest

from runner import BadControl, BadOption, Conversation, EngineDead, Environment, Run, Sampling, Task, Trajectory, reward
from runner.engines.base import Delta, Engine, FinishReason, GenerationRequest
from runner.engines.vllm.engine import VllmEngine
from runner.options import Constraint, ConstraintKind
from runner.testing import FORCING, assert_exact, force
from runner.testing.engine_pool import PooledEngine
from runner.testing.engine_under_test import drain, ids_of, logprobs_of
from runner.training import GrammarMasks
from tests.engines.function.functions import engine_over

PROMPT = list(range(1000, 1040))
RUN_SEED = 11


def asked(name: str = "episode/main/0", *, max_tokens: int = 24, **sampling: Any) -> GenerationRequest:
    settings = replace(Sampling.defaults(), max_tokens=max_tokens, **sampling)
    return GenerationRequest(name=name, prompt=PROMPT, sampling=settings, seed=RUN_SEED, acts_on_deltas=True)


class Question(Environment):
    """Environment with two turns of a few ids each."""

    def tasks(self) -> list[Task]:
        return [Task(id=str(number), prompt=f"What is {number} + 25?") for number in range(3)]

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()
        conversation.add("And one more?")
        await conversation.generate()

    @reward
    def any_answer(self) -> bool:
        return True


async def play(engine: Engine, **sampling: Any) -> list[Trajectory]:
    """Play one episode after the other, so that two engines compute the same batches."""
    from runner import Concurrency

    settings = Sampling(max_tokens=12, **sampling)
    one = Concurrency(episodes=1)
    async with Run(Question, engine, seed=RUN_SEED, sampling=settings, concurrency=one) as run:
        return [trajectory async for trajectory in run]


def samples_of(trajectories: list[Trajectory]) -> list[Any]:
    """Return sampled ids, bit for bit, with their log-probabilities and weight versions."""
    return [
        (each.outcome, [(s.log.ids, s.log.sources, s.log.logprobs.tobytes(), s.log.versions) for s in each.segments])
        for each in trajectories
    ]


# --- on the engine that other tests share


@pytest.mark.engine("float32_engine")
@pytest.mark.parametrize("kind", ["over", "function"])
def test_seeded_trajectories_equal_those_of_an_owned_engine(float32_engine: PooledEngine, kind: str) -> None:
    owner: Any = float32_engine.inner

    async def main() -> None:
        await owner.reset_prefix_cache()
        expected = await play(owner)
        await owner.reset_prefix_cache()
        if kind == "over":
            other: Engine = VllmEngine.over(owner.vllm.llm, template=owner.template)
        else:
            other = function_over(owner)
        async with other:
            played = await play(other)
        assert samples_of(played) == samples_of(expected)
        assert [len(each.turns) for each in played] == [2, 2, 2]
        for trajectory in played:
            assert_exact(trajectory, other)

    float32_engine.home.call(main)


def function_over(owner: VllmEngine) -> Engine:
    """Return a token engine whose function calls `AsyncLLM.generate`, as a trainer with an `AsyncLLM` would."""
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    from runner import TokenOutput, TokenSampling

    llm = owner.vllm.llm

    async def generate(prompt: list[int], sampling: TokenSampling, *, session: str) -> AsyncIterator[TokenOutput]:
        arguments = {**sampling.vllm_arguments(), "detokenize": False}
        params = SamplingParams(**arguments, output_kind=RequestOutputKind.DELTA)
        name = sampling.request.name
        async for output in llm.generate(TokensPrompt(prompt_token_ids=prompt), params, f"{name}-{session}"):
            (said,) = output.outputs
            ids = list(said.token_ids)
            logprobs = [each[token_id].logprob for each, token_id in zip(said.logprobs, ids, strict=True)]
            yield TokenOutput(ids, logprobs, said.finish_reason, owner.weight_version)

    return engine_over(owner, function=generate)


@pytest.mark.engine("float32_engine")
def test_owner_requests_continue_after_ours_end(float32_engine: PooledEngine) -> None:
    owner: Any = float32_engine.inner

    async def main() -> None:
        read: list[Delta] = []
        alone = [delta async for delta in _read(owner, asked(max_tokens=64))]
        async with owner.stream(asked(max_tokens=64)) as theirs:
            async with VllmEngine.over(owner.vllm.llm, template=owner.template) as ours:
                # The requests have the same name: ending ours must not end theirs.
                async with ours.stream(asked(max_tokens=900)) as stream:
                    await drain(stream, [], 3)
                assert stream.finish is not None
                assert stream.finish.reason is FinishReason.ABORT
                left = ours.stream(asked(max_tokens=900))
                await left.__aenter__()
            with pytest.raises(EngineDead, match="was stopped"):
                await drain(left, [])
            await left.__aexit__(None, None, None)
            await drain(theirs, read)
        assert ids_of(read) == ids_of(alone)
        assert owner.is_alive()
        with pytest.raises(EngineDead, match="not running"):
            await ours.health()

    float32_engine.home.call(main)


async def _read(engine: Engine, request: GenerationRequest) -> AsyncIterator[Delta]:
    async with engine.stream(request) as stream:
        async for delta in stream:
            yield delta


@pytest.mark.whole
@pytest.mark.engine("float32_engine")
def test_two_engines_over_one_llm_are_independent(float32_engine: PooledEngine) -> None:
    owner: Any = float32_engine.inner

    async def main() -> None:
        llm = owner.vllm.llm
        async with (
            VllmEngine.over(llm, template=owner.template, places=1) as first,
            VllmEngine.over(llm, template=owner.template, places=1) as second,
        ):
            greedy = asked(max_tokens=48, temperature=0.0)
            expected = ids_of([delta async for delta in _read(owner, greedy)])
            read: list[Delta] = []
            async with second.stream(greedy) as stream:
                await drain(stream, read, 3)
                async with first.stream(greedy) as other:  # with the same name
                    await drain(other, [], 3)
                await first.pause("abort")
                await drain(stream, read)
                assert second.stats().open == 0
            assert ids_of(read) == expected
            await first.resume()
            assert ids_of([delta async for delta in _read(first, greedy)]) == expected

    float32_engine.home.call(main)


# --- on an engine that another program started


@pytest.fixture(scope="module")
async def owners_llm(small_model_folder: Path, anyio_backend: str) -> AsyncIterator[Any]:
    """An `AsyncLLM` as a trainer creates it, without any of our code."""

    def make() -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(small_model_folder),
                dtype="float32",
                enforce_eager=True,
                max_model_len=1024,
                max_num_batched_tokens=1024,
                max_num_seqs=4,
                enable_chunked_prefill=False,  # on a CPU, a seeded turn in pieces would end the engine
                disable_log_stats=True,
            )
        )

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of vLLM
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        patch.setenv("LD_PRELOAD", "")  # vLLM adds to it for all processes that start later
        llm = await anyio.to_thread.run_sync(make)
    yield llm
    llm.shutdown()


@pytest.mark.anyio
@pytest.mark.engine
@pytest.mark.apart
@pytest.mark.sample_units("unusual engines", 7, unit="of an external owner")
async def test_seed_samples_equal_ids_as_the_owners_generate(owners_llm: Any) -> None:
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=24, seed=RUN_SEED, ignore_eos=True, logprobs=0, temperature=1.0)
    said = owners_llm.generate(TokensPrompt(prompt_token_ids=PROMPT), params, "the owner's")
    theirs = [output async for output in said][-1].outputs[0]
    await owners_llm.reset_prefix_cache()
    async with VllmEngine.over(owners_llm, template="pythonic") as engine:
        deltas = [delta async for delta in _read(engine, asked())]
        assert ids_of(deltas) == list(theirs.token_ids)
        given = [row[token_id].logprob for row, token_id in zip(theirs.logprobs, theirs.token_ids, strict=True)]
        assert logprobs_of(deltas) == pytest.approx(given, abs=1e-6)
        assert engine.describe()["started_by"] == "its owner"
        # vLLM returns raw log-probabilities by default. At another temperature they are not the log-probabilities of
        # sampling.
        cooler = [delta async for delta in _read(engine, asked(temperature=0.5))]
        assert {delta.logprobs for delta in cooler} == {None}


@pytest.mark.whole
@pytest.mark.anyio
@pytest.mark.engine
@pytest.mark.apart
@pytest.mark.sample_units("unusual engines", 7, unit="of an external owner")
async def test_run_leaves_the_llm_running_and_is_repeatable(owners_llm: Any) -> None:
    async with VllmEngine.over(owners_llm, template="pythonic") as engine:
        first = await play(engine)
    await owners_llm.reset_prefix_cache()
    async with VllmEngine.over(owners_llm, template="pythonic") as engine:
        second = await play(engine)
    assert [samples_of([each])[0][1][0][0] for each in second] == [samples_of([each])[0][1][0][0] for each in first]
    assert [len(each.turns) for each in first] == [2, 2, 2]
    assert not owners_llm.errored
    await owners_llm.check_health()


CANNOT: dict[str, Callable[[VllmEngine], Awaitable[object]]] = {
    "update_weights": lambda engine: engine.update_weights("a folder"),
    "add_adapter": lambda engine: engine.add_adapter("poet", "a folder"),
    "remove_adapter": lambda engine: engine.remove_adapter("poet"),
    "reset_prefix_cache": lambda engine: engine.reset_prefix_cache(),
    "sleep": lambda engine: engine.sleep(),
    "profile": lambda engine: engine.start_profile(),
    "keep": lambda engine: engine.pause("keep"),
    "devices": lambda engine: engine.devices(),
}


@pytest.mark.anyio
@pytest.mark.engine
@pytest.mark.apart
@pytest.mark.sample_units("unusual engines", 7, unit="of an external owner")
async def test_controls_that_belong_to_the_owner_are_refused(owners_llm: Any) -> None:
    async with VllmEngine.over(owners_llm, template="pythonic") as engine:
        for control in CANNOT.values():
            with pytest.raises(BadControl, match=r"this AsyncLLM belongs to another program|for its owner too"):
                await control(engine)
        assert len(ids_of([delta async for delta in _read(engine, asked())])) == 24


@pytest.mark.whole
@pytest.mark.anyio
@pytest.mark.engine
@pytest.mark.apart
@pytest.mark.sample_units("unusual engines", 7, unit="of an external owner")
async def test_shutdown_by_the_owner_ends_our_turns_by_name(owners_llm: Any) -> None:
    async with VllmEngine.over(owners_llm, template="pythonic") as engine:
        async with engine.stream(asked(max_tokens=900)) as stream:
            await drain(stream, [], 3)
            owners_llm.shutdown()
            with anyio.fail_after(300), pytest.raises(EngineDead, match="died or was shut down; see its owner's log"):
                await drain(stream, [])
        assert not engine.is_alive()
    with pytest.raises(EngineDead, match="is dead, or was shut down"):
        async with VllmEngine.over(owners_llm, template="pythonic"):
            raise AssertionError


# --- refusals


def test_object_that_is_not_a_vllm_engine_is_refused() -> None:
    with pytest.raises(BadOption, match=r"VllmEngine.over\(SimpleNamespace\): this object has no add_request; give"):
        VllmEngine.over(SimpleNamespace())


def stand_in(
    *,
    mode: str = "processed_logprobs",
    device: str = "cpu",
    pieces: bool = True,
    ids: int = 100,
    processors: Sequence[Any] | None = None,
    backend: str = "auto",
) -> Any:
    """Stand-in for an `AsyncLLM` that has sampled nothing."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="a folder",
            logprobs_mode=mode,
            max_logprobs=5,
            get_vocab_size=lambda: ids,
            logits_processors=processors,
        ),
        structured_outputs_config=SimpleNamespace(backend=backend),
        device_config=SimpleNamespace(device_type=device),
        parallel_config=SimpleNamespace(worker_extension_cls=""),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=pieces),
    )
    return SimpleNamespace(vllm_config=config, errored=False, add_request=None, abort=None, output_handler=None)


@pytest.mark.asyncio_alone
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("llm", "message"),
    [
        (stand_in(mode="raw_logits"), "with logprobs_mode='raw_logits', vLLM returns no log-probabilities"),
        (
            stand_in(),
            "on a CPU, a turn with a seed and a chunked prompt ends vLLM; .* worker_extension_cls",
        ),
    ],
    ids=["logits", "pieces on a CPU"],
)
async def test_unusable_start_is_refused_with_the_argument(llm: Any, message: str, small_model_folder: Path) -> None:
    with pytest.raises(BadOption, match=message):
        async with VllmEngine.over(llm, model=small_model_folder, template="pythonic"):
            raise AssertionError


def test_unsupported_use_is_refused_before_an_episode() -> None:
    engine = VllmEngine.over(stand_in())
    with pytest.raises(BadOption, match=r"returns at most 5; start it with max_logprobs=6"):
        engine.check_sampling(replace(Sampling.defaults(), logprobs=6))
    constraint = Constraint(ConstraintKind.REGEX, "a+")
    with pytest.raises(BadOption, match="masks write past the end of a vocabulary whose size is not a multiple of 32"):
        engine.check_constraint(constraint)
    VllmEngine.over(stand_in(ids=64)).check_constraint(constraint)
    VllmEngine.over(stand_in(device="cuda")).check_constraint(constraint)


class ForcedIds:
    """Stand-in without vLLM for the logits processor, in the form in which an owner may pass it."""

    __module__ = "runner.engines.vllm.worker.forced_ids"


def test_ids_are_forced_only_with_the_owners_processor() -> None:
    with pytest.raises(BadOption, match="no logits processor that forces ids"):
        force(VllmEngine.over(stand_in()), [[1]])
    with pytest.raises(BadOption, match="logprobs_mode='processed_logprobs' a forced id does not have the model's log"):
        force(VllmEngine.over(stand_in(processors=[ForcedIds])), [[1]])
    for processor in (ForcedIds, *FORCING["logits_processors"]):
        assert force(VllmEngine.over(stand_in(processors=[processor], mode="raw_logprobs")), [[1]])


def test_token_masks_are_made_of_xgrammars_alone() -> None:
    engine = VllmEngine.over(stand_in())
    engine.vocabulary = 100
    with pytest.raises(BadOption, match="with backend='auto' the ids that a grammar allowed are unknown"):
        GrammarMasks.of_engine(engine)


def test_places_are_a_whole_number() -> None:
    with pytest.raises(BadOption, match=r"VllmEngine.over\(places=0\)"):
        VllmEngine.over(stand_in(), places=0)
