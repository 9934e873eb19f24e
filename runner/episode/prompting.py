"""The next prompt of a conversation: a first render, a bridge, a fork where there is none, or a cut turn going on."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from runner.concurrency.clocks import Waiting
from runner.concurrency.threads import Job, Workers
from runner.episode.model import ChatModel
from runner.messages import Message
from runner.options import HistoryPolicy, Sampling, ToolChoice
from runner.tokens.bridging.bridge import Bridge
from runner.tokens.bridging.refusal import Property, Unbridgeable
from runner.tokens.junction import Anchor, Close, Junction, Result, Seam
from runner.tokens.log import Source, TokenLog
from runner.tokens.shape import AnsweredTurn, is_plain
from runner.trajectory import Segment, Turn

__all__ = ["REENCODED", "RETRY", "Prepared", "PromptMaker", "followed_junction", "forked_junction"]

RETRY = "retry"
"""The cause of a segment that samples the last turn of another one anew, from the same prompt."""

REENCODED = "reencoded"
"""The cause of a first segment whose prompt holds what the same episode sampled: other ids may say the same."""

T = TypeVar("T")

Schemas = Sequence[dict[str, Any]]

_NO_FORK_HELPS = (Property.REASONING_CLOSED, Property.TEXT_KEPT, Property.CONTENT_SHOWN)


@dataclass(slots=True)
class Prepared:
    """The next prompt.

    Attributes:
        segment: whose log it extends, or the one that it begins.
        prompt: what the model is given: the segment's log and `new_ids`.
        new_ids: appended to the log once the engine has the request.
        source: where they came from.
        messages: appended to the segment's view at the same time.
        queued: how many of the queued messages are among them.
        junction: how the prompt was made from the turn before; None where it was not.
        continued: a cut turn goes on.
        taken_back: the log whose last turn is played again.
        sampling: of the turn.
        tool_choice: of the turn.
    """

    segment: Segment
    prompt: array[int]
    new_ids: Sequence[int]
    source: Source
    messages: Sequence[Message] = ()
    queued: int = 0
    junction: Junction | None = None
    continued: bool = False
    taken_back: TokenLog | None = None
    sampling: Sampling | None = None
    tool_choice: ToolChoice = "auto"


class PromptMaker:
    """Makes the prompts of one conversation."""

    def __init__(self, chat: ChatModel, workers: Workers) -> None:
        self._plain = True  # so far no message has what a template might look back at, and others have not
        self._chat = chat
        self._workers = workers

    def first(self, messages: Sequence[Message], tools: Schemas, cause: str) -> Prepared:
        """The first prompt of a segment.

        Raises:
            Unbridgeable: the template raises, or does not ask for an answer.
        """
        self._plain = self._plain and all(map(is_plain, messages))
        ids = self._chat.bridger.first_prompt(messages, tools)
        junction = forked_junction(cause) if cause != "start" else None
        return Prepared(Segment(cause=cause, tools=tools), ids, ids, Source.PROMPT, messages, junction=junction)

    def continued(self, segment: Segment) -> Prepared:
        """A cut turn goes on: nothing is put in between."""
        return Prepared(segment, segment.log.ids, (), Source.BRIDGE, continued=True)

    def retried(self, segment: Segment, start: int, messages: Sequence[Message]) -> Prepared:
        """A turn once more, from the very ids of its prompt, which end at `start`."""
        ids = segment.log.ids[:start]
        again = Segment(cause=RETRY, tools=segment.tools)
        return Prepared(
            again, ids, ids, Source.PROMPT, messages, junction=forked_junction(RETRY), taken_back=segment.log
        )

    async def next(self, segment: Segment, last: Turn, new: Sequence[Message], tools: Schemas) -> Prepared:
        """The prompt after a turn that is answered, by the run's policy.

        Raises:
            Unbridgeable: the policy refuses what has no exact bridge, or there is no prompt at all.
        """
        self._plain = self._plain and all(map(is_plain, new))
        if tools != segment.tools:
            return await self._forked(segment, new, tools, "environment")
        if last.thinking and not self._chat.history.close_reasoning:
            raise Unbridgeable(Property.REASONING_CLOSED, "the turn was cut inside its reasoning")
        if self._chat.history.policy is HistoryPolicy.FORK:
            return await self._followed(segment, last, new, tools)
        try:
            bridge = await self._bridge(segment, last, new, tools)
        except Unbridgeable as missing:
            if missing.property in _NO_FORK_HELPS or self._chat.history.policy is HistoryPolicy.REFUSE:
                raise
            return await self._forked(segment, new, tools, missing.property.value)
        junction = bridge.junction
        if last.dropped:
            junction = replace(junction, dropped=last.dropped, cause="stop_string")
        prompt = segment.log.ids + array("i", bridge.ids)
        return Prepared(segment, prompt, bridge.ids, Source.BRIDGE, new, junction=junction)

    async def _bridge(self, segment: Segment, last: Turn, new: Sequence[Message], tools: Schemas) -> Bridge:
        bridger = self._chat.bridger
        answered = AnsweredTurn(segment.messages, new, tools, last.number, self._plain)
        tail = bridger.tail_at_once(answered)
        if tail is None:
            tail = await self._rendering(partial(bridger.tail, answered))
        return self._chat.bridge(last, tail)

    async def _forked(self, segment: Segment, new: Sequence[Message], tools: Schemas, cause: str) -> Prepared:
        """A new segment with everything rendered anew, loss mask 0 throughout."""
        prepared = await self._rendered([*segment.messages, *new], tools, cause)
        prepared.junction = forked_junction(cause)
        return prepared

    async def _followed(self, segment: Segment, last: Turn, new: Sequence[Message], tools: Schemas) -> Prepared:
        """What the template makes of everything: an append where it leaves the past as it was, else a fork."""
        prepared = await self._rendered([*segment.messages, *new], tools, "template")
        before = len(segment.log)
        unsampled = any(message["role"] == "assistant" for message in new)
        if unsampled or prepared.prompt[:before] != segment.log.ids:
            prepared.junction = forked_junction("template")
            return prepared
        added = prepared.prompt[before:]
        junction = followed_junction(self._chat, prepared.prompt, last, len(added))
        return Prepared(segment, prepared.prompt, added, Source.BRIDGE, new, junction=junction)

    async def _rendered(self, messages: Sequence[Message], tools: Schemas, cause: str) -> Prepared:
        text = await self._rendering(partial(self._chat.bridger.prompt_text, messages, tools))
        ids = self._chat.bridger.prompt_ids(text)
        return Prepared(Segment(cause=cause, tools=tools), ids, ids, Source.PROMPT, messages)

    async def _rendering(self, make: Callable[[], T]) -> T:
        """In a worker thread. It is no work of the episode's: its clocks stand still, as while it waits for a place."""
        with Waiting():
            made: T = await self._workers.call(Job(make, "chat template"))
        return made


def followed_junction(chat: ChatModel, ids: Sequence[int], last: Turn, inserted: int) -> Junction:
    """The template's own render goes on where the turn ended: its prompt was encoded in one go."""
    seam = Seam.SPECIAL if {ids[last.end - 1], ids[last.end]} & chat.tokenizer.control_ids else Seam.VERIFIED
    close = Close.MASKED if chat.closing_stop(last) is None else Close.SAMPLED
    return Junction(Result.APPENDED, Anchor.COMMON_PREFIX, close, seam, inserted)


def forked_junction(cause: str) -> Junction:
    """A prompt that was rendered whole and encoded in one go: nothing was joined to anything."""
    return Junction(Result.FORKED, Anchor.NONE, Close.MASKED, Seam.VERIFIED, 0, cause=cause)
