"""What an episode leaves behind: trajectories of segments and turns, and how they ended."""

from __future__ import annotations

import enum
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runner.engines.base import FinishReason
from runner.messages import Message, ToolCall
from runner.options import Constraint, Sampling, ToolChoice
from runner.tokens.junction import Junction
from runner.tokens.log import Source, TokenLog

if TYPE_CHECKING:
    from runner.tasks import Task

__all__ = ["Group", "Outcome", "Segment", "Timings", "Trajectory", "Turn"]


class Outcome(enum.StrEnum):
    """How an episode ended. The first five are scored; a failed episode has no reward, never 0."""

    COMPLETED = "completed"  # the rollout returned
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"  # the episode's tokens, or a turn's max_tokens right before the end
    CONTEXT_LIMIT = "context_limit"
    TIME_LIMIT = "time_limit"
    ENV_ERROR = "env_error"  # the environment, or an untrained agent of it, failed
    TOKEN_ERROR = "token_error"  # no exact bridge
    ENGINE_ERROR = "engine_error"  # the engine failed; played again up to `retries` times
    CANCELLED = "cancelled"  # kept as partial, played again by the next run

    @property
    def scored(self) -> bool:
        return self in _SCORED

    @property
    def failed(self) -> bool:
        return not self.scored and self is not Outcome.CANCELLED

    @property
    def cut_short(self) -> bool:
        """It is played again by the next run of the same configuration."""
        return self in (Outcome.CANCELLED, Outcome.ENGINE_ERROR)

    def played_again(self, *, failed: bool) -> bool:
        """The same, where also what failed is played again."""
        return self.cut_short or (failed and self.failed)


_SCORED = frozenset(
    {Outcome.COMPLETED, Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT, Outcome.CONTEXT_LIMIT, Outcome.TIME_LIMIT}
)


@dataclass(slots=True)
class Timings:
    """Where the time of a turn went, in seconds.

    Attributes:
        queued: waiting for a place in the engine.
        first_token: from having a place to the first id.
        decode: from the first id to the last.
        environment: the tools or the step that answered it.
    """

    queued: float = 0.0
    first_token: float = 0.0
    decode: float = 0.0
    environment: float = 0.0


@dataclass(slots=True)
class Segment:
    """One contiguous token log and the messages that are its view.

    Attributes:
        log: ids, log-probabilities, sources and weight versions.
        messages: the view, assistant turns included; messages that were added but never put before the model
            stand at the end, `unseen` says how many.
        cause: why it was started: "start"; "reencoded", where the first prompt of a conversation holds what its episode
            sampled, as text; "environment", which changed what was seen; "retry" of the last turn, from
            the same prompt; or the name of what a template lacks for an exact bridge.
        unseen: how many of the last messages the model never saw.
        tools: what could be called, in OpenAI's form, as its prompts were rendered with.
    """

    log: TokenLog = field(default_factory=TokenLog)
    messages: list[Message] = field(default_factory=list)
    cause: str = "start"
    unseen: int = 0
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(slots=True, eq=False)
class Turn:
    """One generation by the model. Only `reward` is writable by an author: credit for this turn.

    Attributes:
        agent: who spoke.
        number: counts the turns of this agent, from 0.
        text: what was said beside reasoning and tool calls, cut before a stop string.
        reasoning: what was thought, or "".
        tool_calls: the calls in order; one that did not parse has `error` set.
        finish: why it ended.
        stop: the stop id, string or cause behind `finish`.
        start: the first sampled id, as an index into `log`; `log.ids[:start]` is exactly the prompt.
        end: one past the last sampled id.
        log: the segment's token log.
        segment: the segment's index in its trajectory.
        seed: of its random numbers; None where it was not seeded.
        sampling: how, every field set but its constraint, which is in `constraint`; None in what older files kept.
        constraint: what could be sampled; who trains on the turn must apply the same token mask.
        tool_choice: whether it might, must or must not call a tool, or the name of the one it must call.
        cached_tokens: ids of the prompt that the engine's prefix cache held, or None.
        junction: how its prompt was made from the turn before; None for the first, whose prompt
            was made from nothing, also where the prompt was replaced before it.
        timings: where its time went.
        dropped: ids that were sampled past a stop string and are not in the log.
        resampled: ids that were sampled before the engine cut the turn for its trainer; the turn is the next try.
        thinking: it was cut inside its reasoning.
    """

    agent: str
    number: int
    log: TokenLog
    start: int
    end: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish: FinishReason = FinishReason.ABORT
    stop: int | str | None = None
    segment: int = 0
    seed: int | None = None
    sampling: Sampling | None = None
    constraint: Constraint | None = None
    tool_choice: ToolChoice = "auto"
    cached_tokens: int | None = None
    junction: Junction | None = None
    timings: Timings = field(default_factory=Timings)
    dropped: int = 0
    resampled: int = 0
    thinking: bool = False
    reward: float = 0.0

    @property
    def retried(self) -> bool:
        """It was taken back and played again in a later segment, so it is not trained on."""
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
    def prompt_ids(self) -> array[int]:
        """The ids that the model saw, shape [prompt], int32; a copy."""
        return self.log.ids[: self.start]


@dataclass(slots=True, eq=False)
class Trajectory:
    """What one agent saw and did in one episode.

    Attributes:
        id: the episode's id, shared by its agents.
        task: the task that was played.
        index: which of the task's group.
        visit: which visit of the task, where a source repeats tasks.
        attempt: counts from 0; earlier attempts failed for the engine's sake.
        agent: who.
        trained: whether its sampled ids are meant to be trained on.
        segments: token logs; one, unless the history was rewritten.
        turns: in order.
        outcome: how the episode ended; the same for all its agents.
        limit: the field of `Limits` that fired, or "max_tokens", or "".
        reason: what `Episode.end(reason)` was given.
        error: what went wrong, for people; "" if nothing.
        reward: the weighted sum of `rewards`; None if it was not scored or one of them is None.
        rewards: each reward of this agent by name, before weighting.
        metrics: by name; one that raised is absent.
        seed: of the episode's sampling.
        seconds: how long it was alive, and of that how long it waited for a place.
    """

    id: str
    task: Task
    index: int
    agent: str
    seed: int
    visit: int = 0
    attempt: int = 0
    trained: bool = True
    segments: list[Segment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    outcome: Outcome = Outcome.CANCELLED
    limit: str = ""
    limit_agent: str = ""
    reason: str = ""
    error: str = ""
    reward: float | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    waited: float = 0.0

    @property
    def messages(self) -> list[Message]:
        """The view of the last segment."""
        return self.segments[-1].messages if self.segments else []

    @property
    def text(self) -> str:
        """What was said in the last turn; "" if it never spoke."""
        return self.turns[-1].text if self.turns else ""

    @property
    def sampled(self) -> int:
        """How many ids were sampled."""
        return sum(turn.end - turn.start for turn in self.turns)


@dataclass(slots=True, eq=False)
class Group:
    """The trajectories of one agent over the n episodes of one task.

    Attributes:
        task: the task.
        agent: whose trajectories these are.
        trajectories: by index; failed ones are among them, with reward None.
        rng: the task's random numbers, for the group's own use.
        complete: every episode of the group has been played.
    """

    task: Task
    agent: str
    trajectories: Sequence[Trajectory]
    rng: random.Random
    complete: bool = True
