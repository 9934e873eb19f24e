"""Record of a junction: how a sampled turn was joined with the messages of the next prompt."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Anchor", "Close", "Junction", "Result", "Seam"]


class Result(enum.StrEnum):
    """The effect of new messages on the segment."""

    APPENDED = "appended"
    """The prompt extends the previous ids, bit for bit."""
    FORKED = "forked"
    """A new segment was started."""
    REFUSED = "refused"
    """Neither an append nor a fork was possible; the episode ends with `token_error`."""


class Anchor(enum.StrEnum):
    """The place in the template's tail (the text after the turn's words) after which the bridge begins."""

    STOP = "stop"
    """The sampled stop id; or the template's close, if the model sampled this close before another stop."""
    COMMON_PREFIX = "common_prefix"
    """The end of the common prefix of the tail and a tail without new messages.

    Junctions whose whole history was rendered again also have this value.
    """
    NONE = "none"
    """There is no anchor, since the turn was cut, or since the prompt begins a new segment."""


class Close(enum.StrEnum):
    """The origin of the assistant turn's closing tokens."""

    SAMPLED = "sampled"
    """The model sampled the closing tokens."""
    MASKED = "masked"
    """The template's closing tokens were added, with loss mask 0."""
    REPLACED = "replaced"
    """The sampled stop replaces the template's close."""


class Seam(enum.StrEnum):
    """The proof that the ids on both sides of the seam would not have merged in one encoding."""

    SPECIAL = "special"
    """A neighbour of the seam is a control token, which never merges with text."""
    VERIFIED = "verified"
    """The texts of both sides, encoded together, have the same ids as encoded separately.

    Prompts that were encoded as a whole also have this value.
    """
    UNVERIFIED = "unverified"
    """There is no proof: the ids on both sides are correct as text, but might have merged."""


@dataclass(frozen=True, slots=True)
class Junction:
    """The record of the ids between a sampled turn and the next turn: their number, and how they were found."""

    result: Result
    """The effect of the new messages on the segment."""
    anchor: Anchor
    """The place in the template's tail after which the bridge begins."""
    close: Close
    """The origin of the turn's closing tokens."""
    seam: Seam
    """The proof that the ids at the seam would not have merged."""
    inserted: int
    """Number of ids inserted, all with loss mask 0."""
    dropped: int = 0
    """Number of sampled ids that the next prompt lacks; `cause` has the reason."""
    cause: str = ""
    """The reason why the new messages were not simply appended, or ""."""
