"""Configuration and fields of the batch interface, with the names and meanings of NeMo RL's generation interface."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, Self, TypeAlias

from pydantic import Field, StrictBool, StrictInt, StrictStr, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from runner.errors import BadOption
from runner.options import Sampling
from runner.tokens.log import VersionSpan

__all__ = [
    "ColocationConfig",
    "GenerationConfig",
    "GenerationDatumSpec",
    "GenerationOutputSpec",
    "GenerationSettings",
    "TextDatumSpec",
    "TextOutputSpec",
    "as_strings",
]


class ColocationConfig(TypedDict, total=False):
    """Sharing of accelerators between generation and training."""

    enabled: bool
    """True if the accelerators are shared, so that the engine sleeps while the trainer works; default False."""
    resources: Any
    """Settings of the trainer's resources, which are ignored here."""


class GenerationConfig(TypedDict, total=False):
    """The settings of batch generation. NeMo RL's own dictionary (`policy.generation`) can be passed as it is.

    Keys of NeMo RL about the start of its workers, or the sampling of its validation, are accepted and ignored.
    """

    backend: str
    """The kind of engine. Only "vllm", the default, is accepted, since the engine is given as an object."""
    max_new_tokens: int
    """Maximum number of ids that are sampled for a row; default 1024."""
    temperature: float
    """The temperature of sampling; 0 is greedy, default 1."""
    top_p: float
    """The probability mass that nucleus sampling keeps, above 0; default 1, which keeps all."""
    top_k: int | None
    """Number of most likely ids that are kept; None or -1, the default, keeps all."""
    stop_token_ids: list[int] | None
    """Ids that end a row, in addition to the stop ids of the model; default None."""
    stop_strings: list[str] | None
    """Strings that end a row, in addition to the `stop_strings` of a batch; default None."""
    bad_words: list[str] | None
    """Words that are not sampled, as `Sampling.bad_words`; default None."""
    colocated: ColocationConfig
    """Sharing of accelerators with the trainer. If on, `finish_generation` puts the engine to sleep; off by default."""
    adapter: str | None
    """The name of a LoRA adapter of the engine; default None. This key is ours, not NeMo RL's."""
    seed: int | None
    """The seed of all samples; None, the default, leaves it to the engine. This key is ours."""
    vllm_cfg: Mapping[str, Any]
    """Settings of vLLM. Only `max_model_len` is used: the maximum number of ids of a prompt and its sample together, if
    it is below the engine's context.
    """
    _pad_token_id: int
    """The id of padding, in inputs and outputs; default 0."""


class GenerationDatumSpec(TypedDict):
    """Prompts as one padded array, torch or numpy; further keys of a trainer are ignored."""

    input_ids: Any
    """Token ids, right-padded, shape [rows, length], an integer type that holds the vocabulary."""
    input_lengths: Any
    """Number of ids of each prompt without its padding, shape [rows], an integer type."""
    stop_strings: NotRequired[list[list[str] | None] | None]
    """For each row the strings that end it, or None; merged with the configuration's."""


class GenerationOutputSpec(TypedDict):
    """Prompts and samples, as arrays of the same kind and device as the input's `input_ids`."""

    output_ids: Any
    """Prompt, then sampled ids, then padding, shape [rows, longest row], the type of `input_ids`."""
    generation_lengths: Any
    """Number of sampled ids of each row, shape [rows], int64."""
    unpadded_sequence_lengths: Any
    """Number of ids of each prompt and its sample together, shape [rows], int64."""
    logprobs: Any
    """Log-probabilities in nats, aligned with `output_ids`, shape [rows, longest row], float32.

    The values are 0 in the prompt and in the padding. They are NaN for sampled ids if the engine returns no
    log-probabilities.
    """
    truncated: Any
    """True if `max_new_tokens` or the context cut a row, shape [rows], bool.

    A row without room for a single id is empty, and not truncated.
    """
    finish_reasons: list[str]
    """The reason why each row ended: "stop", "length", "context" or "repetition". NeMo RL does not have this key."""
    weight_versions: list[list[VersionSpan]]
    """For each row the weights that sampled its ids, as spans of `output_ids`. NeMo RL does not have this key."""


class TextDatumSpec(TypedDict):
    """Prompts as texts."""

    prompts: list[str]
    """Texts. Control tokens in a text become control ids; no control token is added."""
    stop_strings: NotRequired[list[list[str] | None] | None]
    """For each row the strings that end it, or None; merged with the configuration's."""


class TextOutputSpec(TypedDict):
    """The samples as texts."""

    texts: list[str]
    """The sampled text of each row, without special tokens, up to the end of its stop string."""


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """A parsed configuration; `GenerationConfig` documents the names."""

    sampling: Sampling
    """The sampling of rows, every field set."""
    greedy: Sampling
    """The sampling of rows in a greedy batch."""
    stop_token_ids: tuple[int, ...]
    """The ids that end a row, in addition to the stop ids of the model."""
    pad_id: int
    """The id of the padding."""
    context: int | None
    """Maximum number of ids of a prompt and its sample together; None leaves it to the engine."""
    colocated: bool
    """True if engine and trainer share their accelerators."""
    seed: int | None
    """The seed from which the seeds of rows are derived; None leaves these seeds to the engine."""

    @classmethod
    def read(cls, config: GenerationConfig | Mapping[str, Any]) -> Self:
        """Parse a configuration.

        Raises:
            BadOption: a key is unknown, or a value is invalid; the message names the key.
        """
        if not isinstance(config, Mapping):
            raise BadOption(f"config={config!r:.60}: give a dictionary, such as {{'max_new_tokens': 256}}.")
        given = dict(config)
        _check_names(given)
        read = {key: _read(given, key) for key in _KEYS}
        length = read["vllm_cfg"].get("max_model_len")
        stop = as_strings(given.get("stop_strings"), "config['stop_strings']", BadOption)
        sampling = Sampling(
            max_tokens=read["max_new_tokens"],
            temperature=read["temperature"],
            top_p=read["top_p"],
            top_k=0 if read["top_k"] in (None, -1) else read["top_k"],
            bad_words=as_strings(given.get("bad_words"), "config['bad_words']", BadOption),
            stop=stop,
            adapter=read["adapter"],
        ).over(Sampling.defaults())
        return cls(
            sampling=sampling,
            greedy=Sampling(temperature=0.0, top_p=1.0, top_k=1).over(sampling),
            stop_token_ids=tuple(dict.fromkeys(read["stop_token_ids"] or ())),
            pad_id=read["_pad_token_id"],
            context=_checked(
                "config['vllm_cfg']['max_model_len']", length, _LENGTH, "give a whole number of at least 2"
            ),
            colocated=read["colocated"].get("enabled", False),
            seed=read["seed"],
        )


def as_strings(value: Any, name: str, error: type[ValueError]) -> tuple[str, ...]:
    """Return strings as a tuple: empty for None, and with one item for a single string.

    Raises:
        ValueError: the value has another type, or a string is empty. The exception is of the type `error`, and its text
            begins with `name`.
    """
    strings = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(one, str) and one for one in strings):
        raise error(f"{name} = {value!r:.80}: give a list of strings, none of them empty, or None.")
    return tuple(strings)


_READ = tuple(GenerationConfig.__annotations__)
_NOT_READ = {
    "_debug_payload_metrics",
    "_mtp_weights_from_refit",
    "mcore_generation_config",
    "model_name",
    "nvfp4_pertoken_rollout",
    "port_range_high",
    "port_range_low",
    "quant_cfg",
    "real_quant",
    "real_quant_export_cpu_offload",
    "real_quant_ignore",
    "refit_cfg",
    "refit_transport",
    "sglang_cfg",
    "trtllm_cfg",
    "use_async_rollouts",
    "val_temperature",
    "val_top_k",
    "val_top_p",
    "vllm_kwargs",
    "worker_extension_cls_fqn",
}
"""Keys of NeMo RL that do not affect `Generation`. They set how NeMo RL starts workers, moves weights and validates."""


def _check_names(given: Mapping[str, Any]) -> None:
    for key in given:
        if key not in _READ and key not in _NOT_READ:
            near = difflib.get_close_matches(str(key), _READ, 1)
            fix = f"did you mean {near[0]!r}?" if near else f"the valid keys are {', '.join(_READ)}."
            raise BadOption(f"config[{key!r}]: a GenerationConfig has no such key; {fix}")


class _Colocated(TypedDict, total=False):
    enabled: StrictBool


_Whole: TypeAlias = StrictInt
_Positive: TypeAlias = Annotated[StrictInt, Field(ge=1)]
_Number: TypeAlias = Annotated[float, Field(strict=True, allow_inf_nan=False)]

# Valid values, default, and the advice for an invalid value.
_KEYS: dict[str, tuple[Any, Any, str]] = {
    "backend": (Literal["vllm"], "vllm", "leave it out: the engine is the one that is given"),
    "max_new_tokens": (_Positive, 1024, "give a whole number of at least 1"),
    "temperature": (Annotated[_Number, Field(ge=0)], 1.0, "give a number of at least 0"),
    "top_p": (Annotated[_Number, Field(gt=0, le=1)], 1.0, "give a number above 0 and at most 1"),
    "top_k": (_Positive | Literal[-1] | None, -1, "give a whole number of at least 1, or None or -1 for all ids"),
    "stop_token_ids": (
        Annotated[list[_Whole], Field(strict=True)] | Annotated[tuple[_Whole, ...], Field(strict=True)] | None,
        None,
        "give a list of token ids, or None",
    ),
    "adapter": (Annotated[StrictStr, Field(min_length=1)] | None, None, "give the name of an adapter, or None"),
    "vllm_cfg": (Mapping[Any, Any], {}, "give a dictionary"),
    "colocated": (_Colocated, {}, "give {'enabled': True} or {'enabled': False}"),
    "seed": (_Whole | None, None, "give a whole number"),
    "_pad_token_id": (_Whole, 0, "give a whole number"),
}
_LENGTH = Annotated[StrictInt, Field(ge=2)] | None

_adapter = functools.cache(TypeAdapter)


def _read(given: Mapping[str, Any], key: str) -> Any:
    kind, default, fix = _KEYS[key]
    return _checked(f"config[{key!r}]", given.get(key, default), kind, fix)


def _checked(name: str, value: Any, kind: Any, fix: str) -> Any:
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError:  # pydantic's text does not name the trainer's key
        raise BadOption(f"{name} = {value!r:.80}: {fix}.") from None
