"""Weights that a trainer sends to an engine: what it asks of one end, and a transfer that others bring step by step."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import anyio

from runner.engines.weights import TensorForm, WeightTransfer
from runner.errors import EngineError

__all__ = ["Announced", "Receiver", "RelayedTransfer", "TransferStep", "send_parts"]


class TransferStep(enum.StrEnum):
    """What a trainer asks of a paused engine, in this order; `LOAD` as often as the weights have parts."""

    START = "start"
    """The engine makes itself ready."""
    LOAD = "load"
    """The engine receives a part, and loads it."""
    FINISH = "finish"
    """The last part was there."""


class Receiver(Protocol):
    """The end of a transfer where the weights are received: an engine, or all those of a fleet."""

    async def meet(self, init: Mapping[str, Any]) -> None:
        """Join the trainer; returns when both are there."""

    async def step(self, step: TransferStep, part: Any = None) -> None:
        """Take a step; returns when it is done.

        Args:
            step: which.
            part: vLLM's update info, where a part is to be loaded.
        """


async def send_parts(transfer: WeightTransfer, receiver: Receiver) -> None:
    """Have a receiver take all that a trainer elsewhere sends."""
    await receiver.step(TransferStep.START)
    for part in transfer.parts:
        await receiver.step(TransferStep.LOAD, dict(part))
    await receiver.step(TransferStep.FINISH)


@dataclass(frozen=True, slots=True)
class Announced:
    """A transfer, as far as it is known before anything is sent."""

    given_as: str
    """The trainer's argument in words, for errors."""
    forms: Mapping[str, TensorForm]
    """The form of every tensor, by its name."""
    seconds: float
    """Seconds after which an end that is silent counts as gone."""


@dataclass(eq=False, slots=True)
class _Step:
    step: TransferStep
    part: Any
    taken: bool = False
    over: anyio.Event = field(default_factory=anyio.Event)


class RelayedTransfer:
    """Weights of a trainer that somebody else speaks with, who brings what it asks for.

    Args:
        announced: what is known of them.
        init: joins engine and trainer, before anything is brought; None where they have met.
    """

    def __init__(self, announced: Announced, init: Mapping[str, Any] | None = None) -> None:
        self.announced = announced
        self.init = init
        self._steps: deque[_Step] = deque()
        self._news = anyio.Event()
        self._over = False

    async def bring(self, step: TransferStep, part: Any = None) -> None:
        """Have the engine take a step, as soon as it stands still; returns when it did.

        Raises:
            EngineError: the engine takes none any more: it failed, or all was there.
        """
        brought = _Step(step, part)
        if not self._over:
            self._steps.append(brought)
            self._news.set()
            await brought.over.wait()
        if not brought.taken:
            raise EngineError(f"the engine takes no {step} of these weights any more")

    async def receive(self, receiver: Receiver) -> None:
        """Have the receiver take each step as it is brought, the last one included.

        Raises:
            EngineError: it was closed before.
            Exception: whatever the receiver raises; nothing that is brought later is taken.
        """
        try:
            step = None
            while step is not TransferStep.FINISH:
                while not self._steps:
                    if self._over:
                        raise EngineError("these weights were given up before all of them were there")
                    self._news = anyio.Event()
                    await self._news.wait()
                brought = self._steps[0]
                step = brought.step
                await receiver.step(step, brought.part)
                self._steps.popleft()
                brought.taken = True
                brought.over.set()
        finally:
            self.close()

    def close(self) -> None:
        """Let go of who brings something, and of who receives it; twice is allowed."""
        self._over = True
        self._news.set()
        for brought in self._steps:
            brought.over.set()
