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
from runner.episode.model import ChatModel
from runner.episode.state import ConversationState, Retry
from runner.messages import Message
from runner.options import HistoryPolicy
from runner.tokens.bridging.bridge import Bridge
from runner.tokens.bridging.refusal import Property, Unbridgeable
from runner.tokens.junction import Anchor, Close, Junction, Result, Seam
from runner.tokens.log import Source, TokenLog
from runner.tokens.shape import AnsweredTurn, is_plain
from runner.trajectory import Outcome, Segment, Turn

__all__ = [
    "REENCODED",
    "RETRY",
    "PreparedPrompt",
    "followed_junction",
    "forked_junction",
    "next_prompt",
    "oversized",
]

RETRY = "retry"
"""The cause of a segment that samples the last turn of another one anew, from the same prompt."""

REENCODED = "reencoded"
"""The cause of a first segment whose prompt holds what the same episode sampled: other ids may say the same."""

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
    messages: Sequence[Message] = ()
    """The messages to be appended to the segment."""
    queued: int = 0
    """How many of the conversation's queued messages are among them."""
    junction: Junction | None = None
    """How the prompt was made from the turn before; None where it was not."""
    continued: bool = False
    """A cut turn goes on."""
    taken_back: TokenLog | None = None
    """The log whose last turn is played again."""


async def next_prompt(state: ConversationState) -> PreparedPrompt:
    """The prompt of the next turn, of the queued messages and what was seen before.

    Raises:
        EpisodeOver: it cannot fit the context, or there is none that is exact.
        RuntimeError: nothing was added that could be answered.
    """
    _refuse_oversized(state)
    # A copy: while a template renders in a thread, the author may add what only the turn after this one will see.
    queued = list(state.queued)
    try:
        prompt = await _prompt_of(state, queued)
    except Unbridgeable as missing:
        _end_without_prompt(state, missing)
    prompt.queued = len(queued)
    return prompt


async def _prompt_of(state: ConversationState, queued: list[Message]) -> PreparedPrompt:
    segment, retry = state.segment, state.retry
    if segment is not None and queued:
        return await _answering(state, segment, queued)
    if segment is not None:
        if state.turns[-1].finish is FinishReason.STOP:
            raise RuntimeError(
                f"nothing was added to conversation {state.name!r} since its last turn: add() an answer."
            )
        return PreparedPrompt(segment, segment.log.ids, (), Source.BRIDGE, continued=True)
    if not queued:
        raise RuntimeError(f"conversation {state.name!r} has no message yet: add() one, or give it a prompt.")
    if retry is not None and queued == retry.messages:
        return _retried(retry, queued)
    return _first(state, queued)


def _first(state: ConversationState, messages: Sequence[Message]) -> PreparedPrompt:
    """The first prompt of a segment, rendered from the start."""
    state.plain = state.plain and all(map(is_plain, messages))
    again = not state.segments and any(map(state.play.was_said, messages))
    cause = REENCODED if again else state.cause
    tools = state.schemas()
    ids = state.chat.bridger.first_prompt(messages, tools)
    junction = forked_junction(cause) if cause != "start" else None
    return PreparedPrompt(Segment(cause=cause, tools=tools), ids, ids, Source.PROMPT, messages, junction=junction)


def _retried(retry: Retry, messages: Sequence[Message]) -> PreparedPrompt:
    """The very ids of a turn's prompt, once more."""
    log = retry.segment.log
    ids = log.ids[: retry.start]
    again = Segment(cause=RETRY, tools=retry.segment.tools)
    return PreparedPrompt(again, ids, ids, Source.PROMPT, messages, junction=forked_junction(RETRY), taken_back=log)


async def _answering(state: ConversationState, segment: Segment, new: Sequence[Message]) -> PreparedPrompt:
    """The prompt after a turn that is answered, by the run's policy."""
    state.plain = state.plain and all(map(is_plain, new))
    last, history, tools = state.turns[-1], state.chat.history, state.schemas()
    if tools != segment.tools:
        return await _forked(state, segment, new, tools, "environment")
    if last.thinking and not history.close_reasoning:
        raise Unbridgeable(Property.REASONING_CLOSED, "the turn was cut inside its reasoning")
    if history.policy is HistoryPolicy.FORK:
        return await _followed(state, segment, new, tools)
    try:
        bridge = await _bridge(state, segment, new, tools)
    except Unbridgeable as missing:
        if missing.property in _NO_FORK_HELPS or history.policy is HistoryPolicy.REFUSE:
            raise
        return await _forked(state, segment, new, tools, missing.property.value)
    junction = bridge.junction
    if last.dropped:
        junction = replace(junction, dropped=last.dropped, cause="stop_string")
    ids = segment.log.ids + array("i", bridge.ids)
    return PreparedPrompt(segment, ids, bridge.ids, Source.BRIDGE, new, junction=junction)


async def _bridge(state: ConversationState, segment: Segment, new: Sequence[Message], tools: Schemas) -> Bridge:
    bridger, last = state.chat.bridger, state.turns[-1]
    answered = AnsweredTurn(segment.messages, new, tools, last.number, state.plain)
    tail = bridger.locality.tail_at_once(answered)
    if tail is None:
        tail = await _in_thread(state, partial(bridger.tail, answered))
    return state.chat.bridge(last, tail)


async def _forked(
    state: ConversationState, segment: Segment, new: Sequence[Message], tools: Schemas, cause: str
) -> PreparedPrompt:
    """A new segment with everything rendered anew, loss mask 0 throughout."""
    bridger, messages = state.chat.bridger, [*segment.messages, *new]
    text = await _in_thread(state, partial(bridger.prompt_text, messages, tools))
    ids = bridger.prompt_ids(text)
    again, junction = Segment(cause=cause, tools=tools), forked_junction(cause)
    return PreparedPrompt(again, ids, ids, Source.PROMPT, messages, junction=junction)


async def _followed(
    state: ConversationState, segment: Segment, new: Sequence[Message], tools: Schemas
) -> PreparedPrompt:
    """What the template makes of everything: an append where it leaves the past as it was, else a fork."""
    fork = await _forked(state, segment, new, tools, "template")
    before = len(segment.log)
    unsampled = any(message["role"] == "assistant" for message in new)
    if unsampled or fork.ids[:before] != segment.log.ids:
        return fork
    added = fork.ids[before:]
    junction = followed_junction(state.chat, fork.ids, state.turns[-1], len(added))
    return PreparedPrompt(segment, fork.ids, added, Source.BRIDGE, new, junction=junction)


async def _in_thread(state: ConversationState, render: Callable[[], T]) -> T:
    """Render where it does not hold up the event loop.

    It is no work of the episode's: its clocks stand still, as while it waits for a place in the engine.
    """
    with Waiting():
        made: T = await state.play.shared.workers.call(Job(render, "chat template"))
        return made


# --- where there is none


def oversized(state: ConversationState) -> int:
    """Characters of the queued messages where they are too many for the context in any case, else 0."""
    size = sum(len(message["content"]) for message in state.queued)
    return size if size > state.context * state.chat.tokenizer.longest_token else 0


def _refuse_oversized(state: ConversationState) -> None:
    # Before it is encoded: that takes its time on a huge text, on the event loop.
    size = oversized(state)
    if size:
        play = state.play
        text = f"{play.key.id}: {size} characters cannot fit the context of {state.context} ids"
        play.limits.refuse_prompt(state.name, text, trained=state.train)


def _end_without_prompt(state: ConversationState, missing: Unbridgeable) -> NoReturn:
    """End the episode: whose fault it is depends on who spoke, and on what cut the turn that cannot be answered."""
    name = state.name
    ending: Ending | None = None
    if not state.train:
        ending = Ending(Outcome.ENV_ERROR, agent=name, error=f"agent {name!r}: {missing}")
    elif missing.property is Property.REASONING_CLOSED:
        ending = Ending.of_cut_turn(state.turns[-1], str(missing))
    state.play.limits.end_episode(ending or Ending(Outcome.TOKEN_ERROR, agent=name, error=str(missing)))


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
