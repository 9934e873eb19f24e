"""What a scripted engine says: replies, how they arrive, and the faults that may befall them."""

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
"""How ids are cut into deltas: so many each; sizes that are repeated, (1, 3) being 1, 3, 1, 3, ...; all in one; sizes
from 1 to 8 drawn by the seed; or None, which is what vLLM does: the first id at once, then 8 at a time, or single ids
where somebody acts on deltas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """When ids arrive, in ticks of the engine; a delta of several ids arrives with its last one."""

    first: int = 0
    """Ticks before the first id."""
    between: int = 0
    """Ticks from one id to the next; at 0 a turn arrives whole, in one tick."""
    jitter: int = 0
    """Up to so many further ticks come before the first id, drawn by the seed."""

    def __post_init__(self) -> None:
        for name in ("first", "between", "jitter"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise BadOption(f"Latency({name}={value!r}): give a whole number of ticks, 0 or more.")


class FaultKind(enum.StrEnum):
    """What can go wrong with a request."""

    ERROR = "error"
    """The stream ends with FinishReason.ERROR."""
    STALL = "stall"
    """Nothing more is sent, and the request stays open."""
    DEATH = "death"
    """The engine dies: every request in flight fails, and every later one."""
    REJECT = "reject"
    """This one request is refused."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault on demand; made by the class methods."""

    kind: FaultKind
    """The kind of the fault."""
    at: int = 0
    """The number of ids that are sent before the fault."""
    message: str = ""
    """The text of the error."""

    @classmethod
    def error(cls, at: int = 0, message: str = "a scripted error") -> Self:
        """The stream ends with an error after `at` ids."""
        return cls(FaultKind.ERROR, at, message)

    @classmethod
    def stall(cls, at: int = 0) -> Self:
        """Nothing comes after `at` ids."""
        return cls(FaultKind.STALL, at)

    @classmethod
    def death(cls, at: int = 0, message: str = "a scripted death") -> Self:
        """The engine dies when `at` ids of this reply have been sent."""
        return cls(FaultKind.DEATH, at, message)

    @classmethod
    def reject(cls, message: str = "a scripted refusal") -> Self:
        """The request is refused once it has a place."""
        return cls(FaultKind.REJECT, 0, message)


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model says in one turn."""

    text: str = ""
    """The text; the engine's tokenizer encodes it, so control tokens written in it become control ids."""
    calls: Sequence[ToolCall] = ()
    """Tool calls, written after the text in the form of the engine's template."""
    ids: Sequence[int] | None = None
    """The exact token ids instead of text and calls."""
    logprobs: Sequence[float] | None = None
    """A log-probability for each of `ids`, the stop id among them where it is; by default they follow from the seed."""
    top_logprobs: TopLogprobs | Sequence[Mapping[int, float]] | None = None
    """The likeliest ids in the place of each of `ids`, with their log-probabilities; by default they are made up.

    At least as many as `Sampling(logprobs=)` asks for.
    """
    finish: FinishReason | Literal["stop", "length", "repetition", "error"] = FinishReason.STOP
    """Why the turn ends.

    STOP appends the stop id where the ids do not end with one; any other reason ends the turn as it stands, LENGTH
    being a turn that was cut.
    """
    stop: int | None = None
    """The stop id; by default the model's own."""
    chunks: Chunks = None
    """How the ids are cut into deltas; None leaves it to the engine."""
    latency: Latency | None = None
    """When the ids arrive; None leaves it to the engine."""
    fault: Fault | None = None
    """What goes wrong; None for nothing."""

    def __post_init__(self) -> None:
        if self.ids is not None and (self.text or self.calls):
            raise BadOption("Reply(ids=) says everything: give either ids, or text and calls.")
        check_chunks(self.chunks)
        if not isinstance(self.latency, Latency | None):
            raise BadOption(f"latency={self.latency!r:.60}: give Latency(first=..., between=...), in ticks.")
        if not isinstance(self.fault, Fault | None):
            raise BadOption(f"fault={self.fault!r:.60}: give Fault.error(at=3), Fault.stall(), Fault.reject() or such.")


Answer: TypeAlias = str | ToolCall | Sequence[ToolCall] | Reply
"""What stands for a reply: a text, a call, several calls of one turn, or the reply in full."""


class ModelCall:
    """What a function that plays the model is told of one turn."""

    def __init__(self, request: GenerationRequest, turn: int, number: int, tokenizer: Tokenizer, seed: int) -> None:
        self.request = request
        """The request as the engine got it."""
        self.turn = turn
        """How many requests this conversation made before."""
        self.number = number
        """How many requests the engine admitted before, of all conversations."""
        self._tokenizer = tokenizer
        self._seed = seed

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Every id the model sees."""
        return self.request.prompt

    @cached_property
    def prompt(self) -> str:
        """The text of the prompt, control tokens included."""
        return self._tokenizer.decode(self.request.prompt)

    @property
    def episode(self) -> str:
        """The episode's id."""
        return self._names[0]

    @property
    def agent(self) -> str:
        """Who speaks; "main" unless it was named."""
        return self._names[1]

    @cached_property
    def rng(self) -> random.Random:
        """Random numbers of this turn: they follow from the engine's seed and the request's, or its prompt."""
        return random.Random(derive_seed("scripted", self._seed, self.key))

    @property
    def key(self) -> int:
        """What this turn's random numbers hang on: the request's seed, or a hash of its prompt where it has none."""
        request = self.request
        return request.seed if request.seed is not None else zlib.crc32(packed(request.prompt))

    @cached_property
    def _names(self) -> tuple[str, str]:
        parts = self.request.name.rsplit("/", 2)
        return (parts[0], parts[1]) if len(parts) == 3 else (self.request.name, "main")


Speaker: TypeAlias = Callable[[ModelCall], Answer | Awaitable[Answer]]
"""A function that plays the model, sync or async."""

Faults: TypeAlias = Mapping[int, Fault] | Callable[[ModelCall], Fault | None]
"""Faults by the number of the request, counted from 0 as they are admitted, or by a predicate."""


Scores: TypeAlias = Callable[[Sequence[int]], Sequence[float]] | None
"""A function of ids that returns a log-probability for each but the first; None to draw them."""


def call(name: str, /, **arguments: Any) -> ToolCall:
    """A tool call as a reply; the engine writes it in the form of its template."""
    return ToolCall("", name, arguments)


def as_reply(answer: Answer) -> Reply:
    """The reply that `answer` stands for.

    Raises:
        BadOption: it stands for none.
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
    raise BadOption(f"{answer!r:.80} is no reply: give a text, call(...), a list of them, or Reply(...).")


def packed(ids: Sequence[int]) -> array[int]:
    """`ids` as an array; they are copied only if they are not one already."""
    return ids if isinstance(ids, array) else array("i", ids)


def check_chunks(chunks: Chunks) -> None:
    """Refuse what cannot be cut.

    Raises:
        BadOption: a size below 1, or none at all.
    """
    if chunks is None or chunks in ("whole", "random"):
        return
    sizes: Any = (chunks,) if isinstance(chunks, int) else chunks
    if not isinstance(sizes, list | tuple) or not sizes or any(not isinstance(size, int) or size < 1 for size in sizes):
        raise BadOption(f"chunks={chunks!r}: give a size of at least 1, a tuple of such sizes, 'whole' or 'random'.")


def cut_points(length: int, chunks: Chunks, *, singly: bool = False, rng: random.Random | None = None) -> list[int]:
    """Where each of the deltas of `length` ids ends; random sizes are drawn by `rng`."""
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
