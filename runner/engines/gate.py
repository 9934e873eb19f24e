"""The admission gate: at most so many requests inside the engine, late turns before first ones.

An engine such as vLLM queues without bound, first come first served: ten thousand first turns in its queue would
starve every late turn and evict its cache. So they wait here instead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

__all__ = ["AdmissionGate", "Session"]


@dataclass(slots=True)
class Session:
    """The engine-side state of one conversation's growing token sequence; made by `Engine.session()`."""

    late: bool = False
    """Whether its next request goes before any first one. An episode's very first request is not late."""
    tokens: int = 0
    """Ids of the engine's cache that are kept for it: its length and its next `max_tokens`."""
    closed: bool = False
    """Whether it gave its room in the cache back."""


@dataclass(slots=True, eq=False)
class _Waiter:
    session: Session
    tokens: int
    was_late: bool
    had_tokens: int
    admitted: bool = False
    woken: anyio.Event | None = None  # made only by who has to wait

    def wake(self) -> None:
        if self.woken is not None:
            self.woken.set()


class AdmissionGate:
    """Who may enter the engine, and in what order.

    A request of a session that was inside before is *late*; late requests go before first ones, and each kind goes in
    the order of arrival. The KV cache has room for `room` ids: what live sessions keep of it holds back first
    requests, never late ones, and a first request always gets in when no session is live. Each admission costs the
    same however many wait.
    """

    def __init__(self, places: int, room: int, *, block: int = 1) -> None:
        self.places = places
        """How many requests may be inside at once."""
        self.room = room
        """How many ids the KV cache holds."""
        self.inside = 0
        """How many requests entered and did not leave."""
        self.kept = 0
        """Ids of the room that live sessions keep, in whole blocks."""
        self.live = 0
        """How many sessions keep room."""
        self._block = block
        # Ordered dictionaries, since a waiter in the middle that is cancelled must go at no cost.
        self._late: OrderedDict[_Waiter, None] = OrderedDict()
        self._first: OrderedDict[_Waiter, None] = OrderedDict()
        self._failure: Callable[[], Exception] | None = None
        self._held = False

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return len(self._late) + len(self._first)

    @property
    def first_waiting(self) -> int:
        """First requests of a session that wait for a place."""
        return len(self._first)

    async def enter(self, session: Session, tokens: int) -> None:
        """Wait for a place, and keep `tokens` ids of room for the session.

        Args:
            session: goes late once it was admitted.
            tokens: the prompt's length and what may be sampled on it.

        Raises:
            RuntimeError: the session was closed.
            Exception: what `fail` was given.
        """
        await checkpoint_if_cancelled()  # who was cancelled already must not take a place, if only for a moment
        if self._failure is not None:
            raise self._failure()
        if session.closed:
            raise RuntimeError("this session was closed; open another for a further request")
        waiter = _Waiter(session, self._in_blocks(tokens), session.late, session.tokens)
        queue = self._late if session.late else self._first
        queue[waiter] = None
        self._admit()
        if not waiter.admitted:
            await self._wait(waiter, queue)

    async def _wait(self, waiter: _Waiter, queue: OrderedDict[_Waiter, None]) -> None:
        waiter.woken = anyio.Event()
        try:
            await waiter.woken.wait()
        except BaseException:
            self._withdraw(waiter, queue)
            raise
        if not waiter.admitted:
            assert self._failure is not None
            raise self._failure()

    def _withdraw(self, waiter: _Waiter, queue: OrderedDict[_Waiter, None]) -> None:
        if waiter.admitted:  # a cancellation that came between the admission and the wake-up
            self.inside -= 1
            waiter.session.late = waiter.was_late
            self._keep(waiter.session, waiter.had_tokens)
        else:
            queue.pop(waiter, None)
        self._admit()

    def leave(self, session: Session, tokens: int) -> None:
        """Give the place back, and keep `tokens` ids for the session: its length and what its next turn may add."""
        self.inside -= 1
        self._keep(session, self._in_blocks(tokens))
        self._admit()

    def close(self, session: Session) -> None:
        """Give the session's room back; twice is allowed."""
        self._keep(session, 0)
        session.closed = True
        self._admit()

    def hold(self) -> None:
        """Let nobody in until `release`; who is inside stays."""
        self._held = True

    def release(self) -> None:
        """Let those in who waited meanwhile."""
        self._held = False
        self._admit()

    def resize(self, places: int) -> None:
        """Let so many be inside at once from now on; who is inside stays."""
        self.places = places
        self._admit()

    def fail(self, failure: Callable[[], Exception]) -> None:
        """Let nobody in any more: whoever waits, and whoever comes, gets an error that `failure` makes."""
        self._failure = failure
        for queue in (self._late, self._first):
            for waiter in queue:
                waiter.wake()
            queue.clear()

    def _admit(self) -> None:
        while self.inside < self.places and not self._held:
            if self._late:
                waiter, _ = self._late.popitem(last=False)
            elif self._first and self._fits(next(iter(self._first))):
                waiter, _ = self._first.popitem(last=False)
            else:
                return
            self.inside += 1
            waiter.session.late = waiter.admitted = True
            self._keep(waiter.session, waiter.tokens)
            waiter.wake()

    def _fits(self, waiter: _Waiter) -> bool:
        return self.live == 0 or self.kept + waiter.tokens <= self.room

    def _keep(self, session: Session, tokens: int) -> None:
        if session.closed:
            return
        self.kept += tokens - session.tokens
        self.live += (tokens > 0) - (session.tokens > 0)
        session.tokens = tokens

    def _in_blocks(self, tokens: int) -> int:
        return -(-tokens // self._block) * self._block
