"""One turn from its limits to its record: prompt, request, sampling and parsing."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio

from runner.concurrency.clocks import WhileSampling
from runner.concurrency.gather import gather
from runner.concurrency.threads import Job
from runner.engines.base import FinishReason, GenerationRequest, vocabulary_size
from runner.episode.message_turn import MessageTurn
from runner.episode.model import ChatModel, MessageModel
from runner.episode.parsed_turn import ParsedTurn, text_of
from runner.episode.prompting import PreparedPrompt, next_prompt
from runner.episode.sample import SampledTurn, sample
from runner.episode.state import ConversationState
from runner.episode.turn_event_parser import TurnEventParser
from runner.episode.turn_settings import (
    NO_SINKS,
    TurnContext,
    TurnSinks,
    end_by,
    enforced_constraint,
    record_not_enforced,
    sampling_of,
    tool_choice_of,
    unconstrained,
)
from runner.episode.turn_tree import Cursor, TurnNode
from runner.errors import BadOption, EngineError
from runner.options import Constraint, Sampling, ToolChoice
from runner.tools.tool import Tool
from runner.trajectory import AGAIN, RETRY, Turn
from runner.turn_events import TurnEvent

__all__ = ["score_replies", "take_turn"]


async def take_turn(
    conversation: ConversationState,
    cursor: Cursor,
    sampling: Sampling | None = None,
    tool_choice: ToolChoice | None = None,
    *,
    number: int | None = None,
    sinks: TurnSinks = NO_SINKS,
) -> Turn:
    """Take one turn of a conversation at `cursor`, which then moves after the turn.

    Args:
        conversation: the conversation that takes the turn.
        cursor: the point of the turn; turns in flight at the same time have different cursors.
        sampling: takes precedence over the conversation's sampling.
        tool_choice: takes precedence over the environment's tool choice.
        number: the turn's number, if it was reserved before.
        sinks: receivers of the turn's events while it is sampled.

    Raises:
        EpisodeOver: the episode has ended, a limit was reached, no exact prompt exists, or the engine failed.
        Unbridgeable: no exact prompt exists, and `sinks.raise_unbridgeable` is set.
        RuntimeError: no message to answer, or a trained or evaluated agent takes a turn in a reward.
        BadOption: the sampling, the limits or the tool choice cannot be used.
    """
    await conversation.episode.limits.check_may_take_turn(conversation.name, counted=conversation.counted)
    numbered = conversation.number() if number is None else nullcontext(number)
    if isinstance(conversation.model, MessageModel):
        with numbered as number, conversation.session() as session:
            asking = MessageTurn(TurnContext(conversation, cursor, number, session), conversation.model.engine)
            return await asking.take(sampling, tool_choice, sinks)
    with _Extending(conversation, cursor) as extend, numbered as number, conversation.session() as session:
        turn_context = TurnContext(conversation, cursor, number, session)
        prompt = await next_prompt(conversation, cursor, extend=extend, raise_unbridgeable=sinks.raise_unbridgeable)
        _refuse_too_long(conversation, prompt)
        request = _request(turn_context, prompt, sampling, tool_choice, sinks)
        sampled, node = _empty_sample(turn_context, prompt, request, sinks), None
        try:
            await _sampling(conversation, prompt, request, sampled)
        finally:
            # A cancelled or failed turn is recorded too, if the engine admitted the request and so had the prompt.
            if sampled.admitted:
                node = _recorded(turn_context, prompt, request, sampled)
                await _parse(turn_context, node, sampled)
                conversation.record(cursor, node)
    if sampled.error is not None:
        end_by(conversation, sampled.error)
    assert node is not None  # an engine that did not fail has admitted the request
    return node.turn


async def score_replies(conversation: ConversationState, cursor: Cursor, replies: Sequence[str]) -> list[float]:
    """Return the log-probability of each text as the beginning of the next turn at `cursor`, without sampling it.

    Args:
        conversation: the conversation before the replies.
        cursor: the point of the turn; it does not move.
        replies: the texts. They are encoded without control tokens.

    Raises:
        EpisodeOver: the engine failed, or there is no exact prompt that fits the context.
        RuntimeError: no message to answer.
    """
    chat = conversation.chat
    prompt = list((await next_prompt(conversation, cursor, extend=True)).ids)
    adapter = sampling_of(conversation, None).adapter
    how = None if adapter is None else Sampling(adapter=adapter)

    async def score(reply: str) -> float:
        ids = chat.tokenizer.encode(reply, [(0, len(reply))])
        return sum(await chat.engine.score([*prompt, *ids], start=len(prompt), sampling=how))

    try:
        with WhileSampling():
            return await gather([partial(score, reply) for reply in replies])
    except EngineError as error:
        end_by(conversation, error)


class _Extending:
    """A block whose value is True if the turn may extend the segment of the previous turn.

    While the block runs, no other turn may extend that segment.
    """

    __slots__ = ("_node",)

    def __init__(self, conversation: ConversationState, cursor: Cursor) -> None:
        node = cursor.node
        self._node = node if node is not None and node.ends_segment and conversation.has(node.segment) else None

    def __enter__(self) -> bool:
        if self._node is not None:
            self._node.extended = True
        return self._node is not None

    def __exit__(self, *_: object) -> None:
        node = self._node
        if node is not None:
            node.extended = len(node.segment.log) > node.turn.end


def _refuse_too_long(conversation: ConversationState, prompt: PreparedPrompt) -> None:
    if len(prompt.ids) >= conversation.context:
        room = f"no room for a turn in the context of {conversation.context}"
        text = f"{conversation.episode.key.id}: {len(prompt.ids)} ids leave {room}"
        conversation.refuse_prompt(text, prompt=len(prompt.ids))


# --- the request


@dataclass(slots=True)
class _TurnRequest:
    generation: GenerationRequest
    sampling: Sampling
    """The sampling that the turn records: as requested, without the constraint."""
    tool_choice: ToolChoice
    """The tool choice: "auto", "none", "required" or the name of a tool."""
    ceiling: str
    """The limit that sets the engine's `max_tokens`: "max_tokens", "context" or "tokens"."""


def _request(
    turn_context: TurnContext,
    prompt: PreparedPrompt,
    sampling: Sampling | None,
    tool_choice: ToolChoice | None,
    sinks: TurnSinks,
) -> _TurnRequest:
    conversation, chat, tools = turn_context.conversation, turn_context.conversation.chat, turn_context.cursor.tools
    settings = sampling_of(conversation, sampling)
    if settings is not conversation.checked_sampling:
        record_not_enforced(conversation, settings)
        settings.check_vocabulary(vocabulary_size(chat.engine))
        chat.engine.check_sampling(settings)
        conversation.checked_sampling = settings
    choice = tool_choice_of(conversation, tools, tool_choice)
    ceilings = {"max_tokens": settings.max_tokens, "context": conversation.context - len(prompt.ids)}
    left = conversation.episode.limits.tokens_left() if conversation.counted else None
    if left is not None:
        ceilings["tokens"] = left
    ceiling = min(ceilings, key=ceilings.__getitem__)
    generation = GenerationRequest(
        name=turn_context.name,
        prompt=prompt.ids,
        sampling=settings if ceiling == "max_tokens" else settings.shortened(ceilings[ceiling]),
        stop_ids=settings.all_stop_ids(chat.stop_ids),
        seed=turn_context.seed,
        session=turn_context.session,
        constraint=_constraint(chat, tools, settings, choice),
        # Stop strings are found in the deltas as they arrive, and ids after a stop string are dropped.
        acts_on_deltas=sinks.receive is not None or bool(settings.stop),
    )
    return _TurnRequest(generation, unconstrained(settings), choice, ceiling)


def _constraint(
    chat: ChatModel, tools: Sequence[Tool], settings: Sampling, tool_choice: ToolChoice
) -> Constraint | None:
    if tools:
        # the tools of the class were checked at the start of the run, but not the tools of setup() and of clients
        chat.require_calls()
    enforced = chat.parser.constraint(tools, tool_choice) if tools else None
    given = enforced_constraint(settings)
    if enforced and given:
        field = given.kind.value if settings.schema is None else "schema"
        raise BadOption(
            f"tool_choice={tool_choice!r} and Sampling({field}=...) both constrain the same turn: "
            f"use generate(tool_choice='none') for turns with Sampling({field}=...)."
        )
    constraint = enforced or given
    if constraint is not None:
        chat.engine.check_constraint(constraint)
    return constraint


def _empty_sample(
    turn_context: TurnContext, prompt: PreparedPrompt, request: _TurnRequest, sinks: TurnSinks
) -> SampledTurn:
    """Return an empty record for the deltas, with the receiver of their events."""
    before, receive = turn_context.cursor.node, sinks.receive
    send = receive if sinks.sends_events else None
    return SampledTurn(
        prompt.segment.log,
        event_parser=None if send is None else _event_parser(turn_context, prompt, request, send),
        receive=receive if sinks.sends_ids else None,
        handle=sinks.handle_of(turn_context.number),
        # The calls of a client's message are numbered from its first call on. Only a turn that continues a cut turn has
        # earlier calls in its message.
        calls_before=len(before.turn.tool_calls) if prompt.continued and before is not None else 0,
    )


def _event_parser(
    turn_context: TurnContext, prompt: PreparedPrompt, request: _TurnRequest, send: Callable[[TurnEvent], None]
) -> TurnEventParser:
    before, log = turn_context.cursor.node, prompt.segment.log
    event_parser = TurnEventParser(turn_context.conversation.chat, turn_context.cursor.tools, request.tool_choice, send)
    event_parser.begin(
        log.ids[before.begin :] if prompt.continued and before is not None else (),
        calls_before=_calls_before(turn_context, prompt),
        longest_stop=max(map(len, request.sampling.stop), default=0),
    )
    return event_parser


def _sampling(
    conversation: ConversationState, prompt: PreparedPrompt, request: _TurnRequest, into: SampledTurn
) -> Coroutine[Any, Any, None]:
    # This function is not a coroutine, since a coroutine would add one frame to each delta.
    conversation.episode.report_activity(f"{conversation.name}: engine")
    return sample(
        into,
        conversation.chat.engine,
        request.generation,
        new_ids=prompt.new_ids,
        source=prompt.source,
        tokenizer=conversation.chat.tokenizer,
        stall_seconds=conversation.episode.limits.configured.stall_seconds,
    )


# --- the record


def _recorded(
    turn_context: TurnContext, prompt: PreparedPrompt, request: _TurnRequest, sampled: SampledTurn
) -> TurnNode:
    """Add the prompt's messages to its segment, and return the node of the sampled turn, which is not parsed yet."""
    cursor, segment = turn_context.cursor, prompt.segment
    if prompt.taken_back is not None:
        _take_back(prompt.taken_back)
    segment.messages.extend(prompt.messages)
    # Messages leave the queue only now. The messages of a prompt that the engine did not admit stay queued, and so do
    # messages that were added during the request.
    del cursor.queued[: prompt.queued]
    turn = Turn(
        agent=turn_context.conversation.name,
        number=turn_context.number,
        log=segment.log,
        start=sampled.start,
        end=sampled.end,
        finish=sampled.finish,
        stop=sampled.stop,
        seed=request.generation.seed,
        sampling=request.sampling,
        constraint=request.generation.constraint,
        tool_choice=request.tool_choice,
        cached_tokens=sampled.cached_tokens,
        junction=prompt.junction,
        timings=sampled.timings,
        dropped=sampled.dropped,
        resampled=sampled.resampled,
        handle=sampled.handle,
    )
    if turn.finish is FinishReason.LENGTH:
        turn.stop = request.ceiling
        # The engine receives only the smallest of several limits, as a number, so it cannot name the limit.
        if request.ceiling == "context":
            turn.finish = FinishReason.CONTEXT
    return _node(turn_context, prompt, turn)


def _take_back(node: TurnNode) -> None:
    """Exclude the sampled ids of a turn's message from training."""
    first = node.spoken
    for each in node.path():
        each.turn.log.take_back(each.turn.start, each.turn.end)
        if each is first:
            break


def _node(turn_context: TurnContext, prompt: PreparedPrompt, turn: Turn) -> TurnNode:
    """Return the tree node of a turn, which is not parsed yet."""
    before, messages = turn_context.cursor.node, prompt.segment.messages
    begin, answered = turn.start, len(messages) - prompt.answered_count
    if prompt.continued and before is not None:
        # A call may be cut in two, so the message is parsed again from its first turn on.
        messages.pop()
        begin, answered = before.begin, before.answered
    calls = _calls_before(turn_context, prompt)
    return TurnNode(
        turn=turn,
        segment=prompt.segment,
        parent=before,
        answered=answered,
        start=len(messages),
        reply={"role": "assistant", "content": ""},
        begin=begin,
        calls_before=calls,
        calls=calls,
        plain=prompt.plain,
    )


def _calls_before(turn_context: TurnContext, prompt: PreparedPrompt) -> int:
    """Return the number of calls before the message that the turn begins or continues."""
    before, again = turn_context.cursor.node, turn_context.cursor.again
    if prompt.continued and before is not None:
        return before.calls_before
    if again is not None and prompt.segment.cause in (RETRY, AGAIN):
        return again.calls_before
    return 0 if before is None else before.calls


async def _parse(turn_context: TurnContext, node: TurnNode, sampled: SampledTurn) -> None:
    """Set text, reasoning and calls of a turn from its sampled ids."""
    turn, chat, text = node.turn, turn_context.conversation.chat, sampled.text
    ids = turn.log.ids
    if text is not None and node.begin < turn.start:
        text = chat.tokenizer.decode(ids[node.begin : turn.start]) + text
    spoken = ids[node.begin : turn.end]
    stopped = turn.finish is FinishReason.STOP and isinstance(turn.stop, int)
    if sampled.event_parser is not None:
        sampled.event_parser.finish(stopped=stopped, text=text)
    if text is None:
        text = text_of(spoken, chat, stopped=stopped)
    before, tools = node.calls_before, turn_context.cursor.tools
    read = partial(ParsedTurn.of, text, spoken, chat, tools, before=before, tool_choice=turn.tool_choice)
    parsed = read() if chat.parser.named is None else await _in_thread(turn_context.conversation, read)
    turn.text, turn.reasoning, turn.tool_calls = parsed.text, parsed.reasoning, parsed.tool_calls
    turn.thinking = parsed.cut_in_reasoning(turn, chat)
    node.calls = before + len(parsed.tool_calls)
    node.reply = parsed.as_message()


async def _in_thread(conversation: ConversationState, read: Callable[[], ParsedTurn]) -> ParsedTurn:
    """Parse a turn with another library in a thread, since parsing a long turn may take a second.

    A cancellation waits until the thread is done.
    """
    conversation.episode.report_activity(f"{conversation.name}: reading")
    with anyio.CancelScope(shield=True):
        parsed: ParsedTurn = await conversation.episode.shared.workers.call_beside(Job(read, "tool format"))
    return parsed
