"""Runtime of a chat engine: gate, rate limit, retries and the end of its server."""

from __future__ import annotations

import math
import sys

from runner.engines.chat.rate_limit import RateLimiter
from runner.engines.chat.server import ChatServer, too_long
from runner.engines.chat.wire import RequestFormat
from runner.engines.gate import AdmissionGate
from runner.engines.http_engine import HttpRuntime
from runner.engines.http_retries import FailureKind, HttpFailure, Retries
from runner.engines.message_engine import MessageRequest
from runner.errors import EngineError, PromptTooLong

__all__ = ["ChatRuntime"]


class ChatRuntime(HttpRuntime[ChatServer]):
    """State that a chat engine and its streams share while it runs.

    Args:
        server: the server.
        request_format: names and extra fields of its requests.
        retries: the retries of the run.
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
        """Requests in progress."""
        self.sampled = 0
        """Tokens that were read, by the server's count if it reports one."""
        self._answered = False

    def answered(self) -> None:
        """Record an answer that began."""
        self._answered = True
        self.retries.succeeded()
        self.limiter.succeeded()

    async def _probe(self) -> None:
        await self.server.probe()

    def note_load(self, failure: HttpFailure, sent: int) -> None:
        """Lower the rate after a rate-limit response; `sent` is the result of `until_open` for the request.

        A pause longer than the policy allows is shortened for other requests; the request that received it fails.
        """
        if failure.kind is FailureKind.BUSY:
            asked, longest = failure.retry_after, self.retries.policy.longest_retry_after
            self.limiter.overloaded(sent, None if asked is None or asked == math.inf else min(asked, longest))

    def failed(self, request: MessageRequest, failure: HttpFailure) -> EngineError:
        """Return the error for a request that is not sent again.

        A failure that every request would have ends the engine.
        """
        if failure.kind is FailureKind.TOO_LONG:
            prompt, context = too_long(failure.text)
            return PromptTooLong(f"{request.name}: {self.server.url}: {failure}", prompt=prompt, context=context)
        # After one answer, a rejected body is specific to its request.
        return self.permanent_error(request.name, failure, alone=self._answered)
