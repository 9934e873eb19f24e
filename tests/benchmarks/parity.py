"""The same token-level requests through `Run` and directly through `AsyncLLM`, in turn, on one engine."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import anyio

from runner import Concurrency, Conversation, Environment, Run, Sampling, Task, reward
from runner.cli.quiet_output import quiet_output
from runner.engines.vllm.engine import VllmEngine
from runner.runs.event_loop import collector_settings, on_event_loop
from tests.benchmarks.figures import Figure, main

EPISODE_COUNT = 16
TURN_COUNT = 4
TURN_TOKENS = 16
ROUND_COUNT = 8
WORDS = "one two three four five six seven eight nine ten " * 30
ANSWER = "Continue, and say what comes next. " * 2


class Work(NamedTuple):
    """Work of both ways in a round, and the number of rounds."""

    episodes: int
    turns: int
    tokens: int
    rounds: int


class Chatter(Environment):
    """Environment with turns of a fixed length, so that both ways do the same work."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.sampling = Sampling(max_tokens=work.tokens, temperature=0)

    def tasks(self) -> Iterator[Task]:
        for number in range(self.work.episodes):
            yield Task(id=str(number), prompt=f"Episode {number}. " + WORDS)

    async def rollout(self, conversation: Conversation) -> None:
        for turn in range(self.work.turns):
            if turn:
                conversation.add(ANSWER)
            await conversation.generate()

    @reward
    async def length(self) -> float:
        return len(self.episode.turns)


Requests = list[list[tuple[list[int], tuple[int, ...], int | None]]]
"""For each turn of each episode: the ids of the prompt, the ids that end the turn, the seed."""


def measure() -> Iterator[Figure]:
    """Sampled ids a second through `Run` and directly through `AsyncLLM`, in turn, for the same requests."""
    with TemporaryDirectory() as folder, quiet_output(Path(folder) / "vllm.log"):
        ours, raw = on_event_loop(_on_an_engine)
    yield from figures(ours, raw)


def figures(ours: tuple[float, ...], raw: tuple[float, ...]) -> Iterator[Figure]:
    """Figures from the ids a second of both ways, by round."""
    ratios = tuple(one / other for one, other in zip(ours, raw, strict=True))
    name = f"{EPISODE_COUNT} episodes of {TURN_COUNT} turns of {TURN_TOKENS} ids"
    yield Figure(f"{name}, through Run", "ids/s", ours)
    yield Figure(f"{name}, straight through AsyncLLM", "ids/s", raw)
    yield Figure("  Run / AsyncLLM, round by round", "", ratios, at_least=0.97)


async def _on_an_engine() -> tuple[tuple[float, ...], tuple[float, ...]]:
    async with VllmEngine("smollm2-135m", max_num_seqs=EPISODE_COUNT, max_model_len=2048) as engine:
        return await rounds(engine)


async def rounds(engine: VllmEngine, work: Work | None = None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Ids a second through `Run` and directly through `AsyncLLM`, for each round."""
    work = work or Work(EPISODE_COUNT, TURN_COUNT, TURN_TOKENS, ROUND_COUNT)
    ours: list[float] = []
    raw: list[float] = []
    _, requests = await _through_run(engine, work)  # also warms the engine up
    await _straight(engine, work, requests)
    for number in range(work.rounds):
        # The order alternates, since rising load on the machine would favour the way that is always first.
        for own in (True, False) if number % 2 else (False, True):
            await engine.vllm.llm.reset_prefix_cache()
            if own:
                ours.append((await _through_run(engine, work))[0])
            else:
                raw.append(await _straight(engine, work, requests))
    return tuple(ours), tuple(raw)


async def _through_run(engine: VllmEngine, work: Work) -> tuple[float, Requests]:
    requests: Requests = []
    sampled = 0
    with TemporaryDirectory() as folder:
        concurrency = Concurrency(episodes=work.episodes)
        run = Run(Chatter(work), engine, file=Path(folder) / "run.db", concurrency=concurrency)
        async with run:
            with collector_settings():
                began = time.perf_counter()
                async for trajectory in run:
                    sampled += trajectory.sampled
                    requests.append([(t.prompt_ids.tolist(), engine.stop_ids, t.seed) for t in trajectory.turns])
                return sampled / (time.perf_counter() - began), requests


async def _straight(engine: VllmEngine, work: Work, requests: Requests) -> float:
    sampled: list[int] = []

    async def episode(number: int) -> None:
        for turn, (prompt, stop_ids, seed) in enumerate(requests[number]):
            name = f"raw-{number}-{turn}-{time.monotonic_ns()}"
            ids = _generate(engine, name, prompt, stop_ids, seed, work.tokens)
            sampled.extend([count async for count in ids])

    with collector_settings():
        began = time.perf_counter()
        async with anyio.create_task_group() as episodes:
            for number in range(len(requests)):
                episodes.start_soon(episode, number)
        return sum(sampled) / (time.perf_counter() - began)


async def _generate(
    engine: VllmEngine, name: str, prompt: list[int], stop_ids: tuple[int, ...], seed: int | None, tokens: int
) -> AsyncIterator[int]:
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    parameters = SamplingParams(
        max_tokens=tokens,
        temperature=0,
        seed=seed,
        stop_token_ids=list(stop_ids),
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=8,
    )
    llm: Any = engine.vllm.llm
    async for output in llm.generate(tokens_input(prompt), parameters, name):
        yield len(output.outputs[0].token_ids)


if __name__ == "__main__":
    main(measure)
