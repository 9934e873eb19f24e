"""The HTTP server of a remote engine: its connections, its answers, and what went wrong with them. aiohttp is here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlunsplit

import anyio
import orjson
from anyio.lowlevel import checkpoint

from runner.engines.http_engine import server_address
from runner.engines.http_retries import FailureKind, HttpFailure, kind_of_status, retry_after_seconds
from runner.engines.remote.dialect import Call
from runner.errors import BadOption

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Answer", "Server", "base_url", "failure_in", "require_aiohttp"]

_KEEPALIVE_SECONDS = 2.0  # less than servers keep an idle connection (uvicorn 5 s): none is used as it is closed
_BUFFER_BYTES = 1 << 20  # bytes of an answer that wait to be read before its server has to
_MAX_ERROR_CHARS = 600  # characters of a server's error that are kept


def require_aiohttp() -> None:
    """Return if the library is there that requests are made with.

    Raises:
        BadOption: it is not; says how to install it.
    """
    try:
        import aiohttp  # noqa: F401  # only whether it is there
    except ImportError:
        raise BadOption("A RemoteEngine needs aiohttp: pip install 'deltarunner[remote]'.") from None


def base_url(given: str) -> str:
    """The address of a server without what clients of OpenAI's want behind it.

    Raises:
        BadOption: it is no address of an HTTP server.
    """
    parts = server_address(given, engine="RemoteEngine", option="url", example="http://127.0.0.1:8000")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


class Answer:
    """The answer to one request, as its bytes come."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._content = response.content

    async def read(self) -> bytes:
        """What has come and was not read yet; nothing only at its end.

        Raises:
            HttpFailure: the connection ended before its answer did.
        """
        with _failures():
            return await self._content.readany()

    async def finished(self) -> None:
        """Read it to its end, for nothing."""
        try:
            while await self.read():
                pass
        finally:
            self.close()

    def unread(self) -> bytes:
        """What has come and was not read yet, without waiting for more."""
        data = []
        while not self._content.exception() and (some := self._content.read_nowait()):
            data.append(some)
        return b"".join(data)

    @property
    def arrived(self) -> bool:
        """All of it has come, or nothing more ever will."""
        return self._content.is_eof() or self._content.exception() is not None

    def close(self) -> None:
        """End the request: its connection is closed, unless the answer was read to its end."""
        if self._content.at_eof():
            self._response.release()
        else:
            self._response.close()


class Server:
    """A server at an address, while it is used.

    Args:
        url: its address.
        api_key: what it is given to let requests in; None for nothing.
        seconds: how long it may take to begin an answer.
    """

    def __init__(self, url: str, *, api_key: str | None, seconds: float) -> None:
        self.url = url
        self._seconds = seconds
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        import aiohttp

        self._session = aiohttp.ClientSession(
            # The gate says how many requests there are at once. aiohttp's own time limits are off: they cancel the
            # task, which a cancel scope does not expect.
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
            await checkpoint()  # the transports close a step later

    async def open(self, call: Call) -> Answer:
        """Send a request; gives its answer as soon as that has begun well.

        Raises:
            HttpFailure: it has not, or took too long to.
        """
        assert self._session is not None
        body = None if call.body is None else orjson.dumps(call.body)
        with _failures(), self._in_time(call):
            response = await self._session.request(call.method, self.url + call.path, data=body, allow_redirects=False)
            if response.status == 200:
                return Answer(response)
            try:
                text = await response.content.read(1 << 16)
            finally:
                response.close()
        said = _said(text)
        raise HttpFailure(
            FailureKind.GARBAGE if response.status < 400 else kind_of_status(response.status),
            f"{call.path} answered {response.status}{f': {said}' if said else ''}",
            retry_after_seconds(response.headers.get("Retry-After")),
        )

    async def ask(self, call: Call) -> Any:
        """The answer to a request, out of its JSON; None where it has none.

        Raises:
            HttpFailure: there was none, or it is no JSON.
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
            raise HttpFailure(FailureKind.GARBAGE, f"{call.path} answered what is no JSON: {_cut(data)}") from None

    @contextmanager
    def _in_time(self, call: Call) -> Iterator[None]:
        try:
            with anyio.fail_after(self._seconds):
                yield
        except TimeoutError:
            what = f"{call.path} did not answer within {self._seconds:g} s"
            raise HttpFailure(FailureKind.TIMEOUT, what) from None


@contextmanager
def _failures() -> Iterator[None]:
    """What aiohttp raises, as ours."""
    import aiohttp

    try:
        yield
    except aiohttp.ClientPayloadError as error:
        raise HttpFailure(FailureKind.CONNECTION, f"the answer broke off ({_words(error)})") from error
    except (aiohttp.ClientConnectionError, ConnectionError) as error:
        raise HttpFailure(FailureKind.CONNECTION, _words(error)) from error
    except (aiohttp.ClientError, OSError) as error:
        raise HttpFailure(FailureKind.GARBAGE, _words(error)) from error


def failure_in(error: Any) -> HttpFailure:
    """The failure that a server tells of in the middle of an answer, in what stands under "error"."""
    said = error if isinstance(error, Mapping) else {"message": error}
    code = said.get("code")
    # Without a code it is SGLang, which tells so of what it could not take.
    kind = kind_of_status(code) if isinstance(code, int) and code >= 400 else FailureKind.BAD_REQUEST
    return HttpFailure(kind, str(said.get("message", said))[:_MAX_ERROR_CHARS])


def _said(text: bytes) -> str:
    """What an answer says for an error: its message, or all of it."""
    try:
        said = orjson.loads(text)
    except orjson.JSONDecodeError:
        return _cut(text)
    for name in ("error", "detail", "message"):
        if isinstance(said, Mapping) and name in said:
            said = said[name]
    return " ".join(str(said).split())[:_MAX_ERROR_CHARS]


def _cut(text: bytes) -> str:
    return " ".join(text[:_MAX_ERROR_CHARS].decode(errors="replace").split())


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:_MAX_ERROR_CHARS] or type(error).__name__
