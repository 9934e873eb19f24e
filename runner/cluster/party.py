"""The workers that take part in one transfer, each of which may hang where another one is lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import anyio

from runner.cluster.hand import Hand
from runner.cluster.words import WorkerLost
from runner.errors import BadInput, DeltarunnerError

__all__ = ["GRACE_SECONDS", "Party"]

GRACE_SECONDS: Final = 30.0
"""Once a worker is lost in the middle of a transfer no step of it may take longer: the others may wait for ever."""


class Party:
    """Workers that are asked together.

    Args:
        hands: which; their ranks follow one another in this order.
    """

    def __init__(self, hands: Iterable[Hand]) -> None:
        self.hands = list(hands)
        """Those that are left."""
        self.lost: dict[Hand, str] = {}
        """Those that are not, and why, the first one first."""
        self.asked: set[Hand] = set()
        """Those that have not answered yet."""
        self.finished = False
        """Whether the last step was taken."""
        self._scope = anyio.CancelScope()
        self._seconds = math.inf
        self._lost_at = 0.0
        self._answered = anyio.Event()

    @contextmanager
    def limited(self, seconds: float) -> Iterator[anyio.CancelScope]:
        """Leave the block where for so long no worker was asked or has answered; once one is lost, after the grace."""
        self._seconds = seconds
        with anyio.CancelScope() as self._scope:
            self._push_limit()
            yield self._scope

    def _push_limit(self) -> None:
        self._scope.deadline = anyio.current_time() + (GRACE_SECONDS if self.lost else self._seconds)

    def lose(self, hand: Hand, why: object) -> None:
        """A worker takes part no longer; where it lives it is ended."""
        if hand in self.lost:
            return
        self._lost_at = self._lost_at or anyio.current_time()
        self.lost[hand] = str(why)
        self.hands.remove(hand)
        if not isinstance(why, WorkerLost):
            hand.dismiss(str(why))
        self._push_limit()

    async def ask(
        self, call: str, arguments: Callable[[Hand], tuple[Any, ...]], *, compares: bool = False
    ) -> dict[Hand, Any]:
        """Have a method called on all that are left; gives what those answered that are left then.

        A worker that refuses what others do is not like them, and is lost; where another one was lost they refuse for
        that, and are left.

        Args:
            call: the method.
            arguments: what it is given, by worker.
            compares: whether it touches nothing, so that who refuses speaks for all.

        Raises:
            BadInput: all of them refuse, or one does where they compare, and none was lost; the first one's.
        """
        answers: dict[Hand, Any] = {}
        refusals: dict[Hand, BadInput] = {}

        async def ask(hand: Hand) -> None:
            self.asked.add(hand)
            try:
                answers[hand] = await hand.process.send(call, *arguments(hand))
            except BadInput as error:
                refusals[hand] = error
            except (WorkerLost, DeltarunnerError) as error:
                self.lose(hand, error)
            self.asked.discard(hand)
            self._answered.set()
            self._push_limit()

        async with anyio.create_task_group() as group:
            for hand in self.hands:
                group.start_soon(ask, hand)
        if refusals and not self.lost:
            hand, refusal = next(iter(refusals.items()))
            if not answers or compares:
                raise hand.naming(refusal) if answers else refusal
            for hand, error in refusals.items():
                self.lose(hand, error)
        return answers

    async def until_answered(self) -> None:
        """Wait for those who were asked, until the grace is over."""
        with anyio.CancelScope(deadline=self._lost_at + GRACE_SECONDS):
            while self.asked:
                self._answered = anyio.Event()
                await self._answered.wait()

    def dismiss(self, hands: Iterable[Hand], why: str) -> None:
        """End workers of the party that may hang."""
        for hand in list(hands):
            self.lose(hand, why)
