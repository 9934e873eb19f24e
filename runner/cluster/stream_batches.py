"""Batches of events of a shared engine's streams: many deltas as few arrays."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TypeAlias

from runner.engines.base import Delta, Finish
from runner.errors import DeltarunnerError

__all__ = ["Ended", "StreamBatch", "StreamBuffer", "StreamEvent", "each_of"]


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a stream."""

    rest: list[Delta]
    """The deltas that were drained at the end."""
    finish: Finish | None


StreamEvent: TypeAlias = Delta | Ended | DeltarunnerError | None
"""An event of a stream: a delta, its end, or its error; None once its request was admitted."""


@dataclass(eq=False, slots=True)
class Deltas:
    """Deltas with nothing but ids and log-probabilities, in their order.

    As columns: such deltas come by the thousand, and objects take several times as long to send and to read.
    """

    numbers: array[int] = field(default_factory=lambda: array("q"))
    """The stream of each delta, shape [deltas]."""
    counts: array[int] = field(default_factory=lambda: array("i"))
    """Number of ids of each delta, shape [deltas]."""
    ids: array[int] = field(default_factory=lambda: array("i"))
    """The ids of all deltas, shape [ids]."""
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    """The log-probability of each id in nats, shape [ids]."""

    def add(self, number: int, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append a delta."""
        self.numbers.append(number)
        self.counts.append(len(ids))
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)

    def __iter__(self) -> Iterator[tuple[int, Delta]]:
        ids, logprobs = self.ids.tolist(), self.logprobs.tolist()
        spans = pairwise(accumulate(self.counts, initial=0))
        for number, (start, end) in zip(self.numbers, spans, strict=True):
            yield number, Delta(ids[start:end], logprobs[start:end])


StreamBatch: TypeAlias = list[tuple[int, StreamEvent] | Deltas]
"""Events of many streams, each with the number of its stream, in order."""


def each_of(batch: StreamBatch) -> Iterator[tuple[int, StreamEvent]]:
    """Iterate over the events of a batch, in order."""
    for item in batch:
        if isinstance(item, Deltas):
            yield from item
        else:
            yield item


class StreamBuffer:
    """Events of streams since the last `take`."""

    def __init__(self) -> None:
        self._batch: StreamBatch = []

    def __bool__(self) -> bool:
        return bool(self._batch)

    def put(self, number: int, event: StreamEvent) -> None:
        """Append an event of a stream."""
        batch = self._batch
        if isinstance(event, Delta) and event.logprobs is not None and event.finish is None and event.top is None:
            if not batch or not isinstance(batch[-1], Deltas):
                batch.append(Deltas())
            last = batch[-1]
            assert isinstance(last, Deltas), "it was added above"
            last.add(number, event.token_ids, event.logprobs)
        else:
            batch.append((number, event))

    def take(self) -> StreamBatch:
        """Return all events, and clear the buffer."""
        taken, self._batch = self._batch, []
        return taken
