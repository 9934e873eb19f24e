"""An `AsyncLLM` that somebody else made and owns: what an engine of ours asks of it, and what is left to its owner."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NoReturn, Protocol

import anyio

from runner.engines.adapters import base_and_adapter
from runner.engines.base import Delta, Finish, GenerationRequest
from runner.engines.raw_logprobs import samples_raw_distribution
from runner.engines.state import PauseMode
from runner.engines.vllm.adapters import VllmAdapters
from runner.engines.vllm.runtime import ABORT_SECONDS, VllmRuntime
from runner.engines.vllm.scheduler_stats import SchedulerStats
from runner.engines.vllm.settings import VllmSettings
from runner.engines.vllm.start import VllmProcess
from runner.engines.vllm.stream import VllmStream
from runner.engines.vllm.weight_loading import VllmWeights
from runner.engines.vllm.worker.bitmask_patch import WORD_BITS
from runner.errors import BadControl, BadOption, EngineDead
from runner.options import Constraint, Sampling

__all__ = [
    "ExternalProcess",
    "ExternalRuntime",
    "ExternalStream",
    "arguments_of",
    "check_constraint",
    "check_llm",
    "check_sampling",
]

_LISTEN_SECONDS = 1.0
"""How soon it is heard that the owner shut it down, of which vLLM tells nobody who waits for an id."""
_LOOK_SECONDS = 0.005
"""How soon the end of our requests is looked for again: no logger of ours tells of steps."""

_EXTENSION = "worker_extension_cls='runner.engines.vllm.worker.extension.WeightWorker'"
_PROBABILITIES = ("processed_logprobs", "raw_logprobs")


class Request(Protocol):
    """What is asked here of the stream of a request besides."""

    @property
    def sent_all(self) -> bool: ...
    @property
    def collector(self) -> Any: ...


def check_llm(llm: Any) -> None:
    """Refuse what is no `AsyncLLM`.

    Raises:
        BadOption: it is none.
    """
    missing = [name for name in ("add_request", "abort", "vllm_config", "errored") if not hasattr(llm, name)]
    if missing:
        raise BadOption(
            f"VllmEngine.over({type(llm).__name__}): it has no {missing[0]}; give a vLLM AsyncLLM, such as "
            "AsyncLLM.from_engine_args(AsyncEngineArgs(...)). Of another engine, make a TokenEngine."
        )


def arguments_of(llm: Any) -> dict[str, Any]:
    """The engine arguments of its owner that others ask an engine for: who forces ids, and who makes token masks."""
    config = llm.vllm_config
    processors = getattr(config.model_config, "logits_processors", None) or ()
    return {
        "logits_processors": [
            each if isinstance(each, str) else f"{each.__module__}:{each.__qualname__}" for each in processors
        ],
        "logprobs_mode": config.model_config.logprobs_mode,
        "structured_outputs_config": config.structured_outputs_config,
    }


def check_sampling(llm: Any, sampling: Sampling) -> None:
    """Refuse what the `AsyncLLM` was not started for.

    Raises:
        BadOption: names the field, and how it is to be started.
    """
    most = llm.vllm_config.model_config.max_logprobs
    if sampling.logprobs and 0 <= most < sampling.logprobs:
        raise BadOption(
            f"Sampling(logprobs={sampling.logprobs}): the AsyncLLM gives at most {most}; its owner starts it with "
            f"max_logprobs={sampling.logprobs}, or leave it out."
        )


def check_constraint(llm: Any, constraint: Constraint) -> None:
    """Refuse a grammar that the `AsyncLLM` would break its memory with.

    Raises:
        BadOption: says how it is to be started.
    """
    config = llm.vllm_config
    if _bare_on_cpu(llm) and config.model_config.get_vocab_size() % WORD_BITS:
        raise BadOption(
            f"a turn under a grammar ({constraint.kind.value}): on a CPU, masks write behind a vocabulary that is no "
            f"multiple of {WORD_BITS}, unless the AsyncLLM is started with {_EXTENSION}."
        )


class ExternalProcess(VllmProcess):
    """What is there of vLLM's processes where somebody else has them: nothing is started, and nothing ended."""

    async def start(self) -> Any:
        """The `AsyncLLM`.

        Raises:
            BadOption: it was started in a way that it cannot be used with.
            EngineDead: it is dead.
        """
        llm, config = self.llm, self.llm.vllm_config
        if llm.errored:
            raise EngineDead("VllmEngine.over(llm): this AsyncLLM is dead, or was shut down")
        handler = getattr(llm, "output_handler", None)
        if handler is not None and handler.get_loop() is not asyncio.get_running_loop():
            raise BadOption(
                "VllmEngine.over(llm): this AsyncLLM runs on another event loop: enter the engine, and play, there."
            )
        mode = config.model_config.logprobs_mode
        if mode not in _PROBABILITIES:
            raise BadOption(
                f"VllmEngine.over(llm): with logprobs_mode={mode!r} it gives no log-probabilities; its owner starts it "
                "with logprobs_mode='processed_logprobs'."
            )
        if _bare_on_cpu(llm) and config.scheduler_config.enable_chunked_prefill:
            raise BadOption(
                "VllmEngine.over(llm): on a CPU, vLLM dies of a seeded turn whose prompt is computed in pieces; its "
                f"owner starts it with {_EXTENSION}, or with enable_chunked_prefill=False."
            )
        self.settings = VllmSettings({"logprobs_mode": mode}, {}, {})
        # Cached by vLLM, which would ask at the first request, and wait for ever if an engine core died then.
        await llm.get_supported_tasks()
        return llm

    async def stop(self) -> None:
        """Let it go; it runs on for its owner."""
        self.llm = None

    def kill(self) -> None:
        """It is not ours to end."""

    def cause_of_death(self) -> str:
        return "the AsyncLLM died or was shut down; its owner's log says why"


def _bare_on_cpu(llm: Any) -> bool:
    """Whether its workers are on a CPU and have none of what mends them there."""
    return llm.vllm_config.device_config.device_type == "cpu" and not VllmWeights(llm, "").extended


class ExternalStats(SchedulerStats):
    """The count of our own requests: what the scheduler has besides are its owner's."""

    def __init__(self, requests: Collection[Request]) -> None:
        super().__init__()
        self._requests = requests

    @property
    def running(self) -> int:
        """Our requests that vLLM has and has not finished."""
        return sum(not request.sent_all for request in self._requests)

    async def wait_for_step(self) -> None:
        """Return a little later: no logger of ours tells of steps."""
        await anyio.sleep(_LOOK_SECONDS)


class ExternalAdapters(VllmAdapters):
    """No adapters: what adapters there are is known to the owner alone."""

    async def add(
        self, name: str, given: Any, *, config: Mapping[str, Any] | None = None, number: int | None = None
    ) -> str:
        _not_ours(f"add_adapter({name!r})", "adapters are its owner's; ask for them through a TokenEngine")

    async def remove(self, name: str) -> None:
        _not_ours(f"remove_adapter({name!r})", "adapters are its owner's")


class ExternalRuntime(VllmRuntime):
    """An `AsyncLLM` while an engine of ours uses it; only requests of ours are ever ended."""

    def __init__(self, process: VllmProcess, llm: Any, weights: VllmWeights, *, version: str, **named: Any) -> None:
        super().__init__(process, llm, weights, version=version, **named)
        if not self.stamps_itself:  # then its owner alone knows
            self.versions, self._ages = [""], {"": 0}
        self.adapters = ExternalAdapters(llm, process.model, self.answered)
        process.stats = ExternalStats(self._streams())

    def _streams(self) -> Any:
        return self.requests

    # --- what its trainer has it do

    async def pause(self, mode: PauseMode) -> None:
        """Ask for nothing more; what its owner asks goes on."""
        if mode is PauseMode.KEEP:
            raise BadControl(
                "pause('keep'): vLLM would stand still for its owner too, who pauses it; give mode='wait' for the end "
                "of our turns, or 'abort' to sample them anew."
            )
        if mode is PauseMode.ABORT:
            await self._end_all()
        await self.answered("pause()", self._until_sent())

    async def resume(self) -> None:
        """Nothing stands still but the gate."""

    async def check_weights(self, given: Any) -> Any:
        _not_ours("update_weights()", "its owner exchanges the weights; what it samples says their version")

    async def reset_prefix_cache(self) -> None:
        _not_ours("reset_prefix_cache()", "call llm.reset_prefix_cache()")

    def check_sleep(self, level: int) -> None:
        _not_ours(f"sleep({level})", "pause() ours, and call llm.sleep()")

    async def profile(self, *, on: bool) -> None:
        _not_ours("start_profile()" if on else "stop_profile()", "call it on the llm")

    async def devices(self) -> list[str]:
        if not self.weights.extended:
            _not_ours("devices()", f"its workers tell where they are if it is started with {_EXTENSION}")
        return await super().devices()

    async def _end_all(self) -> None:
        for request in tuple(self._streams()):
            if not request.sent_all:
                await self.drop(request.collector)

    # --- its life

    async def stop(self) -> None:
        """End our requests, and let vLLM go."""
        inside = [request.collector for request in self._streams() if not request.sent_all]
        with anyio.move_on_after(ABORT_SECONDS, shield=True):
            await self._end_all()
        await super().stop()
        for collector in inside:
            collector.put(EngineDead("the engine was stopped"))


class ExternalStream(VllmStream):
    """The deltas of one request to somebody else's vLLM."""

    _runtime: ExternalRuntime

    def __init__(self, runtime: ExternalRuntime, request: GenerationRequest) -> None:
        super().__init__(runtime, request)
        mode = runtime.llm.vllm_config.model_config.logprobs_mode if runtime.llm is not None else ""
        self._exact = mode == "processed_logprobs" or samples_raw_distribution(request)

    @property
    def collector(self) -> Any:
        """Where vLLM puts what it samples."""
        return self._collector

    async def _read(self) -> Delta:
        while True:
            with anyio.move_on_after(_LISTEN_SECONDS):
                delta = await super()._read()
                return delta if self._exact else replace(delta, logprobs=None)
            self._runtime.require_alive()

    def _finished(self, output: Any, completion: Any) -> Finish:
        finish = super()._finished(output, completion)
        for span in finish.versions:
            self._runtime.note_version(base_and_adapter(span.version)[0])
        return finish


def _not_ours(call: str, instead: str) -> NoReturn:
    raise BadControl(f"{call}: this AsyncLLM is not ours: {instead}.")
