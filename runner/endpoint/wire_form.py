"""The interface of the wire forms: a parsed request, a writer for the answer, and parts of answers as JSON."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol

import orjson

from runner.chat_requests import ChatCall
from runner.endpoint.refusals import Refused
from runner.history_cache import HistoryCache
from runner.messages import canonical_json
from runner.parsing.events import ContentPiece, ReasoningPiece
from runner.tokens.top_logprobs import TopLogprobs
from runner.trajectory import Turn
from runner.turn_events import IdsSampled, ToolCalled, TurnAdmitted, TurnProgress

__all__ = [
    "AnswerWriter",
    "Answered",
    "Headers",
    "Restarted",
    "TokenText",
    "WireForm",
    "WireRequest",
    "arguments_text",
    "cached_of",
    "encode",
    "logprob_rows",
]


Headers = Mapping[str, str]
"""Headers of a request by their names in lower case."""


class TokenText(Protocol):
    """Function that returns the text of ids. A byte that is not valid text is decoded by `surrogateescape`."""

    def __call__(self, ids: Sequence[int], /) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRequest:
    """A parsed request of any wire form."""

    chat_call: ChatCall
    """The request to the episode."""
    stream: bool
    """True to stream the answer."""
    ids: bool = False
    """True to return the token ids of prompt and answer too."""
    logprobs: bool = False
    """True to return the log-probability of each id."""
    top_logprobs: int = 0
    """Number of most likely ids to return at each position."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further values for the writer of the form."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The content of an answer."""

    turn: Turn
    """The turn of the answer."""
    text: str
    """The text of the answer."""
    reasoning: str
    """The reasoning of the answer."""
    calls: Sequence[tuple[str, str, Mapping[str, Any]]]
    """Id, name and arguments of each call in the answer."""

    @classmethod
    def of(cls, turn: Turn, continued: Turn | None = None) -> Answered:
        """Return the content of a turn. If it continues a truncated turn, return only the new part."""
        made = turn.as_message().get("tool_calls", ())
        calls = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in made]
        if continued is None:
            return cls(turn, turn.text, turn.reasoning, calls)
        text, reasoning = turn.text.removeprefix(continued.text), turn.reasoning.removeprefix(continued.reasoning)
        return cls(turn, text, reasoning, calls[len(continued.as_message().get("tool_calls", ())) :])


class Restarted(Exception):
    """A turn that the engine discarded after a part of it was sent. The client must retry."""


class AnswerWriter(ABC):
    """The writer of one answer, in one piece or in events. The end of a stream has all data that was not sent before.

    A subclass writes each part. Each of its methods returns the bytes to send, which may be empty.
    """

    keep_alive: ClassVar[bytes] = b": waiting\n\n"
    """The bytes that are sent while there are no events."""

    def __init__(self, request: WireRequest, model: str, text_of: TokenText) -> None:
        """Begin the answer to a request.

        Args:
            request: the request.
            model: name of the model.
            text_of: returns the text of ids.
        """
        self.request = request
        self.model = model
        self.text_of = text_of
        self.handle = ""
        """Id of the turn."""
        self.prompt_ids: Sequence[int] = ()
        """All ids of the prompt."""
        self._begun = False
        self._text = 0
        self._reasoning = 0
        self._called = 0
        self._calls = 0

    # --- progress

    @property
    def sends_ids(self) -> bool:
        """True if the client requested ids or log-probabilities."""
        return self.request.ids or self.request.logprobs

    def write(self, progress: Iterable[TurnProgress]) -> bytes:
        """Return the bytes of the turn's progress, in few events.

        Raises:
            Restarted: the turn is sampled again although a part of it was sent.
        """
        return b"".join(self._write_one(each) for each in _merged(progress))

    def end(self, answered: Answered) -> bytes:
        """Return the bytes of the rest of the turn, and of the end of the stream."""
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

    def _write_one(self, progress: TurnProgress) -> bytes:
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
                # A call that cannot be parsed is left out, since a client could not answer it.
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
        if not self.sends_ids:
            return b""
        return self.write_ids(sampled.token_ids, sampled.logprobs, sampled.top)

    # --- parts of a stream

    @abstractmethod
    def write_begin(self) -> bytes:
        """Return the bytes that begin a stream."""

    @abstractmethod
    def write_reasoning(self, text: str) -> bytes:
        """Return the bytes of a further piece of reasoning."""

    @abstractmethod
    def write_text(self, text: str) -> bytes:
        """Return the bytes of a further piece of text."""

    @abstractmethod
    def write_call(self, index: int, call_id: str, name: str, arguments: Mapping[str, Any]) -> bytes:
        """Return the bytes of a tool call, which has this index in the answer."""

    def write_ids(self, token_ids: Sequence[int], logprobs: Sequence[float] | None, top: TopLogprobs | None) -> bytes:
        """Return the bytes of further sampled ids. Called only if the client requested ids or log-probabilities.

        The text of these ids may be sent before or after the ids.
        """
        return b""

    @abstractmethod
    def write_end(self, answered: Answered) -> bytes:
        """Return the bytes that end a stream."""

    @abstractmethod
    def write_refusal(self, refused: Refused) -> bytes:
        """Return the bytes that end a stream without an answer."""

    @abstractmethod
    def whole(self, answered: Answered) -> bytes:
        """Return the whole answer, for a client without a stream."""


class WireForm(ABC):
    """A form of requests and answers, without state."""

    name: ClassVar[str]
    """The form's name in the records of requests."""

    @abstractmethod
    def read(self, body: Mapping[str, Any], headers: Headers, seen: HistoryCache[Any] | None = None) -> WireRequest:
        """Read a request.

        Args:
            body: the body of the request.
            headers: the headers of the request.
            seen: cache of the histories in earlier requests of this form to the episode; None for a single request.

        Raises:
            Refused: a field cannot be used; the message has its name and the fix.
        """

    @abstractmethod
    def writer(self, request: WireRequest, model: str, text_of: TokenText) -> AnswerWriter:
        """Return a writer for the answer to a request."""

    @abstractmethod
    def refusal(self, refused: Refused) -> Mapping[str, Any]:
        """Return the body of a refusal, with the words that clients of this form search for."""


def cached_of(turn: Turn) -> int:
    """Return the number of cached tokens of a turn's prompt; 0 if the engine does not report it."""
    cached = turn.cached_tokens if turn.usage is None else turn.usage.cached_tokens
    return cached or 0


def _merged(progress: Iterable[TurnProgress]) -> Iterable[TurnProgress]:
    """Yield the progress, with adjacent pieces of text or of reasoning merged."""
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


def encode(value: Any) -> bytes:
    """Encode a value as JSON. Unpaired surrogates, which are not text, become question marks."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def arguments_text(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of a call as the text that clients receive and send back."""
    text = canonical_json(arguments)
    try:
        text.encode()
    except UnicodeEncodeError:  # a model may write an unpaired surrogate, which must come back unchanged
        return json.dumps(arguments, separators=(",", ":"), default=str)
    return text


def logprob_rows(
    text_of: TokenText,
    token_ids: Sequence[int],
    logprobs: Sequence[float] | None,
    top: TopLogprobs | None,
    *,
    count: int,
) -> list[dict[str, Any]]:
    """Return the log-probability of each id as OpenAI writes it, with the `count` most likely ids at its position.

    If `logprobs` is None, the log-probability of each id is 0.
    """
    rows = [] if top is None or not count else list(zip(top.id_rows(), top.logprob_rows(), strict=True))
    rows_of_ids = []
    for index, token_id in enumerate(token_ids):
        own = _token(text_of, token_id, 0.0 if logprobs is None else logprobs[index])
        most_likely = zip(*(each[:count] for each in rows[index]), strict=True) if index < len(rows) else ()
        own["top_logprobs"] = [_token(text_of, int(other), float(value)) for other, value in most_likely]
        rows_of_ids.append(own)
    return rows_of_ids


_MIN_LOGPROB: Final = -9999.0
"""Value in place of infinities and NaN, which JSON lacks."""


def _token(text_of: TokenText, token_id: int, logprob: float) -> dict[str, Any]:
    text = text_of([token_id])
    logprob = logprob if math.isfinite(logprob) else _MIN_LOGPROB
    try:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
    except UnicodeEncodeError:  # the bytes of the id are a part of a character
        raw = text.encode("utf-8", "surrogateescape")
    # OpenAI writes such a token in this way: the joined bytes of several tokens are the text.
    token = "".join(f"\\x{ord(each) - 0xDC00:02x}" if each >= "\udc80" and each <= "\udcff" else each for each in text)
    return {"token": token, "logprob": logprob, "bytes": list(raw)}
