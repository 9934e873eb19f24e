"""Arguments and results of a token function, and the settings that it may support."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, Self

from runner.engines.base import FinishReason, GenerationRequest
from runner.engines.vllm.settings import sampling_arguments
from runner.options import Constraint
from runner.sampling_fields import SAMPLING_FIELDS

__all__ = ["LogprobsKind", "TokenFeature", "TokenFunction", "TokenOutput", "TokenSampling"]

_OURS = ("flat_logprobs", "detokenize", "extra_args")
"""Arguments that only the runner's own reader of vLLM's outputs uses."""


class TokenFeature(enum.StrEnum):
    """Settings that a token function may support besides `max_tokens`, `temperature`, `seed` and `stop_ids`."""

    TOP_P = "top_p"
    """Nucleus sampling."""
    TOP_K = "top_k"
    """Sampling from only the most likely ids."""
    MIN_P = "min_p"
    """Sampling from only the ids whose probability is at least a fraction of the highest probability."""
    MIN_TOKENS = "min_tokens"
    """Minimum number of ids before a stop id."""
    REPETITION_PENALTY = "repetition_penalty"
    """Penalty on ids of the prompt and the turn."""
    PRESENCE_PENALTY = "presence_penalty"
    """Penalty on ids that the turn already has."""
    FREQUENCY_PENALTY = "frequency_penalty"
    """Penalty on ids by their count in the turn."""
    LOGIT_BIAS = "logit_bias"
    """Values that are added to the logits of some ids."""
    BAD_WORDS = "bad_words"
    """Words that may not be sampled."""
    LOGPROBS = "logprobs"
    """Most likely ids at each position, in `TokenOutput.top`."""
    CONSTRAINT = "constraint"
    """Grammars in `TokenSampling.constraint`, which strict or required tool calls and `Sampling(schema=)` need."""


class LogprobsKind(enum.StrEnum):
    """Distribution of a function's log-probabilities."""

    PROCESSED = "processed"
    """The distribution of the sampling, after temperature, penalties and masks: vLLM's `processed_logprobs`."""
    RAW = "raw"
    """The model's own distribution. Its log-probabilities are kept only for turns at temperature 1 or 0 without
    penalties, truncation, masks or a grammar. For these turns they equal those of `PROCESSED`."""
    NONE = "none"
    """The function returns no log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSampling:
    """Sampling parameters of one turn for a token function."""

    max_tokens: int
    """Maximum number of ids of the turn; prompt and turn then fit the context."""
    temperature: float
    """Temperature; 0 is greedy."""
    stop_ids: tuple[int, ...]
    """The only ids that end the turn. The sampled stop id is the last id of the answer."""
    seed: int | None
    """Seed of the turn's random numbers, for a function with reproducible sampling; None without a seed."""
    top_p: float = 1.0
    """Probability mass that is kept; 1 is off."""
    top_k: int = 0
    """Number of most likely ids that are kept; 0 is off."""
    min_p: float = 0.0
    """Ids below this fraction of the highest probability are dropped; 0 is off."""
    min_tokens: int = 0
    """Minimum number of ids before a stop id."""
    repetition_penalty: float = 1.0
    """Penalty on ids of the prompt and the turn; 1 is off."""
    presence_penalty: float = 0.0
    """Penalty on ids that the turn already has; 0 is off."""
    frequency_penalty: float = 0.0
    """Penalty on ids by their count in the turn; 0 is off."""
    logit_bias: Mapping[int, float] | None = None
    """Values that are added to logits, by id."""
    bad_words: tuple[str, ...] = ()
    """Words that may not be sampled."""
    logprobs: int = 0
    """Number of most likely ids per position that `TokenOutput.top` needs."""
    constraint: Constraint | None = None
    """Grammar for the sampled ids; None for no constraint."""
    adapter: str | None = None
    """LoRA adapter to sample with; None for the model itself."""
    request: GenerationRequest = field(repr=False)
    """The engine's request, with its name and `acts_on_deltas`."""

    @classmethod
    def of(cls, request: GenerationRequest) -> Self:
        """Return the parameters of a request."""
        sampling = request.sampling
        same = {name: getattr(sampling, name) for name in _SAME_FIELDS}
        return cls(
            stop_ids=request.all_stop_ids,
            seed=request.seed,
            logprobs=sampling.logprobs or 0,
            constraint=request.constraint,
            request=request,
            **same,
        )

    def vllm_arguments(self) -> dict[str, Any]:
        """Return the arguments of vLLM's `SamplingParams`, without `constraint` and `bad_words`."""
        arguments = sampling_arguments(self.request, stream_interval=1, known=frozenset())
        return {name: value for name, value in arguments.items() if name not in _OURS}

    def finish_of(self, token_ids: Sequence[int]) -> FinishReason:
        """Return the finish of these ids, for an engine that reports none.

        It is STOP after a stop id, LENGTH with `max_tokens` ids, and otherwise ABORT.
        """
        if len(token_ids) and token_ids[-1] in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(token_ids) >= self.max_tokens else FinishReason.ABORT


_SAME_FIELDS = [
    each.name for each in fields(TokenSampling) if each.name in SAMPLING_FIELDS.keys() - {"stop_ids", "logprobs"}
]


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """Output of a token function: a whole turn, or its new part."""

    token_ids: Sequence[int]
    """Ids in the order of sampling."""
    logprobs: Sequence[float] | None = None
    """Log-probability of each id in nats; None only with `LogprobsKind.NONE`."""
    finish: FinishReason | str | None = None
    """"stop", "length", "abort" or "repetition"; None if more outputs follow."""
    version: str | int | None = None
    """Weight version of these ids; None if unknown."""
    top: Sequence[Mapping[int, float]] | None = None
    """Most likely ids at each position, with log-probabilities, as many as `TokenSampling.logprobs`; ignored for 0."""
    cached_tokens: int | None = None
    """Number of prompt ids that a prefix cache held; None if unknown."""
    sampling_masks: Sequence[Sequence[int]] | None = None
    """Ids that could be sampled at each position, after top-k, top-p, min-p and a grammar."""
    routed_experts: Any = None
    """Experts of all ids of prompt and turn but the last, given with the finish; shape [positions, layers, experts]."""


class TokenFunction(Protocol):
    """Function that samples one turn: an `async def` that returns a `TokenOutput`, or an async generator of several.

    Each call runs in its own task, and the engine's places limit the number of concurrent calls. A call is cancelled if
    its turn is no longer needed. An exception fails the turn; `EngineDead` ends the engine.
    """

    def __call__(
        self, prompt: list[int], sampling: TokenSampling, /, *, session: str
    ) -> Awaitable[TokenOutput] | AsyncIterator[TokenOutput]:
        """Sample a turn.

        Args:
            prompt: all ids of the prompt; the function may change the list.
            sampling: the sampling parameters.
            session: id of the conversation, to route its turns to the same server. Most of its prompts extend the
                previous one.
        """
        ...
