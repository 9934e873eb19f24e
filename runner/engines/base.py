"""The engine contract: token ids in, a stream of deltas out, and nothing left behind.

async with engine:                                   # start, stop
    async with engine.stream(request) as deltas:     # waits for a place; the request is gone on leaving the block
        async for delta in deltas: ...
    deltas.rest, deltas.finish                       # what was drained while leaving, also when an exception passed
"""

from __future__ import annotations

import enum
import math
import operator
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Self

from runner import checked
from runner.engines.controllable import Controllable
from runner.engines.gate import Session, affinity_beside
from runner.engines.proofs import WeightProof
from runner.engines.state import EngineState
from runner.errors import BadControl, BadOption
from runner.options import Constraint, Sampling
from runner.tokens.log import VersionSpan
from runner.tokens.template import ChatTemplate
from runner.tokens.tokenizer import Tokenizer
from runner.tokens.top_logprobs import TopLogprobs

__all__ = [
    "BaseEngine",
    "Delta",
    "DeltaStream",
    "Engine",
    "EngineStats",
    "Finish",
    "FinishReason",
    "GenerationRequest",
    "Session",
    "vocabulary_size",
    "width_of",
]


class FinishReason(enum.StrEnum):
    """Why a turn ended."""

    STOP = "stop"
    """A stop id or a stop string ended it; which one is in `stop`."""
    LENGTH = "length"
    """The turn has as many ids as its `max_tokens` allows."""
    CONTEXT = "context"
    """No room was left in the context."""
    ABORT = "abort"
    """The runner cut it: a limit fired, or it was cancelled."""
    REPETITION = "repetition"
    """The engine saw the model repeat itself."""
    ERROR = "error"
    """The engine failed."""
    CONTENT_FILTER = "content_filter"
    """The server of an API model withheld the rest of it, or all."""


@dataclass(frozen=True, slots=True)
class Finish:
    """How a stream ended."""

    reason: FinishReason
    """Why it ended. The engine says LENGTH for the context's end too; the caller tells the two apart by counting."""
    stop: int | str | None = None
    """The stop id or stop string that ended it, or the text of an error."""
    versions: tuple[VersionSpan, ...] = ()
    """The weight versions of the stream's ids, as spans that count from its first sampled id."""
    cached_tokens: int | None = None
    """Ids of the prompt that the engine's prefix cache held; None where the engine does not say."""


@dataclass(frozen=True, slots=True)
class Delta:
    """One or more ids as they were streamed; zero only where `finish` is set."""

    token_ids: Sequence[int]
    """The ids in the order in which they were sampled."""
    logprobs: Sequence[float] | None = None
    """The log-probability of each id in nats; None where the engine gives none."""
    finish: Finish | None = None
    """How the stream ended; set on its last delta only."""
    top: TopLogprobs | None = None
    """The likeliest ids in the place of each, as many as `Sampling.logprobs`; None where none were asked for."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Between processes they go by thousands, and what dataclasses do by themselves takes eight times as long.
        return Delta, (self.token_ids, self.logprobs, self.finish, self.top)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One turn to be sampled."""

    name: str
    """Names the turn in errors and logs, as "episode/agent/turn"; a scripted engine tells agents apart by it."""
    prompt: Sequence[int]
    """Every id the model is to see. The caller does not copy it: an engine that keeps it must."""
    sampling: Sampling
    """How to sample, every field set. Its `stop` strings are not the engine's business."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end the turn, those of the model left out where `sampling` ignores them; the one that did is the last
    id of the stream."""
    seed: int | None = None
    """The seed of this turn's random numbers; None leaves it to the engine."""
    session: Session | None = None
    """The conversation that the turn belongs to; None for a single request, which counts as first."""
    constraint: Constraint | None = None
    """What may be sampled; None for anything."""
    scores_prompt: bool = False
    """Ask for the log-probability of each id of the prompt as well; it is in the stream's `prompt_logprobs`."""
    acts_on_deltas: bool = False
    """Whether somebody acts on single deltas, so that they have to come one id at a time."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What a test asks besides, such as {"force": ids}."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine is doing now, by its scheduler's own count after its last step, all its engine cores together."""

    open: int
    """Requests that the engine has and has not finished."""
    running: int = 0
    """Open requests that are being sampled."""
    queued: int = 0
    """Open requests that wait inside the engine: for its cache, for a grammar, or while it is paused."""
    waiting: int = 0
    """Requests at our gate, which are not in the engine yet."""
    first_waiting: int = 0
    """Requests at our gate that are the first of their episode."""
    live_sessions: int = 0
    """Conversations that hold room in the cache."""
    ranks: tuple[int, ...] = ()
    """Requests inside each data-parallel rank of the engine; empty for an engine that has none of its own."""
    kv_usage: float | None = None
    """The fraction of the KV cache in use, of the fullest engine core; None where the engine does not say."""
    prefix_queries: int = 0
    """Ids of prompts that were looked up in the prefix cache since the engine started."""
    prefix_hits: int = 0
    """Ids of prompts that the prefix cache held when they were looked up."""
    sampled_tokens: int = 0
    """Ids that were sampled since the engine started, and read."""
    prompt_tokens: int = 0
    """Ids of prompts that were computed since the engine started, those in the prefix cache left out; 0 for an engine
    that does not say."""
    steps: int = 0
    """The steps that computed something since the engine started, all its engine cores together; 0 for an engine that
    does not say."""
    places: int | None = None
    """Requests that are let in at once just now; None for an engine whose places do not change while it runs."""
    throttled: int = 0
    """How often a server said that it was asked too much."""
    retried: int = 0
    """How many requests were sent to a server again."""
    tokens_per_second: float = 0.0
    """Ids sampled a second, over the last ten seconds; 0 where nothing was, or nobody measures."""
    weight_version: str = ""
    """The version of the weights that sample now."""
    state: EngineState = EngineState.RUNNING
    """Whether the engine is running, paused, updating or asleep."""

    @property
    def prefix_hit_rate(self) -> float | None:
        """Fraction of the prompts' ids that the prefix cache held; None before the first prompt."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else None


class DeltaStream(AbstractAsyncContextManager["DeltaStream", None]):
    """The deltas of one request; use it as `async with` around `async for`.

    Entering waits for a place in the engine and sends the request. Leaving, in whatever way, ends the request
    within a bounded shield and keeps what had been sampled, in `rest`; a stream that was cut has the finish ABORT.

    Raises (entering or iterating):
        RequestRejected: the engine refuses this request.
        EngineDead: the engine is gone.
    """

    rest: list[Delta]
    """The deltas that were not read when the block was left."""
    finish: Finish | None
    """How the stream ended; None while it goes on."""
    prompt_logprobs: Sequence[float] | None = None
    """The log-probability of each id of the prompt but its first, in nats and at temperature 1; None where none were
    asked for, and before the first delta."""

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> Delta: ...


class BaseEngine(Controllable, AbstractAsyncContextManager["BaseEngine", None]):
    """What a run asks of any engine, whether it takes token ids (`Engine`) or messages (`MessageEngine`).

    What it has beside `running` is set once it is entered.
    """

    context: int
    """The most ids a prompt and what is sampled on it may have together."""
    places: int
    """How many requests run at once; further ones wait at the gate."""
    running: bool = False
    """Whether the engine was entered and not left."""
    notes: Sequence[str] = ()
    """Lines for people about how the engine was started; set once it is entered."""

    @property
    def start_phase(self) -> str:
        """The present phase of the engine's start, for people; empty where it is not known, and at other times."""
        return ""

    def go_on_with(self, described: Mapping[str, Any]) -> None:  # most engines choose nothing by themselves
        """Choose as in a run that is resumed, before the engine is entered.

        Args:
            described: what `describe` said of the engine when that run began.
        """

    def session(self, *, late: bool = False, beside: Session | None = None) -> Session:
        """A handle for one conversation; `close_session` gives its room back.

        Args:
            late: whether its first request goes before those of episodes that have not begun.
            beside: another one of the same episode: where the engine has several data-parallel ranks, both are on one.
        """
        return Session(late=late, affinity=affinity_beside(beside))

    def close_session(self, session: Session) -> None:
        """Give the session's room back; twice is allowed."""
        if self.runtime is not None:
            self.runtime.gate.close(session)
        session.closed = True

    def check_sampling(self, sampling: Sampling) -> None:  # one that does all of it has nothing to say
        """Refuse what the engine could not be asked for, before anything is played.

        Args:
            sampling: how a turn is to be sampled, every field set.

        Raises:
            BadOption: names the field.
        """

    @abstractmethod
    def stats(self) -> EngineStats:
        """What the engine is doing now; cheap."""

    def is_alive(self) -> bool:
        """Whether it can answer, as far as is known without asking it; one that is paused or asleep can."""
        return self.running

    @abstractmethod
    async def health(self) -> None:
        """Return when the engine can answer.

        Raises:
            EngineDead: it cannot, with the cause.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What a run's header keeps of the engine, as JSON: kind, model, versions, arguments, who stamps versions."""


class Engine(BaseEngine):
    """Turns token ids into a stream of deltas. What it has beside `running` is set once it is entered."""

    tokenizer: Tokenizer
    """The tokenizer of the engine's model, an instance of the runner's own."""
    template: ChatTemplate
    """The chat template that belongs to the model."""
    stop_ids: tuple[int, ...]
    """The ids that end a turn of this model: its EOS and those of its generation_config."""

    @abstractmethod
    def stream(self, request: GenerationRequest) -> DeltaStream:
        """The deltas of one request; nothing happens before the block is entered."""

    def check_constraint(self, constraint: Constraint) -> None:  # one that enforces grammars has nothing to say
        """Refuse what may be sampled, where the engine could not enforce it, before anything is played.

        Raises:
            BadOption: says what to do.
        """

    async def score(
        self,
        ids: Sequence[int],
        *,
        start: int = 1,
        sampling: Sampling | None = None,
        constraint: Constraint | None = None,
    ) -> list[float]:
        """Return the log-probability of each id from `start` on, given all ids before it, in nats.

        Without `sampling` and `constraint` these are the model's own, at temperature 1, computed in one pass. With one
        of them they are those that sampling the ids would have reported: temperature, penalties, `top_p` and the
        grammar included. That takes a step of the engine for each id. An id that could not have been sampled has minus
        infinity, and under a grammar so has every id after it.

        Requests wait for a place as turns do. Score many sequences at once, in a task group.

        Args:
            ids: the sequence, shape [n]; shorter than the engine's context.
            start: the first id that is scored, from 1 to n - 1.
            sampling: how the ids would be sampled; fields that are not given have their defaults. `adapter` alone keeps
                the single pass. What ends a turn is ignored.
            constraint: the grammar that they would be sampled under.

        Returns:
            n - start values.

        Raises:
            BadOption: ids, `start` or the sampling cannot be.
            BadControl: this engine cannot score, or not in this way.
            RequestRejected: the sequence does not fit the context.
        """
        prompt = checked_ids(ids, start, vocabulary_size(self))
        given = {} if sampling is None else sampling.given()
        as_sampled = constraint is not None or not given.keys() <= {"adapter"}
        self.check_scoring(as_sampled=as_sampled)
        how = Sampling(**given).over(Sampling.defaults())
        if as_sampled:
            return await self._score_as_sampled(prompt, start, how, constraint)
        one = replace(how, max_tokens=1)
        request = GenerationRequest(name="score", prompt=prompt, sampling=one, scores_prompt=True)
        return list((await self._score_prompt(request))[start - 1 :])

    async def check_proof(self, proof: WeightProof) -> None:
        """Refuse a proof that the engine could not score."""
        self.check_scoring(as_sampled=False)
        proof.check(vocabulary=vocabulary_size(self), context=self.context)

    async def _score_prompt(self, request: GenerationRequest) -> Sequence[float]:
        async with self.stream(request) as deltas:
            async for _ in deltas:
                pass
        assert deltas.prompt_logprobs is not None
        return deltas.prompt_logprobs

    async def _score_as_sampled(
        self, ids: list[int], start: int, sampling: Sampling, constraint: Constraint | None
    ) -> list[float]:
        for name in ("schema", "regex", "choice"):
            if getattr(sampling, name) is not None:
                raise BadOption(f"score(sampling=Sampling({name}=...)): give it as constraint=, as Turn.constraint is.")
        scored = ids[start:]
        how = replace(sampling, max_tokens=len(scored), min_tokens=0, stop=(), stop_ids=(), ignore_eos=True)
        request = GenerationRequest(
            name="score", prompt=ids[:start], sampling=how, constraint=constraint, extra={"score": scored}
        )
        values: list[float] = []
        async with self.stream(request) as deltas:
            async for delta in deltas:
                values += delta.logprobs or ()
        return values + [-math.inf] * (len(scored) - len(values))

    def check_scoring(self, *, as_sampled: bool) -> None:
        """Refuse what `score` cannot do on this engine.

        Args:
            as_sampled: whether a sampling or a grammar is asked for.

        Raises:
            BadControl: says which engines can.
        """
        raise BadControl(f"score(): {type(self).__name__} has no log-probabilities of given ids; a VllmEngine has.")


def checked_ids(ids: Sequence[int], start: int, vocabulary: int) -> list[int]:
    """The ids as a list of plain integers.

    Raises:
        BadOption: fewer than two, one that the vocabulary does not have, or a `start` outside of them.
    """
    try:
        plain = [operator.index(token_id) for token_id in ids]
    except TypeError as error:
        raise BadOption(f"score(ids=...): {error}; give token ids, whole numbers.") from None
    if len(plain) < 2:
        raise BadOption(f"score(ids=...): {len(plain)} ids; give two or more, since the first has nothing before it.")
    wrong = next((each for each in plain if not 0 <= each < vocabulary), None)
    if wrong is not None:
        raise BadOption(f"score(ids=...): there is no id {wrong}; the model's ids are 0 to {vocabulary - 1}.")
    if not checked.is_whole(start, least=1) or start >= len(plain):
        raise BadOption(f"score(start={start!r}): give 1 to {len(plain) - 1}, the places of ids that have one before.")
    return plain


def width_of(engine: BaseEngine) -> int:
    """Twice as many as the engine takes: while some wait, such as for tools, others are sampled."""
    return 2 * engine.places


def vocabulary_size(engine: Engine) -> int:
    """Ids that the engine's model knows: those of its tokenizer and the padding rows behind them."""
    return max(engine.tokenizer.size, getattr(engine, "vocabulary", 0))
