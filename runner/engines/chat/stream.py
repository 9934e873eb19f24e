"""Pieces of one turn from the answer of a chat API; leaving the block closes the connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Self

import anyio

from runner.concurrency.clocks import Waiting
from runner.engines.base import FinishReason, Session
from runner.engines.chat.runtime import ChatRuntime
from runner.engines.chat.server import ChatAnswer
from runner.engines.chat.wire import ChatAnswerReader, body_of
from runner.engines.http_engine import RetriedStream
from runner.engines.http_retries import FailureKind, HttpFailure
from runner.engines.message_engine import MessageFinish, MessagePiece, MessageRequest, MessageStream
from runner.errors import EngineError

__all__ = ["ChatStream"]


class ChatStream(RetriedStream[MessagePiece, MessageFinish], MessageStream):
    """Pieces of one turn, read from the answer of a chat server."""

    def __init__(self, runtime: ChatRuntime, request: MessageRequest) -> None:
        self.finish: MessageFinish | None = None
        self.waited = 0.0
        self.seed = None if "seed" in runtime.request_format.leave_out else request.seed
        self._runtime = runtime
        self._request = request
        self._session = request.session or Session()
        self._body = body_of(request, runtime.request_format)
        self._inside = False
        self._answer: ChatAnswer | None = None
        self._reader = ChatAnswerReader(request)
        self._pieces: deque[MessagePiece] = deque()
        self._attempts = 0
        self._sent = 0
        self._said = 0

    # --- begin

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self._close()
            raise
        return self

    async def _open(self) -> None:
        while self.finish is None:
            await self._enter()
            self._attempts += 1
            self._runtime.asking += 1
            try:
                self._answer = await self._runtime.server.open(self._body)
            except HttpFailure as failure:
                await self._again(failure)
            except BaseException:
                self._runtime.asking -= 1
                raise
            else:
                self._reader = ChatAnswerReader(self._request)
                return

    async def _enter(self) -> None:
        """Wait for a place and for the rate limit; the episode's clocks stop during the wait."""
        runtime = self._runtime
        runtime.require_alive()
        with Waiting() as waiting:
            try:
                await runtime.gate.enter(self._session, 1)
                self._inside = True
                self._sent = await runtime.limiter.until_open()
            finally:
                waiting.over()
                self.waited += waiting.seconds
        runtime.require_alive()

    async def _again(self, failure: HttpFailure) -> None:
        runtime = self._runtime
        runtime.asking -= self._answer is None
        runtime.note_load(failure, self._sent)
        await self._leave()
        if failure.kind is FailureKind.FILTERED:
            self.finish = MessageFinish(FinishReason.CONTENT_FILTER, usage=self._reader.usage())
            return
        seconds = runtime.retries.wait_after(failure, self._attempts)
        if seconds is None:
            raise runtime.failed(self._request, failure) from failure
        with Waiting() as waiting:
            try:
                await anyio.sleep(seconds)
            finally:
                waiting.over()
                self.waited += waiting.seconds

    # --- reading

    @property
    def _begun(self) -> bool:
        return bool(self._said)

    def _failed(self, failure: HttpFailure) -> EngineError:
        self._runtime.note_load(failure, self._sent)
        return self._runtime.failed(self._request, failure)

    async def _read(self) -> None:
        assert self._answer is not None
        chunk = await self._answer.read()
        if chunk is not None:
            self._take(chunk)
        elif not self._reader.ended:
            raise HttpFailure(FailureKind.CONNECTION, "the answer ended before the end of the turn")
        else:
            self._note_success()
            self.finish = self._reader.finish(self._runtime.context)
            self._count(self.finish)

    def _take(self, chunk: Mapping[str, Any]) -> None:
        try:
            pieces = list(self._reader.read(chunk))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            text = f"the answer cannot be read ({type(error).__name__}: {error}): {chunk!r:.200}"
            raise HttpFailure(FailureKind.GARBAGE, text) from error
        if pieces:
            self._note_success()
            self._said += len(pieces)
            self._runtime.sampled += len(pieces)
            self._pieces.extend(pieces)

    def _note_success(self) -> None:
        if not self._said:
            self._runtime.answered()

    def _count(self, finish: MessageFinish) -> None:
        counted = finish.usage.completion_tokens if finish.usage is not None else None
        self._runtime.sampled += max(0, (counted or 0) - self._said)

    # --- end

    async def __aexit__(self, *_: object) -> None:
        await self._close()
        if self.finish is None:
            self.finish = MessageFinish(FinishReason.ABORT, usage=self._reader.usage())

    async def _leave(self) -> None:
        """Close the connection and free the place; idempotent."""
        answer, self._answer = self._answer, None
        try:
            if answer is not None:
                self._runtime.asking -= 1
                await answer.close()
        finally:
            if self._inside:
                self._inside = False
                self._runtime.gate.leave(self._session, 1)

    async def _close(self) -> None:
        try:
            await self._leave()
        finally:
            if self._request.session is None:
                self._runtime.gate.close(self._session)
