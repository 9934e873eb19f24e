"""Runtime of a token engine: the tasks that call the function, the trainer's calls, and the engine's end."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn, Protocol

import anyio
import anyio.abc

from runner.engines.adapters import Adapters
from runner.engines.function.token_function import LogprobsKind, TokenFunction
from runner.engines.gate import AdmissionGate
from runner.engines.runtime import ModelRuntime, OpenRequest
from runner.engines.state import NOT_RUNNING, PauseMode
from runner.errors import BadControl, EngineDead

__all__ = ["FunctionAdapters", "FunctionRuntime"]

_AGAIN_SECONDS = 1.0
"""Seconds after which a call that does not end is cancelled again."""

_OWNER = "the owner of generate()'s engine"


class FunctionRequest(OpenRequest, Protocol):
    """Methods of a request's stream that this runtime needs."""

    @property
    def sent_all(self) -> bool: ...
    def cut(self) -> None: ...
    def fail(self, error: EngineDead) -> None: ...


class FunctionAdapters(Adapters):
    """Adapters that a function supports, by name. Only the owner of the function can change them."""

    async def add(
        self, name: str, given: Any, *, config: Mapping[str, Any] | None = None, number: int | None = None
    ) -> str:
        raise BadControl(
            f"add_adapter({name!r}): only {_OWNER} can load it: load it there, and name it in TokenEngine(adapters=)."
        )

    async def remove(self, name: str) -> None:
        raise BadControl(
            f"remove_adapter({name!r}): only {_OWNER} can remove it: remove it there, and from TokenEngine(adapters=)."
        )


class FunctionRuntime(ModelRuntime[FunctionRequest]):
    """State of an entered token engine. A request is inside the engine until its stream is left."""

    def __init__(
        self,
        function: TokenFunction,
        tasks: anyio.abc.TaskGroup,
        *,
        gate: AdmissionGate,
        adapters: Adapters,
        context: int,
        vocabulary: int,
        logprobs: LogprobsKind,
    ) -> None:
        super().__init__(gate, adapters, context=context, version="")
        self.function = function
        self.tasks = tasks
        """Task group of the calls."""
        self.vocabulary = vocabulary
        self.logprobs = logprobs
        self.calls: dict[FunctionRequest, None] = {}
        """Requests whose call of the function still runs. A call that ignores its cancellation outlives its stream."""
        self._stopped = False
        self._death: EngineDead | None = None
        self._changed: anyio.Event | None = None

    # --- control by the trainer

    async def pause(self, mode: PauseMode) -> None:
        if mode is PauseMode.KEEP:
            raise BadControl(
                "pause('keep'): a call of generate() cannot be paused; give mode='wait' for its end, or 'abort' to "
                "cancel it and sample its turn again."
            )
        if mode is PauseMode.ABORT:
            for request in tuple(self.requests):
                request.cut()
        while self.open_requests:
            self._changed = self._changed or anyio.Event()
            await self._changed.wait()

    def ended(self) -> None:
        """Wake the tasks that wait for the end of a call or of a request."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def resume(self) -> None:
        """Do nothing: only the gate is closed while the engine is paused, and `release` opens it."""

    async def check_weights(self, given: Any) -> Any:
        _not_ours("update_weights()", "can exchange its weights. TokenOutput(version=) records the version of each id")

    async def load_weights(self, checked: Any, version: str) -> None:
        """Never called, since `check_weights` refuses all weights."""

    async def reset_prefix_cache(self) -> None:
        _not_ours("reset_prefix_cache()", "can reset its prefix cache: do it there")

    def check_sleep(self, level: int) -> None:
        _not_ours(f"sleep({level})", "can release its memory: pause() here, then do it there")

    async def sleep(self, level: int) -> None:
        """Never called, since `check_sleep` refuses every level."""

    async def wake(self, tags: Collection[str]) -> None:
        """Never called, since the engine never sleeps."""

    async def profile(self, *, on: bool) -> None:
        _not_ours("start_profile()" if on else "stop_profile()", "can profile it: do it there")

    # --- life cycle

    @property
    def open_requests(self) -> int:
        return sum(not request.sent_all for request in self.requests)

    def is_alive(self) -> bool:
        return not self._stopped and self._death is None

    def require_alive(self) -> None:
        if self._stopped:
            raise EngineDead(NOT_RUNNING)
        if self._death is not None:
            raise self.death_error(self._death)

    def death_error(self, error: EngineDead) -> EngineDead:
        """Mark the engine as dead and return the error for one request. All errors have the first cause."""
        if self._death is None:
            self._death = error
            self.gate.fail(lambda: self.death_error(error))
        # Each request gets a copy, since an object that many tasks raise would collect the tracebacks of all of them.
        copy = EngineDead(*self._death.args)
        copy.__cause__ = self._death.__cause__
        return copy

    async def stop(self) -> None:
        """End every call; requests in flight and at the gate fail."""
        self._stopped = True
        self.gate.fail(lambda: EngineDead("the engine was stopped"))
        for request in tuple(self.requests):
            request.fail(EngineDead("the engine was stopped"))
        with anyio.CancelScope(shield=True):
            while self.calls:
                self._changed = self._changed or anyio.Event()
                changed = self._changed
                with anyio.move_on_after(_AGAIN_SECONDS) as patience:
                    await changed.wait()
                if patience.cancelled_caught:
                    for call in tuple(self.calls):
                        call.cut()


def _not_ours(call: str, what: str) -> NoReturn:
    raise BadControl(f"{call}: only {_OWNER} {what}.")
