"""What the wire forms have in common: a request that was read, and a writer that tells a turn while it is sampled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from runner.chat_requests import ChatCall
from runner.endpoint.refusals import Refused
from runner.parsing.events import ContentPiece, ReasoningPiece
from runner.tokens.top_logprobs import TopLogprobs
from runner.trajectory import Turn
from runner.turn_events import IdsSampled, ToolCalled, TurnAdmitted, TurnProgress

__all__ = ["AnswerWriter", "Answered", "Headers", "Restarted", "TokenText", "WireForm", "WireRequest", "cached_of"]

Headers = Mapping[str, str]
"""The headers of a request by their names in lower case."""


class TokenText(Protocol):
    """Tells the text of ids; a byte that is no text by itself is the character that `surrogateescape` has for it."""

    def __call__(self, ids: Sequence[int], /) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRequest:
    """A request as it was read, whatever its form."""

    asked: ChatCall
    """What it asks of the episode."""
    stream: bool
    """Whether the answer is told while it is sampled."""
    ids: bool = False
    """Whether the token ids of prompt and answer are given too."""
    logprobs: bool = False
    """Whether the log-probability of each id is."""
    top_logprobs: int = 0
    """How many of the likeliest ids are, for each."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What else the writer of its form has to know."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to a request: what a turn said, as the client is to have it."""

    turn: Turn
    """The turn."""
    text: str
    """Its content."""
    reasoning: str
    """Its reasoning."""
    calls: Sequence[tuple[str, str, Mapping[str, Any]]]
    """The id, the name and the arguments of each call."""

    @classmethod
    def of(cls, turn: Turn, continued: Turn | None = None) -> Answered:
        """What a turn said; where it goes on with one that was cut, what that did not say."""
        made = turn.as_message().get("tool_calls", ())
        calls = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in made]
        if continued is None:
            return cls(turn, turn.text, turn.reasoning, calls)
        text, reasoning = turn.text.removeprefix(continued.text), turn.reasoning.removeprefix(continued.reasoning)
        return cls(turn, text, reasoning, calls[len(continued.as_message().get("tool_calls", ())) :])


class Restarted(Exception):
    """The engine threw away a turn of which a part was told: the client has to ask again."""


class AnswerWriter(ABC):
    """Writes one answer, whole or event by event; what a stream was not told is in its end.

    A subclass says how each part is written. Its methods return bytes as they go onto the wire, which may be none.
    """

    keep_alive: ClassVar[bytes] = b": waiting\n\n"
    """What is sent while nothing else is."""

    def __init__(self, request: WireRequest, model: str, text_of: TokenText) -> None:
        """Write an answer to a request.

        Args:
            request: the request.
            model: the name of the model that answers.
            text_of: tells the text of ids.
        """
        self.request = request
        self.model = model
        self.text_of = text_of
        self.handle = ""
        """What names the turn."""
        self.prompt_ids: Sequence[int] = ()
        """All that the model saw."""
        self._begun = False
        self._text = 0
        self._reasoning = 0
        self._called = 0
        self._calls = 0

    # --- what is told

    @property
    def tells_ids(self) -> bool:
        """Whether the client is told of ids, and not of what they say alone."""
        return self.request.ids or self.request.logprobs

    def tell(self, progress: Iterable[TurnProgress]) -> bytes:
        """What has come of the turn, in as few events as may be.

        Raises:
            Restarted: the turn is sampled anew, and some of it was told.
        """
        return b"".join(self._told(each) for each in _merged(progress))

    def end(self, answered: Answered) -> bytes:
        """What of the turn was not told yet, and its end."""
        parts: list[bytes] = []
        if not self._begun:
            parts.append(self._begin(TurnAdmitted(answered.turn.handle, answered.turn.prompt_ids)))
            parts.append(self._sampled(IdsSampled(answered.turn.token_ids, answered.turn.logprobs, answered.turn.top)))
        if reasoning := answered.reasoning[self._reasoning :]:
            parts.append(self.write_reasoning(reasoning))
        if text := answered.text[self._text :]:
            parts.append(self.write_text(text))
        for index, (call_id, name, arguments) in enumerate(answered.calls):
            if index >= self._calls:
                parts.append(self.write_call(index, call_id, name, arguments))
        parts.append(self.write_end(answered))
        return b"".join(parts)

    def _told(self, progress: TurnProgress) -> bytes:
        match progress:
            case TurnAdmitted():
                return b"" if self._begun else self._begin(progress)
            case IdsSampled():
                return self._sampled(progress)
            case ReasoningPiece(text):
                self._reasoning += len(text)
                return self.write_reasoning(text)
            case ContentPiece(text):
                self._text += len(text)
                return self.write_text(text)
            case ToolCalled(call):
                number, self._called = self._called, self._called + 1
                # One that cannot be read is none to a client: nothing could answer it.
                if call.error is not None:
                    return b""
                index, self._calls = self._calls, self._calls + 1
                return self.write_call(index, f"{self.handle}_{number}", call.name, call.arguments)
            case _:
                raise Restarted

    def _begin(self, admitted: TurnAdmitted) -> bytes:
        self._begun, self._called = True, admitted.calls_before
        self.handle, self.prompt_ids = admitted.handle, admitted.prompt_ids
        return self.write_begin()

    def _sampled(self, sampled: IdsSampled) -> bytes:
        if not self.tells_ids:
            return b""
        return self.write_ids(sampled.token_ids, sampled.logprobs, sampled.top)

    # --- how it is written

    @abstractmethod
    def write_begin(self) -> bytes:
        """The begin of a stream."""

    @abstractmethod
    def write_reasoning(self, text: str) -> bytes:
        """A further piece of the reasoning."""

    @abstractmethod
    def write_text(self, text: str) -> bytes:
        """A further piece of the content."""

    @abstractmethod
    def write_call(self, index: int, call_id: str, name: str, arguments: Mapping[str, Any]) -> bytes:
        """The call of a tool, the `index`-th one of the answer."""

    def write_ids(self, token_ids: Sequence[int], logprobs: Sequence[float] | None, top: TopLogprobs | None) -> bytes:
        """Further sampled ids, for a client that asked for them; what they say may have been written or not."""
        return b""

    @abstractmethod
    def write_end(self, answered: Answered) -> bytes:
        """The end of a stream."""

    @abstractmethod
    def write_refusal(self, refused: Refused) -> bytes:
        """The end of a stream that was begun and gets no answer."""

    @abstractmethod
    def whole(self, answered: Answered) -> bytes:
        """The whole answer, for a client that does not listen to a stream."""


class WireForm(ABC):
    """One form of requests and answers. It has no state."""

    name: ClassVar[str]
    """What the record of a request calls it."""

    @abstractmethod
    def read(self, body: Mapping[str, Any], headers: Headers) -> WireRequest:
        """Read a request.

        Raises:
            Refused: something in it cannot be used; names the field and the fix.
        """

    @abstractmethod
    def writer(self, request: WireRequest, model: str, text_of: TokenText) -> AnswerWriter:
        """What writes the answer to a request."""

    @abstractmethod
    def refusal(self, refused: Refused) -> Mapping[str, Any]:
        """The body of the answer to a request that is refused, in words by which clients of this form tell why."""


def cached_of(turn: Turn) -> int:
    """How many tokens of a turn's prompt were cached, as far as its engine says."""
    told = turn.cached_tokens if turn.usage is None else turn.usage.cached_tokens
    return told or 0


def _merged(progress: Iterable[TurnProgress]) -> Iterable[TurnProgress]:
    """The same with neighbouring pieces of a text as one."""
    last: TurnProgress | None = None
    for each in progress:
        if isinstance(each, ContentPiece) and isinstance(last, ContentPiece):
            last = ContentPiece(last.text + each.text)
        elif isinstance(each, ReasoningPiece) and isinstance(last, ReasoningPiece):
            last = ReasoningPiece(last.text + each.text)
        else:
            if last is not None:
                yield last
            last = each
    if last is not None:
        yield last
