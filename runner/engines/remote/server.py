"""HTTP client of a remote engine: connections, answers and failures. Only this module imports aiohttp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlunsplit

import anyio
import orjson
from anyio.lowlevel import checkpoint

from runner.engines.http_engine import ErrorTexts, server_address
from runner.engines.http_retries import FailureKind, HttpFailure, kind_of_status, retry_after_seconds
from runner.engines.remote.dialect import Call
from runner.errors import BadOption

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Answer", "RemoteServer", "base_url", "require_aiohttp"]

# This is shorter than the limit of servers (uvicorn: 5 s), so that no connection is used while it is being closed.
_KEEPALIVE_SECONDS = 2.0
_BUFFER_BYTES = 1 << 20  # maximum unread bytes of an answer; the server waits if there are more
_MAX_ERROR_BYTES = 1 << 16  # maximum bytes of an answer that are read for an error text


def require_aiohttp() -> None:
    """Check that aiohttp is installed.

    Raises:
        BadOption: aiohttp is not installed; the message has the command that installs it.
    """
    try:
        import aiohttp  # noqa: F401  # only to test the import
    except ImportError:
        raise BadOption("A RemoteEngine needs aiohttp: pip install 'deltarunner[remote]'.") from None


def base_url(given: str) -> str:
    """Return the address of a server without the `/v1` of OpenAI's clients.

    Raises:
        BadOption: the text is not the address of an HTTP server, or contains a secret.
    """
    parts = server_address(given, engine="RemoteEngine", option="url", example="http://127.0.0.1:8000")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


class Answer:
    """Answer to one request, as bytes.

    Args:
        response: the response of aiohttp.
        errors: filter for the error texts of the server.
    """

    def __init__(self, response: aiohttp.ClientResponse, errors: ErrorTexts) -> None:
        self._response = response
        self._content = response.content
        self._errors = errors

    async def read(self) -> bytes:
        """Return the bytes that arrived and were not read yet. If there are none, wait for some; b"" at the end.

        Raises:
            HttpFailure: the connection closed before the end of the answer.
        """
        with _failures(self._errors):
            return await self._content.readany()

    async def finished(self) -> None:
        """Read and drop the rest of the answer, and close it."""
        try:
            while await self.read():
                pass
        finally:
            self.close()

    def unread(self) -> bytes:
        """Return the bytes that arrived and were not read yet, without a wait."""
        data = []
        while not self._content.exception() and (some := self._content.read_nowait()):
            data.append(some)
        return b"".join(data)

    @property
    def arrived(self) -> bool:
        """True once the whole answer arrived, or the connection failed."""
        return self._content.is_eof() or self._content.exception() is not None

    def close(self) -> None:
        """End the request: close its connection, unless the answer was read to its end."""
        if self._content.at_eof():
            self._response.release()
        else:
            self._response.close()


class RemoteServer:
    """Client of the server at an address.

    Args:
        url: the server's address.
        api_key: the API key; None for no key.
        seconds: time limit until an answer begins. `ask` has the same limit again for the rest of the answer.
    """

    def __init__(self, url: str, *, api_key: str | None, seconds: float) -> None:
        self.url = url
        self.errors = ErrorTexts(() if api_key is None else (api_key,))
        """Filter that masks the key in error texts of the server."""
        self._seconds = seconds
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        import aiohttp

        self._session = aiohttp.ClientSession(
            # The gate limits the number of requests. aiohttp's own time limits are off, since they cancel the task
            # itself, which anyio's cancel scopes do not support.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            headers=self._headers,
            read_bufsize=_BUFFER_BYTES,
            max_line_size=1 << 16,
            max_field_size=1 << 16,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._session is not None
        with anyio.CancelScope(shield=True):
            await self._session.close()
            await checkpoint()  # the transports close one step of the event loop later

    async def open(self, call: Call) -> Answer:
        """Send a request, and return its answer once the answer has begun with the status 200.

        Raises:
            HttpFailure: no successful answer began in time.
        """
        assert self._session is not None
        body = None if call.body is None else orjson.dumps(call.body)
        with _failures(self.errors), self._in_time(call):
            response = await self._session.request(call.method, self.url + call.path, data=body, allow_redirects=False)
            if response.status == 200:
                return Answer(response, self.errors)
            try:
                text = await response.content.read(_MAX_ERROR_BYTES)
            finally:
                response.close()
        said = self.errors.short(_message(text))
        raise HttpFailure(
            FailureKind.GARBAGE if response.status < 400 else kind_of_status(response.status),
            f"{call.path} answered {response.status}{f': {said}' if said else ''}",
            retry_after_seconds(response.headers.get("Retry-After")),
        )

    async def ask(self, call: Call) -> Any:
        """Send a request and return the JSON of its answer; None if the answer is empty or not meant to be JSON.

        Raises:
            HttpFailure: no successful answer came in time, or the answer is not the JSON that the call expects.
        """
        answer = await self.open(call)
        try:
            with self._in_time(call):
                data = b""
                while some := await answer.read():
                    data += some
        finally:
            answer.close()
        try:
            return orjson.loads(data) if data and call.json else None
        except orjson.JSONDecodeError:
            said = self.errors.short(data[:_MAX_ERROR_BYTES].decode(errors="replace"))
            what = f"{call.path} answered with something other than JSON: {said}"
            raise HttpFailure(FailureKind.GARBAGE, what) from None

    def failure_in(self, error: Any) -> HttpFailure:
        """Convert the "error" in the middle of an answer to a failure."""
        said = error if isinstance(error, Mapping) else {"message": error}
        code = said.get("code")
        # Only SGLang reports a rejected request without a code.
        kind = kind_of_status(code) if isinstance(code, int) and code >= 400 else FailureKind.BAD_REQUEST
        return HttpFailure(kind, self.errors.short(str(said.get("message", said))))

    @contextmanager
    def _in_time(self, call: Call) -> Iterator[None]:
        try:
            with anyio.fail_after(self._seconds):
                yield
        except TimeoutError:
            what = f"{call.path} did not answer within {self._seconds:g} s"
            raise HttpFailure(FailureKind.TIMEOUT, what) from None


@contextmanager
def _failures(errors: ErrorTexts) -> Iterator[None]:
    """Convert aiohttp's errors to `HttpFailure`."""
    import aiohttp

    try:
        yield
    except (aiohttp.ClientError, OSError) as error:
        text = errors.short(str(error)) or type(error).__name__
        if isinstance(error, aiohttp.ClientPayloadError):
            raise HttpFailure(FailureKind.CONNECTION, f"the answer ended early ({text})") from error
        lost = isinstance(error, aiohttp.ClientConnectionError | ConnectionError)
        raise HttpFailure(FailureKind.CONNECTION if lost else FailureKind.GARBAGE, text) from error


def _message(text: bytes) -> str:
    """Return the error message in an answer; the whole answer if it has none."""
    try:
        said = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text.decode(errors="replace")
    for name in ("error", "detail", "message"):
        if isinstance(said, Mapping) and name in said:
            said = said[name]
    return str(said)
