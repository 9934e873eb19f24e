"""The trainer's calls to a fleet: each call goes to all workers, and workers that start later get the same state."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from runner.cluster.broadcast import compare
from runner.cluster.driver import Driver
from runner.cluster.protocol import WorkerInfo
from runner.cluster.transfers import FleetTransfers
from runner.cluster.worker_handle import WorkerHandle
from runner.engines.adapters import Adapters, AdapterVersion
from runner.engines.gate import AdmissionGate
from runner.engines.proofs import ProofFigures
from runner.engines.runtime import EngineRuntime, OpenRequest
from runner.engines.state import SLEEP_TAGS, CheckedUpdate, PauseMode, WeightUpdate
from runner.engines.weights import LocalTransfer, WeightTransfer
from runner.errors import BadInput, EngineDead
from runner.logs import logger_for, warn_always

__all__ = ["FleetRuntime"]

_log = logger_for("cluster")


class FleetRuntime(EngineRuntime[OpenRequest]):
    """The `EngineRuntime` of many engines. Nothing is sampled in this process, so the admission gate stays empty.

    The driver keeps the fleet's state, which new workers must reach, in `snapshot`. No worker is added during a call.
    """

    def __init__(self, driver: Driver, first: WorkerInfo) -> None:
        super().__init__(
            AdmissionGate(first.places, first.places * first.context),
            FleetAdapters(driver, first.adapters),
            context=first.context,
            version=first.weight_version,
        )
        self.driver = driver
        self.transfers = FleetTransfers(driver)
        """The connection to trainers that send weights to all workers at once."""
        self._proof_waits = False

    def require_alive(self) -> None:
        self.driver.require_alive()

    async def pause(self, mode: PauseMode) -> None:
        async with self.driver.settled:
            await self._control("pause", mode)
            self.driver.change_snapshot(paused=True)

    async def resume(self) -> None:
        async with self.driver.settled:
            await self._control("resume")
            self.driver.change_snapshot(paused=False)

    async def check_update(self, given: Any, version: str) -> CheckedUpdate:
        """Compare new weights with the model on every worker, and connect the workers if a trainer sends the weights.

        Raises:
            BadWeights: the weights do not fit, or the connection fails; no worker was changed.
            EngineError: a worker was lost, and the others cannot connect without it.
        """
        if isinstance(given, LocalTransfer | WeightTransfer):
            began = time.monotonic()
            await self.transfers.check(given, version)
            return CheckedUpdate(version, time.monotonic() - began, given)
        self.transfers.forget()
        weights = await self.driver.launcher.put(given)
        handles = self.driver.members
        try:
            seconds = await compare(handles, "check_weights", weights, version, patience=self.driver.stall_seconds)
        except BadInput:
            for handle in handles:
                handle.process.send("forget_checked")
            raise
        return CheckedUpdate(version, max(seconds.values(), default=0.0), weights)

    async def apply_update(self, checked: CheckedUpdate, mode: PauseMode) -> WeightUpdate:
        """Update the weights on every worker, and return when all workers that did not fail have the new weights.

        A worker does not wait for other workers. A worker that fails is dismissed, and its successor starts with the
        new weights. A trainer's transfer reaches all workers at once; workers that start later get the weights of the
        next update.

        Raises:
            BadWeights: the workers cannot receive the transfer, and no worker was changed.
            EngineError: the transfer failed, or fewer workers than the minimum received the transfer.
            EngineDead: not enough workers are left, or the proof failed on all workers.
        """
        if isinstance(checked.weights, LocalTransfer | WeightTransfer):
            return await self._apply_transfer(checked, mode)
        driver = self.driver
        # The version is recorded before the workers update, since the age of an id is counted from recorded versions.
        self._add_version(checked.version)
        async with driver.settled:
            self.driver.change_snapshot(
                version=checked.version, weights=checked.weights, proof=checked.proof, readable=True
            )
            with self._ended_by_proof(checked):
                updates: Mapping[Any, WeightUpdate] = await driver.ask_all("update_weights", checked, mode)
            for handle in updates:
                driver.has_weights(handle, checked.version)
        update = self._noted(checked, updates.values())
        await driver.until(
            lambda: sum(handle.version == checked.version for handle in driver.handles) >= driver.fleet.least
        )
        self._notify(checked)
        return update

    def _noted(self, checked: CheckedUpdate, updates: Iterable[WeightUpdate]) -> WeightUpdate:
        update = _slowest(checked, updates)
        self.proof_figures = update.proof
        if update.moved is False and checked.proof is None:  # the warnings of each worker are in its log
            warn_always(
                _log,
                "the weights %r change no score on a worker: they are the old ones, they differ by less than rounding, "
                "or they did not arrive. `deltarunner check-weights MODEL` lists the tensors that arrive",
                checked.version,
            )
        return update

    @contextmanager
    def _ended_by_proof(self, checked: CheckedUpdate) -> Iterator[None]:
        """End the fleet if the proof of new weights fails on every worker, since it would fail on later workers too."""
        try:
            yield
        except EngineDead as error:
            if checked.proof is not None:
                self.driver.fleet.ended_by = f"no worker has the weights {checked.version!r}: {error}"
            raise

    def _notify(self, checked: CheckedUpdate) -> None:
        """Call the listeners. If the proof has to wait until the cache is awake, `wake` calls them after the proof."""
        self._proof_waits = checked.proof is not None and bool(self.asleep)
        if not self._proof_waits:
            self.notify_listeners()

    async def _apply_transfer(self, checked: CheckedUpdate, mode: PauseMode) -> WeightUpdate:
        def took(handle: WorkerHandle) -> None:
            if self.version != checked.version:  # this is the first worker that has the new weights
                self._add_version(checked.version)
                self.driver.change_snapshot(version=checked.version, weights=None, proof=None, readable=False)
            self.driver.has_weights(handle, checked.version)

        try:
            with self._ended_by_proof(checked):
                updates = await self.transfers.apply(checked.weights, checked.version, mode, took, checked.proof)
            update = self._noted(checked, updates)
        finally:
            self._notify(checked)
        return update

    async def reset_prefix_cache(self) -> None:
        await self._control("reset_prefix_cache")

    async def sleep(self, level: int) -> None:
        async with self.driver.settled:
            await self._control("sleep", level)
            self.driver.change_snapshot(asleep=level, awake=())

    async def wake(self, tags: Collection[str]) -> None:
        async with self.driver.settled:
            figures = await self.driver.ask_all("wake", sorted(tags))
            left = self.asleep - set(tags)
            if left:
                self.driver.change_snapshot(awake=tuple(tag for tag in SLEEP_TAGS if tag not in left))
            else:
                self.driver.change_snapshot(asleep=0, awake=())
        if self._proof_waits and not left:
            self._proof_waits = False
            self.proof_figures = _worst(figures.values())
            self.notify_listeners()

    async def profile(self, *, on: bool) -> None:
        await self._control("start_profile" if on else "stop_profile")

    async def devices(self) -> list[str]:
        answers = await self.driver.ask_all("control", "devices")
        return [f"{handle.name}: {device}" for handle, devices in answers.items() for device in devices]

    async def control(self, call: str, *arguments: Any) -> Mapping[Any, Any]:
        """Call a trainer's method on all workers' engines, and return the answers by worker."""
        answers: Mapping[Any, Any] = await self.driver.ask_all("control", call, *arguments)
        return answers

    async def _control(self, call: str, *arguments: Any) -> None:
        await self.driver.ask_all("control", call, *arguments)


def _slowest(checked: CheckedUpdate, updates: Iterable[WeightUpdate]) -> WeightUpdate:
    """Combine the updates of many engines into one, with the times of the slowest."""
    pauses, loads, proofs, moved = [0.0], [0.0], list[ProofFigures | None](), list[bool | None]()
    for update in updates:
        pauses.append(update.pause_seconds)
        loads.append(update.load_seconds)
        proofs.append(update.proof)
        moved.append(update.moved)
    # False if the scores of one worker did not change: it may have kept its weights.
    all_moved = None if None in moved or not moved else all(moved)
    return WeightUpdate(checked.version, checked.seconds, max(pauses), max(loads), _worst(proofs), all_moved)


def _worst(proofs: Iterable[ProofFigures | None]) -> ProofFigures | None:
    return max((each for each in proofs if each is not None), key=lambda each: each.median, default=None)


class FleetAdapters(Adapters):
    """The adapters of a fleet, with the same numbers on each worker."""

    def __init__(self, driver: Driver, names: Iterable[str]) -> None:
        super().__init__(names)
        self._driver = driver

    async def load(self, version: AdapterVersion, given: Any, config: Mapping[str, Any] | None) -> None:
        driver = self._driver
        where = await driver.launcher.put(given)
        async with driver.settled:
            adapter = version.name, version.number, where, config
            await driver.ask_all("add_adapter", *adapter)
            others = tuple(each for each in driver.snapshot.adapters if each[0] != version.name)
            driver.change_snapshot(adapters=(*others, adapter))

    async def remove(self, name: str) -> None:
        await super().remove(name)
        driver = self._driver
        async with driver.settled:
            await driver.ask_all("control", "remove_adapter", name)
            driver.change_snapshot(adapters=tuple(each for each in driver.snapshot.adapters if each[0] != name))
