"""One call to several workers at the same time. A worker whose answer differs in kind from the others is dismissed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import anyio

from runner.cluster.protocol import WorkerLost
from runner.cluster.worker_handle import WorkerHandle
from runner.errors import BadInput, DeltarunnerError

__all__ = ["ask", "compare"]

LOOK_SECONDS: Final = 1.0
"""Seconds between two checks of the workers that have not answered."""


async def ask(handles: Iterable[WorkerHandle], call: str, *arguments: Any, patience: float) -> dict[WorkerHandle, Any]:
    """Call a method on several workers at the same time, and return the answers of those that are still alive.

    A worker that raises where another one does not is dismissed, since their states differ now. A worker that hangs
    where another one has answered is dismissed too.

    Args:
        handles: the workers.
        call: the name of the method.
        arguments: its arguments.
        patience: seconds that a worker may answer later than the first one. Seconds in which its engine samples do not
            count, since the call may wait for turns to end.

    Raises:
        DeltarunnerError: all workers raised; the error of the first one.
    """
    answers, errors = await _asked(handles, call, arguments, patience)
    if errors and not answers:
        raise next(iter(errors.values()))
    _dismiss(call, errors)
    return answers


async def compare(
    handles: Iterable[WorkerHandle], call: str, *arguments: Any, patience: float
) -> dict[WorkerHandle, Any]:
    """Call a method that changes nothing. An error of one worker then counts for all.

    Raises:
        BadInput: a worker refuses the arguments; the message names the worker if others accept them.
        DeltarunnerError: all workers raised.
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
) -> tuple[dict[WorkerHandle, Any], dict[WorkerHandle, DeltarunnerError]]:
    answers: dict[WorkerHandle, Any] = {}
    errors: dict[WorkerHandle, DeltarunnerError] = {}
    waiting = set(handles)
    if not waiting:
        return answers, errors
    one_has_answered = anyio.Event()

    async def ask(handle: WorkerHandle) -> None:
        try:
            answers[handle] = await handle.process.send(call, *arguments)
        except WorkerLost:
            pass
        except DeltarunnerError as error:
            errors[handle] = error
        if answers or errors:
            one_has_answered.set()
        waiting.discard(handle)
        if not waiting:
            late.cancel()

    with anyio.CancelScope() as late:
        async with anyio.create_task_group() as group:
            for handle in tuple(waiting):
                group.start_soon(ask, handle)
            await one_has_answered.wait()
            await _dismiss_the_late(waiting, call, patience)
    return answers, errors


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
                handle.dismiss(f"{call}: it did not answer within {patience:g} s after another worker had")


def _sampled(handle: WorkerHandle) -> int:
    return handle.heartbeat.stats.sampled_tokens if handle.heartbeat is not None else 0


def _dismiss(call: str, errors: Mapping[WorkerHandle, DeltarunnerError]) -> None:
    for handle, error in errors.items():
        handle.dismiss(f"{call}: {error}")
