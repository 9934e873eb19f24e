"""The state of one episode and of its conversations, shared by the modules of this package.

The classes of this module contain little logic: `prompting` makes prompts, and `turn` samples and records. Authors use
`Conversation` and `Episode`. `EpisodeRunner` in `lifecycle` extends the state of an episode. A `Conversation` does not
extend its `ConversationState`, since authors would see internals.

In this package, a variable `conversation` is a `ConversationState`, and its `episode` is an `EpisodeState`. In modules
that also use the author's `Conversation` and `Episode`, a variable `state` is the state.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NoReturn, Protocol

import anyio

from runner.attachments import Attachment
from runner.chat_requests import ChatRequest
from runner.concurrency.clocks import Waiting, loop_time
from runner.concurrency.exit_stack import ThreadedExitStack
from runner.concurrency.user_code import AuthorCode, TooSlow
from runner.engines.base import Session
from runner.episode.key import EpisodeKey
from runner.episode.limits import EpisodeLimits
from runner.episode.model import ChatModel
from runner.episode.shared import RunShared
from runner.episode.turn_tree import Cursor, TurnNode
from runner.errors import BadOption
from runner.messages import Message, check_answers
from runner.options import Limits, Sampling
from runner.tools.tool import Tool
from runner.trajectory import BRANCH, Segment, Trajectory, Turn

__all__ = ["ConversationState", "EpisodeState", "OpenConversation", "checked_tools"]


class OpenConversation(Protocol):
    """The methods of `Conversation` that an episode calls. `Conversation` itself is in a layer above."""

    async def call_tools(self, turn: Turn) -> list[Message]: ...

    async def close(self) -> None: ...


class EpisodeState:
    """The state of one attempt, shared by `Episode` and its conversations. `EpisodeRunner` adds the life cycle."""

    def __init__(self, key: EpisodeKey, shared: RunShared) -> None:
        self.key = key
        """Task, index and attempt of the episode."""
        self.seed = key.seed(shared.seed)
        self.shared = shared
        self.part = shared.part_of(key.task)
        """The environment of the task as its author constructed it, with its limits and scorers."""
        self.environment = self.part.environment
        """The environment: the object that all episodes share, until this episode has constructed its own."""
        self.limits = EpisodeLimits(self.part.limits)
        """The limits, the turns and tokens used so far, and the ending of the episode."""
        self.author_code = AuthorCode(shared.workers)
        """The caller of the author's hooks and tools."""
        self.conversations: dict[str, ConversationState] = {}
        """The conversations by agent, in the order in which they were opened."""
        self.renamed: dict[str, str] = {}
        """Final name of each thread of requests, by the name with which the thread was opened."""
        self.faults: list[str] = []
        """Problems that did not change the outcome, such as a `close()` or a metric that raised."""
        self.exit_stack = ThreadedExitStack(self._leave, f"episode {key.id} of {type(self.environment).__name__}")
        """The contexts that `setup()` entered."""
        self.exit_stack_open = False
        """True while `setup()` runs and may enter contexts."""
        self.attachments: list[Attachment] = []
        self.activity = ""
        """The current activity, such as "engine", for people."""
        self.since = 0.0
        """Time at which the current activity began, on the event loop's clock."""
        self._limits_of_setup: Limits | None = None
        self.report_activity("setup")

    def report_activity(self, what: str) -> None:
        """Set the current activity, for the live display and for the search for a stuck episode."""
        self.activity = what
        self.since = loop_time()

    def take_limits(self) -> None:
        """Apply the limits that `setup()` may have assigned. Raise BadOption if they cannot be used."""
        self._limits_of_setup = self.environment.limits
        self.limits.configured = self.shared.limits_of(self._limits_of_setup, self.part)

    def check_limits(self) -> None:
        """Raise BadOption if limits were assigned after `setup()`."""
        taken, limits = self._limits_of_setup, self.environment.limits
        if taken is not None and limits is not taken and limits != taken:
            raise BadOption(
                "self.limits was assigned after setup(), where nothing reads it: assign it in setup(), or give limits "
                "to the class or the run."
            )

    async def _leave(self, leaving: Callable[[], bool | None], name: str) -> bool | None:
        """Leave one context of the exit stack in a thread.

        An exit that takes too long is abandoned, and the unwinding continues with the next context.

        Each exit has its own limit. During the exit, the clock of the whole unwinding is paused. A cancellation takes
        effect only after the exit.
        """
        seconds = self.limits.configured.close_seconds
        with Waiting(), anyio.CancelScope(shield=True):
            try:
                swallowed: bool | None = await self.author_code.call(leaving, name=name, seconds=seconds)
            except TooSlow as error:
                self.faults.append(f"exit_stack: {error}; its thread still runs")
                return None
        return swallowed

    def call_ids(self) -> set[str]:
        """Return the ids of all calls that turns of this episode sampled."""
        turns = (turn for conversation in self.conversations.values() for turn in conversation.turns)
        return {call.id for turn in turns for call in turn.tool_calls}

    def was_said(self, message: Message) -> bool:
        """Return True if an agent of this episode sampled this assistant message."""
        if message["role"] != "assistant" or not (message["content"] or message.get("tool_calls")):
            return False
        return any(_equal(turn, message) for conversation in self.conversations.values() for turn in conversation.turns)


# These two blocks are classes and not generators, since every turn enters both, and a generator takes three times as
# long.


class NumberOfTurn:
    """A block that reserves the number of a turn."""

    __slots__ = ("_conversation", "_number")

    def __init__(self, conversation: ConversationState) -> None:
        self._conversation = conversation

    def __enter__(self) -> int:
        self._number = self._conversation.numbered
        self._conversation.numbered += 1
        return self._number

    def __exit__(self, *_: object) -> None:
        conversation, number = self._conversation, self._number
        taken = bool(conversation.turns) and conversation.turns[-1].number >= number
        if not taken and conversation.numbered == number + 1:
            conversation.numbered = number


class SessionOfTurn:
    """A block that holds one of a conversation's sessions."""

    __slots__ = ("_conversation", "_session")

    def __init__(self, conversation: ConversationState) -> None:
        self._conversation = conversation

    def __enter__(self) -> Session:
        self._session = self._conversation.take_session()
        return self._session

    def __exit__(self, *_: object) -> None:
        self._conversation.give_back(self._session)


class ConversationState:
    """The messages and turns of one agent, and the messages that its model has not seen yet."""

    def __init__(
        self,
        name: str,
        episode: EpisodeState,
        *,
        train: bool,
        counted: bool,
        tools: Sequence[Tool],
        messages: Sequence[Message],
        sampling: Sampling | None,
    ) -> None:
        self.name = name
        self.train = train
        """True if the sampled ids of the conversation are trained on."""
        self.counted = counted
        """True if the run's sampling and limits apply, since the agent is trained or evaluated.

        Evaluated agents play on the run's engine, which takes messages: `main`, and threads that would be trained on an
        engine of token ids.
        """
        self.episode = episode
        self.author_conversation: OpenConversation
        """The author's object; set by the code that opens the conversation."""
        self.model = episode.shared.chat_of(name)
        check_answers(messages)
        self.cursor = Cursor(checked_tools(tools), list(messages))
        """The point of the next turn."""
        self.turns: list[Turn] = []
        self.nodes: list[TurnNode] = []
        """The nodes of the turn tree, in the order in which the turns ended."""
        self.segments: list[Segment] = []
        """The segments: token logs, each with its messages."""
        self._indices: dict[int, int] = {}  # the index of each segment in `segments`, by its object id
        self.numbered = 0
        """The number of the next turn."""
        self.requests: list[ChatRequest] = []
        self.thread = name
        """Name with which the conversation was opened; its seeds depend on this name."""
        self.own_sampling = sampling
        """Sampling with which the conversation was opened, or None."""
        self.checked_sampling: Sampling | None = None
        """The latest sampling that the engine accepted. None before the first turn, or if the engine takes messages."""
        self._environment_sampling: Sampling | None = None
        self._sampling: Sampling
        # Only the first request of an episode waits for the requests of episodes in progress. The first request of a
        # second agent does not wait.
        self._sessions = [self.model.engine.session(late=bool(episode.conversations), beside=self._another())]
        self._free_sessions = list(self._sessions)

    @cached_property
    def chat(self) -> ChatModel:
        """The model of the agent, which takes ids."""
        assert isinstance(self.model, ChatModel), "the caller checks that the engine takes ids"
        return self.model

    @property
    def context(self) -> int:
        """Maximum number of tokens of the conversation."""
        limit = self.episode.limits.configured.context
        engine = self.model.engine.context
        return engine if limit is None else min(limit, engine)

    def session(self) -> SessionOfTurn:
        """Return a block with a session, the engine's memory between turns. Concurrent turns have separate sessions."""
        return SessionOfTurn(self)

    def take_session(self) -> Session:
        """Return a session that no other turn uses; `give_back` frees it again."""
        if not self._free_sessions:
            self._sessions.append(self.model.engine.session(late=True, beside=self._sessions[0]))
            self._free_sessions.append(self._sessions[-1])
        return self._free_sessions.pop()

    def give_back(self, session: Session) -> None:
        """Free the session of a finished turn for the next one."""
        self._free_sessions.append(session)

    def _another(self) -> Session | None:
        """Return the session of another conversation of this episode on the same engine, or None."""
        engine = self.model.engine
        return next(
            (
                conversation._sessions[0]
                for conversation in self.episode.conversations.values()
                if conversation.model.engine is engine
            ),
            None,
        )

    def close_sessions(self) -> None:
        """Free the sessions in the engine."""
        for session in self._sessions:
            self.model.engine.close_session(session)

    def number(self) -> NumberOfTurn:
        """Return a block that reserves the number of a new turn.

        A failed turn frees its number, unless a later number was reserved.
        """
        return NumberOfTurn(self)

    def record(self, cursor: Cursor, node: TurnNode) -> None:
        """Add a turn to its segment and to the turn tree, move the cursor after it, and count it."""
        segment, turn = node.segment, node.turn
        segment.messages.append(node.reply)
        if not self.has(segment):
            self._indices[id(segment)] = len(self.segments)
            self.segments.append(segment)
        turn.segment = self._indices[id(segment)]
        self.nodes.append(node)
        insort(self.turns, turn, key=lambda turn: turn.number)  # a turn that began earlier may end later
        cursor.node, cursor.whole, cursor.again = node, "", None
        self.episode.limits.count(turn, counted=self.counted)

    def refuse_prompt(self, error: str, *, prompt: int, context: int = 0) -> NoReturn:
        """Raise ContextFull or EpisodeOver for a prompt of at least `prompt` ids that does not fit the context.

        `context` is the size that a server reported; 0 for the size of the conversation's context.
        """
        context = context or self.context
        self.episode.limits.refuse_prompt(self.name, error, counted=self.counted, prompt=prompt, context=context)

    def has(self, segment: Segment) -> bool:
        """Return True if a segment belongs to this conversation."""
        return id(segment) in self._indices  # object ids stay valid: the segments exist as long as this object

    def node_of(self, turn: Turn) -> TurnNode | None:
        """Return the tree node of a turn; None for a turn of another conversation."""
        return next((node for node in reversed(self.nodes) if node.turn is turn), None)

    def sampling(self) -> Sampling:
        """Return the sampling of the next turn, with every field set.

        The environment may assign another sampling between turns. BadOption is raised if it assigned a value that is
        not a `Sampling`, or if it assigned limits after `setup()`.
        """
        episode = self.episode
        given = episode.environment.sampling
        if given is not self._environment_sampling:
            if not isinstance(given, Sampling):
                raise BadOption(f"self.sampling = {given!r:.60}: give Sampling(...).")
            self._sampling = episode.shared.sampling_of(
                counted=self.counted, conversation=self.own_sampling, environment=given, episode=episode.key.sampling
            )
            self._environment_sampling = given
        episode.check_limits()
        return self._sampling

    def into_trajectory(self, trajectory: Trajectory) -> None:
        """Store segments, turns and requests in the trajectory, and queued messages at the end of its last segment."""
        self._order_segments()
        cursor, segments = self.cursor, self.segments
        if cursor.queued:
            node, last = cursor.node, segments[-1] if segments else None
            if (
                last is not None
                and node is not None
                and not cursor.whole
                and node.segment is last
                and node.ends_segment
            ):
                last.messages.extend(cursor.queued)
            else:
                last = _unsampled(cursor)
                segments.append(last)
            last.unseen = len(cursor.queued)
            self.cursor = Cursor(cursor.tools, node=node)
        trajectory.segments = segments
        trajectory.turns = self.turns
        trajectory.requests = self.requests
        trajectory.thread = "" if self.thread == self.name else self.thread

    def _order_segments(self) -> None:
        """Sort the segments by their first turns. Of concurrent turns, the later turn may have ended first."""
        if len(self.segments) < 2:
            return
        first: dict[int, int] = {}
        for node in self.nodes:
            at = id(node.segment)
            first[at] = min(first.get(at, node.turn.number), node.turn.number)
        self.segments.sort(key=lambda segment: first.get(id(segment), self.numbered))
        indices = {id(segment): index for index, segment in enumerate(self.segments)}
        for node in self.nodes:
            if id(node.segment) in indices:
                node.turn.segment = indices[id(node.segment)]


def _unsampled(cursor: Cursor) -> Segment:
    """Return a segment that has only messages; the model never saw the last of them."""
    cause = cursor.whole or ("start" if cursor.node is None else BRANCH)
    return Segment(cause=cause, tools=cursor.schemas(), origin=cursor.origin, messages=[*cursor.seen, *cursor.queued])


def _equal(turn: Turn, message: Message) -> bool:
    calls = message.get("tool_calls", [])
    return turn.text == message["content"] and calls == [
        call.as_message() for call in turn.tool_calls if call.error is None
    ]


def checked_tools(tools: Sequence[Tool]) -> list[Tool]:
    """Return the tools as a new list.

    Raises:
        TypeError: an item is not a Tool.
        ValueError: two tools have the same name.
    """
    for tool in tools:
        if not isinstance(tool, Tool):
            raise TypeError(
                f"{tool!r:.60} is not a Tool: write Tool(function) for a function with hints and a docstring"
            )
    names = [tool.name for tool in tools]
    for name in names if len(set(names)) < len(names) else ():
        if names.count(name) > 1:
            raise ValueError(f"two tools are called {name!r}: rename one of them, by Tool(..., name=)")
    return list(tools)
