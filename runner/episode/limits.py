"""The limits of one episode: what its agents may still use, and how it ended once they may use no more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import anyio
import anyio.lowlevel

from runner.concurrency.clocks import Clock
from runner.engines.base import FinishReason
from runner.errors import ContextFull, EpisodeOver
from runner.options import Limits
from runner.trajectory import Outcome, Turn

__all__ = ["Ending", "EpisodeLimits"]

_OUTCOME_OF_CUT = {FinishReason.LENGTH: Outcome.TOKEN_LIMIT, FinishReason.CONTEXT: Outcome.CONTEXT_LIMIT}


@dataclass(frozen=True, slots=True)
class Ending:
    """How an episode ended."""

    outcome: Outcome
    """The outcome of all its trajectories."""
    limit: str = ""
    """The field of `Limits` that fired, or "max_tokens"."""
    agent: str = ""
    """The agent whose limit it was."""
    error: str = ""
    """What went wrong, for people."""
    permanent: bool = False
    """The engine failed and would fail again: playing the episode once more is in vain."""

    @classmethod
    def of_cut_turn(cls, turn: Turn, error: str = "") -> Ending | None:
        """The ending of an episode whose last turn was cut for its length; None where it was not."""
        outcome = _OUTCOME_OF_CUT.get(turn.finish)
        return None if outcome is None else cls(outcome, str(turn.stop), turn.agent, error)

    def __str__(self) -> str:
        whose = f" (agent {self.agent!r})" if self.agent else ""
        return self.error or f"{self.outcome.value}: {self.limit}{whose}"


class EpisodeLimits:
    """What the conversations of one episode share: turns, sampled tokens, and why there are no more of them.

    The first reason stays. Who asks for a turn after it has the whole play cancelled, so that nobody can swallow it by
    accident.
    """

    def __init__(self, configured: Limits) -> None:
        self.configured = configured
        """The limits that were given, every field set."""
        self.turns = 0
        """Turns of counted conversations so far."""
        self.tokens = 0
        """Tokens sampled so far in counted conversations."""
        self.clock = Clock(counts_sampling=True, over_hooks=True)
        """The clock over the play; whoever ends the play cancels the scope of this clock."""
        self.last_turn: Turn | None = None
        """The last turn of a counted conversation."""
        self.silenced_by: Ending | None = None
        """Why nobody may speak any more; how the episode ends is judged when its `rollout` is over."""
        self.ended_by_author = False
        """`Episode.end()` was called."""
        self.context_full: Ending | None = None
        """How the episode ends if nobody speaks any more: a prompt did not fit, and the author may still shorten it."""
        self._agents_without_room: set[str] = set()
        self._scoring = False

    def tokens_left(self) -> int | None:
        """Tokens that the counted conversations may still sample, or None for no limit."""
        return None if self.configured.tokens is None else self.configured.tokens - self.tokens

    async def let_speak(self, agent: str, *, counted: bool) -> None:
        """Let an agent take a turn, or raise.

        Raises:
            EpisodeOver: the episode has ended, or the agent's turn would go over a limit.
            RuntimeError: an agent that is trained or evaluated spoke in a reward.
        """
        if self._scoring:
            if counted:
                raise RuntimeError(
                    f"agent {agent!r} is what was played, and the play is over: what it says now would be no part of "
                    f"it. Ask another agent: self.episode.conversation('judge')."
                )
            return
        if self.silenced_by is not None:
            self.clock.scope.cancel()
            await anyio.lowlevel.checkpoint()
            # Outside of the play, as in `close()`, there was nothing left to cancel.
            raise EpisodeOver(str(self.silenced_by))
        if self.clock.fired:
            # The rollout swallowed the cancellation: it is cancelled again here, before a turn begins.
            await anyio.lowlevel.checkpoint()
            raise EpisodeOver("the episode's time is up")
        if self.ended_by_author:
            self.end_episode(Ending(Outcome.COMPLETED, error="the environment ended the episode"))
        if not counted:
            return
        if self.configured.turns is not None and self.turns >= self.configured.turns:
            self.end_episode(Ending(Outcome.TURN_LIMIT, "turns", agent))
        left = self.tokens_left()
        if left is not None and left <= 0:
            self.end_episode(Ending(Outcome.TOKEN_LIMIT, "tokens", agent))

    def count(self, turn: Turn, *, counted: bool) -> None:
        """Note a turn that was sampled; it is `counted` where the limits are meant for its conversation."""
        if counted:
            self.turns += 1
            self.tokens += turn.tokens
            self.last_turn = turn
        self.context_full = None

    def end_episode(self, ending: Ending) -> NoReturn:
        """Keep this ending, unless there is one already, and raise it to the rollout."""
        self.silenced_by = self.silenced_by or ending
        raise EpisodeOver(str(ending))

    def refuse_prompt(self, agent: str, error: str, *, counted: bool, prompt: int, context: int) -> NoReturn:
        """Raise that a prompt does not fit the context.

        The first time it ends nothing: the author may catch it and `replace` the history with a shorter one. The second
        time without a `replace` in between it is the episode's ending. The prompt has at least `prompt` ids.
        """
        ending = Ending(Outcome.CONTEXT_LIMIT, "context", agent, error)
        if not counted:
            ending = Ending(Outcome.ENV_ERROR, "context", agent, f"agent {agent!r}: {error}")
        if agent in self._agents_without_room:
            self.end_episode(ending)
        self._agents_without_room.add(agent)
        self.context_full = ending
        raise ContextFull(str(ending), prompt=prompt, context=context)

    def context_rewritten(self, agent: str) -> None:
        """Forget that the agent's prompt did not fit: the author replaced it."""
        self._agents_without_room.discard(agent)
        self.context_full = None

    def begin_scoring(self) -> None:
        """Let agents that are not trained speak again, however the play ended: they may judge it."""
        self._scoring = True
        self.silenced_by = None
        self._agents_without_room.clear()
