"""The server of a chat engine: OpenAI's client, its answers, and what went wrong with them. openai is here alone."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import anyio

from runner.engines.http_engine import server_address
from runner.engines.http_retries import FailureKind, HttpFailure, kind_of_status, retry_after_seconds
from runner.errors import BadOption
from runner.version import installed_version

if TYPE_CHECKING:
    import openai

__all__ = ["ChatAnswer", "ChatServer", "check_url", "require_openai", "too_long"]

_MAX_ERROR_CHARS: Final = 600
"""Characters of a server's error that are kept."""
_CLOSE_SECONDS: Final = 1.0
"""The seconds that closing a connection may take; it is shielded, and a network may not answer."""
_HTTP: Final = ("httpx", "httpx2", "httpcore", "httpcore2")
"""The libraries below OpenAI's client, whose errors it does not wrap in every version."""

# OpenAI, vLLM and SGLang, Anthropic, Gemini, Mistral, and what stands between them and clients.
_TOO_LONG: Final = re.compile(
    r"context_length_exceeded|maximum context length|prompt is too long|context[ _](?:length|window|size)|"
    r"too many (?:input )?tokens|input is too long|exceeds the maximum number of tokens|"
    r"input token count .* exceeds|larger than the maximum|request_too_large|prompt_too_long",
    re.IGNORECASE,
)
_OVERLOADED: Final = re.compile(r"overloaded|rate.?limit|too many requests|resource.?exhausted", re.IGNORECASE)
_FILTERED: Final = ("content_filter", "content_policy_violation", "ResponsibleAIPolicyViolation")
_UNPAID: Final = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active")
_CONTEXT: Final = re.compile(r"maximum context length (?:is|of) (\d+)|> (\d+) maximum", re.IGNORECASE)
_PROMPT: Final = re.compile(
    r"(?:resulted in|contains(?: at least)?|too long:) (\d+)|(\d+) (?:in the messages|input tokens)", re.IGNORECASE
)


def require_openai() -> None:
    """Return if the library is there that servers are asked with.

    Raises:
        BadOption: it is not; says how to install it.
    """
    try:
        import openai  # noqa: F401  # only whether it is there
    except ImportError:
        raise BadOption("A ChatEngine needs openai: pip install 'deltarunner[api]'.") from None


def check_url(url: str) -> str:
    """The address, if it is one of an HTTP server, without a secret in it.

    Raises:
        BadOption: it is not.
    """
    server_address(url, engine="ChatEngine", option="base_url", example="http://127.0.0.1:8000/v1")
    return url.rstrip("/")


def too_long(text: str) -> tuple[int, int]:
    """How many tokens a prompt has that does not fit and how many may be, by what a server says of it; 0 if unsaid."""
    prompt, context = (found.search(text) for found in (_PROMPT, _CONTEXT))
    return tuple(0 if each is None else int(next(filter(None, each.groups()))) for each in (prompt, context))  # type: ignore[return-value]  # two


class ChatAnswer:
    """The answer to one request, chunk by chunk.

    Args:
        stream: the chunks as OpenAI's client gives them.
        server: whose answer it is.
    """

    def __init__(self, stream: openai.AsyncStream[object], server: ChatServer) -> None:
        self._stream = stream
        self._chunks: AsyncIterator[object] = aiter(stream)
        self._server = server

    async def read(self) -> Mapping[str, Any] | None:
        """The next chunk; None at the end.

        Raises:
            HttpFailure: the server failed, or what came cannot be read.
        """
        with self._server.failures():
            chunk = await anext(self._chunks, None)
            if chunk is not None and not isinstance(chunk, Mapping):
                raise ValueError(f"a chunk that is no object: {chunk!r:.80}")
            return chunk

    async def close(self) -> None:
        """End the request: its connection is closed, unless the answer was read to its end."""
        # Shielded, since who was cancelled must not leave a connection open; bounded, since a network may not answer.
        with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSE_SECONDS), self._server.failures_ignored():
            await self._stream.close()


class ChatServer:
    """A server at an address, while it is used.

    Args:
        url: its address; None for OpenAI's.
        api_key: what lets requests in; None for nothing, and for OpenAI's own address what OPENAI_API_KEY has.
        headers: what every request has besides.
        seconds: how long it may take to begin an answer, and from one part of it to the next.
    """

    def __init__(self, url: str | None, *, api_key: str | None, headers: Mapping[str, str], seconds: float) -> None:
        self.url = url or ""
        """The address that requests go to; OpenAI's own once it is entered."""
        self._url = url
        self._api_key = api_key
        self._headers = dict(headers)
        self._seconds = seconds
        self._secrets: list[str] = []
        self._client: openai.AsyncOpenAI | None = None

    async def __aenter__(self) -> Self:
        """Make the client; nothing is sent.

        Raises:
            BadOption: openai is not installed, or there is no key for OpenAI's own address.
        """
        import openai

        # Another server is never sent what the environment has for OpenAI's: not its key, and not its organization.
        other = None if self._url is None else ""
        try:
            self._client = openai.AsyncOpenAI(
                api_key=self._api_key or (None if self._url is None else "none"),
                base_url=self._url,
                organization=other,
                project=other,
                max_retries=0,
                timeout=openai.Timeout(self._seconds, pool=None),
                default_headers=self._headers,
            )
        except openai.OpenAIError as error:
            raise BadOption(f"ChatEngine: {error}") from None
        if self._url is not None:
            self._client.organization = self._client.project = None  # else both are sent, empty
        self.url = str(self._client.base_url).rstrip("/")
        keys = (self._client.api_key, *self._headers.values())
        # Not "none", which stands for no key above: struck out, it would be missing in every error that says the word.
        self._secrets = [key for key in keys if isinstance(key, str) and len(key) > 4]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        client, self._client = self._client, None
        if client is not None:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSE_SECONDS):
                await client.close()

    @property
    def software(self) -> dict[str, str]:
        """The version of the client."""
        version = installed_version("openai")
        return {} if version is None else {"openai": version}

    async def open(self, body: Mapping[str, Any]) -> ChatAnswer:
        """Send a request, and return when its answer begins.

        Raises:
            HttpFailure: there is none.
        """
        import openai

        # As data and not as the client's own types, which leave out what other servers say, and cost more per chunk.
        with self.failures():
            stream = await self._running.post(
                "/chat/completions",
                cast_to=object,
                body=dict(body),
                stream=True,
                stream_cls=openai.AsyncStream[object],
            )
        return ChatAnswer(stream, self)

    @property
    def _running(self) -> openai.AsyncOpenAI:
        assert self._client is not None, "it is used inside its block alone"
        return self._client

    # --- what went wrong

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Whatever goes wrong inside comes out as an HttpFailure, without a secret in its text."""
        import openai

        try:
            yield
        except openai.APITimeoutError as error:
            raise HttpFailure(FailureKind.TIMEOUT, f"nothing came for {self._seconds:g} s") from error
        except openai.APIStatusError as error:
            raise self._refusal(error) from error
        except openai.APIConnectionError as error:
            raise HttpFailure(FailureKind.CONNECTION, self._clean(_causes(error))) from error
        except openai.APIError as error:  # in the middle of an answer
            raise self._failure_told(error) from error
        except (ValueError, TypeError) as error:
            text = self._clean(f"the answer cannot be read ({type(error).__name__}: {error})")
            raise HttpFailure(FailureKind.GARBAGE, text) from error
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in _HTTP:
                raise
            kind = FailureKind.TIMEOUT if "Timeout" in type(error).__name__ else FailureKind.CONNECTION
            raise HttpFailure(kind, self._clean(_causes(error))) from error

    @contextmanager
    def failures_ignored(self) -> Iterator[None]:
        """Whatever goes wrong with a connection that is closed anyway changes nothing."""
        try:
            with self.failures():
                yield
        except HttpFailure:
            pass

    def _refusal(self, error: openai.APIStatusError) -> HttpFailure:
        status, headers = error.status_code, error.response.headers
        kind = self._kind(error, kind_of_status(status))
        if status == 413:
            kind = FailureKind.TOO_LONG
        after = retry_after_seconds(headers.get("retry-after"))
        milliseconds = retry_after_seconds(headers.get("retry-after-ms"))
        if milliseconds is not None:
            after = milliseconds / 1000
        should = headers.get("x-should-retry")
        if should == "false":
            after = math.inf
        elif should == "true" and kind is FailureKind.BAD_REQUEST:
            kind = FailureKind.SERVER
        return HttpFailure(kind, self._clean(f"HTTP {status}: {_message(error)}"), after)

    def _failure_told(self, error: openai.APIError) -> HttpFailure:
        told = " ".join(filter(None, (error.code, error.type, error.message)))
        default = FailureKind.BUSY if _OVERLOADED.search(told) else FailureKind.SERVER
        if error.code is not None and error.code.isdecimal() and 400 <= int(error.code) < 600:
            default = kind_of_status(int(error.code))
        return HttpFailure(self._kind(error, default), self._clean(_message(error)))

    def _kind(self, error: openai.APIError, default: FailureKind) -> FailureKind:
        codes = {error.code, error.type}
        inner = error.body.get("innererror") if isinstance(error.body, Mapping) else None
        if isinstance(inner, Mapping):  # Azure's
            codes.add(inner.get("code"))
        if not codes.isdisjoint(_UNPAID):  # a 429 that waiting does not mend
            return FailureKind.REFUSED
        if default in (FailureKind.BAD_REQUEST, FailureKind.SERVER):
            if not codes.isdisjoint(_FILTERED):
                return FailureKind.FILTERED
            if _TOO_LONG.search(" ".join(filter(None, (error.code, error.type, error.message)))):
                return FailureKind.TOO_LONG
        return default

    def _clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return " ".join(text.split())[:_MAX_ERROR_CHARS]


def _message(error: openai.APIError) -> str:
    """What the server says; its whole answer where that is in no known form."""
    body = error.body
    told = body.get("message") if isinstance(body, Mapping) else body
    if isinstance(told, str) and told.strip():
        return told
    response = getattr(error, "response", None)
    reason = getattr(response, "reason_phrase", "")
    return error.message if body is not None else reason or error.message


def _causes(error: BaseException) -> str:
    cause = error.__cause__ or error.__context__ or error
    return f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
