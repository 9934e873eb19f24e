"""Retry policy for HTTP requests, for any HTTP client: kinds of failures, waits, and a budget."""

from __future__ import annotations

import enum
import math
import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from runner import checked

__all__ = ["FailureKind", "HttpFailure", "Retries", "RetryPolicy", "kind_of_status", "retry_after_seconds"]


class FailureKind(enum.StrEnum):
    """Kind of a failed request."""

    CONNECTION = "connection"
    """No connection was made, or the connection closed before the end of the answer."""
    BUSY = "busy"
    """The server is busy: status 429, 503 or 529."""
    TIMEOUT = "timeout"
    """The server sent no data in time, or answered 408, 409 or 425."""
    SERVER = "server"
    """The server failed: any other 5xx, or an error within an answer."""
    GARBAGE = "garbage"
    """The answer does not follow the server's protocol."""
    REFUSED = "refused"
    """The key is not accepted, the path or model does not exist, or payment is required: 401 to 404."""
    TOO_LONG = "too_long"
    """The prompt does not fit the context of the server's model."""
    FILTERED = "filtered"
    """The server's content filter rejected the prompt."""
    BAD_REQUEST = "bad_request"
    """The server rejected the request: any other 4xx."""


_AGAIN = frozenset({FailureKind.CONNECTION, FailureKind.BUSY})
_BUSY = (429, 503, 529)  # 529 is Anthropic's status when it is overloaded
_TIMEOUT = (408, 409, 425)  # 409 is a lock time-out, 425 a request that was too early
_REFUSED = (401, 402, 403, 404)


def kind_of_status(status: int) -> FailureKind:
    """Return the kind of failure that an HTTP status other than 2xx reports."""
    if status in _BUSY:
        return FailureKind.BUSY
    if status in _TIMEOUT:
        return FailureKind.TIMEOUT
    if status in _REFUSED:
        return FailureKind.REFUSED
    return FailureKind.BAD_REQUEST if 400 <= status < 500 else FailureKind.SERVER


def retry_after_seconds(value: str | None, *, now: datetime | None = None) -> float | None:
    """Convert a Retry-After header, a number or a date, to seconds; None if it is missing or cannot be read."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        until = parsedate_to_datetime(value)
    except ValueError:
        return None
    until = until if until.tzinfo is not None else until.replace(tzinfo=UTC)
    return max(0.0, (until - (now or datetime.now(UTC))).total_seconds())


@dataclass(eq=False)
class HttpFailure(Exception):
    """Failure of one attempt of a request."""

    kind: FailureKind
    """Kind of the failure."""
    text: str
    """Description for people."""
    retry_after: float | None = None
    """Seconds in the server's Retry-After header; None without it, and infinity if the server forbids a retry."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Number of retries and waits between them.

    A request is sent again after a failed connection, or the status 429, 503 or 529. A request to a chat API is also
    sent again after another 5xx or a time-out. No request is sent again once a part of its answer arrived.
    """

    attempts: int = 8
    """Maximum number of attempts per request, including the first."""
    first_seconds: float = 0.5
    """Maximum first wait in seconds without a Retry-After. The maximum doubles with each further attempt, and a wait is
    drawn between half of the maximum and the maximum.
    """
    longest_seconds: float = 30.0
    """Maximum wait in seconds without a Retry-After."""
    longest_retry_after: float = 120.0
    """Maximum Retry-After in seconds; after a longer one the request fails."""
    budget: int = 1000
    """Maximum number of retries of an entered engine; each success restores one."""

    def __post_init__(self) -> None:
        for name, least in (("attempts", 1), ("budget", 0)):
            given = f"RetryPolicy({name}={getattr(self, name)!r})"
            checked.whole(given, checked.number(given, getattr(self, name), least=least), least=least)
        for name in ("first_seconds", "longest_seconds", "longest_retry_after"):
            checked.number(f"RetryPolicy({name}={getattr(self, name)!r})", getattr(self, name), least=0)


class Retries:
    """Retries of an engine since it was entered: the rest of the budget, and counts.

    Args:
        policy: the retry policy.
        seed: seed of the random part of the waits.
        again: the kinds of failures after which a request is sent again.
    """

    def __init__(self, policy: RetryPolicy, *, seed: int = 0, again: Collection[FailureKind] = _AGAIN) -> None:
        self.policy = policy
        """Retry policy."""
        self.left = policy.budget
        """Number of retries that are left in the budget."""
        self.counts: Counter[FailureKind] = Counter()
        """Number of retries by kind of failure."""
        self.waited = 0.0
        """Sum of all waits, in seconds."""
        self._again = again
        self._random = random.Random(seed)

    def wait_after(self, failure: HttpFailure, attempt: int) -> float | None:
        """Return the seconds to wait before the next attempt; None if the request is not sent again.

        A result other than None takes one retry from the budget.

        Args:
            failure: the failure of the last attempt.
            attempt: number of attempts so far.
        """
        policy = self.policy
        asked = failure.retry_after or 0.0
        if failure.kind not in self._again or attempt >= policy.attempts or not self.left:
            return None
        if asked > policy.longest_retry_after:
            return None
        longest = min(policy.longest_seconds, math.ldexp(policy.first_seconds, attempt - 1))
        # Wait at least the server's Retry-After, and spread the retries over time.
        seconds = max(asked, longest / 2) + self._random.uniform(0.0, longest / 2)
        self.left -= 1
        self.counts[failure.kind] += 1
        self.waited += seconds
        return seconds

    def succeeded(self) -> None:
        """Restore one retry of the budget after a success, up to the whole budget."""
        self.left = min(self.policy.budget, self.left + 1)
