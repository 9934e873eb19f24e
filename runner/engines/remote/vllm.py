"""vLLM's dialects: the endpoint for token ids, which needs a server option, and completions with ids as the prompt.

Fields as in vLLM 0.32, `entrypoints/scale_out/token_in_token_out/protocol.py` and `entrypoints/openai/completion`.
"""

from __future__ import annotations

import base64
import io
import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import urlencode

from runner.engines.base import FinishReason, GenerationRequest
from runner.engines.remote.dialect import Call, Dialect, Piece, PieceReader, ServerDialect
from runner.engines.state import PauseMode
from runner.engines.vllm.settings import constraint_arguments, sampling_arguments
from runner.errors import RequestRejected
from runner.tokens.log import VersionSpan
from runner.tokens.side_data import RoutedExperts, SamplingMasks, SideData
from runner.tokens.top_logprobs import TopLogprobs

__all__ = ["Completions", "VllmGenerate"]

_MIN_LOGPROB = -9999.0  # vLLM's value for minus infinity, which JSON does not have
_TOKEN = "token_id:"  # prefix of an id with `return_tokens_as_token_ids`

_Row: TypeAlias = Mapping[int, float]
"""Most likely ids at one position, with the log-probability of each."""


class _Vllm(Dialect):
    """Common base of vLLM's two dialects."""

    health = Call("GET", "/health")
    version = Call("GET", "/version")
    settings = Call("GET", "/server_info?config_format=json")
    paused = Call("GET", "/is_paused")
    control = "start it with the variable VLLM_SERVER_DEV_MODE=1"

    def scoring(self, request: GenerationRequest, *, model: str, adapter: str | None) -> Call:
        body = self.body(request, model=model, adapter=adapter, stream_interval=1)
        for parameters in (body, body.get("sampling_params", {})):
            for name in ("stream", "stream_options", "stream_interval"):
                parameters.pop(name, None)
        return Call("POST", self.path, body)

    def scores_in(self, answer: Mapping[str, Any], prompt: Sequence[int]) -> list[float]:
        said = answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"]
        return [_logprob(row[str(token_id)]["logprob"]) for row, token_id in zip(said[1:], prompt[1:], strict=True)]

    def version_in(self, answer: Mapping[str, Any]) -> str | None:
        return answer.get("version")

    def places_in(self, answer: Mapping[str, Any]) -> tuple[int | None, int | None]:
        config = answer["vllm_config"]
        cache = config["cache_config"]
        room = (cache.get("num_gpu_blocks") or 0) * (cache.get("block_size") or 0)
        return config["scheduler_config"].get("max_num_seqs"), room or None

    def pause(self, mode: PauseMode) -> Call:
        return Call("POST", f"/pause?mode={mode.value}&clear_cache=false")

    def resume(self) -> Call:
        return Call("POST", "/resume")

    def reset_prefix_cache(self) -> Call:
        return Call("POST", "/reset_prefix_cache?reset_running_requests=true")

    def sleep(self, level: int) -> Call:
        return Call("POST", f"/sleep?level={level}")

    def wake(self, tags: Sequence[str]) -> Call:
        return Call("POST", "/wake_up?" + urlencode([("tags", tag) for tag in tags]))


class VllmGenerate(_Vllm):
    """vLLM's endpoint for token ids."""

    name = ServerDialect.VLLM
    path = "/inference/v1/generate"
    missing = "start the server with --enable-scale-out, or give dialect='completions', which has no weight versions"

    def body(
        self, request: GenerationRequest, *, model: str, adapter: str | None, stream_interval: int
    ) -> dict[str, Any]:
        return {
            "model": adapter or model,
            "token_ids": list(request.prompt),
            "sampling_params": _parameters(request, stream_interval),
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def reader(self, request: GenerationRequest) -> PieceReader:
        return _GenerateReader(request.sampling.logprobs or 0)


def _parameters(request: GenerationRequest, stream_interval: int) -> dict[str, Any]:
    known = frozenset({"stream_interval"})
    parameters = sampling_arguments(request, stream_interval=stream_interval, known=known)
    del parameters["flat_logprobs"]  # internal to vLLM
    if parameters["logit_bias"]:
        parameters["logit_bias"] = {str(token_id): bias for token_id, bias in parameters["logit_bias"].items()}
    if parameters["logprobs"]:
        # vLLM counts the sampled id as one of the requested ids, so one more id is requested.
        parameters["logprobs"] += 1
    if request.constraint is not None:
        parameters["structured_outputs"] = constraint_arguments(request.constraint)
    if request.sampling.bad_words:
        parameters["bad_words"] = list(request.sampling.bad_words)
    return {name: value for name, value in parameters.items() if value is not None}


class _VllmReader:
    """Common base of the readers of vLLM's chunks."""

    def __init__(self, count: int) -> None:
        self._count = count

    def read(self, chunk: Mapping[str, Any]) -> Piece:
        cached = _cached_tokens(chunk)
        if not chunk["choices"]:
            return Piece(cached_tokens=cached)
        choice = chunk["choices"][0]
        ids, logprobs, rows = self._sampled(choice)
        spans = choice.get("weight_versions")
        return Piece(
            ids,
            [_logprob(each) for each in logprobs],
            _top_logprobs(list(rows), self._count) if self._count else None,
            _reason(choice["finish_reason"]),
            choice["stop_reason"],
            None if spans is None else [VersionSpan(span["version"], span["start"], span["end"]) for span in spans],
            cached_tokens=cached,
            side=_side(choice),
        )

    @abstractmethod
    def _sampled(self, choice: Mapping[str, Any]) -> tuple[Sequence[int], Iterable[float], Iterable[_Row]]:
        """Return the ids, the log-probability of each, and the most likely ids at each position."""


class _GenerateReader(_VllmReader):
    """Reader of the chunks of `/inference/v1/generate`."""

    def _sampled(self, choice: Mapping[str, Any]) -> tuple[Sequence[int], Iterable[float], Iterable[_Row]]:
        ids = choice["token_ids"] or ()
        content = (choice["logprobs"] or {}).get("content") or () if ids else ()
        if [each["token_id"] for each in content] != list(ids):
            raise ValueError("the log-probabilities are of other ids")
        rows = ({each["token_id"]: _logprob(each["logprob"]) for each in one["top_logprobs"]} for one in content)
        return ids, (each["logprob"] for each in content), rows


class Completions(_Vllm):
    """vLLM's completions with ids as the prompt."""

    name = ServerDialect.COMPLETIONS
    path = "/v1/completions"
    missing = "is this a server of vLLM?"

    def body(
        self, request: GenerationRequest, *, model: str, adapter: str | None, stream_interval: int
    ) -> dict[str, Any]:
        if request.extra:
            named = ", ".join(request.extra)
            raise RequestRejected(f"{request.name}: completions take no extra arguments ({named}): leave them out")
        parameters = _parameters(request, stream_interval)
        if count := request.sampling.logprobs:  # completions return the sampled id in addition
            parameters["logprobs"] = count
        for name in ("detokenize", "stream_interval"):
            parameters.pop(name, None)
        return {
            "model": adapter or model,
            "prompt": list(request.prompt),
            **parameters,
            "skip_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def reader(self, request: GenerationRequest) -> PieceReader:
        return _CompletionsReader(request.sampling.logprobs or 0)


class _CompletionsReader(_VllmReader):
    """Reader of the chunks of `/v1/completions`."""

    def _sampled(self, choice: Mapping[str, Any]) -> tuple[Sequence[int], Iterable[float], Iterable[_Row]]:
        ids = choice.get("token_ids")
        if ids is None:
            raise ValueError("the answer has no token ids; vLLM returns them since 0.10.2: update the server")
        said = choice["logprobs"] or {} if ids else {}
        rows = (
            {int(name.removeprefix(_TOKEN)): _logprob(value) for name, value in row.items()}
            for row in said.get("top_logprobs", ())
        )
        return ids, said.get("token_logprobs", ()), rows


def _side(choice: Mapping[str, Any]) -> SideData | None:
    masks, experts = choice.get("sampling_mask"), choice.get("routed_experts")
    if masks is None and experts is None:
        return None
    return SideData(
        None if masks is None else SamplingMasks.of(masks),
        None if experts is None else RoutedExperts.of(_decoded_array(experts)),
    )


def _decoded_array(text: str) -> Any:
    import numpy as np  # imported late, since most servers send no experts

    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def _top_logprobs(rows: Sequence[_Row], count: int) -> TopLogprobs:
    if any(len(row) < count for row in rows):
        raise ValueError(f"fewer than the {count} most likely ids")
    return TopLogprobs.of(rows, count)


def _logprob(value: float) -> float:
    return value if value > _MIN_LOGPROB else -math.inf


def _reason(name: str | None) -> FinishReason | None:
    return None if name is None else FinishReason(name)


def _cached_tokens(chunk: Mapping[str, Any]) -> int | None:
    usage = chunk.get("usage") or {}
    cached: int | None = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return cached
