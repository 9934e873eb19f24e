"""The junction record: what was put between one sampled turn and the next prompt, and why."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Anchor", "Close", "Junction", "Result", "Seam"]


class Result(enum.StrEnum):
    """What became of the history."""

    APPENDED = "appended"  # the prompt extends what was there, bit for bit
    FORKED = "forked"  # a new segment was started
    REFUSED = "refused"  # neither; the episode ends with `token_error`


class Anchor(enum.StrEnum):
    """What the bridge was attached after."""

    STOP = "stop"  # the stop id that was sampled, found in the template's tail
    COMMON_PREFIX = "common_prefix"  # the tail without new messages
    NONE = "none"  # nothing: a cut turn, or a first prompt


class Close(enum.StrEnum):
    """Where the assistant turn's closing tokens came from."""

    SAMPLED = "sampled"  # the model wrote them
    MASKED = "masked"  # the bridge wrote them, loss mask 0
    REPLACED = "replaced"  # the sampled stop stands where the template's close would


class Seam(enum.StrEnum):
    """How it is known that the ids on both sides of the seam would not have merged."""

    SPECIAL = "special"  # one neighbour is a control token
    VERIFIED = "verified"  # encoding the pieces equals encoding the whole
    UNVERIFIED = "unverified"


@dataclass(frozen=True, slots=True)
class Junction:
    """One junction; each question has a field of its own, none is mixed with another."""

    result: Result
    """What became of the history."""
    anchor: Anchor
    """What the bridge is attached after."""
    close: Close
    """Where the turn's closing tokens came from."""
    seam: Seam
    """How the seam was proven."""
    inserted: int
    """How many ids were put in between, all with loss mask 0."""
    dropped: int = 0
    """How many sampled ids are not in the next prompt; why is in `cause`."""
    cause: str = ""
    """Why the new messages were not simply appended, or ""."""
