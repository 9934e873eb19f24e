"""A worker: an engine and the environments of its episodes in one process, which does what its driver says."""

from __future__ import annotations

import heapq
import itertools
import pickle
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, Final, NoReturn

import anyio
import anyio.to_thread

from runner.cluster.engine_process import EngineProcess, known_of
from runner.cluster.limiters import Desk, LeasedLimiter
from runner.cluster.words import Catch, OtherKnown, Played, PlayingNow, Pulse, RunSent, Stored
from runner.concurrency.loop_lag import Blocker, LagMonitor
from runner.concurrency.threads import Workers
from runner.engines.base import BaseEngine, Engine
from runner.engines.proofs import WeightProof
from runner.engines.state import CheckedUpdate, EngineState, PauseMode, WeightUpdate
from runner.engines.transfers import Announced, RelayedTransfer, TransferStep
from runner.episode.key import EpisodeKey
from runner.episode.lifecycle import Play
from runner.episode.limits import Ending
from runner.episode.shared import RunShared
from runner.errors import BadControl, BadEnvironment, BadInput, BadTask
from runner.runs.event_loop import exit_now
from runner.runs.run_setup import RunSetup
from runner.runs.staleness import Staleness
from runner.tasks import Task

__all__ = ["Worker"]

OLDEST: Final = 10
"""So many episodes are told of in a pulse: those that have waited longest."""

NO_TASK: Final = Task("", "")


@dataclass(eq=False, kw_only=True)
class WorkerRun:
    """A run on this worker."""

    shared: RunShared = field(init=False)
    lag: LagMonitor | None = None
    plays: dict[int, Play] = field(default_factory=dict)
    """The attempts in flight, by the driver's numbers."""
    cut: dict[int, Ending | None] = field(default_factory=dict)
    """Attempts that were cut when they had not begun, or had just ended."""
    is_kept: bool = False
    """Whether a task keeps it."""
    others: dict[str, BaseEngine] = field(default_factory=dict)
    """The engines of agents that have one of their own."""
    entered: anyio.Event = field(default_factory=anyio.Event)
    """Set once those run, or cannot."""
    clock: datetime | None = None
    begun: anyio.Event = field(default_factory=anyio.Event)
    """Set once the clock is known, or will not be."""
    opened: anyio.Event = field(default_factory=anyio.Event)
    """Set once it can be played, or cannot."""
    over: anyio.Event = field(default_factory=anyio.Event)
    """Set when it is to be left."""
    closed: anyio.Event = field(default_factory=anyio.Event)
    """Set once it is left."""
    failure: Exception | None = None
    """Why it cannot be played, or could not be left."""


class Worker(EngineProcess):
    """An engine and the episodes that are played on it. Its driver calls the methods, each in a task of its own.

    Args:
        engine: an engine that nobody entered.
        number: what the driver calls the worker; no other one was or will be called so.
        desk: where limiters that the whole run shares are asked for.
    """

    def __init__(self, engine: BaseEngine, number: int, desk: Desk) -> None:
        super().__init__(engine)
        self.number = number
        self._desk = desk
        self._runs: dict[int, WorkerRun] = {}
        self._caught = Catch()
        self._checked: CheckedUpdate | None = None
        self._relay: RelayedTransfer | None = None
        self._halt = anyio.Lock()
        self._halting = anyio.CancelScope()
        self._called_off = 0
        self._halted = False
        self._leases = itertools.count()
        self.leave_word: Callable[[str], None] = _to_nobody
        """Is given the last words of a worker that ends itself."""

    @property
    def name(self) -> str:
        """What it is called, for people."""
        return f"worker {self.number} on {socket.gethostname()}"

    async def end(self) -> None:
        """Let `live` return; runs that are open end first."""
        for number in list(self._runs):
            await self.close_run(number)
        await super().end()

    async def pulse(self) -> Pulse:
        """What goes on here."""
        plays = [(number, play) for run in self._runs.values() for number, play in run.plays.items()]
        oldest = heapq.nsmallest(OLDEST, plays, key=lambda numbered: numbered[1].since)
        return Pulse(
            now=anyio.current_time(),
            stats=self.engine.stats(),
            lag=max((run.lag.percentile(99) for run in self._runs.values() if run.lag is not None), default=0.0),
            playing=len(plays),
            oldest=[PlayingNow(number, play.turns_taken, play.activity, play.since) for number, play in oldest],
        )

    # --- runs

    async def keep_run(self, number: int, packed: bytes, clock: datetime | None) -> None:
        """Set a run up, and keep it until `close_run`; `run_opened` and that say what went wrong.

        Without a clock only the engines of its other agents are entered, until it is called again with one.

        Args:
            number: the driver's number for it.
            packed: a `RunSent`.
            clock: the time that chat templates see.
        """
        run = self._runs.setdefault(number, WorkerRun())  # it may have been asked for already
        if clock is not None:
            run.clock = clock
            run.begun.set()
        if run.is_kept:
            return
        run.is_kept = True
        try:
            async with self._set_up(run, number, packed):
                run.opened.set()
                await run.over.wait()
        except Exception as error:
            if isinstance(error, BadInput) and not run.opened.is_set():
                error.args = (f"{error} ({self.name})",)
            run.failure = error
        finally:
            run.entered.set()
            run.opened.set()
            run.closed.set()

    async def run_opened(self, number: int) -> None:
        """Return once `keep_run` has set the run up.

        Raises:
            BadInput: it cannot be played here.
        """
        run = self._runs.setdefault(number, WorkerRun())
        await run.opened.wait()
        if run.failure is not None:
            raise run.failure

    async def others_entered(self, number: int) -> None:
        """Return once `keep_run` has entered the engines of the run's other agents.

        Raises:
            BadInput, EngineError: one of them cannot be entered here, or the run cannot be read.
        """
        run = self._runs.setdefault(number, WorkerRun())
        await run.entered.wait()
        if run.failure is not None:
            raise run.failure

    async def others_known(self, number: int) -> dict[str, OtherKnown]:
        """What a driver has to know of those engines, by agent; nothing where they were not entered."""
        run = self._runs.get(number, WorkerRun())
        return {
            name: OtherKnown(
                ids=known_of(engine) if isinstance(engine, Engine) else None,
                places=engine.places,
                context=engine.context,
                description=engine.describe(),
            )
            for name, engine in run.others.items()
        }

    @asynccontextmanager
    async def _set_up(self, run: WorkerRun, number: int, packed: bytes) -> AsyncIterator[None]:
        # In a thread: an author's constructor may read for minutes, and the driver hears this event loop meanwhile.
        sent, environment = await anyio.to_thread.run_sync(self._made, packed, abandon_on_cancel=True)
        options = sent.options
        workers = Workers(options.concurrency.threads)
        setup = RunSetup.of(environment, self.engine, options, workers)
        async with AsyncExitStack() as exit_stack:
            exit_stack.callback(workers.close)
            for engine in setup.engines[1:]:
                await exit_stack.enter_async_context(engine)
            run.others.update(options.engines)
            run.entered.set()
            await run.begun.wait()
            if run.clock is None:  # it was closed before it began
                yield
                return
            run.lag = await exit_stack.enter_async_context(LagMonitor(workers))
            run.lag.on_stuck = partial(_end_stuck, self.number, self.leave_word)
            run.shared, _ = await setup.open(exit_stack, run.clock)  # what is to be said of it the driver says too
            run.shared.make_limiter = partial(LeasedLimiter, self._desk, self._leases, number, self.number)
            staleness = Staleness(self.engine, options.max_version_lag)
            exit_stack.enter_context(staleness.cancelling(run.plays.values()))
            yield

    def _made(self, packed: bytes) -> tuple[RunSent, Any]:
        sent = self._unpacked(packed)
        return sent, _constructed(sent)

    def _unpacked(self, packed: bytes) -> RunSent:
        try:
            sent: RunSent = pickle.loads(packed)
        except ImportError as error:
            raise BadEnvironment(
                f"{self.name} cannot import what the run is of ({error}): install "
                f"it on every machine, or give RayEngines(runtime_env={{'working_dir': '.'}})."
            ) from None
        except Exception as error:
            raise BadEnvironment(
                f"{self.name} cannot make the run again from what was sent: {type(error).__name__}: {error}"
            ) from error
        return sent

    async def close_run(self, number: int) -> list[str]:
        """End a run here, once nothing of it is played; gives what went wrong on the way out, for people."""
        run = self._runs.pop(number, None)
        if run is None:  # it joined when no further worker was to have it
            return []
        run.begun.set()
        run.over.set()
        await run.closed.wait()
        return [f"worker {self.number}: {run.failure}"] if run.failure is not None else []

    async def drain(self, number: int) -> None:
        """Take note that no further episode of this run begins."""
        if number in self._runs:
            self._runs[number].shared.endpoints.draining.set()

    # --- episodes

    async def play(self, run_number: int, number: int, packed: bytes) -> Played:
        """Play an attempt at an episode to its end; which one, is an `EpisodeKey` that was pickled."""
        run = self._runs[run_number]
        key = self._key(packed)
        play = run.plays[number] = Play(run.shared, key)
        if number in run.cut:  # the word of it was faster
            play.cancel(run.cut.pop(number))
        try:
            trajectories = await play.run()
        finally:
            del run.plays[number]
        # The driver has the task, and its reader shall find the very object that it gave.
        return Played([replace(each, task=NO_TASK) for each in trajectories], play.faults, play.permanent)

    def _key(self, packed: bytes) -> EpisodeKey:
        try:
            key: EpisodeKey = pickle.loads(packed)
        except Exception as error:
            raise BadTask(
                f"{self.name} cannot read a task that was sent to it ({error}): what a task holds has to be importable "
                "on every machine."
            ) from error
        return key

    async def cancel(self, run_number: int, number: int, ending: Ending | None) -> None:
        """Cut an attempt where it stands; `play` then gives what there is of it."""
        run = self._runs.get(run_number)
        if run is None:
            return
        if number in run.plays:
            run.plays[number].cancel(ending)
        else:
            run.cut[number] = ending

    # --- the engine, for its trainer

    async def check_weights(self, given: Any, version: str) -> float:
        """Compare new weights with the model, which goes on; gives the seconds that it took.

        Weights that a transfer brings are only announced here; `meet` and `receive_weights` do the rest.
        """
        self._checked = self._relay = None
        weights = await _read(given)
        if isinstance(weights, Announced):
            weights = self._relay = RelayedTransfer(weights)
        self._checked = await self.engine.check_update(weights, version=version)
        return self._checked.seconds

    async def forget_checked(self) -> None:
        """Let go of what was compared last and was not loaded."""
        self._checked = self._relay = None

    async def update_weights(self, fleet: CheckedUpdate, mode: PauseMode) -> WeightUpdate:
        """Exchange the weights for those that were checked last."""
        checked, self._checked = self._checked, None
        if checked is None or checked.version != fleet.version:  # it joined after the others had compared theirs
            checked = await self.engine.check_update(await _read(fleet.weights), version=fleet.version)
        checked = replace(checked, proof=fleet.proof)
        return await self.engine.apply_update(checked, mode=mode)

    # --- weights that come to all workers at once

    async def meet(self, init: Mapping[str, Any]) -> None:
        """Join the trainer of the transfer that was checked last.

        Raises:
            BadWeights: they do not meet.
        """
        checked, relay = self._checked, self._relay
        self._checked = self._relay = None
        assert checked is not None, "it was checked"
        assert relay is not None, "it was announced"
        relay = RelayedTransfer(relay.announced, init)
        self._checked = await self.engine.check_update(relay, version=checked.version)
        self._relay = relay

    async def stand_still(self, number: int, mode: PauseMode) -> float:
        """Pause until `receive_weights` or `go_on`, unless the engine does not run; gives the seconds that it took.

        Args:
            number: higher each time.
            mode: what becomes of the turns that are being sampled.
        """
        began = time.monotonic()
        async with self._halt:
            with anyio.CancelScope() as self._halting:
                if self.engine.state is EngineState.RUNNING and number > self._called_off:
                    await self.engine.pause(mode)
                    self._halted = True
        return time.monotonic() - began

    async def go_on(self, number: int) -> None:
        """End the `stand_still` of this number, also where that has not paused yet or comes later than this."""
        self._called_off = number
        self._halting.cancel()
        await self._end_halt()

    async def _end_halt(self) -> None:
        async with self._halt:
            if self._halted:
                self._halted = False
                await self.engine.resume()

    async def receive_weights(self, version: str, proof: WeightProof | None = None) -> WeightUpdate:
        """Exchange the weights for those that `take_step` brings, and go on.

        Raises:
            BadControl: other weights were checked meanwhile.
        """
        checked, relay = self._checked, self._relay
        self._checked = None
        try:
            if checked is None or relay is None or checked.version != version:
                raise BadControl(f"the weights {version!r} were not checked last")
            return await self.engine.apply_update(replace(checked, proof=proof))
        finally:
            if relay is not None:
                relay.close()
            await self._end_halt()

    async def take_step(self, step: TransferStep, part: Any = None) -> None:
        """Have the engine take a step of the transfer; returns when it did."""
        assert self._relay is not None, "it was announced"
        await self._relay.bring(step, part)

    # --- the rest of what a trainer asks

    async def add_adapter(self, name: str, number: int, given: Any, config: Mapping[str, Any] | None) -> str:
        """Add an adapter under the number that it has on all workers."""
        return await self.engine.add_adapter(name, await _read(given), config=config, number=number)

    async def control(self, call: str, *arguments: Any, **named: Any) -> Any:
        """One of the engine's other calls for its trainer."""
        return await getattr(self.engine, call)(*arguments, **named)

    async def catch_up(self, catch: Catch) -> None:
        """Bring the engine to the weights and adapters that the others have; again where these have gone on."""
        engine, caught = self.engine, self._caught
        if catch.readable and catch.version != caught.version:
            await engine.update_weights(await _read(catch.weights), version=catch.version, proof=catch.proof)
        for name in {adapter[0] for adapter in caught.adapters} - {adapter[0] for adapter in catch.adapters}:
            await engine.remove_adapter(name)
        for adapter in catch.adapters:
            if adapter not in caught.adapters:
                await self.add_adapter(*adapter)
        self._caught = catch

    async def stand(self, catch: Catch) -> None:
        """Pause the engine, or have it sleep, as the others do."""
        if catch.paused:
            await self.engine.pause()
        if catch.asleep:
            await self.engine.sleep(catch.asleep)
        if catch.awake:
            await self.engine.wake(catch.awake)


async def _read(given: Any) -> Any:
    """What the driver gave: where it put it, or the very thing."""
    # In a thread: it may have to come from another machine first, and episodes go on meanwhile.
    return await anyio.to_thread.run_sync(given.read) if isinstance(given, Stored) else given


def _constructed(sent: RunSent) -> Any:
    arguments, named = sent.arguments
    try:
        return sent.environment(*arguments, **named)
    except (Exception, SystemExit) as error:
        raise BadEnvironment(
            f"{sent.environment.__name__} could not be constructed: {type(error).__name__}: {error}"
        ) from error


def _to_nobody(words: str) -> None:
    """Nobody would find them."""


def _end_stuck(number: int, leave_word: Callable[[str], None], blocker: Blocker) -> NoReturn:
    """End the process, from the thread that watches: its event loop cannot. The driver plays its episodes again."""
    words = (
        f"the event loop stands still in {blocker.where} and cannot be freed from outside: {blocker.advice}. The "
        "worker ends"
    )
    print(f"worker {number}: {words}.", file=sys.stderr, flush=True)
    with suppress(Exception):  # it ends in any case
        leave_word(words)
    exit_now(1)
