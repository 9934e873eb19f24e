"""Probe of a server before a run: model, vocabulary, sizes, and the request for one id."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from runner.engines.base import GenerationRequest
from runner.engines.http_retries import FailureKind, HttpFailure
from runner.engines.remote.dialect import Call, Dialect, ServerDialect
from runner.engines.remote.server import RemoteServer
from runner.engines.remote.sglang import SglangGenerate
from runner.engines.remote.vllm import Completions, VllmGenerate
from runner.errors import BadModel, BadOption, EngineError
from runner.options import Sampling
from runner.tokens.tokenizer import Tokenizer

__all__ = ["ServedModel", "ServerInfo", "ServerProbe", "compare_vocabularies", "probe_request", "served_models"]

_DIALECTS: Final[Mapping[ServerDialect, Dialect]] = {
    dialect.name: dialect for dialect in (VllmGenerate(), Completions(), SglangGenerate())
}

_TEXTS: Final = (
    "The quick brown fox jumps over the lazy dog.\n\n",
    "def add(a, b):\n\treturn a + b  # 1234567890 3.14159 0xFF\n",
    "Füße, naïve façade — “quotes”, …\u00a0\u200b é\u0065\u0301",
    "你好世界。こんにちは 안녕하세요 Привет мир שלום مرحبا",
    '{"name": "add", "arguments": {"a": 17, "b": -25}} [add(a=1, b=2)] <tool_call> </think> 👩‍👩‍👧 🙂',
)
_MANY_TOKENS: Final = 400
"""Maximum number of control tokens in one text of `_control_texts`."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Model in a server's list."""

    name: str
    root: str
    """Folder or id that the server loaded the model from."""
    context: int | None
    """Maximum number of ids of prompt and turn together; None if the list does not have it."""
    adapters: tuple[str, ...] = ()
    """Names of the model's LoRA adapters, as requests name them."""
    owner: str = ""
    """Kind of the server, as the server reports it, such as "vllm" or "sglang"."""


def served_models(answer: Mapping[str, Any]) -> list[ServedModel]:
    """Return the models in an answer of `/v1/models`, each with its adapters."""
    cards: Sequence[Mapping[str, Any]] = answer["data"]
    models = [
        ServedModel(
            card["id"],
            card.get("root") or card["id"],
            card.get("max_model_len"),
            owner=str(card.get("owned_by") or "").lower(),
        )
        for card in cards
        if not card.get("parent")
    ]
    parents = {card["id"]: card["parent"] for card in cards if card.get("parent")}
    # A server with several names for one model lists one of them as the parent of all its adapters.
    roots = {model.name: model.root for model in models}
    return [
        replace(model, adapters=tuple(name for name, parent in parents.items() if roots.get(parent) == model.root))
        for model in models
    ]


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Properties of a server."""

    dialect: Dialect
    model: ServedModel
    context: int
    """Maximum number of ids of prompt and turn together."""
    places: int | None
    """Maximum number of concurrent requests; None if unknown."""
    room: int | None
    """Size of the server's KV cache in ids; None if unknown."""
    software: str | None
    """Version of the server's software; None if unknown."""
    controlled: bool
    """True if the server can be paused."""


@dataclass(frozen=True, slots=True)
class ServerProbe:
    """Probe of one server.

    Args:
        server: the server.
        retry: function that waits until a failed request may be sent again; it returns False if the request may not.
        dialect: the server's protocol; None to detect it.
        name: the model's name on the server; None for its only model.
    """

    server: RemoteServer
    retry: Callable[[HttpFailure, int], Awaitable[bool]]
    dialect: ServerDialect | None
    name: str | None

    async def ask(self, call: Call) -> Any:
        """Send a request, with retries, and return its JSON.

        Raises:
            EngineError: the server does not answer, or answers with an error.
            BadOption: the server refuses the request.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self.server.ask(call)
            except HttpFailure as failure:
                if not await self.retry(failure, attempt):
                    raise _unusable(self.server.url, failure) from failure

    async def call_if_supported(self, call: Call) -> Any:
        """Send a request and return its JSON; None if it fails."""
        try:
            return await self.server.ask(call)
        except HttpFailure:
            return None

    async def probe(self, folder: Path, tokenizer: Tokenizer) -> ServerInfo:
        """Return the properties of the server. A server without the model of the folder is refused.

        Raises:
            BadModel: the server has no such model or several candidates, has another vocabulary, or reports no context.
            BadOption: the server refuses the key, or does not have the needed paths.
            EngineError: the server does not answer, or does not list its models.
        """
        model = self._chosen(await self.ask(Call("GET", "/v1/models")), folder)
        dialect = _DIALECTS[self.dialect or (ServerDialect.SGLANG if model.owner == "sglang" else ServerDialect.VLLM)]
        context = model.context
        for text in (*_TEXTS, *_control_texts(tokenizer)):
            body = {"model": model.name, "prompt": text, "add_special_tokens": False}
            said = await self.ask(Call("POST", "/tokenize", body))
            compare_vocabularies(self.server.url, tokenizer, text, said["tokens"])
            context = context or said.get("max_model_len")
        if not context:
            raise BadModel(
                f"{self.server.url} does not report the length of the context of {model.name!r}: update the server."
            )
        settings, software = (
            await self.call_if_supported(dialect.settings),
            await self.call_if_supported(dialect.version),
        )
        places, room = (None, None) if not isinstance(settings, Mapping) else dialect.places_in(settings)
        controlled = dialect.paused is not None and await self.call_if_supported(dialect.paused) is not None
        version = dialect.version_in(software) if isinstance(software, Mapping) else None
        return ServerInfo(dialect, model, context, places, room, version, controlled)

    def _chosen(self, answer: Any, folder: Path) -> ServedModel:
        try:
            models = served_models(answer)
        except (KeyError, TypeError, AttributeError):
            raise EngineError(f"{self.server.url}/v1/models lists no models. Give a model server's address.") from None
        listed = ", ".join(model.name for model in models)
        if not models:
            raise BadModel(f"{self.server.url} lists no model: start it with the model.")
        if self.name is not None:
            models = [model for model in models if model.name == self.name]
            if not models:
                raise BadModel(
                    f"{self.server.url} has no model {self.name!r}, only {listed}. Give the name of one of these "
                    "models as name=."
                )
        if len({model.root for model in models}) > 1:
            models = [model for model in models if folder.name in (Path(model.root).name, Path(model.name).name)]
            if len(models) != 1:
                raise BadModel(f"{self.server.url} has several models: {listed}. Choose one with name=.")
        return models[0]


def _control_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield texts that contain all control tokens of a vocabulary, with words between them."""
    names = [name for token_id in sorted(tokenizer.control_ids) if (name := tokenizer.decode([token_id]))]
    for start in range(0, len(names), _MANY_TOKENS):
        yield "".join(f"{name}word{number}" for number, name in enumerate(names[start : start + _MANY_TOKENS]))


def compare_vocabularies(url: str, tokenizer: Tokenizer, text: str, theirs: Sequence[int]) -> None:
    """Check that a server has the same ids for a text as the local tokenizer.

    Raises:
        BadModel: the server has other ids; the message has the first difference.
    """
    ours = tokenizer.encode(text)
    if list(theirs) == ours:
        return
    both = range(min(len(ours), len(theirs)))
    at = next((index for index in both if ours[index] != theirs[index]), len(both))
    before = tokenizer.decode(ours[max(0, at - 3) : at])

    def said(ids: Sequence[int]) -> str:
        if at >= len(ids):
            return "no further id"
        return f"the id {ids[at]} ({tokenizer.decode(ids[at : at + 1])!r} in the folder's vocabulary)"

    raise BadModel(
        f"{url} has another vocabulary than the model's folder. In the text {text[:60]!r}, after {before!r}, the "
        f"server has {said(theirs)}, and the folder {said(ours)}. Give the folder of the model that the server was "
        "started with."
    )


def probe_request(tokenizer: Tokenizer) -> GenerationRequest:
    """Return a request for one id, whose log-probability shows which distribution the server reports.

    A bias makes the id's probability nearly 1 in the sampling distribution; it is nearly 0 in the model's own
    distribution.
    """
    wanted = tokenizer.encode("~")[-1]
    sampling = replace(Sampling.defaults(), max_tokens=1, logit_bias={wanted: 100})
    return GenerationRequest(name="the first request", prompt=tokenizer.encode("The quick brown"), sampling=sampling)


def _unusable(url: str, failure: HttpFailure) -> Exception:
    if failure.kind is FailureKind.REFUSED and any(status in failure.text for status in ("401", "403")):
        return BadOption(f"{url} refuses the key: {failure}. Give its key as api_key=, or --server-key.")
    if failure.kind is FailureKind.REFUSED:
        return BadOption(f"{url} is not a server of vLLM or SGLang: {failure}.")
    return EngineError(f"{url} cannot be used: {failure}")
