"""A function of token ids while an engine uses it: the tasks that call it, what its trainer may ask, and its end."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn, Protocol

import anyio
import anyio.abc

from runner.engines.adapters import Adapters
from runner.engines.function.token_function import LogprobsKind, TokenFunction
from runner.engines.gate import AdmissionGate
from runner.engines.runtime import EngineRuntime, OpenRequest
from runner.engines.state import PauseMode
from runner.errors import BadControl, EngineDead

__all__ = ["FunctionAdapters", "FunctionRuntime"]

_AGAIN_SECONDS = 1.0
"""How soon a call is cancelled once more that did not end by it."""

_OWNER = "whoever owns the engine behind generate()"


class FunctionRequest(OpenRequest, Protocol):
    """What this runtime asks of the stream of a request besides."""

    @property
    def sent_all(self) -> bool: ...
    def cut(self) -> None: ...
    def fail(self, error: EngineDead) -> None: ...


class FunctionAdapters(Adapters):
    """The adapters that a function knows by name; nobody changes them here."""

    async def add(
        self, name: str, given: Any, *, config: Mapping[str, Any] | None = None, number: int | None = None
    ) -> str:
        raise BadControl(f"add_adapter({name!r}): {_OWNER} loads adapters; name them in TokenEngine(adapters=).")

    async def remove(self, name: str) -> None:
        raise BadControl(f"remove_adapter({name!r}): {_OWNER} takes adapters away.")


class FunctionRuntime(EngineRuntime[FunctionRequest]):
    """A function from when its engine was entered to when it is left; a request is inside until its stream is left."""

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
        """The tasks in which the function is called."""
        self.vocabulary = vocabulary
        """How many ids the model has."""
        self.logprobs = logprobs
        self.calls: dict[FunctionRequest, None] = {}
        """The calls that are not over; one that does not end by being cancelled outlives its request."""
        self._stopped = False
        self._death: EngineDead | None = None
        self._news: anyio.Event | None = None

    # --- what its trainer has it do

    async def pause(self, mode: PauseMode) -> None:
        if mode is PauseMode.KEEP:
            raise BadControl(
                "pause('keep'): a call of generate() cannot stand still; give mode='wait' for its end, or 'abort' to "
                "cancel it and sample its turn anew."
            )
        if mode is PauseMode.ABORT:
            for request in tuple(self.requests):
                request.cut()
        while not all(request.sent_all for request in self.requests):
            self._news = self._news or anyio.Event()
            await self._news.wait()

    def ended(self) -> None:
        """Take note that a call is over, or a request left."""
        if self._news is not None:
            self._news.set()
            self._news = None

    async def resume(self) -> None:
        """Nothing stands still but the gate."""

    async def check_weights(self, given: Any) -> Any:
        _not_ours("update_weights()", "exchanges its weights; TokenOutput(version=) says which sampled what")

    async def load_weights(self, checked: Any, version: str) -> None:
        """Not reached: `check_weights` refuses."""

    async def reset_prefix_cache(self) -> None:
        _not_ours("reset_prefix_cache()", "has its prefix cache")

    def check_sleep(self, level: int) -> None:
        _not_ours(f"sleep({level})", "gives its memory up; pause() first")

    async def sleep(self, level: int) -> None:
        """Not reached: `check_sleep` refuses."""

    async def wake(self, tags: Collection[str]) -> None:
        """Not reached: it never sleeps."""

    async def profile(self, *, on: bool) -> None:
        _not_ours("start_profile()" if on else "stop_profile()", "profiles it")

    # --- its life

    def is_alive(self) -> bool:
        """Whether requests can be answered, as far as is known."""
        return not self._stopped and self._death is None

    def require_alive(self) -> None:
        if self._stopped:
            raise EngineDead("the engine is not running")
        if self._death is not None:
            raise self.death_error(self._death)

    def death_error(self, error: EngineDead) -> EngineDead:
        """The error for one request of an engine that is dead: the same words and cause for all of them."""
        if self._death is None:
            self._death = error
            self.gate.fail(lambda: self.death_error(error))
        # A copy for each who is told: one object raised in many tasks would gather the tracebacks of all of them.
        copy = EngineDead(*self._death.args)
        copy.__cause__ = self._death.__cause__
        return copy

    async def stop(self) -> None:
        """Call the function no more; who is inside or waits at the gate is sent away, and every call is ended."""
        self._stopped = True
        self.gate.fail(lambda: EngineDead("the engine was stopped"))
        for request in tuple(self.requests):
            request.fail(EngineDead("the engine was stopped"))
        with anyio.CancelScope(shield=True):
            while self.calls:
                self._news = self._news or anyio.Event()
                news = self._news
                with anyio.move_on_after(_AGAIN_SECONDS) as patience:
                    await news.wait()
                if patience.cancelled_caught:
                    for call in tuple(self.calls):
                        call.cut()


def _not_ours(call: str, what: str) -> NoReturn:
    raise BadControl(f"{call}: the engine is not ours: {_OWNER} {what}.")
