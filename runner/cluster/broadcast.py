"""Calls to several workers at the same time. A worker that fails or hangs is dismissed if another one answers."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import anyio

from runner.cluster.protocol import WorkerLost
from runner.cluster.worker_handle import WorkerHandle
from runner.errors import BadInput, DeltarunnerError

__all__ = ["GRACE_SECONDS", "TransferGroup", "ask", "compare", "gather_answers"]

LOOK_SECONDS: Final = 1.0
"""Seconds between two checks of the workers that have not answered."""


async def gather_answers(
    handles: Iterable[WorkerHandle],
    step: Callable[[WorkerHandle], Awaitable[Any]],
    finished: Callable[[WorkerHandle, Exception | None], None] = lambda _, error: None,
) -> tuple[dict[WorkerHandle, Any], dict[WorkerHandle, Exception]]:
    """Run a step for several workers at the same time.

    A step that fails with `WorkerLost` or `DeltarunnerError` does not end the other steps.

    Args:
        handles: the workers.
        step: a function that calls one worker.
        finished: a function that is called with the worker as soon as its step has ended, and with the step's error or
            None.

    Returns:
        The results by worker, and the errors (`WorkerLost` or `DeltarunnerError`) by worker, both in the order in which
        the steps ended.
    """
    answers: dict[WorkerHandle, Any] = {}
    errors: dict[WorkerHandle, Exception] = {}

    async def run(handle: WorkerHandle) -> None:
        try:
            answers[handle] = await step(handle)
        except (WorkerLost, DeltarunnerError) as error:  # the error is stored, because a task group would wrap it
            errors[handle] = error
        finished(handle, errors.get(handle))

    async with anyio.create_task_group() as group:
        for handle in handles:
            group.start_soon(run, handle)
    return answers, errors


async def ask(handles: Iterable[WorkerHandle], call: str, *arguments: Any, patience: float) -> dict[WorkerHandle, Any]:
    """Call a method on several workers at the same time, and return the answers by worker.

    The answers do not include lost and dismissed workers. A worker that raises is dismissed if another worker does not
    raise, since their states differ then. A worker that hangs after another one has answered is dismissed too.

    Args:
        handles: the workers.
        call: the name of the method.
        arguments: the arguments of the method.
        patience: seconds in which a worker must answer after another one has answered. This time starts again whenever
            the late worker's engine samples, since the call may wait for turns to end.

    Raises:
        DeltarunnerError: no worker answered, and at least one raised; this is the first error.
    """
    answers, errors = await _asked(handles, call, arguments, patience)
    if errors and not answers:
        raise next(iter(errors.values()))
    _dismiss(call, errors)
    return answers


async def compare(
    handles: Iterable[WorkerHandle], call: str, *arguments: Any, patience: float
) -> dict[WorkerHandle, Any]:
    """Call a method that changes nothing, as `ask` does, but raise `BadInput` even if only one worker raises it.

    Raises:
        BadInput: a worker refuses the arguments; the message names the worker if others accept the arguments.
        DeltarunnerError: no worker answered, and at least one raised; this is the first error.
    """
    answers, errors = await _asked(handles, call, arguments, patience)
    for handle, error in errors.items():
        if isinstance(error, BadInput):
            raise handle.naming(error) if answers else error
    if errors and not answers:
        raise next(iter(errors.values()))
    _dismiss(call, errors)
    return answers


async def _asked(
    handles: Iterable[WorkerHandle], call: str, arguments: tuple[Any, ...], patience: float
) -> tuple[dict[WorkerHandle, Any], dict[WorkerHandle, Exception]]:
    waiting = set(handles)
    one_has_answered = anyio.Event()

    def finished(handle: WorkerHandle, error: Exception | None) -> None:
        waiting.discard(handle)
        if not isinstance(error, WorkerLost):
            one_has_answered.set()

    async def watch() -> None:
        await one_has_answered.wait()
        await _dismiss_the_late(waiting, call, patience)

    async with anyio.create_task_group() as watching:
        watching.start_soon(watch)
        answers, errors = await gather_answers(
            tuple(waiting), lambda handle: handle.process.send(call, *arguments), finished
        )
        watching.cancel_scope.cancel()
    return answers, {handle: error for handle, error in errors.items() if not isinstance(error, WorkerLost)}


async def _dismiss_the_late(waiting: Iterable[WorkerHandle], call: str, patience: float) -> None:
    now = anyio.current_time()
    active = {handle: (_sampled(handle), now) for handle in waiting}
    while True:
        await anyio.sleep(LOOK_SECONDS)
        now = anyio.current_time()
        for handle in tuple(waiting):
            sampled, since = active[handle]
            if _sampled(handle) != sampled:
                active[handle] = _sampled(handle), now
            elif now - since > patience:
                handle.dismiss(f"{call}: no answer within {patience:g} s after another worker answered")


def _sampled(handle: WorkerHandle) -> int:
    return handle.heartbeat.stats.sampled_tokens if handle.heartbeat is not None else 0


def _dismiss(call: str, errors: Mapping[WorkerHandle, Exception]) -> None:
    for handle, error in errors.items():
        handle.dismiss(f"{call}: {error}")


GRACE_SECONDS: Final = 30.0
"""Seconds without an answer after which a transfer is ended if it has lost a worker. Its other workers might otherwise
wait for the lost worker forever.
"""


class TransferGroup:
    """The workers of one transfer of weights, which are called together.

    Args:
        handles: the workers, in the order of their ranks.
    """

    def __init__(self, handles: Iterable[WorkerHandle]) -> None:
        self.handles = list(handles)
        """The workers that were not lost."""
        self.lost: dict[WorkerHandle, str] = {}
        """The lost workers and the reasons, in the order of their loss."""
        self.pending: set[WorkerHandle] = set()
        self.finished = False
        """True if the last step of the transfer has run."""
        self._scope = anyio.CancelScope()
        self._seconds = math.inf
        self._lost_at = 0.0
        self._answered = anyio.Event()

    @contextmanager
    def limited(self, seconds: float) -> Iterator[anyio.CancelScope]:
        """Cancel the block if no worker answers for `seconds`. Once a worker was lost, the limit is `GRACE_SECONDS`."""
        self._seconds = seconds
        with anyio.CancelScope() as self._scope:
            self._push_limit()
            yield self._scope

    def _push_limit(self) -> None:
        self._scope.deadline = anyio.current_time() + (GRACE_SECONDS if self.lost else self._seconds)

    def lose(self, handle: WorkerHandle, why: object) -> None:
        """Remove a worker from the group, for the reason `why`. End the worker, unless `why` is a `WorkerLost`.

        A worker that was removed before is ignored.
        """
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
        """Call a method on all workers that are left, and return the answers by worker.

        A worker refuses by raising `BadInput`. If other workers accept, the refusing worker is lost, since its state
        differs from theirs. But it stays if another worker was lost, since that loss may be the reason for the refusal.
        A worker with any other error is lost.

        Args:
            call: the name of the method.
            arguments: a function that returns the method's arguments for a worker.
            compares: True if the method changes nothing, so that one refusal counts for all workers.

        Raises:
            BadInput: no worker was lost, and all workers refuse; with `compares`, one refusal is enough. The error is
                that of the first worker that refused.
        """

        async def step(handle: WorkerHandle) -> Any:
            self.pending.add(handle)
            return await handle.process.send(call, *arguments(handle))

        def finished(handle: WorkerHandle, error: Exception | None) -> None:
            if error is not None and not isinstance(error, BadInput):
                self.lose(handle, error)
            self.pending.discard(handle)
            self._answered.set()
            self._push_limit()

        answers, errors = await gather_answers(tuple(self.handles), step, finished)
        refusals = {handle: error for handle, error in errors.items() if isinstance(error, BadInput)}
        if refusals and not self.lost:
            handle, refusal = next(iter(refusals.items()))
            if not answers or compares:
                raise handle.naming(refusal) if answers else refusal
            for handle, error in refusals.items():
                self.lose(handle, error)
        return answers

    async def until_answered(self) -> None:
        """Wait for the pending answers, at most until `GRACE_SECONDS` after the first loss."""
        with anyio.CancelScope(deadline=self._lost_at + GRACE_SECONDS):
            while self.pending:
                self._answered = anyio.Event()
                await self._answered.wait()

    def dismiss(self, handles: Iterable[WorkerHandle], why: str) -> None:
        """End the given workers for the reason `why`, and remove them from the group. The workers may hang."""
        for handle in list(handles):
            self.lose(handle, why)
