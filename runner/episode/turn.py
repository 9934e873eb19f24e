"""A turn: may the agent speak, its prompt, the request, sampling, the record of it, and what was said."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import anyio

from runner.concurrency.threads import Job
from runner.engines.base import FinishReason, GenerationRequest, vocabulary_size
from runner.episode.key import MAIN
from runner.episode.limits import Ending
from runner.episode.parsed_turn import ParsedTurn, text_of
from runner.episode.prompting import PreparedPrompt, next_prompt
from runner.episode.sample import Sample, sample
from runner.episode.state import ConversationState
from runner.episode.turn_events import TurnEvent, TurnListener
from runner.errors import BadOption, EngineError, RequestRejected
from runner.options import Constraint, ConstraintKind, Sampling, ToolChoice
from runner.seeds import derive_seed
from runner.trajectory import Outcome, Turn

__all__ = ["take_turn"]


async def take_turn(
    state: ConversationState,
    sampling: Sampling | None = None,
    tool_choice: ToolChoice | None = None,
    *,
    tell: Callable[[TurnEvent], None] | None = None,
) -> Turn:
    """Let the agent of a conversation speak once, and `tell` what it says while it does."""
    limits = state.play.limits
    await limits.admit(state.name, trained=state.train)
    prompt = await next_prompt(state)
    _refuse_too_long(state, prompt)
    request = _request(state, prompt, sampling, tool_choice, heard=tell is not None)
    sampled, turn = Sample(prompt.segment.log), None
    if tell is not None:
        sampled.listener = _listener(state, prompt, request, tell)
    try:
        await _sampling(state, prompt, request, sampled)
    finally:
        # Cancelled or failed, what the model saw and said is kept all the same: the engine had it from admission on.
        if sampled.admitted:
            turn = _record(state, prompt, request, sampled)
            await _parse(state, prompt, turn, sampled)
            limits.count(turn, trained=state.train)
    if sampled.error is not None:
        _end_by(state, sampled.error)
    assert turn is not None  # an engine that did not fail has admitted the request
    return turn


def _refuse_too_long(state: ConversationState, prompt: PreparedPrompt) -> None:
    if len(prompt.ids) >= state.context:
        play = state.play
        text = f"{play.key.id}: {len(prompt.ids)} ids do not fit the context of {state.context}"
        play.limits.refuse_prompt(state.name, text, trained=state.train)


def _end_by(state: ConversationState, error: EngineError) -> NoReturn:
    # A request that the engine refuses is refused again: the same seeds make the same request.
    rejected = isinstance(error, RequestRejected)
    ending = Ending(Outcome.ENGINE_ERROR, agent=state.name, error=str(error), permanent=rejected)
    state.play.limits.end_episode(ending)


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
    state: ConversationState,
    prompt: PreparedPrompt,
    sampling: Sampling | None,
    tool_choice: ToolChoice | None,
    *,
    heard: bool,
) -> _Request:
    play, chat, number = state.play, state.chat, len(state.turns)
    own = state.sampling()
    settings = own if sampling is None else sampling.over(own)
    settings.check_vocabulary(vocabulary_size(chat.engine))
    choice = _tool_choice(state, tool_choice)
    ceilings = {"max_tokens": settings.max_tokens, "context": state.context - len(prompt.ids)}
    left = play.limits.tokens_left() if state.train else None
    if left is not None:
        ceilings["tokens"] = left
    ceiling = min(ceilings, key=ceilings.__getitem__)
    generation = GenerationRequest(
        name=f"{play.key.id}/{state.name}/{number}",
        prompt=prompt.ids,
        sampling=settings if ceiling == "max_tokens" else settings.shortened(ceilings[ceiling]),
        stop_ids=settings.all_stop_ids(chat.stop_ids),
        seed=derive_seed(play.seed, state.name, number),
        session=state.session,
        constraint=_constraint(state, settings, choice),
        # We look for stop strings in the deltas as they come, and what was sampled past one is thrown away.
        acts_on_deltas=heard or bool(settings.stop),
    )
    return _Request(generation, _unconstrained(settings), choice, ceiling)


def _tool_choice(state: ConversationState, given: ToolChoice | None) -> ToolChoice:
    if not state.tools:
        return "none"
    if given is not None:
        return given
    # The environment's is meant for `main`: another agent may not have the tool that it names.
    choice = state.play.environment.tool_choice
    known = ("auto", "none", *(tool.name for tool in state.tools))
    return choice if state.name == MAIN or choice in known else "auto"


def _constraint(state: ConversationState, settings: Sampling, tool_choice: ToolChoice) -> Constraint | None:
    tools = state.tools
    enforced = state.chat.parser.constraint(tools, tool_choice) if tools else None
    given = _given_constraint(settings)
    if enforced and given:
        raise BadOption(
            f"tool_choice={tool_choice!r} and Sampling({given.kind.value}=...) both constrain the same turn: "
            f"give generate(tool_choice='none') where the text itself is constrained."
        )
    return enforced or given


def _given_constraint(settings: Sampling) -> Constraint | None:
    if settings.schema is not None:
        return Constraint(ConstraintKind.JSON, json.dumps(settings.schema))
    if settings.regex is not None:
        return Constraint(ConstraintKind.REGEX, settings.regex)
    if settings.choice is not None:
        return Constraint(ConstraintKind.CHOICE, json.dumps(list(settings.choice)))
    return None


def _unconstrained(settings: Sampling) -> Sampling:
    if settings.schema is None and settings.regex is None and settings.choice is None:
        return settings
    return replace(settings, schema=None, regex=None, choice=None)


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


def _record(state: ConversationState, prompt: PreparedPrompt, request: _Request, sampled: Sample) -> Turn:
    """Put the prompt and the turn into the conversation; what the turn says is not read yet."""
    segment = prompt.segment
    if state.segment is not segment:
        state.segment = segment
        state.segments.append(segment)
    if prompt.taken_back is not None:
        prompt.taken_back.take_back(sampled.start)
        state.retry = None
    segment.messages.extend(prompt.messages)
    # Only now, since a prompt that the engine never got stays queued; what was added meanwhile stays too.
    del state.queued[: prompt.queued]
    turn = Turn(
        agent=state.name,
        number=len(state.turns),
        log=segment.log,
        start=sampled.start,
        end=sampled.end,
        finish=sampled.finish,
        stop=sampled.stop,
        segment=len(state.segments) - 1,
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
    state.turns.append(turn)
    return turn


def _listener(
    state: ConversationState, prompt: PreparedPrompt, request: _Request, tell: Callable[[TurnEvent], None]
) -> TurnListener:
    listener = TurnListener(state.chat, state.tools, request.tool_choice, tell)
    log, continued = prompt.segment.log, prompt.continued
    listener.begin(
        log.ids[state.message_start :] if continued else (),
        calls_before=state.calls_before_message if continued else state.calls,
        longest_stop=max(map(len, request.sampling.stop), default=0),
    )
    return listener


async def _parse(state: ConversationState, prompt: PreparedPrompt, turn: Turn, sampled: Sample) -> None:
    """Fill in what the sampled ids say, as text, reasoning and calls, and add it to the messages."""
    chat, ids, messages, text = state.chat, turn.log.ids, prompt.segment.messages, sampled.text
    if prompt.continued:
        # A call may be cut in two, so the message is read again from its first turn on.
        messages.pop()
        if text is not None:
            text = chat.tokenizer.decode(ids[state.message_start : turn.start]) + text
    else:
        state.message_start, state.calls_before_message = turn.start, state.calls
    spoken = ids[state.message_start : turn.end]
    stopped = turn.finish is FinishReason.STOP and isinstance(turn.stop, int)
    if sampled.listener is not None:
        sampled.listener.finish(stopped=stopped, text=text)
    if text is None:
        text = text_of(spoken, chat, stopped=stopped)
    before = state.calls_before_message
    read = partial(ParsedTurn.of, text, spoken, chat, state.tools, before=before, tool_choice=turn.tool_choice)
    said = read() if chat.parser.named is None else await _in_thread(state, read)
    turn.text, turn.reasoning, turn.tool_calls = said.text, said.reasoning, said.tool_calls
    turn.thinking = said.cut_in_reasoning(turn, chat)
    state.calls = before + len(said.tool_calls)
    messages.append(said.as_message())


async def _in_thread(state: ConversationState, read: Callable[[], ParsedTurn]) -> ParsedTurn:
    """Read a turn in another library's way, which may take a second for a long one; a cancellation waits for it."""
    state.play.report_activity(f"{state.name}: reading")
    with anyio.CancelScope(shield=True):
        said: ParsedTurn = await state.play.shared.workers.call_beside(Job(read, "tool format"))
    return said
