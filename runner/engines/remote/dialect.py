"""Interface of server dialects: the form of requests, and of the chunks of an answer."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from runner.engines.base import FinishReason, GenerationRequest
from runner.engines.state import PauseMode
from runner.tokens.log import VersionSpan
from runner.tokens.side_data import SideData
from runner.tokens.top_logprobs import TopLogprobs

__all__ = ["Call", "Dialect", "Piece", "PieceReader", "ServerDialect", "SideRequest"]


class ServerDialect(enum.StrEnum):
    """Server protocols that take and return token ids."""

    VLLM = "vllm"
    """vLLM's `POST /inference/v1/generate`; needs a server with `--enable-scale-out`."""
    COMPLETIONS = "completions"
    """vLLM's `POST /v1/completions` with ids as the prompt and `return_token_ids`; it reports no weight versions."""
    SGLANG = "sglang"
    """SGLang's `POST /generate` with `input_ids`."""


@dataclass(slots=True)
class Piece:
    """Content of one chunk of an answer."""

    ids: Sequence[int] = ()
    """Ids that were sampled since the previous chunk."""
    logprobs: Sequence[float] | None = None
    """Log-probability of each id; None for a chunk without ids."""
    top: TopLogprobs | None = None
    """Most likely ids at each position; None if none were requested."""
    reason: FinishReason | None = None
    """Reason for the end of the turn; None before it."""
    stop: int | str | None = None
    """Stop id or stop string that ended the turn, if the server reports it."""
    versions: Sequence[VersionSpan] | None = None
    """Weight versions of all ids of the turn, if the server reports them at its end."""
    version: str | None = None
    """Weight version of the new ids, if the server reports it with each chunk."""
    cached_tokens: int | None = None
    """Number of prompt ids that the server's prefix cache held; None if unknown."""
    processed: bool = False
    """True if the log-probabilities are of the sampling distribution in every mode of the server."""
    side: SideData | None = None
    """Sampling masks and routed experts, if the server returns them."""


@dataclass(frozen=True, slots=True)
class SideRequest:
    """Side data to request from a server that sends it only on request."""

    masks: bool = False
    """True to request the ids that could be sampled at each position."""
    experts: int = 0
    """Number of experts per id and layer; above 0, the experts are requested."""


class PieceReader(Protocol):
    """Reader of the chunks of one answer, in order."""

    def read(self, chunk: Mapping[str, Any]) -> Piece:
        """Read a chunk.

        Raises:
            KeyError, TypeError, ValueError, IndexError: the chunk does not follow this dialect.
        """
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """HTTP request to a server."""

    method: str
    path: str
    """Path on the server, with its query."""
    body: Mapping[str, Any] | None = None
    """JSON body; None for no body."""
    json: bool = True
    """True if the answer is JSON; another answer is not parsed."""


class Dialect(ABC):
    """Protocol of a server that takes and returns token ids."""

    name: ClassVar[ServerDialect]
    """Name for the option `dialect`."""
    path: ClassVar[str]
    """Path for requests that sample."""
    missing: ClassVar[str]
    """Advice for errors if the server does not have `path`."""
    health: ClassVar[Call]
    """Request that tests whether the server can answer."""
    version: ClassVar[Call]
    """Request for the version of the server software."""
    settings: ClassVar[Call]
    """Request for the settings of the server; not all servers answer it."""
    paused: ClassVar[Call | None] = None
    """Request that succeeds only on a server that can be paused; None if no server of this protocol can be paused."""
    control: ClassVar[str]
    """Advice for errors: how to start a server that can be paused."""
    side: SideRequest = SideRequest()
    """Side data to request. Servers of vLLM send side data without a request."""

    @abstractmethod
    def body(
        self, request: GenerationRequest, *, model: str, adapter: str | None, stream_interval: int
    ) -> dict[str, Any]:
        """Return the body of a request that samples.

        Raises:
            RequestRejected: the server does not support the request.
        """

    @abstractmethod
    def reader(self, request: GenerationRequest) -> PieceReader:
        """Return a reader of the answer to a request."""

    @abstractmethod
    def scoring(self, request: GenerationRequest, *, model: str, adapter: str | None) -> Call:
        """Return the call that computes the log-probability of each id of a prompt."""

    @abstractmethod
    def scores_in(self, answer: Mapping[str, Any], prompt: Sequence[int]) -> list[float]:
        """Read the log-probability of each prompt id but the first from the answer to `scoring`.

        Raises:
            KeyError, TypeError, ValueError, IndexError: the answer has no such values.
        """

    @abstractmethod
    def version_in(self, answer: Mapping[str, Any]) -> str | None:
        """Read the server's version from the answer to `version`; None if it is missing."""

    @abstractmethod
    def places_in(self, answer: Mapping[str, Any]) -> tuple[int | None, int | None]:
        """Read the maximum number of concurrent requests and the cache size in ids from the answer to `settings`.

        A value that the server does not report is None.
        """

    @abstractmethod
    def pause(self, mode: PauseMode) -> Call:
        """Return the call that pauses the server."""

    @abstractmethod
    def resume(self) -> Call:
        """Return the call that resumes the server."""

    @abstractmethod
    def reset_prefix_cache(self) -> Call:
        """Return the call that drops all cached prompts."""

    def sleep(self, level: int) -> Call | None:
        """Return the call that releases memory; None if unsupported."""
        return None

    def wake(self, tags: Sequence[str]) -> Call | None:
        """Return the call that allocates memory again; None if unsupported."""
        return None
