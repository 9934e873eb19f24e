"""The states of an engine, the ways to pause it, and what an update of its weights did."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from runner.engines.proofs import ProofFigures, WeightProof
from runner.errors import BadOption

__all__ = ["SLEEP_TAGS", "CheckedUpdate", "EngineState", "PauseMode", "WeightUpdate"]

SLEEP_TAGS = ("weights", "kv_cache")
"""The parts of an engine's memory that can be woken one by one."""


class PauseMode(enum.StrEnum):
    """What becomes of the turns that are being sampled when an engine pauses."""

    WAIT = "wait"
    """The turns are sampled to their end first."""
    KEEP = "keep"
    """The turns stand still, and go on from where they were."""
    ABORT = "abort"
    """The turns are cut; a run samples them anew, from the same prompts."""

    @classmethod
    def of(cls, mode: PauseMode | str) -> PauseMode:
        """The mode of that name.

        Raises:
            BadOption: there is none.
        """
        if mode not in list(cls):
            raise BadOption(f"mode={mode!r}: give one of {', '.join(cls)}.")
        return cls(mode)


class EngineState(enum.StrEnum):
    """What an engine is doing for its trainer."""

    RUNNING = "running"
    """The engine samples."""
    PAUSED = "paused"
    """The engine stands still until `resume`."""
    UPDATING = "updating"
    """The engine's weights are being exchanged."""
    ASLEEP = "asleep"
    """The engine's memory was given up, or part of it."""


@dataclass(frozen=True, slots=True)
class CheckedUpdate:
    """New weights that an engine has compared with its model, and not loaded yet."""

    version: str
    """The version that they will have."""
    seconds: float
    """The seconds of the comparison."""
    weights: Any
    """The weights in the form in which the engine loads them."""
    proof: WeightProof | None = None
    """The proof that the engine has to pass with them before any turn goes on; None for none."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """What an update of the weights did, and how long each part of it took."""

    version: str
    """The version of the new weights, which sample from now on."""
    check_seconds: float
    """How long comparing the new weights with the model took; the engine went on meanwhile."""
    pause_seconds: float
    """How long it took until the engine stood still."""
    load_seconds: float
    """Seconds to load the weights, score their proof, stamp the version and drop the cached prompts."""
    proof: ProofFigures | None = None
    """The figures of the proof, of many engines those with the largest median; None where none was given."""
    moved: bool | None = None
    """False where no score of some ids moved: the same weights, a change that rounding removes, or one that did not
    arrive. None where the engine does not compare its scores, or a proof was given."""
