"""Processor time of this process for each turn over vLLM's `AsyncLLM`, whose engine core is replaced by a script.

The cost of a turn on the event loop limits the number of turns that one process plays, even with a fast model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from envs.calculator import Calculator
from runner import Concurrency, Limits, Run, Sampling, VllmEngine
from runner.cli.quiet_output import quiet_output
from runner.engines.vllm.start import contained_vllm
from runner.models import load_language, resolve_model
from runner.runs.event_loop import collector_settings, on_event_loop
from tests.benchmarks.figures import Figure, main

MODEL = "smollm2-135m"
REPLY = "[add(a=1, b=2)]"
EPISODE_COUNT = 512
TURN_COUNT = 3
WIDTHS = (64, 512)
ROUND_COUNT = 5
STEP_SECONDS = 0.005
"""Seconds of a step of the core, which samples an id for each open request."""


def measure() -> Iterator[Figure]:
    """Milliseconds of this process's processor time per turn with one constrained call, with a run file."""
    with TemporaryDirectory() as folder, quiet_output(Path(folder) / "vllm.log"):
        rounds = on_event_loop(_rounds, Path(folder))
    for width, values in rounds.items():
        yield Figure(f"processor time a turn, {width} wide", "ms", tuple(values))


async def _rounds(folder: Path) -> dict[int, list[float]]:
    model = resolve_model(MODEL)
    tokenizer, _, stop_ids = load_language(model, None)
    reply = [*tokenizer.encode(REPLY), stop_ids[0]]
    figures: dict[int, list[float]] = {width: [] for width in WIDTHS}
    llm = scripted_llm(str(model.folder), reply, max(WIDTHS), STEP_SECONDS)
    try:
        async with VllmEngine.over(llm, model=MODEL, places=max(WIDTHS)) as engine:
            for number in range(ROUND_COUNT + 1):
                for width in WIDTHS:
                    cost = await _play(engine, width, folder / f"{number}-{width}.db")
                    if number:  # the first round loads modules and learns the template
                        figures[width].append(1000 * cost)
    finally:
        llm.shutdown()
    return figures


async def _play(engine: VllmEngine, width: int, file: Path) -> float:
    run = Run(
        Calculator(questions=EPISODE_COUNT),
        engine,
        file=file,
        concurrency=Concurrency(episodes=width),
        sampling=Sampling(temperature=0.0),
        limits=Limits(turns=TURN_COUNT),
    )
    async with run:
        with collector_settings():
            worked, turns = time.process_time(), 0
            async for trajectory in run:
                assert not trajectory.outcome.failed, trajectory.error
                assert all(len(turn.tool_calls) == 1 for turn in trajectory.turns)
                turns += len(trajectory.turns)
            assert turns == EPISODE_COUNT * TURN_COUNT
            return (time.process_time() - worked) / turns


def scripted_llm(folder: str, reply: Sequence[int], width: int, step_seconds: float) -> Any:
    """An `AsyncLLM` whose core answers every request with these ids, one per step."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=folder,
        max_model_len=2048,
        max_num_seqs=width,
        logprobs_mode="processed_logprobs",
        structured_outputs_config={"backend": "xgrammar"},
        worker_extension_cls="runner.engines.vllm.worker.extension.WeightWorker",
        generation_config="vllm",
        disable_log_stats=True,
    )
    core = ScriptedCore(reply, step_seconds)
    with contained_vllm(), patch("vllm.v1.engine.core_client.EngineCoreClient.make_async_mp_client", lambda **_: core):
        return AsyncLLM.from_engine_args(arguments)


class ScriptedCore:
    """The methods of vLLM's core client that a run calls, with steps that take no processor time."""

    engine_ranks_managed = (0,)

    def __init__(self, reply: Sequence[int], step_seconds: float) -> None:
        from vllm.v1.serial_utils import MsgpackEncoder

        self._reply = reply
        self._step_seconds = step_seconds
        self._open: dict[str, Any] = {}
        self._some = asyncio.Event()
        self._encode = MsgpackEncoder().encode
        self.resources = type("Resources", (), {"engine_dead": False, "engine_manager": None})()

    async def add_request_async(self, request: Any) -> None:
        """Open a request. It is encoded as if for another process."""
        self._encode(request)
        count = request.sampling_params.logprobs
        self._open[request.request_id] = iter(self._reply), count
        self._some.set()

    async def get_output_async(self) -> Any:
        """Return the ids of a step."""
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        while not self._open:
            self._some.clear()
            await self._some.wait()
        await asyncio.sleep(self._step_seconds)
        outputs = []
        for name, (left, count) in list(self._open.items()):
            ids = list(islice(left, 1))
            last = ids[-1:] == [self._reply[-1]]
            if last:
                del self._open[name]
            reason = FinishReason.STOP if last else None
            outputs.append(EngineCoreOutput(name, ids, new_logprobs=_logprobs(ids, count or 1), finish_reason=reason))
        return EngineCoreOutputs(outputs=outputs)

    async def abort_requests_async(self, names: Sequence[str]) -> None:
        """Close requests."""
        for name in names:
            self._open.pop(name, None)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def collective_rpc_async(self, *_: Any, **__: Any) -> list[Any]:
        return [None]

    async def reset_prefix_cache_async(self, *_: Any, **__: Any) -> bool:
        return True

    async def get_weight_version_async(self) -> str:
        return "default"

    def dp_engines_running(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing, since nothing runs."""


def _logprobs(ids: Sequence[int], count: int) -> Any:
    import numpy as np
    from vllm.v1.outputs import LogprobsLists

    shape = len(ids), count + 1
    return LogprobsLists(np.full(shape, ids[0]), np.full(shape, -0.5, dtype=np.float32), np.ones(len(ids), dtype=int))


if __name__ == "__main__":
    main(measure)
