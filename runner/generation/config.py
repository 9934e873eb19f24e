"""Configuration and fields of the batch interface, with the names and meanings of NeMo RL's generation interface."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NotRequired, Self, TypedDict

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
    """Whether generation and training share their accelerators.

    Attributes:
        enabled: they do, so the engine sleeps while the trainer works; default False.
        resources: read by the trainer only.
    """

    enabled: bool
    resources: Any


class GenerationConfig(TypedDict, total=False):
    """How batches are generated. NeMo RL's own dictionary (`policy.generation`) can be passed as it is.

    Attributes:
        backend: "vllm", or left out: the engine is the one that is given.
        max_new_tokens: the most ids a row may get; default 1024.
        temperature: 0 is greedy; default 1.
        top_p: nucleus sampling, above 0; default 1, which is off.
        top_k: keep the k likeliest ids; None or -1, the default, is off.
        stop_token_ids: ids that end a row besides the model's own; default None.
        stop_strings: strings that end a row, merged with those of the sample; default None.
        colocated: whether `finish_generation` puts the engine to sleep; default not.
        adapter: the name of a LoRA adapter of the engine. Ours.
        seed: of everything that is sampled; None leaves it to the engine. Ours.
        vllm_cfg: its `max_model_len` bounds prompt and row together, where that is less than the engine's context.
        _pad_token_id: what rows are padded with, before and after; default 0.

    Keys of NeMo RL that say how its workers are started, or what its validation samples, are accepted and not read.
    """

    backend: str
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int | None
    stop_token_ids: list[int] | None
    stop_strings: list[str] | None
    bad_words: list[str] | None
    colocated: ColocationConfig
    adapter: str | None
    seed: int | None
    vllm_cfg: Mapping[str, Any]
    _pad_token_id: int


class GenerationDatumSpec(TypedDict):
    """Prompts as one padded array, torch or numpy; further keys of a trainer are not read.

    Attributes:
        input_ids: token ids, right-padded, shape [rows, length], an integer type that holds the vocabulary.
        input_lengths: ids of each prompt without its padding, shape [rows], an integer type.
        stop_strings: for each row the strings that end it, or None; merged with the configuration's.
    """

    input_ids: Any
    input_lengths: Any
    stop_strings: NotRequired[list[list[str] | None] | None]


class GenerationOutputSpec(TypedDict):
    """Prompts and what was sampled on them, arrays of the kind, and on the device, of the input's `input_ids`.

    Attributes:
        output_ids: prompt, then sampled ids, then padding, shape [rows, longest row], the type of `input_ids`.
        generation_lengths: sampled ids of each row, shape [rows], int64.
        unpadded_sequence_lengths: prompt and sampled ids together, shape [rows], int64.
        logprobs: aligned with `output_ids`: of each sampled id in nats, 0 at the prompt and at the padding, NaN where
            the engine gives none, shape [rows, longest row], float32.
        truncated: cut by `max_new_tokens` or by the context, shape [rows], bool. A row whose prompt left no room for
            a single id got none, and is not truncated.
        finish_reasons: for each row "stop", "length", "context" or "repetition". Ours.
        weight_versions: for each row which weights sampled which of its ids, as spans of `output_ids`. Ours.
    """

    output_ids: Any
    generation_lengths: Any
    unpadded_sequence_lengths: Any
    logprobs: Any
    truncated: Any
    finish_reasons: list[str]
    weight_versions: list[list[VersionSpan]]


class TextDatumSpec(TypedDict):
    """Prompts as texts.

    Attributes:
        prompts: each encoded as it is written: control tokens in it count, none are added.
        stop_strings: as in `GenerationDatumSpec`.
    """

    prompts: list[str]
    stop_strings: NotRequired[list[list[str] | None] | None]


class TextOutputSpec(TypedDict):
    """What was sampled, as texts.

    Attributes:
        texts: of each row what was sampled, without special tokens, up to the end of its stop string.
    """

    texts: list[str]


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """A configuration that was read.

    Attributes:
        sampling: every field set.
        greedy: the same for `greedy=True`.
        stop_token_ids: besides the model's own.
        pad_id: what rows are padded with.
        context: bounds prompt and row together; None leaves it to the engine.
        colocated: the engine sleeps while the trainer works.
        seed: None leaves it to the engine.
    """

    sampling: Sampling
    greedy: Sampling
    stop_token_ids: tuple[int, ...]
    pad_id: int
    context: int | None
    colocated: bool
    seed: int | None

    @classmethod
    def read(cls, config: GenerationConfig | Mapping[str, Any]) -> Self:
        """The settings that a configuration stands for.

        Raises:
            BadOption: a key that nobody knows, or a value that cannot be; names it and the fix.
        """
        if not isinstance(config, Mapping):
            raise BadOption(f"config={config!r:.60}: give a dictionary, such as {{'max_new_tokens': 256}}.")
        given = dict(config)
        _check_names(given)
        if given.get("backend", "vllm") != "vllm":
            raise BadOption(_refusal("backend", given["backend"], "leave it out: the engine is the one that is given"))
        if given.get("bad_words"):
            raise BadOption(_refusal("bad_words", given["bad_words"], "no engine here bans words; leave it out"))
        sampling = Sampling(
            max_tokens=_whole(given, "max_new_tokens", 1024),
            temperature=_number(given, "temperature", 1.0, "a number of at least 0", lambda value: value >= 0),
            top_p=_number(given, "top_p", 1.0, "a number above 0 and at most 1", lambda value: 0 < value <= 1),
            top_k=_top_k(given),
            stop=as_strings(given.get("stop_strings"), "config['stop_strings']", BadOption),
            adapter=_adapter(given),
        ).over(Sampling.defaults())
        return cls(
            sampling=sampling,
            greedy=Sampling(temperature=0.0, top_p=1.0, top_k=1).over(sampling),
            stop_token_ids=_stop_ids(given),
            pad_id=_whole(given, "_pad_token_id", 0, least=None),
            context=_context(given),
            colocated=_colocated(given),
            seed=None if given.get("seed") is None else _whole(given, "seed", 0, least=None),
        )


def as_strings(value: Any, name: str, error: type[ValueError]) -> tuple[str, ...]:
    """Stop strings as a tuple: None is none, a single string stands for a list of it.

    Raises:
        ValueError: `error`, by `name`: it is something else, or one of them is empty.
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
"""Keys of NeMo RL about what is not done here: starting workers, moving weights, sampling its validation."""


def _check_names(given: Mapping[str, Any]) -> None:
    for key in given:
        if key not in _READ and key not in _NOT_READ:
            near = difflib.get_close_matches(str(key), _READ, 1)
            fix = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(_READ)}."
            raise BadOption(f"config[{key!r}]: a GenerationConfig has no such key; {fix}")


def _refusal(key: str, value: Any, fix: str) -> str:
    return f"config[{key!r}] = {value!r:.80}: {fix}."


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(given: Mapping[str, Any], key: str, default: int, *, least: int | None = 1) -> int:
    value: Any = given.get(key, default)
    if not _is_whole(value) or (least is not None and value < least):
        raise BadOption(
            _refusal(key, value, "give a whole number" + ("" if least is None else f" of at least {least}"))
        )
    return int(value)


def _number(given: Mapping[str, Any], key: str, default: float, wanted: str, fits: Any) -> float:
    value: Any = given.get(key, default)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not fits(value):
        raise BadOption(_refusal(key, value, f"give {wanted}"))
    return float(value)


def _top_k(given: Mapping[str, Any]) -> int:
    value: Any = given.get("top_k")
    if value is None or (_is_whole(value) and value == -1):
        return 0
    if not _is_whole(value) or value < 1:
        raise BadOption(_refusal("top_k", value, "give a whole number of at least 1, or None or -1 for all ids"))
    return int(value)


def _stop_ids(given: Mapping[str, Any]) -> tuple[int, ...]:
    value: Any = given.get("stop_token_ids")
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(_is_whole(one) for one in value):
        raise BadOption(_refusal("stop_token_ids", value, "give a list of token ids, or None"))
    return tuple(dict.fromkeys(value))


def _adapter(given: Mapping[str, Any]) -> str | None:
    value: Any = given.get("adapter")
    if value is not None and (not isinstance(value, str) or not value):
        raise BadOption(_refusal("adapter", value, "give the name of an adapter, or None"))
    return value


def _context(given: Mapping[str, Any]) -> int | None:
    value: Any = given.get("vllm_cfg", {})
    if not isinstance(value, Mapping):
        raise BadOption(_refusal("vllm_cfg", value, "give a dictionary"))
    length = value.get("max_model_len")
    if length is not None and (not _is_whole(length) or length < 2):
        raise BadOption(f"config['vllm_cfg']['max_model_len'] = {length!r:.80}: give a whole number of at least 2.")
    return length


def _colocated(given: Mapping[str, Any]) -> bool:
    value: Any = given.get("colocated", {})
    if not isinstance(value, Mapping) or not isinstance(value.get("enabled", False), bool):
        raise BadOption(_refusal("colocated", value, "give {'enabled': True} or {'enabled': False}"))
    return bool(value.get("enabled", False))
