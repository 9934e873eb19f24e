"""The state of one episode and of its conversations, as the modules of this package share it.

What is here decides little: `prompting` makes prompts of it, `turn` samples and records, `Conversation` and `Episode`
are what the author sees of it, and `Play` in `lifecycle` is the state that plays itself. A `Conversation` is not its
`ConversationState` in the same way, since authors would see on it what is no business of theirs.

In this package `play` is an `EpisodeState` and `state` a `ConversationState`; `episode` and `conversation` are the
objects of the author.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from runner.concurrency.clocks import Waiting
from runner.concurrency.exit_stack import ThreadedExitStack
from runner.concurrency.user_code import AuthorCode, TooSlow
from runner.episode.key import EpisodeKey
from runner.episode.limits import EpisodeLimits
from runner.episode.shared import RunShared
from runner.errors import BadOption
from runner.messages import Message, check_answers
from runner.options import Limits, Sampling
from runner.tools.tool import Tool
from runner.trajectory import Segment, Trajectory, Turn

__all__ = ["ConversationState", "EpisodeState", "Retry", "checked_tools"]


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
        self.since = anyio.current_time()

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

    def was_said(self, message: Message) -> bool:
        """Tell whether an agent of this episode said what this assistant message does."""
        if message["role"] != "assistant" or not (message["content"] or message.get("tool_calls")):
            return False
        return any(_says(turn, message) for state in self.states.values() for turn in state.turns)


class ConversationState:
    """What one agent has seen and said, and what waits to be put before it."""

    def __init__(
        self,
        name: str,
        play: EpisodeState,
        *,
        train: bool,
        tools: Sequence[Tool],
        messages: Sequence[Message],
        sampling: Sampling | None,
    ) -> None:
        self.name = name
        """The agent."""
        self.train = train
        """Whether the conversation becomes a trajectory whose sampled ids are trained on."""
        self.play = play
        """The episode it speaks in."""
        self.conversation: Any = None
        """The same as the author sees it: a `Conversation`, which stands above this module and has no type here."""
        self.chat = play.shared.chat_of(name)
        """The model that speaks for it."""
        self.tools = checked_tools(tools)
        """What it may call now."""
        self.turns: list[Turn] = []
        """What it said, in order."""
        self.segments: list[Segment] = []
        """Its token logs, with the messages that are their view."""
        self.segment: Segment | None = None
        """The segment that the next prompt extends; None where that prompt is to be rendered from the start."""
        self.cause = "start"
        """The reason that the next segment is given if the next prompt begins one."""
        self.retry: Retry | None = None
        """The turn that the next segment plays again."""
        check_answers(messages)
        self.queued = list(messages)
        """Messages that were added and not put before the model yet."""
        self.plain = True
        """Whether every message so far is plain, and gives a template nothing special to look back at (`is_plain`)."""
        self.calls = 0
        """How many calls it made, for the ids of the next ones."""
        # Of the assistant message that was sampled last. A turn that goes on with a cut one is read from there again.
        self.message_start = 0
        self.calls_before_message = 0
        self._own_sampling = sampling
        self._environment_sampling: Sampling | None = None
        self._sampling: Sampling
        # Only an episode's very first request waits behind those of episodes under way; a second agent's does not.
        self.session = self.chat.engine.session(late=bool(play.states))
        """What the engine keeps of this conversation between turns."""

    @property
    def context(self) -> int:
        """How many tokens this conversation may hold."""
        limit = self.play.limits.configured.context
        engine = self.chat.engine.context
        return engine if limit is None else min(limit, engine)

    def schemas(self) -> list[dict[str, Any]]:
        """The tools in OpenAI's form, as templates read them."""
        return [tool.as_openai() for tool in self.tools]

    def sampling(self) -> Sampling:
        """The sampling of the next turn, every field set; the environment's may have been assigned since the last."""
        play = self.play
        given = play.environment.sampling
        if given is not self._environment_sampling:
            if not isinstance(given, Sampling):
                raise BadOption(f"self.sampling = {given!r:.60}: give Sampling(...).")
            self._sampling = play.shared.sampling_of(
                train=self.train, conversation=self._own_sampling, environment=given
            )
            self._environment_sampling = given
        play.check_limits()
        return self._sampling

    def into_trajectory(self, trajectory: Trajectory) -> None:
        """Hand over what was seen and said; messages that the model never saw stand at the end."""
        segment = self.segment
        if segment is None and self.queued:
            segment = Segment(cause=self.cause, tools=self.schemas())
            self.segments.append(segment)
        if segment is not None and self.queued:
            segment.messages.extend(self.queued)
            segment.unseen = len(self.queued)
        self.segment = None
        trajectory.segments = self.segments
        trajectory.turns = self.turns


@dataclass(frozen=True, slots=True)
class Retry:
    """The last turn is to be played again, from the very tokens of its prompt."""

    segment: Segment
    """Where it was played."""
    start: int
    """Its first sampled token, where its prompt ends."""
    messages: Sequence[Message]
    """The messages of its prompt."""


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
