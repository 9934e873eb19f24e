"""A run on a fleet: its set-up on the workers, its player, and placeholders for engines that only workers have."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import Any

import anyio

from runner.cluster.broadcast import gather_answers
from runner.cluster.driver import Driver
from runner.cluster.player import FleetPlayer
from runner.cluster.protocol import OtherKnown, WorkerLost
from runner.cluster.worker_handle import WorkerHandle
from runner.engines.base import BaseEngine, DeltaStream, Engine, EngineStats, GenerationRequest
from runner.engines.message_engine import MessageEngine, MessageRequest, MessageStream
from runner.episode.shared import RunShared
from runner.errors import BadControl, BadEnvironment
from runner.runs.player import EpisodePlayer

__all__ = ["RunSetups", "placeholder_for"]


class RunSetups:
    """One run on a fleet: its engines on the workers, and its player, which sends episodes to the workers.

    Args:
        driver: a function that returns the driver of the fleet. It is called only after the fleet was entered.
        packed: a pickled `RunSpec`.
        others: the engines of other agents that workers enter, by agent.
    """

    def __init__(self, driver: Callable[[], Driver], packed: bytes, others: Mapping[str, BaseEngine]) -> None:
        self._driver = driver
        self._packed = packed
        self._others = others
        self._number: int | None = None

    @property
    def worker_engines(self) -> Collection[BaseEngine]:
        """The engines that each worker enters for itself."""
        return set(self._others.values())

    @asynccontextmanager
    async def engines(self) -> AsyncIterator[Mapping[BaseEngine, BaseEngine]]:
        """Enter `worker_engines` on every worker for the block, and yield a placeholder for each of the engines."""
        if not self._others:
            yield {}
            return
        driver = self._driver()
        self._number = driver.run_number()
        try:
            known = await self._entered(driver, self._number)
            yield {engine: placeholder_for(known[name]) for name, engine in self._others.items()}
        finally:
            # `close_run` does nothing on a worker that has closed the run already. Its answer is not awaited, since an
            # engine may take minutes to start and to end.
            for handle in driver.members:
                handle.process.send("close_run", self._number)

    async def _entered(self, driver: Driver, number: int) -> Mapping[str, OtherKnown]:
        """Enter the engines on every worker, and return their properties by agent, as one worker reports them."""

        async def enter(handle: WorkerHandle) -> None:
            handle.process.send("keep_run", number, self._packed, None)
            with suppress(WorkerLost):  # the task that runs this worker handles the loss
                await handle.process.send("others_entered", number)

        while True:
            await driver.until(lambda: bool(driver.members))
            _, errors = await gather_answers(driver.members, enter)
            if errors:
                raise next(iter(errors.values()))
            for handle in driver.members:
                with suppress(WorkerLost):
                    known: Mapping[str, OtherKnown] = await handle.process.send("others_known", number)
                    if known:
                        return known

    @asynccontextmanager
    async def player(
        self, shared: RunShared, clock: datetime, width: int | None, on_event: Callable[[str], None]
    ) -> AsyncIterator[EpisodePlayer]:
        """Yield the player of the run's episodes, for the duration of the block.

        Raises:
            BadInput, EngineError: a worker cannot set up the run.
            BadEnvironment: faults occurred while the run ended on the workers.
        """
        driver = self._driver()
        number = driver.run_number() if self._number is None else self._number
        await driver.open_run(number, self._packed, clock)
        player = FleetPlayer(driver, number, shared, width)
        failures: list[str] = []
        try:
            async with driver.listening(player.notify, on_event):
                yield player
        finally:
            with anyio.CancelScope(shield=True):
                failures.extend(await driver.close_run(number))
        if failures:
            raise BadEnvironment("; ".join(failures))


_PLACEHOLDER_ERROR = "this engine runs only on the workers, and not in this process: use it in an episode."


def placeholder_for(known: OtherKnown) -> BaseEngine:
    """Return an engine with the description of the workers' engines. Its `stream` raises `BadControl`."""
    return _TokenPlaceholder(known) if known.ids is not None else _MessagePlaceholder(known)


class _Placeholder(BaseEngine):
    """Placeholder for an engine that exists only on the workers. Outcomes of episodes show failures of that engine."""

    running = True

    def __init__(self, known: OtherKnown) -> None:
        self._description = known.description
        self.places, self.context = known.places, known.context

    async def __aexit__(self, *_: object) -> None:
        """Do nothing, since there is nothing to close."""

    def stats(self) -> EngineStats:
        """Return empty statistics."""
        return EngineStats(open=0)

    async def health(self) -> None:
        """Return at once: this engine has nothing that can fail."""

    def describe(self) -> dict[str, Any]:
        """Return the description that the first worker reported."""
        return dict(self._description)


class _TokenPlaceholder(_Placeholder, Engine):
    def __init__(self, known: OtherKnown) -> None:
        super().__init__(known)
        assert known.ids is not None, "it is an engine of token ids"
        self.tokenizer, self.template, self.stop_ids = known.ids.tokenizer, known.ids.template, known.ids.stop_ids
        self.vocabulary = known.ids.vocabulary

    def stream(self, request: GenerationRequest) -> DeltaStream:
        raise BadControl(_PLACEHOLDER_ERROR)


class _MessagePlaceholder(_Placeholder, MessageEngine):
    def stream(self, request: MessageRequest) -> MessageStream:
        raise BadControl(_PLACEHOLDER_ERROR)
