"""What does not follow: where in a trajectory it is, and how it looks from both sides."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from runner.tokens.token_diff import first_mismatch
from runner.trajectory import Trajectory, Turn

__all__ = ["Comparison", "Difference", "DifferenceFound", "Ids", "Kind", "SpokenText"]

CONTEXT_IDS = 12
"""Ids on each side of a difference that are shown."""

CONTEXT_CHARS = 40
"""The same in characters, where texts are compared."""

Ids: TypeAlias = Sequence[int]


class Kind(enum.StrEnum):
    """What it is that does not follow from the rest."""

    HEADER = "header"
    """The run's configuration is not the one that it was begun with."""
    EPISODES = "episodes"
    """The episodes of the file do not fit one another, or what the run says of them."""
    UNREADABLE = "unreadable"
    """A row holds no trajectory."""
    LAYOUT = "layout"
    """Turns, ids, sources and messages do not fit one another."""
    FIRST_PROMPT = "first_prompt"
    """A first prompt is not the render of its messages."""
    BRIDGE = "bridge"
    """What stands between two turns is not what the template puts there."""
    JUNCTION = "junction"
    """The record of how a prompt was made is not how it is made."""
    STOP = "stop"
    """What is said to have ended a turn is not where it was sampled."""
    TURN = "turn"
    """The sampled ids say something else than the turn."""
    MESSAGE = "message"
    """The sampled ids say something else than the assistant's message, or a message cannot be."""
    OUTCOME = "outcome"
    """How the episode ended contradicts itself."""
    REWARD = "reward"
    """The reward is not the weighted sum of its parts, or there should be none."""
    SEED = "seed"
    """A seed does not follow from the run's."""
    LOGPROBS = "logprobs"
    """A sampled id has no log-probability, or one that cannot be."""
    VERSIONS = "versions"
    """The weight versions do not cover the sampled ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first thing of a trajectory that does not follow from its messages and its sampled ids."""

    kind: Kind
    """What it is that does not follow."""
    explanation: str
    """The same for people."""
    episode: str = ""
    """The id of the episode; "" where it is in none."""
    agent: str = ""
    attempt: int = 0
    segment: int | None = None
    """The segment of the trajectory; None where the difference is in none."""
    turn: int | None = None
    """The turn that it belongs to, as in `Turn.number`, or None."""
    index: int | None = None
    """The first id that differs, as an index into the segment's ids, or None."""
    stored: str = ""
    """What the file holds around it, decoded."""
    derived: str = ""
    """What was made again, decoded."""
    stored_ids: tuple[int, ...] = ()
    """The ids behind `stored`, where ids were compared."""
    derived_ids: tuple[int, ...] = ()
    """The ids behind `derived`."""


class DifferenceFound(Exception):
    """Ends the examination of a trajectory, since what follows a first difference differs for its sake."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(difference.explanation)
        self.difference = difference
        """The difference that was found."""


@dataclass(frozen=True, slots=True)
class SpokenText:
    """The text of a turn's ids, with those of the cut turns that it goes on with."""

    turn: Turn
    begin: int
    """The first of the ids, as an index into the segment's."""
    text: str
    """What was said, without the stop."""


class Comparison:
    """Compares what is stored with what was derived, in one turn of a trajectory after the other.

    Each comparison raises `DifferenceFound` where the two differ.
    """

    def __init__(self, trajectory: Trajectory, decode: Callable[[Ids], str]) -> None:
        self.segment: int | None = None
        """The segment that is being looked at."""
        self.turn: int | None = None
        """The turn that is being looked at, as in `Turn.number`; None beside every turn."""
        self._trajectory = trajectory
        self._decode = decode

    def differ(self, kind: Kind, explanation: str, **fields: Any) -> NoReturn:
        """Raise `DifferenceFound`: something differs here."""
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
        """Compare ids, both from `start` of the segment on."""
        if list(stored) == list(derived):
            return
        at = first_mismatch(stored, derived)
        window = slice(max(0, at - CONTEXT_IDS), at + CONTEXT_IDS)
        one, other = (self._named(ids, at) for ids in (stored, derived))
        self.differ(
            kind,
            f"the file has {one} where {other} follows",
            index=start + at,
            stored=self._decode(stored[window]),
            derived=self._decode(derived[window]),
            stored_ids=tuple(stored[window]),
            derived_ids=tuple(derived[window]),
        )

    def text(self, kind: Kind, what: str, stored: str, derived: str, spoken: SpokenText) -> None:
        """Compare text with what was read from sampled ids."""
        if stored == derived:
            return
        at = first_mismatch(stored, derived)
        window = slice(max(0, at - CONTEXT_CHARS), at + CONTEXT_CHARS)
        self.differ(
            kind,
            f"{what} is not what the sampled ids say, from character {at} on",
            index=self._index_of(derived, at, spoken),
            stored=stored[window],
            derived=derived[window],
        )

    def _index_of(self, part: str, at: int, spoken: SpokenText) -> int:
        """The id that character `at` of `part` came from; where that is not seen, the first one of what was said."""
        offset = spoken.text.find(part) if part else -1
        if offset < 0:
            return spoken.begin
        ids, wanted = spoken.turn.log.ids, offset + at
        candidates = range(spoken.begin, spoken.turn.end)
        # Ids are decoded from the beginning each time: a character may be spread over several of them.
        later = (index for index in candidates if len(self._decode(ids[spoken.begin : index + 1])) > wanted)
        return next(later, max(spoken.begin, spoken.turn.end - 1))

    def _named(self, ids: Ids, at: int) -> str:
        return f"id {ids[at]} ({self._decode(ids[at : at + 1])!r})" if at < len(ids) else "nothing more"
