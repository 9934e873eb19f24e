"""Which outcome an episode gets: one judgement, in the order of what is true first."""

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
    """How a play ended that nobody cut from outside, and that `error` came out of.

    A limit that fired comes before what the author raised after it.
    """
    limits, abandoned = episode.limits, episode.author_code.abandoned
    # A thread that was left behind may still change the world that the rewards would look at.
    if abandoned:
        text = f"{abandoned} did not come back in time; its thread was left behind and may still write"
        return Ending(Outcome.ENV_ERROR, _limit_of(error) or "seconds", error=text)
    if limits.silenced_by is not None and limits.silenced_by.outcome is not Outcome.COMPLETED:
        return limits.silenced_by
    # After an ending, whoever asks for a turn has the clock's scope cancelled: then it is not the clock that fired.
    if limits.clock.fired and limits.silenced_by is None:
        return Ending(Outcome.TIME_LIMIT, "seconds")
    if limits.context_full is not None:
        return limits.context_full
    if error is not None and not _is_only(error, EpisodeOver):
        return failure(error)
    cut = Ending.of_cut_turn(limits.last_turn) if limits.last_turn is not None else None
    return cut if cut is not None and not limits.ended_by_author else Ending(Outcome.COMPLETED)


def failure(error: BaseException) -> Ending:
    """The ending of an episode whose environment raised."""
    return Ending(Outcome.ENV_ERROR, _limit_of(error), error=describe_error(error))


def silent(shared: RunShared, key: EpisodeKey, ending: Ending, agent: str = MAIN) -> Trajectory:
    """The trajectory of an agent that has said nothing, of an episode that ended so."""
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
    """Whether the error is of this kind, or a group of nothing else."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(kind)[1] is None
    return isinstance(error, kind)


def _limit_of(error: BaseException | None) -> str:
    if not isinstance(error, TooSlow):
        return ""
    return "step_seconds" if error.name == "step()" else "tool_seconds"
