"""BackgroundPlayer: a `Player` in a thread of its own, for synchronous trainers."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import threading
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import anyio
from typing_extensions import Unpack

from runner.concurrency.gather import gather
from runner.concurrency.loop_lag import Blocker
from runner.engines.base import BaseEngine, width_of
from runner.engines.proofs import ProofFigures, WeightProof
from runner.engines.state import PauseMode, WeightUpdate
from runner.environment.checks import as_environment
from runner.environment.environment import Environment
from runner.environment.task_feed import environment_tasks
from runner.errors import BadOption, RunStopped, RunStuck
from runner.options import Sampling
from runner.runs.event_loop import on_event_loop
from runner.runs.options import RunKeywords, RunOptions, check_engine, check_full
from runner.runs.task_player import Player
from runner.tasks import Task
from runner.trajectory import Group, Trajectory

__all__ = ["BackgroundPlayer"]

T = TypeVar("T")

EXIT_SECONDS: Final = 10.0
"""Longest wait for the thread or its last calls if they may never end, such as at the end of the process."""


class PlayedGroups(Iterator[Group]):
    """The iterator that `BackgroundPlayer.groups` returns: groups in the order in which they finish."""

    def __init__(self, groups: Iterator[Group], closed: Future[None]) -> None:
        self._groups = groups
        self._closed = closed

    def __next__(self) -> Group:
        return next(self._groups)

    def close(self) -> None:
        """End the iteration and cancel the groups in flight.

        Any thread may call it, even while another thread waits for a group.
        """
        with suppress(concurrent.futures.InvalidStateError):  # the iterator was closed before
            self._closed.set_result(None)
        with suppress(ValueError):  # another thread waits in the generator, and ends it
            self._groups.close()  # type: ignore[attr-defined]  # the iterator is a generator


class BackgroundPlayer:
    """A `Player` in a thread with its own event loop, for a synchronous trainer.

        with BackgroundPlayer(Calculator(), engine, group_size=8) as player:
            groups = player.play_groups(tasks)
            player.update_weights(model.state_dict())

    Methods may be called from any thread. If the thread or its run fails, calls that wait and later calls raise the
    cause. Leaving the block with an error cancels the episodes in flight.

    The class takes the arguments of `Player`, and raises the same errors.
    """

    def __init__(
        self, environment: Environment[Any] | type[Environment[Any]], engine: BaseEngine, **options: Unpack[RunKeywords]
    ) -> None:
        check_engine("engine", engine)
        self.engine = engine
        """The engine; it belongs to the event loop of the thread."""
        self.options = RunOptions(**{"breaker": 1, **options})  # type: ignore[arg-type]  # mypy does not check the dict
        """The checked options with their defaults."""
        self.environment = as_environment(environment)
        """The environment object."""
        self._given = options
        self._player: Player | None = None
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end = anyio.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._calls: set[Future[Any]] = set()
        self._over = False
        self._starting: anyio.CancelScope  # the scope of the start; it is created on the event loop
        self._cancelled = self._is_started = False

    @property
    def error(self) -> BaseException | None:
        """The error that ended the run or the thread; None while the run plays, and after `close` without an error."""
        return self._error or (self._player.error if self._player is not None else None)

    @property
    def player(self) -> Player:
        """The player of the thread; other threads may read its attributes, such as `player.run.summary`.

        Raises:
            RuntimeError: the player has not begun.
        """
        if self._player is None:
            raise _not_begun()
        return self._player

    # --- starting and ending

    def start(self) -> Self:
        """Start the thread, the engine and the run.

        Raises:
            RuntimeError: the player was started before.
            BadInput, EngineError, RunFileError: the run cannot begin; see `Run`.
        """
        if self._thread is not None:
            raise RuntimeError("a player can be started only once: make another BackgroundPlayer(...)")
        started: Future[None] = Future()
        # The thread is a daemon, so that the process of a trainer ends without `close`.
        self._thread = threading.Thread(target=self._run_thread, args=(started,), name="deltarunner", daemon=True)
        self._thread.start()
        atexit.register(self._close_at_exit)
        try:
            started.result()
        except BaseException:
            self._stop(cancel=True)
            self._thread.join()
            raise
        return self

    def close(self, *, cancel: bool = False) -> None:
        """Play the requested episodes, end the run, close the engine if the run entered it, and end the thread.

        Args:
            cancel: cancel the episodes in flight, and play no further ones.
        """
        atexit.unregister(self._close_at_exit)
        if self._thread is None:
            return
        self._stop(cancel=cancel)
        try:
            # A blocked event loop may never end. Its thread then ends with the process.
            self._thread.join(EXIT_SECONDS if isinstance(self._error, RunStuck) else None)
        except BaseException:  # Ctrl-C
            self._stop(cancel=True)
            raise

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(cancel=kind is not None)

    # --- playing

    def play(self, task: Task, *, index: int = 0, sampling: Sampling | None = None) -> list[Trajectory]:
        """Play one episode of a task, as `Player.play` does."""
        return self._call(self.player.play(task, index=index, sampling=sampling))

    def play_groups(self, tasks: Iterable[Task], *, sampling: Sampling | None = None) -> list[Group]:
        """Play a group for each task, concurrently, and return the groups in the order of the tasks.

        A task that occurs twice is played twice. This method raises the errors of `Player.play_group`; the first error
        cancels the other groups.
        """
        return self._call(self._play_groups(list(tasks), sampling))

    def play_many(self, episodes: Iterable[tuple[Task, int]]) -> list[list[Trajectory]]:
        """Play single episodes (task, index) concurrently, and return their trajectories in the same order.

        This method raises the errors of `Player.play`; the first error cancels the other episodes.
        """
        return self._call(gather([partial(self.player.play, task, index=index) for task, index in episodes]))

    def groups(self, tasks: Iterable[Task] | None = None, *, full: int | None = None) -> PlayedGroups:
        """Play tasks, and return an iterator over their groups, which yields each group as it finishes.

        At most as many groups are in flight as fit into the run's width. The end of the iteration cancels the groups in
        flight; so does `close()` of the iterator, which any thread may call.

        Args:
            tasks: the tasks; by default the tasks of the environment, once.
            full: the number of tasks with spread after which the iteration ends, as in `Run.groups(full=)`. If `tasks`
                is an iterator, another call with this iterator continues with its next task.

        Raises:
            BadOption: `tasks` is text or is not iterable. With `full`: it is not a positive integer, or groups have a
                single episode.
        """
        if full is not None:
            check_full(full, self.options)
        given: Any = environment_tasks(self.environment) if tasks is None else tasks
        if not isinstance(given, Iterable) or isinstance(given, str):
            raise BadOption(f"tasks={given!r:.60}: give an iterable of Task.")
        closed: Future[None] = Future()
        return PlayedGroups(self._groups(iter(given), full, closed), closed)

    def _groups(self, tasks: Iterator[Task], full: int | None, closed: Future[None]) -> Iterator[Group]:
        options = self.options
        most = max(1, (options.concurrency.episodes or width_of(self.engine)) // options.group_size)
        pending: set[Future[list[Group]]] = set()
        try:
            more = True
            while True:
                while more and len(pending) < (most if full is None else min(most, full)):
                    task = next(tasks, None)
                    if task is None:
                        more = False
                    else:
                        pending.add(self._submit(self.player.play_group(task)))
                if not pending:
                    return
                waited: set[Future[Any]] = {*pending, closed}
                done, _ = concurrent.futures.wait(waited, return_when=FIRST_COMPLETED)
                if closed.done():
                    return
                pending -= done
                for future in done:
                    groups = self._result_of(future)
                    wanted = [group for group in groups if full is None or group.has_spread]
                    self.player.run.summary.flat += len(groups) - len(wanted)
                    if full is not None:
                        full -= bool(wanted)
                    yield from wanted
        finally:
            for future in pending:
                future.cancel()

    # --- weights

    def update_weights(
        self,
        given: Any,
        *,
        version: str | None = None,
        mode: PauseMode | str = PauseMode.KEEP,
        proof: WeightProof | None = None,
    ) -> WeightUpdate:
        """Exchange the engine's weights, also during episodes, as `engine.update_weights` does.

        Raises:
            BadWeights, BadControl, BadOption, EngineError: see `engine.update_weights`.
        """
        return self._call(self.engine.update_weights(given, version=version, mode=mode, proof=proof))

    def prove(self, proof: WeightProof, adapter: str | None = None) -> ProofFigures:
        """Compare the engine's weights with a proof, as `engine.prove` does.

        Raises:
            BadWeights, BadControl, EngineError: see `engine.prove`.
        """
        return self._call(self.engine.prove(proof, adapter))

    # --- the thread

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = self._submit(coroutine)
        try:
            return self._result_of(future)
        except BaseException:
            future.cancel()  # this ends a call that Ctrl-C has interrupted; a call that is done is not changed
            raise

    def _result_of(self, future: Future[T]) -> T:
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            # Only the end of the event loop cancels this task. The thread stores the cause after that.
            assert self._thread is not None
            self._thread.join(EXIT_SECONDS)
            raise self.error or RunStopped("the event loop of the player ended: make another player") from None

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._loop is not None and self._is_started and not self._over:
                future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
                self._calls.add(future)
                future.add_done_callback(self._calls.discard)
                return future
        coroutine.close()
        if self.error is not None:
            raise self.error
        if self._thread is None:
            raise _not_begun()
        raise RunStopped("the player was closed: play before close(), or make another BackgroundPlayer(...)")

    async def _play_groups(self, tasks: list[Task], sampling: Sampling | None) -> list[Group]:
        played = await gather([partial(self.player.play_group, task, sampling=sampling) for task in tasks])
        return [group for groups in played for group in groups]

    def _run_thread(self, started: Future[None]) -> None:
        error: BaseException | None = None
        try:
            on_event_loop(self._live, started)
        except BaseException as caught:
            error = self._error = caught
        finally:
            self._end_calls(error or RunStopped("the player was closed during this call: make another player"))
            if not started.done():
                started.set_exception(self._error or RunStopped("the player's thread ended before the run began"))

    async def _live(self, started: Future[None]) -> None:
        with self._lock:
            self._loop, self._starting = asyncio.get_running_loop(), anyio.CancelScope()
            if self._cancelled:
                self._starting.cancel()
        try:
            with self._starting:
                # The player is created here, since a run must be created on its event loop.
                self._player = Player(self.environment, self.engine, **self._given)
                self._player.run.lag.on_stuck = self._stuck
                await self._player.start()
        except Exception as error:
            started.set_exception(error)
            return
        if self._starting.cancelled_caught:
            return
        self._is_started = True
        started.set_result(None)
        try:
            await self._end.wait()
        finally:
            await self.player.aclose()
            with anyio.move_on_after(EXIT_SECONDS):  # wait for the calls that the end of the run has woken
                while self._calls:  # noqa: ASYNC110  # callbacks of futures, also in other threads, empty the set
                    await anyio.sleep(0.001)

    def _stuck(self, blocker: Blocker) -> None:
        """End every call that waits, since the event loop is blocked and answers no call."""
        self._error = RunStuck(f"the event loop of the player is blocked in {blocker.where}: {blocker.advice}")
        self._end_calls(self._error)

    def _end_calls(self, error: BaseException) -> None:
        with self._lock:
            self._over = True
            calls = list(self._calls)
        for call in calls:
            try:
                call.set_exception(error)
            except concurrent.futures.InvalidStateError:  # the call has just ended
                continue

    def _stop(self, *, cancel: bool) -> None:
        def stop() -> None:
            if cancel:
                self._starting.cancel()
                if self._is_started:
                    self.player.cancel()
            self._end.set()

        with self._lock:
            self._cancelled = self._cancelled or cancel
            if self._loop is not None:
                with suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(stop)

    def _close_at_exit(self) -> None:
        self._stop(cancel=True)
        if self._thread is not None:
            self._thread.join(EXIT_SECONDS)


def _not_begun() -> RuntimeError:
    return RuntimeError("the player has not begun: write `with BackgroundPlayer(...) as player:`, or call start()")
