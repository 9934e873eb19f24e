"""A worker: an engine and the environments of its episodes in one process, controlled by its driver."""

from __future__ import annotations

import heapq
import itertools
import pickle
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, Final, NoReturn, cast

import anyio
import anyio.to_thread

from runner.cluster.engine_process import EngineProcess, known_of
from runner.cluster.limiters import LeasedLimiter, LimiterService
from runner.cluster.protocol import (
    AttemptResult,
    FleetSnapshot,
    Heartbeat,
    OtherKnown,
    PlayingNow,
    RunSpec,
    StoredObject,
)
from runner.concurrency.loop_lag import Blocker, LagMonitor
from runner.concurrency.threads import Workers
from runner.engines.base import BaseEngine, Engine
from runner.engines.proofs import ProofFigures, WeightProof
from runner.engines.state import CheckedUpdate, EngineState, PauseMode, WeightUpdate
from runner.engines.transfers import Announced, RelayedTransfer, TransferStep
from runner.engines.vllm.runtime import VllmRuntime
from runner.engines.weights import Checkpoint
from runner.episode.key import EpisodeKey
from runner.episode.lifecycle import EpisodeRunner
from runner.episode.limits import Ending
from runner.episode.shared import RunShared
from runner.errors import BadControl, BadEnvironment, BadInput, BadTask, BadWeights
from runner.runs.event_loop import exit_now
from runner.runs.run_setup import RunSetup
from runner.runs.staleness import Staleness
from runner.tasks import Task

__all__ = ["Worker"]

MAX_OLDEST_EPISODES: Final = 10
"""Maximum number of episodes in a heartbeat: the episodes whose activity has lasted longest."""

NO_TASK: Final = Task("", "")


@dataclass(eq=False, kw_only=True)
class WorkerRun:
    shared: RunShared = field(init=False)
    lag: LagMonitor | None = None
    episodes: dict[int, EpisodeRunner] = field(default_factory=dict)
    """The attempts in flight, by the driver's numbers."""
    cut: dict[int, Ending | None] = field(default_factory=dict)
    """Endings of attempts that were cut before they began or just after they ended, by the driver's numbers."""
    is_kept: bool = False
    """True once a call of `keep_run` keeps the run open."""
    others: dict[str, BaseEngine] = field(default_factory=dict)
    """The engines of agents that have their own engine, by agent."""
    entered: anyio.Event = field(default_factory=anyio.Event)
    """Set once the engines in `others` have been entered, or have failed."""
    clock: datetime | None = None
    begun: anyio.Event = field(default_factory=anyio.Event)
    """Set once the clock is known, or the run is closed without one."""
    opened: anyio.Event = field(default_factory=anyio.Event)
    """Set once the run can be played, or has failed."""
    over: anyio.Event = field(default_factory=anyio.Event)
    """Set when the run is to be closed."""
    closed: anyio.Event = field(default_factory=anyio.Event)
    failure: Exception | None = None
    """The error that prevents the run from being played, or that occurred while the run was closed."""


class Worker(EngineProcess):
    """An engine and the episodes that are played on it. The driver calls the methods, each in a task of its own.

    Args:
        engine: an engine that was not entered.
        number: the driver's number for the worker, never used for another one.
        limiter_service: grants leases of limiters that the whole run shares.
    """

    def __init__(self, engine: BaseEngine, number: int, limiter_service: LimiterService) -> None:
        super().__init__(engine)
        self.number = number
        self._limiter_service = limiter_service
        self._runs: dict[int, WorkerRun] = {}
        self._caught = FleetSnapshot()
        self._checked: CheckedUpdate | None = None
        self._relay: RelayedTransfer | None = None
        self._hold_lock = anyio.Lock()
        self._hold_scope = anyio.CancelScope()
        self._released_number = 0
        self._is_held = False
        self._leases = itertools.count()
        self.record_exit_reason: Callable[[str], None] = _discard_reason
        """Called with the reason when the worker ends itself."""

    @property
    def name(self) -> str:
        """The name of the worker, for people."""
        return f"worker {self.number} on {socket.gethostname()}"

    async def end(self) -> None:
        """End the worker: close its runs, and make `live` close the engine and return."""
        for number in list(self._runs):
            await self.close_run(number)
        await super().end()

    async def heartbeat(self) -> Heartbeat:
        episodes = [(number, episode) for run in self._runs.values() for number, episode in run.episodes.items()]
        oldest = heapq.nsmallest(MAX_OLDEST_EPISODES, episodes, key=lambda numbered: numbered[1].since)
        return Heartbeat(
            now=anyio.current_time(),
            stats=self.engine.stats(),
            lag=max((run.lag.percentile(99) for run in self._runs.values() if run.lag is not None), default=0.0),
            playing=len(episodes),
            oldest=[
                PlayingNow(number, episode.turns_taken, episode.activity, episode.since) for number, episode in oldest
            ],
        )

    # --- runs

    async def keep_run(self, number: int, packed: bytes, clock: datetime | None) -> None:
        """Set a run up, and keep it until `close_run`.

        Faults are reported by `run_opened`, `others_entered` and `close_run`. Without a clock, only the engines of the
        run's other agents are entered, until another call passes the clock.

        Args:
            number: the driver's number for the run.
            packed: a pickled `RunSpec`.
            clock: the time that chat templates use; None if another call passes it.
        """
        run = self._runs.setdefault(number, WorkerRun())  # another call may have created the entry
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
            BadInput, EngineError: this worker cannot set up the run.
        """
        run = self._runs.setdefault(number, WorkerRun())
        await run.opened.wait()
        if run.failure is not None:
            raise run.failure

    async def others_entered(self, number: int) -> None:
        """Return once `keep_run` has entered the engines of the run's other agents.

        Raises:
            BadInput, EngineError: this worker cannot enter one of the engines, or the run cannot be read.
        """
        run = self._runs.setdefault(number, WorkerRun())
        await run.entered.wait()
        if run.failure is not None:
            raise run.failure

    async def others_known(self, number: int) -> dict[str, OtherKnown]:
        """Return data for the driver about the engines of other agents, by agent; {} before the engines are entered."""
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
        # A thread is used: an author's constructor may read files for minutes, and the event loop must answer the
        # driver.
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
            if run.clock is None:  # the run was closed before it began
                yield
                return
            run.lag = await exit_stack.enter_async_context(LagMonitor(workers))
            run.lag.on_stuck = partial(_end_stuck, self.number, self.record_exit_reason)
            resources = await setup.open_resources(exit_stack)
            run.shared, _ = await setup.share(run.clock, *resources)  # the notes are not used: the driver prints them
            run.shared.make_limiter = partial(LeasedLimiter, self._limiter_service, self._leases, number, self.number)
            staleness = Staleness(self.engine, options.max_version_lag)
            exit_stack.enter_context(staleness.cancelling(run.episodes.values()))
            yield

    def _made(self, packed: bytes) -> tuple[RunSpec, Any]:
        sent = self._unpacked(packed)
        return sent, _constructed(sent)

    def _unpacked(self, packed: bytes) -> RunSpec:
        try:
            sent: RunSpec = pickle.loads(packed)
        except ImportError as error:
            raise BadEnvironment(
                f"{self.name} cannot import the code of the run ({error}): install "
                f"it on every machine, or give RayEngines(runtime_env={{'working_dir': '.'}})."
            ) from None
        except Exception as error:
            raise BadEnvironment(
                f"{self.name} cannot construct the run that was sent: {type(error).__name__}: {error}"
            ) from error
        return sent

    async def close_run(self, number: int) -> list[str]:
        """End a run on this worker, and return the faults that occurred while it ended, for people."""
        run = self._runs.pop(number, None)
        if run is None:  # this worker started while the run was closing
            return []
        run.begun.set()
        run.over.set()
        await run.closed.wait()
        return [f"worker {self.number}: {run.failure}"] if run.failure is not None else []

    async def drain(self, number: int) -> None:
        """Set the `draining` event of a run, since the driver starts no further episode of it."""
        if number in self._runs:
            self._runs[number].shared.endpoints.draining.set()

    # --- episodes

    async def play(self, run_number: int, number: int, packed: bytes) -> AttemptResult:
        """Play an attempt at an episode to its end. `packed` is a pickled `EpisodeKey`.

        Raises:
            BadTask: the task cannot be read on this machine.
        """
        run = self._runs[run_number]
        key = self._key(packed)
        episode = run.episodes[number] = EpisodeRunner(run.shared, key)
        if number in run.cut:  # the cut arrived before this call
            episode.cancel(run.cut.pop(number))
        try:
            trajectories = await episode.run()
        finally:
            del run.episodes[number]
        # The task is left out, since the driver puts the task of its own caller into the trajectories.
        return AttemptResult([replace(each, task=NO_TASK) for each in trajectories], episode.faults, episode.permanent)

    def _key(self, packed: bytes) -> EpisodeKey:
        try:
            key: EpisodeKey = pickle.loads(packed)
        except Exception as error:
            raise BadTask(
                f"{self.name} cannot read a task that was sent to it ({error}): the classes of its values have to be "
                "importable on every machine."
            ) from error
        return key

    async def cancel(self, run_number: int, number: int, ending: Ending | None) -> None:
        """Cut an attempt; `play` then returns its partial results."""
        run = self._runs.get(run_number)
        if run is None:
            return
        if number in run.episodes:
            run.episodes[number].cancel(ending)
        else:
            run.cut[number] = ending

    # --- control by the trainer

    async def check_weights(self, given: Any, version: str) -> float:
        """Compare new weights with the model, and return the seconds that this took. The engine continues to sample.

        For a transfer, only the announced tensors are compared; `receive_weights` loads the weights.

        Raises:
            BadWeights: the weights do not fit the model.
        """
        self._checked = self._relay = None
        weights = await _read(given)
        if isinstance(weights, Announced):
            weights = self._relay = RelayedTransfer(weights)
        self._checked = await self.engine.check_update(weights, version=version)
        return self._checked.seconds

    async def forget_checked(self) -> None:
        """Release weights that were compared and not loaded."""
        self._checked = self._relay = None

    async def update_weights(self, fleet: CheckedUpdate, mode: PauseMode) -> WeightUpdate:
        """Load the weights that were checked last. If the fleet has other weights, check and load the fleet's."""
        checked, self._checked = self._checked, None
        if (
            checked is None or checked.version != fleet.version
        ):  # this worker started after the other workers had compared the weights
            checked = await self.engine.check_update(await _read(fleet.weights), version=fleet.version)
        checked = replace(checked, proof=fleet.proof)
        return await self.engine.apply_update(checked, mode=mode)

    # --- weights that come to all workers at once

    async def meet(self, init: Mapping[str, Any]) -> None:
        """Connect to the trainer of the transfer that was checked last.

        Raises:
            BadWeights: the connection fails.
        """
        checked, relay = self._checked, self._relay
        self._checked = self._relay = None
        assert checked is not None, "the weights were checked"
        assert relay is not None, "it was announced"
        relay = RelayedTransfer(relay.announced, init)
        self._checked = await self.engine.check_update(relay, version=checked.version)
        self._relay = relay

    async def hold(self, number: int, mode: PauseMode) -> float:
        """Pause the engine if it runs, and return the seconds that this took.

        `receive_weights` and `release` resume the engine.

        Args:
            number: number of the pause, which increases with each call.
            mode: the treatment of turns that are being sampled.
        """
        began = time.monotonic()
        async with self._hold_lock:
            with anyio.CancelScope() as self._hold_scope:
                if self.engine.state is EngineState.RUNNING and number > self._released_number:
                    await self.engine.pause(mode)
                    self._is_held = True
        return time.monotonic() - began

    async def release(self, number: int) -> None:
        """End the pause of this number, even if it has not begun or is requested after this call."""
        self._released_number = number
        self._hold_scope.cancel()
        await self._resume_held()

    async def _resume_held(self) -> None:
        async with self._hold_lock:
            if self._is_held:
                self._is_held = False
                await self.engine.resume()

    async def receive_weights(self, version: str, proof: WeightProof | None = None) -> WeightUpdate:
        """Load the weights that arrive by `take_step`, and continue sampling.

        Raises:
            BadControl: the last checked weights are not a transfer of this version.
        """
        checked, relay = self._checked, self._relay
        self._checked = None
        try:
            if checked is None or relay is None or checked.version != version:
                raise BadControl(f"the weights {version!r} were not checked last: check them again")
            return await self.engine.apply_update(replace(checked, proof=proof))
        finally:
            if relay is not None:
                relay.close()
            await self._resume_held()

    async def take_step(self, step: TransferStep, part: Any = None) -> None:
        """Run one step of the transfer on the engine, and return when the step is done."""
        assert self._relay is not None, "it was announced"
        await self._relay.bring(step, part)

    # --- other calls of the trainer

    async def add_adapter(self, name: str, number: int, given: Any, config: Mapping[str, Any] | None) -> str:
        """Add an adapter under the number that it has on all workers."""
        return await self.engine.add_adapter(name, await _read(given), config=config, number=number)

    async def control(self, call: str, *arguments: Any, **named: Any) -> Any:
        """Call one of the engine's other methods for its trainer."""
        return await getattr(self.engine, call)(*arguments, **named)

    async def checkpoint(self) -> tuple[Checkpoint, Any] | None:
        """Return the engine's checkpoint and the configuration of its model; None without a model."""
        runtime = self.engine.runtime
        return await runtime.checkpoint() if isinstance(runtime, VllmRuntime) else None

    async def wake(self, tags: Sequence[str]) -> ProofFigures | None:
        """Wake the engine, and return the figures of the proof of its weights; None without a proof."""
        await self.engine.wake(tags)
        return self.engine.proof_figures

    async def score(self, ids: Sequence[int], named: Mapping[str, Any]) -> list[float]:
        """Return the engine's log-probabilities of given ids; `named` has the keyword arguments of `Engine.score`."""
        return await cast("Engine", self.engine).score(ids, **named)

    async def catch_up(self, snapshot: FleetSnapshot) -> None:
        """Load the weights and adapters of the fleet's state. May be called again with a later state."""
        engine, caught = self.engine, self._caught
        if not caught.version:
            await self._prove_first_weights(snapshot)
        if snapshot.readable and snapshot.version != caught.version:
            await engine.update_weights(await _read(snapshot.weights), version=snapshot.version, proof=snapshot.proof)
        for name in {adapter[0] for adapter in caught.adapters} - {adapter[0] for adapter in snapshot.adapters}:
            await engine.remove_adapter(name)
        for adapter in snapshot.adapters:
            if adapter not in caught.adapters:
                await self.add_adapter(*adapter)
        self._caught = snapshot

    async def _prove_first_weights(self, snapshot: FleetSnapshot) -> None:
        """Score the proofs of the first weights, as the other workers did, to measure differences that rounding causes.

        Raises:
            BadWeights: the engine started with other weights than the other workers, and there was no update since.
        """
        for proof in snapshot.first_proofs:
            try:
                await self.engine.prove(proof)
            except BadWeights:
                if not snapshot.version:
                    raise
                # The trainer may have overwritten the folder of the first weights. Later proofs then have the
                # tolerances that `engines/proofs.py` lists by number type.

    async def apply_snapshot(self, snapshot: FleetSnapshot) -> None:
        """Pause the engine, put it to sleep, or wake parts of its memory, as in the fleet's state."""
        if snapshot.paused:
            await self.engine.pause()
        if snapshot.asleep:
            await self.engine.sleep(snapshot.asleep)
        if snapshot.awake:
            await self.engine.wake(snapshot.awake)


async def _read(given: Any) -> Any:
    """Return a value from the driver; for a reference, the value that the reference refers to."""
    # A thread is used, since the value may come from another machine, and episodes continue during that time.
    return await anyio.to_thread.run_sync(given.read) if isinstance(given, StoredObject) else given


def _constructed(sent: RunSpec) -> Any:
    arguments, named = sent.arguments
    try:
        return sent.environment(*arguments, **named)
    except (Exception, SystemExit) as error:
        raise BadEnvironment(
            f"{sent.environment.__name__} could not be constructed: {type(error).__name__}: {error}"
        ) from error


def _discard_reason(reason: str) -> None:
    """Discard the reason, since there is no place to record it."""


def _end_stuck(number: int, record_exit_reason: Callable[[str], None], blocker: Blocker) -> NoReturn:
    """End this process from the watchdog's thread, since the event loop hangs. The driver plays the episodes again."""
    words = (
        f"the event loop hangs in {blocker.where} and cannot be freed from outside: {blocker.advice}. The worker ends"
    )
    print(f"worker {number}: {words}.", file=sys.stderr, flush=True)
    with suppress(Exception):  # the process ends in any case
        record_exit_reason(words)
    exit_now(1)
