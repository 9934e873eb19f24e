"""A server of messages while an engine asks it: who waits, how often it is asked again, and its end."""

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
    """What an engine and its streams share while it runs.

    Args:
        server: the server.
        request_format: how it is spoken to.
        retries: what may be sent again.
        places: how many requests it is asked at once at most.
        context: the most tokens that prompt and turn may have together.
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
        """Requests that were sent and not answered to their end."""
        self.sampled = 0
        """Tokens that were read, by the server's count where it gives one."""
        self._answered = False

    def answered(self) -> None:
        """The server began to answer a request."""
        self._answered = True
        self.retries.succeeded()
        self.limiter.succeeded()

    def note_load(self, failure: HttpFailure, sent: int) -> None:
        """Ask less of the server where it says that this is too much; `sent` is what the limiter gave for the request.

        One that wants to be asked again only after long is asked earlier: the request fails that it told it of.
        """
        if failure.kind is FailureKind.BUSY:
            asked, longest = failure.retry_after, self.retries.policy.longest_retry_after
            self.limiter.overloaded(sent, None if asked is None or asked == math.inf else min(asked, longest))

    def failed(self, request: MessageRequest, failure: HttpFailure) -> EngineError:
        """The error for a request that failed for good; one that all would meet ends the engine."""
        if failure.kind is FailureKind.TOO_LONG:
            prompt, context = too_long(failure.text)
            return PromptTooLong(f"{request.name}: {self.server.url}: {failure}", prompt=prompt, context=context)
        # What it takes of others is wrong in this one alone.
        return self.permanent_error(request.name, failure, alone=self._answered)
