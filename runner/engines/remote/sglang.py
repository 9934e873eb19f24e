"""SGLang's dialect: `POST /generate` with `input_ids`.

Paths and fields as in SGLang 0.5.23: `srt/entrypoints/http_server.py`, `GenerateReqInput` in
`srt/managers/io_struct.py`, `srt/sampling/sampling_params.py` and the answers of `srt/managers/tokenizer_manager.py`.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from runner.engines.base import FinishReason, GenerationRequest
from runner.engines.remote.dialect import Call, Dialect, Piece, PieceReader, ServerDialect
from runner.engines.state import PauseMode
from runner.errors import RequestRejected
from runner.options import Constraint, ConstraintKind
from runner.sampling_fields import SAMPLING_FIELDS
from runner.tokens.log import VersionSpan
from runner.tokens.side_data import RoutedExperts, SamplingMasks, SideData
from runner.tokens.top_logprobs import TopLogprobs

__all__ = ["SglangGenerate"]

_GRAMMARS = {
    ConstraintKind.JSON: "json_schema",
    ConstraintKind.REGEX: "regex",
    ConstraintKind.GRAMMAR: "ebnf",
    ConstraintKind.STRUCTURAL_TAG: "structural_tag",
}
_NAMES = {name: row.sglang for name, row in SAMPLING_FIELDS.items() if row.sglang}
_MODES = {PauseMode.WAIT: "in_place", PauseMode.KEEP: "in_place", PauseMode.ABORT: "abort"}


class SglangGenerate(Dialect):
    """SGLang's endpoint for token ids."""

    name = ServerDialect.SGLANG
    path = "/generate"
    missing = "is this a server of SGLang?"
    health = Call("GET", "/health")
    version = Call("GET", "/server_info")
    settings = Call("GET", "/server_info")
    # SGLang has no request for the pause state; a server with this path can be paused
    paused = Call("GET", "/model_info")
    control = "update it: from 0.5.8 on SGLang can be paused"

    def body(
        self, request: GenerationRequest, *, model: str, adapter: str | None, stream_interval: int
    ) -> dict[str, Any]:
        body = {
            "input_ids": list(request.prompt),
            "sampling_params": _parameters(request, stream_interval),
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": request.sampling.logprobs or 0,
            "stream": True,
        }
        # SGLang refuses to return masks without a top_k of at most --sampling-mask-max-tokens (4096 by default).
        if self.side.masks and request.sampling.top_k:
            body["return_sampling_mask"] = True
        if self.side.experts:
            body["return_routed_experts"] = True
        return body if adapter is None else {**body, "lora_path": adapter}

    def reader(self, request: GenerationRequest) -> PieceReader:
        return _SglangReader(request.sampling.logprobs or 0, self.side.experts, len(request.prompt))

    def scoring(self, request: GenerationRequest, *, model: str, adapter: str | None) -> Call:
        body = self.body(request, model=model, adapter=adapter, stream_interval=1)
        return Call("POST", self.path, {**body, "logprob_start_len": 0, "stream": False})

    def scores_in(self, answer: Mapping[str, Any], prompt: Sequence[int]) -> list[float]:
        said = answer["meta_info"]["input_token_logprobs"]
        if [each[1] for each in said] != list(prompt):
            raise ValueError("the log-probabilities are of other ids")
        return [float(each[0]) for each in said[1:]]

    def version_in(self, answer: Mapping[str, Any]) -> str | None:
        return answer.get("version")

    def places_in(self, answer: Mapping[str, Any]) -> tuple[int | None, int | None]:
        return answer.get("max_running_requests"), answer.get("max_total_num_tokens")

    def pause(self, mode: PauseMode) -> Call:
        return Call("POST", "/pause_generation", {"mode": _MODES[mode]})

    def resume(self) -> Call:
        return Call("POST", "/continue_generation", {})

    def reset_prefix_cache(self) -> Call:
        return Call("POST", "/flush_cache", json=False)


def _parameters(request: GenerationRequest, stream_interval: int) -> dict[str, Any]:
    sampling = request.sampling
    stops = list(request.all_stop_ids)
    if sampling.bad_words:
        raise RequestRejected(f"{request.name}: SGLang does not support bad_words; leave it out, or use logit_bias")
    if request.extra:
        named = ", ".join(request.extra)
        raise RequestRejected(f"{request.name}: SGLang takes no extra arguments ({named}): leave them out")
    if sampling.ignore_eos and stops:
        # With ignore_eos SGLang ignores all stop ids.
        raise RequestRejected(
            f"{request.name}: SGLang ignores stop_ids with ignore_eos; leave out stop_ids or ignore_eos"
        )
    parameters: dict[str, Any] = {
        **{name: getattr(sampling, ours) for ours, name in _NAMES.items()},
        "top_k": sampling.top_k or -1,
        "logit_bias": {str(token_id): bias for token_id, bias in (sampling.logit_bias or {}).items()} or None,
        "sampling_seed": request.seed,
        "stop_token_ids": stops,
        "skip_special_tokens": False,
        "stream_interval": 1 if request.acts_on_deltas else stream_interval,
    }
    if request.constraint is not None:
        parameters |= _grammar(request.constraint)
    return {name: value for name, value in parameters.items() if value is not None}


def _grammar(constraint: Constraint) -> dict[str, str]:
    if constraint.kind is ConstraintKind.CHOICE:
        return {"regex": "|".join(f"({re.escape(choice)})" for choice in json.loads(constraint.value))}
    return {_GRAMMARS[constraint.kind]: constraint.value}


class _SglangReader:
    """Reader of the chunks of `/generate`.

    A server with `--incremental-streaming-output` sends only new ids; other servers send all ids so far. Both report
    the number of ids so far, from which the reader derives the number of new ids.
    """

    def __init__(self, count: int, experts: int, prompt: int) -> None:
        self._count = count
        self._experts = experts
        self._prompt = prompt
        self._known = 0

    def read(self, chunk: Mapping[str, Any]) -> Piece:
        said = chunk["meta_info"]
        new = said["completion_tokens"] - self._known
        sampled = _last(said.get("output_token_logprobs") or (), new)
        ids = [each[1] for each in sampled]
        if "output_ids" in chunk and _last(chunk["output_ids"], new) != ids:
            raise ValueError("the log-probabilities are of other ids")
        logprobs = [each[0] for each in sampled]
        masks = None
        if "output_token_sampling_mask" in said:
            rows = _last(said["output_token_sampling_mask"], new)
            logprobs = _masked_logprobs(_last(said["output_token_sampling_logprobs"], new), rows, ids)
            masks = SamplingMasks.of(rows)
        self._known += new
        reason, stop = _ending(said["finish_reason"])
        spans = said.get("weight_versions")  # the versions of all ids, which come at the end
        experts = self._routed(said) if reason is not None else None
        return Piece(
            ids,
            logprobs,
            self._top(_last(said["output_top_logprobs"], new)) if self._count else None,
            reason,
            stop,
            # SGLang sends an empty span for an answer without ids.
            versions=spans
            and [VersionSpan(each["version"], each["start"], each["end"]) for each in spans if each["end"]],
            version=said.get("weight_version"),
            cached_tokens=said.get("cached_tokens"),
            processed=masks is not None,
            side=None if masks is None and experts is None else SideData(masks, experts),
        )

    def _routed(self, said: Mapping[str, Any]) -> RoutedExperts | None:
        """Return the experts of all positions but the last; None if none were requested or sent.

        The server sends int32 values without a shape.
        """
        text, positions = said.get("routed_experts"), self._prompt + self._known - 1
        if not text or not self._experts:
            return None
        import numpy as np  # imported late, since most servers send no experts

        flat = np.frombuffer(base64.b64decode(text), np.int32)
        return RoutedExperts.of(flat.reshape(positions, -1, self._experts))

    def _top(self, positions: Sequence[Sequence[Sequence[Any]]]) -> TopLogprobs:
        if any(len(row) < self._count for row in positions):
            raise ValueError(f"fewer than the {self._count} most likely ids")
        return TopLogprobs.of([{each[1]: each[0] for each in row} for row in positions], self._count)


def _masked_logprobs(given: Sequence[Any], rows: Sequence[Sequence[int]], ids: Sequence[int]) -> list[float]:
    """Return the log-probability of each sampled id.

    Newer servers send a list for each position, with a value for each possible id. Older ones send only the value of
    the sampled id.
    """
    return [
        float(value[row.index(token_id)] if isinstance(value, Sequence) else value)
        for value, row, token_id in zip(given, rows, ids, strict=True)
    ]


def _last(values: Sequence[Any], count: int) -> list[Any]:
    if not 0 <= count <= len(values):
        raise ValueError(f"{len(values)} ids where {count} are new")
    return list(values[len(values) - count :])


def _ending(said: Mapping[str, Any] | None) -> tuple[FinishReason | None, int | str | None]:
    if said is None:
        return None, None
    reason = FinishReason(said["type"])
    return reason, said["matched"] if reason is FinishReason.STOP else None
