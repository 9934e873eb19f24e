"""Cancellation of a coroutine or an episode at each of its suspension points, with one run for each point."""

from __future__ import annotations

import inspect
import traceback
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, TypeAlias

import anyio

from runner.concurrency.threads import Workers
from runner.concurrency.user_code import HOW_TO_CLOSE
from runner.engines.scripted.engine import ScriptedEngine
from runner.engines.scripted.script import Latency
from runner.environment.checks import as_environment, check_playable
from runner.environment.lifespan import lifespan_of
from runner.episode.key import EpisodeKey
from runner.episode.lifecycle import EpisodeRunner
from runner.episode.model import ChatModel
from runner.episode.shared import RunShared
from runner.errors import BadOption
from runner.options import Concurrency, Limits, Sampling
from runner.tasks import Task
from runner.testing.leaks import no_leaks
from runner.testing.playing import EngineOrReplies, EnvironmentOrClass, choose_task, engine_for, run_sync
from runner.testing.queued_engine import QueuedEngine

__all__ = ["cancel_everywhere", "play_cancelled"]

# Pytest leaves out the frames of this module and shows the line of the test, where the fix belongs.
__tracebackhide__ = True

LeftoverCheck: TypeAlias = Callable[[Any], object]
"""A function that receives the environment that played, and raises if it finds leftovers."""

_DELTA_LATENCY: Final = Latency(first=1, between=1)
"""One tick before every delta, so that turns have suspension points."""
_MAX_SUSPENSIONS: Final = 100_000
"""Number of suspension points after which a scenario counts as endless."""
_MAX_SWALLOWED: Final = 1_000
"""Maximum number of cancellations of one run, one at each `await` of its clean-up. A run with more counts as endless.
"""

_REASON: Final = "cancel_everywhere"
"""Reason text of this module's cancellations. It distinguishes them from cancellations by scopes inside the scenario.
"""
_ABANDONED: Final[list[Coroutine[Any, Any, object]]] = []
"""Coroutines that cannot be ended, kept so that Python does not try to close them."""

_EVENT_LOOPS: Final = frozenset({"anyio", "asyncio", "trio"})
"""Libraries whose frames do not belong to a scenario; they handle cancellations correctly."""


async def cancel_everywhere(
    scenario: Callable[[], Coroutine[Any, Any, object]],
    *,
    check: Callable[[], object | Awaitable[object]] = lambda: None,
) -> int:
    """Run `scenario` repeatedly, cancelled at its 1st, 2nd, 3rd ... suspension.

    The cancellation comes from a scope around the scenario. In a shielded block it arrives after the block. Code that
    catches it must raise it again. Child tasks are cancelled too, but their suspension points are not counted. Trio
    runs ready tasks in random order, so the number of suspensions of a scenario that waits for other tasks may vary.

    Args:
        scenario: a function that returns the coroutine of one run. All runs must have the same steps, and each must
            begin with new state.
        check: a function, sync or async, that is called after every run, cancelled or not. It raises if it finds
            leftovers.

    Returns:
        Number of suspension points of an undisturbed run.

    Raises:
        AssertionError: a function swallowed the cancellation; the message has its name.
        BadOption: `scenario` does not return a coroutine.
        RuntimeError: the scenario does not end.
        BaseException: an error of the scenario or the check. If the run was cancelled, a note names the suspension
            point.
    """
    given: Any = scenario
    if inspect.iscoroutine(given):
        given.close()  # otherwise Python warns that it was never awaited
    if not callable(given):
        raise BadOption(f"cancel_everywhere({given!r:.60}): give the `async def` function itself, without calling it.")
    for at in range(1, _MAX_SUSPENSIONS):
        made: Any = scenario()
        if not inspect.iscoroutine(made):
            raise BadOption(f"cancel_everywhere(): the scenario returned {made!r:.60}: give an `async def` function.")
        run = _CancelledRun(made, at)
        try:
            await run.play()
            result = check()
            if inspect.isawaitable(result):
                await result
        except BaseException as error:
            if run.cancelled_in:
                error.add_note(f"cancelled at suspension point {at}, in {run.cancelled_in}")
            raise
        if not run.cancelled_in:
            return at - 1
    raise _never_ended()


def _never_ended() -> RuntimeError:
    return RuntimeError(f"the scenario has not ended after {_MAX_SUSPENSIONS} suspension points: give one that ends")


@dataclass(slots=True)
class _CancelledRun:
    """One run of a scenario, cancelled at one of its suspension points."""

    coroutine: Coroutine[Any, Any, object]
    at: int
    """Suspension point of the cancellation, from 1."""
    cancelled_in: str = ""
    """Function that was suspended at this point; "" before the cancellation."""
    delivered: list[BaseException] = field(default_factory=list)
    """Cancellations that were thrown into the scenario, in order; each `await` of its clean-up may get another one."""

    async def play(self) -> None:
        with anyio.CancelScope() as scope:
            try:
                await self._step_by_step(scope)
            except BaseException as error:
                self._check_passed_on(error)
                raise
            self._check_passed_on(None)

    def _check_passed_on(self, raised: BaseException | None) -> None:
        """Raise AssertionError if a function of the scenario caught a cancellation and did not raise it again."""
        left = set(map(id, _causes(raised)))
        lost = [error for error in self.delivered if id(error) not in left]
        if raised is not None and len(lost) == len(self.delivered):
            return  # `raised` is another error: a library made it from a cancellation, or the scenario failed
        for error in lost:
            if swallower := _swallower(error):
                verb = "returned" if raised is None else "continued"
                raise AssertionError(
                    f"cancelled in {self.cancelled_in}, but the scenario {verb}: {swallower} swallowed the "
                    f"cancellation. Clean up in `finally`, or raise it again."
                ) from None

    @types.coroutine
    def _step_by_step(self, scope: anyio.CancelScope) -> Generator[Any, Any, None]:
        """Run the coroutine as its task would, and cancel `scope` at the suspension with the number `at`."""
        coroutine = self.coroutine
        suspensions = 0
        resume: Callable[[], Any] = lambda: coroutine.send(None)  # noqa: E731  # the function is replaced below
        while True:
            try:
                awaited = resume()
            except StopIteration:
                return
            suspensions += 1
            if suspensions > self.at + _MAX_SUSPENSIONS:
                raise self._abandon(_never_ended())
            if len(self.delivered) > _MAX_SWALLOWED:
                raise self._abandon(self._always_swallowed())
            if suspensions == self.at:
                self.cancelled_in = _where(coroutine)
                scope.cancel(_REASON)
            resume = yield from self._suspend(awaited)

    def _always_swallowed(self) -> AssertionError:
        who = _swallower(self.delivered[-1]) or "the scenario"
        return AssertionError(
            f"cancelled in {self.cancelled_in}, but the scenario never ends: {who} swallowed the cancellation "
            f"{_MAX_SWALLOWED} times. Clean up in `finally`, or raise it again."
        )

    def _abandon(self, error: Exception) -> Exception:
        """Throw `error` into the coroutine until it ends, so that it cleans up. Keep a coroutine that does not end."""
        for _ in range(_MAX_SWALLOWED):
            try:
                self.coroutine.throw(error)
            except BaseException:
                return error
        _ABANDONED.append(self.coroutine)
        return error

    def _suspend(self, awaited: Any) -> Generator[Any, Any, Callable[[], Any]]:
        """Suspend in place of the coroutine, and return the function that resumes the coroutine."""
        try:
            value = yield awaited
        except BaseException as error:  # this may be a cancellation, which the coroutine must receive
            thrown = error
            self._record_delivered(thrown)
            return lambda: self.coroutine.throw(thrown)
        self._record_delivered(
            getattr(value, "error", None)
        )  # trio sends a cancellation as a value that the innermost frame unwraps
        return lambda: self.coroutine.send(value)

    def _record_delivered(self, error: BaseException | None) -> None:
        # Only the cancellation of this module counts: scopes inside a shield cancel too, and catch what they raised.
        if isinstance(error, anyio.get_cancelled_exc_class()) and _REASON in str(error):
            self.delivered.append(error)


def _causes(raised: BaseException | None) -> Iterator[BaseException]:
    """Yield the error with all of its causes, contexts and group members; nothing for None."""
    waiting, seen = [raised], set[int]()
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        yield error
        waiting += [error.__cause__, error.__context__, *getattr(error, "exceptions", ())]


def _swallower(error: BaseException) -> str:
    """Name and place of the function that caught the error last; "" if it belongs to the event loop's libraries."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_filename != __file__:
            name = code.co_qualname.rpartition("<locals>.")[2]
            return "" if _is_of_event_loop(frame) else f"{name} ({code.co_filename}:{line})"
    return ""


def _is_of_event_loop(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _EVENT_LOOPS


def _where(coroutine: Any) -> str:
    """Name and place of the scenario's innermost suspended function outside the event loop's libraries."""
    where = "the scenario"
    while True:
        match coroutine:
            case types.CoroutineType():
                frame, inner = coroutine.cr_frame, coroutine.cr_await
            case types.GeneratorType():
                frame, inner = coroutine.gi_frame, coroutine.gi_yieldfrom
            case _:
                return where
        if frame is not None and not _is_of_event_loop(frame):
            where = f"{coroutine.__qualname__} ({frame.f_code.co_filename}:{frame.f_lineno})"
        coroutine = inner


# --- an episode


def play_cancelled(
    environment: EnvironmentOrClass,
    says: EngineOrReplies,
    *,
    task: Task | str | None = None,
    check: LeftoverCheck | None = None,
    limits: Limits | None = None,
) -> int:
    """Play an episode repeatedly, cancelled at its 1st, 2nd, 3rd ... suspension.

    After each play no request and no session may be left in the engine, and at the end no task, thread, process or
    file. The first and the last play are not cancelled. The first one must not fail, and opens everything that all
    episodes share. Tools wait in every play, so keep their waiting times short.

    Args:
        environment: the environment, or its class.
        says: the replies of the model; each play reads a list from its beginning.
        task: the task or its id; by default the first one.
        check: a function that receives the environment after every play, and raises if it finds leftovers.
        limits: limits that override the environment's.

    Returns:
        Number of cancelled plays.

    Raises:
        AssertionError: a play left something open or swallowed the cancellation, or the undisturbed episode fails. If
            the play was cancelled, the message or a note names the place.
        BadInput: an argument cannot be used.
    """
    if check is not None and not callable(check):
        raise BadOption(f"play_cancelled(check={check!r:.60}): give a function of one argument.")
    # Deltas are small and have ticks between them, so that there are suspension points inside turns.
    given: Any = says
    in_pieces = isinstance(says, list | tuple | str)
    engine = ScriptedEngine(given, chunks=4, latency=_DELTA_LATENCY) if in_pieces else engine_for(says)
    if isinstance(engine, QueuedEngine) and engine is says:
        raise BadOption(
            "play_cancelled(): a queue of replies is empty after the first play. Give the replies: a list, which is "
            "read from its beginning for each play, a string or a function."
        )
    if not isinstance(engine, ScriptedEngine):
        raise BadOption(
            f"play_cancelled(..., {type(engine).__name__}): give replies, since the episode is played many times."
        )
    return run_sync("play_cancelled", partial(_play_everywhere, environment, engine, task, check, limits), engine, None)


async def _play_everywhere(
    environment: EnvironmentOrClass,
    engine: ScriptedEngine,
    task: Task | str | None,
    check: LeftoverCheck | None,
    limits: Limits | None,
) -> int:
    one = choose_task(environment, task)
    made = as_environment(environment)
    check_playable(made)
    async with AsyncExitStack() as opened:
        await opened.enter_async_context(engine)
        shared = RunShared(
            environment=made,
            chat=ChatModel(engine, options={}, now=datetime.now(UTC)),
            sampling=Sampling(),
            limits=(limits or Limits()).over(made.limits).over(Limits.defaults()),
            scorers=made.scorers,
            seed=0,
            workers=Workers(Concurrency().threads),
        )
        opened.callback(shared.workers.close)
        lifespan = lifespan_of(made, shared.workers, close_seconds=shared.limits.close_seconds)
        shared.resources = await opened.enter_async_context(lifespan)
        last: list[EpisodeRunner] = []

        async def episode() -> None:
            runner = EpisodeRunner(shared, EpisodeKey(task=one, index=0))
            last[:] = [runner]
            await runner.run(in_this_task=True)

        def nothing_is_left() -> None:
            stats = engine.stats()
            if stats.open or stats.waiting or stats.live_sessions:
                raise AssertionError(
                    f"{stats.open} requests and {stats.live_sessions} sessions are left in the engine: exit every "
                    f"`async with`, and leave no task that generates running."
                )
            for fault in last[0].faults:
                if HOW_TO_CLOSE in fault:  # closed by the runner instead of the code that opened it
                    raise AssertionError(fault)
            if check is not None:
                check(last[0].environment)

        # This opens everything that episodes share, so that the check below finds only leaks of single episodes.
        await episode()
        trajectory = last[0].trajectories()[0]
        if trajectory.outcome.failed:
            raise AssertionError(f"the undisturbed episode fails: {trajectory.outcome.value}: {trajectory.error}")
        nothing_is_left()
        with no_leaks(engine):
            return await cancel_everywhere(episode, check=nothing_is_left)
