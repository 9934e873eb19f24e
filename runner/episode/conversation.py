"""A conversation: the messages view, the token log and the engine session of one agent."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import anyio

from runner.concurrency.threads import Workers
from runner.engines.base import FinishReason, GenerationRequest
from runner.episode.limits import Ending, EpisodeLimits
from runner.episode.model import ChatModel
from runner.episode.parsed_turn import ParsedTurn, text_of
from runner.episode.prompting import REENCODED, Prepared, PromptMaker
from runner.episode.sampling import Sample, sample
from runner.errors import BadOption, EpisodeOver, RequestRejected
from runner.messages import Message, Prompt, as_messages, check_answers
from runner.options import Constraint, ConstraintKind, Sampling, ToolChoice
from runner.parsing.reasoning import is_open
from runner.tokens.bridging.history import AlignmentKind, compare, same_tools
from runner.tokens.bridging.refusal import Property, Unbridgeable
from runner.tokens.log import TokenLog
from runner.tools.tool import Tool
from runner.trajectory import Outcome, Segment, Trajectory, Turn

__all__ = ["Conversation", "ConversationSetting"]

DRAIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationSetting:
    """What a conversation gets from its episode.

    Attributes:
        chat: the model that speaks.
        allowance: what the episode may still use.
        episode: its id, for errors and logs.
        sampling: of the next turn, every field set; `generate(sampling=)` goes over it.
        tool_choice: of the next turn, where `generate` is given none.
        seed: of a turn, by its number.
        call_tools: answers a turn's calls.
        was_said: an agent of the episode said this message.
        workers: renders what would hold up the event loop.
        report_activity: told what the conversation waits for, for the live display.
    """

    chat: ChatModel
    allowance: EpisodeLimits
    episode: str
    sampling: Callable[[], Sampling]
    tool_choice: Callable[[Conversation], ToolChoice]
    seed: Callable[[int], int]
    call_tools: Callable[[Conversation, Turn], Awaitable[list[Message]]]
    was_said: Callable[[Message], bool]
    report_activity: Callable[[str], None]
    workers: Workers


class Conversation:
    """What one agent sees and says. Messages are a view; the token log is the truth.

    Attributes:
        name: the agent.
        train: its sampled ids become a trajectory to be trained on.
        tools: what may be called now.
        turns: in order.
    """

    def __init__(
        self,
        name: str,
        setting: ConversationSetting,
        *,
        train: bool,
        tools: Sequence[Tool] = (),
        messages: Sequence[Message] = (),
        late: bool = False,
    ) -> None:
        self.name = name
        self.train = train
        self.tools = _checked_tools(tools)
        self.turns: list[Turn] = []
        self._setting = setting
        self._segments: list[Segment] = []
        check_answers(messages)
        self._queued: list[Message] = list(messages)
        self._segment: Segment | None = None  # None until the next prompt is rendered from the start
        self._cause = "start"
        self._retry: _Retry | None = None
        self._calls = 0
        self._calls_before = 0  # the message that a cut turn began: its calls and its first id, to read it whole
        self._spoken_from = 0
        self._speech: _Speech | None = None
        self._closed = False
        self._session = setting.chat.engine.session(late=late)
        self._prompts = PromptMaker(setting.chat, setting.workers)

    @property
    def messages(self) -> list[Message]:
        """The messages so far, queued ones included; a copy."""
        return [*(self._segment.messages if self._segment else ()), *self._queued]

    @property
    def context(self) -> int:
        """Ids that this conversation may hold."""
        limit = self._setting.allowance.limits.context
        engine = self._setting.chat.engine.context
        return engine if limit is None else min(limit, engine)

    def add(self, *messages: Prompt) -> None:
        """Queue messages; the next `generate` puts the run of them before the model.

        Raises:
            BadMessage: one is no message, or answers no call; none is queued then.
        """
        new = [made for message in messages for made in as_messages(message)]
        if any(message["role"] == "tool" for message in new):
            check_answers(new, self._segment.messages if self._segment else (), self._queued)
        self._queued.extend(new)

    async def generate(self, *, sampling: Sampling | None = None, tool_choice: ToolChoice | None = None) -> Turn:
        """Let the agent speak.

        With nothing added since the last turn, a turn that was cut is continued; its text and its calls are then
        those of the whole.

        Args:
            sampling: goes over the run's and the environment's, field by field.
            tool_choice: goes over the environment's.

        Raises:
            EpisodeOver: a limit was reached, or the tokens or the engine failed; leaving `rollout` with it is normal.
            RuntimeError: nothing was added, or another `generate` of this conversation is running.
        """
        with self._speaking():
            return await self._generate(sampling, tool_choice)
        raise self._is_over()

    async def call_tools(self, turn: Turn) -> list[Message]:
        """Run the turn's calls: one result for each, in order.

        A call that does not parse is answered by a user message after the tool messages.
        """
        return await self._setting.call_tools(self, turn)

    async def remaining(self, *messages: Prompt) -> int:
        """Ids left in the context, also if these messages were added; negative where they do not fit.

        Raises:
            EpisodeOver: there is no exact bridge to them.
        """
        queued = list(self._queued)
        try:
            self.add(*messages)
            if self._segment is not None and not self._queued:
                return self.context - len(self._segment.log)
            if self._oversized():
                return self.context - self._oversized() // self._setting.chat.tokenizer.longest_token
            return self.context - len((await self._prepare()).prompt)
        finally:
            self._queued = queued

    def replace(self, messages: Prompt | None = None, *, tools: Sequence[Tool] | None = None) -> None:
        """Change what was seen: the only way to.

        What only adds to the past is appended. Without the last thing that the agent said, that turn is played again
        from the very ids of its prompt. Anything else is rendered anew. The latter two start a segment at the next
        `generate`, mask 0 throughout.

        Args:
            messages: the whole history from now on; None keeps it.
            tools: what may be called from now on; None keeps them.
        """
        history = self.messages if messages is None else as_messages(messages)
        check_answers(history)
        if tools is not None:
            self.tools = _checked_tools(tools)
        self._setting.allowance.context_rewritten(self.name)
        self._retry = None
        segment = self._segment
        if segment is not None and same_tools(segment.tools, self._schemas()):
            alignment = compare(segment.messages, history)
            if alignment.kind in (AlignmentKind.SAME, AlignmentKind.APPEND):
                self._queued = list(alignment.appended)
                return
            if alignment.kind is AlignmentKind.RETRY and segment.messages[alignment.index]["role"] == "assistant":
                self._retry = _Retry(segment, self._spoken_from, segment.messages[: alignment.index])
                history = list(self._retry.messages)
        self._retire()
        self._queued = history
        self._cause = "environment" if self._segments else "start"

    def has_said(self, message: Message) -> bool:
        """One of the turns says what this assistant message does."""
        calls = message.get("tool_calls", [])
        return any(
            turn.text == message["content"]
            and [call.as_message() for call in turn.tool_calls if call.error is None] == calls
            for turn in self.turns
        )

    async def close(self) -> None:
        """End the conversation: cut the turn that is still being sampled, and give the engine's room back."""
        self._closed = True
        if self._speech is not None:
            self._speech.scope.cancel()
            with anyio.CancelScope(shield=True, deadline=anyio.current_time() + DRAIN_SECONDS):
                await self._speech.over.wait()
        self._setting.chat.engine.close_session(self._session)

    def logs(self) -> list[TokenLog]:
        """The token logs so far."""
        return [segment.log for segment in self._segments]

    def into_trajectory(self, trajectory: Trajectory) -> None:
        """Hand the token logs over."""
        self._retire(unseen=len(self._queued))
        trajectory.segments = self._segments
        trajectory.turns = self.turns

    def _retire(self, unseen: int = 0) -> None:
        segment = self._segment
        if segment is None and unseen:
            segment = Segment(cause=self._cause, tools=self._schemas())
            self._segments.append(segment)
        if segment is not None and unseen:
            segment.messages.extend(self._queued)
            segment.unseen = unseen
        self._segment = None

    async def _generate(self, sampling: Sampling | None, tool_choice: ToolChoice | None) -> Turn:
        allowance = self._setting.allowance
        await allowance.before_turn(self.name, trained=self.train)
        prepared = await self._prepare()
        if len(prepared.prompt) >= self.context:
            self._refuse_length(len(prepared.prompt))
        request, ceiling = self._request(prepared, sampling, tool_choice)
        into = Sample(prepared.segment.log)
        try:
            self._setting.report_activity(f"{self.name}: engine")
            await sample(
                into,
                self._setting.chat.engine,
                request,
                new_ids=prepared.new_ids,
                source=prepared.source,
                tokenizer=self._setting.chat.tokenizer,
                stall_seconds=allowance.limits.stall_seconds,
            )
        finally:
            turn = self._record(prepared, request, into, ceiling) if into.admitted else None
        if into.error is not None:
            rejected = isinstance(into.error, RequestRejected)
            allowance.over(Ending(Outcome.ENGINE_ERROR, agent=self.name, error=str(into.error), permanent=rejected))
        assert turn is not None
        return turn

    @contextmanager
    def _speaking(self) -> Iterator[None]:
        """One `generate` at a time; `close` cuts it, from whatever task it was called in."""
        if self._closed:
            raise self._is_over()
        if self._speech is not None:
            raise RuntimeError(
                f"conversation {self.name!r} is already generating: two turns of one agent cannot be sampled at once. "
                f"Open a second one: self.episode.conversation('another name')."
            )
        self._speech = _Speech()
        try:
            with self._speech.scope:
                yield
        finally:
            self._speech.over.set()
            self._speech = None

    def _is_over(self) -> EpisodeOver:
        return EpisodeOver(f"{self._setting.episode} is over, and with it the conversation of {self.name!r}")

    async def _prepare(self) -> Prepared:
        self._refuse_bytes()
        queued = list(self._queued)
        try:
            prepared = await self._prompt(queued)
        except Unbridgeable as missing:
            self._no_prompt(missing)
        prepared.queued = len(queued)
        return prepared

    async def _prompt(self, queued: list[Message]) -> Prepared:
        segment = self._segment
        if segment is None:
            if not queued:
                raise RuntimeError(f"conversation {self.name!r} has no message yet: add() one, or give it a prompt.")
            if self._retry is not None and queued == self._retry.messages:
                return self._prompts.retried(self._retry.segment, self._retry.start, queued)
            again = not self._segments and any(map(self._setting.was_said, queued))
            return self._prompts.first(queued, self._schemas(), REENCODED if again else self._cause)
        if queued:
            return await self._prompts.next(segment, self.turns[-1], queued, self._schemas())
        if self.turns[-1].finish is FinishReason.STOP:
            raise RuntimeError(f"nothing was added to conversation {self.name!r} since its last turn: add() an answer.")
        return self._prompts.continued(segment)

    def _no_prompt(self, missing: Unbridgeable) -> NoReturn:
        ending = Ending(Outcome.TOKEN_ERROR, agent=self.name, error=str(missing))
        if missing.property is Property.REASONING_CLOSED and self.turns[-1].finish in _LIMITS:
            outcome, limit = _LIMITS[self.turns[-1].finish]
            ending = Ending(outcome, limit, self.name, str(missing))
        if not self.train:
            ending = Ending(Outcome.ENV_ERROR, agent=self.name, error=f"agent {self.name!r}: {missing}")
        self._setting.allowance.over(ending)

    def _schemas(self) -> list[dict[str, Any]]:
        return [tool.as_openai() for tool in self.tools]

    def _refuse_bytes(self) -> None:
        """What cannot fit by its size alone is refused before it is encoded."""
        size = self._oversized()
        if size:
            text = f"{self._setting.episode}: {size} characters cannot fit the context of {self.context} ids"
            self._setting.allowance.context_full(self.name, text, trained=self.train)

    def _oversized(self) -> int:
        """Characters of the queued messages where they are too many for the context in any case, else 0."""
        size = sum(len(message["content"]) for message in self._queued)
        return size if size > self.context * self._setting.chat.tokenizer.longest_token else 0

    def _refuse_length(self, length: int) -> None:
        text = f"{self._setting.episode}: {length} ids do not fit the context of {self.context}"
        self._setting.allowance.context_full(self.name, text, trained=self.train)

    def _request(
        self, prepared: Prepared, sampling: Sampling | None, tool_choice: ToolChoice | None
    ) -> tuple[GenerationRequest, str]:
        """The request, and the name of what `max_tokens` it got stands for."""
        chat = self._setting.chat
        own = self._setting.sampling()
        settings = own if sampling is None else sampling.over(own)
        prepared.sampling, prepared.tool_choice = _unconstrained(settings), self._choice(tool_choice)
        ceilings = {"max_tokens": settings.max_tokens, "context": self.context - len(prepared.prompt)}
        left = self._setting.allowance.tokens_left() if self.train else None
        if left is not None:
            ceilings["tokens"] = left
        ceiling = min(ceilings, key=ceilings.__getitem__)
        request = GenerationRequest(
            name=f"{self._setting.episode}/{self.name}/{len(self.turns)}",
            prompt=prepared.prompt,
            sampling=settings if ceiling == "max_tokens" else replace(settings, max_tokens=ceilings[ceiling]),
            stop_ids=tuple(dict.fromkeys((*chat.stop_ids, *settings.stop_ids))),
            seed=self._setting.seed(len(self.turns)),
            session=self._session,
            constraint=self._constraint(settings, prepared.tool_choice),
            acts_on_deltas=bool(settings.stop),
        )
        return request, ceiling

    def _choice(self, tool_choice: ToolChoice | None) -> ToolChoice:
        if not self.tools:
            return "none"
        return tool_choice if tool_choice is not None else self._setting.tool_choice(self)

    def _constraint(self, settings: Sampling, tool_choice: ToolChoice) -> Constraint | None:
        tool_format = self._setting.chat.tool_format
        enforced = tool_format.constraint(self.tools, tool_choice) if tool_format and self.tools else None
        given = _given_constraint(settings)
        if enforced and given:
            raise BadOption(
                f"tool_choice={tool_choice!r} and Sampling({given.kind.value}=...) both constrain the same turn: "
                f"give generate(tool_choice='none') where the text itself is constrained."
            )
        return enforced or given

    def _record(self, prepared: Prepared, request: GenerationRequest, into: Sample, ceiling: str) -> Turn:
        segment = prepared.segment
        if self._segment is not segment:
            self._segment = segment
            self._segments.append(segment)
        if prepared.taken_back is not None:
            prepared.taken_back.take_back(into.start)
            self._retry = None
        segment.messages.extend(prepared.messages)
        del self._queued[: prepared.queued]
        turn = Turn(
            agent=self.name,
            number=len(self.turns),
            log=segment.log,
            start=into.start,
            end=into.end,
            finish=into.finish,
            stop=into.stop,
            segment=len(self._segments) - 1,
            seed=request.seed,
            sampling=prepared.sampling,
            constraint=request.constraint,
            tool_choice=prepared.tool_choice,
            cached_tokens=into.cached_tokens,
            junction=prepared.junction,
            timings=into.timings,
        )
        turn.dropped, turn.resampled = into.dropped, into.resampled
        if turn.finish is FinishReason.LENGTH:
            turn.stop = ceiling
            if ceiling == "context":
                turn.finish = FinishReason.CONTEXT
        self._read(turn, prepared, into.text)
        self.turns.append(turn)
        self._setting.allowance.spend(turn, trained=self.train)
        return turn

    def _read(self, turn: Turn, prepared: Prepared, text: str | None) -> None:
        """Fill in the view: what the sampled ids say."""
        segment, chat = prepared.segment, self._setting.chat
        begin = turn.start
        if prepared.continued:
            segment.messages.pop()
            begin = self._spoken_from
            self._calls = self._calls_before
            if text is not None:
                text = chat.tokenizer.decode(turn.log.ids[begin : turn.start]) + text
        self._spoken_from, self._calls_before = begin, self._calls
        if text is None:
            stopped = turn.finish is FinishReason.STOP and isinstance(turn.stop, int)
            text = text_of(turn.log.ids[begin : turn.end], chat, stopped=stopped)
        view = ParsedTurn.of(text, chat, self.tools, before=self._calls, tool_choice=prepared.tool_choice)
        turn.text, turn.reasoning, turn.tool_calls = view.text, view.reasoning, view.tool_calls
        turn.thinking = chat.closing_stop(turn) is None and is_open(text, opened=chat.opens_reasoning)
        self._calls += len(view.tool_calls)
        segment.messages.append(view.as_message())


@dataclass(frozen=True, slots=True)
class _Speech:
    """A `generate` that is running, and how to end it from another task."""

    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    over: anyio.Event = field(default_factory=anyio.Event)


@dataclass(frozen=True, slots=True)
class _Retry:
    """The last turn is to be played again.

    Attributes:
        segment: where it was played.
        start: its first sampled id, where its prompt ends.
        messages: that it was prompted with.
    """

    segment: Segment
    start: int
    messages: Sequence[Message]


_LIMITS = {
    FinishReason.LENGTH: (Outcome.TOKEN_LIMIT, "max_tokens"),
    FinishReason.CONTEXT: (Outcome.CONTEXT_LIMIT, "context"),
}


def _checked_tools(tools: Sequence[Tool]) -> list[Tool]:
    for tool in tools:
        if not isinstance(tool, Tool):
            raise TypeError(f"{tool!r:.60} is no Tool: write Tool(function) for a function with hints and a docstring")
    names = [tool.name for tool in tools]
    for name in names if len(set(names)) < len(names) else ():
        if names.count(name) > 1:
            raise ValueError(f"two tools are called {name!r}: give one another name, Tool(..., name=)")
    return list(tools)


def _unconstrained(settings: Sampling) -> Sampling:
    if settings.schema is None and settings.regex is None and settings.choice is None:
        return settings
    return replace(settings, schema=None, regex=None, choice=None)


def _given_constraint(settings: Sampling) -> Constraint | None:
    if settings.schema is not None:
        return Constraint(ConstraintKind.JSON, json.dumps(settings.schema))
    if settings.regex is not None:
        return Constraint(ConstraintKind.REGEX, settings.regex)
    if settings.choice is not None:
        return Constraint(ConstraintKind.CHOICE, json.dumps(list(settings.choice)))
    return None
