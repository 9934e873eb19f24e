"""A service that answers requests of an external agent loop. Each request has the whole history of a conversation.

The caller may be any task of the event loop, or a thread that uses `anyio.from_thread`. A task of the episode answers
the request, so that the clocks and limits of the episode apply.
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
from runner.concurrency.clocks import ParallelRequest
from runner.concurrency.threads import Job
from runner.episode.alignment import RequestAlignment, align
from runner.episode.client_messages import as_taken, has_references, several_systems
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
from runner.sampling_fields import sampling_names
from runner.tokens.bridging.refusal import Unbridgeable
from runner.tokens.system_support import TAKES_ALL, SystemSupport
from runner.tools.external_tools import tool_of, tools_of
from runner.tools.schema_faults import schema_faults
from runner.tools.tool import Tool
from runner.trajectory import Turn
from runner.turn_events import DeliverTurn, TurnEventSink

__all__ = ["ChatService"]

OpenThread = Callable[[EpisodeState, str, Sequence[Tool], bool], ConversationState]
"""Function that opens the conversation of a thread: (episode, name of the thread, tools, True to train the thread)."""

GRANTED = frozenset(sampling_names(granted=True))
"""Sampling fields that a request may set even in a trained or evaluated thread. The run sets the other fields."""

MAX_ITEMS_ON_LOOP = 100
"""Maximum number of tools, or of messages, that are read without a pause. More would block the event loop."""

MAX_TOOL_CHARACTERS_ON_LOOP = 65_536
"""Tools with more characters of JSON are created in a thread, since the check of their schemas takes time."""

LOOP_SLICE_SECONDS = 0.005
"""Seconds after which the reading of a long history pauses, so that other tasks can run."""


@dataclass(frozen=True, slots=True)
class _UsableTools:
    """The tools of a request."""

    callable: Sequence[Tool]
    """The tools that the model is shown."""
    unwritable: Sequence[str]
    """Names of the other tools: the model's call format cannot express calls to these tools."""


@dataclass(slots=True, eq=False)
class _PendingRequest:
    """A request that is being answered."""

    chat_call: ChatCall
    sink: TurnEventSink | None = None
    """Receiver of the turn's events while it is sampled."""
    began: float = field(default_factory=time.perf_counter)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """The cancel scope of the answer. It is cancelled when the client disconnects."""
    done: anyio.Event = field(default_factory=anyio.Event)
    """Set when the request is answered or has failed."""
    request_node: RequestNode | None = None
    """The request's node in the history tree; None until the history is matched."""
    record: ChatRequest | None = None
    """The record of the request; None until the history is matched."""
    turn: Turn | None = None
    """The turn that answers the request; None before it was sampled."""
    continued: Turn | None = None
    """The cut turn that `turn` continues, or None."""
    error: Exception | None = None
    """The error that the caller receives, if there is no turn."""


class ChatService:
    """A service that answers requests while an episode's rollout runs."""

    def __init__(self, episode: EpisodeState, open_thread: OpenThread) -> None:
        self.threads: list[ConversationState] = []
        """The conversations that requests started, in the order of their start."""
        self._episode = episode
        self._open_thread = open_thread
        self._own: set[ConversationState] = set()  # `threads` as a set, since an episode may have a thousand
        self._histories = HistoryTree()
        self._numbered = 0
        self._tools: dict[str, _UsableTools] = {}
        self._group: TaskGroup | None = None
        self._context: Context
        self._answering: dict[_PendingRequest, None] = {}

    @property
    def is_open(self) -> bool:
        """True while the service answers requests."""
        return self._group is not None

    @asynccontextmanager
    async def open(self, tasks: TaskGroup) -> AsyncIterator[None]:
        """Answer requests while the block runs, under its clocks. At the end of the block, unanswered requests are cut.

        Args:
            tasks: the task group for the answers. It must be outside the block, since the author may leave scopes open
                inside.
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
        self, chat_call: ChatCall, *, sink: TurnEventSink | None = None, deliver: DeliverTurn | None = None
    ) -> Turn:
        """Answer a request.

        Args:
            chat_call: the request.
            sink: receives the events of the turn while it is sampled. If a finished turn is sent again, the sink
                receives no events. If the sink fails, the turn is cut.
            deliver: delivers the turn to the client. Its second argument is the cut turn that the turn continues, or
                None. If `deliver` fails or is cancelled, the turn counts as undelivered.

        Raises:
            EpisodeOver: the episode has ended or a limit was reached, as in `Conversation.generate`.
            BadInput: the messages, the tools or the sampling cannot be used, or the template cannot write the messages.
        """
        request = _PendingRequest(chat_call, sink)
        try:
            if self._group is not None:
                await self._hand_over(request, self._group)
            elif self._episode.limits.clock.is_over_this_task():  # this task runs under the clock, usually in a tool
                await self._serve(request)
            else:
                raise self._is_over()
            if request.turn is not None and deliver is not None:
                await deliver(request.turn, request.continued)
        except BaseException:
            if request.request_node is not None:
                request.request_node.gone = True
            request.scope.cancel()
            raise
        finally:
            if request.record is not None:
                request.record.seconds = time.perf_counter() - request.began
        if request.error is not None:
            raise request.error
        assert request.turn is not None  # a request without a turn has an error, which was raised
        if request.request_node is not None and request.record is not None:
            request.record.delivery = Delivery.DELIVERED
            request.request_node.gone = False
        return request.turn

    async def count(self, chat_call: ChatCall) -> int:
        """Return the number of ids in the prompt of a request, rendered from the start.

        Raises:
            BadInput: the messages or the tools cannot be used, or the engine takes messages.
        """
        chat = self._episode.shared.chat_of(MAIN)
        if not isinstance(chat, ChatModel):
            raise BadMessage("this engine takes messages: its server counts tokens only in answers; read their usage")
        offered = await self._tools_of(chat_call.tools)
        await self._read_ahead(chat_call.messages)
        read = self._histories.reader.read(chat_call.messages)
        if chat_call.system_as_user or several_systems(read):
            read = as_taken(read, chat.systems, system_as_user=chat_call.system_as_user)
        messages = chat.with_fitting_ids([each.message for each in read], tuple)
        schemas = [tool.as_openai() for tool in offered.callable]
        render = partial(chat.bridger.first_prompt, messages, schemas)
        try:
            return len(await self._episode.shared.workers.call(Job(render, "chat template")))
        except Unbridgeable as missing:
            raise _unwritable(missing, messages, chat_call, chat) from None

    async def _hand_over(self, request: _PendingRequest, group: TaskGroup) -> None:
        self._answering[request] = None
        # A task inherits the clocks, which are context variables, of the task that starts it. The caller may not have
        # those of the episode, so the task starts in the context of the rollout.
        self._context.copy().run(group.start_soon, self._serve, request)
        if request.sink is not None:
            await request.sink.forward()
        if not request.done.is_set():
            await request.done.wait()

    def _is_over(self) -> EpisodeOver:
        return EpisodeOver(f"{self._episode.key.id} is not being played: no request can be answered")

    async def _serve(self, request: _PendingRequest) -> None:
        request.error = self._is_over()  # this error remains if the task is cut
        try:
            with request.scope, ParallelRequest():
                if request.scope.cancel_called:
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

    async def _answer(self, request: _PendingRequest) -> Turn:
        chat_call = request.chat_call
        offered = await self._tools_of(chat_call.tools)
        tools = list(offered.callable)  # a copy, since it becomes the list of a cursor, which authors may change
        found, seconds = await self._aligned(chat_call, tools)
        if found.again is Again.REPLAYED and found.before is not None and found.before.node is not None:
            return self._replay(request, found, found.before.node.turn, seconds)
        if found.verdict is Verdict.CONTINUED and found.parent is not None and found.parent.node is not None:
            request.continued = found.parent.node.turn
        if request.continued is not None and isinstance(self._episode.shared.chat_of(MAIN), MessageModel):
            raise BadMessage(
                "the last message is a turn that was cut, and an engine that takes messages cannot continue it: "
                "add a user message."
            )
        thread = self._thread(chat_call, found, tools)
        sampling, not_granted = _granted(thread, chat_call.sampling)
        record = request.record = self._record(thread, chat_call, found, seconds)
        record.not_granted = {**not_granted, **_not_enforced(sampling), **chat_call.not_granted}
        if offered.unwritable:
            record.not_granted["tools"] = [*record.not_granted.get("tools", ()), *offered.unwritable]
        cursor = _cursor(found, tools)
        if found.again is Again.TAKEN_BACK and found.before is not None:
            found.before.taken_back = True
        request_node = request.request_node = RequestNode(
            thread, found.match.end, found.parent, cursor.copied(), found.last_turn, record=record
        )
        if chat_call.form == "responses":  # only this form has requests with the id of an answer
            request_node.history = found.history
        self._histories.add_request(request_node)
        self._episode.limits.context_rewritten(thread.name)
        known, sink = len(thread.nodes), request.sink
        sinks = TurnSinks(
            self._handle(thread),
            receive=None if sink is None else sink.put,
            sends_events=sink is not None and _streams(thread, tools, chat_call),
            sends_ids=True,
            raise_unbridgeable=True,
        )
        try:
            try:
                return await take_turn(thread, cursor, sampling, chat_call.tool_choice, sinks=sinks)
            except Unbridgeable as missing:
                raise _unwritable(missing, [*cursor.seen, *cursor.queued], chat_call, thread.chat) from None
        except BaseException as error:
            if isinstance(error, ContextFull) and not thread.counted:
                self._episode.limits.context_rewritten(thread.name)  # the client received the error and can act on it
            cut = not isinstance(error, Exception)
            record.delivery = Delivery.CUT if cut else Delivery.REFUSED
            record.error = "" if cut else str(error)
            raise
        finally:
            self._settle(request_node, found, cursor, thread.nodes[known:])

    async def _tools_of(self, given: Sequence[Any]) -> _UsableTools:
        """Return the tools of a request.

        Tools are cached, since each request repeats them and creating them checks each schema.
        """
        if any(isinstance(each, Tool) for each in given):
            return self._offered(given)
        key = canonical_json(list(given))
        if key not in self._tools:
            made: Sequence[Any] = given
            if len(given) > MAX_ITEMS_ON_LOOP or len(key) > MAX_TOOL_CHARACTERS_ON_LOOP:
                made = []
                # Tools are created one by one, so that work stops if the client disconnects.
                for index, each in enumerate(given):
                    made += [await self._episode.shared.workers.call(Job(partial(tool_of, index, each), "tools"))]
            self._tools[key] = self._offered(made)
            self._note_unchecked(self._tools[key].callable)
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
        """Read a long history in slices, so that other tasks can run. The messages are then cached."""
        if not isinstance(messages, list) or len(messages) <= MAX_ITEMS_ON_LOOP:
            return
        until = time.perf_counter() + LOOP_SLICE_SECONDS
        whole = [each for each in messages if not has_references([each])] if has_references(messages) else messages
        for _ in self._histories.reader.read_ahead(whole):
            if time.perf_counter() > until:
                await anyio.lowlevel.checkpoint()
                until = time.perf_counter() + LOOP_SLICE_SECONDS

    def _note_unchecked(self, tools: Sequence[Tool]) -> None:
        """Add a fault, once per run, for each tool whose schema is not checked completely or refuses every call."""
        self._episode.faults.extend(filter(self._episode.shared.is_new, schema_faults(tools)))

    async def _aligned(self, chat_call: ChatCall, tools: Sequence[Tool]) -> tuple[RequestAlignment, float]:
        schemas = [tool.as_openai() for tool in tools]
        await self._read_ahead(chat_call.messages)
        while True:
            began = time.perf_counter()
            # A request may also continue turns of the author's own conversations.
            for conversation in self._episode.conversations.values():
                if conversation not in self._own:
                    self._histories.take_in(conversation)
            found = align(
                self._histories,
                chat_call.messages,
                schemas,
                label=chat_call.label,
                handles=chat_call.handles,
                previous=chat_call.previous,
                own_system=chat_call.own_system,
                systems=self._systems,
                system_as_user=chat_call.system_as_user,
                as_sent=chat_call.as_sent,
            )
            seconds = time.perf_counter() - began
            if found.again is not Again.TAKEN_BACK or found.before is None or found.before.over.is_set():
                return found, seconds
            # The earlier request is still being cut. The history is aligned again after that.
            await found.before.over.wait()

    def _systems(self) -> SystemSupport:
        chat = self._episode.shared.chat_of(MAIN)
        return chat.systems if isinstance(chat, ChatModel) else TAKES_ALL

    def _replay(self, request: _PendingRequest, found: RequestAlignment, turn: Turn, seconds: float) -> Turn:
        assert found.before is not None
        request.request_node = found.before
        record = request.record = self._record(found.before.thread, request.chat_call, found, seconds)
        record.turn, record.delivery = turn.number, Delivery.UNDELIVERED  # until the client has received it
        return turn

    def _settle(
        self, request_node: RequestNode, found: RequestAlignment, cursor: Cursor, added: Sequence[TurnNode]
    ) -> None:
        """Add the turn of a request to the history tree. A request that led to no turn is removed."""
        node = next((each for each in added if each is cursor.node), None)
        if node is None:
            self._histories.forget(request_node)
            if found.again is Again.TAKEN_BACK and found.before is not None:
                found.before.taken_back = False
            return
        assert request_node.record is not None
        request_node.record.turn = node.turn.number
        if request_node.record.delivery is Delivery.IN_FLIGHT:
            request_node.record.delivery = Delivery.UNDELIVERED  # until the client has received it
        self._histories.add_answer(request_node, node, [node.turn.handle])

    def _thread(self, chat_call: ChatCall, found: RequestAlignment, tools: Sequence[Tool]) -> ConversationState:
        """Return the conversation that answers: the thread of the earlier turns if the label fits, or a new thread."""
        known = found.before or found.parent
        if known is not None and known.fits(chat_call.label) and known.thread in self._own:
            return known.thread
        name = (
            chat_call.label
            if chat_call.label and chat_call.label not in self._episode.conversations
            else f"chat-{len(self.threads)}"
        )
        train = bool(tools) if chat_call.train is None else chat_call.train
        thread = self._open_thread(self._episode, name, tools, train)
        self.threads.append(thread)
        self._own.add(thread)
        return thread

    def _record(
        self, thread: ConversationState, chat_call: ChatCall, found: RequestAlignment, seconds: float
    ) -> ChatRequest:
        match = found.match
        parent = found.parent.node.turn if found.parent is not None and found.parent.node is not None else None
        record = ChatRequest(
            number=self._numbered,
            verdict=found.verdict,
            again=found.again,
            label=chat_call.label,
            form=chat_call.form,
            client=chat_call.client,
            purpose=chat_call.purpose,
            parent_agent="" if parent is None else parent.agent,
            parent_turn=None if parent is None else parent.number,
            tolerated=tuple(each for each in Tolerated if each in found.tolerated) if found.tolerated else (),
            volatile=match.volatile,
            messages=len(chat_call.messages),
            size=match.size,
            align_seconds=seconds,
        )
        self._numbered += 1
        thread.requests.append(record)
        return record

    def _handle(self, thread: ConversationState) -> Callable[[int], str]:
        """Return a function from a turn's number to its id for clients. The ids are the same in each attempt."""
        key = self._episode.key

        def named(number: int) -> str:
            turn = f"{key.id}/{thread.thread}/{number}".encode("utf-8", "surrogatepass")
            return f"call_{blake2b(turn, digest_size=6).hexdigest()}"

        return named


def _unwritable(missing: Unbridgeable, messages: Sequence[Message], chat_call: ChatCall, chat: ChatModel) -> BadMessage:
    """Return the error for a history that the template cannot write, with a fix if system messages may be the cause."""
    text = f"the chat template cannot write this history: {missing}"
    begin = next((index for index, each in enumerate(messages) if each["role"] != "system"), len(messages))
    late = any(message["role"] == "system" for message in messages[begin:])
    if chat_call.system_as_user or not (late or (begin and not chat.systems.one)):
        return BadMessage(text)
    where = "system messages after the beginning" if late else "system messages"
    return BadMessage(
        f"{text}. If that is about {where}: send them to the model as user messages, by --system-as-user of "
        f"`deltarunner serve` and `run --agent`, or serve(system_as_user=True)."
    )


def _streams(thread: ConversationState, tools: Sequence[Tool], chat_call: ChatCall) -> bool:
    """Return True if the events of a turn can be sent while it is sampled."""
    if isinstance(thread.model, MessageModel):
        return True
    return thread.model.parser.streams(tools, chat_call.tool_choice or "auto")


def _cursor(found: RequestAlignment, tools: list[Tool]) -> Cursor:
    again, parent = found.before, found.parent
    if found.verdict is Verdict.AGAIN and again is not None and not found.as_sent:
        if again.node is None:
            return again.cursor.copied()
        stands = Cursor(tools, [], again.node)
        return before(again.node, stands, "environment", takes_back=found.again is Again.TAKEN_BACK)
    node = None if parent is None else parent.node
    if node is not None and not found.whole:
        # If the same tools arrive in another order, the earlier order is kept, since templates print tools in order.
        shown = [tool["function"]["name"] for tool in node.segment.tools]
        tools = sorted(tools, key=lambda tool: shown.index(tool.name))
    whole = found.whole or ("start" if node is None else "")
    return Cursor(tools, found.messages, node, whole)


def _granted(thread: ConversationState, requested: Sampling | None) -> tuple[Sampling | None, dict[str, Any]]:
    """Return the requested sampling that applies, and the fields that do not apply.

    In a trained or evaluated thread, the run's fields replace requested fields, except for fields that end or shape
    the answer. In every thread, the smaller `max_tokens` and the larger `logprobs` apply.
    """
    if requested is None:
        return None, {}
    given = requested.given()
    granted = {name: value for name, value in given.items() if not thread.counted or name in GRANTED}
    own = thread.sampling()
    if "max_tokens" in granted:
        granted["max_tokens"] = min(granted["max_tokens"], own.max_tokens)
    if "logprobs" in granted:
        granted["logprobs"] = max(granted["logprobs"], own.logprobs)
    return Sampling(**granted), {name: value for name, value in given.items() if name not in granted}


def _not_enforced(sampling: Sampling | None) -> dict[str, Any]:
    """Return the parts of a request's schema that nothing enforces."""
    schema = None if sampling is None else sampling.given().get("schema")
    parts = not_enforced(schema) if schema is not None else []
    return {"schema": parts} if parts else {}
