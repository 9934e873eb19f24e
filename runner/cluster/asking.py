"""One call to several workers at once, and what becomes of a worker that answers otherwise than the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import anyio

from runner.cluster.hand import Hand
from runner.cluster.words import WorkerLost
from runner.errors import BadInput, DeltarunnerError

__all__ = ["ask", "compare"]

LOOK_SECONDS: Final = 1.0
"""Those that have not answered are looked at this often, as often as they are heard."""


async def ask(hands: Iterable[Hand], call: str, *arguments: Any, patience: float) -> dict[Hand, Any]:
    """Have a method called on workers at once; gives the answers of those that are still there.

    A worker that raises where another one does not is dismissed: it is not like the others any more. So is one that
    hangs where another one has answered.

    Args:
        hands: the workers.
        call: the method.
        arguments: what it is given.
        patience: how many seconds later than the first one a worker may answer, those not counted in which its engine
            samples: turns that are waited for are its affair.

    Raises:
        DeltarunnerError: all of them raised; the first one's.
    """
    answers, errors = await _asked(hands, call, arguments, patience)
    if errors and not answers:
        raise next(iter(errors.values()))
    _dismiss(call, errors)
    return answers


async def compare(hands: Iterable[Hand], call: str, *arguments: Any, patience: float) -> dict[Hand, Any]:
    """The same for a method that touches nothing: who refuses what was given speaks for all.

    Raises:
        BadInput: a worker refuses it; says which, where others do not.
        DeltarunnerError: all of them raised.
    """
    answers, errors = await _asked(hands, call, arguments, patience)
    for hand, error in errors.items():
        if isinstance(error, BadInput):
            raise hand.naming(error) if answers else error
    if errors and not answers:
        raise next(iter(errors.values()))
    _dismiss(call, errors)
    return answers


async def _asked(
    hands: Iterable[Hand], call: str, arguments: tuple[Any, ...], patience: float
) -> tuple[dict[Hand, Any], dict[Hand, DeltarunnerError]]:
    answers: dict[Hand, Any] = {}
    errors: dict[Hand, DeltarunnerError] = {}
    waiting = set(hands)
    if not waiting:
        return answers, errors
    one_has_answered = anyio.Event()

    async def ask(hand: Hand) -> None:
        try:
            answers[hand] = await hand.process.send(call, *arguments)
        except WorkerLost:
            pass
        except DeltarunnerError as error:
            errors[hand] = error
        if answers or errors:
            one_has_answered.set()
        waiting.discard(hand)
        if not waiting:
            late.cancel()

    with anyio.CancelScope() as late:
        async with anyio.create_task_group() as group:
            for hand in tuple(waiting):
                group.start_soon(ask, hand)
            await one_has_answered.wait()
            await _dismiss_the_late(waiting, call, patience)
    return answers, errors


async def _dismiss_the_late(waiting: Iterable[Hand], call: str, patience: float) -> None:
    now = anyio.current_time()
    active = {hand: (_sampled(hand), now) for hand in waiting}
    while True:
        await anyio.sleep(LOOK_SECONDS)
        now = anyio.current_time()
        for hand in tuple(waiting):
            sampled, since = active[hand]
            if _sampled(hand) != sampled:
                active[hand] = _sampled(hand), now
            elif now - since > patience:
                hand.dismiss(f"{call}: it did not answer within {patience:g} s after another worker had")


def _sampled(hand: Hand) -> int:
    return hand.pulse.stats.sampled_tokens if hand.pulse is not None else 0


def _dismiss(call: str, errors: Mapping[Hand, DeltarunnerError]) -> None:
    for hand, error in errors.items():
        hand.dismiss(f"{call}: {error}")
