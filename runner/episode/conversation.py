"""A conversation: the messages and turns of one agent, for the author of a `rollout`."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Self, TypeAlias

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from runner.checked import whole
from runner.concurrency.clocks import task_scope
from runner.concurrency.gather import gather
from runner.episode.history_replacement import cursor_at, discarded_nodes
from runner.episode.model import MessageModel
from runner.episode.prompting import next_prompt, oversized
from runner.episode.state import ConversationState, EpisodeState, checked_tools
from runner.episode.tool_calls import answer_calls
from runner.episode.turn import score_replies, take_turn
from runner.episode.turn_settings import NO_SINKS, TurnSinks
from runner.episode.turn_tree import Cursor, TurnNode
from runner.errors import BadOption, EpisodeOver
from runner.messages import Message, Prompt, as_messages, check_answers
from runner.options import Sampling, ToolChoice
from runner.tools.tool import Tool
from runner.trajectory import Turn
from runner.turn_events import TurnEvent

__all__ = ["Conversation", "open_conversation", "open_thread"]

Generate: TypeAlias = Callable[[Callable[[TurnEvent], None]], Awaitable[Turn]]
"""Function that samples a turn, and calls its argument with each event."""


class StreamedTurn:
    """A turn while it is sampled: an asynchronous iterator over its events."""

    def __init__(self, events: MemoryObjectReceiveStream[TurnEvent], last: Callable[[], Turn | None]) -> None:
        self._events = events
        self._last = last
        self._before = last()
        self._turn: Turn | None = None
        self._error: Exception | None = None

    @property
    def turn(self) -> Turn:
        """The recorded turn. If the iteration did not reach its end, the turn is cut, with the ids sampled so far.

        Raises:
            RuntimeError: the turn is still being sampled, or nothing was sampled.
        """
        self._settle()
        if self._turn is None:
            raise RuntimeError("the turn is not over: iterate to its end, or leave the block, before you read `turn`")
        return self._turn

    def _settle(self) -> None:
        """Store the turn if it is recorded by now, since `last` returns another turn after the agent's next turn."""
        if self._turn is None and (turn := self._last()) is not self._before:
            self._turn = turn

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TurnEvent:
        try:
            return await self._events.receive()
        except anyio.EndOfStream:
            error, self._error = self._error, None
            if error is not None:
                raise error from None
            raise StopAsyncIteration from None


@asynccontextmanager
async def stream_turn(last: Callable[[], Turn | None], generate: Generate) -> AsyncIterator[StreamedTurn]:
    """Sample a turn while the block runs. Leaving the block cuts the turn.

    Args:
        last: a function that returns the latest turn, or None.
        generate: a function that samples the turn.
    """
    # The queue needs no limit: it holds the events of one turn only, and sampling must not wait for the reader.
    on_event, events = anyio.create_memory_object_stream[TurnEvent](math.inf)
    streamed = StreamedTurn(events, last)

    async def sample() -> None:
        with on_event:
            try:
                await generate(on_event.send_nowait)
            except Exception as error:
                streamed._error = error

    left: Exception | None = None
    with events:
        async with anyio.create_task_group() as group:
            group.start_soon(sample)
            try:
                yield streamed
            except Exception as error:  # raised outside of the task group, which would wrap it
                left = error
            group.cancel_scope.cancel()
    streamed._settle()
    if left is None:
        left = streamed._error
    if left is not None:
        raise left


DRAIN_SECONDS = 10.0
"""Time for a closed conversation to record the sampled ids of a turn in flight, under a shield."""


def open_conversation(
    episode: EpisodeState,
    name: str,
    *,
    system_prompt: str | None,
    prompt: Sequence[Message],
    tools: Sequence[Tool],
    train: bool,
    sampling: Sampling | None = None,
    counted: bool | None = None,
) -> Conversation:
    """Open the conversation of a new agent; see `Episode.conversation` for the arguments.

    The `prompt` is as `as_messages` returns it. `counted` is True if the run's sampling and limits apply to the
    conversation; with None, they apply if it is trained. BadOption is raised if the agent cannot be trained.
    """
    if train and name in episode.shared.other_models:
        raise BadOption(f"agent {name!r} plays on its own engine (engines={{{name!r}: ...}}): leave out train=True.")
    if train and isinstance(episode.shared.chat, MessageModel):
        engine = type(episode.shared.chat.engine).__name__
        raise BadOption(
            f"agent {name!r} plays on a {engine}, which returns no token ids: it cannot be trained. Open its "
            "conversation without train=True to evaluate it."
        )
    messages: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
    messages += prompt
    counted = train if counted is None else counted
    state = ConversationState(
        name, episode, train=train, counted=counted, tools=tools, messages=messages, sampling=sampling
    )
    conversation = state.author_conversation = Conversation(state)
    episode.conversations[name] = state
    return conversation


def open_thread(episode: EpisodeState, name: str, tools: Sequence[Tool], train: bool) -> ConversationState:
    """Open the conversation of a thread: requests that continue each other, each with the whole history.

    On an engine that takes messages, threads are evaluated, not trained.
    """
    trained = train and not episode.shared.evaluates(name)
    open_conversation(episode, name, system_prompt=None, prompt=(), tools=tools, train=trained, counted=train)
    return episode.conversations[name]


class Conversation:
    """The messages and turns of one agent.

    The messages are a view for people and templates. The prompt of the model is the token ids that it saw and sampled
    before, followed by the ids of new messages.
    """

    def __init__(self, state: ConversationState) -> None:
        self._state = state
        self._generation: _GenerateBlock | None = None
        self._closed = False

    @property
    def name(self) -> str:
        """Name of the agent: "main", or the name with which the conversation was opened."""
        return self._state.name

    @property
    def train(self) -> bool:
        """True if the agent's trajectory is trained on."""
        return self._state.train

    @property
    def tools(self) -> list[Tool]:
        """The tools that the agent may call now; `replace` changes them."""
        return self._state.cursor.tools

    @property
    def turns(self) -> list[Turn]:
        """The agent's turns so far, in order."""
        return self._state.turns

    @property
    def messages(self) -> list[Message]:
        """A copy of the messages so far, including those that were not in a prompt yet."""
        cursor = self._state.cursor
        return [*cursor.seen, *cursor.queued]

    @property
    def context(self) -> int:
        """Maximum number of tokens of this conversation: the smaller of `Limits.context` and the engine's limit."""
        return self._state.context

    def add(self, *messages: Prompt) -> None:
        """Add messages. The model receives all of them at the next `generate`.

        Raises:
            BadMessage: an item is not a message, or answers no call. Then no message is added.
        """
        cursor = self._state.cursor
        new = [made for message in messages for made in as_messages(message)]
        if any(message["role"] == "tool" for message in new):
            check_answers(new, cursor.seen, cursor.queued)
        cursor.queued.extend(new)

    async def generate(self, *, sampling: Sampling | None = None, tool_choice: ToolChoice | None = None) -> Turn:
        """Sample the agent's next turn.

        If no message was added since the last turn, and this turn was cut, the new turn continues it. The text and the
        calls of the new turn then include the earlier part.

        Args:
            sampling: its fields take precedence over the sampling of the run and of the environment.
            tool_choice: takes precedence over the environment's `tool_choice`.

        Raises:
            EpisodeOver: a limit was reached, no exact prompt exists, or the engine failed; `rollout` need not catch it.
            RuntimeError: no message to answer, or another `generate` of this conversation is running.
            BadOption: the sampling, the limits or the tool choice cannot be used.
        """
        return await self._generate(NO_SINKS, sampling, tool_choice)

    async def _generate(self, sinks: TurnSinks, sampling: Sampling | None, tool_choice: ToolChoice | None) -> Turn:
        with self._speaking():
            return await take_turn(self._state, self._state.cursor, sampling, tool_choice, sinks=sinks)
        # This line is reached only after `close` cancelled the scope, since a scope swallows its own cancellation.
        raise self._is_over()

    @asynccontextmanager
    async def stream(
        self, *, sampling: Sampling | None = None, tool_choice: ToolChoice | None = None
    ) -> AsyncIterator[StreamedTurn]:
        """Sample the agent's next turn, and iterate over its events while it is sampled.

        The block receives the turn to iterate over. If the block ends before the turn is over, the turn is cut.
        Otherwise, `stream` is like `generate`, and raises the same errors.

        Args:
            sampling: its fields take precedence over the sampling of the run and of the environment.
            tool_choice: takes precedence over the environment's `tool_choice`.
        """

        def last() -> Turn | None:
            node = self._state.cursor.node
            return None if node is None else node.turn

        async with stream_turn(
            last, lambda on_event: self._generate(TurnSinks.of_events(on_event), sampling, tool_choice)
        ) as streamed:
            yield streamed

    async def call_tools(self, turn: Turn) -> list[Message]:
        """Run the turn's calls, and return one tool message with the result of each call, in the order of the calls.

        Calls that did not parse have no tool message. One user message at the end answers all of them.
        """
        episode = self._state.episode
        try:
            return await answer_calls(
                turn,
                self.tools,
                author_code=episode.author_code,
                seconds=episode.limits.configured.tool_seconds,
                report_activity=episode.report_activity,
            )
        except Exception as error:
            if not self.train:
                error.add_note(f"in a tool of agent {self.name!r}")
            raise

    async def remaining(self, *messages: Prompt) -> int:
        """Return the number of tokens left in the context after these messages; negative if they do not fit.

        Raises:
            EpisodeOver: no exact prompt with these messages exists; this ends the episode.
            BadMessage: an item is not a message, or answers no call.
            RuntimeError: the conversation has no message.
            BadOption: the engine takes messages, and only its server counts tokens.
        """
        state = self._state
        cursor = state.cursor
        if isinstance(state.model, MessageModel):
            raise BadOption(
                f"conversation {self.name!r}: remaining() needs token ids, and this engine takes messages. "
                "Turn.usage has the server's counts of the last turn."
            )
        queued = list(cursor.queued)
        try:
            self.add(*messages)
            if cursor.node is not None and not cursor.whole and not cursor.queued:
                return state.context - cursor.node.turn.end
            size = oversized(state, cursor)
            if size:
                return state.context - size // state.chat.tokenizer.longest_token
            return state.context - len((await next_prompt(state, cursor, extend=True)).ids)
        finally:
            cursor.queued = queued

    async def score(self, replies: Sequence[str]) -> list[float]:
        """Return the log-probability of each text as the beginning of the agent's next turn, in nats at temperature 1.

        Nothing is sampled or recorded: the engine computes prompt and text in one pass. A text without the ids that end
        a turn has the probability of all turns that begin with it.

        Args:
            replies: the texts, each of at least one id.

        Raises:
            EpisodeOver: the engine failed, or the prompt does not fit the context or is not exact.
            RuntimeError: no message to answer, or a `generate` of this conversation is running.
            BadOption: the engine takes messages, or a text is empty.
            BadControl: the engine cannot compute these log-probabilities.
        """
        if isinstance(self._state.model, MessageModel):
            why = "score() needs token ids, and this engine takes messages: use an engine of token ids"
            raise BadOption(f"conversation {self.name!r}: {why}.")
        if not all(replies):
            raise BadOption(f"conversation {self.name!r}: score({replies!r:.60}): give strings that are not empty.")
        with self._speaking():
            return await score_replies(self._state, self._state.cursor, replies)
        raise self._is_over()

    def replace(self, messages: Prompt | None = None, *, tools: Sequence[Tool] | None = None) -> None:
        """Replace the history. BadMessage is raised if a tool message in `messages` answers no call.

        If the new history only adds messages to the old one, none of them by the assistant, these are appended. If it
        is the prompt of a turn, that turn is sampled again from its exact prompt ids. If it begins with earlier turns
        and adds no assistant message, the next turn continues from their exact ids. Any other history is rendered
        again. Except in the first case, the next `generate` usually begins a segment, whose prompt has loss mask 0.

        Args:
            messages: the new whole history; None keeps it.
            tools: the new tools; None keeps the tools. With other tools, the whole history is rendered again.
        """
        state = self._state
        history = self.messages if messages is None else as_messages(messages)
        check_answers(history)
        if tools is not None:
            state.cursor.tools = checked_tools(tools)
        state.episode.limits.context_rewritten(state.name)
        state.cursor = cursor_at(state, history)

    def branch(
        self,
        name: str,
        *,
        turn: Turn | None = None,
        tools: Sequence[Tool] | None = None,
        train: bool = True,
        sampling: Sampling | None = None,
    ) -> Conversation:
        """Open another conversation that begins with the history of this one.

        The branch continues from the exact ids; in training, both conversations share them. The turns of the branch
        become a trajectory with its own reward. Branches may take turns at the same time.

        Args:
            name: the agent of the branch.
            turn: the turn of this conversation to continue from; None for the current state, with messages that were
                added after the last turn.
            tools: the tools of the branch; None for the same tools. With other tools, the whole history is rendered
                again, since templates print tools.
            train: True to train on the turns of the branch.
            sampling: takes precedence over the sampling of run and environment; None for this conversation's sampling.

        Raises:
            BadOption: an agent with that name exists, has its own engine or cannot be trained, or the turn belongs to
                another conversation.
        """
        state = self._state
        if name in state.episode.conversations:
            raise BadOption(f"branch({name!r}): there is an agent of that name; give another name.")
        if state.episode.shared.chat_of(name) is not state.model:
            raise BadOption(f"branch({name!r}): this agent has its own engine, with other ids; give another name.")
        cursor = state.cursor.copied() if turn is None else Cursor(state.cursor.tools, [], self._node(turn))
        cursor.tools = checked_tools(cursor.tools if tools is None else tools)
        own = state.own_sampling if sampling is None else sampling
        branch = open_conversation(
            state.episode, name, system_prompt=None, prompt=(), tools=cursor.tools, train=train, sampling=own
        )
        branch._state.cursor = cursor
        return branch

    async def tries(
        self, count: int, *, sampling: Sampling | None = None, tool_choice: ToolChoice | None = None
    ) -> list[Turn]:
        """Sample the next turn several times, concurrently, from the same ids and with different seeds.

        The turns are returned in the order of their numbers. The trajectory contains all tries, and all are trained on.
        The conversation continues from the first try, until `keep` selects another.

        Args:
            count: number of tries, at least 1.
            sampling: its fields take precedence over the sampling of the run and of the environment.
            tool_choice: takes precedence over the environment's `tool_choice`.

        Raises:
            EpisodeOver: as in `generate`; the sampled parts of all tries are kept.
        """
        whole(f"tries({count!r})", count, least=1)
        state = self._state
        heads = [state.cursor.copied() for _ in range(count)]
        with self._speaking(), ExitStack() as numbers:
            # Numbers are reserved in this order, since seeds depend on them. The tries may begin in another order.
            numbered = [(cursor, numbers.enter_context(state.number())) for cursor in heads]
            await gather(
                [partial(take_turn, state, cursor, sampling, tool_choice, number=number) for cursor, number in numbered]
            )
            state.cursor = heads[0]
            return [cursor.node.turn for cursor in heads if cursor.node is not None]
        raise self._is_over()

    def keep(self, turn: Turn, *, train_others: bool = False) -> None:
        """Continue from one of several tries or from an earlier turn, with the exact ids up to the end of that turn.

        Args:
            turn: a turn of this conversation.
            train_others: True to train also on the other tries, and on the turns that followed any of the tries.

        Raises:
            BadOption: the turn belongs to another conversation.
        """
        state, kept = self._state, self._node(turn)
        state.episode.limits.context_rewritten(state.name)
        for node in () if train_others else discarded_nodes(state, kept):
            node.turn.left_out = True
            node.turn.log.take_back(node.turn.start, node.turn.end)
        state.cursor = Cursor(state.cursor.tools, [], kept)

    async def close(self) -> None:
        """End the conversation: cut the turn in flight, and free the memory of the conversation in the engine.

        The runner calls this method when the episode is over. The sampled part of the turn is kept.
        """
        self._closed = True
        if self._generation is not None:
            await self._generation.cut()
        self._state.close_sessions()

    def _node(self, turn: Turn) -> TurnNode:
        node = self._state.node_of(turn)
        if node is None:
            raise BadOption(f"{turn!r} is not a turn of conversation {self.name!r}: give one of its turns.")
        return node

    def _speaking(self) -> _GenerateBlock:
        """Return the block of a `generate`. Raise RuntimeError while another block runs, EpisodeOver after `close`."""
        if self._closed:
            raise self._is_over()
        if self._generation is not None:
            raise RuntimeError(
                f"conversation {self.name!r} is already generating: two turns of one agent cannot be sampled at once. "
                f"Open a second conversation: self.episode.conversation('another name')."
            )
        return _GenerateBlock(self)

    def _is_over(self) -> EpisodeOver:
        return EpisodeOver(f"{self._state.episode.key.id} is over, and with it the conversation of {self.name!r}")


class _GenerateBlock:
    """A context manager around one `generate` call, which another task may cut."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._scope = task_scope()
        self._over: anyio.Event | None = None  # created only if a task waits

    def __enter__(self) -> None:
        self._conversation._generation = self
        self._scope.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._conversation._generation = None
        if self._over is not None:
            self._over.set()
        return bool(self._scope.__exit__(kind, error, traceback))

    async def cut(self) -> None:
        """Cut the block, and wait until its sampled ids are recorded."""
        self._scope.cancel()
        over = self._over = self._over or anyio.Event()
        # The shield lets a cancelled episode keep the last tokens. It has a deadline, since the author's own task may
        # be the one that generates, and it may swallow its cancellation.
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + DRAIN_SECONDS):
            await over.wait()
