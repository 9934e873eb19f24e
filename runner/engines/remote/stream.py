"""Deltas of one request to a server; leaving the block closes the connection, and the server ends the request."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace

import anyio
import orjson

from runner.engines.base import Delta, Finish, FinishReason, GenerationRequest, Session
from runner.engines.http_engine import RetriedStream
from runner.engines.http_retries import FailureKind, HttpFailure
from runner.engines.remote.dialect import Call, Piece, PieceReader
from runner.engines.remote.runtime import RemoteRuntime
from runner.engines.remote.server import Answer
from runner.engines.stream import GatedStream
from runner.errors import EngineError
from runner.tokens.log import VersionSpan
from runner.tokens.top_logprobs import TopLogprobs

__all__ = ["DONE", "EventReader", "RemoteStream"]


DONE = b"[DONE]"
"""Data of the last event of a stream."""

_MAX_LINE_BYTES = 64 << 20  # maximum length of an unfinished line


class EventReader:
    """Parser of server-sent events, which returns the data of each event when its line is complete.

    Supported servers write one data line per event, so lines are not joined. Comments, which keep a connection alive,
    and other fields are skipped.
    """

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the data of the events whose lines end in these bytes.

        Raises:
            ValueError: a line is too long.
        """
        *lines, self._open = (self._open + data).split(b"\n")
        if len(self._open) > _MAX_LINE_BYTES:
            raise ValueError(f"a line of more than {_MAX_LINE_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


_MAX_DATA_CHARS = 200  # characters of unreadable data that an error shows
_END_SECONDS = 1.0
"""Seconds to wait for the rest of an answer after its last event, so that its connection can be reused."""


class RemoteStream(RetriedStream[Delta, Finish], GatedStream[RemoteRuntime, Session]):
    """Deltas of one request from the answer of a server.

    Args:
        runtime: runtime of the engine.
        request: the request.
        exact: True if the server's log-probabilities are of the sampling distribution; otherwise they are dropped.
    """

    def __init__(self, runtime: RemoteRuntime, request: GenerationRequest, *, exact: bool) -> None:
        super().__init__(runtime, request, request.session or Session())
        self._exact = exact
        self._answer: Answer | None = None
        self._call: Call | None = None
        self._attempts = 0
        self._sending = False
        self._last_version = ""
        self._events = EventReader()
        self._reader: PieceReader
        self._pieces: deque[Delta] = deque()
        self._last: Piece | None = None
        """Piece with the finish reason. It is held back until the end of the answer, since the usage may follow."""
        self._cached_tokens: int | None = None

    @property
    def sent_all(self) -> bool:
        """True once the whole answer arrived or the connection failed. Parts of the answer may be unread.

        True also while no request is open, as in the wait before a retry.
        """
        if self.finish is not None or self._answer is None:
            return not self._sending
        return self._answer.arrived

    def stamp(self, version: str) -> None:
        """Mark later ids with `version`, unless the server reports versions for this request."""
        if not self._last_version:
            self._stamps.mark(version, self.sent)

    # --- begin

    async def _begin(self) -> None:
        self._call = self._runtime.call(self.request, self._adapter)
        await self._open()

    async def _open(self) -> None:
        assert self._call is not None
        while True:
            self._attempts += 1
            await self._runtime.wait_until_resumed()  # a retry must not begin while the server is paused
            self._sending = True
            try:
                self._answer = await self._runtime.server.open(self._call)
            except HttpFailure as failure:
                self._sending = False
                await self._again(failure)
            else:
                self._events = EventReader()
                self._reader = self._runtime.dialect.reader(self.request)
                return
            finally:
                self._sending = False

    async def _again(self, failure: HttpFailure) -> None:
        self._drop()
        if not await self._runtime.wait_to_retry(failure, self._attempts):
            raise self._failed(failure) from failure

    def _failed(self, failure: HttpFailure) -> EngineError:
        error = self._runtime.failed(self.request, failure)
        self.finish = Finish(FinishReason.ERROR, stop=str(error), versions=self._versions(None))
        return error

    # --- reading

    @property
    def _begun(self) -> bool:
        return bool(self.sent)

    async def _read(self) -> None:
        assert self._answer is not None
        data = await self._answer.read()
        if not data:
            self._end()
            return
        self._take(data)
        if self._last is not None:
            await self._read_the_end(self._answer)

    async def _read_the_end(self, answer: Answer) -> None:
        with anyio.move_on_after(_END_SECONDS):
            try:
                while data := await answer.read():
                    self._take(data)
            except HttpFailure:  # the turn was complete before the failure
                pass
        self._end()

    def _take(self, data: bytes) -> None:
        """Convert received bytes to deltas.

        Raises:
            HttpFailure: the server reports a failure, or the data cannot be read.
        """
        try:
            for event in self._events.feed(data):
                if event != DONE:
                    self._take_event(event)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
            errors = self._runtime.server.errors
            said = errors.masked(data.decode(errors="replace"))[-_MAX_DATA_CHARS:]
            problem = errors.short(f"{type(error).__name__}: {error}")
            raise HttpFailure(FailureKind.GARBAGE, f"the answer cannot be read ({problem}): {said}") from error

    def _take_event(self, event: bytes) -> None:
        chunk = orjson.loads(event)
        if not isinstance(chunk, Mapping):
            raise TypeError("an event that is not an object")
        if "error" in chunk:
            raise self._runtime.server.failure_in(chunk["error"])
        piece = self._reader.read(chunk)
        if piece.cached_tokens is not None:
            self._cached_tokens = piece.cached_tokens
        if piece.version is not None:
            self._note(piece.version)
        if piece.reason is not None:
            self._last = piece
        elif piece.ids:
            self._pieces.append(self._delta(piece))

    def _note(self, version: str) -> None:
        if version != self._last_version:
            self._last_version = version
            self._runtime.note_version(version)
            self._stamps.mark(version, self.sent)

    def _delta(self, piece: Piece, finish: Finish | None = None) -> Delta:
        ids = array("i", piece.ids)
        if piece.logprobs is not None and len(piece.logprobs) != len(ids):
            raise ValueError(f"{len(piece.logprobs)} log-probabilities for {len(ids)} ids")
        if not self.sent and ids:
            self._runtime.retries.succeeded()
        self.sent += len(ids)
        self._runtime.sampled += len(ids)
        masks = None if piece.side is None else piece.side.masks
        if masks is not None and len(masks) != len(ids):
            raise ValueError(f"{len(masks)} sampling masks for {len(ids)} ids")
        logprobs = piece.logprobs if self._exact or piece.processed else None
        return Delta(ids, logprobs, finish, piece.top, piece.side)

    # --- end

    def _end(self) -> None:
        """Finish the turn at the end of the answer.

        Raises:
            HttpFailure: the answer ended before the end of the turn.
        """
        last = self._last
        if last is None:
            raise HttpFailure(FailureKind.CONNECTION, "the answer ended before the end of the turn")
        delta = self._delta(last)
        stop = last.stop
        if last.reason is FinishReason.STOP and stop is None and len(delta.token_ids):
            stop = delta.token_ids[-1]
        self.finish = Finish(last.reason or FinishReason.ERROR, stop, self._versions(last), self._cached_tokens)
        self._pieces.append(replace(delta, finish=self.finish))

    def _versions(self, last: Piece | None) -> tuple[VersionSpan, ...]:
        """Return the weight versions of the ids: as the server reports them, otherwise as the engine recorded them."""
        if last is None or last.versions is None:
            return self._stamps.spans(self.sent)
        for span in last.versions:
            self._runtime.note_version(span.version)
        return tuple(VersionSpan(self._stamps.named(span.version), span.start, span.end) for span in last.versions)

    async def __aexit__(self, *_: object) -> None:
        if not self._inside:
            return
        try:
            self._drain()
        finally:
            self._drop()
            self._leave()

    def _drain(self) -> None:
        """Put unread deltas into `rest`, and cut an unfinished turn."""
        if self.finish is None and self._answer is not None:
            try:
                self._take(self._answer.unread())
                if self._last is not None:
                    self._end()
            except HttpFailure as failure:
                self._failed(failure)
        self.rest.extend(self._pieces)
        self._pieces.clear()
        if self.finish is None:
            self.finish = Finish(FinishReason.ABORT, versions=self._versions(None), cached_tokens=self._cached_tokens)
            count = self.request.sampling.logprobs
            nothing = Delta((), () if self._exact else None, self.finish, TopLogprobs(count) if count else None)
            self.rest.append(nothing)

    def _drop(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = None
