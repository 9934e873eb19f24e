"""What a server is asked before a run begins: its model, its vocabulary, its sizes, and one id."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from runner.engines.base import GenerationRequest
from runner.engines.http_retries import FailureKind, HttpFailure
from runner.engines.remote.dialect import Call, Dialect, ServerDialect
from runner.engines.remote.server import Server
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
"""So many control tokens are put into one text."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a server lists."""

    name: str
    """By which it is asked for."""
    root: str
    """The folder or the id that the server loaded it from."""
    context: int | None
    """The most ids of a prompt and what is sampled on it."""
    adapters: tuple[str, ...] = ()
    """The LoRA adapters on it, by the names that they are asked for."""
    owner: str = ""
    """The kind of server, by its own word: "vllm" or "sglang"."""


def served_models(answer: Mapping[str, Any]) -> list[ServedModel]:
    """The models in an answer of `/v1/models`, each with its adapters."""
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
    # A server that has one model under several names says one of them for the parent of all its adapters.
    roots = {model.name: model.root for model in models}
    return [
        replace(model, adapters=tuple(name for name, parent in parents.items() if roots.get(parent) == model.root))
        for model in models
    ]


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server said when it was asked who it is."""

    dialect: Dialect
    """The protocol that the server speaks."""
    model: ServedModel
    """The model that requests name."""
    context: int
    """The most ids that a prompt and what is sampled on it may have together."""
    places: int | None
    """The most requests that it runs at once; None where it does not say."""
    room: int | None
    """The ids that its cache holds; None where it does not say."""
    software: str | None
    """The version of the server's software; None where it does not say."""
    controlled: bool
    """Whether it can be paused."""


@dataclass(frozen=True, slots=True)
class ServerProbe:
    """Asks a server who it is.

    Args:
        server: the server.
        retry: waits until what failed may be asked again, and says whether it may.
        dialect: how it is to be spoken to; None to find out.
        name: the model's name on the server; None for the one that it has.
    """

    server: Server
    retry: Callable[[HttpFailure, int], Awaitable[bool]]
    dialect: ServerDialect | None
    name: str | None

    async def ask(self, call: Call) -> Any:
        """What it answers.

        Raises:
            EngineError: it does not answer, or not so.
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
        """What it answers, or None where it has no such path."""
        try:
            return await self.server.ask(call)
        except HttpFailure:
            return None

    async def probe(self, folder: Path, tokenizer: Tokenizer) -> ServerInfo:
        """What the server says of itself; one that is not the model in the folder is refused.

        Raises:
            BadModel: it has no such model, or another vocabulary.
            BadOption: it speaks no such dialect.
            EngineError: it does not answer.
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
            raise BadModel(f"{self.server.url} does not say how long the context of {model.name!r} is.")
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
            raise EngineError(f"{self.server.url}/v1/models lists no models: is this a server of models?") from None
        listed = ", ".join(model.name for model in models) or "none"
        if self.name is not None:
            models = [model for model in models if model.name == self.name]
            if not models:
                raise BadModel(f"{self.server.url} has no model {self.name!r}; it has {listed}. Give one as name=.")
        if not models:
            raise BadModel(f"{self.server.url} lists no model.")
        if len({model.root for model in models}) > 1:
            models = [model for model in models if folder.name in (Path(model.root).name, Path(model.name).name)]
            if len(models) != 1:
                raise BadModel(f"{self.server.url} has several models: {listed}. Give the one that is meant as name=.")
        return models[0]


def _control_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """All control tokens of a vocabulary, in texts with words between them."""
    names = [name for token_id in sorted(tokenizer.control_ids) if (name := tokenizer.decode([token_id]))]
    for start in range(0, len(names), _MANY_TOKENS):
        yield "".join(f"{name}word{number}" for number, name in enumerate(names[start : start + _MANY_TOKENS]))


def compare_vocabularies(url: str, tokenizer: Tokenizer, text: str, theirs: Sequence[int]) -> None:
    """Return if a server has the same ids for a text.

    Raises:
        BadModel: it has others; names the first.
    """
    ours = tokenizer.encode(text)
    if list(theirs) == ours:
        return
    both = range(min(len(ours), len(theirs)))
    at = next((index for index in both if ours[index] != theirs[index]), len(both))
    before = tokenizer.decode(ours[max(0, at - 3) : at])

    def said(ids: Sequence[int]) -> str:
        return f"{ids[at]} ({tokenizer.decode(ids[at : at + 1])!r} here)" if at < len(ids) else "nothing more"

    raise BadModel(
        f"{url} has another vocabulary than the model's folder: behind {before!r} of {text[:60]!r} it has the id "
        f"{said(theirs)}, and the folder {said(ours)}. Give the folder of the model that the server was started with."
    )


def probe_request(tokenizer: Tokenizer) -> GenerationRequest:
    """A request for one id, which a bias makes as good as certain: its log-probability says how those are reckoned.

    In the distribution that it is sampled from it has all the probability, in that of the model itself hardly any.
    """
    wanted = tokenizer.encode("~")[-1]
    sampling = replace(Sampling.defaults(), max_tokens=1, logit_bias={wanted: 100})
    return GenerationRequest(name="the first request", prompt=tokenizer.encode("The quick brown"), sampling=sampling)


def _unusable(url: str, failure: HttpFailure) -> Exception:
    if failure.kind is FailureKind.REFUSED and any(status in failure.text for status in ("401", "403")):
        return BadOption(f"{url} lets nobody in: {failure}. Give its key as api_key=, or --server-key.")
    if failure.kind is FailureKind.REFUSED:
        return BadOption(f"{url} is no server of vLLM or SGLang: {failure}.")
    return EngineError(f"{url} cannot be used: {failure}")
