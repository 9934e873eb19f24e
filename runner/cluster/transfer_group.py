"""The workers in one transfer of weights. If one is lost, each of the others may hang."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import anyio

from runner.cluster.protocol import WorkerLost
from runner.cluster.worker_handle import WorkerHandle
from runner.errors import BadInput, DeltarunnerError

__all__ = ["GRACE_SECONDS", "TransferGroup"]

GRACE_SECONDS: Final = 30.0
"""Most seconds of a step once a worker was lost in a transfer: the others may wait for ever."""


class TransferGroup:
    """Workers that are called together.

    Args:
        handles: the workers; their ranks follow this order.
    """

    def __init__(self, handles: Iterable[WorkerHandle]) -> None:
        self.handles = list(handles)
        """The workers that are left."""
        self.lost: dict[WorkerHandle, str] = {}
        """The lost workers and the reasons, in the order of their loss."""
        self.asked: set[WorkerHandle] = set()
        """The workers that have not answered yet."""
        self.finished = False
        """True if the last step was taken."""
        self._scope = anyio.CancelScope()
        self._seconds = math.inf
        self._lost_at = 0.0
        self._answered = anyio.Event()

    @contextmanager
    def limited(self, seconds: float) -> Iterator[anyio.CancelScope]:
        """Leave the block if no worker was called or answered for this long, or after the grace if one is lost."""
        self._seconds = seconds
        with anyio.CancelScope() as self._scope:
            self._push_limit()
            yield self._scope

    def _push_limit(self) -> None:
        self._scope.deadline = anyio.current_time() + (GRACE_SECONDS if self.lost else self._seconds)

    def lose(self, handle: WorkerHandle, why: object) -> None:
        """Remove a worker, and end it if it is alive."""
        if handle in self.lost:
            return
        self._lost_at = self._lost_at or anyio.current_time()
        self.lost[handle] = str(why)
        self.handles.remove(handle)
        if not isinstance(why, WorkerLost):
            handle.dismiss(str(why))
        self._push_limit()

    async def ask(
        self, call: str, arguments: Callable[[WorkerHandle], tuple[Any, ...]], *, compares: bool = False
    ) -> dict[WorkerHandle, Any]:
        """Call a method on all workers that are left, and return the answers of those that are left then.

        A worker that refuses where others do not is lost, since it differs from them. If another worker was lost, they
        refuse because of that, and stay.

        Args:
            call: the name of the method.
            arguments: its arguments, by worker.
            compares: whether the method changes nothing, so that one refusal counts for all.

        Raises:
            BadInput: all workers refuse, or one does where they compare, and none was lost; the first error.
        """
        answers: dict[WorkerHandle, Any] = {}
        refusals: dict[WorkerHandle, BadInput] = {}

        async def ask(handle: WorkerHandle) -> None:
            self.asked.add(handle)
            try:
                answers[handle] = await handle.process.send(call, *arguments(handle))
            except BadInput as error:
                refusals[handle] = error
            except (WorkerLost, DeltarunnerError) as error:
                self.lose(handle, error)
            self.asked.discard(handle)
            self._answered.set()
            self._push_limit()

        async with anyio.create_task_group() as group:
            for handle in self.handles:
                group.start_soon(ask, handle)
        if refusals and not self.lost:
            handle, refusal = next(iter(refusals.items()))
            if not answers or compares:
                raise handle.naming(refusal) if answers else refusal
            for handle, error in refusals.items():
                self.lose(handle, error)
        return answers

    async def until_answered(self) -> None:
        """Wait for pending answers until the grace period is over."""
        with anyio.CancelScope(deadline=self._lost_at + GRACE_SECONDS):
            while self.asked:
                self._answered = anyio.Event()
                await self._answered.wait()

    def dismiss(self, handles: Iterable[WorkerHandle], why: str) -> None:
        """End workers of the group that may hang."""
        for handle in list(handles):
            self.lose(handle, why)
