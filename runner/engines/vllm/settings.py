"""Settings of vLLM: engine arguments, environment variables of its processes, and sampling parameters."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import new_class
from typing import Any, Final

from runner.engines.base import GenerationRequest
from runner.engines.vllm.dtypes import gives_dtype
from runner.engines.vllm.parallel import (
    BINDING,
    UNIPROC,
    ParallelSizes,
    cores_by_worker,
    is_local,
    single_process_variables,
)
from runner.errors import BadOption
from runner.options import Constraint, ConstraintKind
from runner.sampling_fields import MAX_LOGPROBS, sampling_names

__all__ = [
    "RequestConverter",
    "VllmSettings",
    "bad_word_ids",
    "choose_settings",
    "constraint_arguments",
    "sampling_arguments",
]

_EVERYWHERE: dict[str, Any] = {
    # Trajectories record the probabilities of the sampling, after grammar masks and temperature.
    "logprobs_mode": "processed_logprobs",
    "max_logprobs": MAX_LOGPROBS,
    # vLLM's own loggers of statistics print and keep histograms, so they are off. `SchedulerStats` has a logger of
    # its own.
    "disable_log_stats": True,
    # By default vLLM chooses the grammar library by the first constraint, and keeps it for later constraints.
    "structured_outputs_config": {"backend": "xgrammar"},
    # This class has the methods by which vLLM's workers load new weights.
    "worker_extension_cls": "runner.engines.vllm.worker.extension.WeightWorker",
    # With this, the statistics of a step have the number of prompt tokens that the step computed. Nothing is logged.
    "enable_logging_iteration_details": True,
}
# vLLM's own defaults are small and depend on a usage context.
_GPU: dict[str, Any] = {"max_num_seqs": 512, "max_num_batched_tokens": 8192}
# These values were the fastest on two CPU cores. The cache shares only whole blocks, so the smallest block leaves the
# fewest ids to compute again. With a small first step, only few prompts compute the part that all prompts share; the
# other prompts find it in the cache. Compilation takes longer than it saves.
_CPU: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 1024, "block_size": 32, "enforce_eager": True}

_SAME_FIELDS = sampling_names(vllm=True)
_RESERVED = ("model", "skip_tokenizer_init", "stream_interval")
_GIB_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Settings with which an engine starts."""

    arguments: dict[str, Any]
    """Arguments of `AsyncEngineArgs`, without the model."""
    environment: dict[str, str]
    """Environment variables of vLLM's processes."""
    chosen: dict[str, Any]
    """Defaults for arguments that the user did not give, and all of `environment`."""


def choose_settings(
    given: Mapping[str, Any],
    *,
    cpu: bool,
    known: frozenset[str],
    dtype: str | None = None,
    load_format: str | None = None,
) -> VllmSettings:
    """Combine the user's arguments with our defaults.

    Args:
        given: the user's engine arguments.
        cpu: True if vLLM computes on CPU cores.
        known: names of this vLLM's engine arguments.
        dtype: dtype to use if `given` has none; None to let vLLM choose it.
        load_format: format of the weight files, used and chosen in the same way.

    Raises:
        BadOption: vLLM does not have an argument, or the engine sets it itself.
    """
    for name in given:
        if name in _RESERVED:
            raise BadOption(f"VllmEngine({name}=...): the engine sets this argument itself; leave it out.")
        if name not in known:
            raise BadOption(
                f"VllmEngine({name}=...): this vLLM has no such engine argument; correct the name, or leave it out."
            )
    ours = _EVERYWHERE | (_CPU if cpu else _GPU)
    alone = single_process_variables(given) if cpu else {}
    if alone:
        ours["distributed_executor_backend"] = UNIPROC
    if dtype is not None and not gives_dtype(given):
        given = {name: value for name, value in given.items() if name != "dtype"}
        ours["dtype"] = dtype
    if load_format is not None:
        ours["load_format"] = load_format
    if given.get("reasoning_parser"):  # vLLM puts the reasoning parser into the same argument
        ours.pop("structured_outputs_config")
    chosen = {name: value for name, value in ours.items() if name not in given and name in known}
    # A forked process would inherit locks of this process's threads, and would not load the parent watch.
    wanted = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"} | (_cpu_variables(given) if cpu else {})
    environment = {name: value for name, value in wanted.items() if name not in os.environ} | alone
    return VllmSettings({**chosen, **given}, environment, {**chosen, **environment})


def _cpu_variables(given: Mapping[str, Any]) -> dict[str, str]:
    workers, cores = ParallelSizes.of(given).workers, os.sched_getaffinity(0)
    variables = {"VLLM_CPU_KVCACHE_SPACE": str(_cache_gigabytes(workers))}
    if is_local(given) and workers <= len(cores):
        # By default vLLM leaves one CPU core of each pair idle for serving, but serving runs in our process. vLLM also
        # assigns the same cores to all ranks, and no cores to some workers on a machine with one memory node.
        variables[BINDING] = cores_by_worker(workers, cores)
    return variables


def _cache_gigabytes(workers: int) -> int:
    # vLLM fills its cache with zeros at the start, which takes seconds for a large one.
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _GIB_BYTES
    return max(1, min(4, memory // 6 // workers))


def sampling_arguments(request: GenerationRequest, *, stream_interval: int, known: frozenset[str]) -> dict[str, Any]:
    """Return the arguments of vLLM's `SamplingParams` for a request, without output kind, constraint and bad words.

    Arguments that an older vLLM lacks are included only if `known` contains their names.
    """
    sampling = request.sampling
    arguments: dict[str, Any] = {
        **{name: getattr(sampling, name) for name in _SAME_FIELDS},
        "logit_bias": sampling.logit_bias or None,
        "seed": request.seed,
        # Only these ids end a turn, since with ignore_eos vLLM adds no EOS of the tokenizer or of generation_config. If
        # a request ignores the model's stop ids, they are not in this list.
        "stop_token_ids": list(request.all_stop_ids),
        "ignore_eos": True,
        # The cheapest output of vLLM has flat lists of ids and log-probabilities, and no text.
        "detokenize": False,
        "flat_logprobs": True,
        "extra_args": dict(request.extra) or None,
    }
    if request.scores_prompt:
        arguments["prompt_logprobs"] = 0  # 0 requests only the log-probabilities of the prompt's own ids
    if "stream_interval" in known:
        arguments["stream_interval"] = 1 if request.acts_on_deltas else stream_interval
    if "skip_clone" in known:  # the parameters are made for this request only
        arguments["skip_clone"] = True
    return arguments


def constraint_arguments(constraint: Constraint) -> dict[str, Any]:
    """Return the arguments of vLLM's `StructuredOutputsParams`."""
    value = json.loads(constraint.value) if constraint.kind is ConstraintKind.CHOICE else constraint.value
    return {constraint.kind.value: value}


def bad_word_ids(words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> list[list[int]]:
    """Return the ids of each word at the beginning of a text, and its ids after a space.

    vLLM itself drops the ids after a space if their number differs from the number without a space. Then it does not
    block the word after a space.
    """
    texts = [space + word.lstrip() for word in words for space in ("", " ")]
    ids = dict.fromkeys(tuple(encode(text)) for text in texts)
    return [list(each) for each in ids if each]


CONSTRAINT_CACHE_ENTRIES: Final = 1024
"""Maximum number of valid constraints in the cache; a run has few."""


def cache_constraint_checks(kind: type[Any]) -> type[Any]:
    """Return a subclass of vLLM's `SamplingParams` that checks each constraint once instead of once per request.

    vLLM parses the grammar of each request in the caller's event loop. This is a quarter of the cost of a short turn.

    Args:
        kind: vLLM's class `SamplingParams`.

    Returns:
        A subclass with its own cache, for the requests of one engine; `kind` itself if this vLLM has no such check.
    """
    method = "_validate_structured_outputs"
    if not hasattr(kind, method):  # another version of vLLM
        return kind
    valid: dict[Any, dict[str, Any]] = {}

    def validate(self: Any, *arguments: Any) -> None:
        constraint = self.structured_outputs
        key = None if constraint is None else tuple(vars(constraint).items())
        try:
            after = valid.get(key)
        except TypeError:  # the constraint contains a list or a dict, which is not hashable
            key = after = None
        if after is not None:
            vars(constraint).update(after)
            return
        getattr(kind, method)(self, *arguments)
        if key is not None:
            if len(valid) >= CONSTRAINT_CACHE_ENTRIES:
                valid.clear()
            valid[key] = dict(vars(constraint))

    body = {method: validate, "__module__": __name__}
    checked: type[Any] = new_class("CheckedOnce", (kind,), exec_body=lambda made: made.update(body))
    return checked


class RequestConverter:
    """Converter of requests to vLLM's prompts and sampling parameters; imports vLLM.

    Args:
        stream_interval: number of ids in a delta; 1 for a request with `acts_on_deltas`.
        encode: function of the engine's tokenizer that encodes a text, for bad words.
    """

    def __init__(self, stream_interval: int, encode: Callable[[str], Sequence[int]]) -> None:
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        self._stream_interval = stream_interval
        self._prompt = tokens_input
        self._parameters = cache_constraint_checks(SamplingParams)
        self._constraint = StructuredOutputsParams
        self._kind = RequestOutputKind.DELTA
        self._known = frozenset(SamplingParams.__struct_fields__)
        self._bad_word_ids = lru_cache(16)(partial(bad_word_ids, encode=encode))

    def __call__(self, request: GenerationRequest) -> tuple[Any, Any]:
        arguments = sampling_arguments(request, stream_interval=self._stream_interval, known=self._known)
        if request.constraint is not None:
            arguments["structured_outputs"] = self._constraint(**constraint_arguments(request.constraint))
        if request.sampling.bad_words:
            arguments |= self._bad_words(tuple(request.sampling.bad_words))
        if "skip_clone" in self._known:  # the parameters are made for this request only
            arguments["skip_clone"] = True
        # The list is copied, since vLLM keeps it.
        return self._prompt(list(request.prompt)), self._parameters(output_kind=self._kind, **arguments)

    def _bad_words(self, words: tuple[str, ...]) -> dict[str, Any]:
        # This private field of vLLM has the ids of bad words. vLLM keeps a value that is set already.
        name = "_bad_words_token_ids"
        return {name: self._bad_word_ids(words)} if name in self._known else {"bad_words": list(words)}
