"""Cost of an id at 1,000 streams, from vLLM's wire format to the token log, on one core.

All of vLLM's code for this process runs here: the decoder of its messages, `AsyncLLM`'s own output loop, its output
processor and its collectors. Our code follows. Only the engine core is missing: a stand-in repeats one encoded step.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np

from runner.engines.base import GenerationRequest
from runner.engines.gate import AdmissionGate
from runner.engines.vllm.engine import VllmEngine
from runner.engines.vllm.runtime import VllmRuntime
from runner.engines.vllm.settings import RequestConverter
from runner.engines.vllm.start import VllmProcess
from runner.engines.vllm.weight_loading import VllmWeights
from runner.episode.sample import SampledTurn, sample
from runner.models import ResolvedModel
from runner.options import Sampling
from runner.runs.event_loop import collector_settings, on_event_loop
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.log import Source, TokenLog
from tests.benchmarks.figures import Figure, main, on_one_core

STREAM_COUNT = 1000
STEP_COUNT = 100
PROMPT = list(range(256))
TOKENIZER = ByteTokenizer()
ROUND_COUNT = 3


def measure() -> Iterator[Figure]:
    """Cost of an id at 1,000 streams through AsyncLLM's own output path."""
    on_one_core()
    kinds = {
        "an id at 1,000 streams, each a delta": (_stream, 1, True),
        "  of that vLLM's part: read and thrown away": (_throw_away, 1, True),
        "  eight ids a delta, our default": (_stream, 8, True),
        "  each a delta, Python's own collector settings": (_stream, 1, False),
    }
    rounds = [{name: on_event_loop(_microseconds, *kind) for name, kind in kinds.items()} for _ in range(ROUND_COUNT)]
    for number, name in enumerate(kinds):
        yield Figure(name, "us", tuple(results[name] for results in rounds), under=None if number else 25)


class Core:
    """Stand-in for an engine core that samples one id for every stream in every step."""

    def __init__(self) -> None:
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder

        self.answered = 0
        self.began = self.worked = 0.0
        self._decode = MsgpackDecoder(EngineCoreOutputs).decode
        self._step, self._last = _encoded_step(finished=False), _encoded_step(finished=True)

    async def get_output_async(self) -> Any:
        # vLLM's socket reader also yields here: other tasks of the loop run between two steps.
        await asyncio.sleep(0)
        if self.answered == STEP_COUNT:
            await asyncio.Event().wait()
        self.answered += 1
        if self.answered == 2:  # the first step still starts tasks
            self.began = time.thread_time()
        return self._decode(self._last if self.answered == STEP_COUNT else self._step)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        raise AssertionError(f"nothing is aborted here: {request_ids}")


def _encoded_step(*, finished: bool) -> Any:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackEncoder

    logprobs = LogprobsLists(
        logprob_token_ids=np.array([[65]], dtype=np.int32),
        logprobs=np.array([[-0.25]], dtype=np.float32),
        sampled_token_ranks=np.array([1], dtype=np.int32),
    )
    reason = FinishReason.LENGTH if finished else None
    outputs = [
        EngineCoreOutput(f"{number}", [65], new_logprobs=logprobs, finish_reason=reason)
        for number in range(STREAM_COUNT)
    ]
    return [bytes(buffer) for buffer in MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs, timestamp=1.0))]


class Frontend:
    """The part of `AsyncLLM` that our engine calls, with its real output loop and processor."""

    errored = False

    def __init__(self, core: Core) -> None:
        from vllm.v1.engine.output_processor import OutputProcessor

        self.engine_core = core
        self.output_processor = OutputProcessor(None, log_stats=False)
        self.log_stats = False
        self.logger_manager = None
        self.output_handler: asyncio.Task[None] | None = None
        self.renderer = SimpleNamespace(mm_processor_cache=None)

    def read(self) -> None:
        """Start `AsyncLLM`'s own output loop, with the attributes that it reads."""
        from vllm.v1.engine.async_llm import AsyncLLM

        AsyncLLM._run_output_handler(self)

    async def add_request(self, name: str, prompt: Any, parameters: Any, *, lora_request: Any) -> Any:
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.output_processor import RequestOutputCollector

        request = EngineCoreRequest(
            request_id=name.partition("/")[0],
            prompt_token_ids=prompt["prompt_token_ids"],
            mm_features=None,
            sampling_params=parameters,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=lora_request,
            cache_salt=None,
            data_parallel_rank=None,
            external_req_id=name,
        )
        collector = RequestOutputCollector(parameters.output_kind, request.request_id)
        self.output_processor.add_request(request, None, None, 0, collector)
        return collector


def _engine(frontend: Frontend, stream_interval: int) -> VllmEngine:
    """An engine of ours that is not started, since it has no core."""
    engine = VllmEngine("smollm2-135m", stream_interval=stream_interval)
    engine.runtime = VllmRuntime(
        VllmProcess(ResolvedModel("none", "", Path()), {}),
        frontend,
        VllmWeights(frontend, "none"),
        gate=AdmissionGate(STREAM_COUNT, 16_000_000, block=16),
        context=4096,
        as_vllm=RequestConverter(stream_interval, ByteTokenizer().encode),
        version="0",
    )
    engine.running = True
    return engine


Reader = Callable[[VllmEngine, GenerationRequest, TokenLog], Coroutine[Any, Any, None]]


async def _microseconds(read: Reader, stream_interval: int, tuned: bool) -> float:
    core = Core()
    frontend = Frontend(core)
    engine = _engine(frontend, stream_interval)
    logs = [TokenLog() for _ in range(STREAM_COUNT)]
    with collector_settings() if tuned else nullcontext():
        async with anyio.create_task_group() as streams:
            for number, log in enumerate(logs):
                streams.start_soon(read, engine, _request(number), log)
            while len(frontend.output_processor.request_states) < STREAM_COUNT:
                await anyio.lowlevel.checkpoint()
            frontend.read()
        cost = time.thread_time() - core.began
    assert frontend.output_handler is not None
    frontend.output_handler.cancel()
    gc.collect()
    assert all(sum(log.mask()) == STEP_COUNT for log in logs) or read is _throw_away
    return cost / STREAM_COUNT / (STEP_COUNT - 1) * 1e6


def _request(number: int) -> GenerationRequest:
    return GenerationRequest(
        name=f"{number}/main/0",
        prompt=PROMPT,
        sampling=Sampling(max_tokens=STEP_COUNT).over(Sampling.defaults()),
        stop_ids=(2,),
        seed=number,
    )


async def _stream(engine: VllmEngine, request: GenerationRequest, log: TokenLog) -> None:
    await sample(
        SampledTurn(log),
        engine,
        request,
        new_ids=PROMPT,
        source=Source.PROMPT,
        tokenizer=TOKENIZER,
        stall_seconds=120,
    )


async def _throw_away(engine: VllmEngine, request: GenerationRequest, log: TokenLog) -> None:
    collector = await engine.vllm.send(request)
    while not (collector.get_nowait() or await collector.get()).finished:
        pass


if __name__ == "__main__":
    main(measure)
