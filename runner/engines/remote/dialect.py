"""What a dialect does: it writes a request as its server takes it, and reads the chunks of the answer."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from runner.engines.base import FinishReason, GenerationRequest
from runner.engines.state import PauseMode
from runner.tokens.log import VersionSpan
from runner.tokens.top_logprobs import TopLogprobs

__all__ = ["Call", "Dialect", "Piece", "PieceReader", "ServerDialect"]


class ServerDialect(enum.StrEnum):
    """The protocols in which a server takes token ids and gives token ids."""

    VLLM = "vllm"
    """vLLM's `POST /inference/v1/generate`, which a server has that was started with `--enable-scale-out`."""
    COMPLETIONS = "completions"
    """vLLM's `POST /v1/completions` with ids for a prompt and `return_token_ids`; it tells no weight versions."""
    SGLANG = "sglang"
    """SGLang's `POST /generate` with `input_ids`."""


@dataclass(slots=True)
class Piece:
    """What one chunk of an answer says."""

    ids: Sequence[int] = ()
    """The ids that were sampled since the chunk before."""
    logprobs: Sequence[float] | None = None
    """The log-probability of each."""
    top: TopLogprobs | None = None
    """The likeliest ids in the place of each, where they were asked for."""
    reason: FinishReason | None = None
    """Why the turn ended; None while it goes on."""
    stop: int | str | None = None
    """The stop id that ended it."""
    versions: Sequence[VersionSpan] | None = None
    """The weight versions of all ids of the turn, where the server tells them at its end."""
    version: str | None = None
    """The weight version that sampled what is new, where the server tells that with each chunk."""
    cached_tokens: int | None = None
    """Ids of the prompt that the server's prefix cache held."""


class PieceReader(Protocol):
    """Reads the chunks of one answer, in their order."""

    def read(self, chunk: Mapping[str, Any]) -> Piece:
        """What a chunk says.

        Raises:
            KeyError, TypeError, ValueError, IndexError: it is no chunk of this dialect.
        """
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """A request to a server beside those that sample."""

    method: str
    """The HTTP method."""
    path: str
    """The path on the server, with its query."""
    body: Mapping[str, Any] | None = None
    """The JSON that is sent; None for nothing."""
    json: bool = True
    """Whether its answer is JSON; what is not is not read."""


class Dialect(ABC):
    """A protocol in which a server takes token ids and gives token ids."""

    name: ClassVar[ServerDialect]
    """The name by which users choose it."""
    path: ClassVar[str]
    """Where requests that sample are posted."""
    missing: ClassVar[str]
    """What to do where the server has no such path."""
    health: ClassVar[Call]
    """Asks whether the server can answer."""
    version: ClassVar[Call]
    """Asks for the version of the server's software."""
    settings: ClassVar[Call]
    """Asks for what the server was started with; not all servers tell."""
    paused: ClassVar[Call | None] = None
    """Asks whether the server stands still; only one that answers can be paused. None where there is none to ask."""
    control: ClassVar[str]
    """How a server must be started that can be paused."""

    @abstractmethod
    def body(
        self, request: GenerationRequest, *, model: str, adapter: str | None, stream_interval: int
    ) -> dict[str, Any]:
        """The body of a request that samples.

        Raises:
            RequestRejected: the server could not do what is asked.
        """

    @abstractmethod
    def reader(self, request: GenerationRequest) -> PieceReader:
        """Reads the answer to a request."""

    @abstractmethod
    def scoring(self, request: GenerationRequest, *, model: str, adapter: str | None) -> Call:
        """The call that asks for the log-probability of each id of a prompt."""

    @abstractmethod
    def scores_in(self, answer: Mapping[str, Any], prompt: Sequence[int]) -> list[float]:
        """The log-probability of each id of the prompt but the first, out of the answer to `scoring`.

        Raises:
            KeyError, TypeError, ValueError, IndexError: the answer does not have them.
        """

    @abstractmethod
    def version_in(self, answer: Mapping[str, Any]) -> str | None:
        """The server's version, out of its answer to `version`."""

    @abstractmethod
    def places_in(self, answer: Mapping[str, Any]) -> tuple[int | None, int | None]:
        """How many requests the server runs at once and how many ids its cache holds, out of its `settings`."""

    @abstractmethod
    def pause(self, mode: PauseMode) -> Call:
        """Has the server stand still."""

    @abstractmethod
    def resume(self) -> Call:
        """Has the server go on."""

    @abstractmethod
    def reset_prefix_cache(self) -> Call:
        """Has the server forget every cached prompt."""

    def sleep(self, level: int) -> Call | None:
        """Has the server give memory up; None where it cannot."""
        return None

    def wake(self, tags: Sequence[str]) -> Call | None:
        """Has the server take memory back; None where it cannot."""
        return None
