"""Requests with whole histories: somebody else's loop asks with messages, and the episode's conversations answer.

Whoever asks may be any task of the event loop, or a thread by way of `anyio.from_thread`. A request is handed over to a
task that the episode started, so that what it samples is under the clocks and limits of the episode.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from runner.chat_requests import Again, ChatCall, ChatRequest, Delivery, Tolerated, Verdict
from runner.concurrency.clocks import Asking
from runner.concurrency.threads import Job
from runner.episode.alignment import Alignment, align
from runner.episode.client_messages import as_taken, several_systems
from runner.episode.history_replacement import before
from runner.episode.history_tree import HistoryTree, RequestNode
from runner.episode.key import MAIN
from runner.episode.model import ChatModel, MessageModel
from runner.episode.state import ConversationState, EpisodeState
from runner.episode.turn import take_turn
from runner.episode.turn_settings import TurnSinks
from runner.episode.turn_tree import Cursor, TurnNode
from runner.errors import BadMessage, ContextFull, EpisodeOver
from runner.messages import Message, canonical_json
from runner.options import Sampling
from runner.parsing.roundtrip import supports_name
from runner.parsing.schema_grammar import not_enforced
from runner.tokens.bridging.refusal import Unbridgeable
from runner.tokens.system_support import TAKES_ALL, SystemSupport
from runner.tools.external_tools import tool_of, tools_of
from runner.tools.modern_schema import modern
from runner.tools.tool import Tool
from runner.trajectory import Turn
from runner.turn_events import DeliverTurn, TurnEventSink

__all__ = ["ChatService"]

OpenThread = Callable[[EpisodeState, str, Sequence[Tool], bool], ConversationState]
"""Opens the conversation of a thread, by its name, its tools and whether it is trained."""

GRANTED = frozenset({"max_tokens", "stop", "stop_ids", "schema", "regex", "choice", "logprobs"})
"""The sampling that a trained thread is asked for and given; the rest is the run's own."""

MAX_ITEMS_ON_LOOP = 100
"""So many tools and messages are read at once; more of them would keep the event loop from others."""

MAX_TOOL_CHARACTERS_ON_LOOP = 65_536
"""Tools of more characters of JSON are made off the event loop, since each of their schemas is checked."""

LOOP_SLICE_SECONDS = 0.005
"""Seconds for which a long history keeps the event loop at a time."""


@dataclass(frozen=True, slots=True)
class _UsableTools:
    """The tools of a request."""

    callable: Sequence[Tool]
    """Those that the model is shown."""
    unwritable: Sequence[str]
    """The names of the others, which the model's format of calls cannot write."""


@dataclass(slots=True, eq=False)
class _OpenRequest:
    """A request that is being answered."""

    asked: ChatCall
    """The request as the client made it."""
    sink: TurnEventSink | None = None
    """The relay of the turn while it is sampled."""
    began: float = field(default_factory=time.perf_counter)
    """The moment at which it was there."""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """The scope in which it is answered; whoever asked and goes away cancels it."""
    done: anyio.Event = field(default_factory=anyio.Event)
    """Is set once nothing more is done for it."""
    request_node: RequestNode | None = None
    """The turn in the tree, once it is known what the history is."""
    record: ChatRequest | None = None
    """The record of the request, from then on."""
    turn: Turn | None = None
    """The turn that answers it."""
    continued: Turn | None = None
    """The cut turn with which that one goes on."""
    error: Exception | None = None
    """The reason why there is no turn."""
    gone: bool = False
    """Whether whoever asked went away."""


class ChatService:
    """Where an episode takes requests while it is played.

    Args:
        episode: the episode.
        open_thread: opens the conversation of a thread.
    """

    def __init__(self, episode: EpisodeState, open_thread: OpenThread) -> None:
        self.threads: list[ConversationState] = []
        """The conversations that requests began, in that order."""
        self._episode = episode
        self._open_thread = open_thread
        self._own: set[ConversationState] = set()  # the same, of which there may be a thousand
        self._histories = HistoryTree()
        self._numbered = 0
        self._tools: dict[str, _UsableTools] = {}
        self._group: TaskGroup | None = None
        self._context: Context
        self._answering: dict[_OpenRequest, None] = {}

    @property
    def is_open(self) -> bool:
        """Whether it takes requests of whoever asks."""
        return self._group is not None

    @asynccontextmanager
    async def open(self, tasks: TaskGroup) -> AsyncIterator[None]:
        """Take requests inside of the block, under the clocks that run over it; those left at its end are cut.

        Args:
            tasks: where they are answered. It is no group of the block's own: in that the author's code may leave
                scopes open.
        """
        self._group, self._context = tasks, copy_context()
        try:
            yield
        finally:
            self._group = None
            left = list(self._answering)
            for request in left:
                request.scope.cancel()
            with anyio.CancelScope(shield=bool(left)):
                for request in left:
                    await request.done.wait()

    async def ask(
        self, asked: ChatCall, *, sink: TurnEventSink | None = None, deliver: DeliverTurn | None = None
    ) -> Turn:
        """Have a request answered.

        Args:
            asked: the request.
            sink: passes on what comes of the turn while it is sampled, which is nothing where a finished one is
                replayed; where that fails, the turn is cut.
            deliver: delivers the turn to the client; the second argument is the cut turn that it continues. Where that is
                cancelled or fails, the client does not have it.

        Raises:
            EpisodeOver: the episode has ended or a limit was reached, as in `Conversation.generate`.
            BadInput: the messages, the tools or the sampling cannot be used, or the template cannot write the messages.
        """
        request = _OpenRequest(asked, sink)
        try:
            if self._group is not None:
                await self._hand_over(request, self._group)
            elif self._episode.limits.clock.is_over_this_task():  # a tool's, in the usual loop
                await self._serve(request)
            else:
                raise self._is_over()
            if request.turn is not None and deliver is not None:
                await deliver(request.turn, request.continued)
        except BaseException:
            request.gone = True
            if request.request_node is not None:
                request.request_node.gone = True
            request.scope.cancel()
            raise
        finally:
            if request.record is not None:
                request.record.seconds = time.perf_counter() - request.began
        if request.error is not None:
            raise request.error
        assert request.turn is not None  # or there is an error
        if request.request_node is not None and request.record is not None:
            request.record.delivery = Delivery.DELIVERED
            request.request_node.gone = False
        return request.turn

    async def count(self, asked: ChatCall) -> int:
        """How many ids a prompt with the messages and tools of a request has, rendered anew.

        Raises:
            BadInput: the messages or the tools cannot be used.
        """
        chat = self._episode.shared.chat_of(MAIN)
        if not isinstance(chat, ChatModel):
            raise BadMessage("the server of messages that answers here counts tokens itself, with each answer")
        offered = await self._tools_of(asked.tools)
        await self._read_ahead(asked.messages)
        read = self._histories.reader.read(asked.messages)
        if asked.system_as_user or several_systems(read):
            read = as_taken(read, chat.systems, system_as_user=asked.system_as_user)
        messages = chat.with_fitting_ids([each.message for each in read], tuple)
        schemas = [tool.as_openai() for tool in offered.callable]
        render = partial(chat.bridger.first_prompt, messages, schemas)
        try:
            return len(await self._episode.shared.workers.call(Job(render, "chat template")))
        except Unbridgeable as missing:
            raise _unwritable(missing, messages, asked) from None

    async def _hand_over(self, request: _OpenRequest, group: TaskGroup) -> None:
        self._answering[request] = None
        # Whoever asks may be under no clock of the episode, and a task has those of whoever starts it.
        self._context.copy().run(group.start_soon, self._serve, request)
        if request.sink is not None:
            await request.sink.forward()
        if not request.done.is_set():
            await request.done.wait()

    def _is_over(self) -> EpisodeOver:
        return EpisodeOver(f"{self._episode.key.id} is not being played: no request can be answered")

    async def _serve(self, request: _OpenRequest) -> None:
        request.error = self._is_over()  # where it is cut
        try:
            with request.scope, Asking():
                if request.gone:
                    return
                request.turn, request.error = await self._answer(request), None
        except Exception as error:
            request.error = error
        finally:
            self._answering.pop(request, None)
            request.done.set()
            if request.sink is not None:
                request.sink.close()

    # --- one request

    async def _answer(self, request: _OpenRequest) -> Turn:
        asked = request.asked
        offered = await self._tools_of(asked.tools)
        tools = list(offered.callable)  # a copy: it becomes a head's own list, which authors may change
        found, seconds = await self._aligned(asked, tools)
        if found.again is Again.REPLAYED and found.before is not None and found.before.node is not None:
            return self._replay(request, found, found.before.node.turn, seconds)
        if found.verdict is Verdict.CONTINUED and found.parent is not None and found.parent.node is not None:
            request.continued = found.parent.node.turn
        if request.continued is not None and isinstance(self._episode.shared.chat_of(MAIN), MessageModel):
            raise BadMessage(
                "the last message is a turn that was cut, and the server of messages that answers here goes on with "
                "none: put a user message after it."
            )
        thread = self._thread(asked, found, tools)
        sampling, not_granted = _granted(thread, asked.sampling)
        record = request.record = self._record(thread, asked, found, seconds)
        record.not_granted = {**not_granted, **_not_enforced(sampling), **asked.not_granted}
        if offered.unwritable:
            record.not_granted["tools"] = [*record.not_granted.get("tools", ()), *offered.unwritable]
        cursor = _cursor(found, tools)
        if found.again is Again.TAKEN_BACK and found.before is not None:
            found.before.taken_back = True
        request_node = request.request_node = RequestNode(
            thread, found.match.end, found.parent, cursor.copied(), found.behind, record=record
        )
        if asked.form == "responses":  # the one form that goes on by an id alone
            request_node.told = found.told
        self._histories.ask(request_node)
        self._episode.limits.context_rewritten(thread.name)
        known, told = len(thread.nodes), None if request.sink is None else request.sink.put
        sinks = TurnSinks(
            self._handle(thread),
            on_event=told if told is not None and _streams(thread, tools, asked) else None,
            on_progress=told,
            raise_unbridgeable=True,
        )
        try:
            try:
                return await take_turn(thread, cursor, sampling, asked.tool_choice, sinks=sinks)
            except Unbridgeable as missing:
                raise _unwritable(missing, [*cursor.seen, *cursor.queued], asked) from None
        except BaseException as error:
            if isinstance(error, ContextFull) and not thread.counted:
                self._episode.limits.context_rewritten(thread.name)  # the client was told, and that is all
            cut = not isinstance(error, Exception)
            record.delivery = Delivery.CUT if cut else Delivery.REFUSED
            record.error = "" if cut else str(error)
            raise
        finally:
            self._settle(request_node, found, cursor, thread.nodes[known:])

    async def _tools_of(self, given: Sequence[Any]) -> _UsableTools:
        """The tools of a request; they come again with every one, and making them takes a look at each schema."""
        if any(isinstance(each, Tool) for each in given):
            return self._offered(given)
        key = canonical_json(list(given))
        if key not in self._tools:
            made: Sequence[Any] = given
            if len(given) > MAX_ITEMS_ON_LOOP or len(key) > MAX_TOOL_CHARACTERS_ON_LOOP:
                made = []
                for index, each in enumerate(given):  # one by one, so that nothing is done for a client that has gone
                    made += [await self._episode.shared.workers.call(Job(partial(tool_of, index, each), "tools"))]
            self._tools[key] = self._offered(made)
            self._say_unchecked(self._tools[key].callable)
        return self._tools[key]

    def _offered(self, given: Sequence[Any]) -> _UsableTools:
        chat = self._episode.shared.chat_of(MAIN)
        form = chat.parser.format if isinstance(chat, ChatModel) and chat.parser.writes_as_read else None
        shown, unwritable = list[Tool](), list[str]()
        for tool in tools_of(given):
            if supports_name(form, tool):
                shown.append(tool)
            else:
                unwritable.append(tool.name)
        return _UsableTools(shown, unwritable)

    async def _read_ahead(self, messages: Sequence[Any]) -> None:
        """Read a long history in pieces, between which others run: each message is known when it is asked for."""
        if not isinstance(messages, list) or len(messages) <= MAX_ITEMS_ON_LOOP:
            return
        until = time.perf_counter() + LOOP_SLICE_SECONDS
        told = [each for each in messages if not (isinstance(each, dict) and "refers" in each)]
        for _ in self._histories.reader.read_ahead(told):
            if time.perf_counter() > until:
                await anyio.lowlevel.checkpoint()
                until = time.perf_counter() + LOOP_SLICE_SECONDS

    def _say_unchecked(self, tools: Sequence[Tool]) -> None:
        """Note once a run which keywords of the tools' schemas are not checked."""
        for tool in tools:
            notes = ", ".join(map(str, modern(tool.parameters).notes))
            if notes and self._episode.shared.is_new(f"{tool.name}: {notes}"):
                self._episode.faults.append(f"the schema of the tool {tool.name!r} is not checked whole: {notes}")

    async def _aligned(self, asked: ChatCall, tools: Sequence[Tool]) -> tuple[Alignment, float]:
        schemas = [tool.as_openai() for tool in tools]
        await self._read_ahead(asked.messages)
        while True:
            began = time.perf_counter()
            # An author's own conversations may have spoken since, and a request may go on from what they said.
            for state in self._episode.states.values():
                if state not in self._own:
                    self._histories.take_in(state)
            found = align(
                self._histories,
                asked.messages,
                schemas,
                label=asked.label,
                handles=asked.handles,
                previous=asked.previous,
                own_system=asked.own_system,
                systems=self._systems,
                system_as_user=asked.system_as_user,
                as_sent=asked.as_sent,
            )
            seconds = time.perf_counter() - began
            if found.again is not Again.TAKEN_BACK or found.before is None or found.before.over.is_set():
                return found, seconds
            # It is being cut at this moment.
            await found.before.over.wait()

    def _systems(self) -> SystemSupport:
        chat = self._episode.shared.chat_of(MAIN)
        return chat.systems if isinstance(chat, ChatModel) else TAKES_ALL

    def _replay(self, request: _OpenRequest, found: Alignment, turn: Turn, seconds: float) -> Turn:
        assert found.before is not None
        request.request_node = found.before
        record = request.record = self._record(found.before.thread, request.asked, found, seconds)
        record.turn, record.delivery = turn.number, Delivery.UNDELIVERED  # until whoever asked has it
        return turn

    def _settle(self, request_node: RequestNode, found: Alignment, cursor: Cursor, added: Sequence[TurnNode]) -> None:
        """Put what came of a request into the tree."""
        node = next((each for each in added if each is cursor.node), None)
        if node is None:
            self._histories.forget(request_node)
            if found.again is Again.TAKEN_BACK and found.before is not None:
                found.before.taken_back = False
            return
        assert request_node.record is not None
        request_node.record.turn = node.turn.number
        if request_node.record.delivery is Delivery.IN_FLIGHT:
            request_node.record.delivery = Delivery.UNDELIVERED  # until whoever asked has it
        self._histories.say(request_node, node, [node.turn.handle])

    def _thread(self, asked: ChatCall, found: Alignment, tools: Sequence[Tool]) -> ConversationState:
        """The conversation that answers: that of the turns it goes on from, unless another client asks."""
        known = found.before or found.parent
        if known is not None and known.fits(asked.label) and known.thread in self._own:
            return known.thread
        name = asked.label if asked.label and asked.label not in self._episode.states else f"chat-{len(self.threads)}"
        train = bool(tools) if asked.train is None else asked.train
        thread = self._open_thread(self._episode, name, tools, train)
        self.threads.append(thread)
        self._own.add(thread)
        return thread

    def _record(self, thread: ConversationState, asked: ChatCall, found: Alignment, seconds: float) -> ChatRequest:
        match = found.match
        parent = found.parent.node.turn if found.parent is not None and found.parent.node is not None else None
        record = ChatRequest(
            number=self._numbered,
            verdict=found.verdict,
            again=found.again,
            label=asked.label,
            form=asked.form,
            client=asked.client,
            purpose=asked.purpose,
            parent_agent="" if parent is None else parent.agent,
            parent_turn=None if parent is None else parent.number,
            tolerated=tuple(each for each in Tolerated if each in found.tolerated),
            volatile=match.volatile,
            messages=len(asked.messages),
            size=match.size,
            align_seconds=seconds,
        )
        self._numbered += 1
        thread.requests.append(record)
        return record

    def _handle(self, thread: ConversationState) -> Callable[[int], str]:
        """What names a turn to a client: the same whenever the episode is played, as the seed of its sampling is."""
        key = self._episode.key

        def named(number: int) -> str:
            turn = f"{key.id}/{thread.thread}/{number}".encode("utf-8", "surrogatepass")
            return f"call_{blake2b(turn, digest_size=6).hexdigest()}"

        return named


def _unwritable(missing: Unbridgeable, messages: Sequence[Message], asked: ChatCall) -> BadMessage:
    """An error that says why a template cannot write a history, and what helps."""
    text = f"the chat template cannot write this history: {missing}"
    begin = next((index for index, each in enumerate(messages) if each["role"] != "system"), len(messages))
    late = any(message["role"] == "system" for message in messages[begin:])
    if asked.system_as_user or not (late or begin):
        return BadMessage(text)
    where = "system messages after the beginning" if late else "system messages"
    return BadMessage(
        f"{text}. Where that is about {where}: put them before the model as a user's, by --system-as-user of "
        f"`deltarunner serve` and `run --agent`, or serve(system_as_user=True)."
    )


def _streams(thread: ConversationState, tools: Sequence[Tool], asked: ChatCall) -> bool:
    """Whether what a turn says can be told while it is sampled."""
    if isinstance(thread.model, MessageModel):
        return True
    return thread.model.parser.streams(tools, asked.tool_choice or "auto")


def _cursor(found: Alignment, tools: list[Tool]) -> Cursor:
    """Where the request is answered."""
    again, parent = found.before, found.parent
    if found.verdict is Verdict.AGAIN and again is not None and not found.as_sent:
        if again.node is None:
            return again.cursor.copied()
        stands = Cursor(tools, [], again.node)
        return before(again.node, stands, "environment", takes_back=found.again is Again.TAKEN_BACK)
    node = None if parent is None else parent.node
    if node is not None and not found.whole:
        # The same tools in another order: templates print them, so they stay as they were shown.
        shown = [tool["function"]["name"] for tool in node.segment.tools]
        tools = sorted(tools, key=lambda tool: shown.index(tool.name))
    whole = found.whole or ("start" if node is None else "")
    return Cursor(tools, found.messages, node, whole)


def _granted(thread: ConversationState, asked: Sampling | None) -> tuple[Sampling | None, dict[str, Any]]:
    """What of the sampling is given; of a trained thread it is the run's, but for what ends or shapes the answer."""
    if asked is None:
        return None, {}
    given = asked.given()
    granted = {name: value for name, value in given.items() if not thread.counted or name in GRANTED}
    own = thread.sampling()
    if "max_tokens" in granted:
        granted["max_tokens"] = min(granted["max_tokens"], own.max_tokens)
    if "logprobs" in granted:
        granted["logprobs"] = max(granted["logprobs"], own.logprobs)
    return Sampling(**granted), {name: value for name, value in given.items() if name not in granted}


def _not_enforced(sampling: Sampling | None) -> dict[str, Any]:
    """What a request's schema says that nothing holds the answer to."""
    schema = None if sampling is None else sampling.given().get("schema")
    told = not_enforced(schema) if schema is not None else []
    return {"schema": told} if told else {}
