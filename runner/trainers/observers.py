"""Observers that send a run to OpenTelemetry, trackio or Weights & Biases. Each needs an extra of deltarunner."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from runner.interop.packages import optional_package
from runner.runs.observers import RunObserver
from runner.runs.summary import Summary
from runner.trajectory import Group, Trajectory

__all__ = ["OpenTelemetryObserver", "TrackioObserver", "WandbObserver"]


class OpenTelemetryObserver(RunObserver):
    """An observer that sends a span for each trajectory and each turn, and counts episodes, tokens and rewards.

    The start of a turn's span is computed from the durations of earlier turns, since a run does not record the times
    of turns. Names follow OpenTelemetry's conventions for generative AI (`gen_ai.usage.output_tokens`).

    Args:
        tracer_provider: the provider that receives spans; None for the global provider.
        meter_provider: the provider that receives metrics; None for the global provider.

    Raises:
        BadEnvironment: opentelemetry-api is not installed.
    """

    def __init__(self, tracer_provider: Any = None, meter_provider: Any = None) -> None:
        trace = optional_package("opentelemetry.trace", extra="opentelemetry", package="opentelemetry-api")
        metrics = optional_package("opentelemetry.metrics", extra="opentelemetry", package="opentelemetry-api")
        self._in_span = trace.set_span_in_context
        self._tracer = trace.get_tracer("deltarunner", tracer_provider=tracer_provider)
        meter = metrics.get_meter("deltarunner", meter_provider=meter_provider)
        self._episodes = meter.create_counter("deltarunner.episodes", description="Ended episodes, by outcome.")
        self._tokens = meter.create_counter("deltarunner.tokens", unit="{token}", description="Sampled ids.")
        self._rewards = meter.create_histogram("deltarunner.reward", description="Rewards of trained agents.")
        self._updates = meter.create_counter("deltarunner.weight_updates", description="Updates of the weights.")
        self._run: dict[str, Any] = {}

    def started(self, about: Mapping[str, Any]) -> None:
        self._run = {f"deltarunner.{name}": value for name, value in about.items() if value is not None}

    def episode(self, trajectories: Sequence[Trajectory]) -> None:
        now = time.time()
        self._episodes.add(1, {"outcome": trajectories[0].outcome.value})
        for trajectory in trajectories:
            start = now - trajectory.seconds
            about = {"episode": trajectory.id, "agent": trajectory.agent, "outcome": trajectory.outcome.value}
            given = {**self._run, **{f"deltarunner.{name}": value for name, value in about.items()}}
            span = self._tracer.start_span("episode", attributes=given, start_time=_nanoseconds(start))
            if trajectory.reward is not None:
                span.set_attribute("deltarunner.reward", trajectory.reward)
                self._rewards.record(trajectory.reward, {"agent": trajectory.agent})
            for turn in trajectory.turns:
                times = turn.timings
                ended = start + times.queued + times.first_token + times.decode
                counts = {"gen_ai.usage.input_tokens": turn.prompt_tokens, "gen_ai.usage.output_tokens": turn.tokens}
                names = {"gen_ai.operation.name": "chat", "gen_ai.response.finish_reasons": [turn.finish.value]}
                inside = self._in_span(span)
                call = self._tracer.start_span(
                    "chat", inside, attributes=counts | names, start_time=_nanoseconds(start)
                )
                call.end(_nanoseconds(ended))
                self._tokens.add(turn.tokens, {"agent": turn.agent})
                start = ended + times.environment
            span.end(_nanoseconds(now))

    def weights(self, version: str) -> None:
        self._updates.add(1)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)  # OpenTelemetry measures times in nanoseconds


class _Logged(RunObserver):
    """Base class of observers for libraries that log numbers by name."""

    def __init__(self) -> None:
        self._episodes = 0
        self._updates = 0
        self._outcomes: Counter[str] = Counter()

    def episode(self, trajectories: Sequence[Trajectory]) -> None:
        self._episodes += 1
        self._outcomes[trajectories[0].outcome.value] += 1

    def weights(self, version: str) -> None:
        self._updates += 1

    def numbers(self, group: Group) -> dict[str, float]:
        """Return the numbers of a group by name, and counts of the run so far.

        The numbers of the group are means: of rewards, of metrics, of seconds, and of the numbers of turns and of
        sampled ids ("tokens").
        """
        agent = "" if group.agent == "main" else f"{group.agent}/"
        columns: dict[str, list[float]] = {}
        for each in group.trajectories:
            values: dict[str, float | None] = {"reward": each.reward, "turns": len(each.turns), "seconds": each.seconds}
            values["tokens"] = sum(turn.tokens for turn in each.turns)
            values |= {f"rewards/{name}": value for name, value in each.rewards.items()}
            values |= {f"metrics/{name}": value for name, value in each.metrics.items()}
            for name, value in values.items():
                if value is not None:
                    columns.setdefault(agent + name, []).append(float(value))
        counts = {f"outcomes/{name}": float(count) for name, count in self._outcomes.items()}
        means = {name: fmean(column) for name, column in columns.items()}
        return {**means, **counts, "episodes": self._episodes, "weight_updates": self._updates}


class TrackioObserver(_Logged):
    """An observer that logs the means of each group to trackio, which stores them on this machine.

    Args:
        project: the name of the project.
        options: further arguments of `trackio.init`, such as `name=`.

    Raises:
        BadEnvironment: trackio is not installed.
    """

    def __init__(self, project: str = "deltarunner", **options: Any) -> None:
        super().__init__()
        self._trackio = optional_package("trackio", extra="trackio")
        self._options = {"project": project, **options}
        self._run: Any = None

    def started(self, about: Mapping[str, Any]) -> None:
        self._run = self._trackio.init(**{"config": dict(about), "embed": False, **self._options})

    def group(self, group: Group) -> None:
        if self._run is not None:  # the error of a failed start is already in the summary
            self._run.log(self.numbers(group))

    def ended(self, summary: Summary) -> None:
        if self._run is not None:
            self._run.finish()


class WandbObserver(_Logged):
    """An observer that logs the means of each group to Weights & Biases, and the summary at the end of the run.

    Args:
        options: arguments of `wandb.init`, such as `project=` and `mode="offline"`.

    Raises:
        BadEnvironment: wandb is not installed.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._wandb = optional_package("wandb", extra="wandb")
        self._options = {"project": "deltarunner", **options}
        self._run: Any = None

    def started(self, about: Mapping[str, Any]) -> None:
        self._run = self._wandb.init(**{"config": dict(about), **self._options})

    def group(self, group: Group) -> None:
        if self._run is not None:  # the error of a failed start is already in the summary
            self._run.log(self.numbers(group))

    def ended(self, summary: Summary) -> None:
        if self._run is None:
            return
        given = summary.as_dict()
        self._run.summary.update({name: given[name] for name in ("episodes", "outcomes", "turns", "flat", "faults")})
        self._run.finish()
