"""A turn: may the agent speak, its prompt, the request, sampling, the record of it, and what was said."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio

from runner.concurrency.threads import Job
from runner.engines.base import FinishReason, GenerationRequest, Session, vocabulary_size
from runner.episode.forest import Head, Node
from runner.episode.message_turn import MessageTurn
from runner.episode.model import ChatModel, MessageModel
from runner.episode.parsed_turn import ParsedTurn, text_of
from runner.episode.prompting import PreparedPrompt, next_prompt
from runner.episode.sample import Sample, sample
from runner.episode.state import ConversationState
from runner.episode.turn_listener import TurnListener
from runner.episode.turn_settings import end_by, given_constraint, sampling_of, tool_choice_of, unconstrained
from runner.errors import BadOption
from runner.options import Constraint, Sampling, ToolChoice
from runner.seeds import derive_seed
from runner.tools.tool import Tool
from runner.trajectory import AGAIN, RETRY, Turn
from runner.turn_events import IdsSampled, TurnAdmitted, TurnEvent

__all__ = ["take_turn"]


async def take_turn(
    state: ConversationState,
    head: Head,
    sampling: Sampling | None = None,
    tool_choice: ToolChoice | None = None,
    *,
    number: int | None = None,
    handle: Callable[[int], str] | None = None,
    tell: Callable[[TurnEvent], None] | None = None,
    watch: Callable[[TurnAdmitted | IdsSampled], None] | None = None,
) -> Turn:
    """Let the agent of a conversation speak once, where `head` stands, which moves behind the turn.

    Args:
        state: the conversation.
        head: where it speaks; of several turns at the same time each has another one.
        sampling: goes over the conversation's.
        tool_choice: goes over the environment's.
        number: the turn's number, where that was given out before.
        handle: what names the turn of a number to a client.
        tell: is told what the turn says while it is sampled.
        watch: is told when the engine took the turn's request, and its ids as they are sampled.
    """
    limits = state.play.limits
    await limits.admit(state.name, counted=state.counted)
    numbered = state.number() if number is None else nullcontext(number)
    if isinstance(state.model, MessageModel):
        with numbered as number, state.session() as session:
            asking = MessageTurn(state, state.model.engine, head, number, session)
            return await asking.take(sampling, tool_choice, handle=handle, tell=tell, watch=watch)
    with _Extending(state, head) as extend, numbered as number, state.session() as session:
        prompt = await next_prompt(state, head, extend=extend)
        _refuse_too_long(state, prompt)
        place = _Place(state, head, number, session)
        request = _request(place, prompt, sampling, tool_choice, heard=tell is not None or watch is not None)
        turn_handle = handle(number) if handle is not None else ""
        sampled, turn = Sample(prompt.segment.log, watch=watch, handle=turn_handle), None
        if prompt.continued and head.node is not None:
            sampled.calls_before = len(head.node.turn.tool_calls)
        if tell is not None:
            sampled.listener = _listener(place, prompt, request, tell)
        try:
            await _sampling(state, prompt, request, sampled)
        finally:
            # Cancelled or failed, what the model saw and said is kept all the same: the engine had it from admission.
            if sampled.admitted:
                turn = await _record(place, prompt, request, sampled)
                turn.handle = turn_handle
                limits.count(turn, counted=state.counted)
    if sampled.error is not None:
        end_by(state, sampled.error)
    assert turn is not None  # an engine that did not fail has admitted the request
    return turn


@dataclass(slots=True)
class _Place:
    """Where a turn is sampled."""

    state: ConversationState
    """The conversation."""
    head: Head
    """Where in its forest."""
    number: int
    """The turn's number."""
    session: Session
    """What the engine keeps of the turns before."""


class _Extending:
    """Whether the turn may extend the segment of the one before it; nobody else may meanwhile, nor once it has."""

    __slots__ = ("_node",)

    def __init__(self, state: ConversationState, head: Head) -> None:
        node = head.node
        self._node = node if node is not None and node.ends_segment and state.has(node.segment) else None

    def __enter__(self) -> bool:
        if self._node is not None:
            self._node.extended = True
        return self._node is not None

    def __exit__(self, *_: object) -> None:
        node = self._node
        if node is not None:
            node.extended = len(node.segment.log) > node.turn.end


def _refuse_too_long(state: ConversationState, prompt: PreparedPrompt) -> None:
    if len(prompt.ids) >= state.context:
        play = state.play
        text = f"{play.key.id}: {len(prompt.ids)} ids do not fit the context of {state.context}"
        play.limits.refuse_prompt(
            state.name, text, counted=state.counted, prompt=len(prompt.ids), context=state.context
        )


# --- the request


@dataclass(slots=True)
class _Request:
    generation: GenerationRequest
    """What the engine is given."""
    sampling: Sampling
    """What the turn records: the sampling as it was asked for, without the constraint."""
    tool_choice: ToolChoice
    """Whether the turn may, must or must not call a tool, or the tool it must call."""
    ceiling: str
    """The limit that the engine's `max_tokens` stands for: "max_tokens", "context" or "tokens"."""


def _request(
    place: _Place,
    prompt: PreparedPrompt,
    sampling: Sampling | None,
    tool_choice: ToolChoice | None,
    *,
    heard: bool,
) -> _Request:
    state, number = place.state, place.number
    play, chat, tools = state.play, state.chat, place.head.tools
    settings = sampling_of(state, sampling)
    settings.check_vocabulary(vocabulary_size(chat.engine))
    chat.engine.check_sampling(settings)
    choice = tool_choice_of(state, tools, tool_choice)
    ceilings = {"max_tokens": settings.max_tokens, "context": state.context - len(prompt.ids)}
    left = play.limits.tokens_left() if state.counted else None
    if left is not None:
        ceilings["tokens"] = left
    ceiling = min(ceilings, key=ceilings.__getitem__)
    generation = GenerationRequest(
        name=f"{play.key.id}/{state.thread}/{number}",
        prompt=prompt.ids,
        sampling=settings if ceiling == "max_tokens" else settings.shortened(ceilings[ceiling]),
        stop_ids=settings.all_stop_ids(chat.stop_ids),
        seed=derive_seed(play.seed, state.thread, number),
        session=place.session,
        constraint=_constraint(chat, tools, settings, choice),
        # We look for stop strings in the deltas as they come, and what was sampled past one is thrown away.
        acts_on_deltas=heard or bool(settings.stop),
    )
    return _Request(generation, unconstrained(settings), choice, ceiling)


def _constraint(
    chat: ChatModel, tools: Sequence[Tool], settings: Sampling, tool_choice: ToolChoice
) -> Constraint | None:
    enforced = chat.parser.constraint(tools, tool_choice) if tools else None
    given = given_constraint(settings)
    if enforced and given:
        raise BadOption(
            f"tool_choice={tool_choice!r} and Sampling({given.kind.value}=...) both constrain the same turn: "
            f"give generate(tool_choice='none') where the text itself is constrained."
        )
    constraint = enforced or given
    if constraint is not None:
        chat.engine.check_constraint(constraint)
    return constraint


def _sampling(
    state: ConversationState, prompt: PreparedPrompt, request: _Request, into: Sample
) -> Coroutine[Any, Any, None]:
    # No coroutine of its own: each delta would go through one frame more.
    state.play.report_activity(f"{state.name}: engine")
    return sample(
        into,
        state.chat.engine,
        request.generation,
        new_ids=prompt.new_ids,
        source=prompt.source,
        tokenizer=state.chat.tokenizer,
        stall_seconds=state.play.limits.configured.stall_seconds,
    )


# --- what came of it


async def _record(place: _Place, prompt: PreparedPrompt, request: _Request, sampled: Sample) -> Turn:
    """Put the prompt and the turn into the conversation, and read what it says."""
    state, head, segment = place.state, place.head, prompt.segment
    if prompt.taken_back is not None:
        _take_back(prompt.taken_back)
    segment.messages.extend(prompt.messages)
    # Only now, since a prompt that the engine never got stays queued; what was added meanwhile stays too.
    del head.queued[: prompt.queued]
    turn = Turn(
        agent=state.name,
        number=place.number,
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
    )
    if turn.finish is FinishReason.LENGTH:
        turn.stop = request.ceiling
        # An engine knows one number only; which limit it stands for is known here.
        if request.ceiling == "context":
            turn.finish = FinishReason.CONTEXT
    node = _node(place, prompt, turn)
    await _parse(place, node, turn, sampled)
    segment.messages.append(node.reply)
    state.record(node)
    turn.segment = state.place_of(segment)
    head.node, head.whole, head.again = node, "", None
    return turn


def _take_back(node: Node) -> None:
    """What was sampled of its message is trained on no more."""
    first = node.spoken
    for each in node.path():
        each.turn.log.take_back(each.turn.start, each.turn.end)
        if each is first:
            break


def _node(place: _Place, prompt: PreparedPrompt, turn: Turn) -> Node:
    """The place of a turn in the forest; what it says is not read yet."""
    before, messages = place.head.node, prompt.segment.messages
    begin, answered = turn.start, len(messages) - prompt.asked
    if prompt.continued and before is not None:
        # A call may be cut in two, so the message is read again from its first turn on.
        messages.pop()
        begin, answered = before.begin, before.answered
    calls = _calls_before(place, prompt)
    return Node(
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


def _calls_before(place: _Place, prompt: PreparedPrompt) -> int:
    """How many calls there were before the message that the turn says, or goes on with."""
    before, again = place.head.node, place.head.again
    if prompt.continued and before is not None:
        return before.calls_before
    if again is not None and prompt.segment.cause in (RETRY, AGAIN):
        return again.calls_before
    return 0 if before is None else before.calls


def _listener(
    place: _Place, prompt: PreparedPrompt, request: _Request, tell: Callable[[TurnEvent], None]
) -> TurnListener:
    before, log = place.head.node, prompt.segment.log
    listener = TurnListener(place.state.chat, place.head.tools, request.tool_choice, tell)
    listener.begin(
        log.ids[before.begin :] if prompt.continued and before is not None else (),
        calls_before=_calls_before(place, prompt),
        longest_stop=max(map(len, request.sampling.stop), default=0),
    )
    return listener


async def _parse(place: _Place, node: Node, turn: Turn, sampled: Sample) -> None:
    """Fill in what the sampled ids say, as text, reasoning and calls."""
    chat, ids, text = place.state.chat, turn.log.ids, sampled.text
    if text is not None and node.begin < turn.start:
        text = chat.tokenizer.decode(ids[node.begin : turn.start]) + text
    spoken = ids[node.begin : turn.end]
    stopped = turn.finish is FinishReason.STOP and isinstance(turn.stop, int)
    if sampled.listener is not None:
        sampled.listener.finish(stopped=stopped, text=text)
    if text is None:
        text = text_of(spoken, chat, stopped=stopped)
    before, tools = node.calls_before, place.head.tools
    read = partial(ParsedTurn.of, text, spoken, chat, tools, before=before, tool_choice=turn.tool_choice)
    said = read() if chat.parser.named is None else await _in_thread(place.state, read)
    turn.text, turn.reasoning, turn.tool_calls = said.text, said.reasoning, said.tool_calls
    turn.thinking = said.cut_in_reasoning(turn, chat)
    node.calls = before + len(said.tool_calls)
    node.reply = said.as_message()


async def _in_thread(state: ConversationState, read: Callable[[], ParsedTurn]) -> ParsedTurn:
    """Read a turn in another library's way, which may take a second for a long one; a cancellation waits for it."""
    state.play.report_activity(f"{state.name}: reading")
    with anyio.CancelScope(shield=True):
        said: ParsedTurn = await state.play.shared.workers.call_beside(Job(read, "tool format"))
    return said
