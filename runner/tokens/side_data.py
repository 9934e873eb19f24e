"""Side data of sampled ids: the ids that could be sampled at each position, and the experts that computed the ids."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["RoutedExperts", "SamplingMasks", "SideData"]


@dataclass(slots=True, repr=False)
class SamplingMasks:
    """The ids that could be sampled at each position, after top-k, top-p, min-p and a grammar."""

    counts: array[int] = field(default_factory=lambda: array("i"))
    """The number of ids at each position, shape [positions], int32."""
    ids: array[int] = field(default_factory=lambda: array("i"))
    """The ids, one position after the other, int32."""

    def __len__(self) -> int:
        return len(self.counts)

    def __repr__(self) -> str:
        return f"<SamplingMasks of {len(self)} positions, {len(self.ids)} ids>"

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> Self:
        """Return the masks of positions, given the ids of each position."""
        masks = cls()
        for row in rows:
            masks.counts.append(len(row))
            masks.ids.extend(row)
        return masks

    def extend(self, other: SamplingMasks) -> None:
        """Append the positions of `other`."""
        self.counts.extend(other.counts)
        self.ids.extend(other.ids)

    def part(self, start: int, end: int) -> SamplingMasks:
        """Return a copy of the masks of positions `start` to `end` (exclusive)."""
        before = sum(self.counts[:start])
        counts = self.counts[start:end]
        return SamplingMasks(counts, self.ids[before : before + sum(counts)])

    def rows(self) -> list[list[int]]:
        """Return the ids of each position."""
        ends = [0, *accumulate(self.counts)]
        return [self.ids[start:end].tolist() for start, end in pairwise(ends)]


@dataclass(slots=True, repr=False)
class RoutedExperts:
    """The experts that computed some positions of a prompt and its turn, in each layer with experts.

    The last sampled id of a turn was never computed, so it has no experts.
    """

    start: int
    """The index of the first position, 0 for the first id of the prompt."""
    layers: int
    """The number of layers with experts."""
    top: int
    """The number of experts for each id in a layer."""
    experts: array[int] = field(default_factory=lambda: array("h"))
    """The numbers of the experts, shape [positions * layers * top], int16."""

    def __len__(self) -> int:
        return len(self.experts) // (self.layers * self.top)

    def __repr__(self) -> str:
        return f"<RoutedExperts of positions {self.start} to {self.end}, {self.layers} layers, {self.top} of each>"

    @property
    def end(self) -> int:
        """The index after the last position."""
        return self.start + len(self)

    @classmethod
    def of(cls, values: NDArray[np.integer], start: int = 0) -> Self:
        """Return the experts of an array of shape [positions, layers, top].

        Raises:
            ValueError: the array has another shape, or a number below -1 or above 32767.
        """
        import numpy as np  # imported here, since most users have no such data

        if values.ndim != 3 or not values.shape[1] * values.shape[2]:
            raise ValueError(
                f"routed experts of shape {values.shape}: give the shape [positions, layers, experts of each id]"
            )
        if values.size and not -1 <= int(values.min()) <= int(values.max()) < 1 << 15:
            raise ValueError(f"routed experts from {values.min()} to {values.max()}: give numbers from -1 to 32767")
        experts = array("h")
        experts.frombytes(np.ascontiguousarray(values, dtype=np.int16).tobytes())
        return cls(start, values.shape[1], values.shape[2], experts)

    def part(self, start: int, end: int) -> RoutedExperts:
        """Return a copy of the experts of positions `start` to `end` (exclusive), as far as these positions exist."""
        first, width = max(start, self.start), self.layers * self.top
        some = slice((first - self.start) * width, max(0, min(end, self.end) - self.start) * width)
        return replace(self, start=first, experts=self.experts[some])

    def numbers(self) -> NDArray[np.int16]:
        """Return a copy of the numbers of the experts, shape [positions, layers, top], int16."""
        import numpy as np

        return np.array(self.experts, dtype=np.int16).reshape(-1, self.layers, self.top)


@dataclass(slots=True)
class SideData:
    """Sampling masks and routed experts of a delta or of a turn. An engine returns them only if it is configured to."""

    masks: SamplingMasks | None = None
    """The ids that could be sampled at the position of each sampled id; None if the engine did not return them."""
    experts: RoutedExperts | None = None
    """The experts of the positions of prompt and turn, set at a turn's end; None if the engine did not return them."""

    def part(self, start: int, end: int) -> SideData:
        """Return the masks of the sampled ids `start` to `end` (exclusive), and the experts of all positions."""
        return SideData(None if self.masks is None else self.masks.part(start, end), self.experts)
