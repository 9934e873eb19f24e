"""Cancels what suspends at every point where it does, one after another: any coroutine, or an episode."""

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
from runner.episode.lifecycle import Play
from runner.episode.model import ChatModel
from runner.episode.shared import RunShared
from runner.errors import BadOption
from runner.options import Concurrency, Limits, Sampling
from runner.tasks import Task
from runner.testing.leaks import no_leaks
from runner.testing.playing import EngineOrReplies, EnvironmentOrClass, choose_task, engine_for, run_sync
from runner.testing.queued_engine import QueuedEngine

__all__ = ["cancel_everywhere", "play_cancelled"]

# Pytest shows the line of the test, where the fix belongs.
__tracebackhide__ = True

LeftoverCheck: TypeAlias = Callable[[Any], object]
"""Gets the environment that played, and raises if something is left behind."""

_DELTA_LATENCY: Final = Latency(first=1, between=1)
"""A tick before every delta, so that a turn has suspension points of its own."""
_MAX_SUSPENSIONS: Final = 100_000
"""Suspension points after which a scenario is taken for one that never ends."""
_MAX_SWALLOWED: Final = 1_000
"""One run may be given so many cancellations, one for each `await` of a long unwinding; then somebody swallows them."""

_REASON: Final = "cancel_everywhere"
"""What our cancellations say of themselves, by which they are told from those of scopes inside of the scenario."""
_ABANDONED: Final[list[Coroutine[Any, Any, object]]] = []
"""Coroutines that end by nothing, kept so that Python does not try to close them."""

_EVENT_LOOPS: Final = frozenset({"anyio", "asyncio", "trio"})
"""Libraries whose frames are not a scenario's: what they do with a cancellation is right."""


async def cancel_everywhere(
    scenario: Callable[[], Coroutine[Any, Any, object]],
    *,
    check: Callable[[], object | Awaitable[object]] = lambda: None,
) -> int:
    """Run `scenario` again and again, cancelled when it suspends for the 1st, the 2nd, the 3rd ... time.

    The cancellation comes from a scope around it, as it suspends; where it waits in a shield, it comes once that is
    left. Whoever catches it has to raise it again. Child tasks are cancelled with it; their own suspension points are
    not counted. Trio runs the tasks that are ready in a random order, so a scenario that waits for others may suspend
    more or less often there from run to run.

    Args:
        scenario: makes one run's coroutine. It must be the same each time: same steps, fresh state.
        check: called after every run, cancelled or not, sync or async; raises if something was left behind.

    Returns:
        How many suspension points were cancelled: all that an undisturbed run has.

    Raises:
        AssertionError: the scenario swallowed its cancellation, by the name of the function that did; one that does so
            for ever is given up.
        BadOption: it is no function that gives a coroutine.
        RuntimeError: the scenario never ended undisturbed.
        BaseException: what the scenario or the check raised, with a note that says where it had been cancelled.
    """
    given: Any = scenario
    if inspect.iscoroutine(given):
        given.close()  # else it complains as well that nobody awaited it
    if not callable(given):
        raise BadOption(f"cancel_everywhere({given!r:.60}): give the `async def` function itself, without calling it.")
    for at in range(1, _MAX_SUSPENSIONS):
        made: Any = scenario()
        if not inspect.iscoroutine(made):
            raise BadOption(f"cancel_everywhere(): the scenario gave {made!r:.60}: give an `async def` function.")
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
    return RuntimeError(f"the scenario still ran after {_MAX_SUSPENSIONS} suspension points: it has to end")


@dataclass(slots=True)
class _CancelledRun:
    """One run of a scenario, cancelled at one of its suspension points."""

    coroutine: Coroutine[Any, Any, object]
    """The scenario."""
    at: int
    """The suspension point at which it is cancelled, counted from 1."""
    cancelled_in: str = ""
    """The function that was suspended there; "" until then."""
    delivered: list[BaseException] = field(default_factory=list)
    """The cancellations that were thrown into the scenario, one for each `await` that it came to afterwards."""

    async def play(self) -> None:
        with anyio.CancelScope() as scope:
            try:
                await self._step_by_step(scope)
            except BaseException as error:
                self._check_passed_on(error)
                raise
            self._check_passed_on(None)

    def _check_passed_on(self, raised: BaseException | None) -> None:
        """No cancellation was caught for good: by nobody, or by one who was then cancelled anew."""
        left = set(map(id, _causes(raised)))
        lost = [error for error in self.delivered if id(error) not in left]
        if raised is not None and len(lost) == len(self.delivered):
            return  # what left the scenario is a library's, made of one that was delivered, or a failure of its own
        for error in lost:
            if swallower := _swallower(error):
                went_on = "returned" if raised is None else "went on"
                raise AssertionError(
                    f"cancelled in {self.cancelled_in}, and {went_on} as if it were not: {swallower} swallowed the "
                    f"cancellation. Clean up in `finally`, or raise it again."
                ) from None

    @types.coroutine
    def _step_by_step(self, scope: anyio.CancelScope) -> Generator[Any, Any, None]:
        """Drive the coroutine as its task would, counting what it yields to the event loop."""
        coroutine = self.coroutine
        suspensions = 0
        resume: Callable[[], Any] = lambda: coroutine.send(None)  # noqa: E731  # replaced below
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
            f"cancelled in {self.cancelled_in}, and it never ends: {who} swallowed the cancellation {_MAX_SWALLOWED} "
            f"times over. Clean up in `finally`, or raise it again."
        )

    def _abandon(self, error: Exception) -> Exception:
        """End the coroutine by an error that nobody expects, so that it still leaves what it entered; else leave it."""
        for _ in range(_MAX_SWALLOWED):
            try:
                self.coroutine.throw(error)
            except BaseException:
                return error
        _ABANDONED.append(self.coroutine)
        return error

    def _suspend(self, awaited: Any) -> Generator[Any, Any, Callable[[], Any]]:
        """Suspend in the coroutine's stead; gives how to go on with it."""
        try:
            value = yield awaited
        except BaseException as error:  # a cancellation among others: the coroutine is whom it was meant for
            thrown = error
            self._record_delivered(thrown)
            return lambda: self.coroutine.throw(thrown)
        self._record_delivered(
            getattr(value, "error", None)
        )  # on trio it comes as a value that the innermost frame unwraps
        return lambda: self.coroutine.send(value)

    def _record_delivered(self, error: BaseException | None) -> None:
        # By the reason: inside a shield another scope's cancellation may come, which that scope catches.
        if isinstance(error, anyio.get_cancelled_exc_class()) and _REASON in str(error):
            self.delivered.append(error)


def _causes(raised: BaseException | None) -> Iterator[BaseException]:
    """What was raised, what that was raised from or while handling, and so on."""
    waiting, seen = [raised], set[int]()
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        yield error
        waiting += [error.__cause__, error.__context__, *getattr(error, "exceptions", ())]


def _swallower(error: BaseException) -> str:
    """The function that caught it last; "" where that is one of the event loop's, which know what they do."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if code.co_filename != __file__:
            name = code.co_qualname.rpartition("<locals>.")[2]
            return "" if _is_of_event_loop(frame) else f"{name} ({code.co_filename}:{line})"
    return ""


def _is_of_event_loop(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _EVENT_LOOPS


def _where(coroutine: Any) -> str:
    """Where the scenario is suspended: its innermost frame outside the event loop's libraries."""
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
    """Play an episode again and again, cancelled when it suspends for the 1st, the 2nd, the 3rd ... time.

    After each time no request, session, task, thread or file may be left. The first and the last time it is not
    cancelled, and must not fail; what is opened once for all episodes, the first one opens. Time that tools wait is
    waited each time: play them on little.

    Args:
        environment: the environment, or its class.
        says: what the model says; a list is read from its beginning each time.
        task: the task or its id; by default the first one.
        check: gets the environment that played, after every time; raises if something is left behind.
        limits: the limits, which go over the environment's.

    Returns:
        How many times it was cancelled.

    Raises:
        AssertionError: something was left behind, or the episode fails undisturbed. A note says where it had been
            cancelled.
        BadInput: something given cannot be used; the message names it and the fix.
    """
    if check is not None and not callable(check):
        raise BadOption(f"play_cancelled(check={check!r:.60}): give a function of the environment.")
    # In small deltas with ticks between them, so that there are points inside of a turn too.
    given: Any = says
    in_pieces = isinstance(says, list | tuple | str)
    engine = ScriptedEngine(given, chunks=4, latency=_DELTA_LATENCY) if in_pieces else engine_for(says)
    if isinstance(engine, QueuedEngine) and engine is says:
        raise BadOption(
            "play_cancelled(): a queue of replies is empty after the first time. Give the replies: a list, which is "
            "read from its beginning each time, a text or a function."
        )
    if not isinstance(engine, ScriptedEngine):
        raise BadOption(
            f"play_cancelled(..., {type(engine).__name__}): give replies, since the episode is played many times over."
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
        last: list[Play] = []

        async def episode() -> None:
            play = Play(shared, EpisodeKey(task=one, index=0))
            last[:] = [play]
            await play.run(in_this_task=True)

        def nothing_is_left() -> None:
            stats = engine.stats()
            if stats.open or stats.waiting or stats.live_sessions:
                raise AssertionError(
                    f"{stats.open} requests and {stats.live_sessions} sessions are left in the engine: leave every "
                    f"`async with` and cancel no task that generates."
                )
            for fault in last[0].faults:
                if HOW_TO_CLOSE in fault:  # it was closed, but by nobody who had opened it
                    raise AssertionError(fault)
            if check is not None:
                check(last[0].environment)

        await episode()  # whatever is loaded and opened only once: what is left after that, every episode leaves
        trajectory = last[0].trajectories()[0]
        if trajectory.outcome.failed:
            raise AssertionError(f"undisturbed, the episode fails: {trajectory.outcome.value}: {trajectory.error}")
        nothing_is_left()
        with no_leaks(engine):
            return await cancel_everywhere(episode, check=nothing_is_left)
