"""Rewritten histories: where in the forest of its turns a conversation goes on whose past was given anew."""

from __future__ import annotations

from collections.abc import Sequence

from runner.engines.base import FinishReason
from runner.episode.state import ConversationState
from runner.episode.turn_tree import Cursor, TurnNode
from runner.messages import Message
from runner.tokens.bridging.history import Alignment, AlignmentKind, compare, same_tools

__all__ = ["before", "cursor_at", "left_behind"]


def cursor_at(state: ConversationState, history: Sequence[Message]) -> Cursor:
    """Where the conversation goes on whose whole past is `history`.

    The last turn that it begins with is gone on from. Where it ends as a turn's prompt did, that turn is played again,
    and taken back if it was the last one.
    """
    now = state.cursor
    found = None if now.whole or now.node is None else _aligned(now.node, now, history)
    if found is None or found[1].kind not in (AlignmentKind.SAME, AlignmentKind.APPEND):
        # The ends of its paths; a turn that was cut is no end once it went on, and its message is another one.
        ends = (
            node for node in reversed(state.nodes) if not node.extended or node.turn.finish is not FinishReason.STOP
        )
        others = (node for node in ends if node is not now.node)
        # Of those that share as much the current path is meant, then the latest.
        aligned = [each for each in (found, *(_aligned(node, now, history) for node in others)) if each is not None]
        found = max(aligned, key=lambda each: each[1].index, default=None)
    whole = Cursor(now.tools, list(history), now.node, "environment" if state.segments else "")
    return whole if found is None else _gone_on_from(*found, now, whole)


def before(node: TurnNode, now: Cursor, whole: str, *, takes_back: bool) -> Cursor:
    """Where a turn stands that is to be sampled once more."""
    first = node.spoken
    cause = "" if node.answered else whole
    return Cursor(now.tools, list(node.asked), first.parent, cause, again=node, takes_back=takes_back)


def left_behind(state: ConversationState, kept: TurnNode) -> list[TurnNode]:
    """The other tries of a turn, and what followed them and it."""
    first, left = kept.spoken, set[TurnNode]()
    on_path = set(kept.path())
    for node in state.nodes:
        begun = node.spoken
        again = begun.parent is first.parent and begun is not first
        if node in on_path:
            continue
        if (again and _asked_alike(begun, first)) or node.parent is kept or node.parent in left:
            left.add(node)
    return [node for node in state.nodes if node in left]


def _asked_alike(one: TurnNode, other: TurnNode) -> bool:
    """Whether two turns had the same prompt, of which a server of messages gives no ids."""
    if one.turn.start or other.turn.start:
        return one.turn.prompt_ids == other.turn.prompt_ids
    return list(one.asked) == list(other.asked)


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
