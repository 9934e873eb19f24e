"""When a request over HTTP is sent again, and after how long a wait: one policy with a budget, without any HTTP."""

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
    """What became of a request that was not answered as it should."""

    CONNECTION = "connection"
    """No connection came about, or it ended before its answer did."""
    BUSY = "busy"
    """The server has no place for it now: 429, 503, or the 529 of some."""
    TIMEOUT = "timeout"
    """The server took too long to begin its answer, or says that something behind it did: 408, 409 or 425."""
    SERVER = "server"
    """The server failed: any other 5xx, or an error in the middle of an answer."""
    GARBAGE = "garbage"
    """The answer is not what the server's protocol says."""
    REFUSED = "refused"
    """The server lets nobody in with this key, has no such path or model, or wants to be paid: 401 to 404."""
    TOO_LONG = "too_long"
    """The prompt does not fit the context of the server's model."""
    FILTERED = "filtered"
    """The server does not answer such a prompt: its content filter says no."""
    BAD_REQUEST = "bad_request"
    """The server does not take what was sent: any other 4xx."""


_AGAIN = frozenset({FailureKind.CONNECTION, FailureKind.BUSY})
_BUSY = (429, 503, 529)  # 529 is what Anthropic answers when it is overloaded
_TIMEOUT = (408, 409, 425)  # 409 is a lock that was not had in time, 425 a request that came too early
_REFUSED = (401, 402, 403, 404)


def kind_of_status(status: int) -> FailureKind:
    """What an answer of this HTTP status means, 2xx left out."""
    if status in _BUSY:
        return FailureKind.BUSY
    if status in _TIMEOUT:
        return FailureKind.TIMEOUT
    if status in _REFUSED:
        return FailureKind.REFUSED
    return FailureKind.BAD_REQUEST if 400 <= status < 500 else FailureKind.SERVER


def retry_after_seconds(value: str | None, *, now: datetime | None = None) -> float | None:
    """The seconds that a Retry-After header asks for, in either of its forms; None without one that can be read."""
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
    """One try of a request that failed."""

    kind: FailureKind
    """What became of it."""
    text: str
    """What happened, as whoever started the server should read it."""
    retry_after: float | None = None
    """The seconds after which the server wants to be asked again; None where it does not say."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often, and after what waits, requests are sent again that a server could not take.

    Sent again is what no answer has begun for: after a failed connection, a 429, 503 or 529; to a server of messages
    also after another 5xx and a time-out. Nothing is sent again once any of it was sampled.
    """

    attempts: int = 8
    """How often one request is sent at most, the first time included."""
    first_seconds: float = 0.5
    """About how long the first wait is; each further one is twice as long."""
    longest_seconds: float = 30.0
    """The longest wait that the server did not ask for."""
    longest_retry_after: float = 120.0
    """The longest wait that the server may ask for by Retry-After; where it asks for more, the request fails."""
    budget: int = 1000
    """How many requests of one run may be sent again; each that succeeds gives one back."""

    def __post_init__(self) -> None:
        for name, least in (("attempts", 1), ("budget", 0)):
            given = f"RetryPolicy({name}={getattr(self, name)!r})"
            checked.whole(given, checked.number(given, getattr(self, name), least=least), least=least)
        for name in ("first_seconds", "longest_seconds", "longest_retry_after"):
            checked.number(f"RetryPolicy({name}={getattr(self, name)!r})", getattr(self, name), least=0)


class Retries:
    """The retries of one run: what is left of its budget, and what was counted.

    Args:
        policy: when to send again.
        seed: what the random part of the waits follows from.
        again: the failures after which a request is sent again.
    """

    def __init__(self, policy: RetryPolicy, *, seed: int = 0, again: Collection[FailureKind] = _AGAIN) -> None:
        self.policy = policy
        """When to send again."""
        self.left = policy.budget
        """How many requests may still be sent again."""
        self.counts: Counter[FailureKind] = Counter()
        """How many requests were sent again, by what had become of them."""
        self.waited = 0.0
        """The seconds of all waits together."""
        self._again = again
        self._random = random.Random(seed)

    def wait_after(self, failure: HttpFailure, attempt: int) -> float | None:
        """The seconds after which to send a request again; None if it has failed for good.

        Args:
            failure: what became of it.
            attempt: how often it was sent.
        """
        policy = self.policy
        asked = failure.retry_after or 0.0
        if failure.kind not in self._again or attempt >= policy.attempts or not self.left:
            return None
        if asked > policy.longest_retry_after:
            return None
        longest = min(policy.longest_seconds, math.ldexp(policy.first_seconds, attempt - 1))
        # Never earlier than the server asks, and not all at the same moment.
        seconds = max(asked, longest / 2) + self._random.uniform(0.0, longest / 2)
        self.left -= 1
        self.counts[failure.kind] += 1
        self.waited += seconds
        return seconds

    def succeeded(self) -> None:
        """A request was answered."""
        self.left = min(self.policy.budget, self.left + 1)
