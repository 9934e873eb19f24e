"""Limiters that the episodes of a run share although they are played on many workers: leases from one desk."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from typing import Protocol

import anyio

from runner.errors import BadOption, EngineError

__all__ = ["Desk", "LeasedLimiter", "LimiterDesk"]


class LimiterDesk:
    """Gives leases out; there is one of it in a fleet, and every worker asks it."""

    def __init__(self) -> None:
        self._limiters: dict[tuple[int, str], anyio.CapacityLimiter] = {}
        self._leases: dict[tuple[int, int], tuple[anyio.CapacityLimiter, anyio.CancelScope]] = {}
        self._gone: set[int] = set()

    async def acquire(self, run: int, name: str, limit: int, worker: int, lease: int) -> bool:
        """Wait for a lease; gives False where it was given up meanwhile, or its worker was forgotten.

        Raises:
            BadOption: the limiter was opened with another limit before.
        """
        if worker in self._gone:  # it was said to be gone while this was on its way, and nobody would give it back
            return False
        limiter = self._limiters.setdefault((run, name), anyio.CapacityLimiter(limit))
        if limiter.total_tokens != limit:
            raise BadOption(
                f"limiter({name!r}, {limit}): it was opened with {limiter.total_tokens} before; use one limit."
            )
        held = worker, lease
        with anyio.CancelScope() as scope:
            self._leases[held] = limiter, scope
            await limiter.acquire_on_behalf_of(held)
        return held in self._leases  # it may have been taken back as it was granted

    async def release(self, worker: int, lease: int) -> None:
        """Give a lease back, or stop waiting for it."""
        self._release((worker, lease))

    async def forget(self, worker: int) -> None:
        """Take back all leases of a worker that is gone, and give it no more; no other one gets its number."""
        self._gone.add(worker)
        for held in [held for held in self._leases if held[0] == worker]:
            self._release(held)

    async def close_run(self, run: int) -> None:
        """Forget the limiters of a run that is over."""
        for key in [key for key in self._limiters if key[0] == run]:
            del self._limiters[key]

    def _release(self, held: tuple[int, int]) -> None:
        if held not in self._leases:  # it was refused
            return
        limiter, scope = self._leases.pop(held)
        if held in limiter.statistics().borrowers:
            limiter.release_on_behalf_of(held)
        else:
            scope.cancel()


class Desk(Protocol):
    """How a worker reaches the desk."""

    def acquire(self, run: int, name: str, limit: int, worker: int, lease: int) -> Awaitable[bool]:
        """As `LimiterDesk.acquire`."""

    def release(self, worker: int, lease: int) -> None:
        """As `LimiterDesk.release`, without waiting for it."""


class LeasedLimiter:
    """One limiter as the episodes on one worker see it."""

    def __init__(self, desk: Desk, leases: Iterator[int], run: int, worker: int, name: str, limit: int) -> None:
        self._desk = desk
        self._leases = leases
        self._run = run
        self._worker = worker
        self._name = name
        self._limit = limit
        self._held: dict[object, int] = {}

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        """Wait until the borrower is let in.

        Raises:
            EngineError: this worker was given up, and another one plays its episodes.
        """
        lease = next(self._leases)
        asked = self._desk.acquire(self._run, self._name, self._limit, self._worker, lease)
        try:
            granted = await asked
        except BaseException:
            self._desk.release(self._worker, lease)
            raise
        if not granted:
            raise EngineError(f"limiter({self._name!r}, {self._limit}): worker {self._worker} was given up meanwhile.")
        self._held[borrower] = lease

    def release_on_behalf_of(self, borrower: object) -> None:
        """Let the next one in."""
        self._desk.release(self._worker, self._held.pop(borrower))
