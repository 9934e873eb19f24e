"""Limiters that all episodes of a run share across workers: workers lease permits from one service."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from typing import Protocol

import anyio

from runner.errors import BadOption, EngineError

__all__ = ["LeasedLimiter", "LimiterService", "SharedLimiters"]


class SharedLimiters:
    """The service that grants leases of limiters. A fleet has one, which every worker calls."""

    def __init__(self) -> None:
        self._limiters: dict[tuple[int, str], anyio.CapacityLimiter] = {}
        self._leases: dict[tuple[int, int], tuple[anyio.CapacityLimiter, anyio.CancelScope]] = {}
        self._gone: set[int] = set()

    async def acquire(self, run: int, name: str, limit: int, worker: int, lease: int) -> bool:
        """Wait for a lease, and return True; return False if the request was cancelled or its worker was forgotten.

        Raises:
            BadOption: the limiter was opened with another limit before.
        """
        # the end of the worker was reported before this request, so the lease would never be released
        if worker in self._gone:
            return False
        limiter = self._limiters.setdefault((run, name), anyio.CapacityLimiter(limit))
        if limiter.total_tokens != limit:
            raise BadOption(
                f"limiter({name!r}, {limit}): an earlier call had the limit {limiter.total_tokens}; use one limit."
            )
        held = worker, lease
        with anyio.CancelScope() as scope:
            self._leases[held] = limiter, scope
            await limiter.acquire_on_behalf_of(held)
        return held in self._leases  # the lease may have been revoked while it was granted

    async def release(self, worker: int, lease: int) -> None:
        self._release((worker, lease))

    async def forget(self, worker: int) -> None:
        """Revoke all leases of a worker that is gone, and refuse its later requests. Its number is not used again."""
        self._gone.add(worker)
        for held in [held for held in self._leases if held[0] == worker]:
            self._release(held)

    async def close_run(self, run: int) -> None:
        """Remove the limiters of a run that is over."""
        for key in [key for key in self._limiters if key[0] == run]:
            del self._limiters[key]

    def _release(self, held: tuple[int, int]) -> None:
        if held not in self._leases:  # the lease was refused or revoked
            return
        limiter, scope = self._leases.pop(held)
        if held in limiter.statistics().borrowers:
            limiter.release_on_behalf_of(held)
        else:
            scope.cancel()


class LimiterService(Protocol):
    """A worker's access to `SharedLimiters`."""

    def acquire(self, run: int, name: str, limit: int, worker: int, lease: int) -> Awaitable[bool]:
        """Call `SharedLimiters.acquire`."""

    def release(self, worker: int, lease: int) -> None:
        """Call `SharedLimiters.release`, without waiting for it."""


class LeasedLimiter:
    """One worker's access to one shared limiter."""

    def __init__(
        self, limiter_service: LimiterService, leases: Iterator[int], run: int, worker: int, name: str, limit: int
    ) -> None:
        self._limiter_service = limiter_service
        self._leases = leases
        self._run = run
        self._worker = worker
        self._name = name
        self._limit = limit
        self._held: dict[object, int] = {}

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        """Wait until the borrower may proceed.

        Raises:
            BadOption: the limiter was opened with another limit before.
            EngineError: this worker was dismissed, and another one plays its episodes.
        """
        lease = next(self._leases)
        asked = self._limiter_service.acquire(self._run, self._name, self._limit, self._worker, lease)
        try:
            granted = await asked
        except BaseException:
            self._limiter_service.release(self._worker, lease)
            raise
        if not granted:
            raise EngineError(
                f"limiter({self._name!r}, {self._limit}): worker {self._worker} was dismissed, and another worker "
                "plays its episodes again."
            )
        self._held[borrower] = lease

    def release_on_behalf_of(self, borrower: object) -> None:
        """Release the borrower's lease, so that the next borrower may proceed."""
        self._limiter_service.release(self._worker, self._held.pop(borrower))
