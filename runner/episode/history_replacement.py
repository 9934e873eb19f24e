"""The turn at which a conversation continues after its author replaced the history."""

from __future__ import annotations

from collections.abc import Sequence

from runner.engines.base import FinishReason
from runner.episode.state import ConversationState
from runner.episode.turn_tree import Cursor, TurnNode
from runner.messages import Message
from runner.tokens.bridging.history import Alignment, AlignmentKind, compare, same_tools

__all__ = ["before", "cursor_at", "discarded_nodes"]


def cursor_at(conversation: ConversationState, history: Sequence[Message]) -> Cursor:
    """Return the cursor for a conversation whose whole history becomes `history`.

    The cursor continues from the last turn whose messages are a prefix of the history, if no assistant message follows.
    If the history equals the prompt of a turn, that turn is sampled again; if it was the last turn, it is no longer
    trained on. In all other cases, the whole history is rendered again.
    """
    now = conversation.cursor
    found = None if now.whole or now.node is None else _aligned(now.node, now, history)
    if found is None or found[1].kind not in (AlignmentKind.SAME, AlignmentKind.APPEND):
        # The candidates are the turns that no later turn extends, and cut turns. If a cut turn was continued, only its
        # own node has its message, since the message of the later turn is longer.
        ends = (
            node
            for node in reversed(conversation.nodes)
            if not node.extended or node.turn.finish is not FinishReason.STOP
        )
        others = (node for node in ends if node is not now.node)
        # Of equally long matches, the current path is preferred, and then the latest turn.
        aligned = [each for each in (found, *(_aligned(node, now, history) for node in others)) if each is not None]
        found = max(aligned, key=lambda each: each[1].index, default=None)
    whole = Cursor(now.tools, list(history), now.node, "environment" if conversation.segments else "")
    return whole if found is None else _gone_on_from(*found, now, whole)


def before(node: TurnNode, now: Cursor, whole: str, *, takes_back: bool) -> Cursor:
    """Return the cursor at which a turn can be sampled again.

    If the prompt of the turn was rendered as a whole, `whole` becomes the cursor's cause (`Cursor.whole`).
    """
    first = node.spoken
    cause = "" if node.answered else whole
    return Cursor(now.tools, list(node.prompt_messages), first.parent, cause, again=node, takes_back=takes_back)


def discarded_nodes(conversation: ConversationState, kept: TurnNode) -> list[TurnNode]:
    """Return the other tries of a turn, and all turns that followed any of the tries."""
    first, left = kept.spoken, set[TurnNode]()
    on_path = set(kept.path())
    for node in conversation.nodes:
        begun = node.spoken
        again = begun.parent is first.parent and begun is not first
        if node in on_path:
            continue
        if (again and _answer_the_same(begun, first)) or node.parent is kept or node.parent in left:
            left.add(node)
    return [node for node in conversation.nodes if node in left]


def _answer_the_same(one: TurnNode, other: TurnNode) -> bool:
    """Return True if two turns had the same prompt. On engines that take messages, turns have no ids to compare."""
    if one.turn.start or other.turn.start:
        return one.turn.prompt_ids == other.turn.prompt_ids
    return list(one.prompt_messages) == list(other.prompt_messages)


def _aligned(node: TurnNode, now: Cursor, history: Sequence[Message]) -> tuple[TurnNode, Alignment] | None:
    if not same_tools(node.segment.tools, now.schemas()):
        return None
    return node, compare(node.messages, history)


def _gone_on_from(leaf: TurnNode, alignment: Alignment, now: Cursor, whole: Cursor) -> Cursor:
    stored, index = leaf.messages, alignment.index
    path = list(leaf.line())
    again = next((node for node in path if node.start == index), None)
    if again is not None and not alignment.appended:
        takes_back = again is leaf and leaf is now.node
        return before(again, now, whole.whole, takes_back=takes_back)
    spoken = any(message["role"] == "assistant" for message in alignment.appended)
    node = next((node for node in path if node.start < index), None)
    if spoken or node is None:
        return whole
    return Cursor(now.tools, [*stored[node.start + 1 : index], *alignment.appended], node)
