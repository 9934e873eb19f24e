"""Sampling of one turn into the token log, with a search for stop strings and for a stall of the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Self

from runner.concurrency.clocks import Clock, Progress, Waiting, WhileSampling, loop_clock
from runner.engines.base import Delta, DeltaStream, Engine, Finish, FinishReason, GenerationRequest
from runner.episode.turn_event_parser import TurnEventParser
from runner.errors import EngineError, EngineStalled
from runner.options import Sampling
from runner.tokens.decode import IncrementalDecoder
from runner.tokens.log import Source, TokenLog
from runner.tokens.side_data import SideData
from runner.tokens.tokenizer import Tokenizer
from runner.trajectory import Timings
from runner.turn_events import IdsSampled, TurnAdmitted, TurnProgress

__all__ = ["SampledTurn", "sample"]


@dataclass(slots=True)
class SampledTurn:
    """The result of one request, and the position of its ids in the log.

    The object is filled while the request streams, so that a cancellation loses nothing.
    """

    log: TokenLog
    start: int = 0
    """Index of the first sampled id."""
    end: int = 0
    """One past the index of the last sampled id."""
    admitted: bool = False
    """True once the engine admitted the request, so that the model saw the prompt."""
    finish: FinishReason = FinishReason.ABORT
    stop: int | str | None = None
    """The stop id or stop string that ended the turn, or the text of an error."""
    text: str | None = None
    """The text before the stop string; None if no stop string was found."""
    dropped: int = 0
    """Number of ids after a stop string, which are not in the log."""
    resampled: int = 0
    """Number of ids that were sampled before the engine cut the turn for its trainer. They are not in the log."""
    cached_tokens: int | None = None
    """Number of prompt ids that the prefix cache held; None if the engine does not report it."""
    error: EngineError | None = None
    """The error if the engine failed, or None."""
    timings: Timings = field(default_factory=Timings)
    """Seconds spent in the queue, until the first id, and on the later ids."""
    event_parser: TurnEventParser | None = None
    """Parser of the ids while they are sampled; None if no receiver needs events."""
    receive: Callable[[TurnProgress], None] | None = None
    """Function that receives the admission of the request and the sampled ids; None without a receiver."""
    handle: str = ""
    """Id of the turn for a client."""
    calls_before: int = 0

    def begin(self, ids: Sequence[int], source: Source) -> None:
        self.log.append_prompt(ids, source)
        self.start = self.end = len(self.log)
        self.admitted = True
        if self.receive is not None:
            self.receive(TurnAdmitted(self.handle, self.log.ids[:], self.calls_before))

    def keep(self, delta: Delta) -> None:
        self.log.append_sampled(delta.token_ids, delta.logprobs)
        if delta.top is not None:
            self.log.append_top(self.start, delta.top)
        if delta.side is not None:
            self.log.append_side(self.start, delta.side)
        self.end += len(delta.token_ids)
        if self.receive is not None:
            self.receive(IdsSampled(delta.token_ids, delta.logprobs, delta.top))
        if self.event_parser is not None:
            self.event_parser.feed(delta.token_ids)

    def fail(self, error: EngineError) -> None:
        self.error = error
        self.finish, self.stop = FinishReason.ERROR, str(error)

    def begin_again(self) -> None:
        """Drop the sampled ids and keep the prompt, since the engine cut the turn for its trainer."""
        self.resampled += self.end - self.start
        self.log.cut(self.start)
        self.end = self.start
        self.finish, self.stop, self.error = FinishReason.ABORT, None, None
        if self.event_parser is not None:
            self.event_parser.restart()

    def stopped(self, stops: StopStrings, delta: Delta, kept: int) -> None:
        """Keep the ids of `delta` up to the id that completed a stop string."""
        logprobs = delta.logprobs[:kept] if delta.logprobs is not None else None
        top = delta.top.part(0, kept) if delta.top is not None else None
        side = delta.side.part(0, kept) if delta.side is not None else None
        self.keep(Delta(delta.token_ids[:kept], logprobs, top=top, side=side))
        self.dropped = len(delta.token_ids) - kept
        self.stop, self.text = stops.found, stops.text

    def close(self, stream: DeltaStream) -> None:
        """Record the ids that arrived while the stream was being closed, and how the stream ended."""
        if not self.admitted:
            return
        for delta in stream.rest:
            if self.text is None:
                self.keep(delta)
            else:
                self.dropped += len(delta.token_ids)
                if delta.side is not None and delta.side.experts is not None:
                    self.log.append_side(self.start, SideData(experts=delta.side.experts))
        finish = stream.finish or Finish(FinishReason.ABORT)
        if finish.reason is FinishReason.ERROR and self.text is None:
            self.error = self.error or EngineError(f"the engine failed: {finish.stop}")
        self.cached_tokens = finish.cached_tokens
        # The versions may include ids after a stop string, which are not in the log; `stamp` leaves these ids out.
        self.log.stamp(finish.versions, self.start)
        if self.text is not None:
            self.finish = FinishReason.STOP
        elif self.error is not None:
            self.fail(self.error)
        else:
            self.finish, self.stop = finish.reason, finish.stop


class StopStrings:
    """A search for stop strings in the text of ids as they arrive. The work is proportional to the new ids.

    A stop string that is complete within the first `after` ids does not count.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], *, after: int = 0) -> None:
        self.text = ""
        self.found = ""
        self._after = after
        self._fed = 0
        self._decoder = IncrementalDecoder(tokenizer)
        self._stop = stop
        self._longest = max(map(len, stop))
        self._pieces: list[str] = []
        self._tail = ""

    @classmethod
    def of(cls, tokenizer: Tokenizer, sampling: Sampling) -> Self:
        return cls(tokenizer, sampling.stop, after=sampling.min_tokens)

    def feed(self, ids: Sequence[int]) -> int | None:
        """Return the number of `ids` that belong to the turn if one of them completed a stop string, else None."""
        for index, token_id in enumerate(ids):
            piece = self._decoder.feed([token_id])
            self._fed += 1
            if not piece:
                continue
            # A stop string may begin in earlier text, but ends in the new text.
            window, before = self._tail + piece, len(self._tail)
            self._pieces.append(piece)
            looked = self._stop if self._fed > self._after else ()
            hits = [
                (at, -len(stop), stop)
                for stop in looked
                if (at := window.find(stop, max(0, before - len(stop) + 1))) >= 0
            ]
            if hits:
                # The first stop string in the text counts; of several at the same position, the longest counts.
                at, _, self.found = min(hits)
                text = "".join(self._pieces)
                self.text = text[: len(text) - len(window) + at]
                return index + 1
            self._tail = window[-self._longest :]
        return None


async def sample(
    into: SampledTurn,
    engine: Engine,
    request: GenerationRequest,
    *,
    new_ids: Sequence[int],
    source: Source,
    tokenizer: Tokenizer,
    stall_seconds: float | None,
) -> None:
    """Append `new_ids` to the log once the engine has admitted `request`, and then the ids that it samples.

    All results are stored in `into`. A failure of the engine is also stored in `into`, and not raised.
    """
    cut = True
    with WhileSampling():
        while cut:
            stops = StopStrings.of(tokenizer, request.sampling) if request.sampling.stop else None
            cut = await _sample_once(into, engine, request, (new_ids, source), stops, stall_seconds)
            new_ids = ()  # the first try has put these ids into the log


async def _sample_once(
    into: SampledTurn,
    engine: Engine,
    request: GenerationRequest,
    new: tuple[Sequence[int], Source],
    stops: StopStrings | None,
    stall_seconds: float | None,
) -> bool:
    """Sample once. Return True if the engine cut the turn for its trainer, so that it must be sampled again."""
    stream = engine.stream(request)
    cuts = engine.cuts
    silence = Clock(stall_seconds, counts_sampling=True)
    ended = False
    try:
        with Waiting() as waiting:
            async with stream as deltas:
                waiting.over()
                into.timings.queued += waiting.seconds
                into.begin(*new)
                with silence, engine.pause_state.watched(), _shared(engine, silence):
                    await _read(into, deltas, stops, silence, engine.progress)
                ended = True
    except EngineError as error:
        into.error = error
    finally:
        if silence.fired:
            into.error = EngineStalled(f"{request.name}: the engine sent nothing for {silence.seconds:g} s")
        into.close(stream)
    aborted = ended and into.error is None and into.finish is FinishReason.ABORT
    if aborted and engine.cuts == cuts:  # without new cuts, sampling again could repeat without end
        into.fail(EngineError(f"{request.name}: the engine ended the request by itself"))
        return False
    if aborted:
        into.begin_again()
    return aborted


def _shared(engine: Engine, silence: Clock) -> AbstractContextManager[None]:
    """Return a block in which the progress of other requests also shows that the engine is not stalled."""
    return nullcontext() if engine.progress is None else engine.progress.watched(silence)


async def _read(
    into: SampledTurn, deltas: DeltaStream, stops: StopStrings | None, silence: Clock, progress: Progress | None
) -> None:
    patience, clock = math.inf if silence.seconds is None else silence.seconds, loop_clock()
    admitted = received = first = clock()
    async for delta in deltas:
        now = clock()
        if into.end == into.start:
            first = now
            into.timings.first_token = now - admitted
        if progress is not None:
            progress.note(now)
        # The deadline moves only once per eighth of the limit, not at every delta, since each move creates a timer.
        elif now - received > patience / 8:
            received = now
            silence.start(silence.seconds)
        kept = stops.feed(delta.token_ids) if stops is not None else None
        if kept is not None and stops is not None:
            into.stopped(stops, delta, kept)
            break
        into.keep(delta)
        into.timings.decode = now - first
