"""The state of one episode and of its conversations, as the modules of this package share it.

What is here decides little: `prompting` makes prompts of it, `turn` samples and records, `Conversation` and `Episode`
are what the author sees of it, and `Play` in `lifecycle` is the state that plays itself. A `Conversation` is not its
`ConversationState` in the same way, since authors would see on it what is no business of theirs.

In this package `play` is an `EpisodeState` and `state` a `ConversationState`; `episode` and `conversation` are the
objects of the author.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NoReturn, Protocol

import anyio

from runner.chat_requests import ChatCall, ChatRequest
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
from runner.turn_events import DeliverTurn, TurnEventSink

__all__ = ["ChatHandler", "ConversationState", "EpisodeState", "OpenConversation", "checked_tools"]


class OpenConversation(Protocol):
    """As much of a `Conversation`, which stands above this module, as an episode calls."""

    async def call_tools(self, turn: Turn) -> list[Message]:
        """Run the calls of a turn."""
        ...

    async def close(self) -> None:
        """End the conversation."""
        ...


class ChatHandler(Protocol):
    """As much of a `ChatService`, which stands above this module, as an episode and its endpoint call."""

    threads: list[ConversationState]

    @property
    def is_open(self) -> bool:
        """Whether it takes requests of whoever asks."""
        ...

    async def ask(
        self, asked: ChatCall, *, sink: TurnEventSink | None = None, deliver: DeliverTurn | None = None
    ) -> Turn:
        """Have a request answered."""
        ...

    async def count(self, asked: ChatCall) -> int:
        """How many ids the prompt of a request has."""
        ...


class EpisodeState:
    """The state of one attempt, which `Episode` and its conversations share; `Play` adds the life cycle."""

    def __init__(self, key: EpisodeKey, shared: RunShared) -> None:
        self.key = key
        """Which play of which task this is."""
        self.seed = key.seed(shared.seed)
        """The seed of the episode's sampling."""
        self.shared = shared
        """What the episodes of the run share."""
        self.environment = shared.environment
        """The environment that plays; the shared one until a fresh one is made."""
        self.limits = EpisodeLimits(shared.limits)
        """What the episode may still use, and how it ended."""
        self.author_code = AuthorCode(shared.workers)
        """Calls the author's hooks and tools."""
        self.states: dict[str, ConversationState] = {}
        """The conversations so far, by agent, in the order in which they were opened."""
        self.chat_service: ChatHandler
        """Takes the requests of somebody else's loop; `Play` sets it."""
        self.renamed: dict[str, str] = {}
        """What threads of requests are called in the end, by the name that they were opened with."""
        self.faults: list[str] = []
        """What went wrong without changing the outcome, such as a `close()` or a metric that raised."""
        self.exit_stack = ThreadedExitStack(self._leave, f"episode {key.id} of {type(shared.environment).__name__}")
        """What `setup()` entered."""
        self.exit_stack_open = False
        """`setup()` is running, so something may be entered."""
        self.activity = ""
        """What the episode waits for, for people."""
        self.since = 0.0
        """When the episode began to wait for that, in the event loop's time."""
        self._limits_of_setup: Limits | None = None
        self.report_activity("setup")

    def report_activity(self, what: str) -> None:
        """Say what the episode waits for from now on, for the live display and for whoever looks for a stuck one."""
        self.activity = what
        self.since = loop_time()

    def take_limits(self) -> None:
        """Take over the limits that `setup()` may have given its episode."""
        self._limits_of_setup = self.environment.limits
        self.limits.configured = self.shared.limits_of(self._limits_of_setup)

    def check_limits(self) -> None:
        """Refuse limits that were assigned when they had been read."""
        taken, limits = self._limits_of_setup, self.environment.limits
        if taken is not None and limits is not taken and limits != taken:
            raise BadOption(
                "self.limits was assigned after setup(), where nothing reads it: assign it in setup(), or give limits "
                "to the class or the run."
            )

    async def _leave(self, leaving: Callable[[], bool | None], name: str) -> bool | None:
        """Leave one thing of the exit stack in a thread; one that takes too long is left behind, and the next goes on.

        The clock over the whole unwinding stands still, and a cancellation waits: each exit has its own limit.
        """
        seconds = self.limits.configured.close_seconds
        with Waiting(), anyio.CancelScope(shield=True):
            try:
                swallowed: bool | None = await self.author_code.call(leaving, name=name, seconds=seconds)
            except TooSlow as error:
                self.faults.append(f"exit_stack: {error}; its thread was left behind")
                return None
        return swallowed

    def call_ids(self) -> set[str]:
        """The ids of all calls that were made in this episode, as their turns have them."""
        turns = (turn for state in self.states.values() for turn in state.turns)
        return {call.id for turn in turns for call in turn.tool_calls}

    def was_said(self, message: Message) -> bool:
        """Tell whether an agent of this episode said what this assistant message does."""
        if message["role"] != "assistant" or not (message["content"] or message.get("tool_calls")):
            return False
        return any(_says(turn, message) for state in self.states.values() for turn in state.turns)


# Classes and no generators: a turn enters both, and a generator costs three times as much.


class NumberOfTurn:
    """A block that has the number of a turn."""

    __slots__ = ("_number", "_state")

    def __init__(self, state: ConversationState) -> None:
        self._state = state

    def __enter__(self) -> int:
        self._number = self._state.numbered
        self._state.numbered += 1
        return self._number

    def __exit__(self, *_: object) -> None:
        state, number = self._state, self._number
        taken = bool(state.turns) and state.turns[-1].number >= number
        if not taken and state.numbered == number + 1:
            state.numbered = number


class SessionOfTurn:
    """A block that has one of a conversation's sessions."""

    __slots__ = ("_session", "_state")

    def __init__(self, state: ConversationState) -> None:
        self._state = state

    def __enter__(self) -> Session:
        self._session = self._state.take_session()
        return self._session

    def __exit__(self, *_: object) -> None:
        self._state.give_back(self._session)


class ConversationState:
    """What one agent has seen and said, and what waits to be put before it."""

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
        """The agent."""
        self.train = train
        """Whether the conversation becomes a trajectory whose sampled ids are trained on."""
        self.counted = counted
        """Whether the run's sampling and limits are meant for it: it is trained, or evaluated as `main` is where a
        server of messages speaks for it."""
        self.episode = episode
        """The episode it speaks in."""
        self.conversation: OpenConversation
        """The conversation as the author sees it; whoever opens it sets this."""
        self.model = episode.shared.chat_of(name)
        """What speaks for it."""
        check_answers(messages)
        self.cursor = Cursor(checked_tools(tools), list(messages))
        """Where it speaks next."""
        self.turns: list[Turn] = []
        """What it said, by number."""
        self.nodes: list[TurnNode] = []
        """The same as a forest, in the order in which the turns ended."""
        self.segments: list[Segment] = []
        """Its token logs, with the messages that are their view."""
        self._indices: dict[int, int] = {}  # of its segments, by identity
        self.numbered = 0
        """How many numbers of turns were given out."""
        self.requests: list[ChatRequest] = []
        """The requests that were answered here."""
        self.thread = name
        """The name that its seeds follow from: that which it was opened with."""
        self.own_sampling = sampling
        """The sampling that it was opened with; None for none of its own."""
        self._environment_sampling: Sampling | None = None
        self._sampling: Sampling
        # Only an episode's very first request waits behind those of episodes under way; a second agent's does not.
        self._sessions = [self.model.engine.session(late=bool(episode.states), beside=self._another())]
        self._free_sessions = list(self._sessions)

    @cached_property
    def chat(self) -> ChatModel:
        """The model that speaks for it, by ids."""
        assert isinstance(self.model, ChatModel), "who asks for ids has looked what speaks"
        return self.model

    @property
    def context(self) -> int:
        """How many tokens this conversation may hold."""
        limit = self.episode.limits.configured.context
        engine = self.model.engine.context
        return engine if limit is None else min(limit, engine)

    def session(self) -> SessionOfTurn:
        """What the engine keeps of this conversation between turns; of turns at the same time, each has its own."""
        return SessionOfTurn(self)

    def take_session(self) -> Session:
        """One that no turn has; a block with `session` gives it back."""
        if not self._free_sessions:
            self._sessions.append(self.model.engine.session(late=True, beside=self._sessions[0]))
            self._free_sessions.append(self._sessions[-1])
        return self._free_sessions.pop()

    def give_back(self, session: Session) -> None:
        """Leave the session of a turn that is over to the next one."""
        self._free_sessions.append(session)

    def _another(self) -> Session | None:
        """What the same engine keeps of another conversation of the episode, if there is one."""
        engine = self.model.engine
        return next(
            (state._sessions[0] for state in self.episode.states.values() if state.model.engine is engine), None
        )

    def close_sessions(self) -> None:
        """Give the engine's room back."""
        for session in self._sessions:
            self.model.engine.close_session(session)

    def number(self) -> NumberOfTurn:
        """The number of a turn that begins now. What comes to no turn gives it back, unless a later one is given."""
        return NumberOfTurn(self)

    def record(self, cursor: Cursor, node: TurnNode) -> None:
        """Add a turn to its segment and to the forest, move the head behind it, and count it."""
        segment, turn = node.segment, node.turn
        segment.messages.append(node.reply)
        if not self.has(segment):
            self._indices[id(segment)] = len(self.segments)
            self.segments.append(segment)
        turn.segment = self._indices[id(segment)]
        self.nodes.append(node)
        insort(self.turns, turn, key=lambda turn: turn.number)  # one that was begun earlier may end later
        cursor.node, cursor.whole, cursor.again = node, "", None
        self.episode.limits.count(turn, counted=self.counted)

    def refuse_prompt(self, error: str, *, prompt: int, context: int = 0) -> NoReturn:
        """Raise that a prompt of at least so many ids does not fit the context, or another one that a server told."""
        context = context or self.context
        self.episode.limits.refuse_prompt(self.name, error, counted=self.counted, prompt=prompt, context=context)

    def has(self, segment: Segment) -> bool:
        """Whether a segment is one of this conversation's."""
        return id(segment) in self._indices  # all of which live as long as this

    def node_of(self, turn: Turn) -> TurnNode | None:
        """The node of a turn in the forest; None for a turn of somebody else."""
        return next((node for node in reversed(self.nodes) if node.turn is turn), None)

    def sampling(self) -> Sampling:
        """The sampling of the next turn, every field set; the environment's may have been assigned since the last."""
        episode = self.episode
        given = episode.environment.sampling
        if given is not self._environment_sampling:
            if not isinstance(given, Sampling):
                raise BadOption(f"self.sampling = {given!r:.60}: give Sampling(...).")
            self._sampling = episode.shared.sampling_of(
                counted=self.counted, conversation=self.own_sampling, environment=given
            )
            self._environment_sampling = given
        episode.check_limits()
        return self._sampling

    def into_trajectory(self, trajectory: Trajectory) -> None:
        """Hand over what was seen and said; messages that the model never saw stand at the end."""
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
        """Put the segments in the order of their first turns: of turns at the same time, a later one may end first."""
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
    """A segment of messages alone, which end with some that the model never saw."""
    cause = cursor.whole or ("start" if cursor.node is None else BRANCH)
    return Segment(cause=cause, tools=cursor.schemas(), origin=cursor.origin, messages=[*cursor.seen, *cursor.queued])


def _says(turn: Turn, message: Message) -> bool:
    calls = message.get("tool_calls", [])
    return turn.text == message["content"] and calls == [
        call.as_message() for call in turn.tool_calls if call.error is None
    ]


def checked_tools(tools: Sequence[Tool]) -> list[Tool]:
    """The tools as a list of its own; what is no tool is refused, and two of one name."""
    for tool in tools:
        if not isinstance(tool, Tool):
            raise TypeError(f"{tool!r:.60} is no Tool: write Tool(function) for a function with hints and a docstring")
    names = [tool.name for tool in tools]
    for name in names if len(set(names)) < len(names) else ():
        if names.count(name) > 1:
            raise ValueError(f"two tools are called {name!r}: give one another name, Tool(..., name=)")
    return list(tools)
