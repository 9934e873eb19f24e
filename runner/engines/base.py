"""Engine contract: token ids in, a stream of deltas out, and no request left running.

async with engine:                                   # start, stop
    async with engine.stream(request) as deltas:     # waits for a place; leaving the block ends the request
        async for delta in deltas: ...
    deltas.rest, deltas.finish                       # unread deltas, and the finish; also set after an exception
"""

from __future__ import annotations

import enum
import math
import operator
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypeVar

from runner import checked
from runner.engines.controllable import Controllable
from runner.engines.gate import Session, affinity_beside
from runner.engines.proofs import WeightProof
from runner.engines.runtime import ModelRuntime
from runner.engines.state import NOT_RUNNING, EngineState
from runner.errors import BadControl, BadOption, EngineDead, EngineError
from runner.options import Constraint, Sampling
from runner.tokens.log import VersionSpan
from runner.tokens.side_data import SideData
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
    "ModelEngine",
    "Session",
    "vocabulary_size",
    "width_of",
]


class FinishReason(enum.StrEnum):
    """Reason for the end of a turn."""

    STOP = "stop"
    """A stop id or stop string was sampled; it is in `Finish.stop`."""
    LENGTH = "length"
    """The turn has as many ids as its `max_tokens` allows."""
    CONTEXT = "context"
    """No room was left in the context."""
    ABORT = "abort"
    """The runner ended the turn: a limit was reached, or the turn was cancelled."""
    REPETITION = "repetition"
    """The engine detected that the model repeats itself."""
    ERROR = "error"
    """The engine failed."""
    CONTENT_FILTER = "content_filter"
    """The API server withheld the rest of the turn, or all of it."""


@dataclass(frozen=True, slots=True)
class Finish:
    """End of a stream: the reason, and the weight versions of the stream's ids."""

    reason: FinishReason
    """Reason for the end. The engine reports LENGTH also at the end of the context; the caller counts ids to
    distinguish LENGTH from CONTEXT."""
    stop: int | str | None = None
    """Stop id or stop string that ended the stream, or the text of an error; otherwise None."""
    versions: tuple[VersionSpan, ...] = ()
    """The weight versions of the stream's ids, as spans whose indices count from the first sampled id."""
    cached_tokens: int | None = None
    """Number of prompt ids that the engine's prefix cache held; None if unknown."""


@dataclass(slots=True)  # not frozen: creating a frozen one takes three times as long, and a turn has many deltas
class Delta:
    """Newly streamed ids of a turn, with their data. There is at least one id, unless `finish` is set."""

    token_ids: Sequence[int]
    """The ids in the order in which they were sampled."""
    logprobs: Sequence[float] | None = None
    """Log-probability of each id in nats; None for an engine without log-probabilities."""
    finish: Finish | None = None
    """Finish of the stream; set on its last delta only."""
    top: TopLogprobs | None = None
    """Most likely ids at each position, as many as `Sampling.logprobs`; None if none are requested."""
    side: SideData | None = None
    """Sampling masks and routed experts; None unless the engine was configured to return them."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Thousands of deltas pass between processes, and the dataclass default takes eight times as long.
        return Delta, (self.token_ids, self.logprobs, self.finish, self.top, self.side)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One turn to be sampled."""

    name: str
    """Name of the turn for errors and logs, "episode/agent/turn"; a scripted engine reads the agent from it."""
    prompt: Sequence[int]
    """All ids of the prompt. The caller may change the list later: an engine that keeps it must copy it."""
    sampling: Sampling
    """Sampling parameters; every field is set. The engine ignores `stop` strings, which the caller handles."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end the turn. The model's own stop ids are left out if `sampling` ignores them. A sampled stop id is the
    last id of the stream.
    """
    seed: int | None = None
    """Seed of this turn's random numbers; None leaves it to the engine."""
    session: Session | None = None
    """Conversation of the turn; None for a single request, which counts as a first turn."""
    constraint: Constraint | None = None
    """Grammar for the sampled ids; None for no constraint."""
    scores_prompt: bool = False
    """True if the stream also has the log-probability of each prompt id but the first, in `prompt_logprobs`."""
    acts_on_deltas: bool = False
    """True if the caller acts on single deltas, which then have one id each."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments, which few engines support: {"score": ids} for `score`, or {"force": ids} in tests."""

    @property
    def all_stop_ids(self) -> tuple[int, ...]:
        """Ids that end the turn: `stop_ids` and the stop ids of `sampling`."""
        return tuple(dict.fromkeys((*self.stop_ids, *self.sampling.stop_ids)))

    @property
    def samples_raw_distribution(self) -> bool:
        """True if the turn's log-probabilities are the model's own: temperature 1 or 0 (greedy), and no other change.

        Other changes are penalties, truncation, masks and grammars.
        """
        return self.constraint is None and self.sampling.temperature in (0, 1) and not self.sampling.changes()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts of an engine, over all its engine cores, after the scheduler's last step."""

    open: int
    """Unfinished requests in the engine."""
    running: int = 0
    """Open requests that are being sampled."""
    queued: int = 0
    """Open requests that wait inside the engine: for room in its cache, for a grammar, or while it is paused."""
    waiting: int = 0
    """Requests at the runner's gate, not yet in the engine."""
    first_waiting: int = 0
    """Requests at the gate that are the first of their episode."""
    live_sessions: int = 0
    """Conversations with reserved room in the cache."""
    ranks: tuple[int, ...] = ()
    """Requests in each data-parallel rank; empty for an engine without ranks."""
    kv_usage: float | None = None
    """Used fraction of the KV cache in the engine core whose cache is the fullest; None if unknown."""
    prefix_queries: int = 0
    """Prompt ids that were looked up in the prefix cache since the engine started."""
    prefix_hits: int = 0
    """Prompt ids that the prefix cache held since the engine started."""
    sampled_tokens: int = 0
    """Sampled ids that were read since the engine started."""
    prompt_tokens: int = 0
    """Prompt ids that were computed since the engine started, without cached ones; 0 if unknown."""
    steps: int = 0
    """Number of steps that computed ids since the engine started, over all engine cores; 0 if unknown."""
    places: int | None = None
    """Current limit of concurrent requests; None for a fixed number of places."""
    throttled: int = 0
    """Number of rate-limit responses from the server."""
    retried: int = 0
    """Number of retried requests."""
    tokens_per_second: float = 0.0
    """Sampled ids per second over the last ten seconds; 0 if none were sampled or the engine does not measure it."""
    weight_version: str = ""
    """Current weight version."""
    state: EngineState = EngineState.RUNNING
    """State of the engine: running, paused, updating or asleep."""

    @property
    def prefix_hit_rate(self) -> float | None:
        """Fraction of prompt ids that the prefix cache held; None before the first prompt."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else None


class DeltaStream(AbstractAsyncContextManager["DeltaStream", None]):
    """Deltas of one request; use it as `async with` around `async for`.

    Entering waits for a place in the engine and sends the request. Leaving always ends the request, within a time limit
    and also in a cancelled task. Unread deltas are then in `rest`; a stream that had not ended has the finish ABORT.

    Raises (entering or iterating):
        RequestRejected: the engine refuses this request.
        EngineDead: the engine is gone.
    """

    rest: list[Delta]
    """Deltas that were unread when the block was left."""
    finish: Finish | None
    """Finish of the stream; None before its end."""
    prompt_logprobs: Sequence[float] | None = None
    """Log-probability of each prompt id but the first, in nats at temperature 1; None before the first delta, or if the
    request has `scores_prompt=False`."""

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> Delta: ...


class BaseEngine(Controllable, AbstractAsyncContextManager["BaseEngine", None]):
    """Base of engines for token ids (`Engine`) and for messages (`MessageEngine`).

    Entering sets `context` and `places`, unless the constructor set them.
    """

    context: int
    """Maximum number of ids of prompt and turn together."""
    places: int
    """Maximum number of concurrent requests; further ones wait at the gate."""
    running: bool = False
    """True while the engine is entered."""
    notes: Sequence[str] = ()
    """Lines for people about the engine's start; set when the engine is entered."""

    @property
    def start_phase(self) -> str:
        """Current phase of the engine's start, for people; "" if the phase is unknown or the engine is not starting."""
        return ""

    def restore_choices(self, described: Mapping[str, Any]) -> None:  # most engines have nothing to restore
        """Restore the settings that the engine chose by itself at the first start of a run.

        A resumed run calls this before it enters the engine.

        Args:
            described: result of `describe` at the first start.
        """

    def session(self, *, late: bool = False, beside: Session | None = None) -> Session:
        """Create a handle for one conversation; `close_session` frees its room in the cache.

        Args:
            late: True if the conversation's first request is admitted before the first requests of new episodes.
            beside: another session of the same episode; both then use the same data-parallel rank.
        """
        return Session(late=late, affinity=affinity_beside(beside))

    def close_session(self, session: Session) -> None:
        """Free the room in the cache that the session reserves; idempotent."""
        if self.runtime is not None:
            self.runtime.gate.close(session)
        session.closed = True

    def check_sampling(self, sampling: Sampling) -> None:  # default: every field is supported
        """Check that the engine supports a sampling, before an episode starts.

        Args:
            sampling: sampling parameters of a turn, every field set.

        Raises:
            BadOption: a field is not supported; the message names it.
        """

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return the current counts. The call is cheap."""

    def is_alive(self) -> bool:
        """Return True if the engine can answer, as far as is known without a request; also if it sleeps."""
        return self.running

    def _require_not_entered(self) -> None:
        if self.running:
            raise RuntimeError("this engine is already running: enter it once, and share it")

    health_interval: float = 1.0
    """Seconds between two calls of `health` while a run uses the engine."""

    @abstractmethod
    async def health(self) -> None:
        """Return when the engine can answer.

        Raises:
            EngineDead: the engine cannot answer; the message has the cause.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the engine's header entry as JSON: kind, model, versions, arguments, source of weight versions."""


class Engine(BaseEngine):
    """Engine that takes token ids and streams deltas. Entering sets `tokenizer`, `template` and `stop_ids` if unset."""

    tokenizer: Tokenizer
    """Tokenizer of the engine's model, an instance that only the runner uses."""
    template: ChatTemplate
    """Chat template of the model."""
    stop_ids: tuple[int, ...]
    """Ids that end a turn of this model: its EOS, and the EOS ids of its generation_config."""

    @abstractmethod
    def stream(self, request: GenerationRequest) -> DeltaStream:
        """Return the deltas of one request; nothing happens before the block is entered."""

    def check_constraint(self, constraint: Constraint) -> None:  # default: grammars are enforced
        """Check that the engine can enforce a constraint, before an episode starts.

        Raises:
            BadOption: the engine cannot enforce the constraint.
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

        Without `sampling` and `constraint`, the values are the model's own log-probabilities at temperature 1, computed
        in one pass. With `sampling` or `constraint`, the values are those that sampling the ids would have reported,
        with temperature, penalties, `top_p` and the grammar; this takes one engine step per id. An id that cannot be
        sampled has the value minus infinity; under a grammar, all later ids have this value too.

        Requests wait for a place like turns. Score many sequences at once, in a task group.

        Args:
            ids: the sequence, shape [n]; shorter than the engine's context.
            start: position of the first id that is scored, from 1 to n - 1.
            sampling: sampling parameters; unset fields have their defaults. With `adapter` alone, one pass
                still suffices. Fields that end a turn are ignored.
            constraint: the grammar of the sampling.

        Returns:
            n - start values.

        Raises:
            BadOption: ids, `start` or the sampling are invalid.
            BadControl: this engine cannot compute these log-probabilities.
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

    async def check_proof(self, proof: WeightProof, *, measures: bool = False) -> None:
        self.check_scoring(as_sampled=False)
        proof.check(vocabulary=vocabulary_size(self), context=self.context)
        if self.runtime is not None and not measures:
            self.runtime.proofs.require_tolerance(proof)

    async def _score_prompt(self, request: GenerationRequest) -> Sequence[float]:
        deltas, _ = await self._streamed(request)
        assert deltas.prompt_logprobs is not None
        return deltas.prompt_logprobs

    async def _streamed(self, request: GenerationRequest) -> tuple[DeltaStream, list[float]]:
        """Stream a request to its end. Repeat the request if a call of the trainer cuts it.

        Returns:
            The ended stream, and the log-probability of each sampled id.

        Raises:
            EngineError: the request was aborted, but not by a call of the trainer.
        """
        while True:
            cuts, values = self.cuts, list[float]()
            async with self.stream(request) as deltas:
                async for delta in deltas:
                    values += delta.logprobs or ()
            if deltas.finish is None or deltas.finish.reason is not FinishReason.ABORT:
                return deltas, values
            if self.cuts == cuts:  # a request that ends without a new cut could be repeated forever
                raise EngineError(f"{request.name}: the engine ended the request by itself: see the log of the engine")

    async def _score_as_sampled(
        self, ids: list[int], start: int, sampling: Sampling, constraint: Constraint | None
    ) -> list[float]:
        for name in ("schema", "regex", "choice"):
            if getattr(sampling, name) is not None:
                raise BadOption(
                    f"score(sampling=Sampling({name}=...)): give the grammar as constraint=Constraint(...)."
                )
        scored = ids[start:]
        how = replace(sampling, max_tokens=len(scored), min_tokens=0, stop=(), stop_ids=(), ignore_eos=True)
        request = GenerationRequest(
            name="score", prompt=ids[:start], sampling=how, constraint=constraint, extra={"score": scored}
        )
        _, values = await self._streamed(request)
        return values + [-math.inf] * (len(scored) - len(values))

    def check_scoring(self, *, as_sampled: bool) -> None:
        """Check that this engine supports a call of `score`.

        Args:
            as_sampled: True if the scores depend on a sampling or a grammar.

        Raises:
            BadControl: this engine does not support the call.
        """
        raise BadControl(f"score(): {type(self).__name__} has no log-probabilities of given ids; a VllmEngine has.")


RuntimeT = TypeVar("RuntimeT", bound=ModelRuntime[Any])


class ModelEngine(Engine, Generic[RuntimeT]):
    """Engine with one model. Its runtime counts the requests and checks whether the model can answer."""

    runtime: RuntimeT | None

    @property
    def entered_runtime(self) -> RuntimeT:
        """Runtime of the entered engine; internal.

        Raises:
            EngineDead: the engine is not running.
        """
        if self.runtime is None:
            raise EngineDead(NOT_RUNNING)
        return self.runtime

    def stats(self) -> EngineStats:
        runtime = self.entered_runtime
        return EngineStats(
            open=runtime.open_requests,
            running=runtime.open_requests,
            waiting=runtime.gate.waiting,
            first_waiting=runtime.gate.first_waiting,
            live_sessions=runtime.gate.live,
            sampled_tokens=runtime.sampled,
            weight_version=self.weight_version,
            state=self.state,
        )

    def is_alive(self) -> bool:
        """Return whether the engine can answer, as far as is known without a request."""
        return self.running and self.entered_runtime.is_alive()

    async def health(self) -> None:
        """Check that the engine can answer, as far as is known without a request.

        Raises:
            EngineDead: the engine cannot answer; the message has the cause.
        """
        self.entered_runtime.require_alive()


def checked_ids(ids: Sequence[int], start: int, vocabulary: int) -> list[int]:
    """Return the ids as a list of plain integers.

    Raises:
        BadOption: there are fewer than two ids, an id is not a whole number or not in the vocabulary, or `start` is
            out of range.
    """
    try:
        plain = [operator.index(token_id) for token_id in ids]
    except TypeError as error:
        raise BadOption(f"score(ids=...): {error}; give token ids, whole numbers.") from None
    if len(plain) < 2:
        raise BadOption(f"score(ids=...): {len(plain)} ids; give two or more, since the first id has no score.")
    wrong = next((each for each in plain if not 0 <= each < vocabulary), None)
    if wrong is not None:
        raise BadOption(f"score(ids=...): the id {wrong} does not exist; the model's ids are 0 to {vocabulary - 1}.")
    if not checked.is_whole(start, least=1) or start >= len(plain):
        raise BadOption(
            f"score(start={start!r}): give 1 to {len(plain) - 1}, the positions of ids that have a predecessor."
        )
    return plain


def width_of(engine: BaseEngine) -> int:
    """Return the number of concurrent episodes: twice the engine's places, since some episodes wait for tools."""
    return 2 * engine.places


def vocabulary_size(engine: Engine) -> int:
    """Return the number of ids of the engine's model, with padding; at least the size of its tokenizer."""
    return max(engine.tokenizer.size, getattr(engine, "vocabulary", 0))
