"""The table of sampling fields: default, bounds, command-line option, names in engines, effect on probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from runner import checked

__all__ = ["MAX_LOGPROBS", "SAMPLING_FIELDS", "SamplingField", "sampling_names"]

MAX_LOGPROBS: Final = 20
"""Maximum number of top log-probabilities per position, equal to vLLM's default maximum."""


_NOTHING: Final[tuple[Any, ...]] = ((), [], {}, None)
"""Values that all mean "off", in a field that is off by default."""


@dataclass(frozen=True, slots=True)
class SamplingField:
    """One field of `Sampling`."""

    default: Any
    """Value if the field is not set anywhere."""
    number: type[int] | type[float] | None = None
    """Type of the field's value if it is a number; None for other values, which `Sampling` checks itself."""
    bounds: Mapping[str, float] = field(default_factory=dict)
    """Arguments of `checked.whole` or `checked.number`."""
    changes: bool = False
    """True if the field changes the distribution of a turn in a way that trainers do not apply."""
    truncates: bool = False
    """True if the field only excludes ids, so that a trainer needs only the ids that could be sampled."""
    vllm: bool = False
    """True if the value is passed unchanged to the field of this name in vLLM's `SamplingParams`."""
    sglang: str | None = None
    """Name in SGLang, if SGLang has the field with the same values; else None."""
    chat: str | None = None
    """Name in requests to chat APIs; None if the field is not sent to them."""
    granted: bool = False
    """True if a client may set the field in a trained thread, since it only ends or shapes the answer."""
    anthropic: bool = False
    """True if requests of Anthropic's Messages API may have the field under the same name, with the same values."""
    served: bool = False
    """True if `deltarunner serve` has the option too."""
    help: str | None = None
    """Help text of the field's option in `deltarunner run`; None if the field has no option."""
    option: str | None = None
    """Name of the option, if it differs from the name of the field."""
    metavar: str | None = None
    """Form of the option's value, if it is not just a number or a string."""

    def check(self, given: str, value: Any) -> None:
        """Check a number; other values are not checked.

        Raises:
            BadOption: the number has the wrong type or is out of bounds; the text begins with `given`.
        """
        if self.number is not None:
            check: Any = checked.whole if self.number is int else checked.number
            check(given, value, **self.bounds)

    def is_off(self, value: Any) -> bool:
        """Return whether a value is the default, or another form of it, such as an empty list."""
        return bool(value == self.default or (value in _NOTHING and self.default in _NOTHING))


SAMPLING_FIELDS: Final[Mapping[str, SamplingField]] = {
    "max_tokens": SamplingField(
        *(1024, int, {"least": 1}),
        vllm=True,
        sglang="max_new_tokens",
        chat="max_tokens",
        granted=True,
        served=True,
        help="Maximum number of tokens of a turn.",
    ),
    "min_tokens": SamplingField(
        *(0, int, {"least": 0}),
        changes=True,
        truncates=True,
        vllm=True,
        sglang="min_new_tokens",
        help="Minimum number of tokens of a turn.",
    ),
    "temperature": SamplingField(
        *(1.0, float, {"least": 0}),
        vllm=True,
        sglang="temperature",
        chat="temperature",
        anthropic=True,
        served=True,
        help="Temperature; 0 is greedy; default 1.",
    ),
    "top_p": SamplingField(
        *(1.0, float, {"above": 0, "most": 1}),
        changes=True,
        truncates=True,
        vllm=True,
        sglang="top_p",
        chat="top_p",
        anthropic=True,
        served=True,
        help="Nucleus sampling.",
    ),
    "top_k": SamplingField(
        *(0, int, {"least": 0}),
        changes=True,
        truncates=True,
        vllm=True,
        anthropic=True,
        served=True,
        help="Sample only from the k most likely tokens.",
    ),
    "min_p": SamplingField(
        *(0.0, float, {"least": 0, "most": 1}),
        changes=True,
        truncates=True,
        vllm=True,
        sglang="min_p",
        anthropic=True,
        served=True,
        help="Drop tokens below this fraction of the top probability.",
    ),
    "repetition_penalty": SamplingField(
        *(1.0, float, {"above": 0, "finite": True}),
        changes=True,
        vllm=True,
        sglang="repetition_penalty",
        help="Above 1: penalize tokens of the prompt and the turn.",
    ),
    "presence_penalty": SamplingField(
        *(0.0, float, {"least": -2, "most": 2}),
        changes=True,
        vllm=True,
        sglang="presence_penalty",
        chat="presence_penalty",
        help="Above 0: penalize tokens that occur in the turn; -2 to 2.",
    ),
    "frequency_penalty": SamplingField(
        *(0.0, float, {"least": -2, "most": 2}),
        changes=True,
        vllm=True,
        sglang="frequency_penalty",
        chat="frequency_penalty",
        help="Above 0: penalize tokens for each occurrence in the turn; -2 to 2.",
    ),
    "logit_bias": SamplingField(
        None, changes=True, metavar="ID=BIAS", help="Bias added to the logit of a token id; -100 to 100."
    ),
    "bad_words": SamplingField((), changes=True, truncates=True, option="bad-word", help="A word that is not sampled."),
    "stop": SamplingField((), chat="stop", granted=True, help="A string that ends a turn."),
    "stop_ids": SamplingField((), granted=True),
    "ignore_eos": SamplingField(False, sglang="ignore_eos", help="Do not end turns at the model's stop ids."),
    "logprobs": SamplingField(
        *(0, int, {"least": 0, "most": MAX_LOGPROBS}),
        vllm=True,
        granted=True,
        help="Store log-probabilities of the N most likely ids; at most 20.",
    ),
    "schema": SamplingField(None, chat="response_format", granted=True),
    "regex": SamplingField(None, granted=True),
    "choice": SamplingField(None, granted=True),
    "adapter": SamplingField(None),
}
"""All fields of `Sampling`, in its order."""


def sampling_names(**properties: Any) -> tuple[str, ...]:
    """Return the names of the fields with these properties, such as `changes=True`."""
    return tuple(
        name
        for name, row in SAMPLING_FIELDS.items()
        if all(getattr(row, each) == value for each, value in properties.items())
    )
