"""Admission gate, which limits the concurrent requests in an engine and admits later turns before first turns.

An engine such as vLLM has an unbounded first-come-first-served queue: ten thousand first turns in this queue would
delay every later turn and evict its cache. So requests wait at this gate instead.

Each data-parallel rank of an engine has its own cache and places. A session stays on its first rank, where its cache
is, and waits for a place there.
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
    """Data-parallel rank of an episode's sessions. All of them use the rank of the first admitted session."""

    rank: int | None = None
    """Data-parallel rank; None before the first admission."""


@dataclass(slots=True)
class Session:
    """State of one conversation in the engine; made by `Engine.session()`."""

    late: bool = False
    """True if the session's next request is admitted before first requests; False for an episode's first request."""
    tokens: int = 0
    """Number of ids that are reserved in the cache: the current length plus the longest possible next turn."""
    closed: bool = False
    """True once its room in the cache was freed."""
    affinity: Affinity = field(default_factory=Affinity)
    """Rank of the session, shared with the other sessions of its episode."""


def affinity_beside(session: Session | None) -> Affinity:
    """Return the affinity of another session of the episode, or a new one."""
    return Affinity() if session is None else session.affinity


@dataclass(slots=True, eq=False)
class _Waiter:
    session: Session
    tokens: int
    was_late: bool
    had_tokens: int
    arrival: int
    admitted: bool = False
    woken: anyio.Event | None = None  # created only if the request has to wait

    def wake(self) -> None:
        if self.woken is not None:
            self.woken.set()


# The queue is an ordered dict, since removing a cancelled waiter from the middle must take constant time.
_Queue: TypeAlias = OrderedDict[_Waiter, None]


@dataclass(slots=True, eq=False)
class _Rank:
    """Requests in one data-parallel rank, and late requests that wait for a place in it."""

    number: int
    inside: int = 0
    kept: int = 0
    live: int = 0
    late: _Queue = field(default_factory=OrderedDict)


_Found: TypeAlias = tuple[_Waiter, _Rank, _Queue]
"""Next request to admit, its rank, and its queue."""


class AdmissionGate:
    """Gate that decides which requests enter the engine, and in which order.

    A request is *late* if its session was admitted before, or was created as late; the others are *first* requests.
    Late requests are admitted before first requests, and each kind in its order of arrival. A session is *live* while
    it reserves room in the KV cache. Reserved room delays first requests, but never late requests. On a rank without
    live sessions, a first request needs only a place. An admission takes constant time.

    Places and room are split evenly among the ranks. A request without a rank goes to the rank with a free place and
    the least reserved room; its session then stays there.

    Args:
        places: maximum number of concurrent requests, over all ranks.
        room: size of the KV cache in ids, over all ranks.
        block: ids per block of the cache.
        ranks: number of data-parallel ranks.
    """

    def __init__(self, places: int, room: int, *, block: int = 1, ranks: int = 1) -> None:
        self.places = places
        """Maximum number of concurrent requests."""
        self.room = room
        """Size of the KV cache in ids."""
        self._block = block
        self._ranks = [_Rank(number) for number in range(ranks)]
        self._unbound: _Queue = OrderedDict()  # late requests of episodes that have no rank yet
        self._first: _Queue = OrderedDict()
        self._arrivals = count()
        self._failure: Callable[[], Exception] | None = None
        self._held = False

    @property
    def inside(self) -> int:
        """Number of requests in the engine."""
        return sum(rank.inside for rank in self._ranks)

    @property
    def kept(self) -> int:
        """Number of ids that live sessions reserve, in whole blocks."""
        return sum(rank.kept for rank in self._ranks)

    @property
    def live(self) -> int:
        """Number of sessions with reserved room."""
        return sum(rank.live for rank in self._ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Number of requests in each data-parallel rank."""
        return tuple(rank.inside for rank in self._ranks)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a place."""
        return sum(map(len, self._queues()))

    @property
    def first_waiting(self) -> int:
        """Number of requests that wait for a place and are not late."""
        return len(self._first)

    async def enter(self, session: Session, tokens: int) -> None:
        """Wait for a place, and reserve `tokens` ids for the session.

        Args:
            session: the request's session. Its first admission makes it late, and binds its episode to a rank.
            tokens: length of the prompt plus the longest possible turn.

        Raises:
            RuntimeError: the session was closed.
            Exception: `fail` was called; the error is the one that its argument creates.
        """
        await checkpoint_if_cancelled()  # a cancelled task must not take a place, even briefly
        if self._failure is not None:
            raise self._failure()
        if session.closed:
            raise RuntimeError("this session is closed; open another one for a further request")
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
        if waiter.admitted:  # cancelled between the admission and the wake-up
            self._rank_of(waiter.session).inside -= 1
            waiter.session.late = waiter.was_late
            self._keep(waiter.session, waiter.had_tokens)
        else:
            queue.pop(waiter, None)
        self._admit()

    def leave(self, session: Session, tokens: int) -> None:
        """Free the place of a request that ended, and set the room that its session reserves.

        Args:
            session: session of the request.
            tokens: number of ids to reserve: the length so far plus the longest possible next turn.
        """
        self._rank_of(session).inside -= 1
        self._keep(session, self._in_blocks(tokens))
        self._admit()

    def close(self, session: Session) -> None:
        """Free the session's room; idempotent."""
        self._keep(session, 0)
        session.closed = True
        self._admit()

    def hold(self) -> None:
        """Admit no request until `release`; admitted ones stay."""
        self._held = True

    def release(self) -> None:
        """Admit requests again after `hold`."""
        self._held = False
        self._admit()

    def resize(self, places: int) -> None:
        """Set the maximum number of concurrent requests; admitted ones stay."""
        self.places = places
        self._admit()

    def fail(self, failure: Callable[[], Exception]) -> None:
        """Stop admitting requests. Waiting and later requests raise the error that `failure` creates."""
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
        """Return the oldest late request whose rank has a place."""
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
        """Return the oldest first request, if a rank has a place and room for it."""
        if not self._first:
            return None
        waiter = next(iter(self._first))
        best = self._best(waiter, fitting=True)
        return None if best is None else (waiter, best, self._first)

    def _best(self, waiter: _Waiter, *, fitting: bool = False) -> _Rank | None:
        """Return the rank with the least reserved room among the allowed ranks that have a place.

        With `fitting`, a rank also needs room for the request. None if there is no such rank.
        """
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
