"""The junction record: what was put between one sampled turn and the next prompt, and why."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Anchor", "Close", "Junction", "Result", "Seam"]


class Result(enum.StrEnum):
    """What became of the history."""

    APPENDED = "appended"
    """The prompt extends what was there, bit for bit."""
    FORKED = "forked"
    """A new segment was started."""
    REFUSED = "refused"
    """Neither was possible; the episode ends with `token_error`."""


class Anchor(enum.StrEnum):
    """What the bridge was attached after."""

    STOP = "stop"
    """The stop id that was sampled stands in the template's tail."""
    COMMON_PREFIX = "common_prefix"
    """The tail begins as it does without new messages."""
    NONE = "none"
    """There is nothing to attach it after: a cut turn, or a first prompt."""


class Close(enum.StrEnum):
    """Where the assistant turn's closing tokens came from."""

    SAMPLED = "sampled"
    """The model wrote them."""
    MASKED = "masked"
    """The bridge wrote them, with loss mask 0."""
    REPLACED = "replaced"
    """The sampled stop stands where the template's close would."""


class Seam(enum.StrEnum):
    """How it is known that the ids on both sides of the seam would not have merged."""

    SPECIAL = "special"
    """One neighbour is a control token, and no text merges with those."""
    VERIFIED = "verified"
    """Encoding the pieces equals encoding the whole."""
    UNVERIFIED = "unverified"
    """It is not known: the ids on both sides are right as text, and might have merged."""


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
