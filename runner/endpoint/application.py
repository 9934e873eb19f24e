"""The ASGI application of a run's endpoints: keys, addresses and limits of requests.

An episode has the path `/e/KEY/v1/...`. The same key is its API key, for clients that send the key in a header. A
second key ends the episode with a reward, and allows nothing else. Programs do not receive it. Bodies and keys are
never logged, and URLs in requests are never fetched.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import unquote

import anyio
import orjson

from runner.chat_requests import ChatCall
from runner.endpoint.anthropic_messages import AnthropicMessages
from runner.endpoint.chat_completions import ChatCompletions
from runner.endpoint.episode_route import EpisodeRoute
from runner.endpoint.refusals import Reason, Refused, ended, refusal_of
from runner.endpoint.request_body import check_size, decode_body, number
from runner.endpoint.responses import Responses
from runner.endpoint.streaming import (
    ClientConnection,
    ClientGone,
    Send,
    answer,
    send_json,
    send_refusal,
    until_gone,
)
from runner.endpoint.wire_form import Headers, WireForm, WireRequest
from runner.logs import logger_for

__all__ = ["Application", "Receive"]

log = logger_for("endpoint")

T = TypeVar("T")

Receive: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
"""Function that receives a message of ASGI."""

MAX_BODY_BYTES: Final = 32 * 2**20
"""Maximum size of a body."""

MAX_DRAINED_BYTES: Final = 4 * MAX_BODY_BYTES
"""A body that is too large is read up to this size and discarded, so that the client can read the refusal."""

MAX_BYTES_READ_ON_LOOP: Final = 128 * 1024
"""A larger body is parsed in a thread, so that other requests are answered during that time."""

BODY_SECONDS: Final = 60.0
"""Longest time for a body to arrive."""

KEY_KNOWN_EXTENSION: Final = "deltarunner.key_known"
"""Name of the ASGI extension whose callback notifies the server that a request has the key of an episode."""

MAX_FINISHED_KEYS: Final = 10_000
"""Maximum number of finished episodes whose two keys are remembered."""

_CHAT, _RESPONSES, _MESSAGES = ChatCompletions(), Responses(), AnthropicMessages()
_FORMS: Final[Mapping[str, WireForm]] = {
    "/chat/completions": _CHAT,
    "/responses": _RESPONSES,
    "/messages": _MESSAGES,
}
_COUNT: Final = "/messages/count_tokens"
_MODELS: Final = "/models"
_END: Final = "/end"


class Application:
    """The ASGI application that routes the requests of a run to its episodes.

    Args:
        hosts: accepted values of the Host header. If another site directs a browser to this server by DNS rebinding,
            the header has the name of that site.
        any_address: True to accept any numeric address too, since DNS rebinding needs a name.
    """

    def __init__(self, hosts: Sequence[str], *, any_address: bool = False) -> None:
        self.hosts = frozenset(hosts)
        self._any_address = any_address
        self._routes: dict[bytes, tuple[str, EpisodeRoute]] = {}
        self._ends: dict[bytes, tuple[str, EpisodeRoute]] = {}
        self._over: OrderedDict[bytes, str] = OrderedDict()
        # Large bodies are parsed one at a time, since a thread that parses slows the event loop down.
        self._threads = anyio.CapacityLimiter(1)

    # --- keys

    def open(self, route: EpisodeRoute) -> tuple[str, str]:
        """Add a route with a new key. Return the key, and the second key that ends the episode."""
        key, end_key = secrets.token_hex(16), secrets.token_hex(16)
        self._routes[_digest(key)] = key, route
        self._ends[_digest(end_key)] = end_key, route
        return key, end_key

    def shut(self, key: str, end_key: str) -> None:
        """Refuse further requests with these keys, since the episode is over, and cut the requests in flight."""
        _, route = self._routes.pop(_digest(key))
        self._ends.pop(_digest(end_key))
        route.shut()
        for each in (key, end_key):  # only the keys are kept, since a route refers to its whole episode
            self._over[_digest(each)] = each
        while len(self._over) > 2 * MAX_FINISHED_KEYS:
            self._over.popitem(last=False)

    def _find_route(self, key: str) -> EpisodeRoute:
        known, route = self._routes.get(_digest(key), (self._over.get(_digest(key), ""), None))
        if not hmac.compare_digest(known.encode(), key.encode("utf-8", "replace")) or not key:
            raise Refused(Reason.UNAUTHORIZED, "unknown API key: use the api_key of the episode's endpoint.")
        if route is None:
            raise ended()
        return route

    def _known_route(self, keys: Sequence[str]) -> EpisodeRoute:
        """Return the route of the first known key. A client may also send other keys.

        Raises:
            Refused: no key is known, or the episode of a key is over.
        """
        refused = Refused(
            Reason.UNAUTHORIZED, "the request has no API key: send the api_key of the episode's endpoint."
        )
        for key in keys:
            try:
                return self._find_route(key)
            except Refused as error:
                # The refusal for a finished episode has more information than the refusal for an unknown key.
                refused = error if refused.reason is Reason.UNAUTHORIZED else refused
        raise refused

    def _route_to_end(self, keys: Sequence[str]) -> EpisodeRoute | None:
        """Return the route whose episode one of these keys ends, or None."""
        for key in keys:
            known, route = self._ends.get(_digest(key), ("", None))
            if route is not None and hmac.compare_digest(known.encode(), key.encode("utf-8", "replace")):
                return route
        return None

    # --- requests

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        form: WireForm = _MESSAGES if "anthropic-version" in headers else _CHAT
        try:
            await self._dispatch(scope, headers, receive, send)
        except ClientGone:
            log.info("a client disconnected before its request was complete")
        except (Refused, RecursionError) as error:
            path = scope["path"]
            form = next((each for end, each in _FORMS.items() if path.endswith(end)), form)
            await _refuse(send, form, refusal_of(error))

    async def _dispatch(self, scope: Mapping[str, Any], headers: Headers, receive: Receive, send: Send) -> None:
        host = headers.get("host", "").lower()
        if host not in self.hosts and not (self._any_address and _is_address(host)):
            raise Refused(
                Reason.FORBIDDEN,
                f"the Host header {host!r:.60} is not an address of this endpoint: use the endpoint's base_url.",
            )
        keys, path = _keys_and_path(scope["path"], headers)
        method = scope["method"]
        if path in ("", "/") and method in ("GET", "HEAD"):  # some clients test in this way whether a server is running
            await send_json(send, b"" if method == "HEAD" else b"{}")
            return
        path = path.rstrip("/").removeprefix("/v1")
        if path == _END and (ending := self._route_to_end(keys)) is not None:
            _notify_known(scope)
            _only("POST", method)
            if ending.ended.is_set():
                raise ended()
            await _end(ending, decode_body(await _read(receive, headers, ending) or b"{}"), send, reward=True)
            return
        route = self._known_route(keys)
        _notify_known(scope)
        if path == _MODELS or path.startswith(f"{_MODELS}/"):
            _only("GET", method)
            await send_json(send, _models(route, one=path != _MODELS))
            return
        if path not in (_COUNT, _END) and path not in _FORMS:
            raise Refused(Reason.NOT_FOUND, _nothing_at(path))
        _only("POST", method)
        if route.is_full:
            await _read(receive, headers, route, keep=False)
            raise route.busy()
        # The request counts as in flight before its body is read, since the body takes memory.
        with route.inside():
            raw = await _read(receive, headers, route) or b"{}"
            if path == _END:
                await _end(route, decode_body(raw), send, reward=False)
            elif path == _COUNT:
                chat_call = await self._parse(partial(_to_count, route), raw, headers)
                await _count(route, chat_call, receive, send)
            else:
                form = _FORMS[path]
                request = await self._parse(partial(_request, route, form), raw, headers)
                await answer(form, request, route, receive, send)

    async def _parse(self, read: Callable[[bytes, Headers], T], raw: bytes, headers: Headers) -> T:
        """Parse a body, in a thread if it is large."""
        if len(raw) <= MAX_BYTES_READ_ON_LOOP:
            return read(raw, headers)
        return await anyio.to_thread.run_sync(read, raw, headers, limiter=self._threads)


async def _read(receive: Receive, headers: Headers, route: EpisodeRoute, *, keep: bool = True) -> bytes:
    """Return the body of a request.

    Without `keep`, the body is read and discarded, and the result is b"". A client that is cut off while it sends would
    not read the reason of the refusal.

    Raises:
        ClientGone: the client disconnected before its request was complete.
        Refused: the body is too large or did not arrive in time, or the episode ended before that.
    """
    _check_headers(headers)
    parts, size = [], 0
    with anyio.move_on_after(BODY_SECONDS) as reading, route.cutting(reading):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > MAX_DRAINED_BYTES:
                raise _too_large()
            if keep and size <= MAX_BODY_BYTES:
                parts.append(part)
            if not message.get("more_body"):
                break
    if route.is_shut:
        raise ended()
    if size > MAX_BODY_BYTES:
        raise _too_large()
    if reading.cancelled_caught:
        raise Refused(Reason.SLOW, f"the body did not arrive within {BODY_SECONDS:g} s: send the request again.")
    return b"".join(parts)


def _check_headers(headers: Headers) -> None:
    encoding = headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise Refused(Reason.INVALID, f"content-encoding: {encoding!r:.60} is not read: send the body as it is.")
    length = headers.get("content-length", "0")
    if length.isdigit() and int(length) > MAX_DRAINED_BYTES:
        raise _too_large()


def _too_large() -> Refused:
    return Refused(Reason.TOO_LARGE, f"the body is larger than {MAX_BODY_BYTES // 2**20} MiB: send a shorter history.")


def _request(route: EpisodeRoute, form: WireForm, raw: bytes, headers: Headers) -> WireRequest:
    request = form.read(decode_body(raw), headers, route.seen[form.name])
    check_size(request.chat_call)
    return request


def _to_count(route: EpisodeRoute, raw: bytes, headers: Headers) -> ChatCall:
    chat_call = _MESSAGES.read_to_count(decode_body(raw), headers, route.seen[_MESSAGES.name])
    check_size(chat_call)
    return chat_call


async def _count(route: EpisodeRoute, chat_call: ChatCall, receive: Receive, send: Send) -> None:
    connection, tokens, error = ClientConnection(send), None, None
    async with anyio.create_task_group() as group:
        with route.cutting(group.cancel_scope):
            group.start_soon(until_gone, receive, connection, group.cancel_scope)
            try:
                tokens = await route.handler.count(chat_call)
            except Exception as raised:  # a task group would wrap the error
                error = raised
            group.cancel_scope.cancel()
    if connection.gone:
        raise ClientGone
    if error is not None:
        raise refusal_of(error) from error
    if tokens is None:
        raise ended()
    await send_json(send, orjson.dumps(_MESSAGES.count(tokens)))


async def _end(route: EpisodeRoute, body: Mapping[str, Any], send: Send, *, reward: bool) -> None:
    """End the episode of a route, with the reward in the body if the key allows one.

    Raises:
        Refused: the key does not allow a reward, or the reward is not a number.
    """
    value = number(body, "reward")
    if value is not None and not reward:
        raise Refused(
            Reason.NO_REWARD,
            "reward: the program's key cannot set it: send it to the endpoint's end_url, or leave it out.",
        )
    route.end({} if value is None else {"reward": value})
    await send_json(send, b"{}")


async def _refuse(send: Send, form: WireForm, refused: Refused) -> None:
    async def begin(headers: Sequence[tuple[bytes, bytes]], status: int) -> None:
        # The connection is closed, since the rest of the body is not read.
        closing = [*headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": closing})

    async def write(body: bytes, *, more: bool) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})

    await send_refusal(begin, write, form, refused)


def _models(route: EpisodeRoute, *, one: bool) -> bytes:
    """Return the list of models, or one model, with the fields of OpenAI's and of Anthropic's form."""
    model = {
        "id": route.model,
        "object": "model",
        "type": "model",
        "display_name": route.model,
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "owned_by": "deltarunner",
        "max_model_len": route.context,
    }
    listed = {"object": "list", "data": [model], "has_more": False, "first_id": route.model, "last_id": route.model}
    return orjson.dumps(model if one else listed)


def _keys_and_path(path: str, headers: Headers) -> tuple[list[str], str]:
    """Return the keys of a request, from its path or its headers, and the path after the key.

    Libraries of providers send two keys if the program sets one and an environment variable sets another.
    """
    kind, _, bearer = headers.get("authorization", "").partition(" ")
    given = [bearer.strip() if kind.lower() == "bearer" else "", headers.get("x-api-key", "")]
    keys = [key for key in given if key]
    if path.startswith("/e/"):
        key, _, rest = path.removeprefix("/e/").partition("/")
        path = f"/{rest}"
        # If the path has the program's key, a header may have the second key, with which a request ends the episode.
        return [unquote(key), *(keys if path.rstrip("/").endswith(_END) else ())], path
    return keys, path


def _notify_known(scope: Mapping[str, Any]) -> None:
    """Notify the server that a request has the key of an episode."""
    if known := scope.get("extensions", {}).get(KEY_KNOWN_EXTENSION):
        known["callback"]()


def _is_address(host: str) -> bool:
    name = host.rpartition(":")[0] if not host.endswith("]") else host
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]") or host)
    except ValueError:
        return False
    return True


def _digest(key: str) -> bytes:
    # The duration of a look-up reveals a part of the digest, but not of the key.
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _only(wanted: str, method: str) -> None:
    if method != wanted:
        raise Refused(Reason.METHOD, f"send a {wanted} here, not a {method}.")


def _nothing_at(path: str) -> str:
    served = ", ".join(f"/v1{each}" for each in (*_FORMS, _COUNT, _MODELS, _END))
    return f"there is nothing at {path or '/'!r:.60}: an endpoint serves {served}."
