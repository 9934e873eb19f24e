"""The chat engine: models behind an API that takes messages and gives messages, OpenAI's and all that speak like it."""

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
from runner.errors import BadOption, EngineDead
from runner.options import Sampling

__all__ = ["ChatEngine"]

_AGAIN = frozenset({FailureKind.CONNECTION, FailureKind.BUSY, FailureKind.TIMEOUT, FailureKind.SERVER})


class ChatEngine(MessageEngine):
    """A model behind an API of messages: for evaluation, judges and simulated users. What it says is never trained on.

    run(Calculator, ChatEngine("gpt-x"))
    Run(environment, engine, engines={"judge": ChatEngine("judge-x", base_url="http://127.0.0.1:8000/v1")})

    The whole history goes to the server with every turn, and its own template and vocabulary are used there. Nothing
    is asked before the first turn.

    Args:
        model: what the server calls the model.
        base_url: the server's address, with `/v1`; None for OpenAI's, or what OPENAI_BASE_URL has.
        api_key: what lets requests in; kept nowhere. None for no key, and for OpenAI's own address that of
            OPENAI_API_KEY.
        headers: what every request has besides; kept nowhere.
        context: the most tokens that prompt and turn may have together, where that is known here; else the server
            says when a history is too long.
        places: requests that run at once at most; as many of them are sent as the server takes.
        max_tokens_field: what the server calls the limit on the tokens of a turn; default `max_completion_tokens` at
            OpenAI's own address, else `max_tokens`.
        reasoning_field: the field in which the server is sent the reasoning of earlier turns, such as
            `reasoning_content`; None leaves reasoning out.
        leave_out: fields of a request that the server does not know, such as `seed` or `top_p`.
        extra_body: what every request has besides, such as `{"reasoning_effort": "low"}`.
        retries: when requests are sent again that the server could not take.
        timeout: seconds that the server may take to begin an answer.

    Raises:
        BadOption: an address or a setting that cannot be, or openai is not installed.
    """

    retries: Retries
    """What was sent again since the engine was entered, and what is left of the budget for it."""

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
        """What the server calls the model."""
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
        """Make the connections; nothing is asked.

        Raises:
            BadOption: openai is not installed, or OpenAI's own server needs a key.
        """
        if self.running:
            raise RuntimeError("this engine is already running")
        # In a thread, since importing it takes a second, and others may be playing.
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
        self._asked.stop()
        await self._open.aclose()

    @property
    def _asked(self) -> ChatRuntime:
        if self._running is None:
            raise EngineDead("the engine is not running")
        return self._running

    def check_sampling(self, sampling: Sampling) -> None:
        """Refuse what the server could not be asked for; every field is set.

        Raises:
            BadOption: names the field.
        """
        check_sampling(sampling, self._format.leave_out)

    def stream(self, request: MessageRequest) -> ChatStream:
        """What one turn says; nothing happens before the block is entered."""
        return ChatStream(self._asked, request)

    def close_session(self, session: Session) -> None:
        """Forget the conversation; twice is allowed."""
        if self._running is not None:
            self._running.gate.close(session)
        session.closed = True

    def stats(self) -> EngineStats:
        """What is asked of the server by this engine now, and how many requests it lets through."""
        runtime = self._asked
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
        """Whether requests can be answered, as far as is known."""
        return self.running and self._asked.is_alive()

    async def health(self) -> None:
        """Return if the server has not refused what it was asked; it is not asked for this."""
        self._asked.require_alive()

    def describe(self) -> dict[str, Any]:
        """What a run's header keeps of the engine."""
        server, request_format = self._asked.server, self._format
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
