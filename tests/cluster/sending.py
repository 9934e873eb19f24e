"""Transfers of weights to a fleet, and the state that tests read afterwards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from runner import LocalTransfer, WeightTransfer
from runner.cluster.engines import FleetEngine
from runner.testing import VirtualClock
from tests.cluster.in_process import InProcess, InProcessWorker
from tests.cluster.rehearsed_trainer import Info, Parts, UnrankedInfo, part

__all__ = [
    "KINDS",
    "by_virtual_time",
    "either",
    "elsewhere",
    "here",
    "inits",
    "members",
    "of_version",
    "sizes",
    "unranked",
]


def elsewhere(world_size: int = 3, *, address: str = "10.0.0.1", parts: int = 1, **settings: Any) -> WeightTransfer:
    """A remote trainer with one rank, which connects again for each transfer."""
    init = {"master_address": address, "rank_offset": 1, "world_size": world_size}
    return WeightTransfer([part(f"tensor {number}") for number in range(parts)], init=init, **settings)


def unranked(**settings: Any) -> WeightTransfer:
    """A remote trainer that uses a transfer without ranks."""
    return WeightTransfer(part("a"), init={"packed": False}, **settings)


def here(source: Parts | None = None) -> LocalTransfer:
    return LocalTransfer(Info(), source or Parts())


KINDS: Mapping[str, Callable[[], WeightTransfer | LocalTransfer]] = {
    "elsewhere": elsewhere,
    "without ranks": unranked,
    "here": here,
    "here without ranks": lambda: LocalTransfer(UnrankedInfo(), Parts()),
}
either = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def sizes(launcher: InProcess, *counts: int) -> None:
    """Give the engines of the first workers these numbers of devices, and all later engines one device."""

    def sized(worker: InProcessWorker) -> None:
        number = worker.worker.number
        count = counts[number] if number < len(counts) else 1

        async def devices() -> list[str]:
            return ["cpu"] * count

        worker.worker.engine.devices = devices

    launcher.on_start = sized


def inits(launcher: InProcess) -> list[Any]:
    """The latest init info of each worker."""
    met = [[arguments[0] for call, arguments in worker.calls if call == "meet"] for worker in launcher.alive]
    return [each[-1] if each else None for each in met]


def of_version(launcher: InProcess) -> list[str]:
    return [worker.worker.engine.weight_version for worker in launcher.alive]


def members(engine: FleetEngine) -> set[int]:
    """Numbers of the workers that play, or would play with the current weights."""
    return {handle.number for handle in engine.driver.members}


def by_virtual_time(scenario: Callable[[], Awaitable[None]]) -> None:
    VirtualClock().run(scenario)
