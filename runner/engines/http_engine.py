"""Parts that engines over HTTP servers share: address check, error texts, state of the server, retried streams."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import Final, Generic, Protocol, TypeVar
from urllib.parse import SplitResult, urlsplit

import anyio

from runner.concurrency.clocks import Waiting
from runner.engines.gate import AdmissionGate
from runner.engines.http_retries import FailureKind, HttpFailure, Retries
from runner.engines.state import NOT_RUNNING
from runner.errors import BadOption, EngineDead, EngineError, RequestRejected

__all__ = ["ErrorTexts", "HttpRuntime", "RetriedStream", "server_address"]

_MAX_ERROR_CHARS: Final = 600
"""Maximum length of a server's error text, in characters."""

PieceT = TypeVar("PieceT")
FinishT = TypeVar("FinishT")


def server_address(given: str, *, engine: str, option: str, example: str) -> SplitResult:
    """Return the parts of an HTTP server's address; an address that contains a secret is refused.

    Args:
        given: the address.
        engine: class name for errors.
        option: name of the address argument, for errors.
        example: an address, for errors.

    Raises:
        BadOption: the text is not an HTTP address, or contains a user name, a password or a query.
    """
    parts = urlsplit(given)
    if parts.username is not None or parts.password is not None or parts.query:
        raise BadOption(
            f"{engine}({option}=): the address has a user name, a password or a query, which run files would contain: "
            "leave it out, and give secrets as api_key=."
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.fragment:
        raise BadOption(f"{engine}({option}={given!r}): give the server's address, such as {example}.")
    return parts


class ErrorTexts:
    """Filter for the error texts of a server. It masks secrets that were sent, since a server may repeat them.

    Args:
        secrets: the secrets that were sent to the server.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        # Short secrets are not masked, since errors contain short words by chance. An example is "none", which stands
        # for no key.
        self._secrets = [secret for secret in secrets if len(secret) > 4]

    def masked(self, text: str) -> str:
        """Return a text on one line, with "***" in place of each secret."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return " ".join(text.split())

    def short(self, text: str) -> str:
        """Mask the secrets in a text, and return its beginning on one line."""
        return self.masked(text)[:_MAX_ERROR_CHARS]


class _HasUrl(Protocol):
    @property
    def url(self) -> str: ...


ServerT = TypeVar("ServerT", bound=_HasUrl)


class HttpRuntime(Generic[ServerT]):
    """State of a server that an engine uses, and the errors of requests that failed."""

    gate: AdmissionGate
    """Gate where requests wait. Once the server cannot be used, every request fails at the gate."""
    server: ServerT
    retries: Retries
    _death: EngineDead | None = None

    def is_alive(self) -> bool:
        """Return whether the server can be used, as far as is known without a request."""
        return self._death is None

    def require_alive(self) -> None:
        """Check that the server can be used, as far as is known without a request.

        Raises:
            EngineDead: the server cannot be used; the message has the cause.
        """
        if self._death is not None:
            raise self.death_error("")

    def death_error(self, why: str) -> EngineDead:
        """Mark the engine as dead, and return the error for one request. All errors have the first reason."""
        if self._death is None:
            self._death = EngineDead(why)
            self.gate.fail(lambda: self.death_error(""))
        # Each request gets a copy, since an object that many tasks raise would collect the tracebacks of all of them.
        return EngineDead(*self._death.args)

    @abstractmethod
    async def _probe(self) -> None:
        """Send a request that any server in good health answers at once.

        Raises:
            HttpFailure: the server does not answer it.
        """

    async def wait_to_retry(self, failure: HttpFailure, attempt: int) -> bool:
        """Wait until a request may be sent again; the clocks of its episode stop during the wait.

        Returns:
            True after the wait; False, at once, if the request is not to be sent again.

        Raises:
            EngineDead: the server cannot be used any more.
        """
        seconds = self.retries.wait_after(failure, attempt)
        if seconds is None:
            return False
        with Waiting():
            await anyio.sleep(seconds)
        self.require_alive()
        return True

    async def health(self) -> None:
        """Return when the server answers. Failed requests are retried.

        Raises:
            EngineDead: the server does not answer.
        """
        self.require_alive()
        for attempt in itertools.count(1):
            try:
                await self._probe()
            except HttpFailure as failure:
                if not await self.wait_to_retry(failure, attempt):
                    raise self.death_error(f"The server at {self.server.url} is gone: {failure}") from failure
            else:
                return

    def stop(self) -> None:
        """End all use of the server; requests at the gate fail."""
        self.death_error(NOT_RUNNING)

    def permanent_error(self, name: str, failure: HttpFailure, *, alone: bool) -> EngineError:
        """Return the error for a request that is not sent again.

        A failure that affects every request ends the engine.

        Args:
            name: name of the request.
            failure: the failure of its last attempt.
            alone: True if a rejected body is an error of this request only.
        """
        if failure.kind is FailureKind.REFUSED:
            return self.death_error(f"The server at {self.server.url} refuses the requests: {failure}")
        if failure.kind is FailureKind.BAD_REQUEST:
            if alone:
                return RequestRejected(f"{name}: {self.server.url} refuses the request: {failure}")
            return self.death_error(f"The server at {self.server.url} rejects the requests: {failure}")
        return EngineError(f"{name}: {self.server.url}: {failure}")


class RetriedStream(Generic[PieceT, FinishT]):
    """Pieces of an answer. A failure before the first piece is retried; a later failure is not."""

    finish: FinishT | None
    """Finish of the answer; None before its end."""
    _pieces: deque[PieceT]
    """Pieces that were read and not returned yet."""

    async def __anext__(self) -> PieceT:
        while not self._pieces:
            if self.finish is not None:
                raise StopAsyncIteration
            try:
                await self._read()
            except HttpFailure as failure:
                if self._begun:  # a retry would sample another output
                    raise self._failed(failure) from failure
                await self._again(failure)
                await self._open()
        return self._pieces.popleft()

    @property
    @abstractmethod
    def _begun(self) -> bool:
        """True once a part of the answer was read."""

    @abstractmethod
    async def _open(self) -> None:
        """Send the request, with retries, until an answer begins."""

    @abstractmethod
    async def _read(self) -> None:
        """Read the next part of the answer."""

    @abstractmethod
    async def _again(self, failure: HttpFailure) -> None:
        """Wait until the request may be sent again.

        Raises:
            EngineError: no attempt is left, or the failure is permanent.
        """

    @abstractmethod
    def _failed(self, failure: HttpFailure) -> EngineError:
        """Return the error for a request that is not sent again."""
