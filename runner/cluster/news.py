"""What the streams of a shared engine say, in the form in which it goes to who asked: many deltas as few arrays."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TypeAlias

from runner.engines.base import Delta, Finish
from runner.errors import DeltarunnerError

__all__ = ["Bulletin", "Ended", "News", "Outbox", "each_of"]


@dataclass(frozen=True, slots=True)
class Ended:
    """A stream was left."""

    rest: list[Delta]
    """What was drained while it was."""
    finish: Finish | None


News: TypeAlias = Delta | Ended | DeltarunnerError | None
"""What a stream says: a delta, its end, or why it failed; None once its request was let in."""


@dataclass(eq=False, slots=True)
class Deltas:
    """Deltas that say nothing but ids and log-probabilities, in the order in which they came.

    By columns, since such deltas go by thousands, and an object for each takes several times as long to send and read.
    """

    numbers: array[int] = field(default_factory=lambda: array("q"))
    """The stream of each delta, shape [deltas]."""
    counts: array[int] = field(default_factory=lambda: array("i"))
    """How many ids it has, shape [deltas]."""
    ids: array[int] = field(default_factory=lambda: array("i"))
    """The ids of all of them, one after the other, shape [ids]."""
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    """The log-probability of each id in nats, shape [ids]."""

    def add(self, number: int, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """One more."""
        self.numbers.append(number)
        self.counts.append(len(ids))
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)

    def __iter__(self) -> Iterator[tuple[int, Delta]]:
        ids, logprobs = self.ids.tolist(), self.logprobs.tolist()
        spans = pairwise(accumulate(self.counts, initial=0))
        for number, (start, end) in zip(self.numbers, spans, strict=True):
            yield number, Delta(ids[start:end], logprobs[start:end])


Bulletin: TypeAlias = list[tuple[int, News] | Deltas]
"""What many streams have said, each by its number, in order."""


def each_of(bulletin: Bulletin) -> Iterator[tuple[int, News]]:
    """What a bulletin says of each stream, in order."""
    for item in bulletin:
        if isinstance(item, Deltas):
            yield from item
        else:
            yield item


class Outbox:
    """What streams have said since it was last taken."""

    def __init__(self) -> None:
        self._bulletin: Bulletin = []

    def __bool__(self) -> bool:
        return bool(self._bulletin)

    def put(self, number: int, news: News) -> None:
        """A stream says something."""
        bulletin = self._bulletin
        if isinstance(news, Delta) and news.logprobs is not None and news.finish is None and news.top is None:
            if not bulletin or not isinstance(bulletin[-1], Deltas):
                bulletin.append(Deltas())
            last = bulletin[-1]
            assert isinstance(last, Deltas), "it was added above"
            last.add(number, news.token_ids, news.logprobs)
        else:
            bulletin.append((number, news))

    def take(self) -> Bulletin:
        """All of it; it is empty then."""
        taken, self._bulletin = self._bulletin, []
        return taken
