"""Side data of scripted replies: sampling masks (from the reply, or synthetic) and synthetic routed experts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from runner.engines.base import GenerationRequest
from runner.errors import BadOption, RequestRejected
from runner.tokens.side_data import RoutedExperts, SamplingMasks, SideData

__all__ = ["SyntheticSideData"]

MAX_SYNTHETIC_IDS: Final = 4
"""The largest number of ids in a synthetic mask."""

EXPERT_COUNT: Final = 64


@dataclass(frozen=True, slots=True)
class SyntheticSideData:
    """The side data that a scripted engine returns.

    Raises:
        BadOption: `experts` is not two whole numbers above 0.
    """

    masks: bool = False
    """True to return sampling masks."""
    experts: tuple[int, int] | None = None
    """Number of layers with experts, and number of experts per id and layer; None to return no experts."""

    def __post_init__(self) -> None:
        if self.experts is not None and (
            len(self.experts) != 2 or any(type(each) is not int or each < 1 for each in self.experts)
        ):
            raise BadOption(f"ScriptedEngine(routed_experts={self.experts!r:.60}): give (layers, experts of each id).")

    def of(
        self,
        request: GenerationRequest,
        ids: Sequence[int],
        given: SamplingMasks | Sequence[Sequence[int]] | None,
        vocabulary: int,
    ) -> SideData | None:
        """Return the side data of a reply with these ids; None if it has neither masks nor experts.

        Raises:
            RequestRejected: a mask of the reply lacks its sampled id.
        """
        masks = self._masks(request, ids, given, vocabulary) if self.masks else None
        experts = None if self.experts is None else _experts([*request.prompt, *ids][:-1], *self.experts)
        return None if masks is None and experts is None else SideData(masks, experts)

    def _masks(
        self,
        request: GenerationRequest,
        ids: Sequence[int],
        given: SamplingMasks | Sequence[Sequence[int]] | None,
        vocabulary: int,
    ) -> SamplingMasks | None:
        sampling = request.sampling
        if given is not None:
            rows = given.rows() if isinstance(given, SamplingMasks) else [list(row) for row in given]
            rows += [[token_id] for token_id in ids[len(rows) :]]  # an appended stop id has no mask of its own
            for token_id, row in zip(ids, rows, strict=False):
                if token_id not in row:
                    raise RequestRejected(
                        f"{request.name}: a sampling mask of the reply lacks its sampled id {token_id}: add the id"
                    )
            return SamplingMasks.of(rows[: len(ids)])
        if not sampling.temperature or (sampling.top_p == 1 and not sampling.top_k and not sampling.min_p):
            return None
        count = min(sampling.top_k or MAX_SYNTHETIC_IDS, MAX_SYNTHETIC_IDS, vocabulary)
        return SamplingMasks.of([(token_id + n) % vocabulary for n in range(count)] for token_id in ids)


def _experts(ids: Sequence[int], layers: int, top: int) -> RoutedExperts:
    shifts = [7 * layer + rank for layer in range(layers) for rank in range(top)]
    numbers = ((token_id + shift) % EXPERT_COUNT for token_id in ids for shift in shifts)
    return RoutedExperts(0, layers, top, array("h", numbers))
