"""What does not follow: where in a trajectory it is, and how it looks from both sides."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from runner.trajectory import Trajectory, Turn

__all__ = ["Comparison", "Difference", "Found", "Ids", "Kind", "Spoken", "first_other"]

AROUND = 12
"""Ids on each side of a difference that are shown."""

TEXT_AROUND = 40
"""The same in characters, where texts are compared."""

Ids: TypeAlias = Sequence[int]


class Kind(enum.StrEnum):
    """What it is that does not follow from the rest."""

    HEADER = "header"  # the run's configuration is not the one that it was begun with
    EPISODES = "episodes"  # the episodes of the file do not fit one another, or what the run says of them
    UNREADABLE = "unreadable"  # a row holds no trajectory
    LAYOUT = "layout"  # turns, ids, sources and messages do not fit one another
    FIRST_PROMPT = "first_prompt"  # the render of the first messages
    BRIDGE = "bridge"  # what stands between two turns
    JUNCTION = "junction"  # the record of how a prompt was made
    STOP = "stop"  # what ended a turn is not where it was sampled
    TURN = "turn"  # the sampled ids say something else than the turn
    MESSAGE = "message"  # or than the assistant message
    OUTCOME = "outcome"  # how it ended contradicts itself
    REWARD = "reward"  # it is not the weighted sum of its parts, or there should be none
    SEED = "seed"  # it does not follow from the run's
    LOGPROBS = "logprobs"  # there is not one for each sampled id, or it cannot be one
    VERSIONS = "versions"  # weight versions do not cover the sampled ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first thing of a trajectory that does not follow from its messages and its sampled ids.

    Attributes:
        kind: what it is.
        explanation: the same for people.
        episode: its id.
        agent: whose trajectory.
        attempt: of the episode.
        segment: of the trajectory, or None where it is in none.
        turn: the turn that it belongs to, as in `Turn.number`, or None.
        index: the first id that differs, as an index into the segment's ids, or None.
        stored: what the file holds around it, decoded.
        derived: what was made again.
        stored_ids: the ids behind `stored`, where ids were compared.
        derived_ids: those behind `derived`.
    """

    kind: Kind
    explanation: str
    episode: str = ""
    agent: str = ""
    attempt: int = 0
    segment: int | None = None
    turn: int | None = None
    index: int | None = None
    stored: str = ""
    derived: str = ""
    stored_ids: tuple[int, ...] = ()
    derived_ids: tuple[int, ...] = ()


class Found(Exception):
    """The first difference of a trajectory was found.

    Attributes:
        difference: what it is.
    """

    def __init__(self, difference: Difference) -> None:
        super().__init__(difference.explanation)
        self.difference = difference


@dataclass(frozen=True, slots=True)
class Spoken:
    """The text of a turn's ids, with those of the cut turns that it goes on with.

    Attributes:
        turn: the turn.
        begin: the first of the ids, as an index into the segment's.
        text: without the stop.
    """

    turn: Turn
    begin: int
    text: str


class Comparison:
    """Compares what is stored with what was derived, at one place of a trajectory after the other.

    Args:
        trajectory: what is looked at.
        decode: ids to text.

    Attributes:
        segment: where it is being looked at.
        turn: likewise, as in `Turn.number`; None where it is no turn.
    """

    def __init__(self, trajectory: Trajectory, decode: Callable[[Ids], str]) -> None:
        self.segment: int | None = None
        self.turn: int | None = None
        self._trajectory = trajectory
        self._decode = decode

    def differ(self, kind: Kind, explanation: str, **fields: Any) -> NoReturn:
        """Say that something differs here.

        Raises:
            Found: always.
        """
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
        raise Found(difference)

    def ids(self, kind: Kind, stored: Ids, derived: Ids, start: int) -> None:
        """Compare ids, both from `start` of the segment on.

        Raises:
            Found: they differ.
        """
        if list(stored) == list(derived):
            return
        at = first_other(stored, derived)
        window = slice(max(0, at - AROUND), at + AROUND)
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

    def text(self, kind: Kind, what: str, stored: str, derived: str, spoken: Spoken) -> None:
        """Compare text with what was read from sampled ids.

        Raises:
            Found: they differ.
        """
        if stored == derived:
            return
        at = first_other(stored, derived)
        window = slice(max(0, at - TEXT_AROUND), at + TEXT_AROUND)
        self.differ(
            kind,
            f"{what} is not what the sampled ids say, from character {at} on",
            index=self._index_of(derived, at, spoken),
            stored=stored[window],
            derived=derived[window],
        )

    def _index_of(self, part: str, at: int, spoken: Spoken) -> int:
        """The id that character `at` of `part` came from; where that is not seen, the first one of what was said."""
        offset = spoken.text.find(part) if part else -1
        if offset < 0:
            return spoken.begin
        ids, wanted = spoken.turn.log.ids, offset + at
        places = range(spoken.begin, spoken.turn.end)
        later = (index for index in places if len(self._decode(ids[spoken.begin : index + 1])) > wanted)
        return next(later, max(spoken.begin, spoken.turn.end - 1))

    def _named(self, ids: Ids, at: int) -> str:
        return f"id {ids[at]} ({self._decode(ids[at : at + 1])!r})" if at < len(ids) else "nothing more"


def first_other(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The first index at which two sequences differ; where one goes on with the other, the length of the shorter."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))
