"""Alignment of a request's whole history with an episode's turns: the verdict, and the turn to continue from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.chat_requests import Again, Tolerated, Verdict
from runner.engines.base import FinishReason
from runner.episode.client_messages import ReadMessage, as_taken, several_systems
from runner.episode.history_tree import ComparedTurn, HistoryMatch, HistoryTree, RequestNode
from runner.errors import BadMessage
from runner.messages import Message, check_answers
from runner.tokens.bridging.history import same_tools
from runner.tokens.system_support import SystemSupport

__all__ = ["AS_SENT", "RequestAlignment", "align"]

AS_SENT = "client"
"""Cause of a segment whose prompt is the history as the client sent it."""


@dataclass(slots=True)
class RequestAlignment:
    """The result of aligning a request."""

    match: HistoryMatch
    verdict: Verdict
    """The relation of the history to the sampled turns."""
    parent: RequestNode | None = None
    """The request whose turn this request follows; None if it follows no turn."""
    last_turn: RequestNode | None = None
    """The last turn in the request's history; None if the history contains no unchanged turn."""
    before: RequestNode | None = None
    """An earlier request with the same prompt. If the client discarded all turns, an earlier request whose prompt is a
    prefix of this prompt. None if there is no such request.
    """
    again: Again = Again.NO
    """Treatment of a prompt that was requested before."""
    messages: list[Message] = field(default_factory=list)
    """The messages to add after the turn in `parent`; the whole history if it is rendered again."""
    tolerated: frozenset[Tolerated] = frozenset()
    """Differences between the client's history and the sampled turns. They do not change the verdict."""
    as_sent: bool = False
    """True if the history is used as the client sends it."""
    history: Sequence[ReadMessage] = ()
    """The history as it was read, without the request's own system message (`ChatCall.own_system`)."""

    @property
    def whole(self) -> str:
        """Cause for rendering the whole history again; "" if the ids of its turns are kept."""
        if self.as_sent and (self.parent is not None or self.before is not None):
            return AS_SENT
        if self.verdict in (Verdict.FOREIGN, Verdict.RETOLD, Verdict.EDITED, Verdict.TOOLS):
            return self.verdict.value
        if self.verdict is Verdict.REWOUND and self.parent is None:
            return "environment"
        return ""


def align(
    histories: HistoryTree,
    messages: Sequence[Any],
    tools: Sequence[dict[str, Any]],
    *,
    label: str = "",
    handles: Sequence[str] = (),
    previous: str = "",
    own_system: bool = False,
    systems: Callable[[], SystemSupport],
    system_as_user: bool = False,
    as_sent: bool = False,
) -> RequestAlignment:
    """Find the turn that a request continues from.

    `systems` returns the template's support for system messages. If the template takes only one, the system messages at
    the beginning are joined. With `system_as_user`, later system messages become user messages; if the template takes
    none, all of them do.

    The deepest turn before the first difference in content is chosen. Of several such turns, a turn with the same label
    is preferred, and then the latest.

    If the client sends back handles, only the latest turn that they name, its ancestors and its descendants are
    considered. If the content matches none of these turns, all turns are considered, as without a handle.

    Raises:
        BadMessage: an item is not a message, a tool message answers no call, or there is no message to answer.
        UnknownReference: an id does not belong to a turn of the episode.
    """
    history, by_reference = histories.read(messages, previous, own_system=own_system)
    read = history
    if system_as_user or several_systems(read):
        read = as_taken(read, systems(), system_as_user=system_as_user)
    if not read:
        raise BadMessage("a request has no message: give the whole history, such as a user message.")
    match = histories.match(read)
    if not match.points:
        raise BadMessage("a request has only parts of an answer that was cut: give the messages before it too.")
    latest = (match.messages[index].handles for index in reversed(match.naming))
    echoed = next((each for each in latest if histories.named(each)), ())
    named = histories.named([*handles, *echoed])
    parent = _parent(match, named, label)
    depth = 0 if parent is None else _depth(match, parent)
    found = _verdict(match, parent, depth, tools, label, histories)
    found.last_turn, found.as_sent = parent, as_sent
    changed = _changed(match, found.parent)
    match.compared = ComparedTurn(found.parent, len(match.messages), changed)
    found.tolerated = changed | match.tolerated
    if by_reference:
        found.tolerated |= {Tolerated.REFERENCE}
    found.history = history[own_system:]
    stored = [] if parent is None or parent.node is None else parent.node.messages
    if as_sent:
        found.messages = _new_messages(match, 0, (), histories, as_sent=True)
        check_answers(found.messages)
        return found
    new_messages = _new_messages(match, depth, stored, histories)
    found.messages = [*stored, *new_messages] if found.whole else new_messages
    check_answers(new_messages, stored, first=len(history) - len(new_messages))
    return found


def _depth(match: HistoryMatch, request_node: RequestNode) -> int:
    """Return the number of messages up to and including the answer of `request_node`; 0 without an answer."""
    return 0 if request_node.answer_node is None else match.points.index(request_node.answer_node) + 1


def _parent(match: HistoryMatch, named: RequestNode | None, label: str) -> RequestNode | None:
    for point in reversed(match.points):
        # Only the named turn, its ancestors and its descendants are considered. Without a named turn, all
        # answers at the point are considered.
        known = [each for each in point.answers if named is None or _in_line(each, named)]
        proven = [each for each in known if _reasoning_matches(match, each)]
        if proven:
            return max(proven, key=lambda each: (each.label == label, each.fits(label), each.number))
    return _parent(match, None, label) if named is not None else None


def _in_line(one: RequestNode, other: RequestNode) -> bool:
    older, younger = sorted((one, other), key=lambda request_node: request_node.number)
    return any(each is older for each in younger.path())


def _reasoning_matches(match: HistoryMatch, request_node: RequestNode) -> bool:
    """Return True if the reasoning in the history equals the reasoning of its turns.

    A message without reasoning, or with an id of its turn, is not compared.
    """
    turns = {id(each.answer_node): each for each in request_node.path()} if match.thoughts else {}
    for index in match.thoughts:
        turn = turns.get(id(match.points[index]))
        if turn is not None and turn.node is not None and not _has_turn_id(match.messages[index], turn):
            known = turn.node.reply.get("reasoning_content", "")
            if match.messages[index].message["reasoning_content"].strip() != known.strip():
                return False
    return True


def _has_turn_id(message: ReadMessage, turn: RequestNode) -> bool:
    """Return True if a message has an id of a turn. The id proves the turn, so the reasoning need not be equal."""
    return turn.node is not None and turn.node.turn.handle != "" and turn.node.turn.handle in message.handles


def _verdict(
    match: HistoryMatch,
    parent: RequestNode | None,
    depth: int,
    tools: Sequence[dict[str, Any]],
    label: str,
    histories: HistoryTree,
) -> RequestAlignment:
    rest = match.messages[depth:]
    again = (each for each in reversed(match.end.requests) if _is_repeated(each, parent, tools, label))
    before = next(again, None)
    if before is not None:
        return RequestAlignment(match, Verdict.AGAIN, before.parent, before=before, again=_again(before))
    if not rest and parent is not None and parent.node is not None:
        if parent.node.turn.finish is FinishReason.STOP:
            raise BadMessage("the last message is a complete turn of this episode: append a user or tool message.")
        return RequestAlignment(match, Verdict.CONTINUED, parent)
    _require_message_to_answer(match, rest)
    edited = _named_elsewhere(match, histories)
    if edited is not None and (parent is not None or tools or not _offered(edited)):
        return RequestAlignment(match, Verdict.EDITED, edited)
    spoken = sum(message.role == "assistant" for message in rest)
    begun = _deepest_request_without_answer(match, parent, depth, label)
    if spoken and (begun is not None or parent is not None):
        latest = _latest(begun, label) if begun is not None else None
        if begun is not None and latest is not None and spoken == _turns_between(begun, latest):
            return RequestAlignment(match, Verdict.RETOLD, latest)
        return RequestAlignment(match, Verdict.FOREIGN, parent if parent is not None else begun)
    if parent is None:
        if begun is not None and not spoken:
            return RequestAlignment(match, Verdict.REWOUND, before=begun)
        return RequestAlignment(match, Verdict.NEW)
    if parent.node is None or not same_tools(parent.node.segment.tools, tools):
        return RequestAlignment(match, Verdict.TOOLS, parent)
    return RequestAlignment(match, _followed(parent, histories, label), parent)


def _require_message_to_answer(match: HistoryMatch, rest: Sequence[ReadMessage]) -> None:
    if rest[-1].role == "assistant":
        raise BadMessage(
            f"message {len(match.messages) - 1}, the last one, is an assistant message, but not a cut turn of this "
            f"episode, which could be continued: append a user or tool message."
        )


def _named_elsewhere(match: HistoryMatch, histories: HistoryTree) -> RequestNode | None:
    """Return the turn that the last ids in a history name.

    Return None if no ids name a turn, or if the unchanged answer of this turn is in the history.
    """
    naming = (match.messages[index] for index in reversed(match.naming))
    spoken = (histories.named(message.handles) for message in naming if message.role == "assistant")
    named = next((turn for turn in spoken if turn is not None), None)
    if named is None or named.node is None or named.answer_node in match.points:
        return None
    return named


def _offered(turn: RequestNode) -> bool:
    """Return True if a turn was offered tools.

    A request without tools at the same place is then a separate request, such as for a summary.
    """
    return turn.node is not None and bool(turn.node.segment.tools)


def _is_repeated(each: RequestNode, parent: RequestNode | None, tools: Sequence[dict[str, Any]], label: str) -> bool:
    if each.last_turn is not parent or each.taken_back or not each.fits(label):
        return False
    return same_tools(each.cursor.schemas() if each.node is None else each.node.segment.tools, tools)


def _again(before: RequestNode) -> Again:
    if not before.gone:
        return Again.SIBLING
    return Again.REPLAYED if before.finished else Again.TAKEN_BACK


def _followed(parent: RequestNode, histories: HistoryTree, label: str) -> Verdict:
    """Return the verdict on a request that follows a turn with the same tools and the same client label."""
    if not parent.children:
        return Verdict.APPEND
    if not parent.fits(label):
        return Verdict.BRANCH
    # If other clients continued the turn in their own threads, this request is still not a branch.
    own = [each for each in parent.children if each.thread is parent.thread or each.label == label]
    if not own:
        return Verdict.APPEND
    if any(each.in_flight for each in own):
        return Verdict.BRANCH
    latest = histories.latest[parent.thread]
    return Verdict.REWOUND if any(each is parent for each in latest.path()) else Verdict.BRANCH


def _deepest_request_without_answer(
    match: HistoryMatch, parent: RequestNode | None, depth: int, label: str
) -> RequestNode | None:
    """Return the deepest matched request after `parent` whose answer the client's history lacks, or None."""
    for point in reversed(match.points[depth:-1]):
        for each in reversed(point.requests):
            if each.parent is parent and each.fits(label):
                return each
    return None


def _latest(begun: RequestNode, label: str) -> RequestNode | None:
    """Return the latest sampled turn of `begun` and its descendants that fits the label, or None."""
    sampled = (each for each in begun.descendants() if each.node is not None and each.fits(label))
    return max(sampled, key=lambda each: each.number, default=None)


def _turns_between(begun: RequestNode, latest: RequestNode) -> int:
    return next(count for count, each in enumerate(latest.path(), 1) if each is begun)


def _new_messages(
    match: HistoryMatch, start: int, stored: Sequence[Message], histories: HistoryTree, *, as_sent: bool = False
) -> list[Message]:
    """Return the messages from `start` on, as the model receives them.

    Calls have the ids that their turns sampled, in place of the ids that clients received; a result has the name of its
    call. If ids prove a turn, its sampled content is used, unless the history is used `as_sent`.
    """
    messages = list[Message]()
    for index in range(start, len(match.messages)):
        read, answered = match.messages[index], match.answered_calls[index]
        turn = None if as_sent else histories.turn_of(read)
        message = match.sent.get(index, read).message if as_sent else read.message
        if turn is not None and turn.node is not None:
            message = turn.node.reply
        elif "tool_calls" in message:
            calls = [{**call, "id": histories.own_id(call["id"])} for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}  # type: ignore[typeddict-item]  # calls with other ids
        elif answered is not None:
            made, number = answered
            call = (stored[made] if made < len(stored) else match.messages[made].message)["tool_calls"][number]
            message = {
                **message,
                "tool_call_id": histories.own_id(call["id"]),
                "name": call["function"]["name"],
            }
        messages.append(message)
    return messages


def _changed(match: HistoryMatch, parent: RequestNode | None) -> frozenset[Tolerated]:
    """Return the differences that a client made to the turns in its history."""
    before, begin, changed, turns = match.compared, 0, set[Tolerated](), dict[int, RequestNode]()
    for each in () if parent is None else parent.path():
        if before is not None and each is before.parent:
            begin, changed = before.messages, set(before.changed)
            break
        turns[id(each.answer_node)] = each
    for received, point in zip(match.messages[begin:], match.points[begin:], strict=True):
        turn = turns.get(id(point))
        if turn is None or turn.node is None:
            continue
        ours, theirs = turn.node.reply, received.message
        reasoning, returned = ours.get("reasoning_content", ""), theirs.get("reasoning_content", "")
        if reasoning and not returned:
            changed.add(Tolerated.REASONING_LEFT_OUT)
        elif reasoning.strip() != returned.strip():
            changed.add(Tolerated.REASONING_REWRITTEN)
        elif reasoning != returned:
            changed.add(Tolerated.REASONING_STRIPPED)
        if ours["content"] != theirs["content"]:
            changed.add(Tolerated.WHITE_SPACE)
        if turn.sent_answer is not None and not set(turn.sent_answer.call_ids).issuperset(received.call_ids):
            changed.add(Tolerated.CALL_IDS)
    return frozenset(changed)
