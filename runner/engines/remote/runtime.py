"""Runtime of a remote engine: requests, retries, control by the trainer, and the check that its server answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from runner.engines.adapters import Adapters, AdapterVersion
from runner.engines.base import GenerationRequest, Session
from runner.engines.gate import AdmissionGate
from runner.engines.http_engine import HttpRuntime
from runner.engines.http_retries import FailureKind, HttpFailure, Retries
from runner.engines.remote.dialect import Call, Dialect
from runner.engines.remote.server import RemoteServer
from runner.engines.runtime import ModelRuntime, OpenRequest
from runner.engines.state import PauseMode
from runner.errors import BadControl, EngineError, RequestRejected

__all__ = ["RemoteAdapters", "RemoteRuntime"]

_LOOK_SECONDS = 0.2  # seconds between two cuts: a request may reach the server after the first cut


class RemoteRequest(OpenRequest, Protocol):
    """Methods of a request's stream that this runtime needs."""

    @property
    def sent_all(self) -> bool: ...


class RemoteAdapters(Adapters):
    """Adapters of a server. They change only when the server restarts."""

    async def add(
        self, name: str, given: Any, *, config: Mapping[str, Any] | None = None, number: int | None = None
    ) -> str:
        raise BadControl(f"add_adapter({name!r}): start the server with this adapter (--lora-modules).")

    async def remove(self, name: str) -> None:
        raise BadControl(f"remove_adapter({name!r}): restart the server without this adapter.")


class RemoteRuntime(HttpRuntime[RemoteServer], ModelRuntime[RemoteRequest]):
    """State of an entered remote engine. A request is inside the engine until its stream is left."""

    def __init__(
        self,
        server: RemoteServer,
        dialect: Dialect,
        retries: Retries,
        *,
        gate: AdmissionGate,
        adapters: Adapters,
        context: int,
        version: str,
        model: str,
        controlled: bool,
        stream_interval: int,
    ) -> None:
        super().__init__(gate, adapters, context=context, version=version)
        # `Progress` restarts the clocks of all turns together, but here one request can hang while others continue.
        self.progress = None
        self.dtype = ""  # a server does not report its dtype
        self.server = server
        self.dialect = dialect
        self.retries = retries
        self.model = model
        """Name of the model on the server."""
        self.controlled = controlled
        """True if the server can be paused."""
        self._stream_interval = stream_interval
        self._resumed = anyio.Event()
        self._resumed.set()

    # --- one request

    def call(self, request: GenerationRequest, adapter: AdapterVersion | None) -> Call:
        """Return the HTTP request for a generation request.

        Raises:
            RequestRejected: the server does not support the request.
        """
        name = None if adapter is None else adapter.name
        interval = self._stream_interval
        body = self.dialect.body(request, model=self.model, adapter=name, stream_interval=interval)
        return Call("POST", self.dialect.path, body)

    async def score(self, request: GenerationRequest) -> list[float]:
        """Return the log-probability of each id of the prompt but the first.

        Raises:
            RequestRejected: the server refuses the prompt, or does not have the adapter.
            EngineError: the server failed, or its answer has no scores.
        """
        self.require_alive()
        if not 0 < len(request.prompt) < self.context:
            raise RequestRejected(
                f"score(): the prompt has {len(request.prompt)} ids: give a prompt of 1 to {self.context - 1} ids."
            )
        self.adapters.check(request.name, request.sampling.adapter)
        call = self.dialect.scoring(request, model=self.model, adapter=request.sampling.adapter)
        session, room, attempts = Session(), len(request.prompt) + 1, 0
        await self.gate.enter(session, room)
        try:
            while True:
                attempts += 1
                await self.wait_until_resumed()
                try:
                    answer = await self.server.ask(call)
                    return self._scores(answer, request)
                except HttpFailure as failure:
                    if not await self.wait_to_retry(failure, attempts):
                        # A rejection does not end the engine, since every turn has another body.
                        raise self.permanent_error("score()", failure, alone=True) from failure
        finally:
            self.gate.leave(session, room)
            self.gate.close(session)

    def _scores(self, answer: Any, request: GenerationRequest) -> list[float]:
        try:
            return self.dialect.scores_in(answer, request.prompt)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            problem = self.server.errors.short(f"{type(error).__name__}: {error}")
            raise HttpFailure(FailureKind.GARBAGE, f"the answer has no scores ({problem})") from error

    async def wait_until_resumed(self) -> None:
        """Wait for the end of the trainer's pause, if the server is paused."""
        if not self._resumed.is_set():
            await self._resumed.wait()

    def failed(self, request: GenerationRequest, failure: HttpFailure) -> EngineError:
        """Return the error for a request that is not sent again.

        A failure that affects every request ends the engine.
        """
        # A rejected constraint does not end the engine, since other requests may have none.
        return self.permanent_error(request.name, failure, alone=request.constraint is not None)

    # --- control by the trainer

    def require_running(self, call: str) -> None:
        """Raise BadControl if the engine is not running, or if the server cannot be paused."""
        if not self.controlled:
            path = self.dialect.pause(PauseMode.WAIT).path.partition("?")[0]
            raise BadControl(f"{call}: the server has no {path}: {self.dialect.control}.")
        super().require_running(call)

    async def pause(self, mode: PauseMode) -> None:
        self._resumed = anyio.Event()
        if mode is PauseMode.WAIT:
            # This process waits instead of vLLM, since vLLM's own wait keeps queued requests. Their ids could then have
            # two weight versions.
            await self._until_sent()
        # A shield is needed, since a cancelled pause could take effect late.
        with anyio.CancelScope(shield=True):
            await self._pause(mode)
        await checkpoint_if_cancelled()

    async def _pause(self, mode: PauseMode) -> None:
        while True:
            await self._call_control(self.dialect.pause(mode))
            if mode is not PauseMode.ABORT:
                return
            with anyio.move_on_after(_LOOK_SECONDS):
                await self._until_sent()
                return
            # The requests that are left reached the server after the cut, so another cut is needed.

    async def resume(self) -> None:
        # A shield is needed: after a cancellation, the server could run although this engine is marked as paused. An
        # update could then change the weights during requests.
        with anyio.CancelScope(shield=True):
            await self._call_control(self.dialect.resume())
        self._resumed.set()

    async def check_weights(self, given: Any) -> Any:
        raise BadControl(
            "update_weights(): exchange the weights on the server itself, and compare them by prove(proof). Sampled "
            "ids record its version."
        )

    async def load_weights(self, checked: Any, version: str) -> None:
        """Never called, since `check_weights` refuses all weights."""

    async def reset_prefix_cache(self) -> None:
        said = await self._call_control(self.dialect.reset_prefix_cache())
        if isinstance(said, Mapping) and said.get("success") is False:
            raise EngineError("reset_prefix_cache(): the server kept its cached prompts: try again while no turn runs")

    def check_sleep(self, level: int) -> None:
        if not self.controlled:
            raise BadControl(f"sleep({level}): the server has no /sleep: {self.dialect.control}.")
        if self.dialect.sleep(level) is None:
            raise BadControl(
                f"sleep({level}): deltarunner cannot release the memory of a server with dialect="
                f"{self.dialect.name.value!r}. Pause the engine, and release the memory on the server itself."
            )

    async def sleep(self, level: int) -> None:
        await self._pause(PauseMode.ABORT)  # this also ends turns that an earlier pause kept
        call = self.dialect.sleep(level)
        assert call is not None
        await self._call_control(call)

    async def wake(self, tags: Collection[str]) -> None:
        call = self.dialect.wake(sorted(tags))
        assert call is not None
        await self._call_control(call)
        # The server resumes by itself once all of its memory is allocated, so it is paused again until `release`.
        await self._pause(PauseMode.ABORT)

    async def profile(self, *, on: bool) -> None:
        raise BadControl("a server cannot be profiled from here: profile a VllmEngine.")

    async def _call_control(self, call: Call) -> Any:
        """Send a control call and return its answer.

        Raises:
            BadControl: the server has no such path (404), or refuses the key (401 to 403).
            EngineError: the call failed.
        """
        path = call.path.partition("?")[0]
        try:
            return await self.server.ask(call)
        except HttpFailure as failure:
            if failure.kind is FailureKind.REFUSED:
                missing = failure.text.startswith(f"{call.path} answered 404")
                key = "give a key with the rights for this path as api_key=, or --server-key"
                raise BadControl(f"{failure}: {self.dialect.control if missing else key}.") from failure
            raise EngineError(f"{path} of {self.server.url}: {failure}") from failure

    @property
    def open_requests(self) -> int:
        return sum(not request.sent_all for request in self.requests)

    async def _until_sent(self) -> None:
        while self.open_requests:  # noqa: ASYNC110  # an arrived answer sets no event
            await anyio.sleep(0.005)

    # --- life cycle

    async def _probe(self) -> None:
        await (await self.server.open(self.dialect.health)).finished()
