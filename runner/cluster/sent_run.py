"""A run on a fleet: what its workers get of it, when they are to set up which part, and who plays it then."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import datetime

import anyio

from runner.cluster.driver import Driver
from runner.cluster.elsewhere import standing_for
from runner.cluster.hand import Hand, at_once
from runner.cluster.player import FleetPlayer
from runner.cluster.words import OtherKnown, WorkerLost
from runner.engines.base import BaseEngine
from runner.episode.shared import RunShared
from runner.errors import BadEnvironment
from runner.runs.player import Player

__all__ = ["SentRun"]


class SentRun:
    """A run in the form in which workers get it.

    Args:
        driver: gives the workers, once they are there.
        packed: a `RunSent`.
        others: the engines that workers enter for agents of their own, by agent.
    """

    def __init__(self, driver: Callable[[], Driver], packed: bytes, others: Mapping[str, BaseEngine]) -> None:
        self._driver = driver
        self._packed = packed
        self._others = others
        self._number: int | None = None

    @property
    def elsewhere(self) -> Collection[BaseEngine]:
        """The engines that workers enter, each worker one of its own."""
        return set(self._others.values())

    @asynccontextmanager
    async def engines(self) -> AsyncIterator[Mapping[BaseEngine, BaseEngine]]:
        """While the block lasts the workers have those engines; gives what stands here for each."""
        if not self._others:
            yield {}
            return
        driver = self._driver()
        self._number = driver.run_number()
        try:
            known = await self._entered(driver, self._number)
            yield {engine: standing_for(known[name]) for name, engine in self._others.items()}
        finally:
            # Unless it was opened and closed. Without waiting: one of them may take minutes to start and to end.
            for hand in driver.members:
                hand.process.send("close_run", self._number)

    async def _entered(self, driver: Driver, number: int) -> Mapping[str, OtherKnown]:
        """Have the workers enter them; gives what one of them says. Who joins later does when the run is opened."""

        async def enter(hand: Hand) -> None:
            hand.process.send("keep_run", number, self._packed, None)
            with suppress(WorkerLost):  # whoever tends it knows
                await hand.process.send("others_entered", number)

        while True:
            await driver.until(lambda: bool(driver.members))
            await at_once(driver.members, enter)
            for hand in driver.members:
                with suppress(WorkerLost):
                    known: Mapping[str, OtherKnown] = await hand.process.send("others_known", number)
                    if known:
                        return known

    @asynccontextmanager
    async def player(
        self, shared: RunShared, clock: datetime, width: int | None, told: Callable[[str], None]
    ) -> AsyncIterator[Player]:
        """What plays its episodes, while the block lasts."""
        driver = self._driver()
        number = driver.run_number() if self._number is None else self._number
        await driver.open_run(number, self._packed, clock)
        player = FleetPlayer(driver, number, shared, width)
        failures: list[str] = []
        try:
            async with driver.listening(player.tell, told):
                yield player
        finally:
            with anyio.CancelScope(shield=True):
                failures.extend(await driver.close_run(number))
        if failures:
            raise BadEnvironment("; ".join(failures))
