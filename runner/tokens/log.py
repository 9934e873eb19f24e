"""The token log: the record of every id of an episode's segment, and of the origin of each id."""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field

from runner.tokens.side_data import SamplingMasks, SideData
from runner.tokens.top_logprobs import TopLogprobs

__all__ = ["Source", "TokenLog", "VersionSpan"]


class Source(enum.IntEnum):
    """The origin of an id. Only SAMPLED ids are trained on."""

    PROMPT = 0
    """The first render of the segment."""
    BRIDGE = 1
    """Inserted by the template between two sampled turns, including new messages."""
    SAMPLED = 2
    """Sampled by the model in this segment."""
    RETRIED = 3
    """Sampled by the model and then withdrawn: the turn was sampled again in a later segment, or left out."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The weight version of the sampled ids from `start` to `end` (exclusive)."""

    version: str
    """The weight version."""
    start: int
    """Index of the first id."""
    end: int
    """Index after the last id."""


@dataclass(slots=True, repr=False)
class TokenLog:
    """Every id of one segment, in parallel arrays without an object per id."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    """The token ids, shape [length], int32."""
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    """The log-probability of each sampled id in nats; shape [length], float32.

    The value is NaN if the id was not sampled, or if the engine returned no log-probability.
    """
    sources: array[int] = field(default_factory=lambda: array("b"))
    """A `Source` for each id, shape [length], int8."""
    versions: list[VersionSpan] = field(default_factory=list)
    """The weight versions of the sampled ids, as spans in order."""
    top_logprobs: MutableMapping[int, TopLogprobs] = field(default_factory=dict)
    """The most likely ids of each turn that requested them, by the index of its first sampled id."""
    side_data: MutableMapping[int, SideData] = field(default_factory=dict)
    """Sampling masks and routed experts of turns that have them, by the index of the turn's first sampled id."""

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"<TokenLog of {len(self)} ids>"

    def append_prompt(self, ids: Iterable[int], source: Source) -> None:
        """Append ids that were not sampled: the first prompt or a bridge."""
        before = len(self.ids)  # `ids` may be any iterable, so the new ids are counted afterwards
        self.ids.extend(ids)
        added = len(self.ids) - before
        self.logprobs.extend(array("f", [math.nan]) * added)
        self.sources.extend(array("b", [source]) * added)

    def append_sampled(self, ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        """Append sampled ids with their log-probabilities; None if the engine returned no log-probabilities.

        Raises:
            ValueError: the numbers of ids and log-probabilities differ.
        """
        if logprobs is not None and len(logprobs) != len(ids):
            raise ValueError(f"{len(logprobs)} log-probabilities for {len(ids)} ids: give one for each id")
        self.ids.extend(ids)
        self.logprobs.extend(logprobs if logprobs is not None else array("f", [math.nan]) * len(ids))
        self.sources.frombytes(_SAMPLED * len(ids))

    def append_top(self, start: int, top: TopLogprobs) -> None:
        """Append the most likely ids for newly sampled ids of the turn that begins at `start`."""
        known = self.top_logprobs.get(start)
        if known is None:
            self.top_logprobs[start] = top.part(0, len(top))  # a copy, since the stored object grows
        else:
            known.extend(top)

    def append_side(self, start: int, side: SideData) -> None:
        """Append side data for newly sampled ids of the turn that begins at `start`.

        An engine returns the experts of the whole prompt with every turn. Only the experts of new positions are kept.
        """
        known = self.side_data.setdefault(start, SideData())
        if side.masks is not None:
            known.masks = known.masks or SamplingMasks()
            known.masks.extend(side.masks)
        if side.experts is not None:
            earlier = (each.experts for each in self.side_data.values() if each.experts is not None)
            known.experts = side.experts.part(max((each.end for each in earlier), default=0), len(self.ids))

    def cut(self, end: int) -> None:
        """Remove the ids from `end` on. The caller must ensure that no prompt or turn refers to them."""
        del self.ids[end:], self.logprobs[end:], self.sources[end:]
        self.versions = [span for span in self.versions if span.end <= end]
        for by_start in (self.top_logprobs, self.side_data):
            for start in [start for start in by_start if start >= end]:
                del by_start[start]

    def take_back(self, start: int, end: int | None = None) -> None:
        """Exclude the ids from `start` to `end` from training; they stay in the log.

        By default, `end` is the end of the log.
        """
        kept = self.sources[start:end].tobytes().translate(_TAKEN_BACK)
        self.sources[start:end] = array("b", kept)

    def stamp(self, spans: Iterable[VersionSpan], start: int) -> None:
        """Record weight versions. The indices of `spans` are relative to `start`, the index of the turn's first id.

        A span that ends after the last id of the log is shortened, and a span that begins after it is left out.
        """
        end = len(self.ids)
        self.versions.extend(
            VersionSpan(span.version, start + span.start, min(start + span.end, end))
            for span in spans
            if start + span.start < end
        )

    def mask(self) -> array[int]:
        """Return the loss mask: 1 for sampled ids that were not withdrawn, else 0; shape [length], int8."""
        return array("b", (self.sources.tobytes().translate(_MASK)))


# These tables are for `bytes.translate`, which processes the ids of a long episode without a Python loop.
_SAMPLED = bytes([Source.SAMPLED])
_TAKEN_BACK = bytes(Source.RETRIED if value == Source.SAMPLED else value for value in range(256))
_MASK = bytes(1 if value == Source.SAMPLED else 0 for value in range(256))
