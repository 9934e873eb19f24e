"""An episode cancelled at every point where it suspends: whatever an environment opens, it has to close."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from runner.concurrency.threads import Workers
from runner.engines.scripted.engine import ScriptedEngine
from runner.engines.scripted.script import Latency
from runner.environment.checks import as_environment, check_playable
from runner.environment.environment import Environment
from runner.environment.lifespan import lifespan_of
from runner.episode.context import RunContext
from runner.episode.key import EpisodeKey
from runner.episode.lifecycle import Play
from runner.episode.model import ChatModel
from runner.errors import BadOption
from runner.options import Concurrency, Limits, Sampling
from runner.tasks import Task
from runner.testing.cancellation import cancel_everywhere
from runner.testing.leaks import no_leaks
from runner.testing.playing import Played, Said, at_once, chosen_task, engine_of
from runner.testing.queued import QueuedEngine

__all__ = ["play_cancelled"]

Check = Callable[[Any], object]

_SLOWLY: Final = Latency(first=1, between=1)


def play_cancelled(
    environment: Played,
    says: Said,
    *,
    task: Task | str | None = None,
    check: Check | None = None,
    limits: Limits | None = None,
) -> int:
    """Play an episode again and again, cancelled when it suspends for the 1st, the 2nd, the 3rd ... time.

    After each time no request, session, task, thread or file may be left. The first and the last time it is not
    cancelled, and must not fail; what is opened once for all episodes, the first one opens. Time that tools wait is
    waited each time: play them on little.

    Args:
        environment: the environment, or its class.
        says: what the model says; a list is read from its beginning each time.
        task: the task or its id; by default the first one.
        check: gets the environment that played, after every time; raises if something is left behind.
        limits: go over the environment's.

    Returns:
        How many times it was cancelled.

    Raises:
        AssertionError: something was left behind, or the episode fails undisturbed. A note says where it had been
            cancelled.
        BadInput: something given cannot be used; the message names it and the fix.
    """
    __tracebackhide__ = True
    if check is not None and not callable(check):
        raise BadOption(f"play_cancelled(check={check!r:.60}): give a function of the environment.")
    # In small deltas with ticks between them, so that there are points inside of a turn too.
    given: Any = says
    in_pieces = isinstance(says, list | tuple | str)
    engine = ScriptedEngine(given, chunks=4, latency=_SLOWLY) if in_pieces else engine_of(says)
    if isinstance(engine, QueuedEngine) and engine is says:
        raise BadOption(
            "play_cancelled(): a queue of replies is empty after the first time. Give the replies: a list, which is "
            "read from its beginning each time, a text or a function."
        )
    if not isinstance(engine, ScriptedEngine):
        raise BadOption(
            f"play_cancelled(..., {type(engine).__name__}): give replies, since the episode is played many times over."
        )
    return at_once("play_cancelled", partial(_everywhere, environment, engine, task, check, limits), engine, None)


async def _everywhere(
    environment: Played, engine: ScriptedEngine, task: Task | str | None, check: Check | None, limits: Limits | None
) -> int:
    one = chosen_task(environment, task)
    made = as_environment(environment)
    check_playable(made)
    async with AsyncExitStack() as opened:
        await opened.enter_async_context(engine)
        shared = _context(made, engine, limits)
        lifespan = lifespan_of(made, shared.workers, close_seconds=shared.limits.close_seconds)
        shared.shared = await opened.enter_async_context(lifespan)
        last: list[Play] = []

        async def episode() -> None:
            play = Play(shared, EpisodeKey(task=one, index=0))
            last[:] = [play]
            await play.run()

        def nothing_is_left() -> None:
            stats = engine.stats()
            if stats.open or stats.waiting or stats.live_sessions:
                raise AssertionError(
                    f"{stats.open} requests and {stats.live_sessions} sessions are left in the engine: leave every "
                    f"`async with` and cancel no task that generates."
                )
            if check is not None:
                check(last[0].environment)

        await episode()  # whatever is loaded and opened only once: what is left after that, every episode leaves
        trajectory = last[0].trajectories()[0]
        if trajectory.outcome.failed:
            raise AssertionError(f"undisturbed, the episode fails: {trajectory.outcome.value}: {trajectory.error}")
        nothing_is_left()
        with no_leaks(engine):
            return await cancel_everywhere(episode, check=nothing_is_left)


def _context(environment: Environment[Any], engine: ScriptedEngine, limits: Limits | None) -> RunContext:
    return RunContext(
        environment=environment,
        chat=ChatModel(engine, options={}, now=datetime.now(UTC)),
        sampling=Sampling(),
        limits=(limits or Limits()).over(environment.limits).over(Limits.defaults()),
        scorers=environment.scorers,
        seed=0,
        workers=Workers(Concurrency().threads),
    )
