"""Chat engine: models of an API that takes and returns messages, such as OpenAI's."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack
from typing import Any, Self

import anyio.to_thread
from anyio.lowlevel import current_token

from runner import checked
from runner.engines.base import EngineStats, Session
from runner.engines.chat.runtime import ChatRuntime
from runner.engines.chat.server import ChatServer, check_url, require_openai
from runner.engines.chat.stream import ChatStream
from runner.engines.chat.wire import FIELDS, RequestFormat, check_sampling
from runner.engines.http_retries import FailureKind, Retries, RetryPolicy
from runner.engines.message_engine import MessageEngine, MessageRequest
from runner.engines.state import NOT_RUNNING
from runner.errors import BadOption, EngineDead
from runner.options import Sampling

__all__ = ["ChatEngine"]

_AGAIN = frozenset({FailureKind.CONNECTION, FailureKind.BUSY, FailureKind.TIMEOUT, FailureKind.SERVER})


class ChatEngine(MessageEngine):
    """A model of a chat API, for evaluation, judges and simulated users. Its turns are never trained on.

    run(Calculator, ChatEngine("gpt-x"))
    Run(environment, engine, engines={"judge": ChatEngine("judge-x", base_url="http://127.0.0.1:8000/v1")})

    Every turn sends the whole history; the server applies its own template and vocabulary. Entering sends no request.
    While a run uses the engine, the run requests the list of models every 30 s to check the server.

    Args:
        model: the model's name on the server.
        base_url: the server's address, with `/v1`; None for the address in OPENAI_BASE_URL, or OpenAI's address if this
            variable is not set.
        api_key: the API key; never written to a run file. None means no key if `base_url` is given, and otherwise the
            key in OPENAI_API_KEY.
        headers: further HTTP headers of every request; never written to a run file.
        context: maximum number of tokens of prompt and turn together. None if unknown: the server then rejects a
            history that is too long.
        places: maximum number of concurrent requests; fewer while the server limits the rate.
        max_tokens_field: the server's field for the token limit of a turn; by default
            `max_completion_tokens` without `base_url`, and `max_tokens` with it.
        reasoning_field: the server's field for the reasoning of earlier turns, such as `reasoning_content`; None to
            send no reasoning.
        leave_out: request fields that the server does not support, such as `seed` or `top_p`.
        extra_body: further fields of every request, such as `{"reasoning_effort": "low"}`.
        retries: retry policy for requests that failed.
        timeout: maximum seconds until an answer begins, and between its parts.

    Raises:
        BadOption: an address or a setting is invalid.
    """

    health_interval = 30.0
    retries: Retries
    """Retries since the engine was entered: the rest of their budget, and counts."""

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        context: int | None = None,
        places: int = 64,
        max_tokens_field: str | None = None,
        reasoning_field: str | None = None,
        leave_out: Collection[str] = (),
        extra_body: Mapping[str, Any] | None = None,
        retries: RetryPolicy = RetryPolicy(),  # noqa: B008  # frozen
        timeout: float = 600.0,
    ) -> None:
        if not isinstance(model, str) or not model:
            raise BadOption(f"ChatEngine({model!r:.60}): give the name that the server has for the model.")
        for option, value in (("context", context), ("places", places)):
            if value is not None:
                checked.whole(f"ChatEngine({option}={value!r})", value, least=1)
        checked.number(f"ChatEngine(timeout={timeout!r})", timeout, above=0)
        for name in leave_out:
            if name not in FIELDS or isinstance(leave_out, str):
                raise BadOption(f"ChatEngine(leave_out={leave_out!r:.60}): give some of {', '.join(FIELDS)}.")
        self.model = model
        """The model's name on the server."""
        self.context = sys.maxsize if context is None else context
        self.places = places
        self.retries = Retries(retries, again=_AGAIN)
        self._url = None if base_url is None else check_url(base_url)
        self._api_key = api_key
        self._headers = dict(headers or {})
        self._policy = retries
        self._timeout = timeout
        self._format = RequestFormat(
            model=model,
            max_tokens=max_tokens_field or ("max_completion_tokens" if base_url is None else "max_tokens"),
            reasoning=reasoning_field,
            leave_out=tuple(leave_out),
            extra_body=dict(extra_body or {}),
        )
        self._running: ChatRuntime | None = None
        self._open = AsyncExitStack()

    def __repr__(self) -> str:
        return f"ChatEngine({self.model!r})"

    async def __aenter__(self) -> Self:
        """Open the client; no request is sent.

        Raises:
            BadOption: openai is not installed, or a key is missing.
        """
        self._require_not_entered()
        # The import runs in a thread, since it takes a second and would block other episodes.
        await anyio.to_thread.run_sync(require_openai, abandon_on_cancel=True)
        self.retries = Retries(self._policy, again=_AGAIN)
        server = ChatServer(
            self._url,
            api_key=self._api_key,
            headers=self._headers,
            seconds=self._timeout,
        )
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(server)
            self._running = ChatRuntime(server, self._format, self.retries, places=self.places, context=self.context)
            self._open = stack.pop_all()
        self.running, self.loop = True, current_token()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.running = False
        self._open_runtime.stop()
        await self._open.aclose()

    @property
    def _open_runtime(self) -> ChatRuntime:
        if self._running is None:
            raise EngineDead(NOT_RUNNING)
        return self._running

    def check_sampling(self, sampling: Sampling) -> None:
        """Check that the server supports a sampling whose fields are all set.

        Raises:
            BadOption: a field is not supported; the message names it.
        """
        check_sampling(sampling, self._format.leave_out)

    def stream(self, request: MessageRequest) -> ChatStream:
        return ChatStream(self._open_runtime, request)

    def close_session(self, session: Session) -> None:
        """Close a conversation; idempotent."""
        if self._running is not None:
            self._running.gate.close(session)
        session.closed = True

    def stats(self) -> EngineStats:
        """Return the counts of this engine's requests, and the current limit of concurrent requests."""
        runtime = self._open_runtime
        return EngineStats(
            open=runtime.asking,
            running=runtime.asking,
            waiting=runtime.gate.waiting,
            first_waiting=runtime.gate.first_waiting,
            live_sessions=runtime.gate.live,
            sampled_tokens=runtime.sampled,
            places=runtime.limiter.limit,
            throttled=runtime.limiter.throttled,
            retried=self.retries.counts.total(),
        )

    def is_alive(self) -> bool:
        """Return whether requests can be answered, as far as is known."""
        return self.running and self._open_runtime.is_alive()

    async def health(self) -> None:
        """Return when the server answers a request for its list of models. Failed requests are retried.

        Raises:
            EngineDead: the server does not answer, or refused earlier requests.
        """
        await self._open_runtime.health()

    def describe(self) -> dict[str, Any]:
        server, request_format = self._open_runtime.server, self._format
        return {
            "kind": "chat",
            "takes": "messages",
            "model": self.model,
            "server": server.url,
            "versions": server.software,
            "context": None if self.context == sys.maxsize else self.context,
            "places": self.places,
            "reasoning_field": request_format.reasoning,
            "leave_out": list(request_format.leave_out),
            "extra_body": dict(request_format.extra_body),
        }
