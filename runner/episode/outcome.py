"""The choice of an episode's outcome: the most specific cause comes first."""

from __future__ import annotations

from runner.concurrency.user_code import TooSlow, describe_error
from runner.episode.key import MAIN, EpisodeKey
from runner.episode.limits import Ending
from runner.episode.shared import RunShared
from runner.episode.state import EpisodeState
from runner.errors import EpisodeOver
from runner.trajectory import Outcome, Trajectory

__all__ = ["failure", "judge", "silent"]


def judge(episode: EpisodeState, error: BaseException | None) -> Ending:
    """Return the ending of an episode that was not cut from outside.

    `error` is the error that the rollout raised, or None. A limit that was reached takes precedence over an error that
    the author raised later.
    """
    limits, abandoned = episode.limits, episode.author_code.abandoned
    # An abandoned thread may still change the state that the rewards would read.
    if abandoned:
        text = f"{abandoned} did not return in time; its thread still runs and may change the environment"
        return Ending(Outcome.ENV_ERROR, _limit_of(error) or "seconds", error=text)
    if limits.silenced_by is not None and limits.silenced_by.outcome is not Outcome.COMPLETED:
        return limits.silenced_by
    # A request for a turn after an ending cancels the clock's scope too, so `fired` alone does not show a timeout.
    if limits.clock.fired and limits.silenced_by is None:
        return Ending(Outcome.TIME_LIMIT, "seconds")
    if limits.context_full is not None:
        return limits.context_full
    if error is not None and not _is_only(error, EpisodeOver):
        return failure(error)
    cut = Ending.of_cut_turn(limits.last_turn) if limits.last_turn is not None else None
    return cut if cut is not None and not limits.ended_by_author else Ending(Outcome.COMPLETED)


def failure(error: BaseException) -> Ending:
    """Return the ending of an episode whose environment raised an error."""
    return Ending(Outcome.ENV_ERROR, _limit_of(error), error=describe_error(error))


def silent(shared: RunShared, key: EpisodeKey, ending: Ending, agent: str = MAIN) -> Trajectory:
    """Return the trajectory of an agent without turns, for an episode with this ending."""
    return Trajectory(
        id=key.id,
        task=key.task,
        index=key.index,
        agent=agent,
        seed=key.seed(shared.seed),
        visit=key.visit,
        attempt=key.attempt,
        trained=agent == MAIN and shared.trains_main,
        outcome=ending.outcome,
        limit=ending.limit,
        limit_agent=ending.agent,
        error=ending.error,
    )


def _is_only(error: BaseException, kind: type[BaseException]) -> bool:
    """Return True if the error is of this kind, or a group of only this kind."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(kind)[1] is None
    return isinstance(error, kind)


def _limit_of(error: BaseException | None) -> str:
    if not isinstance(error, TooSlow):
        return ""
    return "step_seconds" if error.name == "step()" else "tool_seconds"
