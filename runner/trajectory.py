"""The records of an episode: trajectories of segments and turns, and their outcome."""

from __future__ import annotations

import enum
import random
import reprlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from runner.attachments import Attachment
from runner.chat_requests import ChatRequest
from runner.engines.base import FinishReason
from runner.engines.message_engine import Usage
from runner.messages import Message, ToolCall
from runner.notebook import group_html, trajectory_html
from runner.options import Constraint, Sampling, ToolChoice
from runner.tokens.junction import Junction
from runner.tokens.log import Source, TokenLog
from runner.tokens.side_data import RoutedExperts, SamplingMasks
from runner.tokens.top_logprobs import TopLogprobs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from runner.tasks import Task

__all__ = ["AGAIN", "BRANCH", "RETRY", "Group", "Origin", "Outcome", "Segment", "Timings", "Trajectory", "Turn"]

RETRY = "retry"
"""The cause of a segment that samples a turn again from the same prompt, since the first turn was withdrawn."""

AGAIN = "again"
"""The cause of a segment that samples one more turn from the prompt of an earlier turn. Both turns are trained on."""

BRANCH = "branch"
"""The cause of a segment that continues after a turn of another segment, with exactly the ids up to that turn."""


class Outcome(enum.StrEnum):
    """The outcome of an episode. The first five are scored. The reward of a failed episode is None, not 0."""

    COMPLETED = "completed"
    """The rollout returned."""
    TURN_LIMIT = "turn_limit"
    """`Limits.turns` was reached."""
    TOKEN_LIMIT = "token_limit"
    """`Limits.tokens` was reached, or the last turn was cut at its `max_tokens`."""
    CONTEXT_LIMIT = "context_limit"
    """A prompt did not fit the context, or the last turn filled it."""
    TIME_LIMIT = "time_limit"
    """The episode took longer than `Limits.seconds`."""
    ENV_ERROR = "env_error"
    """The environment or one of its untrained agents failed."""
    TOKEN_ERROR = "token_error"
    """There is no exact prompt: the template lacks a property that a bridge needs."""
    ENGINE_ERROR = "engine_error"
    """The engine failed; the episode was played again up to `retries` times."""
    CANCELLED = "cancelled"
    """The episode was cut short. It is kept as partial, and the next run plays it again."""

    @property
    def scored(self) -> bool:
        """True if the episode has rewards."""
        return self in _SCORED

    @property
    def failed(self) -> bool:
        """True if the episode failed, so that it shows nothing about the agent."""
        return not self.scored and self is not Outcome.CANCELLED

    @property
    def cut_short(self) -> bool:
        """True if the next run of the same configuration plays the episode again."""
        return self in (Outcome.CANCELLED, Outcome.ENGINE_ERROR)

    def played_again(self, *, failed: bool) -> bool:
        """Return whether the next run plays the episode again.

        Args:
            failed: True if the next run also plays failed episodes again.
        """
        return self.cut_short or (failed and self.failed)


_SCORED = frozenset(
    {Outcome.COMPLETED, Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT, Outcome.CONTEXT_LIMIT, Outcome.TIME_LIMIT}
)


@dataclass(slots=True)
class Timings:
    """The parts of a turn's time, in seconds."""

    queued: float = 0.0
    """Time that the turn waited for a place in the engine."""
    first_token: float = 0.0
    """Time from getting that place to the first sampled token."""
    decode: float = 0.0
    """Time from the first sampled token to the last."""
    environment: float = 0.0
    """Time that the tools or the step took to answer the turn."""

    def add(self, other: Timings) -> None:
        """Add the time of another turn."""
        self.queued += other.queued
        self.first_token += other.first_token
        self.decode += other.decode
        self.environment += other.environment


# The following classes have a short `repr`. The `repr` of an asyncio task contains its result, and asyncio computes it
# at the end of every run. With all ids of all turns, this took seconds for long runs.


@dataclass(slots=True, repr=False)
class Origin:
    """The turn that a segment follows."""

    agent: str
    """The agent that sampled the turn."""
    number: int
    """The number of the turn among the turns of its agent."""
    turn: Turn | None = None
    """The turn itself; None if it belongs to another agent and was read from a file."""

    def __repr__(self) -> str:
        return f"<Origin turn {self.number} of {self.agent!r}>"


@dataclass(slots=True, repr=False)
class Segment:
    """One contiguous token log, and its content as messages."""

    log: TokenLog = field(default_factory=TokenLog)
    """The token ids, with log-probabilities, sources and weight versions."""
    messages: list[Message] = field(default_factory=list)
    """The messages of the ids, assistant turns included. Messages that were added but were in no prompt are at the end;
    `unseen` is their number."""
    cause: str = "start"
    """The reason why the segment begins.

    - "start": a conversation begins.
    - "reencoded": a conversation begins, and its first prompt contains, as text, ids that its episode sampled.
    - "branch": the segment continues after a turn of another segment, with exactly the ids up to that turn.
    - "again", "retry": a turn is sampled once more from the same prompt. With "retry", the first turn is withdrawn.
    - "environment": the environment changed the history or the tools, or a client dropped all turns.
    - "foreign", "retold", "edited", "tools": a request changed the history or the tools.
    - "template": the history policy is "fork", and the template writes the history with other ids.
    - "client": the history of a request is used as it was sent.
    - Another text: the name of a missing property that an exact bridge needs.
    """
    unseen: int = 0
    """Number of messages at the end that were in no prompt of the model."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The tools that could be called, in OpenAI's form. The prompts were rendered with them."""
    origin: Origin | None = None
    """The turn that the segment follows; None if it follows none."""
    shared: int = 0
    """Number of ids at the segment's beginning that are copied from `origin`; 0 if the whole prompt was rendered."""

    def __repr__(self) -> str:
        return f"<Segment {self.cause!r}: {len(self.messages)} messages, {len(self.log)} ids>"


@dataclass(slots=True, eq=False, repr=False)
class Turn:
    """One generation by the model. An author may change only `reward`, the credit for this turn."""

    agent: str
    """The agent that sampled the turn."""
    number: int
    """The number of the turn among the turns of its agent, from 0."""
    log: TokenLog
    """The token log of the turn's segment."""
    start: int
    """The index of the first sampled id in `log`; `log.ids[:start]` is exactly the prompt."""
    end: int
    """The index after the last sampled id."""
    text: str = ""
    """The text beside reasoning and tool calls, cut before a stop string."""
    reasoning: str = ""
    """The reasoning; "" if the turn has none."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """The calls in order; a call that could not be parsed has `error` set."""
    finish: FinishReason = FinishReason.ABORT
    """The reason why the turn ended."""
    stop: int | str | None = None
    """The stop id or the stop string that ended the turn, the limit that it reached, or the text of an error; else
    None."""
    segment: int = 0
    """The index of the turn's segment in its trajectory."""
    seed: int | None = None
    """The seed of the turn's random numbers; None if it was not seeded."""
    sampling: Sampling | None = None
    """The sampling of the turn, with every field set. The constraint is not here but in `constraint`. None if no run
    sampled the turn."""
    constraint: Constraint | None = None
    """The constraint on the ids that could be sampled, or None. Training must apply the same token mask."""
    tool_choice: ToolChoice = "auto"
    """"auto", "required" or "none": the turn may, must or must not call a tool. Other texts name a required tool."""
    cached_tokens: int | None = None
    """Number of ids of the prompt that the engine's prefix cache held; None if the engine does not report it."""
    junction: Junction | None = None
    """The record of how the prompt was made from the turn before. None for the first turn, even if it was sampled
    again, since its prompt follows no turn."""
    timings: Timings = field(default_factory=Timings)
    """The parts of the turn's time."""
    dropped: int = 0
    """Number of ids sampled past a stop string; they are not in the log."""
    resampled: int = 0
    """Number of ids that were sampled before the engine cut the turn for its trainer. They are not in the log."""
    thinking: bool = False
    """True if the turn was cut inside its reasoning."""
    usage: Usage | None = None
    """The server's token counts and model; None for an engine of token ids."""
    reward: float = 0.0
    """Credit for this turn alone, set by the environment's author."""
    left_out: bool = False
    """True if `Conversation.keep` dropped the turn. It is then not trained on."""
    handle: str = ""
    """The name of the turn for a client that requested it with `Episode.chat`; "" for any other turn."""

    def as_message(self) -> Message:
        """Return the turn as an assistant message for a client to send back: its call ids name the turn."""
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
        """True if the prompt and the samples of the turn are available as token ids; a chat API returns no ids."""
        return self.start > 0

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt: the ids, or the server's count."""
        if self.usage is not None:
            return self.usage.prompt_tokens or 0
        return self.start

    @property
    def tokens(self) -> int:
        """Number of sampled tokens: the ids, or the server's count."""
        if self.usage is not None:
            return self.usage.completion_tokens or 0
        return self.end - self.start

    @property
    def retried(self) -> bool:
        """True if the turn was withdrawn: it was sampled again in a later segment, or left out by `Conversation.keep`.

        A withdrawn turn is not trained on.
        """
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
        """The data of `top_ids` and `top_logprobs` in flat arrays; None if no such ids were requested or returned."""
        # A turn without ids, such as one that was cut at once, starts at the same index as the next turn.
        return self.log.top_logprobs.get(self.start) if self.end > self.start else None

    @property
    def top_ids(self) -> NDArray[np.int32]:
        """The most likely ids at the position of each sampled id, the most likely first, int32; a copy.

        Shape [sampled, n] with the n of `Sampling(logprobs=n)`; n is 0 if no such ids were requested or returned. The
        sampled id is among them if it is one of the n most likely.
        """
        import numpy as np  # imported here, since most users read no such arrays

        top = self.top
        return np.empty((self.end - self.start, 0), np.int32) if top is None else top.id_rows()

    @property
    def top_logprobs(self) -> NDArray[np.float32]:
        """The log-probability of each of `top_ids` in nats, shape [sampled, n], float32; a copy.

        Like `logprobs`, they are of the distribution that was sampled from: minus infinity for ids that could not be
        sampled.
        """
        import numpy as np

        top = self.top
        return np.empty((self.end - self.start, 0), np.float32) if top is None else top.logprob_rows()

    @property
    def sampling_masks(self) -> SamplingMasks | None:
        """The ids that could be sampled at the position of each sampled id; None if the engine did not return them."""
        side = self.log.side_data.get(self.start) if self.end > self.start else None
        return None if side is None else side.masks

    @property
    def routed_experts(self) -> RoutedExperts | None:
        """The experts at the positions that no earlier turn of the segment covers; None if the engine returned none."""
        side = self.log.side_data.get(self.start) if self.end > self.start else None
        return None if side is None else side.experts

    @property
    def prompt_ids(self) -> array[int]:
        """The ids that the model saw, shape [prompt], int32; a copy."""
        return self.log.ids[: self.start]


@dataclass(slots=True, eq=False, repr=False)
class Trajectory:
    """The record of one agent in one episode."""

    id: str
    """The episode's id, shared by its agents."""
    task: Task
    """The task that was played."""
    index: int
    """The number of the episode within the task's group."""
    agent: str
    """The name of the agent, such as `main`."""
    seed: int
    """The seed of the episode's sampling."""
    visit: int = 0
    """Number of times that a repeating source had returned this task before."""
    attempt: int = 0
    """Number of earlier attempts to play the episode. They were cancelled, failed, or had weights that were too old."""
    trained: bool = True
    """True if the agent's samples are meant to be trained on."""
    segments: list[Segment] = field(default_factory=list)
    """The segments in order. There is one, unless the history was rewritten, or turns branch or were sampled again."""
    turns: list[Turn] = field(default_factory=list)
    """The agent's turns, in order."""
    outcome: Outcome = Outcome.CANCELLED
    """The outcome of the episode; the same for all its agents."""
    limit: str = ""
    """The field of `Limits` that ended the episode, or "max_tokens"; "" if no limit ended it."""
    limit_agent: str = ""
    """The agent that reached `limit`; "" if no agent did."""
    reason: str = ""
    """The argument of `Episode.end(reason)`; "" if it was not called."""
    error: str = ""
    """The error, for people; "" if there is none."""
    reward: float | None = None
    """The weighted sum of `rewards`; None if the episode was not scored, or one of them is None."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """The rewards of this agent by name, before weighting."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The metrics by name; a metric that raised an error is absent."""
    seconds: float = 0.0
    """Seconds from the start of the episode to its end."""
    waited: float = 0.0
    """The part of `seconds` in which the agent's turns waited for a place in the engine."""
    thread: str = ""
    """The name from which the agent's seeds are derived, if the agent got its own name only at the end, as threads of
    `Episode.chat` do; otherwise ""."""
    requests: list[ChatRequest] = field(default_factory=list)
    """The requests of `Episode.chat` that the agent answered, in order."""
    attachments: list[Attachment] = field(default_factory=list)
    """Artefacts of `Episode.attach`, in order. All artefacts of an episode are in its first trajectory."""

    def __repr__(self) -> str:
        return (
            f"<Trajectory {self.id!r} {self.agent!r}: {self.outcome}, reward {self.reward}, {len(self.turns)} turns, "
            f"{self.sampled} sampled ids>"
        )

    def _repr_html_(self) -> str:
        return trajectory_html(self)

    @property
    def branched(self) -> bool:
        """True if turns may have been sampled at the same time. Numbers of turns without a result are then missing."""
        causes = [segment.cause for segment in self.segments]
        return bool(self.requests) or causes.count("start") > 1 or AGAIN in causes or BRANCH in causes

    @property
    def messages(self) -> list[Message]:
        """The messages of the last segment."""
        return self.segments[-1].messages if self.segments else []

    @property
    def text(self) -> str:
        """The text of the last turn that was not left out; "" if there is none."""
        return next((turn.text for turn in reversed(self.turns) if not turn.left_out), "")

    @property
    def sampled(self) -> int:
        """Number of sampled ids."""
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
    """The task's random numbers, for use by a group reward."""
    complete: bool = True
    """True if every episode of the group has been played."""

    def __getitem__(self, index: object) -> NoReturn:
        """Raise an error with the fix. A loop over the group calls this too.

        Raises:
            TypeError: always.
        """
        raise TypeError("a Group is not a list: use group.trajectories")

    @property
    def has_spread(self) -> bool:
        """True if two rewards of the group differ as 32-bit numbers. Otherwise all advantages of `grpo` are 0."""
        return len(set(array("f", (each.reward for each in self.trajectories if each.reward is not None)))) > 1

    def __repr__(self) -> str:
        return f"<Group {self.task.id!r} {self.agent!r}: {len(self.trajectories)} trajectories>"

    def _repr_html_(self) -> str:
        return group_html(self)
