"""Runtime of a chat engine: gate, rate limit, retries, and the check that its server answers."""

from __future__ import annotations

import math
import sys

import anyio

from runner.engines.chat.server import ChatServer, too_long
from runner.engines.chat.wire import RequestFormat
from runner.engines.gate import AdmissionGate
from runner.engines.http_engine import HttpRuntime
from runner.engines.http_retries import FailureKind, HttpFailure, Retries, RetryPolicy
from runner.engines.message_engine import MessageRequest
from runner.errors import EngineError, PromptTooLong

__all__ = ["ChatRuntime", "RateLimiter"]


class RateLimiter:
    """Limiter that adjusts a gate's places to the rate that a server accepts, and delays requests to a busy server.

    The rate that the server allows for an API key is unknown, and changes with the other users of the server. The
    limit is adapted like a TCP congestion window: additive increase, multiplicative decrease.

    Args:
        gate: the gate where requests wait; its places are the upper limit.
        policy: retry policy; it sets the pauses if a server does not send Retry-After.
    """

    def __init__(self, gate: AdmissionGate, policy: RetryPolicy) -> None:
        self.throttled = 0
        self._gate = gate
        self._policy = policy
        self._most = gate.places
        self._limit = float(gate.places)
        self._halvings = 0
        self._in_a_row = 0
        self._closed_until = -1.0

    @property
    def limit(self) -> int:
        return self._gate.places

    async def until_open(self) -> int:
        """Wait until a request may be sent.

        Returns:
            The number of times that the limit was halved. Pass it to `overloaded` as `sent`.
        """
        # The wait is a loop, since another response may have extended the pause.
        while (seconds := self._closed_until - anyio.current_time()) > 0:  # noqa: ASYNC110  # no event marks the end
            await anyio.sleep(seconds)
        return self._halvings

    def succeeded(self) -> None:
        """Record that an answer began. After `limit` answers, the limit grows by one, up to the initial places."""
        self._in_a_row = 0
        if self._limit < self._most:
            self._set(min(self._most, self._limit + 1 / self._limit))

    def overloaded(self, sent: int, retry_after: float | None) -> None:
        """Record a rate-limit response. The limit is halved, and no request is sent during a pause.

        Args:
            sent: the result of `until_open` for the request.
            retry_after: seconds in the response's Retry-After header. None without this header: the pause then doubles
                with each halving, up to the policy's `longest_seconds`, until a request succeeds.
        """
        self.throttled += 1
        # The limit is halved once for all requests that were sent under the same limit, since their failures do not
        # show whether a smaller limit is also too large.
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


class ChatRuntime(HttpRuntime[ChatServer]):
    """State that a chat engine and its streams share while the engine runs.

    Args:
        server: the server.
        request_format: field names and extra fields of the requests.
        retries: the retries of the engine since it was entered.
        places: maximum number of concurrent requests.
        context: maximum number of tokens of prompt and turn together.
    """

    def __init__(
        self, server: ChatServer, request_format: RequestFormat, retries: Retries, *, places: int, context: int
    ) -> None:
        self.server = server
        self.request_format = request_format
        self.retries = retries
        self.context = context
        self.gate = AdmissionGate(places, sys.maxsize)
        self.limiter = RateLimiter(self.gate, retries.policy)
        self.asking = 0
        self.sampled = 0
        """Number of sampled tokens: for each answer, the number of pieces, or the server's count if that is larger."""
        self._answered = False

    def answered(self) -> None:
        self._answered = True
        self.retries.succeeded()
        self.limiter.succeeded()

    async def _probe(self) -> None:
        await self.server.probe()

    def note_load(self, failure: HttpFailure, sent: int) -> None:
        """Lower the rate if the failure is a rate-limit response.

        If the server requests a longer pause than the policy's `longest_retry_after`, this request fails, and other
        requests wait for `longest_retry_after`.

        Args:
            failure: the failure of the request.
            sent: the result of `until_open` for the request.
        """
        if failure.kind is FailureKind.BUSY:
            asked, longest = failure.retry_after, self.retries.policy.longest_retry_after
            self.limiter.overloaded(sent, None if asked is None or asked == math.inf else min(asked, longest))

    def failed(self, request: MessageRequest, failure: HttpFailure) -> EngineError:
        """Return the error for a request that is not sent again.

        A failure that affects every request ends the engine.
        """
        if failure.kind is FailureKind.TOO_LONG:
            prompt, context = too_long(failure.text)
            return PromptTooLong(f"{request.name}: {self.server.url}: {failure}", prompt=prompt, context=context)
        # After the server has answered once, a rejected body is an error of this request alone.
        return self.permanent_error(request.name, failure, alone=self._answered)
