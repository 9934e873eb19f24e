"""The next prompt of a conversation: a first render, a bridge, a fork where there is none, or a cut turn going on."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeVar

from runner.concurrency.clocks import Waiting
from runner.concurrency.threads import Job
from runner.engines.base import FinishReason
from runner.episode.limits import Ending
from runner.episode.model import ChatModel, Encoding
from runner.episode.state import ConversationState
from runner.episode.turn_tree import Cursor, TurnNode
from runner.messages import Message
from runner.options import HistoryPolicy
from runner.tokens.bridging.bridge import Bridge, PromptText
from runner.tokens.bridging.refusal import Property, Unbridgeable
from runner.tokens.junction import Anchor, Close, Junction, Result, Seam
from runner.tokens.log import Source
from runner.tokens.turn_shape import AnsweredTurn, is_plain
from runner.trajectory import AGAIN, BRANCH, RETRY, Outcome, Segment, Turn

__all__ = [
    "REENCODED",
    "PreparedPrompt",
    "followed_junction",
    "forked_junction",
    "next_prompt",
    "oversized",
]

REENCODED = "reencoded"
"""The cause of a first segment whose prompt holds what the same episode sampled: other ids may say the same."""

MAX_CHARACTERS_ON_LOOP = 16_384
"""Prompts of more characters are made off the event loop: encoding one of 80 kB takes some 50 ms."""

TOOL_CHARACTERS = 1_000
"""The characters that a tool is taken to add to a prompt: a guess, which only decides whether a thread renders it."""

MESSAGE_CHARACTERS = 100
"""What a message is taken to add to it besides what it says: a template may take 20 us for each."""

T = TypeVar("T")

Schemas = Sequence[dict[str, Any]]

# These the messages, the template or the run's options lack for any prompt: rendering everything anew mends none.
_NO_FORK_HELPS = (Property.REASONING_CLOSED, Property.TEXT_KEPT, Property.CONTENT_SHOWN)


@dataclass(slots=True)
class PreparedPrompt:
    """A prompt that the engine has not been given yet. Nothing is recorded before it has it."""

    segment: Segment
    """The segment whose log it extends, or the one that it begins."""
    ids: array[int]
    """What the model is given: the segment's log and `new_ids`."""
    new_ids: Sequence[int]
    """The ids to be appended to the log."""
    source: Source
    """Where `new_ids` came from."""
    plain: bool
    """Whether all its messages are plain."""
    messages: Sequence[Message] = ()
    """The messages to be appended to the segment."""
    asked: int = 0
    """How many of the last of them are what the turn is asked."""
    queued: int = 0
    """How many of the conversation's queued messages are among them."""
    junction: Junction | None = None
    """How the prompt was made from the turn before; None where it was not."""
    continued: bool = False
    """A cut turn goes on."""
    taken_back: TurnNode | None = None
    """The turn that is played again and not trained on."""


async def next_prompt(
    state: ConversationState, cursor: Cursor, *, extend: bool, raise_unbridgeable: bool = False
) -> PreparedPrompt:
    """The prompt of the next turn, of the queued messages and what was seen before.

    Args:
        state: the conversation.
        cursor: where it speaks next.
        extend: the segment of the turn that it goes on from may be extended; else a new one has a copy of its ids.
        raise_unbridgeable: where there is no exact one, raise why; else the episode ends.

    Raises:
        EpisodeOver: it cannot fit the context, or there is none that is exact.
        Unbridgeable: the same of one that is only refused.
        RuntimeError: nothing was added that could be answered.
    """
    _refuse_oversized(state, cursor)
    # A copy: while a template renders in a thread, the author may add what only the turn after this one will see.
    queued = list(cursor.queued)
    try:
        prompt = await _prompt_of(state, cursor, queued)
    except Unbridgeable as missing:
        if raise_unbridgeable:
            raise
        _end_without_prompt(state, cursor, missing)
    prompt.queued = len(queued)
    if cursor.node is not None and prompt.segment is cursor.node.segment and not extend:
        _branch_off(prompt, cursor.node)
    return prompt


async def _prompt_of(state: ConversationState, cursor: Cursor, queued: list[Message]) -> PreparedPrompt:
    node, again = cursor.node, cursor.again
    if again is not None and queued == list(again.asked):
        return _once_more(again, takes_back=cursor.takes_back)
    if node is not None and not cursor.whole and queued:
        return await _answering(state, cursor, node, queued)
    if node is not None and not cursor.whole:
        if node.turn.finish is FinishReason.STOP:
            raise RuntimeError(
                f"nothing was added to conversation {state.name!r} since its last turn: add() an answer."
            )
        segment, ids = node.segment, node.turn.log.ids[: node.turn.end]
        return PreparedPrompt(segment, ids, (), Source.BRIDGE, node.plain, continued=True)
    if not queued:
        raise RuntimeError(f"conversation {state.name!r} has no message yet: add() one, or give it a prompt.")
    return await _first(state, cursor, queued)


async def _first(state: ConversationState, cursor: Cursor, messages: Sequence[Message]) -> PreparedPrompt:
    """The first prompt of a segment, rendered from the start."""
    messages = state.chat.with_fitting_ids(messages, state.episode.call_ids)
    reencoded = cursor.node is None and not cursor.whole and not state.segments
    again = reencoded and any(map(state.episode.was_said, messages))
    cause = REENCODED if again else cursor.whole or "start"
    tools = cursor.schemas()
    bridger, size = state.chat.bridger, sum(len(message["content"]) + MESSAGE_CHARACTERS for message in messages)
    size += TOOL_CHARACTERS * len(tools)
    render = partial(bridger.prompt_text, messages, tools)
    ids = await _encoded(state, render() if size <= MAX_CHARACTERS_ON_LOOP else await _in_thread(state, render))
    junction = forked_junction(cause) if cause != "start" else None
    segment = Segment(cause=cause, tools=tools, origin=cursor.origin)
    plain = all(map(is_plain, messages))
    return PreparedPrompt(segment, ids, ids, Source.PROMPT, plain, messages, len(messages), junction=junction)


def _once_more(again: TurnNode, *, takes_back: bool) -> PreparedPrompt:
    """The very ids of a turn's prompt, once more."""
    first = again.spoken
    start = first.turn.start
    ids, messages = first.turn.log.ids[:start], again.segment.messages[: again.start]
    cause = RETRY if takes_back else AGAIN
    segment = Segment(cause=cause, tools=again.segment.tools, origin=first.origin, shared=start)
    return PreparedPrompt(
        segment,
        ids,
        ids,
        Source.PROMPT,
        again.plain,
        messages,
        len(messages) - again.answered,
        junction=forked_junction(cause),
        taken_back=again if takes_back else None,
    )


def _branch_off(prompt: PreparedPrompt, node: TurnNode) -> None:
    """Begin a segment of its own with a copy of the ids that the prompt goes on from."""
    tools, shared = node.segment.tools, node.turn.end
    prompt.segment = Segment(cause=BRANCH, tools=tools, origin=node.origin, shared=shared)
    prompt.new_ids, prompt.source = prompt.ids, Source.PROMPT
    prompt.messages = [*node.messages, *prompt.messages]


async def _answering(
    state: ConversationState, cursor: Cursor, node: TurnNode, new: Sequence[Message]
) -> PreparedPrompt:
    """The prompt after a turn that is answered, by the run's policy."""
    plain = node.plain and all(map(is_plain, new))
    segment, last, history, tools = node.segment, node.turn, state.chat.history, cursor.schemas()
    if tools != segment.tools:
        return await _forked(state, node, new, tools, "environment")
    if last.thinking and not history.close_reasoning:
        raise Unbridgeable(Property.REASONING_CLOSED, "the turn was cut inside its reasoning")
    if history.policy is HistoryPolicy.FORK:
        return await _followed(state, node, new, tools)
    try:
        bridge = await _bridge(state, node, new, tools, plain)
    except Unbridgeable as missing:
        if missing.property in _NO_FORK_HELPS or history.policy is HistoryPolicy.REFUSE:
            raise
        return await _forked(state, node, new, tools, missing.property.value)
    junction = bridge.junction
    if last.dropped:
        junction = replace(junction, dropped=last.dropped, cause="stop_string")
    ids = last.log.ids[: last.end]
    ids.extend(bridge.ids)
    return PreparedPrompt(segment, ids, bridge.ids, Source.BRIDGE, plain, new, len(new), junction=junction)


async def _bridge(
    state: ConversationState, node: TurnNode, new: Sequence[Message], tools: Schemas, plain: bool
) -> Bridge:
    bridger, last = state.chat.bridger, node.turn
    answered = AnsweredTurn(node.messages, new, tools, last.number, plain)
    tail = bridger.locality.tail_at_once(answered)
    if tail is None:
        tail = await _in_thread(state, partial(bridger.tail, answered))
    return state.chat.bridge(last, tail)


async def _forked(
    state: ConversationState, node: TurnNode, new: Sequence[Message], tools: Schemas, cause: str
) -> PreparedPrompt:
    """A new segment with everything rendered anew, loss mask 0 throughout."""
    bridger, messages = state.chat.bridger, [*node.messages, *new]
    text = await _in_thread(state, partial(bridger.prompt_text, messages, tools))
    ids = await _encoded(state, text)
    again, junction = Segment(cause=cause, tools=tools, origin=node.origin), forked_junction(cause)
    plain = node.plain and all(map(is_plain, new))
    return PreparedPrompt(again, ids, ids, Source.PROMPT, plain, messages, len(messages), junction=junction)


async def _followed(state: ConversationState, node: TurnNode, new: Sequence[Message], tools: Schemas) -> PreparedPrompt:
    """What the template makes of everything: an append where it leaves the past as it was, else a fork."""
    fork = await _forked(state, node, new, tools, "template")
    before = node.turn.end
    unsampled = any(message["role"] == "assistant" for message in new)
    if unsampled or fork.ids[:before] != node.turn.log.ids[:before]:
        return fork
    added = fork.ids[before:]
    junction = followed_junction(state.chat, fork.ids, node.turn, len(added))
    return PreparedPrompt(node.segment, fork.ids, added, Source.BRIDGE, fork.plain, new, len(new), junction=junction)


async def _encoded(state: ConversationState, text: PromptText) -> array[int]:
    """The ids of a whole prompt; a long one is encoded in a thread, and where several want the same, once."""
    chat = state.chat
    if len(text[0]) <= MAX_CHARACTERS_ON_LOOP:
        return chat.bridger.prompt_ids(text)
    known: array[int] | None = chat.bridger.known_prompt(text)
    if known is not None:
        return known
    with Waiting():
        while (other := chat.encoding.get(text)) is not None:
            await other.done.wait()
            if other.ids is not None:  # else it was cancelled, or failed
                return other.ids[:]
        chat.encoding[text] = own = Encoding()
        try:
            own.ids = await state.episode.shared.workers.call(Job(partial(chat.bridger.prompt_ids, text), "prompt"))
            return own.ids[:]
        finally:
            del chat.encoding[text]
            own.done.set()


async def _in_thread(state: ConversationState, render: Callable[[], T]) -> T:
    """Render where it does not hold up the event loop.

    It is no work of the episode's: its clocks stand still, as while it waits for a place in the engine.
    """
    with Waiting():
        made: T = await state.episode.shared.workers.call(Job(render, "chat template"))
        return made


# --- where there is none


def oversized(state: ConversationState, cursor: Cursor) -> int:
    """Characters of the queued messages where they are too many for the context in any case, else 0."""
    size = sum(len(message["content"]) for message in cursor.queued)
    return size if size > state.context * state.chat.tokenizer.longest_token else 0


def _refuse_oversized(state: ConversationState, cursor: Cursor) -> None:
    # Before it is encoded: that takes its time on a huge text, on the event loop.
    size = oversized(state, cursor)
    if size:
        least = size // state.chat.tokenizer.longest_token
        text = f"{state.episode.key.id}: {size} characters cannot fit the context of {state.context} ids"
        state.refuse_prompt(text, prompt=least)


def _end_without_prompt(state: ConversationState, cursor: Cursor, missing: Unbridgeable) -> NoReturn:
    """End the episode: whose fault it is depends on who spoke, and on what cut the turn that cannot be answered."""
    name = state.name
    ending: Ending | None = None
    if not state.train:
        ending = Ending(Outcome.ENV_ERROR, agent=name, error=f"agent {name!r}: {missing}")
    elif missing.property is Property.REASONING_CLOSED and cursor.node is not None:
        ending = Ending.of_cut_turn(cursor.node.turn, str(missing))
    state.episode.limits.end_episode(ending or Ending(Outcome.TOKEN_ERROR, agent=name, error=str(missing)))


# --- records of how it was made, also for verification


def followed_junction(chat: ChatModel, ids: Sequence[int], last: Turn, inserted: int) -> Junction:
    """The junction of a prompt that the template's own render of everything put after a turn.

    The `ids` are the whole prompt, encoded in one go; `inserted` of them came after the turn.
    """
    seam = Seam.SPECIAL if {ids[last.end - 1], ids[last.end]} & chat.tokenizer.control_ids else Seam.VERIFIED
    close = Close.MASKED if chat.closing_stop(last) is None else Close.SAMPLED
    return Junction(Result.APPENDED, Anchor.COMMON_PREFIX, close, seam, inserted)


def forked_junction(cause: str) -> Junction:
    """The junction of a prompt that was rendered whole and encoded in one go: nothing was joined to anything."""
    return Junction(Result.FORKED, Anchor.NONE, Close.MASKED, Seam.VERIFIED, 0, cause=cause)
