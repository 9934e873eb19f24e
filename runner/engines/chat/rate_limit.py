"""How many requests a server of messages is asked at once: more while it answers, half of it when it is asked too much.

Nobody says beforehand what a key may ask for, and what it may changes with who else asks. So the limit is found, as a
connection finds its share of a network: additive increase, multiplicative decrease.
"""

from __future__ import annotations

import math

import anyio

from runner.engines.gate import AdmissionGate
from runner.engines.http_retries import RetryPolicy

__all__ = ["RateLimiter"]


class RateLimiter:
    """Lets as many requests through a gate as a server takes, and none before it wants to be asked again.

    Args:
        gate: where requests wait; it has as many places as the server is asked at most.
        policy: how long nobody asks a server that does not say for how long.
    """

    def __init__(self, gate: AdmissionGate, policy: RetryPolicy) -> None:
        self.throttled = 0
        """How often the server said that it was asked too much."""
        self._gate = gate
        self._policy = policy
        self._most = gate.places
        self._limit = float(gate.places)
        self._halvings = 0
        self._in_a_row = 0
        self._closed_until = -1.0

    @property
    def limit(self) -> int:
        """Requests that are let through at once just now."""
        return self._gate.places

    async def until_open(self) -> int:
        """Return when the server may be asked.

        Returns:
            What `overloaded` is given for a request that is sent now.
        """
        # In a loop: the server may have asked for more meanwhile.
        while (seconds := self._closed_until - anyio.current_time()) > 0:  # noqa: ASYNC110  # nobody else knows when
            await anyio.sleep(seconds)
        return self._halvings

    def succeeded(self) -> None:
        """The server began to answer a request: after as many as the limit is, one more is let through."""
        self._in_a_row = 0
        if self._limit < self._most:
            self._set(min(self._most, self._limit + 1 / self._limit))

    def overloaded(self, sent: int, retry_after: float | None) -> None:
        """The server said that it is asked too much: half as many are let through, and none for a while.

        Args:
            sent: what `until_open` gave for the request.
            retry_after: the seconds that the server asks for; None where it does not, and then it is doubled each time
                that no request succeeded in between.
        """
        self.throttled += 1
        # Once for all that were sent under the same limit: what came of them says nothing of a smaller one.
        if sent == self._halvings:
            self._halvings += 1
            self._in_a_row += 1
            self._set(max(1.0, self._limit / 2))
        first, longest = self._policy.first_seconds, self._policy.longest_seconds
        pause = min(longest, math.ldexp(first, self._in_a_row - 1)) if retry_after is None else retry_after
        self._closed_until = max(self._closed_until, anyio.current_time() + pause)

    def _set(self, limit: float) -> None:
        self._limit = limit
        self._gate.resize(int(limit))
