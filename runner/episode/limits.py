"""The limits of one episode: its turns and tokens so far, their maximum, and the ending if a limit is reached."""

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
    """The end of an episode: its outcome and the cause."""

    outcome: Outcome
    """The outcome of all trajectories of the episode."""
    limit: str = ""
    """The field of `Limits` that was reached, or "max_tokens"; "" if no limit was reached."""
    agent: str = ""
    """The agent that reached the limit; "" if no agent did."""
    error: str = ""
    """The text of the error, for people; "" without an error."""
    permanent: bool = False
    """True if the engine failed, and would fail again at another attempt."""

    @classmethod
    def of_cut_turn(cls, turn: Turn, error: str = "") -> Ending | None:
        """Return the ending of an episode whose last turn was cut by a limit on its length; None for any other turn."""
        outcome = _OUTCOME_OF_CUT.get(turn.finish)
        return None if outcome is None else cls(outcome, str(turn.stop), turn.agent, error)

    def __str__(self) -> str:
        whose = f" (agent {self.agent!r})" if self.agent else ""
        return self.error or f"{self.outcome.value}: {self.limit}{whose}"


class EpisodeLimits:
    """The limits of one episode, its turns and sampled tokens so far, and its ending.

    The limits on turns and tokens apply to counted conversations: those of trained or evaluated agents.

    The first ending is kept. If an agent requests a turn after the ending, the whole rollout is cancelled, so that no
    `except` swallows the ending by accident.
    """

    def __init__(self, configured: Limits) -> None:
        self.configured = configured
        """The configured limits, with every field set."""
        self.turns = 0
        """Number of turns of counted conversations so far."""
        self.tokens = 0
        """Number of tokens sampled so far in counted conversations."""
        self.clock = Clock(counts_sampling=True)
        """The clock of the rollout. Its scope is cancelled to end the rollout."""
        self.last_turn: Turn | None = None
        """The last turn of a counted conversation."""
        self.silenced_by: Ending | None = None
        """The ending that stops all further turns, or None. After `rollout`, `judge` may choose another ending."""
        self.ended_by_author = False
        """True once `Episode.end()` was called."""
        self.context_full: Ending | None = None
        """The ending after a prompt that did not fit. It applies unless another turn is taken, since the author may
        shorten the prompt.
        """
        self._agents_without_room: set[str] = set()
        self._scoring = False

    def tokens_left(self) -> int | None:
        """Return the number of tokens that the counted conversations may still sample; None for no limit."""
        return None if self.configured.tokens is None else self.configured.tokens - self.tokens

    async def check_may_take_turn(self, agent: str, *, counted: bool) -> None:
        """Check that an agent may take a turn. `counted` is True for a trained or evaluated agent.

        Raises:
            EpisodeOver: the episode has ended, or the turn would exceed a limit.
            RuntimeError: a trained or evaluated agent takes a turn in a reward.
        """
        if self._scoring:
            if counted:
                raise RuntimeError(
                    f"agent {agent!r} cannot take a turn in a reward: the rollout, to which its turns belong, is over. "
                    f"Ask another agent: self.episode.conversation('judge')."
                )
            return
        if self.silenced_by is not None:
            self.clock.scope.cancel()
            await anyio.lowlevel.checkpoint()
            # Outside of the rollout, as in `close()`, there is nothing left to cancel.
            raise EpisodeOver(str(self.silenced_by))
        if self.clock.fired:
            # The rollout swallowed the cancellation, so it is cancelled again.
            await anyio.lowlevel.checkpoint()
            raise EpisodeOver("the episode reached its time limit or was cancelled")
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
        """Count a sampled turn. `counted` is True if the limits apply to its conversation."""
        if counted:
            self.turns += 1
            self.tokens += turn.tokens
            self.last_turn = turn
        self.context_full = None

    def end_episode(self, ending: Ending) -> NoReturn:
        """Set the ending unless one is set, and raise `EpisodeOver` to the rollout."""
        self.silenced_by = self.silenced_by or ending
        raise EpisodeOver(str(ending))

    def refuse_prompt(self, agent: str, error: str, *, counted: bool, prompt: int, context: int) -> NoReturn:
        """Raise the error for a prompt of at least `prompt` ids that does not fit the context.

        After the first such prompt of an agent, the episode continues: the author may catch the error and `replace` the
        history with a shorter one. A second such prompt ends the episode, unless the history was changed in between
        (`context_rewritten`). The outcome is then CONTEXT_LIMIT if the agent is trained or evaluated (`counted`), else
        ENV_ERROR.

        Raises:
            ContextFull: this is the first such prompt.
            EpisodeOver: this is the second such prompt.
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
        """Clear the record of the agent's oversized prompt, since the agent's history was changed."""
        self._agents_without_room.discard(agent)
        self.context_full = None

    def begin_scoring(self) -> None:
        """Allow untrained agents to take turns again after any ending of the rollout, since they may be judges."""
        self._scoring = True
        self.silenced_by = None
        self._agents_without_room.clear()
