"""What a request with a whole history is to the turns that an episode has: the verdict, and where it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.chat_requests import Again, Tolerated, Verdict
from runner.engines.base import FinishReason
from runner.episode.histories import AskedTurn, Compared, Histories, Walk
from runner.episode.reading import said_by_user
from runner.errors import BadMessage
from runner.messages import Message, check_answers
from runner.tokens.bridging.history import same_tools

__all__ = ["AS_SENT", "Aligned", "align"]

AS_SENT = "client"
"""The cause of a segment that has a history as its client sent it."""


@dataclass(slots=True)
class Aligned:
    """The answer to where a request goes on."""

    walk: Walk
    """Its history in the tree."""
    verdict: Verdict
    """The verdict: how the history relates to the turns that were sampled."""
    parent: AskedTurn | None = None
    """The turn that it follows."""
    behind: AskedTurn | None = None
    """The turn that its history ends with, before what it asks; None where it tells no turn as it was."""
    before: AskedTurn | None = None
    """The turn whose prompt is asked again, or the first turn of a history that was given up whole."""
    again: Again = Again.NO
    """The treatment of a prompt that was asked before."""
    messages: list[Message] = field(default_factory=list)
    """The messages to put behind the turn that it follows; the whole history where that is rendered anew."""
    tolerated: frozenset[Tolerated] = frozenset()
    """The differences that the client made, which change nothing."""
    as_sent: bool = False
    """Whether its history is wanted as the client sends it."""

    @property
    def whole(self) -> str:
        """Why everything is rendered anew, or ""."""
        if self.as_sent and (self.parent is not None or self.before is not None):
            return AS_SENT
        if self.verdict in (Verdict.FOREIGN, Verdict.RETOLD, Verdict.TOOLS):
            return self.verdict.value
        if self.verdict is Verdict.REWOUND and self.parent is None:
            return "environment"
        return ""


def align(
    histories: Histories,
    messages: Sequence[Any],
    tools: Sequence[dict[str, Any]],
    *,
    label: str = "",
    handles: Sequence[str] = (),
    system_as_user: bool = False,
    as_sent: bool = False,
) -> Aligned:
    """Find where a request goes on.

    The last handle that it sends back names a turn; its content up to there proves it. Where that fails, the deepest
    turn before the first difference is meant; without a handle the deepest one that the content leads to, of several
    that of the same label, then the latest.

    Raises:
        BadMessage: it holds what is no message, or nothing that could be answered.
    """
    read = histories.reader.read(messages)
    if system_as_user:
        read = [*read[:1], *map(said_by_user, read[1:])]
    if not read:
        raise BadMessage("a request has no message: give the whole history, such as a user message.")
    walk = histories.walk(read)
    if not walk.points:
        raise BadMessage("a request begins with what was said of a turn that was cut: put what it was asked before it.")
    echoed = next((each.handles for each in reversed(walk.messages) if histories.named(each.handles)), ())
    named = histories.named([*handles, *echoed])
    parent = _parent(walk, named, label)
    depth = 0 if parent is None else _depth(walk, parent)
    found = _verdict(walk, parent, depth, tools, label, histories)
    found.behind, found.as_sent = parent, as_sent
    changed = _changed(walk, found.parent)
    walk.compared = Compared(found.parent, len(walk.messages), changed)
    found.tolerated = changed | walk.tolerated
    stored = [] if parent is None or parent.node is None else parent.node.messages
    if as_sent:
        found.messages = [_as_given(walk, index, ()) for index in range(len(walk.messages))]
        check_answers(found.messages)
        return found
    given_anew = [_as_given(walk, index, stored) for index in range(depth, len(walk.messages))]
    found.messages = [*stored, *given_anew] if found.whole else given_anew
    check_answers(given_anew, stored)
    return found


def _depth(walk: Walk, asked_turn: AskedTurn) -> int:
    """How many messages of the history lead to what a turn said."""
    return next(index for index, point in enumerate(walk.points, 1) if point is asked_turn.said)


def _parent(walk: Walk, named: AskedTurn | None, label: str) -> AskedTurn | None:
    for point in reversed(walk.points):
        # Only what the handle names, what came to it or goes on from it; where nothing does, the content alone tells.
        known = [each for each in point.said if named is None or _in_line(each, named)]
        proven = [each for each in known if _reasons(walk, each)]
        if proven:
            return max(proven, key=lambda each: (each.label == label, each.fits(label), each.number))
    return _parent(walk, None, label) if named is not None else None


def _in_line(one: AskedTurn, other: AskedTurn) -> bool:
    older, younger = sorted((one, other), key=lambda asked_turn: asked_turn.number)
    return any(each is older for each in younger.path())


def _reasons(walk: Walk, asked_turn: AskedTurn) -> bool:
    """Whether the history has no other reasoning than its turns had; it may lack it."""
    said = {id(each.said): each for each in asked_turn.path()} if walk.thoughts else {}
    for index in walk.thoughts:
        turn = said.get(id(walk.points[index]))
        if turn is not None and turn.node is not None:
            known = turn.node.reply.get("reasoning_content", "")
            if walk.messages[index].message["reasoning_content"].strip() != known.strip():
                return False
    return True


def _verdict(
    walk: Walk,
    parent: AskedTurn | None,
    depth: int,
    tools: Sequence[dict[str, Any]],
    label: str,
    histories: Histories,
) -> Aligned:
    rest = walk.messages[depth:]
    again = (each for each in reversed(walk.end.asked) if _is_asked_again(each, parent, tools, label))
    before = next(again, None)
    if before is not None:
        return Aligned(walk, Verdict.AGAIN, before.parent, before=before, again=_again(before))
    if not rest and parent is not None and parent.node is not None:
        if parent.node.turn.finish is FinishReason.STOP:
            raise BadMessage("the last message is what was sampled last, whole: add what answers it.")
        return Aligned(walk, Verdict.CONTINUED, parent)
    if rest[-1].role == "assistant":
        raise BadMessage(
            f"message {len(walk.messages) - 1} is the last one and an assistant's, and no turn of this episode that "
            f"was cut: put what is to be answered behind it."
        )
    spoken = sum(message.role == "assistant" for message in rest)
    begun = _begun(walk, parent, depth, label)
    if spoken and (begun is not None or parent is not None):
        latest = _latest(begun, label) if begun is not None else None
        if begun is not None and latest is not None and spoken == _speeches(begun, latest):
            return Aligned(walk, Verdict.RETOLD, latest)
        return Aligned(walk, Verdict.FOREIGN, parent if parent is not None else begun)
    if parent is None:
        if begun is not None and not spoken:
            return Aligned(walk, Verdict.REWOUND, before=begun)
        return Aligned(walk, Verdict.NEW)
    if parent.node is None or not same_tools(parent.node.segment.tools, tools):
        return Aligned(walk, Verdict.TOOLS, parent)
    return Aligned(walk, _followed(parent, histories), parent)


def _is_asked_again(each: AskedTurn, parent: AskedTurn | None, tools: Sequence[dict[str, Any]], label: str) -> bool:
    if each.behind is not parent or each.taken_back or not each.fits(label):
        return False
    return same_tools(each.head.schemas() if each.node is None else each.node.segment.tools, tools)


def _again(before: AskedTurn) -> Again:
    if not before.gone:
        return Again.SIBLING
    return Again.REPLAYED if before.finished else Again.TAKEN_BACK


def _followed(parent: AskedTurn, histories: Histories) -> Verdict:
    """What goes on from a turn with the same tools."""
    if not parent.children:
        return Verdict.APPEND
    if any(each.in_flight for each in parent.children):
        return Verdict.BRANCH
    latest = histories.latest[parent.thread]
    return Verdict.REWOUND if any(each is parent for each in latest.path()) else Verdict.BRANCH


def _begun(walk: Walk, parent: AskedTurn | None, depth: int, label: str) -> AskedTurn | None:
    """A turn that was asked on the way, and whose own words do not follow."""
    for point in reversed(walk.points[depth:-1]):
        for each in reversed(point.asked):
            if each.parent is parent and each.fits(label):
                return each
    return None


def _latest(begun: AskedTurn, label: str) -> AskedTurn | None:
    """The latest turn on a path that begins with this one."""
    sampled = (each for each in begun.line() if each.node is not None and each.fits(label))
    return max(sampled, key=lambda each: each.number, default=None)


def _speeches(begun: AskedTurn, latest: AskedTurn) -> int:
    return next(count for count, each in enumerate(latest.path(), 1) if each is begun)


def _as_given(walk: Walk, index: int, stored: Sequence[Message]) -> Message:
    """A message as it may be put before the model: a result has the name of its call, and the id that is ours."""
    message, answered = walk.messages[index].message, walk.answers[index]
    if answered is None:
        return message
    made, number = answered
    calls = (stored[made] if made < len(stored) else walk.messages[made].message)["tool_calls"]
    return {**message, "tool_call_id": calls[number]["id"], "name": calls[number]["function"]["name"]}


def _changed(walk: Walk, parent: AskedTurn | None) -> frozenset[Tolerated]:
    """What a client changed of the turns that it sends back."""
    before, begin, changed = walk.compared, 0, set[Tolerated]()
    path = [] if parent is None else list(parent.path())
    if before is not None and before.parent in path:
        begin, path = before.messages, path[: path.index(before.parent)]
        changed.update(before.changed)
    said = {id(each.said): each for each in path}
    for heard, point in zip(walk.messages[begin:], walk.points[begin:], strict=True):
        turn = said.get(id(point))
        if turn is None or turn.node is None:
            continue
        ours, theirs = turn.node.reply, heard.message
        reasoning, given = ours.get("reasoning_content", ""), theirs.get("reasoning_content", "")
        if reasoning and not given:
            changed.add(Tolerated.REASONING_LEFT_OUT)
        elif reasoning != given:
            changed.add(Tolerated.REASONING_STRIPPED)
        if ours["content"] != theirs["content"]:
            changed.add(Tolerated.WHITE_SPACE)
        if not turn.call_ids.issuperset(heard.call_ids):
            changed.add(Tolerated.CALL_IDS)
    return frozenset(changed)
