"""One call to several workers at once, and what becomes of a worker that answers otherwise than the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import anyio

from runner.cluster.hand import Hand
from runner.cluster.words import WorkerLost
from runner.errors import BadInput, DeltarunnerError

__all__ = ["ask", "compare"]


async def ask(hands: Iterable[Hand], call: str, *arguments: Any) -> dict[Hand, Any]:
    """Have a method called on workers at once; gives the answers of those that are still there.

    A worker that raises where another one does not is dismissed: it is not like the others any more.

    Raises:
        DeltarunnerError: all of them raised; the first one's.
    """
    answers, errors = await _asked(hands, call, *arguments)
    if errors and not answers:
        raise next(iter(errors.values()))
    _dismiss(call, errors)
    return answers


async def compare(hands: Iterable[Hand], call: str, *arguments: Any) -> dict[Hand, Any]:
    """The same for a method that touches nothing: who refuses what was given speaks for all.

    Raises:
        BadInput: a worker refuses it; says which, where others do not.
        DeltarunnerError: all of them raised.
    """
    answers, errors = await _asked(hands, call, *arguments)
    for hand, error in errors.items():
        if isinstance(error, BadInput):
            raise hand.naming(error) if answers else error
    if errors and not answers:
        raise next(iter(errors.values()))
    _dismiss(call, errors)
    return answers


async def _asked(
    hands: Iterable[Hand], call: str, *arguments: Any
) -> tuple[dict[Hand, Any], dict[Hand, DeltarunnerError]]:
    answers: dict[Hand, Any] = {}
    errors: dict[Hand, DeltarunnerError] = {}

    async def ask(hand: Hand) -> None:
        try:
            answers[hand] = await hand.process.send(call, *arguments)
        except WorkerLost:
            pass
        except DeltarunnerError as error:
            errors[hand] = error

    async with anyio.create_task_group() as group:
        for hand in hands:
            group.start_soon(ask, hand)
    return answers, errors


def _dismiss(call: str, errors: Mapping[Hand, DeltarunnerError]) -> None:
    for hand, error in errors.items():
        hand.dismiss(f"{call}: {error}")
