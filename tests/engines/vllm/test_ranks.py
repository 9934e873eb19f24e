"""Two data-parallel ranks in one engine: an episode stays on its rank, and a trainer's calls reach both ranks.

The tests use an engine of their own with a small model in float32, in which both ranks sample the same ids for the same
prompt.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from runner import Concurrency, Conversation, Run, Sampling, WeightProof
from runner.engines.base import DeltaStream, Finish, GenerationRequest, Session
from runner.engines.state import PauseMode
from runner.engines.vllm.engine import VllmEngine
from runner.engines.vllm.parallel import BINDING, call_all_workers
from runner.engines.wrapped_engine import WrappedEngine
from runner.errors import EngineDead
from runner.testing import FORCING
from runner.tokens.log import VersionSpan
from tests.engines.even_model import even_model
from tests.engines.lora import adapter_config, adapter_tensors
from tests.playing import Plain, tasks

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.apart, pytest.mark.sample_units("unusual engines", 7)]

WATCHDOG_SECONDS = 1200.0
RANKS = (0, 1)
PLACE_COUNT = 2  # per rank
BLOCK_TOKENS = 32
EPISODES, TURNS = 9, 4
PROMPT = list(range(1000, 1100))

_names = itertools.count()


@pytest.fixture(scope="module")
def model(demo_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return even_model(tmp_path_factory.mktemp("even-model"), demo_model_folder)


@pytest.fixture(scope="module")
async def engine(model: Path, anyio_backend: str) -> AsyncIterator[VllmEngine]:
    with pytest.MonkeyPatch.context() as patch:
        if cores := os.environ.get(BINDING):  # the cores of one worker, as `make test` sets them for its processes
            patch.setenv(BINDING, f"{cores}|{cores}")
        engine = VllmEngine(
            model,
            data_parallel_size=len(RANKS),
            dtype="float32",
            max_num_seqs=PLACE_COUNT,
            max_model_len=1024,
            enable_lora=True,
            max_lora_rank=8,
            worker_extension_cls="tests.engines.stale_worker.OwnWorker",
            **FORCING,
        )
        await engine.__aenter__()
    try:
        yield engine
    finally:
        await engine.__aexit__(None, None, None)


@pytest.fixture(scope="module")
def weights(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(model / "model.safetensors"))


class Talkative(Plain):
    """Environment that generates several turns, and is asked more after each."""

    def tasks(self) -> list[Any]:
        return tasks(EPISODES)

    async def rollout(self, conversation: Conversation) -> None:
        judge = self.episode.conversation("judge", prompt=f"You judge {self.task.id}.")
        for turn in range(TURNS):
            await conversation.generate(sampling=Sampling(max_tokens=10 + 5 * turn, stop_ids=()))
            conversation.add(f"And what of {turn} and {self.task.id}, by the way?")
        await judge.generate(sampling=Sampling(max_tokens=4))


class Watched(WrappedEngine):
    """Engine that records every request, and the rank to which vLLM sends it."""

    inner: VllmEngine

    def __init__(self, inner: VllmEngine, patch: pytest.MonkeyPatch) -> None:
        super().__init__(inner)
        self.asked: list[tuple[GenerationRequest, DeltaStream]] = []
        self.sent: dict[str, int] = {}
        self.inside: list[tuple[int, ...]] = []
        client = inner.vllm.llm.engine_core
        choose = client.get_core_engine_for_request

        def watch(request: Any) -> bytes:
            chosen: bytes = choose(request)
            self.sent[request.external_req_id.rpartition("#")[0]] = int.from_bytes(chosen, "little")
            self.inside.append(inner.stats().ranks)
            return chosen

        patch.setattr(client, "get_core_engine_for_request", watch)

    def stream(self, request: GenerationRequest) -> DeltaStream:
        # The prompt belongs to the caller, and grows.
        self.asked.append((dataclasses.replace(request, prompt=list(request.prompt)), self.inner.stream(request)))
        return self.asked[-1][1]


async def test_episodes_stay_on_ranks_and_counts_add_up(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, before = Watched(engine, monkeypatch), engine.stats()
    with anyio.fail_after(WATCHDOG_SECONDS):
        async with Run(Talkative, watched, concurrency=Concurrency(episodes=EPISODES)) as run:
            played = [trajectory async for trajectory in run]
        await engine.idle()
    assert not run.summary.failed, run.summary.faults
    assert [len(trajectory.turns) for trajectory in played] == [TURNS] * EPISODES

    def ranks_of(task: str) -> set[int]:
        return {rank for name, rank in watched.sent.items() if name.startswith(f"{task}#")}

    of_episodes = [ranks_of(trajectory.task.id) for trajectory in played]
    assert [len(ranks) for ranks in of_episodes] == [1] * EPISODES
    assert set().union(*of_episodes) == set(RANKS)
    assert len(watched.sent) == EPISODES * (TURNS + 1)

    assert [max(counts) for counts in zip(*watched.inside, strict=True)] == [PLACE_COUNT, PLACE_COUNT]
    assert engine.places == PLACE_COUNT * len(RANKS)

    # Everything that was computed of an episode is still cached at its next turn, in whole blocks.
    by_session: dict[int, list[tuple[GenerationRequest, Finish]]] = {}
    for request, stream in watched.asked:
        assert stream.finish is not None
        by_session.setdefault(id(request.session), []).append((request, stream.finish))
    for turns in by_session.values():
        for (earlier, ended), (_, later) in itertools.pairwise(turns):
            computed = len(earlier.prompt) + ended.versions[-1].end - 1
            assert later.cached_tokens == computed // BLOCK_TOKENS * BLOCK_TOKENS

    after = engine.stats()
    cached = sum(stream.finish.cached_tokens or 0 for _, stream in watched.asked if stream.finish is not None)
    assert after.prefix_hits - before.prefix_hits == cached
    assert after.prefix_queries - before.prefix_queries == sum(len(request.prompt) for request, _ in watched.asked)
    assert after.sampled_tokens - before.sampled_tokens == sum(
        stream.finish.versions[-1].end for _, stream in watched.asked if stream.finish is not None
    )
    assert (after.open, after.waiting, after.live_sessions, after.ranks) == (0, 0, 0, (0, 0))


# --- a trainer's calls reach both ranks


def on(engine: VllmEngine, rank: int) -> Session:
    session = engine.session()
    session.affinity.rank = rank
    return session


async def say(engine: VllmEngine, rank: int, **fields: Any) -> tuple[list[int], Finish]:
    """Return the output of a rank for the same prompt, greedy by default."""
    extra, seed = fields.pop("extra", {}), fields.pop("seed", None)
    sampling = dataclasses.replace(Sampling.defaults(), **{"max_tokens": 8, "temperature": 0.0, **fields})
    name, session = f"rank {rank}, {next(_names)}", on(engine, rank)
    asked = GenerationRequest(name=name, prompt=PROMPT, sampling=sampling, seed=seed, extra=extra, session=session)
    async with engine.stream(asked) as stream:
        ids = [token_id async for delta in stream for token_id in delta.token_ids]
    engine.close_session(session)
    assert stream.finish is not None
    return ids, stream.finish


async def said_by_both(engine: VllmEngine, **fields: Any) -> list[int]:
    said = [(await say(engine, rank, **fields))[0] for rank in RANKS]
    assert said[0] == said[1]
    return said[0]


async def ask_ranks(engine: VllmEngine, question: str) -> list[Any]:
    answers: list[Any] = await engine.vllm.llm.engine_core.call_utility_all_async(question)
    return answers


async def test_new_weights_are_loaded_and_stamped_on_both_ranks(engine: VllmEngine, weights: Mapping[str, Any]) -> None:
    old = await said_by_both(engine)
    others = {name: tensor.roll(1, 0) if name == "lm_head.weight" else tensor for name, tensor in weights.items()}
    version = (await engine.update_weights(others)).version
    new = [await say(engine, rank) for rank in RANKS]
    assert [said[0] for said, _ in new] == [old[0] + 1] * 2
    assert [finish.versions for _, finish in new] == [(VersionSpan(version, 0, 8),)] * 2
    assert [finish.cached_tokens for _, finish in new] == [0, 0], "the cache has no prompt of the old weights"
    await engine.update_weights(dict(weights))
    assert await said_by_both(engine) == old


async def test_rank_that_keeps_its_old_weights_is_named(
    engine: VllmEngine, weights: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def proof() -> WeightProof:
        return WeightProof(PROMPT, await engine.score(PROMPT))

    others = {name: tensor.roll(1, 0) if name == "lm_head.weight" else tensor for name, tensor in weights.items()}
    first = await proof()
    await engine.update_weights(others)
    second = await proof()
    await engine.update_weights(dict(weights), proof=first)
    await call_all_workers(engine.vllm.llm, "keep_old_weights", number=1)
    with monkeypatch.context() as patch:
        patch.setattr(engine.vllm, "ended_by", EngineDead)  # later tests use this engine
        with pytest.raises(
            EngineDead, match=r"of its data-parallel rank 1 does not hold.*are those of the old weights"
        ):
            await engine.update_weights(others, proof=second)
    held = await engine.update_weights(dict(weights), proof=first)
    assert held.proof is not None


async def test_cached_prompts_are_forgotten_by_both_ranks(engine: VllmEngine) -> None:
    await said_by_both(engine)
    assert [(await say(engine, rank))[1].cached_tokens for rank in RANKS] == [
        len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS
    ] * 2
    await engine.reset_prefix_cache()
    assert [(await say(engine, rank))[1].cached_tokens for rank in RANKS] == [0, 0]


async def test_an_adapter_is_on_both_ranks(engine: VllmEngine, weights: Mapping[str, Any]) -> None:
    plain = await said_by_both(engine)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    await engine.add_adapter("poet", adapter_tensors(shapes, seed=1, size=0.5), config=adapter_config())
    assert await said_by_both(engine, adapter="poet") != plain
    assert await said_by_both(engine) == plain
    await engine.remove_adapter("poet")
    assert await ask_ranks(engine, "list_loras") == [[], []]


async def test_seed_and_forced_ids_sample_equal_ids_on_both_ranks(engine: VllmEngine) -> None:
    seeded = await said_by_both(engine, temperature=1.0, seed=7)
    assert seeded != await said_by_both(engine, temperature=1.0, seed=8)
    assert await said_by_both(engine, extra={"force": [11, 12, 13]}, max_tokens=3) == [11, 12, 13]


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_pause_holds_both_ranks_and_resume_releases_both(engine: VllmEngine, mode: PauseMode) -> None:
    said: list[list[int]] = []

    async def speak(rank: int) -> None:
        said.append((await say(engine, rank, max_tokens=60))[0])

    with anyio.fail_after(WATCHDOG_SECONDS):
        async with anyio.create_task_group() as speakers:
            for rank in RANKS:
                speakers.start_soon(speak, rank)
            while engine.stats().running < len(RANKS):  # noqa: ASYNC110  # the schedulers set no event
                await anyio.sleep(0.01)
            await engine.pause(mode)
            assert await ask_ranks(engine, "is_scheduler_paused") == [True, True]
            await engine.resume()
        assert await ask_ranks(engine, "is_scheduler_paused") == [False, False]
    if mode is not PauseMode.ABORT:
        assert said == [await said_by_both(engine, max_tokens=60)] * 2


async def test_both_ranks_sleep_and_wake(engine: VllmEngine) -> None:
    before = await said_by_both(engine)
    await engine.sleep(1)
    assert await ask_ranks(engine, "is_scheduler_paused") == [True, True]
    await engine.wake()
    assert await ask_ranks(engine, "is_scheduler_paused") == [False, False]
    assert await said_by_both(engine) == before


async def test_parallel_sizes_and_workers_of_both_ranks_are_named(engine: VllmEngine) -> None:
    described = engine.describe()
    assert (described["parallel"], described["places"]) == ({"data": 2, "tensor": 1, "pipeline": 1}, engine.places)
    assert described["kv_room"] == engine.vllm.llm.vllm_config.cache_config.num_gpu_blocks * BLOCK_TOKENS
    assert await engine.devices() == ["cpu", "cpu"]
    assert len(engine.processes()) == 2


# --- the end of the engine, for the last test


async def test_dead_rank_is_named_and_ends_every_request(engine: VllmEngine) -> None:
    deaths: list[str] = []
    processes = [psutil.Process(pid) for pid in engine.processes()]
    workers = [worker for process in processes for worker in process.children(recursive=True)]
    folder = engine.vllm.process.folder
    assert folder is not None
    assert list(folder.path.iterdir()), "the folder has the engine's sockets"

    async def speak(rank: int) -> None:
        try:
            said, finish = await say(engine, rank, max_tokens=900)
        except EngineDead as death:
            deaths.append(str(death))
        else:
            deaths.append(f"none on rank {rank}, which ended by {finish} after {len(said)} ids")

    with anyio.fail_after(WATCHDOG_SECONDS):
        async with anyio.create_task_group() as speakers:
            for rank in RANKS:
                speakers.start_soon(speak, rank)
            while engine.stats().running < len(RANKS):  # noqa: ASYNC110  # the schedulers set no event
                await anyio.sleep(0.01)
            os.kill(engine.processes()[1], signal.SIGKILL)
    named = "The engine died: the process of its data-parallel rank 1 was ended by SIGKILL"
    assert deaths == [named] * 2
    await engine.__aexit__(None, None, None)
    _, alive = psutil.wait_procs([*processes, *workers], timeout=WATCHDOG_SECONDS)
    assert alive == []
    assert not folder.path.exists()
