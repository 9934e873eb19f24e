"""The summary of a run, in constant memory for any number of episodes."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from runner.engines.base import FinishReason
from runner.engines.message_engine import Usage
from runner.estimates import MIN_SOLVED_REWARD, Mean, pass_all_k, pass_at_k
from runner.notebook import summary_html
from runner.tokens.junction import Anchor, Close, Result, Seam
from runner.trajectory import Outcome, Timings, Trajectory, Turn

__all__ = ["Summary", "TokenCounts", "UsageCounts"]

MAX_RETRY_CAUSES = 20
"""Maximum number of causes of retries that are counted separately."""


@dataclass(slots=True)
class TokenCounts:
    """Token counts over all turns."""

    prompt: int = 0
    """Prompt ids, counting the whole prompt of every turn."""

    cached: int = 0
    """Prompt ids found in the engine's prefix cache, if the engine reports them."""

    sampled: int = 0
    """Sampled ids."""

    bridged: int = 0
    """Ids inserted between two turns of the model."""


@dataclass(slots=True)
class UsageCounts:
    """Token usage as message servers report it."""

    prompt: int = 0
    """Tokens of the prompts."""

    completion: int = 0
    """Sampled tokens."""

    cached: int = 0
    """Cached prompt tokens."""

    reasoning: int = 0
    """Sampled tokens of the reasoning."""

    cost: float = 0.0
    """The total price of all turns."""

    models: Counter[str] = field(default_factory=Counter)
    """The number of turns by model version."""

    def add(self, usage: Usage) -> None:
        """Add the usage of a turn."""
        self.prompt += usage.prompt_tokens or 0
        self.completion += usage.completion_tokens or 0
        self.cached += usage.cached_tokens or 0
        self.reasoning += usage.reasoning_tokens or 0
        self.cost += usage.cost or 0.0
        self.models[usage.model] += 1

    def as_dict(self) -> dict[str, Any]:
        """The counts as a dict for JSON."""
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"models": dict(self.models)}


@dataclass(slots=True)
class Summary:
    """The results of a run in numbers."""

    group_size: int = 1
    """The number of episodes of each task."""

    episodes: int = 0
    """The number of ended episodes, with any outcome."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    """The number of episodes by outcome."""

    reward: Mean = field(default_factory=Mean)
    """The mean reward of the first trained agent, or of the first agent if none is trained, over the episodes with a
    reward."""

    agents: dict[str, Mean] = field(default_factory=dict)
    """The mean reward of each trained agent by its name, over its trajectories with a reward."""

    rewards: dict[str, Mean] = field(default_factory=dict)
    """The mean rewards by name, before weighting, of the same agents as `reward`."""

    environments: dict[str, Mean] = field(default_factory=dict)
    """The mean reward of each environment of a mixture, by its name; empty for other environments."""

    metrics: dict[str, Mean] = field(default_factory=dict)
    """The mean of each metric by name, over the episodes that have a value."""

    tokens: TokenCounts = field(default_factory=TokenCounts)
    """The token counts of all agents."""

    usage: UsageCounts = field(default_factory=UsageCounts)
    """The usage of all agents' turns, as message servers report it."""

    throttled: int = 0
    """The number of requests that servers rejected because of rate limits, once the run is over."""

    resent: int = 0
    """The number of requests that were sent to servers again, once the run is over."""

    junctions: Counter[tuple[Result, Anchor, Close, Seam]] = field(default_factory=Counter)
    """The number of junctions by (result, anchor, close, seam)."""

    junction_causes: Counter[str] = field(default_factory=Counter)
    """The number of junctions whose messages were not simply appended, by cause."""

    finishes: Counter[FinishReason] = field(default_factory=Counter)
    """The number of turns by finish reason."""

    calls: int = 0
    """The number of tool calls of all agents."""

    malformed_calls: int = 0
    """The number of tool calls that could not be parsed; many of them indicate a wrong chat template."""

    failed_calls: int = 0
    """The number of calls that were answered with an error: wrong arguments, no such tool, `ToolError`, or too slow."""

    requests: Counter[str] = field(default_factory=Counter)
    """The number of `Episode.chat` requests by verdict."""

    tolerated: Counter[str] = field(default_factory=Counter)
    """The number of `Episode.chat` requests by tolerated difference."""

    times: Timings = field(default_factory=Timings)
    """The total times of all turns, by phase."""

    turns: int = 0
    """The number of turns of all agents."""

    episode_turns: Counter[int] = field(default_factory=Counter)
    """The number of episodes by the turns of their first agent."""

    recalled_turns: int = 0
    """The number of turns of the first agents of episodes that earlier runs of the file finished."""

    retried: int = 0
    """The number of attempts that were repeated after an engine failure."""

    retry_causes: Counter[str] = field(default_factory=Counter)
    """The number of the attempts in `retried` by the cause of the failure, or by "another cause" after 20 causes."""

    stale: int = 0
    """The number of attempts that were dropped because their weights were too old."""

    flat: int = 0
    """The number of groups that `groups(full=)` left out, since their rewards were equal."""

    resampled: int = 0
    """The number of sampled ids that were dropped because the engine cut their turn for its trainer."""

    recalled_tokens: int = 0
    """The number of sampled ids among `tokens` that earlier runs of the same file sampled."""

    faults: deque[str] = field(default_factory=lambda: deque(maxlen=100))
    """The latest faults that changed no outcome."""

    solved: Counter[tuple[int, int]] = field(default_factory=Counter)
    """The number of groups by (episodes, solved episodes), for pass@k."""

    seconds: float = 0.0
    """The duration of the run, set when it is over. `elapsed` has the time during the run too."""

    repeats_tasks: bool = False
    """True if the task source may repeat a task."""

    _began: float = 0.0
    _open: dict[tuple[str, int], list[bool]] = field(default_factory=dict)
    _played: Counter[tuple[str, int]] = field(default_factory=Counter)

    def start(self) -> None:
        """Mark the beginning of the run."""
        self._began = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the run began to play."""
        return self.seconds or (time.monotonic() - self._began if self._began else 0.0)

    def stop(self) -> None:
        """Mark the end of the run."""
        self.seconds = time.monotonic() - self._began

    @property
    def tokens_per_second(self) -> float | None:
        """Sampled ids, or tokens counted by servers, per second, without earlier runs of the file.

        None before the run plays.
        """
        sampled = self.tokens.sampled + self.usage.completion
        return (sampled - self.recalled_tokens) / self.elapsed if self.elapsed else None

    @property
    def failed(self) -> int:
        """The number of failed episodes."""
        return sum(count for outcome, count in self.outcomes.items() if outcome.failed)

    @property
    def cut_short(self) -> int:
        """The number of episodes that the next run of the file repeats."""
        return sum(count for outcome, count in self.outcomes.items() if outcome.cut_short)

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Count an episode, by the trajectories of its agents."""
        first = trajectories[0]
        self.episodes += 1
        self.outcomes[first.outcome] += 1
        self.episode_turns[len(first.turns)] += 1
        for name, value in first.metrics.items():
            self.metrics.setdefault(name, Mean()).add(value, first.task.id)
        self._close_metrics(first)
        for trajectory in trajectories:
            for turn in trajectory.turns:
                self._add_turn(turn)
            for request in trajectory.requests:
                self.requests[request.verdict.value] += 1
                self.tolerated.update(each.value for each in request.tolerated)

    def add_retry_cause(self, cause: str) -> None:
        """Count the cause of a repeated attempt."""
        known = cause in self.retry_causes or len(self.retry_causes) < MAX_RETRY_CAUSES
        self.retry_causes[cause if known else "another cause"] += 1

    def recall(self, trajectories: Sequence[Trajectory], *, final: bool) -> None:
        """Count an episode that an earlier run of the same file finished.

        Its rewards are counted only if they are final.
        """
        self.add(trajectories)
        self.recalled_turns += len(trajectories[0].turns)
        if final:
            self.add_rewards(trajectories)
        self.recalled_tokens += sum(turn.tokens for trajectory in trajectories for turn in trajectory.turns)

    def add_rewards(self, trajectories: Sequence[Trajectory]) -> None:
        """Count the final rewards of an episode. A cancelled episode has no rewards, and does not complete a group."""
        if trajectories[0].outcome is Outcome.CANCELLED:
            return
        for trajectory in trajectories:
            if trajectory.trained and trajectory.turns:
                self.agents.setdefault(trajectory.agent, Mean()).add(trajectory.reward, trajectory.task.id)
        self._add_reward(next((t for t in trajectories if t.trained), trajectories[0]))

    def _add_reward(self, trajectory: Trajectory) -> None:
        task = trajectory.task.id
        self.reward.add(trajectory.reward, task)
        part = task.partition("/")[0]
        if part in self.environments:
            self.environments[part].add(trajectory.reward, task)
        for name, value in trajectory.rewards.items():
            if value is not None:
                self.rewards.setdefault(name, Mean()).add(value, task)
        # Only whole groups count, since an incomplete group would bias pass@k.
        group = self._open.setdefault((task, trajectory.visit), [])
        group.append(trajectory.reward is not None and trajectory.reward >= MIN_SOLVED_REWARD)
        if len(group) == self.group_size:
            self.solved[len(group), sum(group)] += 1
            del self._open[task, trajectory.visit]
            self._close(task, (self.reward, *self.agents.values(), *self.environments.values(), *self.rewards.values()))

    def _close_metrics(self, trajectory: Trajectory) -> None:
        visit = trajectory.task.id, trajectory.visit
        self._played[visit] += 1
        if self._played[visit] == self.group_size:
            del self._played[visit]
            self._close(trajectory.task.id, self.metrics.values())

    def _close(self, task: str, means: Iterable[Mean]) -> None:
        # Closing the mean of a task frees memory. Tasks that may repeat stay open.
        if not self.repeats_tasks:
            for mean in means:
                mean.close(task)

    def pass_at(self, k: int) -> float | None:
        """Return the unbiased estimate of pass@k (Chen et al. 2021), or None without groups.

        An episode is solved with a reward of at least 1; a failed one is not.
        """
        return pass_at_k(self.solved, k)

    def pass_all(self, k: int) -> float | None:
        """Return the unbiased estimate of pass^k: all of k episodes are solved. None without groups."""
        return pass_all_k(self.solved, k)

    def _repr_html_(self) -> str:
        return summary_html(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """The summary as a dict for JSON."""
        powers = [1 << power for power in range(self.group_size.bit_length())]
        scored = sum(count for outcome, count in self.outcomes.items() if outcome.scored)
        return {
            "episodes": self.episodes,
            "scored": scored,
            "failed": self.failed,
            "outcomes": {outcome.value: count for outcome, count in sorted(self.outcomes.items())},
            "reward": self.reward.as_dict(),
            "agents": {agent: mean.as_dict() for agent, mean in self.agents.items()},
            "environments": {name: mean.as_dict() for name, mean in self.environments.items()},
            "rewards": {name: mean.as_dict() for name, mean in self.rewards.items()},
            "metrics": {name: mean.as_dict() for name, mean in self.metrics.items()},
            "pass_at": {str(k): self.pass_at(k) for k in powers},
            "pass_all": {str(k): self.pass_all(k) for k in powers},
            "turns": self.turns,
            "finishes": {finish.value: count for finish, count in sorted(self.finishes.items())},
            "calls": self.calls,
            "malformed_calls": self.malformed_calls,
            "failed_calls": self.failed_calls,
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
            "retry_causes": dict(self.retry_causes.most_common()),
            "stale": self.stale,
            "flat": self.flat,
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
        for call in turn.tool_calls:
            self.calls += 1
            self.malformed_calls += call.error is not None
            self.failed_calls += call.failed
        self.times.add(turn.timings)
        junction = turn.junction
        if junction is not None:
            self.tokens.bridged += junction.inserted
            if junction.cause:
                self.junction_causes[junction.cause] += 1
            self.junctions[junction.result, junction.anchor, junction.close, junction.seam] += 1
