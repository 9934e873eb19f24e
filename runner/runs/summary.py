"""The summary of a run: constant memory, however many episodes."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from runner.engines.base import FinishReason
from runner.engines.message_engine import Usage
from runner.tokens.junction import Anchor, Close, Result, Seam
from runner.trajectory import Outcome, Timings, Trajectory, Turn

__all__ = ["Mean", "Summary", "TokenCounts", "UsageCounts"]

SOLVED = 1.0
"""The reward from which on an episode counts as solved."""


@dataclass(slots=True)
class Mean:
    """A mean and its standard error, by Welford's recurrence."""

    count: int = 0
    """How many values there were."""

    mean: float = math.nan
    """The mean of the values; NaN if there are none, since no value is not the same as 0."""

    _squares: float = 0.0

    def add(self, value: float | None) -> None:
        """Count a value, if there is one."""
        if value is None:
            return
        self.count += 1
        before = self.mean if self.count > 1 else value  # the mean of nothing is NaN, and would stay NaN
        delta = value - before
        self.mean = before + delta / self.count
        self._squares += delta * (value - self.mean)

    @property
    def standard_error(self) -> float:
        """The standard error of the mean; NaN below two values."""
        return math.sqrt(self._squares / (self.count - 1) / self.count) if self.count > 1 else math.nan

    def as_dict(self) -> dict[str, Any]:
        """As JSON, which has no NaN: None stands for it."""
        error = self.standard_error
        return {
            "mean": self.mean if self.count else None,
            "standard_error": None if math.isnan(error) else error,
            "count": self.count,
        }


@dataclass(slots=True)
class TokenCounts:
    """Ids of all turns."""

    prompt: int = 0
    """Ids that the model was given, every turn's whole prompt."""

    cached: int = 0
    """Ids of those that the engine's prefix cache held, where the engine says so."""

    sampled: int = 0
    """Ids that the model sampled."""

    bridged: int = 0
    """Ids that were put between two turns of the model."""


@dataclass(slots=True)
class UsageCounts:
    """What servers of messages say that the turns took, where they do."""

    prompt: int = 0
    """Tokens of the prompts."""

    completion: int = 0
    """Tokens that were sampled."""

    cached: int = 0
    """Tokens of the prompts that were cached."""

    reasoning: int = 0
    """Tokens of the reasoning among those that were sampled."""

    cost: float = 0.0
    """The price that they charge for all turns together."""

    models: Counter[str] = field(default_factory=Counter)
    """How many turns each version of a model answered."""

    def add(self, usage: Usage) -> None:
        """Count a turn."""
        self.prompt += usage.prompt_tokens or 0
        self.completion += usage.completion_tokens or 0
        self.cached += usage.cached_tokens or 0
        self.reasoning += usage.reasoning_tokens or 0
        self.cost += usage.cost or 0.0
        self.models[usage.model] += 1

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"models": dict(self.models)}


@dataclass(slots=True)
class Summary:
    """What came of a run."""

    group_size: int = 1
    """How many episodes of each task there are."""

    episodes: int = 0
    """Episodes that ended, in whatever way."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    """How many episodes ended in each way."""

    reward: Mean = field(default_factory=Mean)
    """The reward over the episodes that have one: of `main`, or where that is not trained, of the first agent that
    is."""

    agents: dict[str, Mean] = field(default_factory=dict)
    """The reward of each trained agent by its name, over its trajectories that have one."""

    rewards: dict[str, Mean] = field(default_factory=dict)
    """Each reward of the agent behind `reward` by its name, before weighting."""

    metrics: dict[str, Mean] = field(default_factory=dict)
    """Each metric by its name, over the episodes where it could be told."""

    tokens: TokenCounts = field(default_factory=TokenCounts)
    """The ids of all agents."""

    usage: UsageCounts = field(default_factory=UsageCounts)
    """The usage of all agents' turns, as servers of messages say it."""

    throttled: int = 0
    """How often servers said that they were asked too much, by runs of this file that are over."""

    resent: int = 0
    """The number of requests that were sent to servers again, by runs of this file that are over."""

    junctions: Counter[tuple[Result, Anchor, Close, Seam]] = field(default_factory=Counter)
    """How often each (result, anchor, close, seam) of a junction came."""

    junction_causes: Counter[str] = field(default_factory=Counter)
    """Why some messages were not simply appended, and how often."""

    finishes: Counter[FinishReason] = field(default_factory=Counter)
    """How many turns finished for each reason."""

    calls: int = 0
    """The tool calls of all agents."""

    malformed_calls: int = 0
    """Calls that were begun and could not be read: of many, the model writes otherwise than its template."""

    requests: Counter[str] = field(default_factory=Counter)
    """The number of `Episode.chat` requests, by what each was found to be."""

    tolerated: Counter[str] = field(default_factory=Counter)
    """The number of these, by each difference that was tolerated."""

    times: Timings = field(default_factory=Timings)
    """Where the time of all turns together went."""

    turns: int = 0
    """The turns of all agents."""

    retried: int = 0
    """Attempts that were played again after an engine's failure."""

    stale: int = 0
    """Attempts that were dropped since the weights behind them were too old."""

    resampled: int = 0
    """Ids that were sampled and then dropped, since the engine cut their turn for its trainer."""

    recalled_tokens: int = 0
    """Sampled ids among `tokens` that earlier runs of the same file sampled."""

    faults: deque[str] = field(default_factory=lambda: deque(maxlen=100))
    """What went wrong without changing an outcome: the latest of it."""

    solved: Counter[tuple[int, int]] = field(default_factory=Counter)
    """The number of groups by (how many episodes each had, how many of them were solved), for pass@k."""

    seconds: float = 0.0
    """How long the run played, once it is over; `elapsed` also tells before."""

    _began: float = 0.0
    _open: dict[tuple[str, int], list[bool]] = field(default_factory=dict)

    def start(self) -> None:
        """The run begins to play."""
        self._began = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the run began to play."""
        return self.seconds or (time.monotonic() - self._began if self._began else 0.0)

    def stop(self) -> None:
        """The run is over."""
        self.seconds = time.monotonic() - self._began

    @property
    def tokens_per_second(self) -> float | None:
        """Ids, or tokens that servers counted, a second, without those of earlier runs of its file.

        None before it plays.
        """
        sampled = self.tokens.sampled + self.usage.completion
        return (sampled - self.recalled_tokens) / self.elapsed if self.elapsed else None

    @property
    def failed(self) -> int:
        """Episodes whose outcome is a failure, of whatever kind."""
        return sum(count for outcome, count in self.outcomes.items() if outcome.failed)

    @property
    def cut_short(self) -> int:
        """Episodes that the next run of the same configuration plays again."""
        return sum(count for outcome, count in self.outcomes.items() if outcome.cut_short)

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Count an episode: the trajectories of its agents."""
        first = trajectories[0]
        self.episodes += 1
        self.outcomes[first.outcome] += 1
        for name, value in first.metrics.items():
            self.metrics.setdefault(name, Mean()).add(value)
        for trajectory in trajectories:
            for turn in trajectory.turns:
                self._add_turn(turn)
            for request in trajectory.requests:
                self.requests[request.verdict.value] += 1
                self.tolerated.update(each.value for each in request.tolerated)

    def recall(self, trajectories: Sequence[Trajectory], *, final: bool) -> None:
        """Count an episode that an earlier run of the same file finished; its rewards only where they are final."""
        self.add(trajectories)
        if final:
            self.add_rewards(trajectories)
        self.recalled_tokens += sum(turn.tokens for trajectory in trajectories for turn in trajectory.turns)

    def add_rewards(self, trajectories: Sequence[Trajectory]) -> None:
        """Count the rewards of an episode, once they are final."""
        for trajectory in trajectories:
            if trajectory.trained and trajectory.turns:
                self.agents.setdefault(trajectory.agent, Mean()).add(trajectory.reward)
        self._add_reward(next((t for t in trajectories if t.trained), trajectories[0]))

    def _add_reward(self, trajectory: Trajectory) -> None:
        self.reward.add(trajectory.reward)
        for name, value in trajectory.rewards.items():
            if value is not None:
                self.rewards.setdefault(name, Mean()).add(value)
        # What is solved is told of whole groups only: of half of one, pass@k would be biased.
        group = self._open.setdefault((trajectory.task.id, trajectory.visit), [])
        group.append(trajectory.reward is not None and trajectory.reward >= SOLVED)
        if len(group) == self.group_size:
            self.solved[len(group), sum(group)] += 1
            del self._open[trajectory.task.id, trajectory.visit]

    def pass_at(self, k: int) -> float | None:
        """The chance that one of k episodes of a task is solved, unbiased (Chen et al. 2021), or None without groups.

        An episode is solved with a reward of at least 1; a failed one is not.
        """
        groups = sum(count for (n, _), count in self.solved.items() if n >= k)
        if not groups:
            return None
        missed = sum(count * math.comb(n - c, k) / math.comb(n, k) for (n, c), count in self.solved.items() if n >= k)
        return 1 - missed / groups

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        scored = sum(count for outcome, count in self.outcomes.items() if outcome.scored)
        return {
            "episodes": self.episodes,
            "scored": scored,
            "failed": self.failed,
            "outcomes": {outcome.value: count for outcome, count in sorted(self.outcomes.items())},
            "reward": self.reward.as_dict(),
            "agents": {agent: mean.as_dict() for agent, mean in self.agents.items()},
            "rewards": {name: mean.as_dict() for name, mean in self.rewards.items()},
            "metrics": {name: mean.as_dict() for name, mean in self.metrics.items()},
            "pass_at": {str(k): self.pass_at(k) for k in (1 << power for power in range(self.group_size.bit_length()))},
            "turns": self.turns,
            "finishes": {finish.value: count for finish, count in sorted(self.finishes.items())},
            "calls": self.calls,
            "malformed_calls": self.malformed_calls,
            "requests": dict(sorted(self.requests.items())),
            "tolerated": dict(sorted(self.tolerated.items())),
            "tokens": asdict(self.tokens),
            "usage": self.usage.as_dict(),
            "throttled": self.throttled,
            "resent": self.resent,
            "junctions": {"/".join(key): count for key, count in sorted(self.junctions.items())},
            "junction_causes": dict(sorted(self.junction_causes.items())),
            "seconds": self.elapsed,
            "times": asdict(self.times),
            "tokens_per_second": self.tokens_per_second,
            "retried": self.retried,
            "stale": self.stale,
            "resampled": self.resampled,
            "faults": list(self.faults),
        }

    def _add_turn(self, turn: Turn) -> None:
        self.turns += 1
        self.finishes[turn.finish] += 1
        self.tokens.prompt += turn.start
        self.tokens.cached += turn.cached_tokens or 0
        self.tokens.sampled += turn.end - turn.start
        if turn.usage is not None:
            self.usage.add(turn.usage)
        self.resampled += turn.resampled
        self.calls += len(turn.tool_calls)
        self.malformed_calls += sum(call.error is not None for call in turn.tool_calls)
        self.times.add(turn.timings)
        junction = turn.junction
        if junction is not None:
            self.tokens.bridged += junction.inserted
            if junction.cause:
                self.junction_causes[junction.cause] += 1
            self.junctions[junction.result, junction.anchor, junction.close, junction.seam] += 1
