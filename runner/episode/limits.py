"""The allowance: what an episode may still use, and how it ended once it may use no more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import anyio
import anyio.lowlevel

from runner.concurrency.clocks import Clock
from runner.errors import EpisodeOver
from runner.options import Limits
from runner.trajectory import Outcome, Turn

__all__ = ["Ending", "EpisodeLimits"]


@dataclass(frozen=True, slots=True)
class Ending:
    """How an episode ended.

    Attributes:
        outcome: which way.
        limit: the field of `Limits` that fired.
        agent: whose limit it was.
        error: what went wrong.
        permanent: played again it would end the same, though the engine failed.
    """

    outcome: Outcome
    limit: str = ""
    agent: str = ""
    error: str = ""
    permanent: bool = False


class EpisodeLimits:
    """What the conversations of one episode share: turns, sampled ids, and the one ending.

    The first ending that is latched stays. `generate` after it cancels the play, so that nobody can swallow it by
    accident.

    Attributes:
        limits: every field set.
        turns: of the trained conversations.
        tokens: that those sampled.
        ending: how the episode ended, once it did.
        no_room: a context limit that was raised and not latched, and nobody spoke since.
        play: the clock over the play.
        ended_by_author: `Episode.end()` was called.
        last_turn: of the trained conversations.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.turns = 0
        self.tokens = 0
        self.ending: Ending | None = None
        self.play = Clock(counts_sampling=True)
        self.ended_by_author = False
        self.last_turn: Turn | None = None
        self.no_room: Ending | None = None
        self._refused: set[str] = set()  # agents whose context was full, and is as it was
        self._scoring = False

    def tokens_left(self) -> int | None:
        """Ids that the trained conversations may still sample, or None for no limit."""
        return None if self.limits.tokens is None else self.limits.tokens - self.tokens

    async def before_turn(self, agent: str, *, trained: bool) -> None:
        """Raise EpisodeOver if this agent may not speak now."""
        if self._scoring:
            self._refuse_trained(agent, trained=trained)
            return
        if self.ending is not None:
            self.play.scope.cancel()
            await anyio.lowlevel.checkpoint()
            raise EpisodeOver(self._text(self.ending))
        if self.ended_by_author:
            self.over(Ending(Outcome.COMPLETED, error="the environment ended the episode"))
        if not trained:
            return
        if self.limits.turns is not None and self.turns >= self.limits.turns:
            self.over(Ending(Outcome.TURN_LIMIT, "turns", agent))
        left = self.tokens_left()
        if left is not None and left <= 0:
            self.over(Ending(Outcome.TOKEN_LIMIT, "tokens", agent))

    def spend(self, turn: Turn, *, trained: bool) -> None:
        """Count a turn."""
        if trained:
            self.turns += 1
            self.tokens += turn.end - turn.start
            self.last_turn = turn
        self.no_room = None

    def latch(self, ending: Ending) -> None:
        """Keep this ending, unless there is one already."""
        self.ending = self.ending or ending

    def over(self, ending: Ending) -> NoReturn:
        """Latch the ending and raise it to the rollout."""
        self.latch(ending)
        raise EpisodeOver(self._text(ending))

    def context_full(self, agent: str, error: str, *, trained: bool) -> NoReturn:
        """No room in the context: raised at once, latched only at the second time without a `replace` between."""
        ending = Ending(Outcome.CONTEXT_LIMIT, "context", agent, error)
        if not trained:
            ending = Ending(Outcome.ENV_ERROR, "context", agent, f"agent {agent!r}: {error}")
        if agent in self._refused:
            self.over(ending)
        self._refused.add(agent)
        self.no_room = ending
        raise EpisodeOver(self._text(ending))

    def context_rewritten(self, agent: str) -> None:
        """The author replaced what was too long; it may be tried again."""
        self._refused.discard(agent)
        self.no_room = None

    def begin_scoring(self) -> None:
        """The play is over, however it ended: other agents may speak again, to judge it; trained ones may not."""
        self._scoring = True
        self.ending = None
        self._refused.clear()

    def _refuse_trained(self, agent: str, *, trained: bool) -> None:
        if trained:
            raise RuntimeError(
                f"agent {agent!r} is trained, and the play is over: what it says now would be no part of it. "
                f"Ask another agent: self.episode.conversation('judge')."
            )

    @staticmethod
    def _text(ending: Ending) -> str:
        whose = f" (agent {ending.agent!r})" if ending.agent else ""
        return ending.error or f"{ending.outcome.value}: {ending.limit}{whose}"
