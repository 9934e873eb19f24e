"""Client for the HTTP server of a chat engine, with its answers and failures. Only this module imports openai."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import anyio

from runner.engines.http_engine import ErrorTexts, server_address
from runner.engines.http_retries import FailureKind, HttpFailure, kind_of_status, retry_after_seconds
from runner.errors import BadOption
from runner.version import installed_version

if TYPE_CHECKING:
    import openai

__all__ = ["ChatAnswer", "ChatServer", "check_url", "require_openai", "too_long"]

_CLOSE_SECONDS: Final = 1.0
"""Time limit for closing a connection, in seconds. Closing is shielded, and a network may not answer."""
_PROBE_SECONDS: Final = 30.0
"""Time limit for the answer to a health check, in seconds."""
_GATEWAY_STATUSES: Final = (502, 503, 504)
"""HTTP statuses of a gateway whose server does not answer."""
_HTTP: Final = ("httpx", "httpx2", "httpcore", "httpcore2")
"""HTTP libraries of OpenAI's client. Some versions of the client do not wrap the errors of these libraries."""

# Error codes and messages of OpenAI, vLLM, SGLang, Anthropic, Gemini, Mistral, and of proxies.
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
    """Check that openai is installed.

    Raises:
        BadOption: openai is not installed; the message has the command that installs it.
    """
    try:
        import openai  # noqa: F401  # only to test the import
    except ImportError:
        raise BadOption("A ChatEngine needs openai: pip install 'deltarunner[api]'.") from None


def check_url(url: str) -> str:
    """Return the address of an HTTP server without a slash at its end; an address that contains a secret is refused.

    Raises:
        BadOption: the text is not an HTTP address, or contains a secret.
    """
    server_address(url, engine="ChatEngine", option="base_url", example="http://127.0.0.1:8000/v1")
    return url.rstrip("/")


def too_long(text: str) -> tuple[int, int]:
    """Return the token counts of prompt and context in the error text for a prompt that is too long; 0 if missing."""
    prompt, context = (found.search(text) for found in (_PROMPT, _CONTEXT))
    return tuple(0 if each is None else int(next(filter(None, each.groups()))) for each in (prompt, context))  # type: ignore[return-value]  # two


class ChatAnswer:
    """Answer to one request, chunk by chunk.

    Args:
        stream: the answer's chunks, from OpenAI's client.
        server: the server that answers.
    """

    def __init__(self, stream: openai.AsyncStream[object], server: ChatServer) -> None:
        self._stream = stream
        self._chunks: AsyncIterator[object] = aiter(stream)
        self._server = server

    async def read(self) -> Mapping[str, Any] | None:
        """Return the next chunk, or None at the end of the answer.

        Raises:
            HttpFailure: the server failed, or the chunk cannot be read.
        """
        with self._server.failures():
            chunk = await anext(self._chunks, None)
            if chunk is not None and not isinstance(chunk, Mapping):
                raise ValueError(f"a chunk that is not an object: {chunk!r:.80}")
            return chunk

    async def close(self) -> None:
        """End the request: close its connection, unless the answer was read to its end."""
        # The shield lets a cancelled task close its connection. The time limit is for a network that does not answer.
        with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSE_SECONDS), self._server.failures_ignored():
            await self._stream.close()


class ChatServer:
    """Client of the server at an address.

    Args:
        url: the server's address; None for the address in OPENAI_BASE_URL, or OpenAI's if this is not set.
        api_key: the API key. None means no key if `url` is given, and otherwise the key in OPENAI_API_KEY.
        headers: further headers of every request.
        seconds: time limit until an answer begins, and between its parts.
    """

    def __init__(self, url: str | None, *, api_key: str | None, headers: Mapping[str, str], seconds: float) -> None:
        self.url = url or ""
        """Address of the server; if the argument was None, "" until the client is entered."""
        self._url = url
        self._api_key = api_key
        self._headers = dict(headers)
        self._seconds = seconds
        self._errors = ErrorTexts(())
        self._client: openai.AsyncOpenAI | None = None

    async def __aenter__(self) -> Self:
        """Create the client; no request is sent.

        Raises:
            BadOption: a key is missing.
        """
        import openai

        # OpenAI's key and organization from the environment are never sent to another server.
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
            self._client.organization = self._client.project = None  # the client would send empty headers
        self.url = str(self._client.base_url).rstrip("/")
        keys = (self._client.api_key, *self._headers.values())
        self._errors = ErrorTexts(key for key in keys if isinstance(key, str))
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
        version = installed_version("openai")
        return {} if version is None else {"openai": version}

    async def open(self, body: Mapping[str, Any]) -> ChatAnswer:
        """Send a request, and return when its answer begins.

        Raises:
            HttpFailure: no answer began.
        """
        import openai

        # Chunks are read as plain data, since the client's types drop the fields of other servers, and are slower.
        with self.failures():
            stream = await self._running.post(
                "/chat/completions",
                cast_to=object,
                body=dict(body),
                stream=True,
                stream_cls=openai.AsyncStream[object],
            )
        return ChatAnswer(stream, self)

    async def probe(self) -> None:
        """Request the list of models. Other answers also prove that the server runs, such as 404 or a rejected key.

        Raises:
            HttpFailure: there is no connection or no answer in time, or a gateway does not reach the server.
        """
        import openai

        limit = min(self._seconds, _PROBE_SECONDS)
        try:
            with self.failures():
                await self._running.get("/models", cast_to=object, options={"timeout": limit})
        except HttpFailure as failure:
            status = getattr(failure.__cause__, "status_code", None)
            if isinstance(failure.__cause__, openai.APIStatusError) and status not in _GATEWAY_STATUSES:
                return
            if failure.kind is not FailureKind.GARBAGE:
                raise

    @property
    def _running(self) -> openai.AsyncOpenAI:
        assert self._client is not None, "the server is used outside of its block"
        return self._client

    # --- failures

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Convert errors inside the block to `HttpFailure`, without secrets in the text."""
        import openai

        try:
            yield
        except openai.APITimeoutError as error:
            raise HttpFailure(FailureKind.TIMEOUT, f"no data for {self._seconds:g} s") from error
        except openai.APIStatusError as error:
            raise self._refusal(error) from error
        except openai.APIConnectionError as error:
            raise HttpFailure(FailureKind.CONNECTION, self._errors.short(_causes(error))) from error
        except openai.APIError as error:  # an error in the middle of an answer
            raise self._failure_in_stream(error) from error
        except (ValueError, TypeError) as error:
            text = self._errors.short(f"the answer cannot be read ({type(error).__name__}: {error})")
            raise HttpFailure(FailureKind.GARBAGE, text) from error
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in _HTTP:
                raise
            kind = FailureKind.TIMEOUT if "Timeout" in type(error).__name__ else FailureKind.CONNECTION
            raise HttpFailure(kind, self._errors.short(_causes(error))) from error

    @contextmanager
    def failures_ignored(self) -> Iterator[None]:
        """Ignore failures of a connection that is being closed."""
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
        return HttpFailure(kind, self._errors.short(f"HTTP {status}: {_message(error)}"), after)

    def _failure_in_stream(self, error: openai.APIError) -> HttpFailure:
        text = " ".join(filter(None, (error.code, error.type, error.message)))
        default = FailureKind.BUSY if _OVERLOADED.search(text) else FailureKind.SERVER
        if error.code is not None and error.code.isdecimal() and 400 <= int(error.code) < 600:
            default = kind_of_status(int(error.code))
        return HttpFailure(self._kind(error, default), self._errors.short(_message(error)))

    def _kind(self, error: openai.APIError, default: FailureKind) -> FailureKind:
        codes = {error.code, error.type}
        inner = error.body.get("innererror") if isinstance(error.body, Mapping) else None
        if isinstance(inner, Mapping):  # Azure reports errors in this form
            codes.add(inner.get("code"))
        if not codes.isdisjoint(_UNPAID):  # the account has no credit, and retries cannot change that
            return FailureKind.REFUSED
        if default in (FailureKind.BAD_REQUEST, FailureKind.SERVER):
            if not codes.isdisjoint(_FILTERED):
                return FailureKind.FILTERED
            if _TOO_LONG.search(" ".join(filter(None, (error.code, error.type, error.message)))):
                return FailureKind.TOO_LONG
        return default


def _message(error: openai.APIError) -> str:
    """Return the message in the body of an error.

    If the body has no message, return the message of the `openai` client. If there is no body, return the HTTP reason
    phrase, or the client's message if that is missing too.
    """
    body = error.body
    message = body.get("message") if isinstance(body, Mapping) else body
    if isinstance(message, str) and message.strip():
        return message
    response = getattr(error, "response", None)
    reason = getattr(response, "reason_phrase", "")
    return error.message if body is not None else reason or error.message


def _causes(error: BaseException) -> str:
    cause = error.__cause__ or error.__context__ or error
    return f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
