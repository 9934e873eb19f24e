"""Use of an `AsyncLLM` that another program owns, and the refusal of calls that only its owner may make."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NoReturn, Protocol

import anyio

from runner.engines.adapters import base_and_adapter
from runner.engines.base import Delta, Finish, GenerationRequest
from runner.engines.state import PauseMode
from runner.engines.vllm.adapters import VllmAdapters
from runner.engines.vllm.runtime import ABORT_SECONDS, VllmRuntime
from runner.engines.vllm.scheduler_stats import SchedulerStats
from runner.engines.vllm.settings import VllmSettings
from runner.engines.vllm.start import VllmProcess
from runner.engines.vllm.stream import VllmStream
from runner.engines.vllm.weight_loading import VllmWeights
from runner.engines.vllm.worker.cpu_patches import WORD_BITS
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
"""Seconds between checks for a shutdown by the owner, which vLLM does not report to waiting tasks."""
_LOOK_SECONDS = 0.005
"""Seconds between checks for the end of requests, since no logger reports vLLM's steps."""

_EXTENSION = "worker_extension_cls='runner.engines.vllm.worker.extension.WeightWorker'"
_PROBABILITIES = ("processed_logprobs", "raw_logprobs")


class Request(Protocol):
    """Attributes of a request's stream that this module needs."""

    @property
    def sent_all(self) -> bool: ...
    @property
    def collector(self) -> Any: ...


def check_llm(llm: Any) -> None:
    """Check that an object is an `AsyncLLM`.

    Raises:
        BadOption: the object is not an `AsyncLLM`.
    """
    missing = [name for name in ("add_request", "abort", "vllm_config", "errored") if not hasattr(llm, name)]
    if missing:
        raise BadOption(
            f"VllmEngine.over({type(llm).__name__}): this object has no {missing[0]}; give a vLLM AsyncLLM, such as "
            "AsyncLLM.from_engine_args(AsyncEngineArgs(...)). For another engine, write a TokenEngine."
        )


def arguments_of(llm: Any) -> dict[str, Any]:
    """Return the owner's engine arguments that `runner.testing.forcing` and `runner.training.grammar` read."""
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
    """Check that the `AsyncLLM` supports a sampling.

    Raises:
        BadOption: the sampling is not supported; the message names the field and the needed argument.
    """
    most = llm.vllm_config.model_config.max_logprobs
    if sampling.logprobs and 0 <= most < sampling.logprobs:
        raise BadOption(
            f"Sampling(logprobs={sampling.logprobs}): the AsyncLLM returns at most {most}; start it with "
            f"max_logprobs={sampling.logprobs}, or leave logprobs out."
        )


def check_constraint(llm: Any, constraint: Constraint) -> None:
    """Check that the workers of an `AsyncLLM` can apply a grammar without corrupting their memory.

    Raises:
        BadOption: the workers would corrupt their memory; the message has the needed argument.
    """
    config = llm.vllm_config
    if _bare_on_cpu(llm) and config.model_config.get_vocab_size() % WORD_BITS:
        raise BadOption(
            f"a turn under a grammar ({constraint.kind.value}): on a CPU, masks write past the end of a vocabulary "
            f"whose size is not a multiple of {WORD_BITS}; start the AsyncLLM with {_EXTENSION}."
        )


class ExternalProcess(VllmProcess):
    """`VllmProcess` of an external `AsyncLLM`: nothing is started or stopped."""

    async def start(self) -> Any:
        """Return the `AsyncLLM`.

        Raises:
            BadOption: the `AsyncLLM` was started with unsupported arguments.
            EngineDead: the `AsyncLLM` is dead.
        """
        llm, config = self.llm, self.llm.vllm_config
        if llm.errored:
            raise EngineDead("VllmEngine.over(llm): this AsyncLLM is dead, or was shut down: give a running one.")
        handler = getattr(llm, "output_handler", None)
        if handler is not None and handler.get_loop() is not asyncio.get_running_loop():
            raise BadOption(
                "VllmEngine.over(llm): this AsyncLLM runs on another event loop: enter the engine on that loop."
            )
        mode = config.model_config.logprobs_mode
        if mode not in _PROBABILITIES:
            raise BadOption(
                f"VllmEngine.over(llm): with logprobs_mode={mode!r}, vLLM returns no log-probabilities; start it "
                "with logprobs_mode='processed_logprobs'."
            )
        if _bare_on_cpu(llm) and config.scheduler_config.enable_chunked_prefill:
            raise BadOption(
                "VllmEngine.over(llm): on a CPU, a turn with a seed and a chunked prompt ends vLLM; "
                f"start it with {_EXTENSION}, or with enable_chunked_prefill=False."
            )
        self.settings = VllmSettings({"logprobs_mode": mode}, {}, {})
        # This fills a cache of vLLM. Otherwise the first request would ask the engine core, and wait forever if it is
        # dead.
        await llm.get_supported_tasks()
        return llm

    async def stop(self) -> None:
        """Drop the reference to the `AsyncLLM`, which continues to run for its owner."""
        self.llm = None

    def kill(self) -> None:
        """Do nothing, since only the owner may end the `AsyncLLM`."""

    def cause_of_death(self) -> str:
        return "the AsyncLLM died or was shut down; see its owner's log"


def _bare_on_cpu(llm: Any) -> bool:
    """Return whether the workers of an `AsyncLLM` run on a CPU without our patches."""
    return llm.vllm_config.device_config.device_type == "cpu" and not VllmWeights(llm, "").extended


class ExternalStats(SchedulerStats):
    """Counts of this engine's own requests, without the requests of the owner."""

    def __init__(self, requests: Collection[Request]) -> None:
        super().__init__()
        self._requests = requests

    @property
    def running(self) -> int:
        """Number of this engine's unfinished requests in vLLM."""
        return sum(not request.sent_all for request in self._requests)

    async def wait_for_step(self) -> None:
        """Wait for `_LOOK_SECONDS`, since no logger reports vLLM's steps."""
        await anyio.sleep(_LOOK_SECONDS)


class ExternalAdapters(VllmAdapters):
    """Adapters of an external `AsyncLLM`. Only its owner can add or remove them."""

    async def add(
        self, name: str, given: Any, *, config: Mapping[str, Any] | None = None, number: int | None = None
    ) -> str:
        _not_ours(f"add_adapter({name!r})", "adapters belong to its owner; use them through a TokenEngine")

    async def remove(self, name: str) -> None:
        _not_ours(f"remove_adapter({name!r})", "adapters belong to its owner")


class ExternalRuntime(VllmRuntime):
    """Runtime of an engine over an external `AsyncLLM`. It never ends requests of the owner."""

    def __init__(self, process: VllmProcess, llm: Any, weights: VllmWeights, *, version: str, **named: Any) -> None:
        super().__init__(process, llm, weights, version=version, **named)
        if not self.stamps_itself:  # an older vLLM has no weight versions, so the version is unknown
            self.versions, self._ages = [""], {"": 0}
        self.adapters = ExternalAdapters(llm, process.model, self.answered)
        process.stats = ExternalStats(self._streams())

    def _streams(self) -> Any:
        return self.requests

    # --- control by the trainer

    async def pause(self, mode: PauseMode) -> None:
        """Wait for the end of this engine's requests (WAIT), or cut them (ABORT). Requests of the owner continue.

        Raises:
            BadControl: the mode is KEEP, which would also pause requests of the owner.
        """
        if mode is PauseMode.KEEP:
            raise BadControl(
                "pause('keep'): this would pause vLLM for its owner too; give mode='wait' for the end "
                "of the turns, or 'abort' to sample them again."
            )
        if mode is PauseMode.ABORT:
            await self._end_all()
        await self.answered("pause()", self._until_sent())

    async def resume(self) -> None:
        """Do nothing: a pause closes only the gate, and `release` opens the gate."""

    async def check_weights(self, given: Any) -> Any:
        _not_ours("update_weights()", "its owner exchanges the weights; sampled ids record their version")

    async def reset_prefix_cache(self) -> None:
        _not_ours("reset_prefix_cache()", "call llm.reset_prefix_cache()")

    def check_sleep(self, level: int) -> None:
        _not_ours(f"sleep({level})", "pause() this engine, and call llm.sleep()")

    async def profile(self, *, on: bool) -> None:
        _not_ours("start_profile()" if on else "stop_profile()", "call it on the llm")

    async def devices(self) -> list[str]:
        if not self.weights.extended:
            _not_ours("devices()", f"its workers report their devices if it is started with {_EXTENSION}")
        return await super().devices()

    async def _end_all(self) -> None:
        for request in tuple(self._streams()):
            if not request.sent_all:
                await self.drop(request.collector)

    # --- life cycle

    async def stop(self) -> None:
        """End this engine's requests, and drop the reference to vLLM."""
        inside = [request.collector for request in self._streams() if not request.sent_all]
        with anyio.move_on_after(ABORT_SECONDS, shield=True):
            await self._end_all()
        await super().stop()
        for collector in inside:
            collector.put(EngineDead("the engine was stopped"))


class ExternalStream(VllmStream):
    """Deltas of one request to an external `AsyncLLM`."""

    _runtime: ExternalRuntime

    def __init__(self, runtime: ExternalRuntime, request: GenerationRequest) -> None:
        super().__init__(runtime, request)
        mode = runtime.llm.vllm_config.model_config.logprobs_mode if runtime.llm is not None else ""
        self._exact = mode == "processed_logprobs" or request.samples_raw_distribution

    @property
    def collector(self) -> Any:
        """Collector of vLLM for the request's output."""
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
    raise BadControl(f"{call}: this AsyncLLM belongs to another program: {instead}.")
