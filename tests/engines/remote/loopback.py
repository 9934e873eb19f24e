"""A stand-in for model servers: a scripted engine over HTTP on this machine, with the answers of vLLM and SGLang.

Its fields are the fields of vLLM 0.32's endpoints (tests next to it compare them) and of SGLang 0.5.23's source (see
tests/interop/test_trainer_wheels.py). It imitates only the wire format: the script sets the sampled text.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from aiohttp import web

from runner.engines.base import Delta, Finish, FinishReason, GenerationRequest
from runner.engines.remote.dialect import ServerDialect
from runner.engines.state import PauseMode
from runner.options import Constraint, ConstraintKind, Sampling
from runner.testing import ScriptedEngine
from runner.tokens.log import VersionSpan
from tests.engines.troubles import Trouble

__all__ = ["Loopback", "serving"]

_SPECIAL = {"min_tokens": "min_new_tokens", "max_tokens": "max_new_tokens"}
_FIELDS = ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "temperature")


@dataclass
class Loopback:
    """A server, and the requests that it received.

    Each request takes the next of `troubles`, except the request for one id that an engine sends when it starts.
    """

    engine: ScriptedEngine
    dialect: ServerDialect = ServerDialect.VLLM
    name: str = "scripted"
    adapters: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    """Further models that it serves."""
    troubles: list[Trouble] = field(default_factory=list)
    key: str | None = None
    raw: bool = False
    """True if its log-probabilities are the model's own."""
    developed: bool = True
    """True if it has control calls, like vLLM in development mode."""
    incremental: bool = False
    """True if SGLang's chunks contain only new ids."""
    reset_status: int = 200
    """Status of the answer to the request that drops cached prompts."""
    cut_after: int | None = None
    """Number of ids after which every connection is closed."""
    tokenize: Callable[[str], list[int]] | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of the sampling requests, in order, without the first request for one id."""
    chunks: list[dict[str, Any]] = field(default_factory=list)
    """Answers to the requests."""
    open: int = 0
    """Requests that are being answered."""
    most_open: int = 0
    """Largest number of simultaneous requests."""
    url: str = ""
    asleep: set[str] = field(default_factory=set)
    paused: bool = False
    site: web.TCPSite | None = None

    async def vanish(self) -> None:
        """Stop accepting connections. It may be called twice."""
        site, self.site = self.site, None
        if site is not None:
            await site.stop()

    # --- requests for information

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._authenticated])
        routes: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {
            "GET /v1/models": self._models,
            "POST /tokenize": self._tokenize,
            "GET /health": self._health,
        }
        if self.dialect is ServerDialect.SGLANG:
            routes |= {"POST /generate": self._generate, "GET /server_info": self._sglang_info}
        else:
            routes |= {"GET /version": self._version, "POST /v1/completions": self._generate}
        if self.dialect is ServerDialect.VLLM:
            routes |= {"POST /inference/v1/generate": self._generate}
        if self.developed:
            routes |= self._control()
        for route, handler in routes.items():
            method, path = route.split()
            app.router.add_route(method, path, handler)
        return app

    def _control(self) -> dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]:
        if self.dialect is ServerDialect.SGLANG:
            return {
                "GET /model_info": self._model_info,
                "POST /pause_generation": self._pause,
                "POST /continue_generation": self._resume,
                "POST /flush_cache": self._flush,
            }
        return {
            "GET /is_paused": self._is_paused,
            "GET /server_info": self._server_info,
            "POST /pause": self._pause,
            "POST /resume": self._resume,
            "POST /sleep": self._sleep,
            "POST /wake_up": self._wake_up,
            "POST /reset_prefix_cache": self._reset,
        }

    @web.middleware
    async def _authenticated(self, request: web.Request, handler: Any) -> web.StreamResponse:
        guarded = request.path.startswith(("/v1", "/inference", "/generate"))
        if guarded and self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _models(self, _: web.Request) -> web.Response:
        owner = "sglang" if self.dialect is ServerDialect.SGLANG else "vllm"
        base = {"id": self.name, "object": "model", "owned_by": owner, "root": f"/models/{self.name}"}
        cards = [{**base, "parent": None, "max_model_len": self.engine.context}]
        cards += [{**cards[0], "id": name, "root": f"/models/{name}"} for name in self.others]
        cards += [{**base, "id": name, "root": f"/loras/{name}", "parent": self.name} for name in self.adapters]
        return web.json_response({"object": "list", "data": cards})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["add_special_tokens"] is False
        ids = (self.tokenize or self.engine.tokenizer.encode)(body["prompt"])
        return web.json_response({"count": len(ids), "max_model_len": self.engine.context, "tokens": ids})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.engine.is_alive() else 503)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _server_info(self, _: web.Request) -> web.Response:
        scheduler = {"max_num_seqs": self.engine.places}
        cache = {"num_gpu_blocks": 1000, "block_size": 32}
        return web.json_response({"vllm_config": {"scheduler_config": scheduler, "cache_config": cache}})

    async def _sglang_info(self, _: web.Request) -> web.Response:
        places = self.engine.places
        return web.json_response({"max_running_requests": places, "max_total_num_tokens": 32_000, "version": "0.5.23"})

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": self.name, "weight_version": self.engine.weight_version})

    # --- requests of its trainer

    async def _is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode") or (await request.json())["mode"]
        await self.engine.runtime.pause(PauseMode.ABORT if mode == "abort" else PauseMode.KEEP)
        self.paused = True
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        await self.engine.runtime.resume()
        self.paused = False
        return web.json_response({"status": "resumed"})

    async def _sleep(self, request: web.Request) -> web.Response:
        await self.engine.runtime.pause(PauseMode.ABORT)
        self.asleep = {"weights", "kv_cache"}
        return web.json_response({"status": "sleeping", "level": int(request.query["level"])})

    async def _wake_up(self, request: web.Request) -> web.Response:
        self.asleep -= set(request.query.getall("tags", ["weights", "kv_cache"]))
        if not self.asleep:  # as vLLM does with the last part
            await self.engine.runtime.resume()
        return web.json_response({"status": "sleeping" if self.asleep else "awake"})

    async def _reset(self, _: web.Request) -> web.Response:
        if self.reset_status != 200:
            return web.json_response({"error": "refused"}, status=self.reset_status)
        return web.json_response({"success": True})

    async def _flush(self, _: web.Request) -> web.Response:
        return web.Response(text="Cache flushed.\n")

    # --- sampling

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        parameters = body.get("sampling_params", body)
        bias = {int(token_id): value for token_id, value in (parameters.get("logit_bias") or {}).items()}
        certain = next((token_id for token_id, value in bias.items() if value == 100), None)
        if certain is None:
            self.bodies.append(body)
            if self.troubles and (answer := await self.troubles.pop(0)(request)) is not None:
                return answer
        if not body.get("stream"):
            return await self._scores(body, parameters)
        asked = self._asked(request, body, parameters)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.enable_chunked_encoding()
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await response.prepare(request)
            deltas = self._one(certain) if certain is not None else self._said(asked)
            await self._answer(request, response, asked, deltas, kept=certain is None)
        finally:
            self.open -= 1
        return response

    async def _scores(self, body: Mapping[str, Any], parameters: Mapping[str, Any]) -> web.Response:
        """The log-probability of each id of a prompt, as the answer to a request that is not streamed."""
        prompt = body.get("token_ids") or body.get("input_ids") or body["prompt"]
        scores = await self.engine.score(prompt)
        if self.dialect is ServerDialect.SGLANG:
            assert (body["logprob_start_len"], body["return_logprob"]) == (0, True)
            said = [[score, token_id, None] for score, token_id in zip([None, *scores], prompt, strict=True)]
            return web.json_response({"meta_info": {"input_token_logprobs": said, "completion_tokens": 1}})
        assert (parameters["prompt_logprobs"], parameters["max_tokens"]) == (0, 1)
        rows = [
            {str(token_id): {"logprob": _finite(score), "rank": 1, "decoded_token": None}}
            for score, token_id in zip(scores, prompt[1:], strict=True)
        ]
        fields = {"prompt_logprobs": [None, *rows]}
        if self.dialect is ServerDialect.VLLM:
            return web.json_response({"request_id": "generate-tokens-0", "choices": [{"token_ids": [1]}], **fields})
        return web.json_response({"choices": [{"text": "a", "token_ids": [1], **fields}]})

    async def _one(self, certain: int) -> AsyncGenerator[Delta]:
        """Return the answer to a request for one id with a log-probability of almost 0."""
        versions = (VersionSpan(self.engine.weight_version, 0, 1),)
        yield Delta([certain], [-7.5 if self.raw else 0.0], Finish(FinishReason.LENGTH, versions=versions))

    async def _said(self, asked: GenerationRequest) -> AsyncGenerator[Delta]:
        async with self.engine.stream(asked) as stream:
            async for delta in stream:
                yield delta

    async def _answer(
        self,
        request: web.Request,
        response: web.StreamResponse,
        asked: GenerationRequest,
        deltas: AsyncGenerator[Delta],
        *,
        kept: bool,
    ) -> None:
        write, sent = self._writer(asked), 0
        async with aclosing(deltas) as said:
            async for delta in said:
                sent += len(delta.token_ids)
                for chunk in write(delta):
                    if kept:
                        self.chunks.append(chunk)
                    await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
                if kept and self.cut_after is not None and sent >= self.cut_after:
                    assert request.transport is not None
                    request.transport.close()
                    return
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()

    def _asked(self, request: web.Request, body: Mapping[str, Any], parameters: Mapping[str, Any]) -> GenerationRequest:
        prompt = body.get("token_ids") or body.get("input_ids") or body["prompt"]
        sampling = replace(
            Sampling.defaults(),
            **{name: parameters[name] for name in _FIELDS},
            **{name: parameters[_SPECIAL[name] if _SPECIAL[name] in parameters else name] for name in _SPECIAL},
            logprobs=self._count(body, parameters),
            stop_ids=tuple(parameters["stop_token_ids"]),
            adapter=None,
        )
        constraint = parameters.get("structured_outputs")
        return GenerationRequest(
            name=request.headers.get("X-Request-Id", "served/main/0"),
            prompt=prompt,
            sampling=sampling,
            stop_ids=tuple(parameters["stop_token_ids"]),
            seed=parameters.get("seed", parameters.get("sampling_seed")),
            constraint=Constraint(ConstraintKind.JSON, json.dumps(constraint)) if constraint else None,
            acts_on_deltas=parameters.get("stream_interval", 1) == 1,
            extra={"masks": body.get("return_sampling_mask", False)},
        )

    def _count(self, body: Mapping[str, Any], parameters: Mapping[str, Any]) -> int:
        if self.dialect is ServerDialect.SGLANG:
            return int(body["top_logprobs_num"])
        asked = int(parameters["logprobs"])
        # vLLM counts the sampled id, which is first, and leaves out the last of the most likely ids.
        return max(0, asked - 1) if "token_ids" in body else asked

    def _writer(self, asked: GenerationRequest) -> Callable[[Delta], list[dict[str, Any]]]:
        if self.dialect is ServerDialect.SGLANG:
            return SglangWriter(asked, self.incremental, self.engine.weight_version)
        return VllmWriter(asked) if self.dialect is ServerDialect.VLLM else CompletionsWriter(asked)


def _tops(delta: Delta) -> list[list[tuple[int, float]]]:
    """Return the most likely ids of each position, after the sampled id, as vLLM's engine does."""
    rows = (
        [] if delta.top is None else zip(delta.top.id_rows().tolist(), delta.top.logprob_rows().tolist(), strict=True)
    )
    most_likely = [list(zip(ids, logprobs, strict=True)) for ids, logprobs in rows] or [[] for _ in delta.token_ids]
    sampled = zip(delta.token_ids, delta.logprobs or (), strict=True)
    return [
        [one, *(other for other in others if other[0] != one[0])]
        for one, others in zip(sampled, most_likely, strict=True)
    ]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else -9999.0


class VllmWriter:
    """The chunks of vLLM's `/inference/v1/generate`."""

    def __init__(self, asked: GenerationRequest) -> None:
        self._asked = asked
        self._sent = 0

    def __call__(self, delta: Delta) -> list[dict[str, Any]]:
        self._sent += len(delta.token_ids)
        kept = (self._asked.sampling.logprobs or 0) + 1
        content = []
        for row in _tops(delta):
            entries = [
                {"token_id": token_id, "logprob": _finite(logprob), "rank": None} for token_id, logprob in row[:kept]
            ]
            content.append({**entries[0], "top_logprobs": entries})
        finish = delta.finish
        versions = finish and [
            {"version": span.version, "start": span.start, "end": span.end} for span in finish.versions
        ]
        choice = {
            "index": 0,
            "finish_reason": finish and finish.reason.value,
            "stop_reason": finish and finish.stop,
            "token_ids": list(delta.token_ids),
            "routed_experts": delta.side and delta.side.experts and _npy(delta.side.experts.numbers()),
            "sampling_mask": delta.side and delta.side.masks and delta.side.masks.rows(),
            "weight_versions": versions,
            "logprobs": {"content": content},
        }
        named = {"request_id": "generate-tokens-0", "output_mode": "tokens"}
        chunks: list[dict[str, Any]] = [{**named, "usage": None, "choices": [choice]}]
        if finish is not None:
            chunks.append({**named, "usage": _usage(self._asked, self._sent), "choices": []})
        return chunks


class CompletionsWriter:
    """The chunks of vLLM's `/v1/completions`."""

    def __init__(self, asked: GenerationRequest) -> None:
        self._asked = asked
        self._sent = 0

    def __call__(self, delta: Delta) -> list[dict[str, Any]]:
        self._sent += len(delta.token_ids)
        names = [f"token_id:{token_id}" for token_id in delta.token_ids]
        logprobs = {
            "text_offset": [0] * len(names),
            "token_logprobs": [_finite(value) for value in delta.logprobs or ()],
            "tokens": names,
            "top_logprobs": [{f"token_id:{each}": _finite(value) for each, value in row} for row in _tops(delta)],
        }
        finish = delta.finish
        choice = {
            "index": 0,
            "text": "",
            "logprobs": logprobs if names else None,
            "finish_reason": finish and finish.reason.value,
            "stop_reason": finish and finish.stop,
            "prompt_token_ids": None,
            "token_ids": list(delta.token_ids),
        }
        named = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "scripted"}
        chunks: list[dict[str, Any]] = [{**named, "choices": [choice]}]
        if finish is not None:
            chunks.append({**named, "choices": [], "usage": _usage(self._asked, self._sent)})
        return chunks


class SglangWriter:
    """The chunks of SGLang's `/generate`."""

    def __init__(self, asked: GenerationRequest, incremental: bool, version: str) -> None:
        self._asked = asked
        self._incremental = incremental
        self._version = version
        self._ids: list[int] = []
        self._logprobs: list[tuple[float, int, None]] = []
        self._tops: list[list[tuple[float, int, None]]] = []
        self._masks: list[list[int]] = []
        self._experts = ""

    def __call__(self, delta: Delta) -> list[dict[str, Any]]:
        if delta.side is not None and delta.side.masks is not None:
            self._masks += delta.side.masks.rows()
        if delta.side is not None and delta.side.experts is not None:
            flat = delta.side.experts.numbers().astype(np.int32).tobytes()
            self._experts = base64.b64encode(flat).decode()
        sampled = zip(delta.logprobs or (), delta.token_ids, strict=True)
        new = len(delta.token_ids)
        self._ids += delta.token_ids
        self._logprobs += [(logprob, token_id, None) for logprob, token_id in sampled]
        if delta.top is not None:
            rows = zip(delta.top.logprob_rows().tolist(), delta.top.id_rows().tolist(), strict=True)
            self._tops += [[(value, each, None) for value, each in zip(*row, strict=True)] for row in rows]
        finish, start = delta.finish, len(self._ids) - new if self._incremental else 0
        ending: dict[str, Any] | None = None
        if finish is not None:
            ending = {"type": finish.reason.value, "length": len(self._ids), "matched": finish.stop}
        meta: dict[str, Any] = {
            "id": "0",
            "finish_reason": ending,
            "prompt_tokens": len(self._asked.prompt),
            "weight_version": finish.versions[-1].version if finish and finish.versions else self._version,
            "completion_tokens": len(self._ids),
            "cached_tokens": 0,
            "output_token_logprobs": self._logprobs[start:],
        }
        if self._asked.sampling.logprobs:
            meta["output_top_logprobs"] = self._tops[start:]
        if self._masks and self._asked.extra["masks"]:
            meta["output_token_sampling_mask"] = self._masks[start:]
            meta["output_token_sampling_logprobs"] = [value for value, _, _ in self._logprobs[start:]]
        if finish is not None and self._experts:
            meta["routed_experts"] = self._experts
        if finish is not None and finish.versions:
            meta["weight_versions"] = [asdict(span) for span in finish.versions]
        return [{"text": "", "output_ids": self._ids[start:], "meta_info": meta}]


def _npy(array: Any) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def _usage(asked: GenerationRequest, sent: int) -> dict[str, Any]:
    length = len(asked.prompt)
    details = {"cached_tokens": 0}
    return {
        "prompt_tokens": length,
        "total_tokens": length + sent,
        "completion_tokens": sent,
        "prompt_tokens_details": details,
    }


@asynccontextmanager
async def serving(engine: ScriptedEngine, **settings: Any) -> AsyncIterator[Loopback]:
    """Serve the engine on a free port of this machine, on this event loop."""
    loopback = Loopback(engine, **settings)
    runner = web.AppRunner(loopback.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    async with engine:
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            loopback.url, loopback.site = f"http://{host}:{port}", site
            yield loopback
        finally:
            await runner.cleanup()
