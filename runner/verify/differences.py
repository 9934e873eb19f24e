"""Differences between stored and derived values: the place in a trajectory, and both values."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from runner.tokens.token_diff import first_mismatch
from runner.trajectory import Trajectory, Turn

__all__ = ["Comparison", "Difference", "DifferenceFound", "Ids", "Kind", "SpokenText"]

CONTEXT_IDS = 12
"""Number of ids shown on each side of a difference."""

CONTEXT_CHARS = 40
"""Number of characters shown on each side of a difference, for texts."""

Ids: TypeAlias = Sequence[int]


class Kind(enum.StrEnum):
    """Kind of a difference."""

    HEADER = "header"
    """The run's configuration differs from the configuration at the run's beginning."""
    EPISODES = "episodes"
    """An episode is missing or contradicts another one, or the summary differs from the rows."""
    UNREADABLE = "unreadable"
    """A row is not a trajectory."""
    LAYOUT = "layout"
    """Turns, ids, sources and messages do not fit together."""
    FIRST_PROMPT = "first_prompt"
    """A first prompt is not the render of its messages."""
    BRIDGE = "bridge"
    """The ids between two turns differ from the ids that the template inserts."""
    JUNCTION = "junction"
    """The record of how a prompt was made differs from the prompt."""
    STOP = "stop"
    """The stop of a turn contradicts its sampled ids or its sampling options."""
    TURN = "turn"
    """The text, the reasoning or the tool calls of a turn differ from the text of its sampled ids."""
    MESSAGE = "message"
    """An assistant message differs from the text of its sampled ids, or a message is invalid."""
    OUTCOME = "outcome"
    """The outcome of the episode contradicts itself."""
    REWARD = "reward"
    """The reward is not the weighted sum of its parts, or an episode has a reward although it was not scored."""
    SEED = "seed"
    """A seed does not follow from the seed of the run."""
    LOGPROBS = "logprobs"
    """A sampled id has no log-probability, or an impossible one."""
    VERSIONS = "versions"
    """The weight versions do not cover the sampled ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first contradiction found in a file or a trajectory: kind, place, stored value and derived value."""

    kind: Kind
    explanation: str
    episode: str = ""
    """The id of the episode; "" for a difference outside of an episode."""
    agent: str = ""
    attempt: int = 0
    segment: int | None = None
    """The segment of the trajectory; None for a difference outside of a segment."""
    turn: int | None = None
    """The turn, as in `Turn.number`; None for a difference outside of a turn."""
    index: int | None = None
    """The place of the difference, as an index into the segment's ids; None if the difference has no such place."""
    stored: str = ""
    """The stored content around the difference, as text."""
    derived: str = ""
    """The derived content around the difference, as text."""
    stored_ids: tuple[int, ...] = ()
    """The ids of `stored`; empty if texts were compared."""
    derived_ids: tuple[int, ...] = ()


class DifferenceFound(Exception):
    """The first difference of a trajectory. It ends the check, since later differences may only follow from it."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(difference.explanation)
        self.difference = difference


@dataclass(frozen=True, slots=True)
class SpokenText:
    """The text of a turn's ids, including the ids of cut turns that it continues."""

    turn: Turn
    begin: int
    """The index of the first id in the segment's ids."""
    text: str
    """The text without the stop."""


class Comparison:
    """Comparison of stored and derived values of a trajectory, turn by turn.

    Each comparison raises `DifferenceFound` if the two differ.
    """

    def __init__(self, trajectory: Trajectory, decode: Callable[[Ids], str]) -> None:
        self.segment: int | None = None
        """The segment that is being checked."""
        self.turn: int | None = None
        """The turn that is being checked, as in `Turn.number`; None outside turns."""
        self._trajectory = trajectory
        self._decode = decode

    def differ(self, kind: Kind, explanation: str, **fields: Any) -> NoReturn:
        """Raise `DifferenceFound` for this place."""
        trajectory = self._trajectory
        difference = Difference(
            kind=kind,
            explanation=explanation,
            episode=trajectory.id,
            agent=trajectory.agent,
            attempt=trajectory.attempt,
            segment=self.segment,
            turn=self.turn,
            **fields,
        )
        raise DifferenceFound(difference)

    def ids(self, kind: Kind, stored: Ids, derived: Ids, start: int) -> None:
        """Compare stored and derived ids that begin at index `start` of the segment."""
        if list(stored) == list(derived):
            return
        at = first_mismatch(stored, derived)
        window = slice(max(0, at - CONTEXT_IDS), at + CONTEXT_IDS)
        one, other = (self._named(ids, at) for ids in (stored, derived))
        self.differ(
            kind,
            f"the file has {one}, expected {other}",
            index=start + at,
            stored=self._decode(stored[window]),
            derived=self._decode(derived[window]),
            stored_ids=tuple(stored[window]),
            derived_ids=tuple(derived[window]),
        )

    def text(self, kind: Kind, what: str, stored: str, derived: str, spoken: SpokenText) -> None:
        """Compare stored text with the text of sampled ids."""
        if stored == derived:
            return
        at = first_mismatch(stored, derived)
        window = slice(max(0, at - CONTEXT_CHARS), at + CONTEXT_CHARS)
        self.differ(
            kind,
            f"{what} differs from the text of the sampled ids, from character {at} on",
            index=self._index_of(derived, at, spoken),
            stored=stored[window],
            derived=derived[window],
        )

    def _index_of(self, part: str, at: int, spoken: SpokenText) -> int:
        """Return the index of the id with character `at` of `part`; the first id if `part` is not in the text."""
        offset = spoken.text.find(part) if part else -1
        if offset < 0:
            return spoken.begin
        ids, wanted = spoken.turn.log.ids, offset + at
        candidates = range(spoken.begin, spoken.turn.end)
        # Ids are decoded from the beginning each time, since several ids may form one character.
        later = (index for index in candidates if len(self._decode(ids[spoken.begin : index + 1])) > wanted)
        return next(later, max(spoken.begin, spoken.turn.end - 1))

    def _named(self, ids: Ids, at: int) -> str:
        return f"id {ids[at]} ({self._decode(ids[at : at + 1])!r})" if at < len(ids) else "nothing more"
