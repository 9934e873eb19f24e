"""Remote engine: an `Engine` whose ids are sampled by an HTTP server of vLLM or SGLang."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from copy import copy
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.to_thread
from anyio.lowlevel import current_token

from runner import checked
from runner.concurrency.clocks import require_asyncio
from runner.engines.adapters import is_adapter_name
from runner.engines.base import GenerationRequest, ModelEngine
from runner.engines.gate import AdmissionGate
from runner.engines.http_retries import HttpFailure, Retries, RetryPolicy
from runner.engines.remote.dialect import ServerDialect, SideRequest
from runner.engines.remote.runtime import RemoteAdapters, RemoteRuntime
from runner.engines.remote.server import RemoteServer, base_url, require_aiohttp
from runner.engines.remote.server_probe import ServerInfo, ServerProbe, probe_request
from runner.engines.remote.stream import RemoteStream
from runner.errors import BadControl, BadOption, EngineDead
from runner.models import DEMO_MODEL, ResolvedModel, load_language, resolve_model
from runner.tokens.template import ChatTemplate

__all__ = ["RemoteEngine"]

_DEFAULT_PLACES = 128
"""Maximum number of concurrent requests if the server does not report a limit."""
_STREAM_INTERVAL_IDS = 8
"""Default number of ids in a delta, as in a `VllmEngine`."""
_CERTAIN = math.log(0.99)
"""Log-probability above which the id that `probe_request` samples counts as certain. A bias makes this id certain in
the sampling distribution, but not in the model's own distribution.
"""


class RemoteEngine(ModelEngine[RemoteRuntime]):
    """Engine over a server that takes and returns token ids.

    async with RemoteEngine("http://127.0.0.1:8000", model="Qwen/Qwen3-0.6B") as engine: ...

    Tokenizer, template and stop ids come from the model's local folder. Entering compares the tokenizer with the
    server's vocabulary. The server needs no tool parser and no template.

    Args:
        url: the server's address.
        model: the model that the server serves: a folder, a Hugging Face id, from which only small files are fetched,
            or `smollm2-135m`, the demo model.
        template: a chat template: a bundled name, a file, or a `ChatTemplate`; default the model's own.
        name: the model's name on the server; default its only model.
        dialect: the server's protocol; by default `sglang` if the server reports that it is SGLang, otherwise `vllm`.
        api_key: the API key; never written to a run file.
        places: maximum number of concurrent requests, further ones wait at the gate; default the server's own limit, or
            128 if it does not report one.
        stream_interval: number of ids in a delta, unless the caller acts on single ids; default 8. The first id is sent
            at once.
        sampling_masks: True to request from an SGLang server the ids that could be sampled, for turns with a `top_k`. A
            vLLM server sends them if it was started with `--return-sampling-mask`.
        routed_experts: number of experts per id and layer. Above 0, the experts are requested from an SGLang server
            with `--enable-return-routed-experts`; the number is needed, since SGLang sends no shape. A vLLM server with
            this option always sends the experts. Default 0.
        retries: retry policy for requests that failed.
        timeout: maximum seconds until an answer begins.

    Raises:
        BadOption: an address or a setting is invalid.
    """

    retries: Retries
    """Retries since the engine was entered: the rest of their budget, and counts."""

    def __init__(
        self,
        url: str,
        model: str | os.PathLike[str] = DEMO_MODEL,
        *,
        template: str | Path | ChatTemplate | None = None,
        name: str | None = None,
        dialect: ServerDialect | str | None = None,
        api_key: str | None = None,
        places: int | None = None,
        stream_interval: int | None = None,
        retries: RetryPolicy = RetryPolicy(),  # noqa: B008  # frozen
        timeout: float = 120.0,
        sampling_masks: bool = False,
        routed_experts: int = 0,
    ) -> None:
        for option, value in (("places", places), ("stream_interval", stream_interval)):
            if value is not None:
                given = f"RemoteEngine({option}={value!r})"
                checked.whole(given, checked.number(given, value, least=1), least=1)
        checked.number(f"RemoteEngine(timeout={timeout!r})", timeout, least=0)
        if dialect is not None and dialect not in list(ServerDialect):
            raise BadOption(f"RemoteEngine(dialect={dialect!r}): give one of {', '.join(ServerDialect)}.")
        checked.whole(f"RemoteEngine(routed_experts={routed_experts!r:.60})", routed_experts, least=0)
        self._side = SideRequest(bool(sampling_masks), routed_experts)
        self.url = base_url(url)
        """Address of the server."""
        self.model = model
        """The argument `model`."""
        self.retries = Retries(retries)
        self._template = template
        self._name = name
        self._dialect = None if dialect is None else ServerDialect(dialect)
        self._api_key = api_key
        self._places = places
        self._stream_interval = stream_interval or _STREAM_INTERVAL_IDS
        self._policy = retries
        self._timeout = timeout
        self._processed = True
        self._info: ServerInfo | None = None
        self._open = AsyncExitStack()
        self.runtime = None

    async def __aenter__(self) -> Self:
        """Probe the server: model, vocabulary, sizes and weight version.

        Raises:
            BadModel: the model does not exist, or the server has another one.
            BadOption: the server refuses the request, or has no endpoint for token ids; aiohttp is not installed; or
                the event loop is trio's.
            EngineError: the server does not answer.
        """
        self._require_not_entered()
        require_asyncio("RemoteEngine")
        # The files are read in a thread, since this takes some tenths of a second and would block other episodes.
        model = await anyio.to_thread.run_sync(self._load, abandon_on_cancel=True)
        self.retries = Retries(self._policy)
        async with AsyncExitStack() as stack:
            server = RemoteServer(self.url, api_key=self._api_key, seconds=self._timeout)
            await stack.enter_async_context(server)
            probe = ServerProbe(server, self._wait_to_retry, self._dialect, self._name)
            self._info = info = await probe.probe(model.folder, self.tokenizer)
            self.context = info.context
            self.places = self._places or info.places or _DEFAULT_PLACES
            version = await self._ask_for_one_id(server, info)
            self.runtime = self._runtime(server, info, version)
            self._open = stack.pop_all()
        self.running, self.loop = True, current_token()
        return self

    def _load(self) -> ResolvedModel:
        """Load the local files of the model, and return their location."""
        require_aiohttp()
        model = resolve_model(self.model)
        self.tokenizer, self.template, self.stop_ids = load_language(model, self._template)
        return model

    async def _wait_to_retry(self, failure: HttpFailure, attempt: int) -> bool:
        seconds = self.retries.wait_after(failure, attempt)
        if seconds is None:
            return False
        await anyio.sleep(seconds)
        return True

    def _runtime(self, server: RemoteServer, info: ServerInfo, version: str) -> RemoteRuntime:
        room = info.room or sys.maxsize
        dialect = copy(info.dialect)
        dialect.side = self._side
        return RemoteRuntime(
            server,
            dialect,
            self.retries,
            gate=AdmissionGate(self.places, room),
            adapters=RemoteAdapters(name for name in info.model.adapters if is_adapter_name(name)),
            context=self.context,
            version=version,
            model=info.model.name,
            controlled=info.controlled,
            stream_interval=self._stream_interval,
        )

    async def _ask_for_one_id(self, server: RemoteServer, info: ServerInfo) -> str:
        """Sample one id to detect the kind of the server's log-probabilities, and return the server's weight version.

        Raises:
            BadOption: the server refuses the request, or does not have the path.
        """
        runtime, request = self._runtime(server, info, ""), probe_request(self.tokenizer)
        try:
            async with RemoteStream(runtime, request, exact=True) as stream:
                deltas = [delta async for delta in stream]
        except EngineDead as error:
            raise BadOption(f"{error} ({info.dialect.missing})") from error
        logprobs = [logprob for delta in deltas for logprob in delta.logprobs or ()]
        self._processed = bool(logprobs) and logprobs[0] > _CERTAIN
        assert stream.finish is not None
        return stream.finish.versions[-1].version

    async def __aexit__(self, *_: object) -> None:
        self.running = False
        self.entered_runtime.stop()
        await self._open.aclose()

    def stream(self, request: GenerationRequest) -> RemoteStream:
        exact = self._processed or request.samples_raw_distribution
        return RemoteStream(self.entered_runtime, request, exact=exact)

    def check_scoring(self, *, as_sampled: bool) -> None:
        """Raise BadControl if `as_sampled`, since servers score only whole prompts, at temperature 1."""
        if as_sampled:
            raise BadControl("score(): a server scores only at temperature 1; leave sampling and constraint out.")

    async def _score_prompt(self, request: GenerationRequest) -> Sequence[float]:
        return await self.entered_runtime.score(request)

    async def health(self) -> None:
        """Return when the server reports that it can answer.

        Raises:
            EngineDead: the server does not answer.
        """
        await self.entered_runtime.health()

    def describe(self) -> dict[str, Any]:
        info, runtime = self._info, self.entered_runtime
        assert info is not None
        software = "sglang" if info.dialect.name is ServerDialect.SGLANG else "vllm"
        return {
            "kind": "remote",
            "model": os.fspath(self.model),
            "server": self.url,
            "served_as": info.model.name,
            "dialect": info.dialect.name.value,
            "versions": {} if info.software is None else {software: info.software},
            "context": self.context,
            "places": self.places,
            "stream_interval": self._stream_interval,
            "logprobs": "processed_logprobs" if self._processed else "raw_logprobs",
            "versions_stamped_by": software if runtime.version else None,
        }
