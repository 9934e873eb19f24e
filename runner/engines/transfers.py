"""Weight transfers from a trainer to an engine: steps of the receiver, and transfers that another process relays."""

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
    """Steps of a transfer into a paused engine, in this order; `LOAD` once per part."""

    START = "start"
    """Prepare for new weights."""
    LOAD = "load"
    """Receive and load a part."""
    FINISH = "finish"
    """End the transfer after the last part."""


class Receiver(Protocol):
    """Receiving end of a transfer: one engine, or all engines of a fleet."""

    async def meet(self, init: Mapping[str, Any]) -> None:
        """Connect to the trainer; return when both ends are connected."""

    async def step(self, step: TransferStep, part: Any = None) -> None:
        """Run a step of the transfer, and return when the step has ended.

        Args:
            step: the step.
            part: vLLM's update info for `LOAD`, otherwise None.
        """


async def send_parts(transfer: WeightTransfer, receiver: Receiver) -> None:
    """Run all steps of a transfer from an external trainer on the receiver."""
    await receiver.step(TransferStep.START)
    for part in transfer.parts:
        await receiver.step(TransferStep.LOAD, dict(part))
    await receiver.step(TransferStep.FINISH)


@dataclass(frozen=True, slots=True)
class Announced:
    """Description of a transfer before anything is sent."""

    given_as: str
    """Name of the trainer's argument, for errors."""
    forms: Mapping[str, TensorForm]
    seconds: float
    """Seconds without data after which one end counts the other end as lost."""


@dataclass(eq=False, slots=True)
class _Step:
    step: TransferStep
    part: Any
    taken: bool = False
    over: anyio.Event = field(default_factory=anyio.Event)


class RelayedTransfer:
    """Weights of a trainer, for an engine that another process controls. That process relays the steps of the transfer.

    Args:
        announced: description of the transfer.
        init: vLLM's init info, to connect engine and trainer before the first step; None to connect nothing.
    """

    def __init__(self, announced: Announced, init: Mapping[str, Any] | None = None) -> None:
        self.announced = announced
        self.init = init
        self._steps: deque[_Step] = deque()
        self._changed = anyio.Event()
        self._over = False

    async def bring(self, step: TransferStep, part: Any = None) -> None:
        """Relay a step to the engine, and return after the engine has run the step.

        Raises:
            EngineError: the engine runs no more steps: it failed, or the transfer is complete or closed.
        """
        brought = _Step(step, part)
        if not self._over:
            self._steps.append(brought)
            self._changed.set()
            await brought.over.wait()
        if not brought.taken:
            raise EngineError(f"the engine does not accept {step} for this transfer any more: begin a new transfer")

    async def receive(self, receiver: Receiver) -> None:
        """Run each relayed step on the receiver, up to and including `FINISH`.

        Raises:
            EngineError: the transfer was closed early.
            Exception: any error of the receiver; later steps are refused.
        """
        try:
            step = None
            while step is not TransferStep.FINISH:
                while not self._steps:
                    if self._over:
                        raise EngineError("the transfer was closed before all weights arrived: begin a new transfer")
                    self._changed = anyio.Event()
                    await self._changed.wait()
                brought = self._steps[0]
                step = brought.step
                await receiver.step(step, brought.part)
                self._steps.popleft()
                brought.taken = True
                brought.over.set()
        finally:
            self.close()

    def close(self) -> None:
        """End the transfer and wake both sides; idempotent."""
        self._over = True
        self._changed.set()
        for brought in self._steps:
            brought.over.set()
