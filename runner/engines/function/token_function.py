"""What a function of token ids is given for a turn, what it gives back, and which settings it may not take."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from runner.engines.base import FinishReason, GenerationRequest
from runner.engines.vllm.settings import sampling_arguments
from runner.options import Constraint

__all__ = ["LogprobsKind", "TokenFeature", "TokenFunction", "TokenOutput", "TokenSampling"]

_OURS = ("flat_logprobs", "detokenize", "extra_args")
"""What only our own reading of vLLM's outputs takes."""


class TokenFeature(enum.StrEnum):
    """What a function of token ids may obey besides `max_tokens`, `temperature`, `seed` and `stop_ids`."""

    TOP_P = "top_p"
    """Nucleus sampling."""
    TOP_K = "top_k"
    """The likeliest ids alone."""
    MIN_P = "min_p"
    """No id that is much less likely than the likeliest."""
    MIN_TOKENS = "min_tokens"
    """No stop id before so many ids."""
    REPETITION_PENALTY = "repetition_penalty"
    """The penalty on ids of the prompt and the turn."""
    PRESENCE_PENALTY = "presence_penalty"
    """The penalty on ids that the turn has."""
    FREQUENCY_PENALTY = "frequency_penalty"
    """The penalty on ids by how often the turn has them."""
    LOGIT_BIAS = "logit_bias"
    """What is added to the logits of some ids."""
    BAD_WORDS = "bad_words"
    """Words that are kept out."""
    LOGPROBS = "logprobs"
    """The likeliest ids of each position, in `TokenOutput.top`."""
    CONSTRAINT = "constraint"
    """Grammars, as required and strict tool calls and `Sampling(schema=)` need them: `TokenSampling.constraint`."""


class LogprobsKind(enum.StrEnum):
    """Of which distribution the log-probabilities are that a function gives."""

    PROCESSED = "processed"
    """Of what was sampled from, behind temperature, penalties and masks: vLLM's `processed_logprobs`."""
    RAW = "raw"
    """Of the model's own, which is kept only of turns in which it is what was sampled from: at temperature 1 or 0."""
    NONE = "none"
    """The function gives none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSampling:
    """How a function of token ids is to sample one turn."""

    max_tokens: int
    """The most ids that the turn may have; prompt and turn then fit the context."""
    temperature: float
    """The temperature; 0 is greedy."""
    stop_ids: tuple[int, ...]
    """Exactly these ids end the turn, and the one that does is the last id of the answer."""
    seed: int | None
    """The seed of the turn's random numbers, for a function that can sample the same twice."""
    top_p: float = 1.0
    """The probability mass that is kept; 1 is off."""
    top_k: int = 0
    """The number of likeliest ids that are kept; 0 is off."""
    min_p: float = 0.0
    """The fraction of the likeliest id's probability below which an id is dropped; 0 is off."""
    min_tokens: int = 0
    """The number of ids before any stop id may be sampled."""
    repetition_penalty: float = 1.0
    """The penalty on ids of the prompt and the turn; 1 is off."""
    presence_penalty: float = 0.0
    """The penalty on ids that the turn has; 0 is off."""
    frequency_penalty: float = 0.0
    """The penalty on ids by how often the turn has them; 0 is off."""
    logit_bias: Mapping[int, float] | None = None
    """What is added to the logits of some ids, by id."""
    bad_words: tuple[str, ...] = ()
    """Words that are not sampled."""
    logprobs: int = 0
    """How many of the likeliest ids of each position are wanted in `TokenOutput.top`."""
    constraint: Constraint | None = None
    """What may be sampled; None for anything."""
    adapter: str | None = None
    """The LoRA adapter that samples; None for the model itself."""
    request: GenerationRequest = field(repr=False)
    """The whole request: its name, and whether somebody acts on single deltas."""

    @classmethod
    def of(cls, request: GenerationRequest) -> Self:
        """How a request is to be sampled."""
        sampling = request.sampling
        same = {name: getattr(sampling, name) for name in _SAME}
        return cls(
            stop_ids=tuple(dict.fromkeys((*request.stop_ids, *sampling.stop_ids))),
            seed=request.seed,
            logprobs=sampling.logprobs or 0,
            constraint=request.constraint,
            request=request,
            **same,
        )

    def vllm_arguments(self) -> dict[str, Any]:
        """What vLLM's `SamplingParams` take of it; `constraint` and `bad_words` are not among it."""
        arguments = sampling_arguments(self.request, stream_interval=1, known=frozenset())
        return {name: value for name, value in arguments.items() if name not in _OURS}

    def finish_of(self, token_ids: Sequence[int]) -> FinishReason:
        """How a turn of these ids ended, for an engine that does not say: by a stop id, by `max_tokens`, or cut."""
        if len(token_ids) and token_ids[-1] in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(token_ids) >= self.max_tokens else FinishReason.ABORT


_SAME = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "adapter",
)


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What a function of token ids gives: a whole turn, or what is new of one."""

    token_ids: Sequence[int]
    """The ids in the order in which they were sampled."""
    logprobs: Sequence[float] | None = None
    """The log-probability of each in nats; None only of a function of `LogprobsKind.NONE`."""
    finish: FinishReason | str | None = None
    """How the turn ended: "stop", "length" or "abort"; None where more comes."""
    version: str | int | None = None
    """The version of the weights that sampled these ids, where the function knows it."""
    top: Sequence[Mapping[int, float]] | None = None
    """The likeliest ids of each position with their log-probabilities, where `TokenSampling.logprobs` wants them."""
    cached_tokens: int | None = None
    """Ids of the prompt that a prefix cache held; None where that is not known."""


class TokenFunction(Protocol):
    """Samples one turn: an `async def` that returns a `TokenOutput`, or an async generator of several.

    It is called in a task of its own for each turn, as many at once as the engine has places, and is cancelled where
    the turn is not wanted any more. What it raises fails that turn; `EngineDead` says that no other can be sampled.
    """

    def __call__(
        self, prompt: list[int], sampling: TokenSampling, /, *, session: str
    ) -> Awaitable[TokenOutput] | AsyncIterator[TokenOutput]:
        """Sample a turn.

        Args:
            prompt: every id the model is to see; a list of the function's own.
            sampling: how to sample.
            session: names the conversation, in which every prompt goes on from the one before.
        """
        ...
