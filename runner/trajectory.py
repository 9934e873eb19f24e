"""What an episode leaves behind: trajectories of segments and turns, and how they ended."""

from __future__ import annotations

import enum
import random
import reprlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runner.chat_requests import ChatRequest
from runner.engines.base import FinishReason
from runner.engines.message_engine import Usage
from runner.messages import Message, ToolCall
from runner.options import Constraint, Sampling, ToolChoice
from runner.tokens.junction import Junction
from runner.tokens.log import Source, TokenLog
from runner.tokens.top_logprobs import TopLogprobs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from runner.tasks import Task

__all__ = ["AGAIN", "BRANCH", "RETRY", "Group", "Origin", "Outcome", "Segment", "Timings", "Trajectory", "Turn"]

RETRY = "retry"
"""The cause of a segment that samples a turn anew, from the same prompt; that turn is taken back."""

AGAIN = "again"
"""The cause of a segment that samples a turn once more, from the same prompt; that turn is trained as it was."""

BRANCH = "branch"
"""The cause of a segment that goes on behind a turn of another one, from its very ids."""


class Outcome(enum.StrEnum):
    """How an episode ended. The first five are scored; a failed episode has no reward, never 0."""

    COMPLETED = "completed"
    """The rollout returned."""
    TURN_LIMIT = "turn_limit"
    """`Limits.turns` was reached."""
    TOKEN_LIMIT = "token_limit"
    """`Limits.tokens` was reached, or the last turn was cut at its `max_tokens`."""
    CONTEXT_LIMIT = "context_limit"
    """A prompt did not fit the context, or the last turn filled it."""
    TIME_LIMIT = "time_limit"
    """The play took longer than `Limits.seconds`."""
    ENV_ERROR = "env_error"
    """The environment failed, or an untrained agent of it."""
    TOKEN_ERROR = "token_error"
    """There is no exact prompt: the template lacks what a bridge needs."""
    ENGINE_ERROR = "engine_error"
    """The engine failed; the episode was played again up to `retries` times."""
    CANCELLED = "cancelled"
    """The episode was cut short. It is kept as partial, and the next run plays it again."""

    @property
    def scored(self) -> bool:
        """Whether the episode has rewards."""
        return self in _SCORED

    @property
    def failed(self) -> bool:
        """Whether something went wrong, so that nothing can be said about the agent."""
        return not self.scored and self is not Outcome.CANCELLED

    @property
    def cut_short(self) -> bool:
        """Whether the next run of the same configuration plays the episode again."""
        return self in (Outcome.CANCELLED, Outcome.ENGINE_ERROR)

    def played_again(self, *, failed: bool) -> bool:
        """Tell whether the next run plays the episode again.

        Args:
            failed: the next run also plays again what failed.
        """
        return self.cut_short or (failed and self.failed)


_SCORED = frozenset(
    {Outcome.COMPLETED, Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT, Outcome.CONTEXT_LIMIT, Outcome.TIME_LIMIT}
)


@dataclass(slots=True)
class Timings:
    """Where the time of a turn went, in seconds."""

    queued: float = 0.0
    """The time that the turn waited for a place in the engine."""
    first_token: float = 0.0
    """The time from having that place to the first sampled token."""
    decode: float = 0.0
    """The time from the first sampled token to the last."""
    environment: float = 0.0
    """The time that the tools or the step took to answer the turn."""

    def add(self, other: Timings) -> None:
        """Count the time of another turn too."""
        self.queued += other.queued
        self.first_token += other.first_token
        self.decode += other.decode
        self.environment += other.environment


# These are shown in one line each, whatever they hold. Python shows what a task gave wherever it shows the task, and
# asyncio does so at the end of every run: all ids, once for each turn, took seconds where there were many.


@dataclass(slots=True, repr=False)
class Origin:
    """The turn that a segment follows."""

    agent: str
    """The agent that spoke."""
    number: int
    """The number of the turn among those of its agent."""
    turn: Turn | None = None
    """The turn itself; None where it is another agent's and was read from a file."""

    def __repr__(self) -> str:
        return f"<Origin turn {self.number} of {self.agent!r}>"


@dataclass(slots=True, repr=False)
class Segment:
    """One contiguous token log, and the messages that are its view."""

    log: TokenLog = field(default_factory=TokenLog)
    """The token ids, with log-probabilities, sources and weight versions."""
    messages: list[Message] = field(default_factory=list)
    """The messages that the ids stand for, assistant turns included. Messages that were added but never put before the
    model stand at the end; `unseen` says how many."""
    cause: str = "start"
    """Why the segment was begun: "start"; "reencoded" where the first prompt of a conversation holds, as text, what its
    episode sampled; "branch" where it goes on from a turn of another segment by its very ids; "again" and "retry" where
    a turn is sampled once more from the same prompt, the latter where that is taken back; "environment" where that
    changed what was seen; "foreign", "retold", "edited" and "tools" where a request did, "client" where its history is
    taken as it is sent; else the name of what a template lacks for an exact bridge."""
    unseen: int = 0
    """How many of the last messages the model never saw."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The tools that could be called, in OpenAI's form, as the prompts were rendered with them."""
    origin: Origin | None = None
    """The turn that the segment follows; None where it follows none."""
    shared: int = 0
    """How many of its first ids are a copy of those that `origin` has; 0 where its prompt was rendered whole."""

    def __repr__(self) -> str:
        return f"<Segment {self.cause!r}: {len(self.messages)} messages, {len(self.log)} ids>"


@dataclass(slots=True, eq=False, repr=False)
class Turn:
    """One generation by the model. Only `reward` is writable by an author: credit for this turn."""

    agent: str
    """The agent that spoke."""
    number: int
    """The number of the turn among those of its agent, from 0."""
    log: TokenLog
    """The token log of the turn's segment."""
    start: int
    """The index of the first sampled id in `log`; `log.ids[:start]` is exactly the prompt."""
    end: int
    """One past the index of the last sampled id."""
    text: str = ""
    """What was said beside reasoning and tool calls, cut before a stop string."""
    reasoning: str = ""
    """What was thought, or ""."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """The calls in order; one that did not parse has `error` set."""
    finish: FinishReason = FinishReason.ABORT
    """Why the turn ended."""
    stop: int | str | None = None
    """The stop id, the stop string or the limit behind `finish`."""
    segment: int = 0
    """The index of the turn's segment in its trajectory."""
    seed: int | None = None
    """The seed of the turn's random numbers; None where it was not seeded."""
    sampling: Sampling | None = None
    """How the turn was sampled, every field set but its constraint, which is in `constraint`; None where no run
    sampled it."""
    constraint: Constraint | None = None
    """What could be sampled at all. Who trains on the turn must apply the same token mask."""
    tool_choice: ToolChoice = "auto"
    """Whether the turn might, must or must not call a tool, or the name of the tool that it must call."""
    cached_tokens: int | None = None
    """How many ids of the prompt the engine's prefix cache held; None where the engine does not say."""
    junction: Junction | None = None
    """How the prompt was made from the turn before; None for the first turn, whose prompt was made from nothing, also
    where it was replaced before."""
    timings: Timings = field(default_factory=Timings)
    """Where the time of the turn went."""
    dropped: int = 0
    """How many ids were sampled past a stop string; they are not in the log."""
    resampled: int = 0
    """How many ids were sampled before the engine cut the turn for its trainer; the turn is the next try."""
    thinking: bool = False
    """The turn was cut inside its reasoning."""
    usage: Usage | None = None
    """What the server says that the turn took, and which model answered; None for an engine of token ids."""
    reward: float = 0.0
    """Credit for this turn alone, for the environment's author to assign."""
    left_out: bool = False
    """It was left behind by `Conversation.keep`, and is not trained on."""
    handle: str = ""
    """What names the turn to a client that asked for it with `Episode.chat`; "" for any other turn."""

    def as_message(self) -> Message:
        """What was said as an assistant message, as a client is to send it back: its call ids name the turn."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        calls = [
            {**call.as_message(), "id": f"{self.handle}_{number}" if self.handle else call.id}
            for number, call in enumerate(self.tool_calls)
            if call.error is None
        ]
        if calls:
            message["tool_calls"] = calls  # type: ignore[typeddict-item]  # a call with another id
        return message

    def __repr__(self) -> str:
        said = reprlib.repr(self.text)
        if self.tool_calls:
            said += f", calls {reprlib.repr([each.name for each in self.tool_calls])}"
        length = f"{self.end - self.start} ids" if self.usage is None else f"{self.tokens} tokens"
        return f"<Turn {self.number} of {self.agent!r}: {said}, {length}, {self.finish}>"

    @property
    def has_ids(self) -> bool:
        """Whether its prompt and what was sampled are there as token ids: an engine of messages gives none."""
        return self.start > 0

    @property
    def prompt_tokens(self) -> int:
        """How many tokens its prompt had: its ids, or as many as the server counted that gives none."""
        if self.usage is not None:
            return self.usage.prompt_tokens or 0
        return self.start

    @property
    def tokens(self) -> int:
        """How many tokens were sampled: its ids, or as many as the server counted that gives none."""
        if self.usage is not None:
            return self.usage.completion_tokens or 0
        return self.end - self.start

    @property
    def retried(self) -> bool:
        """Whether it was taken back, as one that was played again in a later segment; then it is not trained on."""
        return self.end > self.start and self.log.sources[self.start] == Source.RETRIED

    @property
    def token_ids(self) -> array[int]:
        """The sampled ids, shape [sampled], int32; a copy."""
        return self.log.ids[self.start : self.end]

    @property
    def logprobs(self) -> array[float]:
        """The log-probability of each sampled id in nats, shape [sampled], float32; a copy."""
        return self.log.logprobs[self.start : self.end]

    @property
    def top(self) -> TopLogprobs | None:
        """What `top_ids` and `top_logprobs` are made of, in flat arrays; None where none were asked for or given."""
        # A turn of no ids, as one that was cut at once, begins where the next one does.
        return self.log.top_logprobs.get(self.start) if self.end > self.start else None

    @property
    def top_ids(self) -> NDArray[np.int32]:
        """The likeliest ids in the place of each sampled one, the likeliest first, int32; a copy.

        Shape [sampled, n] with the n of `Sampling(logprobs=n)`, which is 0 where none were asked for or given. The
        sampled id is among them where it is one of the n likeliest.
        """
        import numpy as np  # here, since what looks at no such array is imported without it

        top = self.top
        return np.empty((self.end - self.start, 0), np.int32) if top is None else top.id_rows()

    @property
    def top_logprobs(self) -> NDArray[np.float32]:
        """The log-probability of each of `top_ids` in nats, shape [sampled, n], float32; a copy.

        They are of the distribution that was sampled from, as `logprobs`: minus infinity for what could not be sampled.
        """
        import numpy as np

        top = self.top
        return np.empty((self.end - self.start, 0), np.float32) if top is None else top.logprob_rows()

    @property
    def prompt_ids(self) -> array[int]:
        """The ids that the model saw, shape [prompt], int32; a copy."""
        return self.log.ids[: self.start]


@dataclass(slots=True, eq=False, repr=False)
class Trajectory:
    """What one agent saw and did in one episode."""

    id: str
    """The episode's id, shared by its agents."""
    task: Task
    """The task that was played."""
    index: int
    """The number of the episode within the task's group."""
    agent: str
    """The agent."""
    seed: int
    """The seed of the episode's sampling."""
    visit: int = 0
    """How often a source that repeats its tasks gave this one before."""
    attempt: int = 0
    """How often the episode was played before: the engine had failed, or its weights were too old in the end."""
    trained: bool = True
    """Whether what the agent sampled is meant to be trained on."""
    segments: list[Segment] = field(default_factory=list)
    """The token logs: one, unless the history was rewritten."""
    turns: list[Turn] = field(default_factory=list)
    """The agent's turns, in order."""
    outcome: Outcome = Outcome.CANCELLED
    """How the episode ended; the same for all its agents."""
    limit: str = ""
    """The field of `Limits` that fired, or "max_tokens", or ""."""
    limit_agent: str = ""
    """The agent whose limit it was, or ""."""
    reason: str = ""
    """What `Episode.end(reason)` was given."""
    error: str = ""
    """What went wrong, for people; "" if nothing."""
    reward: float | None = None
    """The weighted sum of `rewards`; None if the episode was not scored, or one of them is None."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """The rewards of this agent by name, before weighting."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The metrics by name; one that raised is absent."""
    seconds: float = 0.0
    """How long the episode was alive."""
    waited: float = 0.0
    """How many of those seconds its turns waited for a place in the engine."""
    thread: str = ""
    """The name that its seeds follow from, where it was given its own only at the end, as threads of `Episode.chat`
    are; else ""."""
    requests: list[ChatRequest] = field(default_factory=list)
    """The requests of `Episode.chat` that it answered, in order."""

    def __repr__(self) -> str:
        return (
            f"<Trajectory {self.id!r} {self.agent!r}: {self.outcome}, reward {self.reward}, {len(self.turns)} turns, "
            f"{self.sampled} sampled ids>"
        )

    @property
    def branched(self) -> bool:
        """Whether turns may have been sampled at the same time; the number of one that came to nothing is missing."""
        causes = [segment.cause for segment in self.segments]
        return bool(self.requests) or causes.count("start") > 1 or AGAIN in causes or BRANCH in causes

    @property
    def messages(self) -> list[Message]:
        """The messages of the last segment."""
        return self.segments[-1].messages if self.segments else []

    @property
    def text(self) -> str:
        """What was said in the last turn that was not left out; "" if it never spoke."""
        return next((turn.text for turn in reversed(self.turns) if not turn.left_out), "")

    @property
    def sampled(self) -> int:
        """How many ids were sampled."""
        return sum(turn.end - turn.start for turn in self.turns)


@dataclass(slots=True, eq=False, repr=False)
class Group:
    """The trajectories of one agent over the episodes of one task."""

    task: Task
    """The task."""
    agent: str
    """The agent whose trajectories these are."""
    trajectories: Sequence[Trajectory]
    """The trajectories by index; failed ones are among them, with reward None."""
    rng: random.Random
    """The task's random numbers, for the group's own use."""
    complete: bool = True
    """Every episode of the group has been played."""

    def __repr__(self) -> str:
        return f"<Group {self.task.id!r} {self.agent!r}: {len(self.trajectories)} trajectories>"
