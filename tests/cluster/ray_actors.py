"""An actor of Ray that counts the calls of each batch. Ray imports it from this module."""

from __future__ import annotations

import threading
from collections.abc import Sequence, Sized
from typing import Any

import anyio

from runner.cluster.ray.calls import AnsweringActor
from runner.errors import BadOption

__all__ = ["Counting"]


class Object:
    """The called object."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.callers: Sized = ()

    async def double(self, number: int) -> int:
        return 2 * number

    async def wait(self) -> None:
        await anyio.sleep_forever()

    async def refuse(self) -> None:
        raise BadOption("not so")

    async def fail(self) -> None:
        raise KeyError("no such key")

    async def lock(self) -> Any:
        return threading.Lock()

    async def who_calls(self) -> int:
        return len(self.callers)

    async def how_many(self) -> list[int]:
        return self.batches


class Counting(AnsweringActor):
    """Actor that records the number of calls in each batch."""

    tick = 0.01

    def __init__(self) -> None:
        super().__init__()
        self.process = Object()
        self.process.callers = self._callers

    async def take(self, name: str, calls: Sequence[Any]) -> None:
        self.process.batches.append(len(calls))
        await super().take(name, calls)
