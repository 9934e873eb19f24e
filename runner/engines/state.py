"""States of an engine, modes of a pause, and the result of a weight update."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from runner.engines.proofs import ProofFigures, WeightProof
from runner.errors import BadOption

__all__ = ["NOT_RUNNING", "SLEEP_TAGS", "CheckedUpdate", "EngineState", "PauseMode", "WeightUpdate"]

NOT_RUNNING = "the engine is not running: use it as `async with engine`, or give it to a run."
"""Error text of an engine that was not entered, or was left."""

SLEEP_TAGS = ("weights", "kv_cache")
"""Parts of an engine's memory that can be woken separately."""


class PauseMode(enum.StrEnum):
    """Handling of turns that are being sampled when an engine pauses."""

    WAIT = "wait"
    """The pause waits for the end of the turns."""
    KEEP = "keep"
    """The turns are paused, and continue later from the same id."""
    ABORT = "abort"
    """The turns are cut; a run samples them again from the same prompts."""

    @classmethod
    def of(cls, mode: PauseMode | str) -> PauseMode:
        """Return the mode of that name.

        Raises:
            BadOption: the name is unknown.
        """
        if mode not in list(cls):
            raise BadOption(f"mode={mode!r}: give one of {', '.join(cls)}.")
        return cls(mode)


class EngineState(enum.StrEnum):
    """State of an engine."""

    RUNNING = "running"
    """The engine samples."""
    PAUSED = "paused"
    """The engine is paused until `resume`."""
    UPDATING = "updating"
    """The weights are being exchanged."""
    ASLEEP = "asleep"
    """All or a part of the memory is released."""


@dataclass(frozen=True, slots=True)
class CheckedUpdate:
    """New weights that were compared with the model and are not loaded yet."""

    version: str
    seconds: float
    """Seconds of the comparison."""
    weights: Any
    """Weights in the engine's form for loading."""
    proof: WeightProof | None = None
    """Proof that is scored before any turn continues; None without a proof."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Result of a weight update, with the time of each part."""

    version: str
    """Version of the new weights. Ids that are sampled until the next update record this version."""
    check_seconds: float
    """Seconds of the comparison with the model, during which the engine continues to sample."""
    pause_seconds: float
    """Seconds until the engine was paused."""
    load_seconds: float
    """Seconds to load the weights, score their proof, stamp the version and drop the cached prompts."""
    proof: ProofFigures | None = None
    """Figures of the proof; with several engines, the figures with the largest median. None without a proof, or if the
    KV cache is asleep: `wake` then scores the proof.
    """
    moved: bool | None = None
    """True if scores changed in every compared pass. False if all scores of a pass stayed equal: the weights are the
    same, the change is below rounding, or the change did not arrive. Each data-parallel rank has its own passes. None
    if no scores were compared.
    """
