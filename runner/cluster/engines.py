"""`FleetEngine`: engines on many machines as one engine that plays whole episodes. It is independent of Ray."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import fields, replace
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.lowlevel import current_token

from runner import checked
from runner.cluster.driver import Driver
from runner.cluster.engine_client import HostedEngine
from runner.cluster.fleet import Fleet
from runner.cluster.protocol import Launcher, RunSpec
from runner.cluster.run_setups import RunSetups
from runner.cluster.runtime import FleetRuntime
from runner.cluster.worker_handle import WorkerHandle
from runner.engines.base import BaseEngine, DeltaStream, Engine, EngineStats, GenerationRequest
from runner.engines.proofs import ProofFigures, WeightProof
from runner.errors import BadControl, BadInput, BadOption, EngineDead
from runner.options import Constraint, Sampling
from runner.runs.options import check_engine
from runner.runs.player import FleetWorker, IdleReason, PlayingEngine
from runner.runs.run_setup import RunSetup

__all__ = ["FleetEngine"]

STALL_SECONDS = 600.0
"""Seconds that a fleet waits for machines by default."""

_SENDABLE = "give values that can be sent, such as functions of a module"

_SUMMED = (
    *("open", "running", "queued", "waiting", "first_waiting", "live_sessions"),
    *("prefix_queries", "prefix_hits", "prompt_tokens", "steps"),
)


class FleetEngine(PlayingEngine):
    """Many engines of one kind, each in a process together with the environments of its episodes.

    Args:
        engine: the engine of each worker, not entered.
        launcher: starts workers.
        workers: the number of workers, or a pair: the minimum, with which the fleet begins, and the maximum.
        stall_seconds: seconds that the fleet may have too few workers before it counts as dead, unless enough engines
            are starting.
    """

    runtime: FleetRuntime | None

    def __init__(
        self,
        engine: Engine,
        launcher: Launcher,
        workers: int | tuple[int, int],
        *,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        kind = type(self).__name__
        check_engine(f"{kind}(engine)", engine)
        if not isinstance(engine, Engine) or isinstance(engine, PlayingEngine):
            raise BadOption(
                f"{kind}({type(engine).__name__}(...)): each worker needs its own engine of token ids, such as "
                "VllmEngine('MODEL'). A run in one process, without workers, can use a server or an API."
            )
        if engine.running:
            raise BadOption(f"{kind}(engine): this engine was entered here and cannot be sent: pass another one.")
        self.engine = engine
        self.least, self.most = _range(kind, workers)
        self.launcher = launcher
        self._stall_seconds = stall_seconds
        self._driver: Driver | None = None
        self._exit = AsyncExitStack()
        self.runtime = None

    # --- start and end

    async def __aenter__(self) -> Self:
        if self.running:
            raise RuntimeError("this fleet is already running: leave it before you enter it again")
        async with AsyncExitStack() as exit_stack:
            fleet = Fleet(self.least, self.most)
            driver = Driver(self.launcher, self.engine, fleet, stall_seconds=self._stall_seconds)
            self._driver = driver  # this is set before the block, so that the display shows workers as they start
            await exit_stack.enter_async_context(driver.at_work())
            known, first = await driver.known(), driver.first
            assert first is not None, "a worker that plays has described itself"
            self.tokenizer, self.template, self.stop_ids = known.tokenizer, known.template, known.stop_ids
            self.vocabulary, self.context = known.vocabulary, first.context
            self.notes = first.notes
            if first.controlled:
                self.runtime = FleetRuntime(driver, first)
            self._exit = exit_stack.pop_all()
        self.loop, self.running = current_token(), True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.running = False
        await self._exit.__aexit__(kind, error, traceback)

    def restore_choices(self, described: Mapping[str, Any]) -> None:
        """Make every worker's engine use the choices that the engine made at the first start of the resumed run."""
        self.engine.restore_choices(described)

    @property
    def driver(self) -> Driver:
        """The driver of the workers; not for authors. Raises BadControl if the fleet was not entered."""
        if self._driver is None:
            raise BadControl(f"{type(self).__name__} is not running: use it as `async with`, or give it to a run.")
        return self._driver

    # --- calls of a run

    @property
    def places(self) -> int:  # type: ignore[override]  # a property, since workers come and go
        """Number of requests that run at once on all workers."""
        return max(1, self.driver.fleet.width // 2)

    @property
    def is_deserted(self) -> bool:
        """True if no worker plays; False before the fleet is entered."""
        return self._driver is not None and not self._driver.handles

    @property
    def events(self) -> Sequence[str]:
        """The latest events of the fleet, for people, such as lost workers with the reasons."""
        return self._driver.events if self._driver is not None else ()

    def workers(self) -> list[FleetWorker]:
        """The workers that play, in the order of their numbers, as of their last heartbeats."""
        if self._driver is None:
            return []
        now, newest = anyio.current_time(), self.weight_version
        return [_shown(handle, now, newest) for handle in self._driver.handles]

    def absent(self) -> Mapping[IdleReason, int]:
        """Number of workers that do not play, by reason."""
        if self._driver is None:
            return {}
        counted = self._driver.absent
        return {why: counted[why] for why in IdleReason if counted[why]}

    def stats(self) -> EngineStats:
        """The statistics of all workers' engines together: sums, and the highest usage of a KV cache."""
        heartbeats = [handle.heartbeat.stats for handle in self.driver.handles if handle.heartbeat is not None]
        usages = [stats.kv_usage for stats in heartbeats if stats.kv_usage is not None]
        return EngineStats(
            **{name: sum(getattr(stats, name) for stats in heartbeats) for name in _SUMMED},
            kv_usage=max(usages, default=None),
            sampled_tokens=self.driver.sampled_by_the_gone + sum(stats.sampled_tokens for stats in heartbeats),
            tokens_per_second=sum(stats.tokens_per_second for stats in heartbeats),
            weight_version=self.weight_version,
            state=self.state,
        )

    def stream(self, request: GenerationRequest) -> DeltaStream:
        """Refuse the request, since the engines run on the workers.

        Raises:
            BadControl: always.
        """
        raise BadControl(
            f"{type(self).__name__} plays whole episodes on its workers and cannot sample a single turn: generate "
            "turns in an episode, or use a separate engine for other requests."
        )

    def is_alive(self) -> bool:
        """Return True if there are enough workers, or may soon be enough."""
        return self.running and not self.driver.fleet.hopeless

    async def health(self) -> None:
        """Return if there are enough workers, or may soon be enough.

        Raises:
            EngineDead: there are not enough workers; the message has the reason.
        """
        self.driver.require_alive()

    def describe(self) -> dict[str, Any]:
        """The first worker's description of its engine, and the number of workers, for the header of a run file."""
        first = self.driver.first
        assert first is not None, "a fleet that runs has a worker"
        return {**first.description, "workers": [self.least, self.most]}

    async def score(
        self,
        ids: Sequence[int],
        *,
        start: int = 1,
        sampling: Sampling | None = None,
        constraint: Constraint | None = None,
    ) -> list[float]:
        """Return the log-probabilities of given ids, as `Engine.score` does, by the worker with the lowest load."""
        named = {"start": start, "sampling": sampling, "constraint": constraint}
        scores: list[float] = await self.driver.ask_one("score", list(ids), named)
        return scores

    # --- control by the trainer

    async def check_proof(self, proof: WeightProof, *, measures: bool = False) -> None:
        """Check that the engine of every worker can score a proof; `measures` has no effect.

        Raises:
            BadWeights: the proof has ids outside of the vocabulary, or too many ids.
            BadControl: the engines cannot score a proof.
        """
        await self._fleet_runtime.control("check_proof", proof)

    async def prove(self, proof: WeightProof, adapter: str | None = None) -> ProofFigures:
        """Compare the weights of every worker with a proof, and return the worst figures (the largest median).

        Raises:
            BadWeights: the proof does not fit, or does not hold on a worker.
            BadControl: the engines cannot score, or they sleep.
            EngineDead: no worker answered.
        """
        runtime, driver = self._fleet_runtime, self.driver
        # The lock is not held during the proof: a paused fleet has to be resumed for it, and `resume` takes the lock.
        async with driver.settled:
            # The proof is kept, since workers that start later score it too.
            if not driver.snapshot.version and adapter is None:
                driver.change_snapshot(first_proofs=(*driver.snapshot.first_proofs, proof))
        try:
            figures: Mapping[Any, ProofFigures] = await runtime.control("prove", proof, adapter)
        except BadInput:
            async with driver.settled:
                kept = tuple(each for each in driver.snapshot.first_proofs if each is not proof)
                driver.change_snapshot(first_proofs=kept)
            raise
        if not figures:
            driver.require_alive()
            raise EngineDead("prove(): no worker answered. Try again later.")
        return max(figures.values(), key=lambda each: each.median)

    @property
    def _fleet_runtime(self) -> FleetRuntime:
        self._controlled()
        assert self.runtime is not None
        return self.runtime

    # --- runs

    def sent(self, setup: RunSetup) -> RunSetups:
        """Pack a run for the workers.

        Raises:
            BadOption: a part of the run cannot be sent, or the workers cannot enter an engine of `engines=`.
        """
        options, environment = setup.options, setup.environment
        kind = type(self).__name__
        for name, engine in options.engines.items():
            if engine is self:
                raise BadOption(
                    f"engines[{name!r}]: {kind} already plays every agent that is not in engines=: leave the entry out."
                )
            if engine.running and not isinstance(engine, HostedEngine):
                raise BadOption(
                    f"engines[{name!r}]: this engine was entered here, but each worker enters its own copy: give an "
                    "engine that was not entered."
                )
        for_workers = replace(options, tasks=None, file=None, retry_failed=False, observers=())
        what = f"{kind}: the run goes to its workers, but"
        for option in fields(for_workers):
            self.launcher.pack(getattr(for_workers, option.name), f"{what} {option.name}= cannot", _SENDABLE)
        arguments, named = environment.made_with
        for name, value in environment.construction().items():
            fix = "make it in lifespan() or setup(), on the worker"
            self.launcher.pack(value, f"{what} {type(environment).__name__}({name}=) cannot", fix)
        run = RunSpec(environment=type(environment), arguments=(arguments, named), options=for_workers)
        fix = "put the class into a module that every worker can import"
        packed: bytes = self.launcher.pack(run, f"{what} {type(environment).__name__} cannot", fix)
        others = {name: each for name, each in options.engines.items() if not isinstance(each, HostedEngine)}
        sent = RunSetups(lambda: self.driver, packed, others)
        self._enter_besides(sent.worker_engines)
        return sent

    def _enter_besides(self, engines: Collection[BaseEngine]) -> None:
        """Reserve the resources that a worker needs to enter its own copies of these engines. By default, do nothing.

        Raises:
            BadOption: the workers do not have enough room.
        """


def _range(kind: str, workers: int | tuple[int, int]) -> tuple[int, int]:
    least, most = workers if isinstance(workers, tuple) and len(workers) == 2 else (workers, workers)
    for number in (least, most):
        checked.whole(f"{kind}(workers={workers!r:.60})", number, least=1, otherwise=", or (least, most)")
    if least > most:
        raise BadOption(f"{kind}(workers={workers!r}): give (least, most) with least <= most.")
    return least, most


def _shown(handle: WorkerHandle, now: float, newest: str) -> FleetWorker:
    assert handle.info is not None, "it plays"
    heartbeat = handle.heartbeat
    oldest = heartbeat.oldest[0] if heartbeat is not None and heartbeat.oldest else None
    # An update ends when all workers have answered. A heartbeat may show earlier that a worker has the new weights.
    exchanged = heartbeat is not None and heartbeat.stats.weight_version == newest
    return FleetWorker(
        number=handle.number,
        node=handle.info.node,
        pid=handle.info.pid,
        playing=len(handle.slot.assignments),
        width=handle.slot.width,
        version=newest if exchanged else handle.version,
        lag=heartbeat.lag if heartbeat is not None else 0.0,
        silent=now - handle.heartbeat_at,
        oldest=oldest.activity if oldest is not None else "",
        waited=now - handle.ahead - oldest.since if oldest is not None else 0.0,
    )
