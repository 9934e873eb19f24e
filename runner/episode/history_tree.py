"""The history tree of an episode: a tree of messages, with the turns that were requested and sampled at each point.

A message leads from one node to the next; the key of this step is the normalised message, with the index of the call
that it answers. The time to look up a history is proportional to its messages, not to the number of turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import anyio

from runner.chat_requests import ChatRequest, Delivery, Tolerated, UnknownReference
from runner.engines.base import FinishReason
from runner.episode.client_messages import (
    MessageReader,
    ReadMessage,
    has_references,
    joined,
    thought_of,
    with_thought_apart,
)
from runner.episode.state import ConversationState
from runner.episode.turn_comparison import changed_around, is_prefix
from runner.episode.turn_tree import Cursor, TurnNode
from runner.history_cache import MAX_RECENT_HISTORIES
from runner.messages import AnsweredCalls, CallIndex

__all__ = ["HistoryMatch", "HistoryNode", "HistoryTree", "RequestNode"]

MAX_JOINED_MESSAGES = 64
"""Maximum number of messages in which a client may return one turn, such as one message for each call."""


@dataclass(slots=True, eq=False)
class HistoryNode:
    """A node of the tree: the point after a sequence of messages."""

    after: dict[tuple[Hashable, CallIndex | None], HistoryNode] = field(default_factory=dict)
    """The node after each further message, by the key of the message and the call that it answers."""
    requests: list[RequestNode] = field(default_factory=list)
    """Requests whose prompt ends at this node, in the order of their arrival."""
    answers: list[RequestNode] = field(default_factory=list)
    """Requests whose answer ends at this node."""


@dataclass(slots=True, eq=False)
class RequestNode:
    """A request for a turn. The node is in the tree from the arrival of the request on."""

    thread: ConversationState
    """The conversation that answers."""
    prompt_node: HistoryNode
    """The node at which the prompt ends."""
    parent: RequestNode | None
    """The request whose turn this request follows; None if it follows no turn."""
    cursor: Cursor
    """The cursor of the turn; a second request for the same turn begins at the same cursor."""
    last_turn: RequestNode | None = None
    """The last turn in the request's history; None if the history contains no turn."""
    children: list[RequestNode] = field(default_factory=list)
    record: ChatRequest | None = None
    """The record of the request; None for an author's own turn."""
    node: TurnNode | None = None
    """The turn's node in the turn tree; None until the turn was sampled."""
    answer_node: HistoryNode | None = None
    """The node at which the answer ends; None until the turn was sampled."""
    number: int = 0
    taken_back: bool = False
    """True if the turn was sampled again and is no longer trained on."""
    over: anyio.Event = field(default_factory=anyio.Event)
    """Set once sampling for the request is over."""
    gone: bool = False
    """True after the client disconnected; False again once it has received the answer to a repeated request."""
    history: Sequence[ReadMessage] | None = None
    """The history of the request, for later requests that refer to it by id; None if later requests cannot."""
    sent_answer: ReadMessage | None = None
    """The answer as the client received it; None until it was sampled."""

    @property
    def label(self) -> str:
        """The client's own name for the caller."""
        return self.record.label if self.record is not None else ""

    @property
    def in_flight(self) -> bool:
        """True while the turn is sampled for a client that waits."""
        return self.record is not None and self.record.delivery is Delivery.IN_FLIGHT and not self.gone

    @property
    def lost(self) -> bool:
        """True if the client disconnected before it received the answer, and the turn was not sampled again."""
        return self.gone and not self.taken_back

    @property
    def finished(self) -> bool:
        """True if the turn was sampled, and was neither aborted nor ended by an error."""
        return self.node is not None and self.node.turn.finish not in (FinishReason.ABORT, FinishReason.ERROR)

    def descendants(self) -> Iterator[RequestNode]:
        """Yield this request, and all requests that follow its turn, at any depth."""
        left = [self]
        while left:
            request_node = left.pop()
            yield request_node
            left += request_node.children

    def path(self) -> Iterator[RequestNode]:
        """Yield the requests from this one back to the first."""
        request_node: RequestNode | None = self
        while request_node is not None:
            yield request_node
            request_node = request_node.parent

    def fits(self, label: str) -> bool:
        """Return True if the request may belong to the client with this label."""
        return not label or not self.label or label == self.label


@dataclass(frozen=True, slots=True)
class ComparedTurn:
    """The result of comparing a history with the turns in it."""

    parent: RequestNode | None
    """The last compared turn."""
    messages: int
    """Number of the compared messages."""
    changed: frozenset[Tolerated]
    """The differences in the compared messages."""


@dataclass(slots=True)
class HistoryMatch:
    """The history of a request, matched with the tree message by message."""

    messages: list[ReadMessage] = field(default_factory=list)
    """The messages. The messages of one turn are joined."""
    points: list[HistoryNode] = field(default_factory=list)
    """The node after each message."""
    answered_calls: list[CallIndex | None] = field(default_factory=list)
    """The call that each message answers; None for a message that answers no call."""
    tolerated: set[Tolerated] = field(default_factory=set)
    """Tolerated differences between the client's messages and the turns."""
    thoughts: list[int] = field(default_factory=list)
    """Indices of the messages that have reasoning."""
    naming: list[int] = field(default_factory=list)
    """Indices of the messages that have ids of turns."""
    sent: dict[int, ReadMessage] = field(default_factory=dict)
    """The client's messages that were replaced by the messages of the turns that their ids name, by index."""
    size: int = 0
    """Bytes of the messages as JSON."""
    volatile: int = 0
    """Number of volatile lines that were removed from the messages."""
    compared: ComparedTurn | None = None
    """An earlier comparison of the beginning of this history, which is reused."""

    def copied(self) -> HistoryMatch:
        """Return a copy that can be extended."""
        match = HistoryMatch(list(self.messages), list(self.points), list(self.answered_calls), set(self.tolerated))
        match.thoughts, match.naming, match.sent = list(self.thoughts), list(self.naming), dict(self.sent)
        match.size, match.volatile, match.compared = self.size, self.volatile, self.compared
        return match

    def add(self, message: ReadMessage, point: HistoryNode, answered: CallIndex | None) -> None:
        """Add the next message, with the node after it, and with the call that it answers, if any."""
        if "reasoning_content" in message.message:
            self.thoughts.append(len(self.messages))
        if message.handles:
            self.naming.append(len(self.messages))
        self.messages.append(message)
        self.points.append(point)
        self.answered_calls.append(answered)
        self.tolerated |= message.tolerated
        self.size += message.size
        self.volatile += message.volatile

    @property
    def end(self) -> HistoryNode:
        return self.points[-1]


class HistoryTree:
    """The history tree of one episode, with an index of turns by handle."""

    def __init__(self) -> None:
        self.reader = MessageReader()
        """The reader of messages, which caches them."""
        self.latest: dict[ConversationState, RequestNode] = {}
        self._numbered = 0
        self._root = HistoryNode()
        self._handles: dict[str, RequestNode] = {}
        self._known: dict[int, RequestNode] = {}
        self._taken_in: dict[int, int] = {}
        self._recent = deque[_MatchedHistory](maxlen=MAX_RECENT_HISTORIES)

    # --- requests and their answers

    def add_request(self, request_node: RequestNode) -> None:
        request_node.number = self._numbered
        self._numbered += 1
        self.latest[request_node.thread] = request_node
        request_node.prompt_node.requests.append(request_node)
        if request_node.parent is not None:
            request_node.parent.children.append(request_node)

    def forget(self, request_node: RequestNode) -> None:
        """Remove a request that led to no turn."""
        request_node.prompt_node.requests.remove(request_node)
        if request_node.parent is not None:
            request_node.parent.children.remove(request_node)
        request_node.over.set()

    def add_answer(self, request_node: RequestNode, node: TurnNode, handles: Sequence[str]) -> None:
        """Add the sampled turn of a request to the tree."""
        request_node.node = node
        request_node.sent_answer = self.reader.read_one(node.turn.as_message())
        self._known[id(node)] = request_node
        reply = self.reader.read_one(node.reply)
        # If the turn continues a cut turn, its message began with the cut turn.
        begun = self._known.get(id(node.spoken), request_node)
        request_node.answer_node = _stepped(begun.prompt_node, reply.key, None)
        request_node.answer_node.answers.append(request_node)
        self._handles.update(dict.fromkeys(handles, request_node))
        request_node.over.set()

    def named(self, handles: Sequence[str]) -> RequestNode | None:
        """Return the latest turn that one of these handles names; None if all handles are unknown."""
        known = [self._handles[handle] for handle in handles if handle in self._handles]
        return max(known, key=lambda request_node: request_node.number, default=None)

    def own_id(self, call_id: str) -> str:
        """Return the call id that a turn sampled, for the call id that a client received; any other id unchanged."""
        handle, _, number = call_id.rpartition("_")
        turn = self._handles.get(handle)
        calls = [] if turn is None or turn.node is None else turn.node.turn.tool_calls
        return calls[int(number)].id if number.isdecimal() and int(number) < len(calls) else call_id

    def turn_of(self, message: ReadMessage) -> RequestNode | None:
        """Return the turn of an assistant message if its ids and its content match the turn; else None."""
        turn = self.named(message.handles) if message.role == "assistant" else None
        sent = None if turn is None else turn.sent_answer
        return turn if sent is not None and sent.key == message.key else None

    def take_in(self, thread: ConversationState) -> None:
        """Add the turns of an author's own conversation that are not in the tree yet."""
        for node in thread.nodes[self._taken_in.get(id(thread), 0) :]:
            before = node.spoken.parent
            parent = None if before is None else self._known.get(id(before))
            match = self.match(self.reader.read(node.messages[:-1]))
            whole = "" if node.answered else node.segment.cause
            cursor = Cursor(thread.cursor.tools, list(node.prompt_messages), before, whole)
            request_node = RequestNode(thread, match.end, parent, cursor, parent)
            self.add_request(request_node)
            self.add_answer(request_node, node, ())
        self._taken_in[id(thread)] = len(thread.nodes)

    # --- looking up

    def read(self, messages: Sequence[Any], previous: str, *, own_system: bool) -> tuple[list[ReadMessage], bool]:
        """Read the history of a request.

        Args:
            messages: the messages of the request.
            previous: id of an earlier answer, which precedes the messages together with its history; "" if missing.
            own_system: True if the first message is a system message, which then precedes the earlier history.

        Returns:
            The messages, and True if a part of the history was given only by its id.

        Raises:
            BadMessage: an item is not a message, or the last message is a user message with content that is not text.
            UnknownReference: an id does not belong to a turn of the episode.
        """
        refers = has_references(messages)
        read = self.reader.read([self._referred(each) for each in messages] if refers else messages)
        if not previous:
            return read, refers
        turn = self._handles.get(f"call_{previous.removeprefix('resp_')}")
        if turn is None or turn.sent_answer is None or turn.history is None:
            raise UnknownReference(previous, is_item=False)
        return [*read[:own_system], *turn.history, turn.sent_answer, *read[own_system:]], True

    def _referred(self, message: Any) -> Any:
        """Return the message of a turn, for a reference that has only its id, and any other message unchanged.

        Raises:
            UnknownReference: the id does not belong to a turn of the episode.
        """
        given = message.get("refers") if isinstance(message, dict) else None
        if given is None:
            return message
        turn = self._handles.get(message.get("handle", ""))
        turn = self.named([call["id"].rpartition("_")[0] for call in message.get("tool_calls", ())]) or turn
        if turn is None or turn.node is None:
            raise UnknownReference(given, is_item=True)
        return turn.node.turn.as_message()

    def match(self, messages: Sequence[ReadMessage]) -> HistoryMatch:
        """Match a history with the tree, and add nodes for new messages.

        If a recently matched history is a prefix of this one, only the rest is compared.
        """
        before = next((each for each in reversed(self._recent) if each.is_reusable_in(messages)), None)
        match, calls = (
            (HistoryMatch(), AnsweredCalls()) if before is None else (before.match.copied(), before.calls.copied())
        )
        point, index = (match.end if match.points else self._root), 0
        history, rest = list(messages), messages[0 if before is None else len(before.history) :]
        messages = self._in_order_of_calls(self._gathered(rest, match), match)
        while index < len(messages):
            sent = messages[index]
            taken, message = self._next(point, messages, index, match)
            index += taken
            if message is None:
                continue
            sent = sent if taken == 1 else message
            known = self._turn_named_by(message) or message
            if known is not sent:
                match.sent[len(match.messages)], message = sent, known
            answered = calls.by(len(match.messages), message.message)
            point = _stepped(point, message.key, answered)
            match.add(message, point, answered)
        self._recent.append(_MatchedHistory(history, match, calls))
        return match

    def _next(
        self, point: HistoryNode, messages: list[ReadMessage], index: int, match: HistoryMatch
    ) -> tuple[int, ReadMessage | None]:
        """Return the number of messages that were read, and the message that they form; None if they are skipped."""
        message = messages[index]
        if message.role != "assistant":
            return 1, message
        if _has_thought_of_turn(message, point):
            message = messages[index] = with_thought_apart(message)
        end = index + 1
        if end < len(messages) and messages[end].role != "assistant" and (message.key, None) in point.after:
            return 1, message
        while end < min(len(messages), index + MAX_JOINED_MESSAGES) and messages[end].role == "assistant":
            end += 1
        # If the client lost the answer and requests the turn again, the part it received may be the last message.
        lost = [request_node for request_node in point.requests if request_node.lost]
        whole = joined(messages[index:end]) if end == len(messages) and lost else None
        if whole is not None and any(_is_part(whole, request_node) for request_node in lost):
            match.tolerated.add(Tolerated.CUT_ITEMS)
            return end - index, None
        if (whole_turn := self._joined_turn(point, messages, index, end)) is not None:
            return whole_turn
        gone = (request_node for request_node in point.requests if request_node.gone)
        if end > index + 1 and any(_is_part(message, request_node) for request_node in gone):
            match.tolerated.add(Tolerated.CUT_ITEMS)
            return 1, None
        return 1, message

    def _joined_turn(
        self, point: HistoryNode, messages: list[ReadMessage], index: int, end: int
    ) -> tuple[int, ReadMessage] | None:
        """Find the longest run of messages from `index` on that is one known turn.

        Return the number of its messages, and the message that they form; None if there is no such run.
        """
        for last in range(end, index, -1) if any(each.answers for each in point.after.values()) else ():
            whole = joined(messages[index:last])
            known = point.after.get((whole.key, None))
            # The messages may include the reasoning of a cut turn, before the turn that was sampled in its place.
            if known is not None and known.answers and (last == index + 1 or _thinks_alike(whole, known)):
                return last - index, whole
        # The client may have sent one turn as several messages, one of which has the ids of the turn.
        for last in range(end, index + 1, -1) if any(map(self._names_turn, messages[index:end])) else ():
            whole = joined(messages[index:last])
            if self._turn_named_by(whole) is not None:
                return last - index, whole
        return None

    def _names_turn(self, message: ReadMessage) -> bool:
        return self.named(message.handles) is not None

    def _turn_named_by(self, message: ReadMessage) -> ReadMessage | None:
        """Return the original message of the turn that a message's ids name, if the client changed only details.

        Return None if no ids name a turn, or if the message is unchanged, or edited as `changed_around` defines it.
        """
        turn = self.named(message.handles) if message.role == "assistant" else None
        ours = turn.sent_answer if turn is not None else None
        if ours is None or (ours.key == message.key and message.call_ids in ((), ours.call_ids)):
            return None  # unchanged
        changed = changed_around(ours, message)
        return None if changed is None else replace(ours, size=message.size, tolerated=message.tolerated | changed)

    def _gathered(self, messages: Sequence[ReadMessage], match: HistoryMatch) -> list[ReadMessage]:
        """Join the assistant messages that belong to one turn, if results of its calls are between them."""
        gathered: list[ReadMessage] = []
        last: int | None = None  # position of the last assistant message, since its turn may have further calls
        for message in messages:
            before = gathered[last] if last is not None else None
            apart = last is not None and message.role == "assistant" and len(gathered) > last + 1
            if apart and before is not None and last is not None and self._are_one_turn(before, message):
                gathered[last] = joined([before, message])
                match.tolerated.add(Tolerated.REORDERED)
                continue
            if message.role == "assistant":
                last = len(gathered)
            elif message.role != "tool":
                last = None
            gathered.append(message)
        return gathered

    def _are_one_turn(self, one: ReadMessage, other: ReadMessage) -> bool:
        return one.handles[:1] == other.handles[:1] != () and self.named(one.handles) is not None

    def _in_order_of_calls(self, messages: list[ReadMessage], match: HistoryMatch) -> list[ReadMessage]:
        """Sort the results of parallel calls by the order of the calls.

        Clients send results in the order of arrival, and most templates match results to calls by their order only.
        """
        begin: int | None = None  # where results begin
        spoke: list[ReadMessage] = []  # the latest assistant messages, which may form one turn
        for index, message in enumerate([*messages, None]):
            if message is not None and message.role == "tool":
                begin = index if begin is None else begin
                continue
            if begin is not None and index - begin > 1:
                results, at = messages[begin:index], self._positions(spoke)
                ordered = sorted(results, key=lambda each: at.get(each.message.get("tool_call_id", ""), len(at)))
                if ordered != results:
                    messages[begin:index] = ordered
                    match.tolerated.add(Tolerated.REORDERED)
            begin = None
            if message is not None and message.role == "assistant":
                joined = index > 0 and messages[index - 1].role == "assistant"
                spoke = [*spoke[1 - MAX_JOINED_MESSAGES :], message] if joined else [message]
        return messages

    def _positions(self, spoke: Sequence[ReadMessage]) -> dict[str, int]:
        """Return the position of each call, by its id, in the order of the turn to which the messages may belong."""
        ids: list[str] = []
        for message in spoke:
            ids += message.call_ids
            if len(spoke) > 1 or self._names_turn(message):
                made = self._calls_of(message)
                ids.sort(key=lambda call_id: made.get(call_id, len(made)))
        return {call_id: position for position, call_id in enumerate(ids)}

    def _calls_of(self, message: ReadMessage) -> dict[str, int]:
        """Return the position of each call of the turn that a message names, by id; empty if it names no turn."""
        turn = self.named(message.handles)
        given = () if turn is None or turn.sent_answer is None else turn.sent_answer.call_ids
        return {call_id: position for position, call_id in enumerate(given)}


@dataclass(frozen=True, slots=True)
class _MatchedHistory:
    history: list[ReadMessage]
    """The messages as they were read from the request."""
    match: HistoryMatch
    calls: AnsweredCalls

    def is_reusable_in(self, messages: Sequence[ReadMessage]) -> bool:
        """Return True if this history is a prefix of `messages`, and the rest can be read independently.

        The rest is not independent if a client sent a turn, or the results of its calls, as several messages, some of
        which are in the rest.
        """
        length = len(self.history)
        if not 0 < length < len(messages) or messages[length - 1] is not self.history[-1]:
            return False
        if self.history[-1].role == "assistant" or messages[length].role == "tool":
            return False
        spoke = next((each.handles[:1] for each in reversed(self.history) if each.role == "assistant"), ())
        if spoke and any(each.handles[:1] == spoke for each in messages[length:]):
            return False
        # A message that was sent before is the same object. Other messages are compared by their fields.
        return messages[:length] == self.history


def _stepped(point: HistoryNode, key: Hashable, answered: CallIndex | None) -> HistoryNode:
    if (found := point.after.get((key, answered))) is None:
        found = point.after[key, answered] = HistoryNode()
    return found


def _is_part(message: ReadMessage, request_node: RequestNode) -> bool:
    return request_node.node is not None and is_prefix(message.message, request_node.node.reply)


def _has_thought_of_turn(message: ReadMessage, point: HistoryNode) -> bool:
    """Return True if a message's content begins with the reasoning of a turn that was sampled at this point."""
    received = thought_of(message.message)
    sampled = (turn.node for each in point.after.values() for turn in each.answers) if received else ()
    return any(node is not None and node.reply.get("reasoning_content", "").strip() == received for node in sampled)


def _thinks_alike(message: ReadMessage, known: HistoryNode) -> bool:
    """Return True if the reasoning of a message is missing, or equals the reasoning of a turn with the same content."""
    received = message.message.get("reasoning_content", "").strip()
    thoughts = (each.node.reply.get("reasoning_content", "") for each in known.answers if each.node is not None)
    return not received or any(received == thought.strip() for thought in thoughts)
