"""The most likely ids of some positions with their log-probabilities, in flat arrays without an object per id."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["TopLogprobs"]


@dataclass(slots=True, repr=False)
class TopLogprobs:
    """The `count` most likely ids of each position, the most likely first."""

    count: int
    """Number of ids per position, at least 1."""
    ids: array[int] = field(default_factory=lambda: array("i"))
    """The ids, one position after the other, shape [positions * count], int32."""
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    """The log-probability of each id in nats, float32; minus infinity for an id that could not be sampled."""

    def __len__(self) -> int:
        return len(self.ids) // self.count

    def __repr__(self) -> str:
        return f"<TopLogprobs of {len(self)} positions, {self.count} of each>"

    @classmethod
    def of(cls, rows: Sequence[Mapping[int, float]], count: int) -> Self:
        """Return the `count` most likely ids of each row, which has the log-probabilities of one position by id."""
        top = cls(count)
        for row in rows:
            most_likely = sorted(row.items(), key=lambda item: -item[1])[:count]
            top.ids.extend(token_id for token_id, _ in most_likely)
            top.logprobs.extend(logprob for _, logprob in most_likely)
        return top

    def extend(self, other: TopLogprobs) -> None:
        """Append another `TopLogprobs` with the same `count`."""
        self.ids.extend(other.ids)
        self.logprobs.extend(other.logprobs)

    def part(self, start: int, end: int) -> TopLogprobs:
        """Return a copy of the positions `start` to `end` (exclusive)."""
        some = slice(start * self.count, end * self.count)
        return TopLogprobs(self.count, self.ids[some], self.logprobs[some])

    def narrowed(self, count: int) -> TopLogprobs:
        """Return a copy with only the `count` most likely ids of each position."""
        import numpy as np

        ids, logprobs = self.id_rows()[:, :count], self.logprob_rows()[:, :count]
        return TopLogprobs(count, array("i", np.ravel(ids).tolist()), array("f", np.ravel(logprobs).tolist()))

    def id_rows(self) -> NDArray[np.int32]:
        """Return a copy of the ids, shape [positions, count], int32."""
        import numpy as np  # imported here, since most users read no such arrays

        return np.array(self.ids, dtype=np.int32).reshape(-1, self.count)

    def logprob_rows(self) -> NDArray[np.float32]:
        """Return a copy of the log-probabilities, shape [positions, count], float32."""
        import numpy as np

        return np.array(self.logprobs, dtype=np.float32).reshape(-1, self.count)
