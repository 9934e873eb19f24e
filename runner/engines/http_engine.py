"""What engines that ask a server share: its address, whether it can be asked, and answers that are asked for again."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from typing import Generic, Protocol, TypeVar
from urllib.parse import SplitResult, urlsplit

from runner.engines.gate import AdmissionGate
from runner.engines.http_retries import FailureKind, HttpFailure
from runner.errors import BadOption, EngineDead, EngineError, RequestRejected

__all__ = ["HttpRuntime", "RetriedStream", "server_address"]

PieceT = TypeVar("PieceT")
FinishT = TypeVar("FinishT")


def server_address(given: str, *, engine: str, option: str, example: str) -> SplitResult:
    """The parts of an address, if it is one of an HTTP server, without a secret in it.

    Args:
        given: the address.
        engine: what the class is called in errors.
        option: what it calls its address.
        example: such an address.

    Raises:
        BadOption: it is not.
    """
    parts = urlsplit(given)
    if parts.username is not None or parts.password is not None or parts.query:
        raise BadOption(f"{engine}({option}=): an address is kept in run files; give what is secret as api_key=.")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.fragment:
        raise BadOption(f"{engine}({option}={given!r}): give the server's address, such as {example}.")
    return parts


class _HasUrl(Protocol):
    @property
    def url(self) -> str: ...


ServerT = TypeVar("ServerT", bound=_HasUrl)


class HttpRuntime(Generic[ServerT]):
    """Whether a server can be asked, and the errors for requests that it failed."""

    gate: AdmissionGate
    """The gate where requests wait; it is shut once the server cannot be asked."""
    server: ServerT
    """The server."""
    _death: EngineDead | None = None

    def is_alive(self) -> bool:
        """Whether requests can be answered, as far as is known without asking."""
        return self._death is None

    def require_alive(self) -> None:
        """Return if requests can be answered, as far as is known without asking.

        Raises:
            EngineDead: they cannot, with the cause.
        """
        if self._death is not None:
            raise self.death_error("")

    def death_error(self, why: str) -> EngineDead:
        """The error for one request of an engine that cannot be used any more: the same words for all of them."""
        if self._death is None:
            self._death = EngineDead(why)
            self.gate.fail(lambda: self.death_error(""))
        # A copy for each who is told: one object raised in many tasks would gather the tracebacks of all of them.
        return EngineDead(*self._death.args)

    def stop(self) -> None:
        """Ask nothing more; whoever waits at the gate is sent away."""
        self.death_error("the engine is not running")

    def permanent_error(self, name: str, failure: HttpFailure, *, alone: bool) -> EngineError:
        """The error for a request that failed for good; one that all would meet ends the engine.

        Args:
            name: of the request.
            failure: what became of it.
            alone: whether what the server does not take of it is in no other request.
        """
        if failure.kind is FailureKind.REFUSED:
            return self.death_error(f"The server at {self.server.url} refuses what it is asked: {failure}")
        if failure.kind is FailureKind.BAD_REQUEST:
            if alone:
                return RequestRejected(f"{name}: {self.server.url} refuses the request: {failure}")
            return self.death_error(f"The server at {self.server.url} does not take the requests: {failure}")
        return EngineError(f"{name}: {self.server.url}: {failure}")


class RetriedStream(Generic[PieceT, FinishT]):
    """The pieces of an answer: what fails before the first of them is asked for again, and nothing after it."""

    finish: FinishT | None
    """The end of the answer; None while it goes on."""
    _pieces: deque[PieceT]
    """What was read of the answer and not given yet."""

    async def __anext__(self) -> PieceT:
        while not self._pieces:
            if self.finish is not None:
                raise StopAsyncIteration
            try:
                await self._read()
            except HttpFailure as failure:
                if self._begun:  # what was sampled cannot be sampled once more
                    raise self._failed(failure) from failure
                await self._again(failure)
                await self._open()
        return self._pieces.popleft()

    @property
    @abstractmethod
    def _begun(self) -> bool:
        """Whether any of the answer was read."""

    @abstractmethod
    async def _open(self) -> None:
        """Send the request until an answer begins."""

    @abstractmethod
    async def _read(self) -> None:
        """Read on in the answer."""

    @abstractmethod
    async def _again(self, failure: HttpFailure) -> None:
        """Wait until the request may be sent again.

        Raises:
            EngineError: it may not.
        """

    @abstractmethod
    def _failed(self, failure: HttpFailure) -> EngineError:
        """The error for a request that has failed for good."""
