"""A fleet's engines as one engine to its trainer: each call goes to all workers, and to those that join later."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from runner.cluster.driver import Driver
from runner.cluster.words import Joined
from runner.engines.adapters import Adapters, AdapterVersion
from runner.engines.gate import AdmissionGate
from runner.engines.runtime import EngineRuntime, OpenRequest
from runner.engines.state import CheckedUpdate, PauseMode, WeightUpdate

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
        """Have every worker compare new weights with its model.

        Raises:
            BadWeights: they do not fit; nothing was touched anywhere.
        """
        weights = await self.driver.launcher.put(given)
        seconds = await self.driver.ask_all("check_weights", weights, version)
        return CheckedUpdate(version, max(seconds.values(), default=0.0), weights)

    async def apply_update(self, checked: CheckedUpdate, mode: PauseMode) -> WeightUpdate:
        """Have every worker exchange its weights, each when it has compared them, without waiting for the others.

        A worker that fails is dismissed, and the one after it begins with the new weights. Returns when all have them.

        Raises:
            EngineDead: not enough workers are left.
        """
        driver = self.driver
        # First here: whoever comes to know an id of the new version can say how old it is.
        self._add_version(checked.version)
        async with driver.settled:
            self._remember(version=checked.version, weights=checked.weights)
            updates: Mapping[Any, WeightUpdate] = await driver.ask_all("update_weights", checked, mode)
            for hand in updates:
                hand.version = checked.version
        await driver.until(lambda: sum(hand.version == checked.version for hand in driver.hands) >= driver.fleet.least)
        self.tell()
        pauses = [update.pause_seconds for update in updates.values()]
        loads = [update.load_seconds for update in updates.values()]
        return WeightUpdate(checked.version, checked.seconds, max(pauses, default=0.0), max(loads, default=0.0))

    async def reset_prefix_cache(self) -> None:
        await self._control("reset_prefix_cache")

    async def sleep(self, level: int) -> None:
        async with self.driver.settled:
            await self._control("sleep", level)
            self._remember(asleep=level)

    async def wake(self, tags: Collection[str]) -> None:
        async with self.driver.settled:
            await self._control("wake", sorted(tags))
            self._remember(asleep=0)

    async def profile(self, *, on: bool) -> None:
        await self._control("start_profile" if on else "stop_profile")

    async def devices(self) -> list[str]:
        answers = await self.driver.ask_all("control", "devices")
        return [f"{hand.name}: {device}" for hand, devices in answers.items() for device in devices]

    async def _control(self, call: str, *arguments: Any) -> None:
        await self.driver.ask_all("control", call, *arguments)

    def _remember(self, **changed: Any) -> None:
        self.driver.catch = replace(self.driver.catch, **changed)


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
