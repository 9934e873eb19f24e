"""Deltas of one call of a token function; leaving the block cancels the call's task."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from runner.concurrency.cancellation import forget_native_cancellation
from runner.engines.base import Delta, Finish, FinishReason, GenerationRequest, Session
from runner.engines.function.output_reader import OutputReader
from runner.engines.function.runtime import FunctionRuntime
from runner.engines.function.token_function import LogprobsKind, TokenSampling
from runner.engines.stream import GatedStream
from runner.errors import EngineDead, EngineError, one_line
from runner.tokens.top_logprobs import TopLogprobs

__all__ = ["FunctionSession", "FunctionStream"]

_END_SECONDS = 2.0
"""Seconds that a cancelled call may take to end. After that, the turn ends without waiting for the call."""


@dataclass(slots=True)
class FunctionSession(Session):
    """Conversation with an id for the function."""

    name: str = field(default_factory=lambda: uuid4().hex)
    """Value of the function's argument `session`."""


class _CancellableCall:
    """Running call of the function, with asyncio's own cancellation.

    On asyncio the call is cancelled once, as by `Task.cancel()`. A scope of anyio would also cancel every later await.
    It would thus interrupt the clean-up of code without a shield, such as vLLM's own `generate()`.
    """

    def __init__(self) -> None:
        self._scope = anyio.CancelScope(shield=True)
        self._task = _asyncio_task()

    async def run(self, call: Callable[[], Awaitable[None]]) -> None:
        """Run the call. Return normally even if the call was cancelled."""
        with self._scope:
            try:
                await call()
            except anyio.get_cancelled_exc_class():
                if self._task is None:
                    raise
                forget_native_cancellation()

    def cancel(self) -> None:
        """Cancel the call. Cancelling again is allowed if the call did not end."""
        if self._task is None:
            self._scope.cancel()
        else:
            self._task.cancel()


def _asyncio_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # the event loop is not asyncio's
        return None


class FunctionStream(GatedStream[FunctionRuntime, Session]):
    """Deltas of one call of the function."""

    def __init__(self, runtime: FunctionRuntime, request: GenerationRequest) -> None:
        super().__init__(runtime, request, request.session or FunctionSession())
        kind = runtime.logprobs
        self._exact = kind is LogprobsKind.PROCESSED or (kind is LogprobsKind.RAW and request.samples_raw_distribution)
        self._reader = OutputReader(
            TokenSampling.of(request),
            vocabulary=runtime.vocabulary,
            context=runtime.context,
            logprobs=kind is not LogprobsKind.NONE,
        )
        self._call: _CancellableCall | None = None
        self._cut = False
        self._over = anyio.Event()
        self._changed: anyio.Event | None = None
        self._deltas: deque[Delta] = deque()
        self._last: Delta | None = None
        """Delta with the finish. It is held back until the call ends, since further output would be an error."""
        self._end: Finish | None = None
        """Finish of the call. It is copied to `finish` when the caller has read all deltas or left the block."""
        self._failure: EngineError | None = None
        self._last_version = ""

    @property
    def sent_all(self) -> bool:
        """True once the call ended or failed. Its deltas may be unread."""
        return self._end is not None

    def stamp(self, version: str) -> None:
        """Mark later ids with these weights, unless the function reports versions for this request."""
        if not self._last_version:
            self._stamps.mark(version, self.sent)

    # --- the call

    async def _begin(self) -> None:
        self._runtime.calls[self] = None
        self._runtime.tasks.start_soon(self._run, name=f"generate() of {self.request.name}")

    async def _run(self) -> None:
        """Call the function. An exception fails this stream only, but `EngineDead` ends the engine."""
        try:
            if not self._cut:
                self._call = _CancellableCall()
                await self._call.run(self._ask)
        except EngineDead as error:
            self._fail(self._runtime.death_error(error))
        except EngineError as error:
            self._fail(error)
        except Exception as error:  # the function may raise any exception
            if not self._cut:  # after a cut, errors of clean-up code are ignored
                self._fail(EngineError(f"{self.request.name}: generate() raised {one_line(error)}"), cause=error)
        finally:
            if self._end is None and not self._cut and self._failure is None and self._last is None:
                self._fail(EngineError(f"{self.request.name}: generate() raised a cancellation that was not requested"))
            self._settle()
            self._runtime.calls.pop(self, None)
            self._over.set()
            self._notify()

    async def _ask(self) -> None:
        request = self.request
        session = self._session.name if isinstance(self._session, FunctionSession) else request.name
        answer: Any = self._runtime.function(list(request.prompt), TokenSampling.of(request), session=session)
        if inspect.isawaitable(answer):
            answer = await answer
            if not hasattr(answer, "__aiter__"):
                self._take(answer)
                self._reader.end()
                return
        if not hasattr(answer, "__aiter__"):
            self._reader.refuse_type(answer)
        async with AsyncExitStack() as stack:
            if inspect.isasyncgen(answer):
                await stack.enter_async_context(aclosing(answer))
            async for output in answer:
                self._take(output)
        self._reader.end()

    def _take(self, output: Any) -> None:
        if self._end is not None:  # the turn was cut, or the engine stopped, while the call continues
            return
        reader = self._reader
        delta = reader.read(output)
        if reader.version is not None and reader.version != self._last_version:
            self._last_version = reader.version
            self._runtime.note_version(reader.version)
            self._stamps.mark(reader.version, self.sent)
        self.sent = reader.count
        self._runtime.sampled += len(delta.token_ids)
        if not self._exact:
            delta = replace(delta, logprobs=None)
        if reader.finish is not None:
            finish = Finish(reader.finish, reader.stop, self._stamps.spans(self.sent), reader.cached_tokens)
            self._last = replace(delta, finish=finish)
        elif len(delta.token_ids):
            self._deltas.append(delta)
            self._notify()

    def _settle(self) -> None:
        """Set the finish of the turn if it has none. The call has ended, or did not end within `_END_SECONDS`."""
        if self._end is not None:
            return
        if self._last is None:
            finish = Finish(
                FinishReason.ABORT, versions=self._stamps.spans(self.sent), cached_tokens=self._reader.cached_tokens
            )
            count = self.request.sampling.logprobs
            self._last = Delta((), () if self._exact else None, finish, TopLogprobs(count) if count else None)
        self._end = self._last.finish
        self._deltas.append(self._last)

    def cut(self) -> None:
        """Cut the turn and keep its ids. Cutting again is allowed if the call did not end."""
        self._cut = True
        if self._call is not None:
            self._call.cancel()

    def fail(self, error: EngineDead) -> None:
        """End the turn with an error, since the engine is dead."""
        self._fail(error)
        self.cut()
        self._notify()

    def _fail(self, error: EngineError, *, cause: Exception | None = None) -> None:
        if self._end is None:
            error.__cause__ = cause or error.__cause__
            self._failure = error
            self._end = Finish(FinishReason.ERROR, stop=str(error), versions=self._stamps.spans(self.sent))

    def _notify(self) -> None:
        self._runtime.ended()
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    # --- reading

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self.finish is not None:
                raise StopAsyncIteration
            if self._failure is not None:
                self.finish = self._end
                raise self._failure
            self._changed = self._changed or anyio.Event()
            await self._changed.wait()
            # Without this checkpoint, asyncio would not cancel a reader that is woken at every step of the event loop.
            await checkpoint_if_cancelled()
        delta = self._deltas.popleft()
        if delta.finish is not None:
            self.finish = delta.finish
        return delta

    async def __aexit__(self, *_: object) -> None:
        if not self._inside:
            return
        try:
            if not self._over.is_set():
                self.cut()
                with anyio.move_on_after(_END_SECONDS, shield=True):
                    await self._over.wait()
            self._settle()
            self.rest.extend(self._deltas)
            self._deltas.clear()
        finally:
            self.finish = self.finish or self._end
            self._leave()
            self._runtime.ended()
