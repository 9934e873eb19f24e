"""The admission gate: at most so many requests inside the engine, late turns before first ones.

An engine such as vLLM queues without bound, first come first served: ten thousand first turns in its queue would
starve every late turn and evict its cache. So they wait here instead.

An engine of several data-parallel ranks has a cache and places in each. A session stays on the rank that it began on,
where its cache is, and waits for a place there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

__all__ = ["AdmissionGate", "Affinity", "Session", "affinity_beside"]


@dataclass(slots=True, eq=False)
class Affinity:
    """Where the sessions of one episode are: all on the rank that the first of them was let in to."""

    rank: int | None = None
    """The data-parallel rank; None until one of them was let in."""


@dataclass(slots=True)
class Session:
    """The engine-side state of one conversation's growing token sequence; made by `Engine.session()`."""

    late: bool = False
    """Whether its next request goes before any first one. An episode's very first request is not late."""
    tokens: int = 0
    """Ids of the engine's cache that are kept for it: its length and its next `max_tokens`."""
    closed: bool = False
    """Whether it gave its room in the cache back."""
    affinity: Affinity = field(default_factory=Affinity)
    """The rank that it stays on, together with the other sessions of its episode."""


def affinity_beside(session: Session | None) -> Affinity:
    """That of a session of the same episode, or a new one."""
    return Affinity() if session is None else session.affinity


@dataclass(slots=True, eq=False)
class _Waiter:
    session: Session
    tokens: int
    was_late: bool
    had_tokens: int
    arrival: int
    admitted: bool = False
    woken: anyio.Event | None = None  # made only by who has to wait

    def wake(self) -> None:
        if self.woken is not None:
            self.woken.set()


# Ordered, since a waiter in the middle that is cancelled must go at no cost.
_Queue: TypeAlias = OrderedDict[_Waiter, None]


@dataclass(slots=True, eq=False)
class _Rank:
    """What is inside one data-parallel rank, and the late requests that wait for a place in it."""

    number: int
    inside: int = 0
    kept: int = 0
    live: int = 0
    late: _Queue = field(default_factory=OrderedDict)


_Found: TypeAlias = tuple[_Waiter, _Rank, _Queue]
"""Who is let in next, where to, and where it waited."""


class AdmissionGate:
    """Who may enter the engine, and in what order.

    A request of a session that was inside before is *late*; late requests go before first ones, and each kind goes in
    the order of arrival. The KV cache has room for `room` ids: what live sessions keep of it holds back first
    requests, never late ones, and a first request always gets in when no session is live. Each admission costs the
    same however many wait.

    Places and room are shared out evenly among the ranks of an engine. A request that is not bound to one goes to the
    rank that has a place and keeps least; its session is bound to that from then on.

    Args:
        places: how many requests may be inside at once, all ranks together.
        room: how many ids the KV cache holds, all ranks together.
        block: ids in a block of the cache.
        ranks: how many data-parallel ranks the engine has.
    """

    def __init__(self, places: int, room: int, *, block: int = 1, ranks: int = 1) -> None:
        self.places = places
        """How many requests may be inside at once."""
        self.room = room
        """How many ids the KV cache holds."""
        self._block = block
        self._ranks = [_Rank(number) for number in range(ranks)]
        self._unbound: _Queue = OrderedDict()  # late ones of episodes that no rank has yet
        self._first: _Queue = OrderedDict()
        self._arrivals = count()
        self._failure: Callable[[], Exception] | None = None
        self._held = False

    @property
    def inside(self) -> int:
        """How many requests entered and did not leave."""
        return sum(rank.inside for rank in self._ranks)

    @property
    def kept(self) -> int:
        """Ids of the room that live sessions keep, in whole blocks."""
        return sum(rank.kept for rank in self._ranks)

    @property
    def live(self) -> int:
        """How many sessions keep room."""
        return sum(rank.live for rank in self._ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """How many requests are inside each data-parallel rank."""
        return tuple(rank.inside for rank in self._ranks)

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return sum(map(len, self._queues()))

    @property
    def first_waiting(self) -> int:
        """First requests of a session that wait for a place."""
        return len(self._first)

    async def enter(self, session: Session, tokens: int) -> None:
        """Wait for a place, and keep `tokens` ids of room for the session.

        Args:
            session: goes late once it was admitted, and stays on the rank that it was admitted to.
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
        waiter = _Waiter(session, self._in_blocks(tokens), session.late, session.tokens, next(self._arrivals))
        queue = self._queue_of(session)
        queue[waiter] = None
        self._admit()
        if not waiter.admitted:
            await self._wait(waiter, queue)

    def _queue_of(self, session: Session) -> _Queue:
        if not session.late:
            return self._first
        bound = session.affinity.rank
        return self._unbound if bound is None else self._ranks[bound].late

    async def _wait(self, waiter: _Waiter, queue: _Queue) -> None:
        waiter.woken = anyio.Event()
        try:
            await waiter.woken.wait()
        except BaseException:
            self._withdraw(waiter, queue)
            raise
        if not waiter.admitted:
            assert self._failure is not None
            raise self._failure()

    def _withdraw(self, waiter: _Waiter, queue: _Queue) -> None:
        if waiter.admitted:  # a cancellation that came between the admission and the wake-up
            self._rank_of(waiter.session).inside -= 1
            waiter.session.late = waiter.was_late
            self._keep(waiter.session, waiter.had_tokens)
        else:
            queue.pop(waiter, None)
        self._admit()

    def leave(self, session: Session, tokens: int) -> None:
        """Give the place back, and keep `tokens` ids for the session: its length and what its next turn may add."""
        self._rank_of(session).inside -= 1
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
        for queue in self._queues():
            for waiter in queue:
                waiter.wake()
            queue.clear()

    def _queues(self) -> Iterator[_Queue]:
        yield from (rank.late for rank in self._ranks)
        yield self._unbound
        yield self._first

    def _admit(self) -> None:
        while not self._held and (found := self._next_late() or self._next_first()):
            waiter, rank, queue = found
            del queue[waiter]
            waiter.session.affinity.rank = rank.number
            rank.inside += 1
            waiter.session.late = waiter.admitted = True
            self._keep(waiter.session, waiter.tokens)
            waiter.wake()

    def _next_late(self) -> _Found | None:
        """Of the late requests that some rank has a place for, the one that came first."""
        found: _Found | None = None
        for rank in self._ranks:
            if rank.late and self._has_place(rank):
                waiter = next(iter(rank.late))
                if found is None or waiter.arrival < found[0].arrival:
                    found = waiter, rank, rank.late
        if self._unbound:
            waiter = next(iter(self._unbound))
            best = self._best(waiter)
            if best is not None and (found is None or waiter.arrival < found[0].arrival):
                found = waiter, best, self._unbound
        return found

    def _next_first(self) -> _Found | None:
        """The first request that came first, if some rank has a place and room for it."""
        if not self._first:
            return None
        waiter = next(iter(self._first))
        best = self._best(waiter, fitting=True)
        return None if best is None else (waiter, best, self._first)

    def _best(self, waiter: _Waiter, *, fitting: bool = False) -> _Rank | None:
        """Of the ranks that it may go to and that have a place, or also room for it, the one that keeps least."""
        bound, best = waiter.session.affinity.rank, None
        for rank in self._ranks if bound is None else (self._ranks[bound],):
            takes = self._has_place(rank) and (not fitting or self._fits(rank, waiter))
            if takes and (best is None or rank.kept < best.kept):
                best = rank
        return best

    def _has_place(self, rank: _Rank) -> bool:
        return rank.inside < self.places // len(self._ranks)

    def _fits(self, rank: _Rank, waiter: _Waiter) -> bool:
        return rank.live == 0 or rank.kept + waiter.tokens <= self.room // len(self._ranks)

    def _rank_of(self, session: Session) -> _Rank:
        return self._ranks[session.affinity.rank or 0]

    def _keep(self, session: Session, tokens: int) -> None:
        if session.closed:
            return
        rank = self._rank_of(session)
        rank.kept += tokens - session.tokens
        rank.live += (tokens > 0) - (session.tokens > 0)
        session.tokens = tokens

    def _in_blocks(self, tokens: int) -> int:
        return -(-tokens // self._block) * self._block
