"""A turn on an engine that takes messages: the history is sent, and a message is received, without token ids."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from runner.concurrency.clocks import Clock, WhileSampling, loop_time
from runner.engines.base import FinishReason
from runner.engines.message_engine import MessageEngine, MessageFinish, MessagePiece, MessageRequest, MessageStream
from runner.episode.parsed_turn import ParsedTurn
from runner.episode.turn_settings import (
    TurnContext,
    TurnSinks,
    end_by,
    given_constraint,
    sampling_of,
    tool_choice_of,
    unconstrained,
)
from runner.episode.turn_tree import TurnNode
from runner.errors import EngineError, EngineStalled, PromptTooLong
from runner.messages import Message, ToolCall
from runner.options import Sampling, ToolChoice
from runner.parsing.events import ContentPiece, ReasoningPiece
from runner.tokens.turn_shape import is_plain
from runner.trajectory import AGAIN, BRANCH, RETRY, Segment, Timings, Turn
from runner.turn_events import ToolCalled, TurnAdmitted, TurnEvent

__all__ = ["MessageTurn"]


@dataclass(slots=True)
class _StreamedAnswer:
    """The answer to one request. It is filled while the request streams, so that a cancellation loses nothing."""

    sinks: TurnSinks
    """The receiver of the turn's events."""
    handle: str
    """Id of the turn for a client."""
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    admitted: bool = False
    """True once the server began to answer."""
    finish: MessageFinish = field(default_factory=lambda: MessageFinish(FinishReason.ABORT))
    """Finish reason, stop and usage of the answer."""
    error: EngineError | None = None
    """The error if the server failed, or None."""
    timings: Timings = field(default_factory=Timings)
    """Seconds spent in the queue, until the first piece, and on the later pieces."""

    def begin(self) -> None:
        self.admitted = True
        if self.sinks.receive is not None and self.sinks.sends_ids:
            self.sinks.receive(TurnAdmitted(self.handle, ()))

    def keep(self, piece: MessagePiece) -> None:
        event: TurnEvent
        match piece:
            case ContentPiece():
                self.text.append(piece.text)
                event = piece
            case ReasoningPiece():
                self.reasoning.append(piece.text)
                event = piece
            case ToolCall():
                self.calls.append(piece)
                event = ToolCalled(piece)
        if self.sinks.receive is not None and self.sinks.sends_events:
            self.sinks.receive(event)

    def as_parsed(self) -> ParsedTurn:
        return ParsedTurn("".join(self.text), "".join(self.reasoning), self.calls)


class MessageTurn:
    """One turn on an engine that takes messages."""

    def __init__(self, turn_context: TurnContext, engine: MessageEngine) -> None:
        self._turn_context = turn_context
        self._conversation = turn_context.conversation
        self._cursor = turn_context.cursor
        self._engine = engine

    async def take(self, sampling: Sampling | None, tool_choice: ToolChoice | None, sinks: TurnSinks) -> Turn:
        """Take one turn; see `take_turn` for the arguments."""
        self._refuse_unaskable()
        settings = sampling_of(self._conversation, sampling)
        self._engine.check_sampling(settings)
        choice = tool_choice_of(self._conversation, self._cursor.tools, tool_choice)
        with self._segment() as segment:
            # This is a copy, since the author may add messages for the next turn while the server answers.
            queued = list(self._cursor.queued)
            request, ceiling = self._request(settings, choice, [*self._history(), *queued])
            answer, node = _StreamedAnswer(sinks, sinks.handle_of(self._turn_context.number)), None
            stream = self._engine.stream(request)
            try:
                await self._sample(stream, answer)
            finally:
                # A cancelled or failed turn is recorded too, if the server began to answer.
                if answer.admitted:
                    node = self._recorded(segment, queued, answer, stream.seed)
                    turn = node.turn
                    turn.sampling, turn.tool_choice = unconstrained(settings), choice
                    turn.constraint = given_constraint(settings)
                    if turn.finish is FinishReason.LENGTH:
                        turn.stop = ceiling
                    self._conversation.record(self._cursor, node)
        if isinstance(answer.error, PromptTooLong):
            self._conversation.refuse_prompt(
                str(answer.error), prompt=answer.error.prompt, context=answer.error.context
            )
        if answer.error is not None:
            end_by(self._conversation, answer.error)
        assert node is not None  # an engine that did not fail has begun to answer
        return node.turn

    # --- the request

    def _refuse_unaskable(self) -> None:
        conversation, cursor, node = self._conversation, self._cursor, self._cursor.node
        if not cursor.queued and node is not None and not cursor.whole:
            cut = "" if node.turn.finish is FinishReason.STOP else ", and no server continues a turn that was cut"
            raise RuntimeError(
                f"nothing was added to conversation {conversation.name!r} since its last turn{cut}: add() an answer."
            )
        if not cursor.queued:
            raise RuntimeError(
                f"conversation {conversation.name!r} has no message yet: add() one, or give it a prompt."
            )
        # Only the server counts tokens, and only for requests that it has answered.
        used = node.turn.usage.total_tokens if node is not None and not cursor.whole and node.turn.usage else 0
        if used >= conversation.context:
            room = f"no room for a turn in the context of {conversation.context}"
            text = f"{conversation.episode.key.id}: {used} tokens leave {room}"
            conversation.refuse_prompt(text, prompt=used)

    def _history(self) -> Sequence[Message]:
        """Return the messages before the queued ones."""
        cursor = self._cursor
        return () if cursor.node is None or cursor.whole else cursor.node.messages

    def _request(
        self, settings: Sampling, choice: ToolChoice, messages: Sequence[Message]
    ) -> tuple[MessageRequest, str]:
        """Return the request, and the limit that sets its `max_tokens`."""
        conversation, ceiling = self._conversation, "max_tokens"
        left = conversation.episode.limits.tokens_left() if conversation.counted else None
        if left is not None and left < settings.max_tokens:
            settings, ceiling = settings.shortened(left), "tokens"
        request = MessageRequest(
            name=self._turn_context.name,
            messages=messages,
            tools=self._cursor.schemas(),
            tool_choice=choice,
            sampling=settings,
            seed=self._turn_context.seed,
            session=self._turn_context.session,
        )
        return request, ceiling

    async def _sample(self, stream: MessageStream, answer: _StreamedAnswer) -> None:
        """Record the server's answer. The server's errors are recorded too, and not raised."""
        conversation = self._conversation
        conversation.episode.report_activity(f"{conversation.name}: engine")
        stall_seconds = conversation.episode.limits.configured.stall_seconds
        began = loop_time()
        silence = Clock(stall_seconds, counts_sampling=True)
        with WhileSampling():
            try:
                async with stream as pieces:
                    answer.begin()
                    with silence:
                        await _read(pieces, answer, silence, began)
            except EngineError as error:
                answer.error = error
            finally:
                answer.timings.queued = stream.waited
                answer.finish = stream.finish or answer.finish
        if silence.fired:
            answer.error = EngineStalled(
                f"{conversation.episode.key.id}: the server sent nothing for {stall_seconds:g} s"
            )
        if answer.error is not None:
            answer.finish = MessageFinish(FinishReason.ERROR, str(answer.error), answer.finish.usage)

    # --- the record

    @contextmanager
    def _segment(self) -> Iterator[Segment]:
        """Provide the segment of this turn while the block runs.

        If the turn extends the segment of the previous turn, no other turn may extend this segment while the block
        runs. Once the turn is recorded, the segment can be extended only after this turn.
        """
        cursor, node = self._cursor, self._cursor.node
        tools = cursor.schemas()
        if node is None or cursor.whole or cursor.again is not None or node.segment.tools != tools:
            cause = self._cause()
            yield Segment(cause=cause, tools=tools, origin=cursor.origin, messages=list(self._history()))
            return
        if not node.ends_segment or not self._conversation.has(node.segment):
            yield Segment(cause=BRANCH, tools=tools, origin=node.origin, messages=list(node.messages))
            return
        node.extended, before = True, len(node.segment.messages)
        try:
            yield node.segment
        finally:
            node.extended = len(node.segment.messages) > before

    def _cause(self) -> str:
        cursor, again = self._cursor, self._cursor.again
        if again is not None and cursor.queued == list(again.prompt_messages):
            return RETRY if cursor.takes_back else AGAIN
        if cursor.node is None or cursor.whole:
            return cursor.whole or "start"
        return BRANCH if cursor.again is not None else "environment"

    def _recorded(
        self, segment: Segment, queued: Sequence[Message], answer: _StreamedAnswer, seed: int | None
    ) -> TurnNode:
        """Add the prompt to its segment, and return the tree node of the turn that answers it."""
        cursor, before = self._cursor, self._cursor.node
        calls_before = 0 if before is None else before.calls
        answered = len(segment.messages)
        segment.messages.extend(queued)
        # Messages leave the queue only now. The messages of a prompt that the server did not accept stay queued, and so
        # do messages that were added during the request.
        del cursor.queued[: len(queued)]
        parsed = answer.as_parsed()
        turn = Turn(
            agent=self._conversation.name,
            number=self._turn_context.number,
            log=segment.log,
            start=0,
            end=0,
            text=parsed.text,
            reasoning=parsed.reasoning,
            tool_calls=parsed.tool_calls,
            finish=answer.finish.reason,
            stop=answer.finish.stop,
            seed=seed,
            timings=answer.timings,
            usage=answer.finish.usage,
            handle=answer.handle,
        )
        return TurnNode(
            turn=turn,
            segment=segment,
            parent=before,
            answered=answered,
            start=len(segment.messages),
            reply=parsed.as_message(),
            begin=0,
            calls_before=calls_before,
            calls=calls_before + len(parsed.tool_calls),
            plain=(before is None or before.plain) and all(map(is_plain, queued)),
        )


async def _read(pieces: MessageStream, answer: _StreamedAnswer, silence: Clock, began: float) -> None:
    patience = math.inf if silence.seconds is None else silence.seconds
    received = loop_time()
    first: float | None = None
    async for piece in pieces:
        now = loop_time()
        if first is None:
            first = now
            answer.timings.first_token = max(0.0, now - began - pieces.waited)
        # The deadline moves only once per eighth of the limit, not at every piece, since each move creates a timer.
        if now - received > patience / 8:
            received = now
            silence.start(silence.seconds)
        answer.keep(piece)
        answer.timings.decode = now - first
