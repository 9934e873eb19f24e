"""A fleet's engines as one engine to its trainer: each call goes to all workers, and to those that join later."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from runner.cluster.asking import compare
from runner.cluster.driver import Driver
from runner.cluster.hand import Hand
from runner.cluster.transfers import FleetTransfers
from runner.cluster.words import Joined
from runner.engines.adapters import Adapters, AdapterVersion
from runner.engines.gate import AdmissionGate
from runner.engines.proofs import ProofFigures
from runner.engines.runtime import EngineRuntime, OpenRequest
from runner.engines.state import SLEEP_TAGS, CheckedUpdate, PauseMode, WeightUpdate
from runner.engines.weights import LocalTransfer, WeightTransfer
from runner.errors import BadInput

__all__ = ["FleetRuntime"]


class FleetRuntime(EngineRuntime[OpenRequest]):
    """What an `EngineRuntime` is, of many engines. Nothing is sampled here, so the gate stays empty.

    A worker joins where the others are: the driver keeps what that takes in `catch`, and nobody joins while a call
    is under way.
    """

    def __init__(self, driver: Driver, first: Joined) -> None:
        super().__init__(
            AdmissionGate(first.places, first.places * first.context),
            FleetAdapters(driver, first.adapters),
            context=first.context,
            version=first.weight_version,
        )
        self.driver = driver
        self.transfers = FleetTransfers(driver)
        """Where weights come from that reach all workers at once."""

    def require_alive(self) -> None:
        self.driver.require_alive()

    async def pause(self, mode: PauseMode) -> None:
        async with self.driver.settled:
            await self._control("pause", mode)
            self._remember(paused=True)

    async def resume(self) -> None:
        async with self.driver.settled:
            await self._control("resume")
            self._remember(paused=False)

    async def check_weights(self, given: Any) -> Any:
        raise NotImplementedError("a fleet checks with `check_update`, since each worker keeps what it has compared")

    async def load_weights(self, checked: Any, version: str) -> None:
        raise NotImplementedError("a fleet exchanges weights with `apply_update`: no worker waits for another")

    async def check_update(self, given: Any, version: str) -> CheckedUpdate:
        """Have every worker compare new weights with its model, and meet the trainer where one sends them.

        Raises:
            BadWeights: they do not fit, or the ends do not meet; nothing was touched anywhere.
            EngineError: a worker was lost without whom the others cannot meet.
        """
        if isinstance(given, LocalTransfer | WeightTransfer):
            began = time.monotonic()
            await self.transfers.check(given, version)
            return CheckedUpdate(version, time.monotonic() - began, given)
        self.transfers.forget()
        weights = await self.driver.launcher.put(given)
        hands = self.driver.members
        try:
            seconds = await compare(hands, "check_weights", weights, version, patience=self.driver.stall_seconds)
        except BadInput:
            for hand in hands:
                hand.process.send("forget_checked")
            raise
        return CheckedUpdate(version, max(seconds.values(), default=0.0), weights)

    async def apply_update(self, checked: CheckedUpdate, mode: PauseMode) -> WeightUpdate:
        """Have every worker exchange its weights, each when it has compared them, without waiting for the others.

        A worker that fails is dismissed, and the one after it begins with the new weights. Returns when all have them.
        What a trainer sends reaches all of them at once, and those who join later get the weights after these.

        Raises:
            EngineError: fewer workers than the least have got what was sent.
            EngineDead: not enough workers are left.
        """
        if isinstance(checked.weights, LocalTransfer | WeightTransfer):
            return await self._apply_transfer(checked, mode)
        driver = self.driver
        # First here: whoever comes to know an id of the new version can say how old it is.
        self._add_version(checked.version)
        async with driver.settled:
            self._remember(version=checked.version, weights=checked.weights, proof=checked.proof, readable=True)
            updates: Mapping[Any, WeightUpdate] = await driver.ask_all("update_weights", checked, mode)
            for hand in updates:
                driver.has_weights(hand, checked.version)
        update = _slowest(checked, updates.values())
        self.proof_figures = update.proof
        await driver.until(lambda: sum(hand.version == checked.version for hand in driver.hands) >= driver.fleet.least)
        self.notify_listeners()
        return update

    async def _apply_transfer(self, checked: CheckedUpdate, mode: PauseMode) -> WeightUpdate:
        def took(hand: Hand) -> None:
            if self.version != checked.version:  # the first one
                self._add_version(checked.version)
                self._remember(version=checked.version, weights=None, proof=None, readable=False)
            self.driver.has_weights(hand, checked.version)

        try:
            updates = await self.transfers.apply(checked.weights, checked.version, mode, took, checked.proof)
            update = _slowest(checked, updates)
            self.proof_figures = update.proof
        finally:
            self.notify_listeners()
        return update

    async def reset_prefix_cache(self) -> None:
        await self._control("reset_prefix_cache")

    async def sleep(self, level: int) -> None:
        async with self.driver.settled:
            await self._control("sleep", level)
            self._remember(asleep=level, awake=())

    async def wake(self, tags: Collection[str]) -> None:
        async with self.driver.settled:
            await self._control("wake", sorted(tags))
            left = self.asleep - set(tags)
            if left:
                self._remember(awake=tuple(tag for tag in SLEEP_TAGS if tag not in left))
            else:
                self._remember(asleep=0, awake=())

    async def profile(self, *, on: bool) -> None:
        await self._control("start_profile" if on else "stop_profile")

    async def devices(self) -> list[str]:
        answers = await self.driver.ask_all("control", "devices")
        return [f"{hand.name}: {device}" for hand, devices in answers.items() for device in devices]

    async def control(self, call: str, *arguments: Any) -> Mapping[Any, Any]:
        """The answers of all workers' engines to a call of a trainer."""
        answers: Mapping[Any, Any] = await self.driver.ask_all("control", call, *arguments)
        return answers

    async def _control(self, call: str, *arguments: Any) -> None:
        await self.driver.ask_all("control", call, *arguments)

    def _remember(self, **changed: Any) -> None:
        self.driver.catch = replace(self.driver.catch, **changed)


def _slowest(checked: CheckedUpdate, updates: Iterable[WeightUpdate]) -> WeightUpdate:
    """An update of many engines as one, which took as long as the slowest of them."""
    pauses, loads, proofs, moved = [0.0], [0.0], list[ProofFigures](), list[bool | None]()
    for update in updates:
        pauses.append(update.pause_seconds)
        loads.append(update.load_seconds)
        if update.proof is not None:
            proofs.append(update.proof)
        moved.append(update.moved)
    worst = max(proofs, key=lambda each: each.median, default=None)
    # False where one worker's scores did not move: it may have kept its weights.
    all_moved = None if None in moved or not moved else all(moved)
    return WeightUpdate(checked.version, checked.seconds, max(pauses), max(loads), worst, all_moved)


class FleetAdapters(Adapters):
    """The adapters of a fleet, which each worker's engine has under the same numbers."""

    def __init__(self, driver: Driver, names: Iterable[str]) -> None:
        super().__init__(names)
        self._driver = driver

    async def load(self, version: AdapterVersion, given: Any, config: Mapping[str, Any] | None) -> None:
        driver = self._driver
        where = await driver.launcher.put(given)
        async with driver.settled:
            adapter = version.name, version.number, where, config
            await driver.ask_all("add_adapter", *adapter)
            others = tuple(each for each in driver.catch.adapters if each[0] != version.name)
            driver.catch = replace(driver.catch, adapters=(*others, adapter))

    async def remove(self, name: str) -> None:
        await super().remove(name)
        driver = self._driver
        async with driver.settled:
            await driver.ask_all("control", "remove_adapter", name)
            driver.catch = replace(
                driver.catch, adapters=tuple(each for each in driver.catch.adapters if each[0] != name)
            )
