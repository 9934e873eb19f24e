"""A scripted engine whose replies a test enqueues; it reports replies that are missing or left over."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self, TypeAlias

from runner.checked import is_whole
from runner.concurrency.user_code import describe_error
from runner.engines.scripted.engine import ScriptedEngine
from runner.engines.scripted.replies import ReplyEncoder
from runner.engines.scripted.script import Answer, Chunks, Fault, Latency, ModelCall, Reply, as_reply
from runner.episode.key import MAIN
from runner.errors import BadOption, RequestRejected
from runner.testing.chunking import Inside
from runner.testing.vocabulary import AwkwardTokenizer
from runner.tokens.template import ChatTemplate

__all__ = ["CheckedEngine", "QueuedEngine", "ReplySource", "check_settings", "show_reply"]

# Pytest leaves out the frames of this module and shows the line of the test, where the fix belongs.
__tracebackhide__ = True

ReplySource: TypeAlias = Answer | Sequence[int] | Callable[[ModelCall], Answer | Awaitable[Answer]]
"""One reply: a string, a call, several calls of one turn, a `Reply`, token ids, or a function of the model call."""


class CheckedEngine(ScriptedEngine):
    """A scripted engine that records every call, and problems with its replies."""

    def __init__(self, **settings: Any) -> None:
        self.problems: list[str] = []
        """Problems since the last `check()`, one text each."""
        name = settings.pop("template", "pythonic")
        template = _loaded(name) if isinstance(name, str) else name
        super().__init__(self._answer_checked, record=True, template=template, **settings)

    @property
    def prompts(self) -> list[str]:
        """The prompt of each call, decoded, with control tokens."""
        return [self.tokenizer.decode(call.prompt) for call in self.calls]

    def check(self) -> None:
        """Raise an error about the problems since the previous call, if there are any.

        Raises:
            AssertionError: there are problems; the message lists them.
        """
        problems, self.problems = self.problems, []
        if problems:
            raise AssertionError("\n".join(problems))

    @abstractmethod
    def leftovers(self) -> str:
        """A message about unused replies, with the fix; "" if all are used."""

    @abstractmethod
    async def _answer(self, call: ModelCall) -> Reply:
        """The reply to a call.

        Raises:
            RequestRejected: no reply is left.
        """

    async def _answer_checked(self, call: ModelCall) -> Reply:
        try:
            return await self._answer(call)
        except RequestRejected as rejected:
            self.problems.append(str(rejected))
            raise
        except BadOption as error:  # the reply of a function cannot be cut into the given chunks
            self.problems.append(f"{call.request.name}: {error}")
            raise RequestRejected(self.problems[-1]) from None


class QueuedEngine(CheckedEngine):
    """A scripted engine that returns the enqueued replies in order, each once. Each agent has its own queue.

    `calls` contains a `RecordedCall` for each request; its `prompt` has the exact ids.

    Args:
        settings: the settings of `ScriptedEngine`: tokenizer, template, context, places, chunks, latency, tick and
            others.

    Raises:
        BadOption: a setting is invalid.
    """

    def __init__(self, **settings: Any) -> None:
        self.add_advice = "Add one with say(...)"
        """Advice in messages about missing replies."""
        self.drop_advice = "forget them with clear()"
        """Advice in messages about unused replies."""
        self._queues: dict[str, deque[_QueuedReply]] = {}
        self._always: dict[str, _QueuedReply] = {}
        super().__init__(**settings)
        self._encoder = ReplyEncoder(self.tokenizer, self.template)

    def say(
        self,
        *sayings: ReplySource,
        agent: str = MAIN,
        chunks: Chunks | Inside = None,
        latency: Latency | None = None,
        fault: Fault | None = None,
    ) -> Self:
        """Enqueue replies.

        Args:
            sayings: the replies, one for each request of the agent.
            agent: the agent that uses them.
            chunks: the way in which ids are cut into deltas: see `Chunks`, or `inside("é")` to cut inside a piece.
            latency: when the ids arrive, in ticks of the engine.
            fault: a fault to inject.

        Raises:
            BadOption: there is no reply, a reply is invalid, or a reply cannot be cut into these chunks.
        """
        if not sayings:
            raise BadOption("say(): give a reply: a string, call(...), a list of token ids, Reply(...) or a function.")
        try:
            made = [_QueuedReply(_as_queued(saying), chunks, latency, fault) for saying in sayings]
            for saying in made:
                if not callable(saying.what):
                    self._reply(saying, saying.what)  # invalid replies are refused here, in the test's own line
        except BadOption as error:
            raise error.with_traceback(None) from None
        self._queues.setdefault(agent, deque()).extend(made)
        return self

    def always(self, saying: ReplySource, *, agent: str = MAIN) -> Self:
        """Use this reply, any number of times, whenever the queue of the agent is empty.

        Raises:
            BadOption: the reply is invalid.
        """
        try:
            self._always[agent] = _QueuedReply(_as_queued(saying))
        except BadOption as error:
            raise error.with_traceback(None) from None
        return self

    def clear(self) -> None:
        """Remove all enqueued replies; replies that `always` set stay."""
        self._queues.clear()

    def leftovers(self) -> str:
        """A message about enqueued replies that were not used, or ""."""
        left = [(agent, saying) for agent, queue in self._queues.items() for saying in queue]
        if not left:
            return ""
        listed = "".join(f"\n  {agent}: {show_reply(saying.what)}" for agent, saying in left)
        count = "1 reply was" if len(left) == 1 else f"{len(left)} replies were"
        return (
            f"{count} never used:{listed}\n"
            f"The episode ended before it used them, or too many were given: remove them, or {self.drop_advice}."
        )

    async def _answer(self, call: ModelCall) -> Reply:
        queue = self._queues.get(call.agent)
        saying = queue.popleft() if queue else self._always.get(call.agent)
        if saying is None:
            raise RequestRejected(self._no_reply_left(call))
        what = saying.what
        if not isinstance(what, Reply):
            what = await _call_function(what, call)
        return self._reply(saying, what)

    def _reply(self, saying: _QueuedReply, what: Reply) -> Reply:
        chunks: Any = saying.chunks
        if isinstance(self.tokenizer, AwkwardTokenizer) and what.ids is None:
            text = self.tokenizer.decode(self._encoder.encode(what).ids)
            what = replace(what, text="", calls=(), ids=self.tokenizer.misspell(text))
        if isinstance(chunks, Inside):
            chunks = chunks.sizes(self._encoder.encode(what).ids, self.tokenizer)
        given = {"chunks": chunks, "latency": saying.latency, "fault": saying.fault}
        return replace(what, **{name: value for name, value in given.items() if value is not None})

    def _no_reply_left(self, call: ModelCall) -> str:
        said = sum(f"/{call.agent}/" in recorded.name for recorded in self.calls) - 1  # this call is in `calls` already
        others = [agent for agent, queue in self._queues.items() if queue]
        agent = "" if call.agent == MAIN else f" for agent {call.agent!r}"
        hint = f" Only {', '.join(others)} has replies left." if others else ""
        return (
            f"{call.request.name}: no reply is left for this call ({said} used so far).{hint} "
            f"{self.add_advice}{agent}, or let the episode end earlier. The prompt ends with {call.prompt[-80:]!r}."
        )


_loaded = cache(ChatTemplate.load)  # a template is compiled once per process, because tests create many engines


@dataclass(frozen=True, slots=True)
class _QueuedReply:
    what: Reply | Callable[[ModelCall], Any]
    chunks: Chunks | Inside = None
    latency: Latency | None = None
    fault: Fault | None = None


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise BadOption for settings that are not arguments of `ScriptedEngine`."""
    known = inspect.signature(ScriptedEngine.__init__).parameters.keys() - {"self", "replies", "record"}
    for name in settings.keys() - known:
        raise BadOption(f"unknown setting {name!r}; the settings are {', '.join(sorted(known))}.")


def show_reply(what: Any) -> str:
    """A short description of a reply."""
    if callable(what):
        return f"the function {getattr(what, '__qualname__', type(what).__name__)}"
    what = as_reply(what)
    if what.ids is not None:
        return f"the ids {list(what.ids)!r:.60}"
    calls = [f"{call.name}({', '.join(f'{name}={v!r}' for name, v in call.arguments.items())})" for call in what.calls]
    return " and ".join([*([f"{what.text!r:.60}"] if what.text or not calls else []), *calls])


def _as_queued(saying: ReplySource) -> Reply | Callable[[ModelCall], Any]:
    return saying if callable(saying) else _as_reply(saying)


def _as_reply(saying: Any) -> Reply:
    is_listed = isinstance(saying, Sequence) and not isinstance(saying, str | bytes) and len(saying) > 0
    return Reply(ids=tuple(saying)) if is_listed and all(map(is_whole, saying)) else as_reply(saying)


async def _call_function(speaker: Callable[[ModelCall], Any], call: ModelCall) -> Reply:
    """The reply of a function that plays the model.

    Raises:
        RequestRejected: the function raised an error, or did not return a reply.
    """
    name = getattr(speaker, "__qualname__", type(speaker).__name__)
    try:
        answer = speaker(call)
        if inspect.isawaitable(answer):
            answer = await answer
    except Exception as error:
        raise RequestRejected(
            f"{call.request.name}: {name}(), which plays the model, raised {describe_error(error)}"
        ) from error
    try:
        return _as_reply(answer)
    except BadOption:
        raise RequestRejected(
            f"{call.request.name}: {name}(), which plays the model, returned {answer!r:.60} ({type(answer).__name__}): "
            f"return a string, call(...), a list of calls or of token ids, or Reply(...)."
        ) from None
