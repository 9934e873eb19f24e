"""Scripts of a scripted engine: replies, their timing, and faults."""

from __future__ import annotations

import enum
import random
import zlib
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self, TypeAlias

from runner.engines.base import FinishReason, GenerationRequest
from runner.errors import BadOption
from runner.messages import ToolCall
from runner.seeds import derive_seed
from runner.tokens.side_data import SamplingMasks
from runner.tokens.tokenizer import Tokenizer
from runner.tokens.top_logprobs import TopLogprobs

__all__ = [
    "Answer",
    "Chunks",
    "Fault",
    "FaultKind",
    "Faults",
    "Latency",
    "ModelCall",
    "Reply",
    "Scores",
    "Speaker",
    "as_reply",
    "call",
    "cut_points",
]

Chunks: TypeAlias = int | Sequence[int] | Literal["whole", "random"] | None
"""Sizes of deltas: a fixed size; repeated sizes, (1, 3) for 1, 3, 1, 3, ...; "whole" for one delta; "random" for sizes
from 1 to 8 drawn by the seed; None for sizes as in vLLM: the first id at once, then 8 at a time, or single ids if the
caller acts on deltas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Times of ids, in ticks of the engine; a delta of several ids arrives with its last id.

    Raises:
        BadOption: a value is not a whole number, or is below 0.
    """

    first: int = 0
    """Ticks before the first id."""
    between: int = 0
    """Ticks from one id to the next; at 0 a turn arrives whole, in one tick."""
    jitter: int = 0
    """Maximum number of further ticks before the first id, drawn by the seed."""

    def __post_init__(self) -> None:
        for name in ("first", "between", "jitter"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise BadOption(f"Latency({name}={value!r}): give a whole number of ticks, 0 or more.")


class FaultKind(enum.StrEnum):
    """Kind of a fault."""

    ERROR = "error"
    """The stream ends with FinishReason.ERROR."""
    STALL = "stall"
    """Nothing more is sent, and the request stays open."""
    DEATH = "death"
    """The engine dies: every request in flight fails, and every later one."""
    REJECT = "reject"
    """Only this request is refused."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Scripted fault; made by the class methods."""

    kind: FaultKind
    """Kind of the fault."""
    at: int = 0
    """Number of sampled ids before the fault."""
    message: str = ""
    """Text of the error."""

    @classmethod
    def error(cls, at: int = 0, message: str = "a scripted error") -> Self:
        """Return a fault that ends the stream with an error after `at` ids."""
        return cls(FaultKind.ERROR, at, message)

    @classmethod
    def stall(cls, at: int = 0) -> Self:
        """Return a fault that sends nothing more after `at` ids; the request stays open."""
        return cls(FaultKind.STALL, at)

    @classmethod
    def death(cls, at: int = 0, message: str = "a scripted death") -> Self:
        """Return a fault that ends the engine after `at` ids of this reply."""
        return cls(FaultKind.DEATH, at, message)

    @classmethod
    def reject(cls, message: str = "a scripted refusal") -> Self:
        """Return a fault that refuses the request after the gate admitted it."""
        return cls(FaultKind.REJECT, 0, message)


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply of the model in one turn.

    Raises:
        BadOption: `ids` are given beside text or calls, or the chunks, the latency or the fault are invalid.
    """

    text: str = ""
    """Text; the engine's tokenizer encodes it, so control tokens in it become control ids."""
    calls: Sequence[ToolCall] = ()
    """Tool calls, written after the text in the form of the engine's template."""
    ids: Sequence[int] | None = None
    """Exact token ids instead of text and calls."""
    logprobs: Sequence[float] | None = None
    """Log-probability of each of `ids`, including a stop id among them; by default drawn by the seed."""
    top_logprobs: TopLogprobs | Sequence[Mapping[int, float]] | None = None
    """Most likely ids at the position of each of `ids`, with their log-probabilities; synthetic by default.

    Each position needs at least as many ids as `Sampling(logprobs=)` requests.
    """
    sampling_masks: SamplingMasks | Sequence[Sequence[int]] | None = None
    """Ids that could be sampled in the place of each of `ids`, for an engine with `sampling_masks=True`; synthetic by
    default."""
    finish: FinishReason | Literal["stop", "length", "repetition", "error"] = FinishReason.STOP
    """Reason for the end of the turn.

    STOP appends the stop id if the ids do not end with one; other reasons append nothing. LENGTH is a turn that was
    cut.
    """
    stop: int | None = None
    """Stop id; by default the model's own."""
    chunks: Chunks = None
    """Sizes of deltas; None for the engine's setting."""
    latency: Latency | None = None
    """Times of ids; None for the engine's setting."""
    fault: Fault | None = None
    """Fault; None without a fault."""

    def __post_init__(self) -> None:
        if self.ids is not None and (self.text or self.calls):
            raise BadOption("Reply(ids=) is the whole turn: give either ids, or text and calls.")
        check_chunks(self.chunks)
        if not isinstance(self.latency, Latency | None):
            raise BadOption(f"latency={self.latency!r:.60}: give Latency(first=..., between=...), in ticks.")
        if not isinstance(self.fault, Fault | None):
            raise BadOption(f"fault={self.fault!r:.60}: give Fault.error(at=3), .stall(), .death() or .reject().")


Answer: TypeAlias = str | ToolCall | Sequence[ToolCall] | Reply
"""Short form of a reply: a string, a call, several calls of one turn, or a `Reply`."""


class ModelCall:
    """Argument of a function that plays the model: one turn."""

    def __init__(self, request: GenerationRequest, turn: int, number: int, tokenizer: Tokenizer, seed: int) -> None:
        self.request = request
        """Request of the engine."""
        self.turn = turn
        """Number of earlier requests of this conversation."""
        self.number = number
        """Number of earlier requests of the engine, of all conversations."""
        self._tokenizer = tokenizer
        self._seed = seed

    @property
    def prompt_ids(self) -> Sequence[int]:
        """All ids of the prompt."""
        return self.request.prompt

    @cached_property
    def prompt(self) -> str:
        """Text of the prompt, with control tokens."""
        return self._tokenizer.decode(self.request.prompt)

    @property
    def episode(self) -> str:
        """Id of the episode."""
        return self._names[0]

    @property
    def agent(self) -> str:
        """Name of the agent; "main" by default."""
        return self._names[1]

    @cached_property
    def rng(self) -> random.Random:
        """Random numbers of this turn, seeded by the engine's seed and `key`."""
        return random.Random(derive_seed("scripted", self._seed, self.key))

    @property
    def key(self) -> int:
        """Seed of this turn: the request's seed, or a hash of the prompt if the request has no seed."""
        request = self.request
        return request.seed if request.seed is not None else zlib.crc32(packed(request.prompt))

    @cached_property
    def _names(self) -> tuple[str, str]:
        parts = self.request.name.rsplit("/", 2)
        return (parts[0], parts[1]) if len(parts) == 3 else (self.request.name, "main")


Speaker: TypeAlias = Callable[[ModelCall], Answer | Awaitable[Answer]]
"""Function that plays the model, sync or async."""

Faults: TypeAlias = Mapping[int, Fault] | Callable[[ModelCall], Fault | None]
"""Faults by request number, counted from 0 in the order of admission, or by a predicate."""


Scores: TypeAlias = Callable[[Sequence[int]], Sequence[float]] | None
"""Function of ids that returns a log-probability for each but the first; None to draw them."""


def call(name: str, /, **arguments: Any) -> ToolCall:
    """Return a tool call as a reply; the engine writes it in the form of its template."""
    return ToolCall("", name, arguments)


def as_reply(answer: Answer) -> Reply:
    """Convert a short form to a reply.

    Raises:
        BadOption: the value is not a form of a reply.
    """
    match answer:
        case Reply():
            return answer
        case str():
            return Reply(answer)
        case ToolCall():
            return Reply(calls=(answer,))
        case [ToolCall(), *_] if all(isinstance(item, ToolCall) for item in answer):
            return Reply(calls=tuple(answer))
    raise BadOption(f"{answer!r:.80} is not a reply: give a string, call(...), a list of them, or Reply(...).")


def packed(ids: Sequence[int]) -> array[int]:
    """Return `ids` as an array; an array is returned without a copy."""
    return ids if isinstance(ids, array) else array("i", ids)


def check_chunks(chunks: Chunks) -> None:
    """Check a value for the sizes of deltas.

    Raises:
        BadOption: the value is not a form of `Chunks`.
    """
    if chunks is None or chunks in ("whole", "random"):
        return
    sizes: Any = (chunks,) if isinstance(chunks, int) else chunks
    if not isinstance(sizes, list | tuple) or not sizes or any(not isinstance(size, int) or size < 1 for size in sizes):
        raise BadOption(f"chunks={chunks!r}: give a size of at least 1, a tuple of such sizes, 'whole' or 'random'.")


def cut_points(length: int, chunks: Chunks, *, singly: bool = False, rng: random.Random | None = None) -> list[int]:
    """Return the end of each delta of `length` ids; `rng` draws random sizes."""
    if chunks is None:
        cuts = list(range(1, length, 1 if singly else 8))
    elif chunks == "whole":
        cuts = []
    elif isinstance(chunks, int):
        cuts = list(range(chunks, length, chunks))
    elif chunks == "random":
        cuts = _mixed(length, (rng or random.Random(0)).choices(range(1, 9), k=length or 1))
    else:
        cuts = _mixed(length, chunks)
    if length:
        cuts.append(length)
    return cuts


def _mixed(length: int, sizes: Sequence[Any]) -> list[int]:
    cuts: list[int] = []
    end = 0
    while (end := end + sizes[len(cuts) % len(sizes)]) < length:
        cuts.append(end)
    return cuts
