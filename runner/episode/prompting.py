"""The next prompt of a conversation: a first render, a bridge, a fork, or the continuation of a cut turn."""

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
"""Cause of a first segment whose prompt contains text that this episode sampled. The ids of the prompt may differ from
the sampled ids.
"""

MAX_CHARACTERS_ON_LOOP = 16_384
"""Prompts with more characters are rendered and encoded in a thread: encoding 80 kB takes about 50 ms."""

TOOL_CHARACTERS = 1_000
"""Estimated characters of one tool in a prompt. The estimate only decides whether a thread renders the prompt."""

MESSAGE_CHARACTERS = 100
"""Estimated extra characters of one message: a template may take 20 microseconds for each."""

T = TypeVar("T")

Schemas = Sequence[dict[str, Any]]

# Refusals for these properties come from the messages, the template or the run's options. They affect every prompt, so
# a new render of the whole history does not help.
_NO_FORK_HELPS = (Property.REASONING_CLOSED, Property.TEXT_KEPT, Property.CONTENT_SHOWN)


@dataclass(slots=True)
class PreparedPrompt:
    """A prompt that the engine has not received yet. It is recorded once the engine has admitted it."""

    segment: Segment
    """The segment whose log the prompt extends, or a new segment."""
    ids: array[int]
    """All prompt ids: the segment's log and `new_ids`."""
    new_ids: Sequence[int]
    source: Source
    """Source of `new_ids`."""
    plain: bool
    """True if all messages of the prompt are plain (see `is_plain`)."""
    messages: Sequence[Message] = ()
    """The messages to append to the segment."""
    answered_count: int = 0
    """Number of messages at the end of the prompt that the turn answers."""
    queued: int = 0
    """Number of the conversation's queued messages in this prompt."""
    junction: Junction | None = None
    """The junction with the previous turn; None for a prompt that does not follow a turn."""
    continued: bool = False
    """True if the prompt continues a cut turn."""
    taken_back: TurnNode | None = None
    """The turn that is sampled again and then no longer trained on, or None."""


async def next_prompt(
    conversation: ConversationState, cursor: Cursor, *, extend: bool, raise_unbridgeable: bool = False
) -> PreparedPrompt:
    """Return the prompt of the next turn, made of the queued messages and the history.

    Args:
        conversation: the conversation of the turn.
        cursor: the point of the turn.
        extend: True to extend the segment of the previous turn; False to begin a new segment with a copy of its ids.
        raise_unbridgeable: True to raise if no exact prompt exists; False to end the episode then.

    Raises:
        EpisodeOver: the queued messages cannot fit the context, or no exact prompt exists.
        Unbridgeable: no exact prompt exists, and `raise_unbridgeable` is set.
        RuntimeError: no message to answer.
    """
    _refuse_oversized(conversation, cursor)
    # This is a copy, since the author may add messages for the next turn while a thread renders the template.
    queued = list(cursor.queued)
    try:
        prompt = await _prompt_of(conversation, cursor, queued)
    except Unbridgeable as missing:
        if raise_unbridgeable:
            raise
        _end_without_prompt(conversation, cursor, missing)
    prompt.queued = len(queued)
    if cursor.node is not None and prompt.segment is cursor.node.segment and not extend:
        _branch_off(prompt, cursor.node)
    return prompt


async def _prompt_of(conversation: ConversationState, cursor: Cursor, queued: list[Message]) -> PreparedPrompt:
    node, again = cursor.node, cursor.again
    if again is not None and queued == list(again.prompt_messages):
        return _once_more(again, takes_back=cursor.takes_back)
    if node is not None and not cursor.whole and queued:
        return await _answering(conversation, cursor, node, queued)
    if node is not None and not cursor.whole:
        if node.turn.finish is FinishReason.STOP:
            raise RuntimeError(
                f"nothing was added to conversation {conversation.name!r} since its last turn: add() an answer."
            )
        segment, ids = node.segment, node.turn.log.ids[: node.turn.end]
        return PreparedPrompt(segment, ids, (), Source.BRIDGE, node.plain, continued=True)
    if not queued:
        raise RuntimeError(f"conversation {conversation.name!r} has no message yet: add() one, or give it a prompt.")
    return await _first(conversation, cursor, queued)


async def _first(conversation: ConversationState, cursor: Cursor, messages: Sequence[Message]) -> PreparedPrompt:
    """Return the first prompt of a segment, rendered from the start."""
    messages = conversation.chat.with_fitting_ids(messages, conversation.episode.call_ids)
    reencoded = cursor.node is None and not cursor.whole and not conversation.segments
    again = reencoded and any(map(conversation.episode.was_said, messages))
    cause = REENCODED if again else cursor.whole or "start"
    tools = cursor.schemas()
    bridger, size = conversation.chat.bridger, sum(len(message["content"]) + MESSAGE_CHARACTERS for message in messages)
    size += TOOL_CHARACTERS * len(tools)
    render = partial(bridger.prompt_text, messages, tools)
    ids = await _encoded(
        conversation, render() if size <= MAX_CHARACTERS_ON_LOOP else await _in_thread(conversation, render)
    )
    junction = forked_junction(cause) if cause != "start" else None
    segment = Segment(cause=cause, tools=tools, origin=cursor.origin)
    plain = all(map(is_plain, messages))
    return PreparedPrompt(segment, ids, ids, Source.PROMPT, plain, messages, len(messages), junction=junction)


def _once_more(again: TurnNode, *, takes_back: bool) -> PreparedPrompt:
    """Return the prompt of a turn that is sampled again, with exactly the ids of the earlier prompt."""
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
    """Begin a new segment with a copy of the ids that the prompt continues from."""
    tools, shared = node.segment.tools, node.turn.end
    prompt.segment = Segment(cause=BRANCH, tools=tools, origin=node.origin, shared=shared)
    prompt.new_ids, prompt.source = prompt.ids, Source.PROMPT
    prompt.messages = [*node.messages, *prompt.messages]


async def _answering(
    conversation: ConversationState, cursor: Cursor, node: TurnNode, new: Sequence[Message]
) -> PreparedPrompt:
    """Return the prompt that follows a turn, by the run's history policy."""
    plain = node.plain and all(map(is_plain, new))
    segment, last, history, tools = node.segment, node.turn, conversation.chat.history, cursor.schemas()
    if tools != segment.tools:
        return await _forked(conversation, node, new, tools, "environment")
    if last.thinking and not history.close_reasoning:
        raise Unbridgeable(Property.REASONING_CLOSED, "the turn was cut inside its reasoning")
    if history.policy is HistoryPolicy.FORK:
        return await _followed(conversation, node, new, tools)
    try:
        bridge = await _bridge(conversation, node, new, tools, plain)
    except Unbridgeable as missing:
        if missing.property in _NO_FORK_HELPS or history.policy is HistoryPolicy.REFUSE:
            raise
        return await _forked(conversation, node, new, tools, missing.property.value)
    junction = bridge.junction
    if last.dropped:
        junction = replace(junction, dropped=last.dropped, cause="stop_string")
    ids = last.log.ids[: last.end]
    ids.extend(bridge.ids)
    return PreparedPrompt(segment, ids, bridge.ids, Source.BRIDGE, plain, new, len(new), junction=junction)


async def _bridge(
    conversation: ConversationState, node: TurnNode, new: Sequence[Message], tools: Schemas, plain: bool
) -> Bridge:
    bridger, last = conversation.chat.bridger, node.turn
    answered = AnsweredTurn(node.messages, new, tools, last.number, plain)
    tail = bridger.locality.tail_at_once(answered)
    if tail is None:
        tail = await _in_thread(conversation, partial(bridger.tail, answered))
    return conversation.chat.bridge(last, tail)


async def _forked(
    conversation: ConversationState, node: TurnNode, new: Sequence[Message], tools: Schemas, cause: str
) -> PreparedPrompt:
    """Return the prompt of a new segment: the whole history, rendered again, with loss mask 0."""
    bridger, messages = conversation.chat.bridger, [*node.messages, *new]
    text = await _in_thread(conversation, partial(bridger.prompt_text, messages, tools))
    ids = await _encoded(conversation, text)
    again, junction = Segment(cause=cause, tools=tools, origin=node.origin), forked_junction(cause)
    plain = node.plain and all(map(is_plain, new))
    return PreparedPrompt(again, ids, ids, Source.PROMPT, plain, messages, len(messages), junction=junction)


async def _followed(
    conversation: ConversationState, node: TurnNode, new: Sequence[Message], tools: Schemas
) -> PreparedPrompt:
    """Return the prompt of the whole history, rendered again: an append if its earlier ids are unchanged, or a fork."""
    fork = await _forked(conversation, node, new, tools, "template")
    before = node.turn.end
    unsampled = any(message["role"] == "assistant" for message in new)
    if unsampled or fork.ids[:before] != node.turn.log.ids[:before]:
        return fork
    added = fork.ids[before:]
    junction = followed_junction(conversation.chat, fork.ids, node.turn, len(added))
    return PreparedPrompt(node.segment, fork.ids, added, Source.BRIDGE, fork.plain, new, len(new), junction=junction)


async def _encoded(conversation: ConversationState, text: PromptText) -> array[int]:
    """Return the ids of a whole prompt. A long prompt is encoded in a thread, once for all concurrent requests."""
    chat = conversation.chat
    if len(text[0]) <= MAX_CHARACTERS_ON_LOOP:
        return chat.bridger.prompt_ids(text)
    known: array[int] | None = chat.bridger.known_prompt(text)
    if known is not None:
        return known
    with Waiting():
        while (other := chat.encoding.get(text)) is not None:
            await other.done.wait()
            if other.ids is not None:  # the ids are None if the encoding failed or was cancelled
                return other.ids[:]
        chat.encoding[text] = own = Encoding()
        try:
            own.ids = await conversation.episode.shared.workers.call(
                Job(partial(chat.bridger.prompt_ids, text), "prompt")
            )
            return own.ids[:]
        finally:
            del chat.encoding[text]
            own.done.set()


async def _in_thread(conversation: ConversationState, render: Callable[[], T]) -> T:
    """Render in a thread, so that the event loop stays free.

    The episode's clocks are paused, as while a request waits for the engine.
    """
    with Waiting():
        made: T = await conversation.episode.shared.workers.call(Job(render, "chat template"))
        return made


# --- without a prompt


def oversized(conversation: ConversationState, cursor: Cursor) -> int:
    """Return the number of characters of the queued messages if they cannot fit the context; else 0."""
    size = sum(len(message["content"]) for message in cursor.queued)
    return size if size > conversation.context * conversation.chat.tokenizer.longest_token else 0


def _refuse_oversized(conversation: ConversationState, cursor: Cursor) -> None:
    # This is checked before encoding, since encoding a huge text would block the event loop.
    size = oversized(conversation, cursor)
    if size:
        least = size // conversation.chat.tokenizer.longest_token
        text = f"{conversation.episode.key.id}: {size} characters cannot fit the context of {conversation.context} ids"
        conversation.refuse_prompt(text, prompt=least)


def _end_without_prompt(conversation: ConversationState, cursor: Cursor, missing: Unbridgeable) -> NoReturn:
    """End the episode, since no exact prompt exists.

    The outcome is ENV_ERROR for an untrained agent, since the author controls its history. After a turn that a limit
    cut inside its reasoning, it is the outcome of that limit. Otherwise, it is TOKEN_ERROR.
    """
    name = conversation.name
    ending: Ending | None = None
    if not conversation.train:
        ending = Ending(Outcome.ENV_ERROR, agent=name, error=f"agent {name!r}: {missing}")
    elif missing.property is Property.REASONING_CLOSED and cursor.node is not None:
        ending = Ending.of_cut_turn(cursor.node.turn, str(missing))
    conversation.episode.limits.end_episode(ending or Ending(Outcome.TOKEN_ERROR, agent=name, error=str(missing)))


# --- junctions, also for verification


def followed_junction(chat: ChatModel, ids: Sequence[int], last: Turn, inserted: int) -> Junction:
    """Return the junction between a turn and the rest of the prompt, if the whole history was rendered again.

    `ids` is the whole prompt, encoded at once; its last `inserted` ids come after the turn.
    """
    seam = Seam.SPECIAL if {ids[last.end - 1], ids[last.end]} & chat.tokenizer.control_ids else Seam.VERIFIED
    close = Close.MASKED if chat.closing_stop(last) is None else Close.SAMPLED
    return Junction(Result.APPENDED, Anchor.COMMON_PREFIX, close, seam, inserted)


def forked_junction(cause: str) -> Junction:
    """Return the junction of a prompt that was rendered and encoded as a whole."""
    return Junction(Result.FORKED, Anchor.NONE, Close.MASKED, Seam.VERIFIED, 0, cause=cause)
