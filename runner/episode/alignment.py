"""What a request with a whole history is to the turns that an episode has: the verdict, and where it goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

__all__ = ["AS_SENT", "Alignment", "align"]

AS_SENT = "client"
"""The cause of a segment that has a history as its client sent it."""


@dataclass(slots=True)
class Alignment:
    """The answer to where a request goes on."""

    match: HistoryMatch
    """Its history in the tree."""
    verdict: Verdict
    """The verdict: how the history relates to the turns that were sampled."""
    parent: RequestNode | None = None
    """The turn that it follows."""
    behind: RequestNode | None = None
    """The turn that its history ends with, before what it asks; None where it tells no turn as it was."""
    before: RequestNode | None = None
    """The turn whose prompt is asked again, or the first turn of a history that was given up whole."""
    again: Again = Again.NO
    """The treatment of a prompt that was asked before."""
    messages: list[Message] = field(default_factory=list)
    """The messages to put behind the turn that it follows; the whole history where that is rendered anew."""
    tolerated: frozenset[Tolerated] = frozenset()
    """The differences that the client made, which change nothing."""
    as_sent: bool = False
    """Whether its history is wanted as the client sends it."""
    told: Sequence[ReadMessage] = ()
    """The history as it was read, without system messages of this request alone."""

    @property
    def whole(self) -> str:
        """Why everything is rendered anew, or ""."""
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
) -> Alignment:
    """Find where a request goes on.

    System messages are put as the template takes them, which `systems` says: at the beginning as one where it takes no
    more, and with `system_as_user` those after it as a user's.

    The last handle that it sends back names a turn; its content up to there proves it. Where that fails, the deepest
    turn before the first difference is meant; without a handle the deepest one that the content leads to, of several
    that of the same label, then the latest.

    Raises:
        BadMessage: it holds what is no message, or nothing that could be answered.
    """
    given = histories.read(messages, previous, own_system=own_system)
    read = given
    if system_as_user or several_systems(read):
        read = as_taken(read, systems(), system_as_user=system_as_user)
    if not read:
        raise BadMessage("a request has no message: give the whole history, such as a user message.")
    match = histories.match(read)
    if not match.points:
        raise BadMessage("a request begins with what was said of a turn that was cut: put what it was asked before it.")
    echoed = next((each.handles for each in reversed(match.messages) if histories.named(each.handles)), ())
    named = histories.named([*handles, *echoed])
    parent = _parent(match, named, label)
    depth = 0 if parent is None else _depth(match, parent)
    found = _verdict(match, parent, depth, tools, label, histories)
    found.behind, found.as_sent = parent, as_sent
    changed = _changed(match, found.parent)
    match.compared = ComparedTurn(found.parent, len(match.messages), changed)
    found.tolerated = changed | match.tolerated
    if previous or any(isinstance(each, Mapping) and "refers" in each for each in messages):
        found.tolerated |= {Tolerated.REFERENCE}
    found.told = given[own_system:]
    stored = [] if parent is None or parent.node is None else parent.node.messages
    if as_sent:
        found.messages = _given_anew(match, 0, (), histories, as_sent=True)
        check_answers(found.messages)
        return found
    given_anew = _given_anew(match, depth, stored, histories)
    found.messages = [*stored, *given_anew] if found.whole else given_anew
    check_answers(given_anew, stored)
    return found


def _depth(match: HistoryMatch, request_node: RequestNode) -> int:
    """How many messages of the history lead to what a turn said."""
    return next(index for index, point in enumerate(match.points, 1) if point is request_node.said)


def _parent(match: HistoryMatch, named: RequestNode | None, label: str) -> RequestNode | None:
    for point in reversed(match.points):
        # Only what the handle names, what came to it or goes on from it; where nothing does, the content alone tells.
        known = [each for each in point.said if named is None or _in_line(each, named)]
        proven = [each for each in known if _reasons(match, each)]
        if proven:
            return max(proven, key=lambda each: (each.label == label, each.fits(label), each.number))
    return _parent(match, None, label) if named is not None else None


def _in_line(one: RequestNode, other: RequestNode) -> bool:
    older, younger = sorted((one, other), key=lambda request_node: request_node.number)
    return any(each is older for each in younger.path())


def _reasons(match: HistoryMatch, request_node: RequestNode) -> bool:
    """Whether the history has no other reasoning than its turns had; it may lack it."""
    said = {id(each.said): each for each in request_node.path()} if match.thoughts else {}
    for index in match.thoughts:
        turn = said.get(id(match.points[index]))
        if turn is not None and turn.node is not None and not _names(match.messages[index], turn):
            known = turn.node.reply.get("reasoning_content", "")
            if match.messages[index].message["reasoning_content"].strip() != known.strip():
                return False
    return True


def _names(message: ReadMessage, turn: RequestNode) -> bool:
    """Whether a message has an id of a turn, which proves it whatever reasoning came with it."""
    return turn.node is not None and turn.node.turn.handle != "" and turn.node.turn.handle in message.handles


def _verdict(
    match: HistoryMatch,
    parent: RequestNode | None,
    depth: int,
    tools: Sequence[dict[str, Any]],
    label: str,
    histories: HistoryTree,
) -> Alignment:
    rest = match.messages[depth:]
    again = (each for each in reversed(match.end.asked) if _is_asked_again(each, parent, tools, label))
    before = next(again, None)
    if before is not None:
        return Alignment(match, Verdict.AGAIN, before.parent, before=before, again=_again(before))
    if not rest and parent is not None and parent.node is not None:
        if parent.node.turn.finish is FinishReason.STOP:
            raise BadMessage("the last message is what was sampled last, whole: add what answers it.")
        return Alignment(match, Verdict.CONTINUED, parent)
    if rest[-1].role == "assistant":
        raise BadMessage(
            f"message {len(match.messages) - 1} is the last one and an assistant's, and no turn of this episode that "
            f"was cut: put what is to be answered behind it."
        )
    edited = _named_elsewhere(match, histories)
    if edited is not None and (parent is not None or tools or not _offered(edited)):
        return Alignment(match, Verdict.EDITED, edited)
    spoken = sum(message.role == "assistant" for message in rest)
    begun = _begun(match, parent, depth, label)
    if spoken and (begun is not None or parent is not None):
        latest = _latest(begun, label) if begun is not None else None
        if begun is not None and latest is not None and spoken == _speeches(begun, latest):
            return Alignment(match, Verdict.RETOLD, latest)
        return Alignment(match, Verdict.FOREIGN, parent if parent is not None else begun)
    if parent is None:
        if begun is not None and not spoken:
            return Alignment(match, Verdict.REWOUND, before=begun)
        return Alignment(match, Verdict.NEW)
    if parent.node is None or not same_tools(parent.node.segment.tools, tools):
        return Alignment(match, Verdict.TOOLS, parent)
    return Alignment(match, _followed(parent, histories, label), parent)


def _named_elsewhere(match: HistoryMatch, histories: HistoryTree) -> RequestNode | None:
    """The turn that the last ids of a history name, where it does not stand after what that turn was asked."""
    spoken = (message for message in reversed(match.messages) if message.role == "assistant")
    named = next((turn for each in spoken if (turn := histories.named(each.handles)) is not None), None)
    if named is None or named.node is None or any(named.said is point for point in match.points):
        return None
    return named


def _offered(turn: RequestNode) -> bool:
    """Whether a turn was offered tools; a request without any beside it is another errand, such as a summary."""
    return turn.node is not None and bool(turn.node.segment.tools)


def _is_asked_again(each: RequestNode, parent: RequestNode | None, tools: Sequence[dict[str, Any]], label: str) -> bool:
    if each.behind is not parent or each.taken_back or not each.fits(label):
        return False
    return same_tools(each.cursor.schemas() if each.node is None else each.node.segment.tools, tools)


def _again(before: RequestNode) -> Again:
    if not before.gone:
        return Again.SIBLING
    return Again.REPLAYED if before.finished else Again.TAKEN_BACK


def _followed(parent: RequestNode, histories: HistoryTree, label: str) -> Verdict:
    """What goes on from a turn with the same tools, by the client of this label."""
    if not parent.children:
        return Verdict.APPEND
    if not parent.fits(label):
        return Verdict.BRANCH
    # Other clients may have gone on from the turn in threads of their own, which leaves nothing of this one behind.
    own = [each for each in parent.children if each.thread is parent.thread or each.label == label]
    if not own:
        return Verdict.APPEND
    if any(each.in_flight for each in own):
        return Verdict.BRANCH
    latest = histories.latest[parent.thread]
    return Verdict.REWOUND if any(each is parent for each in latest.path()) else Verdict.BRANCH


def _begun(match: HistoryMatch, parent: RequestNode | None, depth: int, label: str) -> RequestNode | None:
    """A turn that was asked on the way, and whose own words do not follow."""
    for point in reversed(match.points[depth:-1]):
        for each in reversed(point.asked):
            if each.parent is parent and each.fits(label):
                return each
    return None


def _latest(begun: RequestNode, label: str) -> RequestNode | None:
    """The latest turn on a path that begins with this one."""
    sampled = (each for each in begun.line() if each.node is not None and each.fits(label))
    return max(sampled, key=lambda each: each.number, default=None)


def _speeches(begun: RequestNode, latest: RequestNode) -> int:
    return next(count for count, each in enumerate(latest.path(), 1) if each is begun)


def _given_anew(
    match: HistoryMatch, start: int, stored: Sequence[Message], histories: HistoryTree, *, as_sent: bool = False
) -> list[Message]:
    """The messages from `start` on as they may be put before the model.

    Calls have the ids that their turns wrote, in place of those that clients were given; a result has the name of its
    call. A turn that is proven by its ids is told in its own words, unless the history is wanted `as_sent`.
    """
    given = list[Message]()
    for index in range(start, len(match.messages)):
        read, answered = match.messages[index], match.answers[index]
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
        given.append(message)
    return given


def _changed(match: HistoryMatch, parent: RequestNode | None) -> frozenset[Tolerated]:
    """What a client changed of the turns that it sends back."""
    before, begin, changed = match.compared, 0, set[Tolerated]()
    path = [] if parent is None else list(parent.path())
    if before is not None and before.parent in path:
        begin, path = before.messages, path[: path.index(before.parent)]
        changed.update(before.changed)
    said = {id(each.said): each for each in path}
    for received, point in zip(match.messages[begin:], match.points[begin:], strict=True):
        turn = said.get(id(point))
        if turn is None or turn.node is None:
            continue
        ours, theirs = turn.node.reply, received.message
        reasoning, given = ours.get("reasoning_content", ""), theirs.get("reasoning_content", "")
        if reasoning and not given:
            changed.add(Tolerated.REASONING_LEFT_OUT)
        elif reasoning.strip() != given.strip():
            changed.add(Tolerated.REASONING_REWRITTEN)
        elif reasoning != given:
            changed.add(Tolerated.REASONING_STRIPPED)
        if ours["content"] != theirs["content"]:
            changed.add(Tolerated.WHITE_SPACE)
        if turn.given is not None and not set(turn.given.call_ids).issuperset(received.call_ids):
            changed.add(Tolerated.CALL_IDS)
    return frozenset(changed)
