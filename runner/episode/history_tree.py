"""The histories of an episode: a tree of messages that says which turns were asked, and which were said, after which.

A step of the tree is what counts in a message, with the index of the call that it answers. So a whole history is looked
up by one step a message, however many turns there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import anyio

from runner.chat_requests import ChatRequest, Delivery, Tolerated, UnknownReference
from runner.engines.base import FinishReason
from runner.episode.client_messages import (
    MAX_RECENT_HISTORIES,
    MessageReader,
    ReadMessage,
    joined,
    thought_of,
    with_thought_apart,
)
from runner.episode.state import ConversationState
from runner.episode.turn_comparison import begins, changed_around
from runner.episode.turn_tree import Cursor, TurnNode
from runner.messages import AnsweredCalls, CallIndex

__all__ = ["HistoryMatch", "HistoryNode", "HistoryTree", "RequestNode"]

MAX_JOINED_MESSAGES = 64
"""A turn may come back as so many messages, one for each of its calls."""


@dataclass(slots=True, eq=False)
class HistoryNode:
    """A point in the tree: all histories that begin with the same messages end here."""

    after: dict[tuple[Hashable, CallIndex | None], HistoryNode] = field(default_factory=dict)
    """The point that each further message leads to."""
    asked: list[RequestNode] = field(default_factory=list)
    """The turns whose prompt ends here, in the order in which they were asked for."""
    said: list[RequestNode] = field(default_factory=list)
    """The turns whose message is the last one here."""


@dataclass(slots=True, eq=False)
class RequestNode:
    """A turn in the tree, from the moment on at which it is asked for."""

    thread: ConversationState
    """The conversation in which it was asked."""
    asked: HistoryNode
    """The point at which its prompt ends."""
    parent: RequestNode | None
    """The turn that it follows."""
    cursor: Cursor
    """The head of the conversation at which it was asked; a sibling request begins there too."""
    behind: RequestNode | None = None
    """The turn that its history was found to end with, before what it was asked."""
    children: list[RequestNode] = field(default_factory=list)
    """The turns that follow it."""
    record: ChatRequest | None = None
    """The request that asked for it; None for a turn of an author's own."""
    node: TurnNode | None = None
    """The node of the turn in the forest, once it was sampled."""
    said: HistoryNode | None = None
    """The point at which its message ends."""
    number: int = 0
    """The turn's number in the order in which turns entered the tree."""
    taken_back: bool = False
    """Whether it was sampled anew."""
    over: anyio.Event = field(default_factory=anyio.Event)
    """Set once nothing more is sampled for it."""
    gone: bool = False
    """Whether whoever asked went away."""
    told: Sequence[ReadMessage] | None = None
    """What it was asked, as a later request goes on from it by its id; None where no request can."""
    given: ReadMessage | None = None
    """Its message as the client was given it, once it was sampled."""

    @property
    def label(self) -> str:
        """The client's own name for who asked."""
        return self.record.label if self.record is not None else ""

    @property
    def in_flight(self) -> bool:
        """Whether it is being sampled for somebody who waits."""
        return self.record is not None and self.record.delivery is Delivery.IN_FLIGHT and not self.gone

    @property
    def lost(self) -> bool:
        """Whether whoever asked went away before it was there, and nobody asked again."""
        return self.gone and not self.taken_back

    @property
    def finished(self) -> bool:
        """Whether it was sampled to its end."""
        return self.node is not None and self.node.turn.finish not in (FinishReason.ABORT, FinishReason.ERROR)

    def line(self) -> Iterator[RequestNode]:
        """Itself and all turns that go on from it, at any depth."""
        left = [self]
        while left:
            request_node = left.pop()
            yield request_node
            left += request_node.children

    def path(self) -> Iterator[RequestNode]:
        """The turns on its path, itself first."""
        request_node: RequestNode | None = self
        while request_node is not None:
            yield request_node
            request_node = request_node.parent

    def fits(self, label: str) -> bool:
        """Whether it may be of the client that calls itself so."""
        return not label or not self.label or label == self.label


@dataclass(frozen=True, slots=True)
class ComparedTurn:
    """The comparison of a history with the turns that it tells."""

    parent: RequestNode | None
    """The last of these turns."""
    messages: int
    """The number of messages that were compared."""
    changed: frozenset[Tolerated]
    """The differences that were found in these messages."""


@dataclass(slots=True)
class HistoryMatch:
    """The history of a request, message by message through the tree."""

    messages: list[ReadMessage] = field(default_factory=list)
    """The messages, those of one turn joined."""
    points: list[HistoryNode] = field(default_factory=list)
    """The point that each message leads to."""
    answers: list[CallIndex | None] = field(default_factory=list)
    """The call that each message answers."""
    tolerated: set[Tolerated] = field(default_factory=set)
    """The differences that the client made on the way, which change nothing."""
    thoughts: list[int] = field(default_factory=list)
    """The indices of the messages that have reasoning."""
    sent: dict[int, ReadMessage] = field(default_factory=dict)
    """Of messages that stand for a turn by their ids: as the client sent them, by index."""
    size: int = 0
    """The bytes of the messages as JSON."""
    volatile: int = 0
    """The number of lines that were taken out of the messages."""
    compared: ComparedTurn | None = None
    """An earlier comparison of the beginning of this history, so that it is not made twice."""

    def copied(self) -> HistoryMatch:
        """The same, to be gone on with."""
        return replace(
            self,
            messages=list(self.messages),
            points=list(self.points),
            answers=list(self.answers),
            tolerated=set(self.tolerated),
            thoughts=list(self.thoughts),
            sent=dict(self.sent),
        )

    def add(self, message: ReadMessage, point: HistoryNode, answered: CallIndex | None) -> None:
        """Go on by a message."""
        if "reasoning_content" in message.message:
            self.thoughts.append(len(self.messages))
        self.messages.append(message)
        self.points.append(point)
        self.answers.append(answered)
        self.tolerated |= message.tolerated
        self.size += message.size
        self.volatile += message.volatile

    @property
    def end(self) -> HistoryNode:
        """Where the whole history leads to."""
        return self.points[-1]


class HistoryTree:
    """The tree of one episode, and who answers to which handle."""

    def __init__(self) -> None:
        self.reader = MessageReader()
        """Reads messages, and keeps what it read."""
        self.latest: dict[ConversationState, RequestNode] = {}
        """The turn of each conversation that was asked for last."""
        self._numbered = 0
        self._root = HistoryNode()
        self._handles: dict[str, RequestNode] = {}
        self._known: dict[int, RequestNode] = {}
        self._taken_in: dict[int, int] = {}
        self._recent = deque[_MatchedHistory](maxlen=MAX_RECENT_HISTORIES)

    # --- what was asked and said

    def ask(self, request_node: RequestNode) -> None:
        """Add a turn that is asked for now."""
        request_node.number = self._numbered
        self._numbered += 1
        self.latest[request_node.thread] = request_node
        request_node.asked.asked.append(request_node)
        if request_node.parent is not None:
            request_node.parent.children.append(request_node)

    def forget(self, request_node: RequestNode) -> None:
        """Take away one that came to nothing."""
        request_node.asked.asked.remove(request_node)
        if request_node.parent is not None:
            request_node.parent.children.remove(request_node)
        request_node.over.set()

    def say(self, request_node: RequestNode, node: TurnNode, handles: Sequence[str]) -> None:
        """Add what was sampled for a turn."""
        request_node.node = node
        request_node.given = self.reader.read_one(node.turn.as_message())
        self._known[id(node)] = request_node
        reply = self.reader.read_one(node.reply)
        # Where it goes on with a turn that was cut, its message is the whole one, which began there.
        begun = self._known.get(id(node.spoken), request_node)
        request_node.said = _stepped(begun.asked, reply.key, None)
        request_node.said.said.append(request_node)
        self._handles.update(dict.fromkeys(handles, request_node))
        request_node.over.set()

    def named(self, handles: Sequence[str]) -> RequestNode | None:
        """The latest turn that one of these names; None where none is known."""
        known = [self._handles[handle] for handle in handles if handle in self._handles]
        return max(known, key=lambda request_node: request_node.number, default=None)

    def own_id(self, call_id: str) -> str:
        """The id of a call as its turn has it, where it is one that a client was given; else the same."""
        handle, _, number = call_id.rpartition("_")
        turn = self._handles.get(handle)
        calls = [] if turn is None or turn.node is None else turn.node.turn.tool_calls
        return calls[int(number)].id if number.isdecimal() and int(number) < len(calls) else call_id

    def turn_of(self, message: ReadMessage) -> RequestNode | None:
        """The turn that an assistant message tells, by its ids and as it was said; None for any other."""
        turn = self.named(message.handles) if message.role == "assistant" else None
        return turn if turn is not None and turn.given is not None and turn.given.key == message.key else None

    def take_in(self, thread: ConversationState) -> None:
        """Add the turns of a conversation that nobody asked for by a request: an author's own."""
        for node in thread.nodes[self._taken_in.get(id(thread), 0) :]:
            before = node.spoken.parent
            parent = None if before is None else self._known.get(id(before))
            match = self.match(self.reader.read(node.messages[:-1]))
            cursor = Cursor(thread.cursor.tools, list(node.asked), before, "" if node.answered else node.segment.cause)
            request_node = RequestNode(thread, match.end, parent, cursor, parent)
            self.ask(request_node)
            self.say(request_node, node, ())
        self._taken_in[id(thread)] = len(thread.nodes)

    # --- looking up

    def read(self, messages: Sequence[Any], previous: str, *, own_system: bool) -> list[ReadMessage]:
        """Read the history of a request.

        Args:
            messages: its messages.
            previous: the id of an earlier answer that stands before them, with what it was asked; "" for none.
            own_system: whether the first message is a system message, which then stands before all of that.

        Raises:
            BadMessage: one is no message, or holds what is not text.
            UnknownReference: an id is not that of a turn of the episode.
        """
        read = self.reader.read([self._referred(each) for each in messages] if _refers(messages) else messages)
        if not previous:
            return read
        turn = self._handles.get(f"call_{previous.removeprefix('resp_')}")
        if turn is None or turn.given is None or turn.told is None:
            raise UnknownReference(previous, is_item=False)
        return [*read[:own_system], *turn.told, turn.given, *read[own_system:]]

    def _referred(self, message: Any) -> Any:
        """The message of the turn that one refers to by an id alone; any other message as it is."""
        given = message.get("refers") if isinstance(message, Mapping) else None
        if given is None:
            return message
        turn = self._handles.get(message.get("handle", ""))
        turn = self.named([call["id"].rpartition("_")[0] for call in message.get("tool_calls", ())]) or turn
        if turn is None or turn.node is None:
            raise UnknownReference(given, is_item=True)
        return turn.node.turn.as_message()

    def match(self, messages: Sequence[ReadMessage]) -> HistoryMatch:
        """Follow a history; where it is a new one, the tree grows.

        Histories grow: where one begins as another that was followed lately, only what it has besides is looked at.
        """
        before = next((each for each in reversed(self._recent) if each.goes_on_in(messages)), None)
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
            told = self._turn_told_by(message) or message
            if told is not sent:
                match.sent[len(match.messages)], message = sent, told
            answered = calls.by(len(match.messages), message.message)
            point = _stepped(point, message.key, answered)
            match.add(message, point, answered)
        self._recent.append(_MatchedHistory(history, match, calls))
        return match

    def _next(
        self, point: HistoryNode, messages: list[ReadMessage], index: int, match: HistoryMatch
    ) -> tuple[int, ReadMessage | None]:
        """The next message of a history, joined of how many; None where those are no part of it."""
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
        # What ends a history is no part of it where its turn is asked for again.
        lost = [request_node for request_node in point.asked if request_node.lost]
        if end == len(messages) and lost:
            whole = joined(messages[index:end])
            if any(_is_part(whole, request_node) for request_node in lost):
                match.tolerated.add(Tolerated.CUT_ITEMS)
                return end - index, None
        for last in range(end, index, -1) if any(each.said for each in point.after.values()) else ():
            whole = joined(messages[index:last])
            known = point.after.get((whole.key, None))
            # What a cut turn thought may stand before the turn that was sampled in its stead.
            if known is not None and known.said and (last == index + 1 or _thinks_alike(whole, known)):
                return last - index, whole
        # One turn as several messages of which one has its ids.
        for last in range(end, index + 1, -1) if any(map(self._names_turn, messages[index:end])) else ():
            whole = joined(messages[index:last])
            if self._turn_told_by(whole) is not None:
                return last - index, whole
        if end > index + 1 and any(
            _is_part(message, request_node) for request_node in point.asked if request_node.gone
        ):
            match.tolerated.add(Tolerated.CUT_ITEMS)
            return 1, None
        return 1, message

    def _names_turn(self, message: ReadMessage) -> bool:
        return self.named(message.handles) is not None

    def _turn_told_by(self, message: ReadMessage) -> ReadMessage | None:
        """The message of the turn that this one tells in another form, with ids that prove it; None for any other."""
        turn = self.named(message.handles) if message.role == "assistant" else None
        if turn is None:
            return None
        ours = turn.given
        if ours is None or (ours.key == message.key and message.call_ids in ((), ours.call_ids)):
            return None  # it is told as it was
        changed = changed_around(ours, message)
        return None if changed is None else replace(ours, size=message.size, tolerated=message.tolerated | changed)

    def _gathered(self, messages: Sequence[ReadMessage], match: HistoryMatch) -> list[ReadMessage]:
        """The same with calls of one turn together that came as several messages, with results between them."""
        gathered: list[ReadMessage] = []
        last: int | None = None  # where the calls of a turn stand that may go on
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
        """The same with the results of calls that were made at once in the order of the calls.

        Clients send them as they come, and most templates tell by their order alone which call each of them answers.
        """
        begin: int | None = None  # where results begin
        spoke: list[ReadMessage] = []  # what was said last, since a turn may come as several messages
        for index, message in enumerate([*messages, None]):
            if message is not None and message.role == "tool":
                begin = index if begin is None else begin
                continue
            if begin is not None and index - begin > 1:
                results = messages[begin:index]
                ordered = _in_order(results, self._positions(spoke), lambda each: each.message.get("tool_call_id", ""))
                if ordered != results:
                    messages[begin:index] = ordered
                    match.tolerated.add(Tolerated.REORDERED)
            begin = None
            if message is not None and message.role == "assistant":
                goes_on = index > 0 and messages[index - 1].role == "assistant"
                spoke = [*spoke[1 - MAX_JOINED_MESSAGES :], message] if goes_on else [message]
        return messages

    def _positions(self, spoke: Sequence[ReadMessage]) -> dict[str, int]:
        """The position of each call, by id, in messages that may tell one turn."""
        ids: list[str] = []
        for message in spoke:
            ids += message.call_ids
            if len(spoke) > 1 or self._names_turn(message):
                # A client may have put the calls of a turn in another order.
                ids = _in_order(ids, self._calls_of(message))
        return {call_id: position for position, call_id in enumerate(ids)}

    def _calls_of(self, message: ReadMessage) -> dict[str, int]:
        """The calls of the turn that a message names, by id."""
        turn = self.named(message.handles)
        given = () if turn is None or turn.given is None else turn.given.call_ids
        return {call_id: position for position, call_id in enumerate(given)}


@dataclass(frozen=True, slots=True)
class _MatchedHistory:
    """A history that was followed."""

    history: list[ReadMessage]
    """Its messages as they came."""
    match: HistoryMatch
    """Where they led."""
    calls: AnsweredCalls
    """The calls in it."""

    def goes_on_in(self, messages: Sequence[ReadMessage]) -> bool:
        """Whether a history begins as this one does, and what follows stands for itself.

        What is read of messages depends on those beside them where a turn came as several, or its results did.
        """
        length = len(self.history)
        if not 0 < length < len(messages) or messages[length - 1] is not self.history[-1]:
            return False
        if self.history[-1].role == "assistant" or messages[length].role == "tool":
            return False
        spoke = next((each.handles[:1] for each in reversed(self.history) if each.role == "assistant"), ())
        if spoke and any(each.handles[:1] == spoke for each in messages[length:]):
            return False
        # A message that came before is the same object; else its fields are compared.
        return messages[:length] == self.history


def _refers(messages: Sequence[Any]) -> bool:
    return any(isinstance(each, Mapping) and "refers" in each for each in messages)


def _in_order(values: list[Any], positions: Mapping[str, int], id_of: Callable[[Any], str] = str) -> list[Any]:
    return sorted(values, key=lambda each: positions.get(id_of(each), len(positions)))


def _stepped(point: HistoryNode, key: Hashable, answered: CallIndex | None) -> HistoryNode:
    step = key, answered
    found = point.after.get(step)
    if found is None:
        found = point.after[step] = HistoryNode()
    return found


def _is_part(message: ReadMessage, request_node: RequestNode) -> bool:
    return request_node.node is not None and begins(message.message, request_node.node.reply)


def _has_thought_of_turn(message: ReadMessage, point: HistoryNode) -> bool:
    """Whether a content begins with the reasoning of a turn that was said here."""
    received = thought_of(message.message)
    said = (turn.node for each in point.after.values() for turn in each.said) if received else ()
    return any(node is not None and node.reply.get("reasoning_content", "").strip() == received for node in said)


def _thinks_alike(message: ReadMessage, known: HistoryNode) -> bool:
    """Whether a message has the reasoning of a turn that said the same; it may lack it."""
    received = message.message.get("reasoning_content", "").strip()
    thoughts = (each.node.reply.get("reasoning_content", "") for each in known.said if each.node is not None)
    return not received or any(received == thought.strip() for thought in thoughts)
